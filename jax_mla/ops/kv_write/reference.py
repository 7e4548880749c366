"""What a KV write means, one token after the other."""

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla.fp8 import to_bits
from jax_mla.ops.quantize.reference import cast_reference


def _bytes(x):
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)


def _row(k_nope, k_rope, layout, kv_scale):
    if layout.name == "bf16":
        return jnp.concatenate([k_nope, k_rope]).astype(jnp.bfloat16)
    if layout.name == "fp8_576":
        x = jnp.concatenate([k_nope, k_rope]).astype(jnp.float32) / kv_scale
        return to_bits(cast_reference(x, layout.fp8))
    tiles = k_nope.astype(jnp.float32).reshape(4, 128)
    scale = jnp.max(jnp.abs(tiles), axis=1) / layout.fp8.max
    codes = cast_reference(tiles / jnp.where(scale > 0, scale, 1)[:, None], layout.fp8)
    return jnp.concatenate([_bytes(codes), _bytes(scale), _bytes(k_rope.astype(jnp.bfloat16))])


def reference(pool, slots, k_nope, k_rope, kv_scale, *, layout):
    def write(t, pool):
        row = _row(k_nope[t], k_rope[t], layout, kv_scale)
        slot = slots[t]
        written = (slot > 0) & (slot < pool.shape[0])
        at = jnp.where(written, slot, 0)
        return pool.at[at].set(jnp.where(written, row, pool[at]))

    return jax.lax.fori_loop(0, slots.shape[0], write, pool)
