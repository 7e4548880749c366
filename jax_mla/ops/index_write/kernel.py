"""The index-K write by XLA, and as a Pallas kernel that normalises, rotates, quantises and writes in one pass."""

from functools import partial

import jax.numpy as jnp
from jax import lax

from jax_mla import pallas_triton as pt
from jax_mla.layouts import INDEX_HEAD_DIM, QK_ROPE_HEAD_DIM
from jax_mla.ops.index_head import angles, finish, load_angles
from jax_mla.rope import rotate, rotation


def _statistics(x, eps):
    """Mean and reciprocal deviation ``[rows, 1]`` of the rows of ``x`` ``[rows, 128]``."""
    mean = jnp.sum(x, axis=1) / INDEX_HEAD_DIM
    centred = x - mean[:, None]
    variance = jnp.sum(centred * centred, axis=1) / INDEX_HEAD_DIM
    return mean[:, None], lax.rsqrt(variance + eps)[:, None]


def pack(k, norm_weight, norm_bias, cos_sin, positions, *, fp8, interleaved, hadamard, eps):
    partner, f, sign, rotated = rotation(jnp.arange(INDEX_HEAD_DIM), QK_ROPE_HEAD_DIM, interleaved)
    cos, sin = angles(cos_sin, positions, f, rotated)
    x = k.astype(jnp.float32)
    mean, rstd = _statistics(x, eps)
    x = (x - mean) * rstd * norm_weight.astype(jnp.float32) + norm_bias.astype(jnp.float32)
    codes, scale = finish(rotate(x, x[:, partner], cos, sin, sign), fp8=fp8, hadamard=hadamard)
    return jnp.concatenate([codes, lax.bitcast_convert_type(scale[:, 0], jnp.uint8)], axis=1)


def xla(pool, slots, k, norm_weight, norm_bias, cos_sin, positions, *, layout, interleaved, hadamard, eps):
    static = dict(fp8=layout.fp8, interleaved=interleaved, hadamard=hadamard, eps=eps)
    rows = pack(k, norm_weight, norm_bias, cos_sin, positions, **static)
    page, byte = layout.row_offsets(slots)
    page = jnp.where(slots[:, None] > 0, page, pool.shape[0])  # past the end: dropped
    return pool.at[page, byte].set(rows, mode="drop")


def _kernel(
    slots_ref,  # [T]
    k_ref,  # [T, 128]
    weight_ref,  # [128]
    bias_ref,  # [128]
    cos_sin_ref,  # [P, 64]
    positions_ref,  # [T]
    _,
    pool_ref,  # [pages, page_bytes]
    *,
    layout,
    interleaved,
    hadamard,
    eps,
    rows,
):
    t = pt.program_id(0) * rows + jnp.arange(rows)
    inside = t < slots_ref.shape[0]
    slot = pt.load(slots_ref.at[t], mask=inside, other=-1)
    written = (slot > 0) & (slot < pool_ref.shape[0] * layout.page_size)
    slot = jnp.where(written, slot, 0)  # interpret mode stores what was there where the mask is off; slot 0 is nobody's
    page, token = slot // layout.page_size, slot % layout.page_size
    column = jnp.arange(INDEX_HEAD_DIM)
    mask = jnp.broadcast_to(written[:, None], (rows, INDEX_HEAD_DIM))
    partner, f, sign, rotated = rotation(column, QK_ROPE_HEAD_DIM, interleaved)
    cos, sin = load_angles(cos_sin_ref, pt.load(positions_ref.at[t], mask=inside, other=0), f, rotated)

    def normal(column):
        x = pt.load(k_ref.at[t[:, None], column[None, :]], mask=mask, other=0.0).astype(jnp.float32)
        mean, rstd = _statistics(x, eps)
        weight, bias = weight_ref[column].astype(jnp.float32), bias_ref[column].astype(jnp.float32)
        return (x - mean) * rstd * weight[None, :] + bias[None, :]

    y = rotate(normal(column), normal(partner), cos, sin, sign[None, :])
    codes, scale = finish(y, fp8=layout.fp8, hadamard=hadamard)
    at = layout.key_base(token)[:, None] + layout.key_column(column)[None, :]
    pt.store(pool_ref.at[page[:, None], at], codes, mask=mask)
    byte = jnp.arange(4)
    word = lax.bitcast_convert_type(scale, jnp.int32)
    at = layout.scale_base(token)[:, None] + byte[None, :]
    value = ((word >> (8 * byte)[None, :]) & 0xFF).astype(jnp.uint8)
    pt.store(pool_ref.at[page[:, None], at], value, mask=jnp.broadcast_to(written[:, None], (rows, 4)))


def pallas(pool, slots, k, weight, bias, cos_sin, positions, *, layout, interleaved, hadamard, eps, config, interpret):
    static = dict(layout=layout, interleaved=interleaved, hadamard=hadamard, eps=eps, rows=config.rows)
    return pt.kernel_call(
        partial(_kernel, **static),
        (slots, k, weight, bias, cos_sin, positions, pool),
        (pool,),
        name="index_write",
        grid=(pt.cdiv(slots.shape[0], config.rows),),
        num_warps=config.num_warps,
        num_stages=1,
        interpret=interpret,
        aliases={6: 0},
    )[0]
