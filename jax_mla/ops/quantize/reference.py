"""What quantisation means."""

import jax.numpy as jnp

from jax_mla.fp8 import to_bits


def reference(x, *, fp8, block, scale, amax_floor):
    x = x.astype(jnp.float32)
    blocks = x.reshape(1, 1, -1) if block is None else x.reshape(x.shape[0], -1, block)
    amax = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1), amax_floor)
    s = amax / fp8.max
    if scale == "ue8m0":
        s = jnp.exp2(jnp.ceil(jnp.log2(jnp.maximum(s, 2.0**-126))))
    y = jnp.clip(blocks / jnp.where(s > 0, s, 1)[..., None], -fp8.max, fp8.max).astype(fp8.dtype)
    return to_bits(y).reshape(x.shape), s
