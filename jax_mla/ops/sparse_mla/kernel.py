"""Sparse MLA by XLA, and as Pallas kernels: one program for each row, block of heads and part of the selection, then
one that merges the parts by their log-sum-exp."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla import pallas_triton as pt
from jax_mla.fp8 import decode
from jax_mla.layouts import BLOCK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from jax_mla.ops.sparse_mla.reference import reference

LN2 = math.log(2.0)
VERY_LOW = -1e30  # stands for -inf where two of them would be subtracted
XLA_BYTES = 64 << 20


def xla(q_nope, q_rope, pool, slots, kv_scale, *, layout, softmax_scale):
    """The reference, some rows at a time: what it gathers stays under ``XLA_BYTES``."""
    rows = max(1, XLA_BYTES // (slots.shape[1] * 576 * 4))
    static = dict(layout=layout, softmax_scale=softmax_scale)

    def row(x):
        q_nope, q_rope, slots = x
        out, lse = reference(q_nope[None], q_rope[None], pool, slots[None], kv_scale, **static)
        return out[0], lse[0]

    return lax.map(row, (q_nope, q_rope, slots), batch_size=rows)


def _views(pool, layout):
    """The pool as the kernel reads it: its elements, and for fp8_656 the same bytes as fp32 and as bf16."""
    if layout.name != "fp8_656":
        return (pool,)
    n = pool.shape[0]
    scales = lax.bitcast_convert_type(pool.reshape(n, 164, 4), jnp.float32)
    ropes = lax.bitcast_convert_type(pool.reshape(n, 328, 2), jnp.bfloat16)
    return pool, scales, ropes


def _load_tile(views, layout, slot, valid, start, size, dtype):
    """``[keys, size]`` values of columns ``start ..`` of 576 at ``slot``, exact in ``dtype``; zeros where not valid.

    Also what each key's values are still to be multiplied with, float32 ``[keys]`` (fp8_656's tiles), or 1.
    """
    mask = jnp.broadcast_to(valid[:, None], (*slot.shape, size))

    def load(ref, first, other):
        column = first + jnp.arange(size)
        return pt.load(ref.at[slot[:, None], column[None, :]], mask=mask, other=other)

    if layout.name == "bf16":
        return load(views[0], start, 0.0).astype(dtype), 1.0
    if layout.name == "fp8_576":
        return decode(load(views[0], start, 0), layout.fp8).astype(dtype), 1.0
    _, scale_ref, rope_ref = views
    if start == KV_LORA_RANK:
        return load(rope_ref, (KV_LORA_RANK + 16) // 2, 0.0).astype(dtype), 1.0
    at = jnp.full(slot.shape, KV_LORA_RANK // 4 + start // BLOCK)
    scale = pt.load(scale_ref.at[slot, at], mask=valid, other=0.0)
    value = decode(load(views[0], start, 0), layout.fp8)
    return jnp.where(scale[:, None] == 0, 0.0, value).astype(dtype), scale[None, :]


def _kernel(
    q_nope_ref,  # [T, H, 512]
    q_rope_ref,  # [T, H, 64]
    slots_ref,  # [T, K]
    kv_scale_ref,  # [1]
    *refs,  # views of the pool, then out [T, splits, H, 512] and lse [T, splits, H]
    layout,
    softmax_scale,
    config,
):
    *views, out_ref, lse_ref = refs
    t, split = pt.program_id(0), pt.program_id(2)
    heads, keys = config.heads, config.keys
    head = pt.program_id(1) * heads + jnp.arange(heads)
    inside = head < q_nope_ref.shape[1]
    row = jnp.full((heads,), t)
    dtype = q_nope_ref.dtype
    kv_scale = kv_scale_ref[0] if layout.scaled else 1.0

    def load_q(ref, start, size):
        mask = jnp.broadcast_to(inside[:, None], (heads, size))
        at = ref.at[row[:, None], head[:, None], (start + jnp.arange(size))[None, :]]
        return pt.load(at, mask=mask, other=0.0)

    tiles = range(0, KV_LORA_RANK, BLOCK)
    q = [load_q(q_nope_ref, start, BLOCK) for start in tiles]
    q_rope = load_q(q_rope_ref, 0, QK_ROPE_HEAD_DIM)

    selected = slots_ref.shape[1]
    per_split = pt.cdiv(pt.cdiv(selected, config.splits), keys)  # blocks of keys
    first = split * per_split

    def step(i, carry):
        m, total_p, out = carry
        j = (first + i) * keys + jnp.arange(keys)
        slot = pt.load(slots_ref.at[jnp.full((keys,), t), j], mask=j < selected, other=-1)
        valid = (slot >= 0) & (slot < views[0].shape[0])
        slot = jnp.where(valid, slot, 0)
        latent = [_load_tile(views, layout, slot, valid, start, BLOCK, dtype) for start in tiles]
        rope, _ = _load_tile(views, layout, slot, valid, KV_LORA_RANK, QK_ROPE_HEAD_DIM, dtype)
        s = pt.dot(q_rope, rope, trans_b=True)
        for q_tile, (k_tile, scale) in zip(q, latent, strict=True):
            s += pt.dot(q_tile, k_tile, trans_b=True) * scale
        s = jnp.where(valid[None, :], s * (softmax_scale * kv_scale / LN2), VERY_LOW)
        m_new = jnp.maximum(m, jnp.max(s, axis=1))
        p = jnp.where(valid[None, :], jnp.exp2(s - m_new[:, None]), 0.0)
        shrink = jnp.exp2(m - m_new)
        total_p = total_p * shrink + jnp.sum(p, axis=1)
        out = tuple(
            o * shrink[:, None] + pt.dot((p * scale).astype(dtype), v)
            for o, (v, scale) in zip(out, latent, strict=True)
        )
        return m_new, total_p, out

    blocks = jnp.clip(pt.cdiv(selected, keys) - first, 0, per_split)
    zero = tuple(jnp.zeros((heads, BLOCK), jnp.float32) for _ in tiles)
    start = (jnp.full((heads,), VERY_LOW, jnp.float32), jnp.zeros((heads,), jnp.float32), zero)
    m, total_p, out = lax.fori_loop(0, blocks, step, start)

    any_key = ~(total_p == 0)  # also where it is NaN, which is to be seen
    unit = jnp.where(any_key, kv_scale / jnp.where(any_key, total_p, 1.0), 0.0)
    part = jnp.full((heads,), split)
    for column, o in zip(tiles, out, strict=True):
        at = out_ref.at[row[:, None], part[:, None], head[:, None], (column + jnp.arange(BLOCK))[None, :]]
        mask = jnp.broadcast_to(inside[:, None], (heads, BLOCK))
        pt.store(at, (o * unit[:, None]).astype(out_ref.dtype), mask=mask)
    lse = jnp.where(any_key, m * LN2 + jnp.log(jnp.where(any_key, total_p, 1.0)), -jnp.inf)
    pt.store(lse_ref.at[row, part, head], lse, mask=inside)


def _merge_kernel(part_ref, lse_ref, out_ref, out_lse_ref, *, splits):
    t, h = pt.program_id(0), pt.program_id(1)
    split = jnp.arange(pt.block(splits))
    inside = split < splits
    row, head = jnp.full(split.shape, t), jnp.full(split.shape, h)
    lse = pt.load(lse_ref.at[row, split, head], mask=inside, other=-jnp.inf)
    largest = jnp.maximum(jnp.max(lse), VERY_LOW)
    weight = jnp.exp(lse - largest)
    total = jnp.sum(weight)
    weight = weight / jnp.where(total == 0, 1.0, total)
    column = jnp.arange(KV_LORA_RANK)
    mask = jnp.broadcast_to(inside[:, None], (*split.shape, KV_LORA_RANK))
    parts = pt.load(part_ref.at[row[:, None], split[:, None], head[:, None], column[None, :]], mask=mask, other=0.0)
    out_ref[t, h, :] = jnp.sum(parts * weight[:, None], axis=0).astype(out_ref.dtype)
    out_lse_ref[t, h] = jnp.where(total == 0, -jnp.inf, largest + jnp.log(jnp.where(total == 0, 1.0, total)))


def pallas(q_nope, q_rope, pool, slots, kv_scale, *, layout, softmax_scale, config, interpret):
    t, h, d = q_nope.shape
    merged = config.splits > 1
    parts, lse = pt.kernel_call(
        partial(_kernel, layout=layout, softmax_scale=softmax_scale, config=config),
        (q_nope, q_rope, slots, jnp.asarray(kv_scale, jnp.float32).reshape(1), *_views(pool, layout)),
        (
            jax.ShapeDtypeStruct((t, config.splits, h, d), jnp.float32 if merged else q_nope.dtype),
            jax.ShapeDtypeStruct((t, config.splits, h), jnp.float32),
        ),
        name=f"sparse_mla_{layout.name}",
        grid=(t, pt.cdiv(h, config.heads), config.splits),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )
    if not merged:
        return parts.reshape(t, h, d), lse.reshape(t, h)
    return tuple(
        pt.kernel_call(
            partial(_merge_kernel, splits=config.splits),
            (parts, lse),
            (jax.ShapeDtypeStruct((t, h, d), q_nope.dtype), jax.ShapeDtypeStruct((t, h), jnp.float32)),
            name="sparse_mla_merge",
            grid=(t, h),
            num_warps=4,
            num_stages=1,
            interpret=interpret,
        )
    )
