"""Paged index logits by XLA, and as a Pallas kernel of one program for each request and block of its tokens."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla import pallas_triton as pt
from jax_mla.fp8 import from_bits, to_bits
from jax_mla.layouts import INDEX_HEAD_DIM
from jax_mla.ops.index_logits_ragged.kernel import load_query, products, score


def xla(q8, weights, pool, token_table, requests, lengths, *, layout, max_len, next_n):
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
    q_ref,  # [B * next_n, Hi, 128] u8
    weights_ref,  # [B * next_n, Hi]
    pool_ref,  # [pages, page_bytes] u8
    scale_ref,  # [pages, page_bytes / 4] f32: the same bytes
    token_table_ref,  # [R, C]
    requests_ref,  # [B]
    lengths_ref,  # [B]
    logits_ref,  # [B * next_n, max_len]
    *,
    layout,
    next_n,
    block_h,
    keys,
):
    b = pt.program_id(0)
    first = pt.program_id(1) * keys
    s = first + jnp.arange(keys)
    length, request = lengths_ref[b], requests_ref[b]
    known = (request >= 0) & (request < token_table_ref.shape[0])
    column = jnp.arange(INDEX_HEAD_DIM)

    def store(i, value):
        row = jnp.full((keys,), b * next_n + i)
        pt.store(logits_ref.at[row, s], value, mask=s < logits_ref.shape[1])

    @pt.when((first < length) & known)
    def _():
        row = jnp.full((keys,), request)
        slot = pt.load(token_table_ref.at[row, s], mask=(s < length) & (s < token_table_ref.shape[1]), other=-1)
        valid = (slot >= 0) & (slot < pool_ref.shape[0] * layout.page_size)
        slot = jnp.where(valid, slot, 0)
        page, token = slot // layout.page_size, slot % layout.page_size
        at = layout.key_base(token)[:, None] + layout.key_column(column)[None, :]
        mask = jnp.broadcast_to(valid[:, None], (keys, INDEX_HEAD_DIM))
        k = from_bits(pt.load(pool_ref.at[page[:, None], at], mask=mask, other=0), layout.fp8)
        k_scale = pt.load(scale_ref.at[page, layout.scale_base(token) // 4], mask=valid, other=0.0)
        for i in range(next_n):
            q, w = load_query(q_ref, weights_ref, b * next_n + i, block_h, layout.fp8)
            visible = valid & (s < length - next_n + i + 1)
            store(i, jnp.where(visible, score(k, k_scale, q, w), -jnp.inf))

    @pt.when((first >= length) | ~known)
    def _():
        for i in range(next_n):
            store(i, jnp.full((keys,), -jnp.inf, jnp.float32))


def pallas(q8, weights, pool, token_table, requests, lengths, *, layout, max_len, next_n, config, interpret):
    pages, page_bytes = pool.shape
    words = lax.bitcast_convert_type(pool.reshape(pages, page_bytes // 4, 4), jnp.float32)
    return pt.kernel_call(
        partial(_kernel, layout=layout, next_n=next_n, block_h=pt.block(q8.shape[1], 16), keys=config.keys),
        (to_bits(q8), weights, pool, words, token_table, requests, lengths),
        (jax.ShapeDtypeStruct((q8.shape[0], max_len), jnp.float32),),
        name="index_logits_paged",
        grid=(requests.shape[0], pt.cdiv(max_len, config.keys)),
        num_warps=config.num_warps,
        num_stages=1,
        interpret=interpret,
    )[0]
