"""Writes tokens' keys into the lightning indexer's cache, in place."""

from jax import Array
from jaxtyping import Float, Float32, Int32, UInt8

from jax_mla.layouts import IndexLayout
from jax_mla.ops import base
from jax_mla.ops.index_write.config import Config
from jax_mla.ops.index_write.kernel import pack, pallas, xla
from jax_mla.ops.index_write.reference import reference

IMPLEMENTATIONS = {"xla": xla, "pallas": pallas, "reference": reference}


@base.typed
def index_write(
    pool: UInt8[Array, "pages page_bytes"],
    slots: Int32[Array, " T"],
    k: Float[Array, "T 128"],
    norm_weight: Float[Array, "128"],
    norm_bias: Float[Array, "128"],
    cos_sin: Float32[Array, "P 64"],
    positions: Int32[Array, " T"],
    *,
    layout: IndexLayout,
    interleaved: bool = False,
    hadamard: bool = False,
    eps: float = 1e-6,
    implementation: base.Implementation = None,
    config: Config | None = None,
    interpret: bool = False,
) -> UInt8[Array, "pages page_bytes"]:
    r"""Puts ``fp8(R LayerNorm(k[t]) / s)`` and ``s`` at slot ``slots[t]``, and changes nothing else in ``pool``.

    $$\mathrm{LayerNorm}(k) = \frac{k - \bar k}{\sqrt{\mathrm{var}(k) + \epsilon}}\, \gamma + \beta$$

    with $R$ the rotation of the first 64 columns by the angles of ``positions[t]``, then Hadamard's if asked for, and
    $s$ the ue8m0 scale of the 128 (amax floor 1e-4). All in float32 up to the one rounding to FP8.

    - `pool`: uint8 ``[pages, layout.page_bytes]``; a page holds ``page_size * 128`` key bytes, then ``page_size`` fp32
      scales (``jax_mla.layouts``). It is **donated**: outside ``jit`` the array passed in is deleted and the one
      returned is the same memory. (On a CPU, XLA copies a pool that another library owns; use ``index_pack`` there.)
    - `slots`: int32 ``[T]``, distinct; ``page * page_size + token``. ``slots[t] <= 0`` is skipped.
    - `k`: bf16 or f32 ``[T, 128]``, what ``wk`` gave. `norm_weight`, `norm_bias`: ``k_norm``'s γ and β ``[128]``.
    - `cos_sin`: float32 ``[P, 64]``, cosines then sines. `positions`: int32 ``[T]`` in ``[0, P)``.
    - `interleaved`: False is NeoX, DeepSeek-V3.2's; True pairs neighbours, GLM-5's.
    - `hadamard`: must be the same as for the queries, and for all that one cache holds.
    - `eps`: added to the variance; DeepSeek-V3.2 has 1e-6.

    Raises ``jaxtyping.TypeCheckError`` for wrong shapes and dtypes; ``ValueError`` for a pool that is not the layout's,
    and outside ``jit`` for a slot beyond the pool or a position outside of ``cos_sin``. Under ``jit`` such a slot is
    not written and such a position gives NaN.

    Source: DeepSeek-V3.2 ``inference/model.py::Indexer``; pages as SGLang 0.5.23 ``IndexKeyCache`` has them. Differs
    from both in not rounding to bf16 after each step.
    """
    layout.check_pool("index_write", pool)
    base.refuse_outside("index_write", "slots", slots, -(2**31), pool.shape[0] * layout.page_size, "the pool's slots")
    base.refuse_outside("index_write", "positions", positions, 0, cos_sin.shape[0], "the rows of cos_sin")
    return base.run(
        "index_write",
        IMPLEMENTATIONS,
        implementation,
        interpret,
        lambda: Config.of(slots.shape[0]),
        config,
        (pool, slots, k, norm_weight, norm_bias, cos_sin, positions),
        dict(layout=layout, interleaved=interleaved, hadamard=hadamard, eps=eps),
        donate=(0,),
    )


@base.typed
def index_pack(
    k: Float[Array, "T 128"],
    norm_weight: Float[Array, "128"],
    norm_bias: Float[Array, "128"],
    cos_sin: Float32[Array, "P 64"],
    positions: Int32[Array, " T"],
    *,
    layout: IndexLayout,
    interleaved: bool = False,
    hadamard: bool = False,
    eps: float = 1e-6,
) -> UInt8[Array, "T 132"]:
    """The bytes that ``index_write`` would write for each token: 128 of the key, then 4 of its fp32 scale.

    For a caller that puts them in place itself, at the offsets of ``layout.row_offsets``.
    """
    base.refuse_outside("index_pack", "positions", positions, 0, cos_sin.shape[0], "the rows of cos_sin")
    static = dict(fp8=layout.fp8, interleaved=interleaved, hadamard=hadamard, eps=eps)
    arrays = (k, norm_weight, norm_bias, cos_sin, positions)
    return base.run("index_pack", {"xla": pack}, "xla", False, Config, None, arrays, static)
