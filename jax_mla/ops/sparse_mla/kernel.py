"""Sparse MLA by XLA, and as Pallas kernels: one program for each row, block of heads and part of the selection, then
one that merges the parts by their log-sum-exp.

FP8 codes are read as 32-bit words. Bytes 0, 1, 2 and 3 of a tile's words are four tiles of their own (*planes*), whose
columns lie four apart; since a product does not care about the order of what it sums, queries are read and results
written in that order, and no byte is ever moved to another lane. A plane is exact in float16, whose range it needs no
scale for; a query is brought into that range by a power of two.
"""

import math
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla import pallas_triton as pt
from jax_mla.fp8 import E4M3FN, decode_f16
from jax_mla.layouts import BLOCK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from jax_mla.ops.sparse_mla.reference import reference

LN2 = math.log(2.0)
LOWEST = float(jnp.finfo(jnp.float32).min)  # where a running maximum starts: two -inf can't be subtracted
XLA_BYTES = 64 << 20
SHIFT = 12  # float16 weights are 2^12 at most: as far from its largest number as from its least normal one


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
    """The pool as the kernel reads it: its elements; of FP8 layouts 32-bit words, of fp8_656 bf16 too (its rope)."""
    if layout.name == "bf16":
        return (pool,)
    n, row_bytes = pool.shape
    words = lax.bitcast_convert_type(pool.reshape(n, row_bytes // 4, 4), jnp.int32)
    if layout.name == "fp8_576":
        return (words,)
    return words, lax.bitcast_convert_type(pool.reshape(n, row_bytes // 2, 2), jnp.bfloat16)


def _columns(layout):
    """Of each latent tile that the kernel multiplies, and of each rope tile, the columns."""
    if layout.name == "bf16":
        return [start + jnp.arange(BLOCK) for start in range(0, KV_LORA_RANK, BLOCK)], [jnp.arange(QK_ROPE_HEAD_DIM)]
    if layout.name == "fp8_576":
        rope = 4 * jnp.arange(QK_ROPE_HEAD_DIM // 4)
        return [plane + 4 * jnp.arange(KV_LORA_RANK // 4) for plane in range(4)], [plane + rope for plane in range(4)]
    blocks = range(0, KV_LORA_RANK, BLOCK)
    latent = [start + plane + 4 * jnp.arange(BLOCK // 4) for start in blocks for plane in range(4)]
    return latent, [jnp.arange(QK_ROPE_HEAD_DIM)]


def _planes(words, anchor, fp8, dtype, native):
    """The four tiles ``[keys, W]`` of the bytes of ``words``, exact in ``dtype``.

    `anchor`: any ``[keys]``. Triton moves layout changes up over elementwise operations to the load, but not over one
    with an operand that is broadcast: given an anchor, the planes pass through shared memory, else the words do.
    """

    def plane(j):
        if native and dtype == jnp.float16 and fp8 == E4M3FN:
            code = f"{{.reg .b16 a, b; .reg .b32 x; prmt.b32 x, $1, $2, {16 * (4 + j) + j}; mov.b32 {{a, b}}, x; "
            inputs = [words] if anchor is None else [words, jnp.broadcast_to(anchor[:, None], words.shape)]
            return pt.ptx(code + "cvt.rn.f16x2.e4m3x2 $0, a;}", inputs, jnp.float16, pack=2)
        codes = lax.shift_right_logical(words, 8 * j) & 0xFF
        return decode_f16(codes, fp8).astype(dtype)

    return [plane(j) for j in range(4)]


def _power_of_two(biased_exponent):
    return lax.bitcast_convert_type(biased_exponent << 23, jnp.float32)


def _biased_exponent(x):
    return lax.bitcast_convert_type(x, jnp.int32) >> 23


def _kernel(
    q_nope_ref,  # [T, H, 512]
    q_rope_ref,  # [T, H, 64]
    slots_ref,  # [T, K]
    kv_scale_ref,  # [1]
    *refs,  # views of the pool, then out [T, splits, H, 512] and lse [T, splits, H]
    layout,
    softmax_scale,
    config,
    native,
):
    *views, out_ref, lse_ref = refs
    t, split = pt.program_id(0), pt.program_id(2)
    heads, keys = config.heads, config.keys
    head = pt.program_id(1) * heads + jnp.arange(heads)
    inside = head < q_nope_ref.shape[1]
    is_fp8 = layout.name != "bf16"
    blocks_have_scales = layout.name == "fp8_656"
    dtype = jnp.float16 if is_fp8 and q_nope_ref.dtype == jnp.bfloat16 else q_nope_ref.dtype
    latent_columns, rope_columns = _columns(layout)
    unit = softmax_scale / LN2 * (kv_scale_ref[0] if layout.scaled else 1.0)

    def load_q(ref, columns):
        mask = jnp.broadcast_to(inside[:, None], (heads, *columns.shape))
        return pt.load(ref.at[t, head[:, None], columns[None, :]], mask=mask, other=0.0)

    q = [load_q(q_nope_ref, columns) for columns in latent_columns]
    q_rope = [load_q(q_rope_ref, columns) for columns in rope_columns]
    q_unit = unit
    if is_fp8:  # a head's queries times the power of two that makes the largest of them 2^10 to 2^11
        scaled = q if blocks_have_scales else q + q_rope
        largest = reduce(jnp.maximum, [jnp.max(jnp.abs(x.astype(jnp.float32)), axis=1) for x in scaled])
        exponent = jnp.clip(_biased_exponent(largest), 20, 234)
        scaled = [(x.astype(jnp.float32) * _power_of_two(264 - exponent)[:, None]).astype(dtype) for x in scaled]
        q, q_rope = scaled[: len(q)], scaled[len(q) :] or q_rope
        q_unit = unit * _power_of_two(exponent - 10)[:, None]

    selected = slots_ref.shape[1]
    per_split = pt.cdiv(pt.cdiv(selected, config.splits), keys)  # blocks of keys
    first = split * per_split

    def read_slots(i):
        j = (first + i) * keys + jnp.arange(keys)
        slot = pt.load(slots_ref.at[t, j], mask=j < selected, other=-1)
        valid = (slot >= 0) & (slot < views[0].shape[0])
        return jnp.where(valid, slot, 0), valid

    def read(ref, slot, valid, start, size, **how):
        mask = jnp.broadcast_to(valid[:, None], (keys, size))
        return pt.load(ref.at[slot[:, None], (start + jnp.arange(size))[None, :]], mask=mask, other=0, **how)

    def latent_of(slot, valid, **how):
        if not is_fp8:
            return [read(views[0], slot, valid, columns, BLOCK).astype(dtype) for columns in range(0, 512, BLOCK)]
        words = BLOCK // 4 if blocks_have_scales else KV_LORA_RANK // 4
        tiles = [read(views[0], slot, valid, start, words, **how) for start in range(0, KV_LORA_RANK // 4, words)]
        anchor = slot if config.loads == 1 else None
        return [plane for tile in tiles for plane in _planes(tile, anchor, layout.fp8, dtype, native)]

    def rope_of(slot, valid):
        if not is_fp8:
            return [read(views[0], slot, valid, KV_LORA_RANK, QK_ROPE_HEAD_DIM).astype(dtype)]
        if blocks_have_scales:
            return [read(views[1], slot, valid, (KV_LORA_RANK + 16) // 2, QK_ROPE_HEAD_DIM).astype(q_rope[0].dtype)]
        words = read(views[0], slot, valid, KV_LORA_RANK // 4, QK_ROPE_HEAD_DIM // 4)
        return _planes(words, slot if config.loads == 1 else None, layout.fp8, dtype, native)

    def scales_of(slot, valid):
        words = [pt.load(views[0].at[slot, jnp.full((keys,), 128 + b)], mask=valid, other=0) for b in range(4)]
        return [lax.bitcast_convert_type(word, jnp.float32) for word in words]

    def product(queries, tiles):
        return reduce(jnp.add, [pt.dot(x, y, trans_b=True) for x, y in zip(queries, tiles, strict=True)])

    def step(i, carry):
        m, total_p, out = carry
        slot, valid = read_slots(i)
        latent, rope = latent_of(slot, valid), rope_of(slot, valid)
        again = latent_of(slot, valid, eviction_policy="evict_last") if config.loads == 2 else latent
        scales, per_scale = [], jnp.ones((keys,), jnp.float32)
        if blocks_have_scales:
            # The largest of a key's scales, rounded up to a power of two 2^g, goes with the weights: p 2^g is what
            # the values are multiplied with, by scales of 1 at most, so that neither exceeds float16's range.
            scales = scales_of(slot, valid)
            largest = lax.bitcast_convert_type(reduce(jnp.maximum, map(jnp.abs, scales)), jnp.int32)
            exponent = jnp.where(largest < 1 << 23, 127, jnp.clip((largest + 0x7FFFFF) >> 23, 67, 254))
            per_scale = _power_of_two(254 - exponent)  # 2^-g
            s = reduce(jnp.add, [product(q[4 * b :][:4], latent[4 * b :][:4]) * scales[b][None, :] for b in range(4)])
            s = s * q_unit + (product(q_rope, rope) * unit + (exponent - 127).astype(jnp.float32)[None, :])
        else:
            s = product(q + q_rope, latent + rope) * q_unit
        s = jnp.where(valid[None, :], s, -jnp.inf)
        m_new = jnp.maximum(m, jnp.max(s, axis=1))
        p = pt.exp2(s - (m_new - (SHIFT if is_fp8 else 0))[:, None], native)  # 0 where there is no slot
        shrink = pt.exp2(m - m_new, native)
        total_p = total_p * shrink + jnp.sum(p * per_scale[None, :] if blocks_have_scales else p, axis=1)
        if blocks_have_scales:
            weights = [(p * (scale * per_scale)[None, :]).astype(dtype) for scale in scales for _ in range(4)]
        else:
            weights = [p.astype(dtype)] * len(again)
        out = tuple(o * shrink[:, None] + pt.dot(w, v) for o, w, v in zip(out, weights, again, strict=True))
        return m_new, total_p, out

    blocks = jnp.clip(pt.cdiv(selected, keys) - first, 0, per_split)
    zero = tuple(jnp.zeros((heads, *columns.shape), jnp.float32) for columns in latent_columns)
    start = (jnp.full((heads,), LOWEST, jnp.float32), jnp.zeros((heads,), jnp.float32), zero)
    m, total_p, out = lax.fori_loop(0, blocks, step, start)

    any_key = ~(total_p == 0)  # also where it is NaN, which is to be seen
    worth = jnp.where(any_key, (kv_scale_ref[0] if layout.scaled else 1.0) / jnp.where(any_key, total_p, 1.0), 0.0)
    for columns, o in zip(latent_columns, out, strict=True):
        mask = jnp.broadcast_to(inside[:, None], o.shape)
        at = out_ref.at[t, split, head[:, None], columns[None, :]]
        pt.store(at, (o * worth[:, None]).astype(out_ref.dtype), mask=mask)
    log_total = jnp.log(jnp.where(any_key, total_p, 1.0)) - (SHIFT * LN2 if is_fp8 else 0.0)
    pt.store(lse_ref.at[t, split, head], jnp.where(any_key, m * LN2 + log_total, -jnp.inf), mask=inside)


MERGED = 128  # columns of a head that one program merges


def _merge_kernel(part_ref, lse_ref, out_ref, out_lse_ref, *, splits):
    t, h, block = pt.program_id(0), pt.program_id(1), pt.program_id(2)
    split = jnp.arange(pt.block(splits))
    inside = split < splits
    lse = pt.load(lse_ref.at[t, split, h], mask=inside, other=-jnp.inf)
    largest = jnp.maximum(jnp.max(lse), LOWEST)
    weight = jnp.exp(lse - largest)
    total = jnp.sum(weight)
    weight = weight / jnp.where(total == 0, 1.0, total)
    column = block * MERGED + jnp.arange(MERGED)
    mask = jnp.broadcast_to(inside[:, None], (*split.shape, MERGED))
    parts = pt.load(part_ref.at[t, split[:, None], h, column[None, :]], mask=mask, other=0.0)
    out_ref[t, h, column] = jnp.sum(parts * weight[:, None], axis=0).astype(out_ref.dtype)

    @pt.when(block == 0)
    def _():
        out_lse_ref[t, h] = jnp.where(total == 0, -jnp.inf, largest + jnp.log(jnp.where(total == 0, 1.0, total)))


def pallas(q_nope, q_rope, pool, slots, kv_scale, *, layout, softmax_scale, config, interpret):
    config.check()
    t, h, d = q_nope.shape
    merged = config.splits > 1
    native = pt.native(interpret)
    parts, lse = pt.kernel_call(
        partial(_kernel, layout=layout, softmax_scale=softmax_scale, config=config, native=native),
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
            grid=(t, h, KV_LORA_RANK // MERGED),
            num_warps=max(1, min(4, pt.block(config.splits) // 8)),
            num_stages=1,
            interpret=interpret,
        )
    )
