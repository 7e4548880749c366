"""What the compiled kernels promise about bits: the same on every run, and whatever else is in the batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_mla import (
    E4M3FN,
    KV_BF16,
    KV_FP8_576,
    KV_FP8_656,
    IndexLayout,
    index_logits_paged,
    index_logits_ragged,
    kv_pack,
    select,
    sparse_mla,
)
from jax_mla.ops.sparse_mla.config import Config
from jax_mla.pallas_triton import target

HOW: dict[str, Any] = dict(implementation="pallas")


def normal(seed: int, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


def attention(layout, rows: int, heads: int):
    n, k = 1 << 16, 2048
    pool = kv_pack(normal(0, n, 512), normal(1, n, 64), layout=layout)
    slots = jax.random.randint(jax.random.key(2), (rows, k), -1, n, jnp.int32)
    return normal(3, rows, heads, 512, dtype=jnp.bfloat16), normal(4, rows, heads, 64, dtype=jnp.bfloat16), pool, slots


LAYOUTS = pytest.mark.parametrize("layout", [KV_BF16, KV_FP8_656, KV_FP8_576], ids=str)


@LAYOUTS
@pytest.mark.parametrize("rows, heads", [(1, 16), (64, 16), (64, 128), (600, 16)])
def test_sparse_mla_on_every_run(layout, rows, heads):
    q_nope, q_rope, pool, slots = attention(layout, rows, heads)
    call = jax.jit(lambda *x: sparse_mla(*x, layout=layout, softmax_scale=0.05, **HOW))
    first = call(q_nope, q_rope, pool, slots)
    assert np.isfinite(np.asarray(first[0], np.float32)).all()
    for _ in range(20):
        same(call(q_nope, q_rope, pool, slots), first)


@LAYOUTS
@pytest.mark.parametrize("heads", [16, 128])
def test_sparse_mla_whatever_the_neighbours(layout, heads):
    """Other rows, in other places, of a batch as large; and with a ``config`` of one's own, of any size."""
    q_nope, q_rope, pool, slots = attention(layout, 64, heads)
    call = lambda *x, **how: sparse_mla(*x, layout=layout, softmax_scale=0.05, **HOW, **how)  # noqa: E731
    out, lse = call(q_nope, q_rope, pool, slots)
    order = np.random.default_rng(0).permutation(64)
    moved = call(q_nope[order], q_rope[order], pool, slots[order])
    same(moved, (out[order], lse[order]))
    others = slots.at[1:].set(-1)
    alone = call(q_nope, q_rope, pool, others)
    same((alone[0][0], alone[1][0]), (out[0], lse[0]))
    config = Config.of(64, heads, 2048, layout, target())
    for rows in (1, 7, 64):
        some = call(q_nope[:rows], q_rope[:rows], pool, slots[:rows], config=config)
        same(some, (out[:rows], lse[:rows]))


def test_index_logits_and_selection_whatever_the_neighbours():
    rows, keys = 300, 20000
    q8 = (64 * normal(0, rows, 64, 128)).astype(E4M3FN.dtype)
    k8 = (64 * normal(1, keys, 128)).astype(E4M3FN.dtype)
    weights, scale = normal(2, rows, 64), jnp.abs(normal(3, keys))
    starts = jax.random.randint(jax.random.key(4), (rows,), 0, keys // 2, jnp.int32)
    ends = jnp.minimum(starts + jax.random.randint(jax.random.key(5), (rows,), 0, keys, jnp.int32), keys)
    whole = index_logits_ragged(q8, weights, k8, scale, starts, ends, **HOW)
    for _ in range(20):
        same(index_logits_ragged(q8, weights, k8, scale, starts, ends, **HOW), whole)
    chosen = select(whole, ends - starts, 2048, starts=starts, **HOW)
    same(chosen, select(whole, ends - starts, 2048, starts=starts, implementation="xla"))
    for part in (slice(0, 1), slice(17, 40), slice(299, 300)):
        one = index_logits_ragged(q8[part], weights[part], k8, scale, starts[part], ends[part], **HOW)
        same(one, whole[part])
        same(select(one, (ends - starts)[part], 2048, starts=starts[part], **HOW), chosen[part])


@pytest.mark.parametrize("page_size", [1, 64])
def test_paged_logits_whatever_the_neighbours(page_size):
    layout = IndexLayout(page_size)
    requests, length = 40, 9000
    tokens = requests * 9088
    pool = jax.random.bits(jax.random.key(0), (tokens // page_size + 1, layout.page_bytes), jnp.uint8) & 0x3F
    table = page_size + jax.random.permutation(jax.random.key(1), tokens // page_size)[:, None] * page_size
    table = (table + jnp.arange(page_size)).reshape(requests, -1).astype(jnp.int32)
    table = jnp.where(table < pool.shape[0] * page_size, table, -1)
    q8 = (64 * normal(2, requests, 64, 128)).astype(E4M3FN.dtype)
    weights, which = normal(3, requests, 64), jnp.arange(requests, dtype=jnp.int32)
    lengths = jax.random.randint(jax.random.key(4), (requests,), 0, length, jnp.int32)
    call = lambda q, w, r, n: index_logits_paged(q, w, pool, table, r, n, layout=layout, max_len=length, **HOW)  # noqa: E731
    whole = call(q8, weights, which, lengths)
    for _ in range(20):
        same(call(q8, weights, which, lengths), whole)
    for part in (slice(0, 1), slice(7, 23)):
        same(call(q8[part], weights[part], which[part], lengths[part]), whole[part])
