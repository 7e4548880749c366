"""What an index-K write means, one token after the other."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_mla.fp8 import to_bits
from jax_mla.ops.index_query.reference import hadamard_reference, quantize_reference, rope_reference


def layer_norm_reference(k, weight, bias, eps):
    k = k.astype(jnp.float32)
    centred = k - jnp.mean(k, axis=-1, keepdims=True)
    normal = centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + eps)
    return normal * weight.astype(jnp.float32) + bias.astype(jnp.float32)


def _key_byte(layout, token, column):
    """Where the byte of ``column`` of ``token`` lies in its page, written as the loop nest that lays the page out."""
    page = np.empty((layout.page_size, 128), np.int32)
    byte = 0
    tile = 16 if layout.preshuffle else layout.page_size
    width = 16 if layout.preshuffle else 128
    for token_tile in range(0, layout.page_size, tile):
        for column_tile in range(0, 128, width):
            for i in range(tile):
                for c in range(width):
                    page[token_tile + i, column_tile + c] = byte
                    byte += 1
    return jnp.asarray(page)[token, column]


def reference(pool, slots, k, norm_weight, norm_bias, cos_sin, positions, *, layout, interleaved, hadamard, eps):
    y = rope_reference(layer_norm_reference(k, norm_weight, norm_bias, eps), cos_sin, positions, interleaved)
    k8, scale = quantize_reference(hadamard_reference(y) if hadamard else y, layout.fp8)

    def write(t, pool):
        page, token = slots[t] // layout.page_size, slots[t] % layout.page_size
        written = (slots[t] > 0) & (page < pool.shape[0])
        page = jnp.where(written, page, 0)
        for byte, new in (
            (_key_byte(layout, token, jnp.arange(128)), to_bits(k8[t])),
            (layout.page_size * 128 + 4 * token + jnp.arange(4), lax.bitcast_convert_type(scale[t, 0], jnp.uint8)),
        ):
            pool = pool.at[page, byte].set(jnp.where(written, new, pool[page, byte]))
        return pool

    return lax.fori_loop(0, slots.shape[0], write, pool)
