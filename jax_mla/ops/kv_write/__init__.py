"""Writes tokens into the MLA KV cache, in place."""

from jax import Array
from jaxtyping import Float, Int32, Shaped

from jax_mla.layouts import KVLayout
from jax_mla.ops import base
from jax_mla.ops.kv_write.config import Config
from jax_mla.ops.kv_write.kernel import pack, pallas, xla
from jax_mla.ops.kv_write.reference import reference

IMPLEMENTATIONS = {"xla": xla, "pallas": pallas, "reference": reference}


@base.typed
def kv_write(
    pool: Shaped[Array, "N row_elements"],
    slots: Int32[Array, " T"],
    k_nope: Float[Array, "T 512"],
    k_rope: Float[Array, "T 64"],
    *,
    layout: KVLayout,
    kv_scale: float | Float[Array, ""] = 1.0,
    implementation: base.Implementation = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Shaped[Array, "N row_elements"]:
    r"""``pool[slots[t]] = layout(k_nope[t], k_rope[t])``, and nothing else in ``pool`` changes.

    The latent is quantised by the layout's own rule (bytes: ``jax_mla.layouts``): fp8_656 for each 128 with
    $s = \mathrm{amax} / 448$ in fp32, not rounded, and 0 for a tile of zeros, which reads back as 0; fp8_576 as
    $\mathrm{fp8}(x / \mathrm{kv\_scale})$, saturating, the rope part too.

    - `pool`: ``[N, layout.row_elements]`` of ``layout.dtype``. It is **donated**: outside ``jit`` the array passed in
      is deleted and the one returned is the same memory. (On a CPU, XLA copies a pool that another library owns; use
      ``kv_pack`` there.)
    - `slots`: int32 ``[T]``, distinct. ``slots[t] <= 0`` is skipped: -1 means none, 0 is SGLang's dummy.
    - `k_nope`: bf16 or f32 ``[T, 512]``, the normalised latent. `k_rope`: ``[T, 64]``, after RoPE.
    - `layout`: ``KV_BF16``, ``KV_FP8_656`` or an fp8_576 layout.
    - `kv_scale`: float32, fp8_576 only: what one unit of a code is worth.

    Raises ``jaxtyping.TypeCheckError`` for wrong shapes and dtypes; ``ValueError`` for a pool that is not the layout's,
    a ``kv_scale`` that the layout has no place for, and outside ``jit`` a slot of ``N`` or more. Under ``jit`` such a
    row is not written.

    Source: SGLang 0.5.23 ``set_mla_kv_buffer`` and ``quantize_k_cache_separate``; FlashMLA's README for the 656 bytes.
    """
    layout.check_pool("kv_write", pool)
    layout.check_scale("kv_write", kv_scale)
    base.refuse_outside("kv_write", "slots", slots, -(2**31), pool.shape[0], "the pool's rows")
    return base.run(
        "kv_write",
        IMPLEMENTATIONS,
        implementation,
        interpret,
        lambda: Config.of(slots.shape[0]),
        config,
        (pool, slots, k_nope, k_rope, kv_scale),
        dict(layout=layout),
        donate=(0,),
    )


@base.typed
def kv_pack(
    k_nope: Float[Array, "T 512"],
    k_rope: Float[Array, "T 64"],
    *,
    layout: KVLayout,
    kv_scale: float | Float[Array, ""] = 1.0,
) -> Shaped[Array, "T row_elements"]:
    """The rows that ``kv_write`` would write, for a caller that puts them in place itself."""
    layout.check_scale("kv_pack", kv_scale)
    return base.run(
        "kv_pack", {"xla": pack}, "xla", False, Config, None, (k_nope, k_rope, kv_scale), dict(layout=layout)
    )
