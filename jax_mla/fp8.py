"""The two 8-bit float formats of the cards we serve on, and what turns numbers into them.

Codes travel as ``uint8`` wherever they lie in memory that somebody else owns, since the same byte means different
numbers on different cards:

========  ==================  =====  ===================  ==========
format    cards               max    value of byte 0x80   NaN bytes
========  ==================  =====  ===================  ==========
e4m3fn    NVIDIA, gfx950      448    -0                   0x7F, 0xFF
e4m3fnuz  gfx942              240    NaN                  0x80
========  ==================  =====  ===================  ==========

Every function here is plain elementwise ``jnp``, so it runs inside a Pallas kernel and outside of one alike. Pallas'
Triton lowering refuses each cast to or from e4m3fnuz; here such a cast goes through e4m3fn's bits, which for the same
byte are worth exactly twice as much.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
from jax import Array, lax


@dataclass(frozen=True)
class Fp8Format:
    """An 8-bit float format: its name, its dtype, and its largest finite number."""

    name: str
    dtype: type
    max: float

    def __str__(self) -> str:
        return self.name


E4M3FN = Fp8Format("e4m3fn", ml_dtypes.float8_e4m3fn, 448.0)
E4M3FNUZ = Fp8Format("e4m3fnuz", ml_dtypes.float8_e4m3fnuz, 240.0)
FORMATS = {f.name: f for f in (E4M3FN, E4M3FNUZ)}

AMAX_FLOOR = 1e-4
"""Floor of a block's largest magnitude in the indexer (DeepSeek-V3.2 ``inference/kernel.py::act_quant``)."""


def fp8_format(name: str) -> Fp8Format:
    """The format called ``name``; a ``ValueError`` that lists them if there is none."""
    if name not in FORMATS:
        raise ValueError(f"fp8: expected one of {sorted(FORMATS)}, got {name!r}")
    return FORMATS[name]


def format_of(dtype) -> Fp8Format:
    """The format whose dtype is ``dtype``."""
    for f in FORMATS.values():
        if jnp.dtype(dtype) == jnp.dtype(f.dtype):
            return f
    raise ValueError(f"fp8: expected an array of float8_e4m3fn or float8_e4m3fnuz, got {jnp.dtype(dtype).name}")


def to_bits(codes: Array) -> Array:
    """An fp8 array as the bytes it is made of (no copy under ``jit``)."""
    return lax.bitcast_convert_type(codes, jnp.uint8)


def from_bits(codes: Array, fp8: Fp8Format) -> Array:
    """Bytes as numbers of ``fp8`` (no copy under ``jit``)."""
    return lax.bitcast_convert_type(codes, fp8.dtype)


def encode(x: Array, fp8: Fp8Format) -> Array:
    """Bytes of the ``fp8`` numbers nearest to ``x`` (float32), ties to even, saturating at ``±fp8.max``.

    NaN becomes a NaN byte. Equal to ``ml_dtypes``' own cast bit for bit on all of ``[-max, max]``.
    """
    if fp8 == E4M3FN:
        y = jnp.clip(x, -fp8.max, fp8.max)
        return to_bits(y.astype(jnp.float8_e4m3fn))
    # 2x in e4m3fn has the byte of x in e4m3fnuz, except: 240 would need 480, which e4m3fn lacks; there is no -0; NaN.
    doubled = to_bits(jnp.clip(2.0 * x, -448.0, 448.0).astype(jnp.float8_e4m3fn)).astype(jnp.int32)
    sign = jnp.where(x < 0, 0x80, 0)
    codes = jnp.where(jnp.abs(x) > 232.0, sign | 0x7F, doubled)  # 232 lies midway between 224 and 240; the tie is even
    codes = jnp.where(codes == 0x80, 0, codes)
    codes = jnp.where(x == x, codes, 0x80)
    return codes.astype(jnp.uint8)


def decode(codes: Array, fp8: Fp8Format) -> Array:
    """The float32 values of ``codes`` (uint8). NaN bytes become NaN."""
    value = from_bits(codes, E4M3FN).astype(jnp.float32)
    if fp8 == E4M3FN:
        return value
    bits = codes.astype(jnp.int32)
    largest = jnp.where(bits >= 0x80, -240.0, 240.0)
    value = jnp.where((bits & 0x7F) == 0x7F, largest, 0.5 * value)
    return jnp.where(bits == 0x80, jnp.nan, value)


def fn_to_fnuz(codes: Array, scale: Array) -> tuple[Array, Array]:
    """e4m3fn ``codes`` (uint8) and their ``scale`` (float32), as a checkpoint holds them, for a card with e4m3fnuz.

    Nothing is rounded: the same byte is worth half as much there, so the byte stays and the scale doubles. What has
    another byte there: -0, which becomes 0, and NaN.
    """
    bits = codes.astype(jnp.int32)
    bits = jnp.where(bits == 0x80, 0, bits)
    bits = jnp.where((bits & 0x7F) == 0x7F, 0x80, bits)
    return bits.astype(jnp.uint8), 2.0 * scale


def decode_f16(codes: Array, fp8: Fp8Format) -> Array:
    """The float16 values, all exact, of ``codes`` (int32, 0 to 255). NaN bytes become NaN.

    Of e4m3fnuz by its bits: ``seeeemmm`` moved to where float16 has its sign, exponent and mantissa is worth 2^-7 of
    what it was, subnormal or not, since the two exponents' biases differ by 7.
    """
    if fp8 == E4M3FN:
        return from_bits(codes.astype(jnp.uint8), fp8).astype(jnp.float16)
    half = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    value = lax.bitcast_convert_type(half.astype(jnp.int16), jnp.float16) * jnp.float16(128.0)
    return jnp.where(codes == 0x80, jnp.float16(jnp.nan), value)


def block_scale(amax: Array, fp8: Fp8Format, scale: str) -> Array:
    """The float32 scale of blocks whose largest magnitude is ``amax`` (float32).

    ``"fp32"``: ``amax / max``. ``"ue8m0"``: the smallest power of two not under that, ``2^ceil(log2(amax / max))``,
    found on ``amax``' own bits so that it is the same on every card, whatever its division and logarithm do.
    """
    if scale == "fp32":
        return amax / jnp.float32(fp8.max)
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    # max = 1.75 * 2^8 (fn) or 1.875 * 2^7 (fnuz); amax = m * 2^e with 1 <= m < 2.
    mantissa_of_max, exponent_of_max = (0x600000, 8) if fp8 == E4M3FN else (0x700000, 7)
    exponent = (bits >> 23) - exponent_of_max + jnp.where((bits & 0x7FFFFF) > mantissa_of_max, 1, 0)
    power = lax.bitcast_convert_type(jnp.maximum(exponent, 1) << 23, jnp.float32)
    return jnp.where(amax < jnp.inf, power, amax)  # inf and NaN stay what they are


def quantize_block(x: Array, amax: Array, fp8: Fp8Format, scale: str) -> tuple[Array, Array]:
    """``(codes, scales)`` of ``x`` (float32) by its blocks' ``amax``, which broadcasts against ``x``.

    A block of zeros gets codes 0, also where its scale is 0 (``"fp32"`` without a floor): it reads back as 0, not NaN.
    """
    s = block_scale(amax, fp8, scale)
    return encode(x / jnp.where(s > 0, s, 1.0), fp8), s
