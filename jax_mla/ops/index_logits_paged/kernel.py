"""Paged index logits by XLA, and as a Pallas kernel of one program for each request and some blocks of its tokens."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla import pallas_triton as pt
from jax_mla.fp8 import from_bits
from jax_mla.layouts import INDEX_HEAD_DIM
from jax_mla.ops.index_logits_ragged.kernel import as_kernel_reads, load_codes, load_query, products, score


def xla(q8, weights, pool, token_table, requests, lengths, *, layout, max_len, next_n, fill):
    s = jnp.arange(max_len)
    last_row = jnp.arange(next_n)[:, None]

    def request(b):
        q, w, r, length = b
        row = token_table.at[r].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
        slots = row[:max_len]
        slots = jnp.where((s < length) & (slots < pool.shape[0] * layout.page_size), slots, -1)
        k8, k_scale = layout.read(pool, slots)
        heads = products(q.reshape(-1, INDEX_HEAD_DIM).astype(jnp.float32), k8.astype(jnp.float32))
        logits = jnp.sum(jnp.maximum(heads, 0.0).reshape(*w.shape, -1) * w[..., None], axis=1) * k_scale
        return jnp.where((s < length - next_n + last_row + 1) & (slots >= 0), logits, -jnp.inf)

    batch = (q8.reshape(-1, next_n, *q8.shape[1:]), weights.reshape(-1, next_n, weights.shape[1]), requests, lengths)
    return lax.map(request, batch).reshape(-1, max_len)


def _kernel(
    q_ref,  # [B * next_n, Hi, 128]
    weights_ref,  # [B * next_n, Hi]
    pool_ref,  # [pages, page_bytes], fp8 or u8
    scale_ref,  # [pages, page_bytes / 4] f32: the same bytes
    token_table_ref,  # [R, C]
    requests_ref,  # [B]
    lengths_ref,  # [B]
    logits_ref,  # [B * next_n, max_len]
    *,
    layout,
    next_n,
    fill,
    block_h,
    keys,
    blocks,
):
    b = pt.program_id(0)
    first_block = pt.program_id(1) * blocks
    length, request = lengths_ref[b], requests_ref[b]
    known = (request >= 0) & (request < token_table_ref.shape[0])
    length = jnp.where(known, length, 0)
    column = jnp.arange(INDEX_HEAD_DIM)
    queries = [load_query(q_ref, weights_ref, b * next_n + i, block_h, layout.fp8) for i in range(next_n)]

    def store(s, values):
        for i, value in enumerate(values):
            pt.store(logits_ref.at[b * next_n + i, s], value, mask=s < logits_ref.shape[1])

    def slots_of(i):
        s = (first_block + i) * keys + jnp.arange(keys)
        return pt.load(token_table_ref.at[request, s], mask=(s < length) & (s < token_table_ref.shape[1]), other=-1)

    def place_of(slot):
        valid = (slot >= 0) & (slot < pool_ref.shape[0] * layout.page_size)
        slot = jnp.where(valid, slot, 0)
        return slot // layout.page_size, slot % layout.page_size, valid

    def scales_of(slot):
        page, token, valid = place_of(slot)
        return pt.load(scale_ref.at[page, layout.scale_base(token) // 4], mask=valid, other=0.0), valid

    def block(i, ahead):
        """`ahead`: this block's scales, and where there are any; the slots of the next. Triton reads keys ahead by
        itself; a scale would wait for its slot, and what is added up for the scale. (Triton does so only where nothing
        that came in is carried on as it is.)"""
        (k_scale, valid), slots_of_next = ahead
        page, token, there = place_of(slots_of(i))
        at = layout.key_base(token)[:, None] + layout.key_column(column)[None, :]
        k = load_codes(pool_ref.at[page[:, None], at], jnp.broadcast_to(there[:, None], at.shape), layout.fp8)
        s = (first_block + i) * keys + jnp.arange(keys)
        visible = [valid & (s < length - next_n + i + 1) for i in range(next_n)]
        store(s, [jnp.where(v, score(k, k_scale, q, w), -jnp.inf) for v, (q, w) in zip(visible, queries, strict=True)])
        return scales_of(slots_of_next), slots_of(i + 2)

    def blank(i, _):
        s = (first_block + i) * keys + jnp.arange(keys)
        store(s, [jnp.full((keys,), -jnp.inf, jnp.float32)] * next_n)

    held = jnp.clip(pt.cdiv(length, keys) - first_block, 0, blocks)
    lax.fori_loop(0, held, block, (scales_of(slots_of(0)), slots_of(1)))
    if fill:
        lax.fori_loop(held, blocks, blank, None)


def pallas(q8, weights, pool, token_table, requests, lengths, *, layout, max_len, next_n, fill, config, interpret):
    config.check()
    pages, page_bytes = pool.shape
    words = lax.bitcast_convert_type(pool.reshape(pages, page_bytes // 4, 4), jnp.float32)
    fp8 = layout.fp8
    codes = from_bits(pool, fp8)
    static = dict(layout=layout, next_n=next_n, fill=fill, block_h=pt.block(q8.shape[1], 16))
    return pt.kernel_call(
        partial(_kernel, **static, keys=config.keys, blocks=config.blocks),
        (as_kernel_reads(q8, fp8), weights, as_kernel_reads(codes, fp8), words, token_table, requests, lengths),
        (jax.ShapeDtypeStruct((q8.shape[0], max_len), jnp.float32),),
        name="index_logits_paged",
        grid=(requests.shape[0], pt.cdiv(max_len, config.keys * config.blocks)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        imprecise_fp8=config.imprecise,
    )[0]
