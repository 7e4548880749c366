"""The first and last rows of pools of more than 2 GiB, read and written by the compiled kernels, in place."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_mla import (
    KV_BF16,
    KV_FP8_576,
    KV_FP8_656,
    IndexLayout,
    cos_sin_table,
    index_logits_paged,
    index_pack,
    index_query,
    index_write,
    kv_pack,
    kv_write,
    sparse_mla,
)

GIB = 1 << 30
SIZES = pytest.mark.parametrize("size", [1.9, 2.9, 3.9, 4.5, 9.0], ids="{} GiB".format)
LAYOUTS = pytest.mark.parametrize("layout", [KV_BF16, KV_FP8_656, KV_FP8_576], ids=str)


def normal(seed: int, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


@SIZES
@LAYOUTS
def test_kv_pool(layout, size):
    rows = int(size * GIB) // layout.row_bytes
    slots = jnp.asarray([rows - 1, 1, rows // 2, rows - 2], jnp.int32)
    k_nope, k_rope = normal(0, 4, 512), normal(1, 4, 64)
    pool = jnp.zeros((rows, layout.row_elements), layout.dtype)
    where = pool.unsafe_buffer_pointer()
    pool = kv_write(pool, slots, k_nope, k_rope, layout=layout, implementation="pallas")
    assert pool.unsafe_buffer_pointer() == where, "the pool was copied"
    packed = kv_pack(k_nope, k_rope, layout=layout)
    np.testing.assert_array_equal(np.asarray(pool[slots]), np.asarray(packed))
    written = jax.jit(lambda pool: jnp.sum(jnp.any(pool != 0, axis=1)))(pool)
    assert int(written) == 4
    q_nope, q_rope = normal(2, 1, 16, 512), normal(3, 1, 16, 64)
    attend = partial(sparse_mla, q_nope, q_rope, layout=layout, softmax_scale=0.1)
    out, lse = attend(pool, slots[None], implementation="pallas")
    want, want_lse = attend(packed, jnp.arange(4, dtype=jnp.int32)[None], implementation="reference")
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(want, np.float32), rtol=0.02, atol=0.01)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4)


@SIZES
@pytest.mark.parametrize("page_size", [1, 64])
def test_index_pool(page_size, size):
    layout = IndexLayout(page_size)
    pages = int(size * GIB) // layout.page_bytes
    last = pages * page_size - 1
    slots = jnp.asarray([last, page_size, last // 2, last - 1], jnp.int32)
    cos_sin, one, zero = cos_sin_table(64), jnp.ones(128), jnp.zeros(128)
    k, positions = normal(4, 4, 128), jnp.arange(4, dtype=jnp.int32)
    pool = jnp.zeros((pages, layout.page_bytes), jnp.uint8)
    where = pool.unsafe_buffer_pointer()
    pool = index_write(pool, slots, k, one, zero, cos_sin, positions, layout=layout, implementation="pallas")
    assert pool.unsafe_buffer_pointer() == where, "the pool was copied"
    packed = index_pack(k, one, zero, cos_sin, positions, layout=layout)
    page, byte = layout.row_offsets(slots)
    np.testing.assert_array_equal(np.asarray(pool[page, byte]), np.asarray(packed))
    q8, weights = index_query(normal(5, 1, 64, 128), normal(6, 1, 64), cos_sin, positions[:1])
    small = IndexLayout(1)
    score = partial(index_logits_paged, q8, weights)
    rest = slots[None], jnp.zeros(1, jnp.int32), jnp.full(1, 4, jnp.int32)
    logits = score(pool, *rest, layout=layout, max_len=4, implementation="pallas")
    table = jnp.arange(4, dtype=jnp.int32)[None], *rest[1:]
    want = score(packed.reshape(4, -1), *table, layout=small, max_len=4, implementation="reference")
    np.testing.assert_allclose(logits, want, rtol=1e-3, atol=1e-4)
