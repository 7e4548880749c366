"""FP8 quantisation by blocks of 128, or by one scale for the whole tensor."""

from typing import Literal

from jax import Array
from jaxtyping import Float, Float32, UInt8

from jax_mla.fp8 import Fp8Format
from jax_mla.layouts import BLOCK
from jax_mla.ops import base
from jax_mla.ops.quantize.config import Config
from jax_mla.ops.quantize.kernel import pallas, xla
from jax_mla.ops.quantize.reference import reference

IMPLEMENTATIONS = {"xla": xla, "pallas": pallas, "reference": reference}


@base.typed
def quantize(
    x: Float[Array, "R N"],
    *,
    fp8: Fp8Format,
    block: Literal[128] | None = BLOCK,
    scale: Literal["fp32", "ue8m0"] = "fp32",
    amax_floor: float = 0.0,
    implementation: base.Implementation = None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[UInt8[Array, "R N"], Float32[Array, "S G"]]:
    r"""Rounds ``x`` to 8-bit floats that share a scale.

    $$s_b = \mathrm{scale}\big(\max(\max_{i \in b} |x_i|,\ \mathrm{floor}) / \mathrm{max}\big), \qquad
      y_i = \mathrm{fp8}(x_i / s_b)$$

    - `x`: bf16 or f32 ``[R, N]``.
    - `fp8`: ``E4M3FN`` (max 448) or ``E4M3FNUZ`` (max 240).
    - `block`: 128: one scale for each run of 128 in a row (``N`` a multiple of 128); None: one for all of ``x``.
    - `scale`: "fp32", or "ue8m0": rounded up to a power of two.
    - `amax_floor`: the least magnitude a block is given; the indexer's is 1e-4, the KV cache's 0.

    Returns uint8 codes ``[R, N]`` and float32 scales ``[R, N / 128]``, or ``[1, 1]`` for one in all; ``y * s`` reads
    back. A block of zeros reads back as 0, a NaN as NaN.

    Raises ``jaxtyping.TypeCheckError`` for wrong shapes and dtypes, ``ValueError`` for an ``N`` that is no
    multiple of ``block``.

    Source: DeepSeek-V3.2 ``inference/kernel.py::act_quant``; the KV rule is FlashMLA's ``quantize_k_cache``.
    """
    base.refuse_unless(block is None or x.shape[1] % BLOCK == 0, "quantize", "x", "[R, N] with N % 128 == 0", x.shape)
    return base.run(
        "quantize",
        IMPLEMENTATIONS,
        implementation,
        interpret,
        lambda: Config.of(x.shape[0]),
        config,
        (x,),
        dict(fp8=fp8, block=block, scale=scale, amax_floor=amax_floor),
    )
