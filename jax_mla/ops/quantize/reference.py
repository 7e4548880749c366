"""What quantisation means."""

import jax.numpy as jnp

from jax_mla.fp8 import E4M3FNUZ, from_bits, to_bits


def power_of_two_reference(x):
    """The smallest power of two not under ``x``, exactly: a logarithm in float32 rounds its last bits away."""
    mantissa, exponent = jnp.frexp(x)  # 0.5 <= mantissa < 1
    power = jnp.ldexp(jnp.ones_like(x), jnp.where(mantissa == 0.5, exponent - 1, exponent))
    return jnp.where(jnp.isfinite(x), power, x)


def cast_reference(x, fp8):
    """``x`` (float32) as the nearest numbers of ``fp8``, saturating.

    XLA's own cast to e4m3fnuz, on a CPU and inside a loop, makes a NaN of a negative number that rounds to zero.
    """
    y = jnp.clip(x, -fp8.max, fp8.max).astype(fp8.dtype)
    if fp8 != E4M3FNUZ:
        return y
    return from_bits(jnp.where((to_bits(y) == 0x80) & (x == x), 0, to_bits(y)).astype(jnp.uint8), fp8)


def reference(x, *, fp8, block, scale, amax_floor):
    x = x.astype(jnp.float32)
    blocks = x.reshape(1, 1, -1) if block is None else x.reshape(x.shape[0], -1, block)
    amax = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1), amax_floor)
    s = amax / fp8.max
    if scale == "ue8m0":
        s = power_of_two_reference(jnp.maximum(s, 2.0**-126))
    y = cast_reference(blocks / jnp.where(s > 0, s, 1)[..., None], fp8)
    return to_bits(y).reshape(x.shape), s
