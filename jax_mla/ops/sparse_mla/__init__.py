"""MLA attention over the selected slots of a KV pool."""

from jax import Array
from jaxtyping import Float, Float32, Int32, Shaped

from jax_mla.layouts import KVLayout
from jax_mla.ops import base
from jax_mla.ops.sparse_mla.config import Config
from jax_mla.ops.sparse_mla.kernel import pallas, xla
from jax_mla.ops.sparse_mla.reference import reference
from jax_mla.ops.sparse_mla.vjp import differentiable
from jax_mla.pallas_triton import target

IMPLEMENTATIONS = {name: differentiable(f) for name, f in dict(xla=xla, pallas=pallas, reference=reference).items()}


@base.typed
def sparse_mla(
    q_nope: Float[Array, "T H 512"],
    q_rope: Float[Array, "T H 64"],
    pool: Shaped[Array, "N row_elements"],
    slots: Int32[Array, "T K"],
    *,
    layout: KVLayout,
    softmax_scale: float,
    kv_scale: float | Float[Array, ""] = 1.0,
    implementation: base.Implementation = None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T H 512"], Float32[Array, "T H"]]:
    r"""Absorbed multi-query attention of each query over exactly the rows of ``pool`` that ``slots`` names.

    $$s_{t,h,j} = \sigma\,(q^{nope}_{t,h} \cdot c_j + q^{rope}_{t,h} \cdot r_j), \quad
      \mathrm{lse}_{t,h} = \ln \sum_j e^{s_{t,h,j}}, \quad
      \mathrm{out}_{t,h} = \sum_j e^{s_{t,h,j} - \mathrm{lse}_{t,h}}\, c_j$$

    with $j$ over the slots of row $t$ that are not < 0, $c_j$ the 512 latent and $r_j$ the 64 rope values read there.

    - `q_nope`: bf16 or f32 ``[T, H, 512]``, the query after absorption of ``W_UK``; `q_rope`: ``[T, H, 64]``, after
      RoPE. Any ``H`` from 1 to 128.
    - `pool`: ``[N, layout.row_elements]`` of ``layout.dtype``. Rows not named do not touch the result, whatever they
      hold.
    - `slots`: int32 ``[T, K]``; -1 means none and may stand anywhere in a row. A slot that stands twice counts twice.
    - `layout`: ``KV_BF16``, ``KV_FP8_656`` or an fp8_576 layout (bytes: ``jax_mla.layouts``).
    - `softmax_scale`: σ; DeepSeek-V3.2 has ``192^-0.5 * mscale^2`` = 0.1352.
    - `kv_scale`: float32, fp8_576 only: what one unit of a code is worth.

    A row's bits do not depend on other rows, but on ``config.splits``, which is picked from how many rows there are:
    give a ``config`` of your own where the same row must come out alike in batches of any size.

    Returns ``out`` of ``q_nope``'s dtype and float32 ``lse`` (natural logarithm). A row with no valid slot gives 0 and
    -inf.

    Differentiable in reverse mode, whichever implementation runs: by both queries and, of a bf16 pool, by the pool
    (``vjp.py``; a row that is not named gets 0, an empty row gives 0). FP8 codes have no gradient, ``kv_scale`` has. On
    a GPU the pool's gradient is added up by atomics: its last bits depend on the order.

    Raises ``jaxtyping.TypeCheckError`` for wrong shapes and dtypes; ``ValueError`` for an ``H`` over 128, queries of
    two dtypes, a pool that is not the layout's, a ``kv_scale`` that the layout has no place for, and outside ``jit``
    for a slot of ``N`` or more. Under ``jit`` such a slot counts as none.

    Source: DeepSeek-V3.2 ``inference/model.py::MLA`` (decode branch); FlashMLA ``flash_mla_with_kvcache`` for the
    fp8_656 pool, whose lse is to base 2. The kernel multiplies FP8 codes in float16, in which they are exact, a head's
    bf16 queries by a power of two; an fp8_656 tile's scale goes onto the products, in float32, where FlashMLA rounds
    code times scale to bf16. What a key adds is rounded to float16 on a scale that the largest contribution of all keys
    sets (weight times scale): 2^-28 of that and less is lost.
    """
    op = "sparse_mla"
    base.refuse_unless(1 <= q_nope.shape[1] <= 128, op, "q_nope", "1 to 128 heads", q_nope.shape[1])
    base.refuse_unless(q_nope.dtype in ("bfloat16", "float32"), op, "q_nope", "bfloat16 or float32", q_nope.dtype)
    base.refuse_unless(q_rope.dtype == q_nope.dtype, op, "q_rope", f"q_nope's dtype {q_nope.dtype}", q_rope.dtype)
    layout.check_pool(op, pool)
    layout.check_scale(op, kv_scale)
    base.refuse_outside(op, "slots", slots, -(2**31), pool.shape[0], "the pool's rows")
    return base.run(
        op,
        IMPLEMENTATIONS,
        implementation,
        interpret,
        lambda: Config.of(q_nope.shape[0], q_nope.shape[1], slots.shape[1], layout, target()),
        config,
        (q_nope, q_rope, pool, slots, kv_scale),
        dict(layout=layout, softmax_scale=softmax_scale),
    )
