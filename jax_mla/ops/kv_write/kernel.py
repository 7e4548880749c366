"""The KV write by XLA, and as a Pallas kernel that quantises and writes in one pass."""

from functools import partial

import jax.numpy as jnp
from jax import lax

from jax_mla import pallas_triton as pt
from jax_mla.fp8 import encode, quantize_block
from jax_mla.layouts import BLOCK, KV_LORA_RANK, QK_ROPE_HEAD_DIM


def pack(k_nope, k_rope, kv_scale, *, layout):
    if layout.name == "bf16":
        return jnp.concatenate([k_nope, k_rope], axis=1).astype(jnp.bfloat16)
    if layout.name == "fp8_576":
        return encode(jnp.concatenate([k_nope, k_rope], axis=1).astype(jnp.float32) / kv_scale, layout.fp8)
    t = k_nope.shape[0]
    tiles = k_nope.astype(jnp.float32).reshape(t, 4, BLOCK)
    codes, scale = quantize_block(tiles, jnp.max(jnp.abs(tiles), axis=2, keepdims=True), layout.fp8, "fp32")
    scale = lax.bitcast_convert_type(scale, jnp.uint8).reshape(t, 16)
    rope = lax.bitcast_convert_type(k_rope.astype(jnp.bfloat16), jnp.uint8).reshape(t, 128)
    return jnp.concatenate([codes.reshape(t, KV_LORA_RANK), scale, rope], axis=1)


def xla(pool, slots, k_nope, k_rope, kv_scale, *, layout):
    nowhere = jnp.where(slots > 0, slots, pool.shape[0])  # past the end: dropped
    return pool.at[nowhere].set(pack(k_nope, k_rope, kv_scale, layout=layout), mode="drop")


def _kernel(slots_ref, k_nope_ref, k_rope_ref, kv_scale_ref, _, pool_ref, *, layout, rows):
    t = pt.program_id(0) * rows + jnp.arange(rows)
    slot = pt.load(slots_ref.at[t], mask=t < slots_ref.shape[0], other=-1)
    written = (slot > 0) & (slot < pool_ref.shape[0])
    slot = jnp.where(written, slot, 0)  # interpret mode stores what was there where the mask is off; row 0 is nobody's

    def put(column, values):
        mask = jnp.broadcast_to(written[:, None], values.shape)
        pt.store(pool_ref.at[slot[:, None], column[None, :]], values.astype(pool_ref.dtype), mask=mask)

    def tile(ref, start, size):
        column = start + jnp.arange(size)
        mask = jnp.broadcast_to(written[:, None], (rows, size))
        return pt.load(ref.at[t[:, None], column[None, :]], mask=mask, other=0.0), column

    for start in range(0, KV_LORA_RANK, BLOCK):
        x, column = tile(k_nope_ref, start, BLOCK)
        if layout.name == "bf16":
            put(column, x)
        elif layout.name == "fp8_576":
            put(column, encode(x.astype(jnp.float32) / kv_scale_ref[0], layout.fp8))
        else:
            x = x.astype(jnp.float32)
            codes, scale = quantize_block(x, jnp.max(jnp.abs(x), axis=1)[:, None], layout.fp8, "fp32")
            put(column, codes)
            byte = jnp.arange(4)
            word = lax.bitcast_convert_type(scale, jnp.int32)
            put(KV_LORA_RANK + start // BLOCK * 4 + byte, (word >> (8 * byte)[None, :]) & 0xFF)

    x, column = tile(k_rope_ref, 0, QK_ROPE_HEAD_DIM)
    if layout.name == "bf16":
        put(KV_LORA_RANK + column, x)
    elif layout.name == "fp8_576":
        put(KV_LORA_RANK + column, encode(x.astype(jnp.float32) / kv_scale_ref[0], layout.fp8))
    else:
        half_word = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.int16).astype(jnp.int32)
        put(KV_LORA_RANK + 16 + 2 * column, half_word & 0xFF)
        put(KV_LORA_RANK + 16 + 2 * column + 1, (half_word >> 8) & 0xFF)


def pallas(pool, slots, k_nope, k_rope, kv_scale, *, layout, config, interpret):
    return pt.kernel_call(
        partial(_kernel, layout=layout, rows=config.rows),
        (slots, k_nope, k_rope, jnp.asarray(kv_scale, jnp.float32).reshape(1), pool),
        (pool,),
        name=f"kv_write_{layout.name}",
        grid=(pt.cdiv(slots.shape[0], config.rows),),
        num_warps=config.num_warps,
        num_stages=1,
        interpret=interpret,
        aliases={4: 0},
    )[0]
