"""The gradient of ``sparse_mla`` against float64 autodiff of the dense, masked formula."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_mla import KV_BF16, KV_FP8_576, KV_FP8_656, sparse_mla
from jax_mla.ops.sparse_mla import vjp
from tests.jax_mla.ops.test_sparse_mla import ROWS, SCALE, pool_bytes, selection
from tests.jax_mla.oracles import fp8_name, kv_values
from tests.numerics import FLOAT32, QUANTISED_INPUTS, assert_bitwise_equal, calc_diff

T, H, K = 5, 3, 24
KINDS = [("xla", False), ("pallas", True), ("reference", False)]
implementations = pytest.mark.parametrize("implementation, interpret", KINDS, ids=["xla", "pallas", "reference"])


def make(layout, kv_scale=1.0, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    pool = pool_bytes(layout, kv_scale, rng)
    values = kv_values(pool, layout.name, fp8_name(layout), kv_scale)
    q = rng.standard_normal((T, H, 576)).astype(dtype)
    d_out = rng.standard_normal((T, H, 512)).astype(np.float32)
    d_lse = rng.standard_normal((T, H)).astype(np.float32)
    return pool.view(layout.dtype), values, q, selection(T, K, rng), d_out, d_lse


def dense_gradient(q, values, slots, d_out, d_lse):
    """By q and by the pool's values: attention over all of the pool, a key that stands twice weighing twice."""
    count = np.zeros((T, ROWS))
    for t, slot in np.argwhere(slots >= 0):
        count[t, slots[t, slot]] += 1
    some = count.any(axis=1)
    d_out, d_lse = d_out.astype(np.float64), d_lse.astype(np.float64)

    def loss(q, kv):
        s = jnp.einsum("thd,nd->thn", q, kv) * SCALE
        s = jnp.where(count[some][:, None] > 0, s, -jnp.inf)
        lse = jax.nn.logsumexp(s, axis=-1, b=count[some][:, None])
        p = count[some][:, None] * jnp.exp(s - lse[..., None])
        out = jnp.einsum("thn,nd->thd", p, kv[:, :512])
        return jnp.sum(out * d_out[some]) + jnp.sum(lse * d_lse[some])

    with jax.enable_x64(True):
        d_q, d_values = jax.grad(loss, argnums=(0, 1))(*(jnp.asarray(x, jnp.float64) for x in (q[some], values)))
        whole = np.zeros(q.shape)
        whole[some] = d_q
        return whole, np.asarray(d_values)


def pull_back(q, pool, slots, d_out, d_lse, layout, kv_scale=1.0, **how):
    """The op's results, and cotangents of queries, pool and scale."""

    def op(q_nope, q_rope, pool, kv_scale):
        scale = kv_scale if layout.scaled else 1.0
        return sparse_mla(q_nope, q_rope, pool, slots, layout=layout, softmax_scale=SCALE, kv_scale=scale, **how)

    q, pool, slots = jnp.asarray(q), jnp.asarray(pool), jnp.asarray(slots)
    results, back = jax.vjp(op, q[..., :512], q[..., 512:], pool, jnp.float32(kv_scale))
    d_nope, d_rope, d_pool, d_scale = back((jnp.asarray(d_out, q.dtype), jnp.asarray(d_lse)))
    return results, np.concatenate([d_nope, d_rope], axis=-1), d_pool, d_scale


@implementations
@pytest.mark.parametrize("block_rows", [2, T])
def test_gradient_is_the_dense_masked_ones(implementation, interpret, block_rows, monkeypatch):
    monkeypatch.setattr(vjp, "BLOCK_BYTES", block_rows * K * 576 * 4)
    jax.clear_caches()
    pool, values, q, slots, d_out, d_lse = make(KV_BF16)
    how = dict(implementation=implementation, interpret=interpret)
    _, d_q, d_pool, _ = pull_back(q, pool, slots, d_out, d_lse, KV_BF16, **how)
    expected_q, expected_pool = dense_gradient(q, values, slots, d_out, d_lse)
    assert calc_diff(d_q, expected_q) <= FLOAT32
    assert d_pool.dtype == jnp.bfloat16
    assert calc_diff(d_pool, expected_pool) <= QUANTISED_INPUTS
    assert not np.any(d_q[1]), "an empty row has no gradient"
    unnamed = np.setdiff1d(np.arange(ROWS), slots)
    assert len(unnamed) and not np.any(np.asarray(d_pool)[unnamed].astype(np.float32))


@pytest.mark.parametrize("layout, kv_scale", [(KV_FP8_656, 1.0), (KV_FP8_576, 0.05)], ids=["fp8_656", "fp8_576"])
def test_fp8_pools_have_a_gradient_by_queries_and_scale_alone(layout, kv_scale):
    pool, values, q, slots, d_out, d_lse = make(layout, kv_scale)
    _, d_q, d_pool, d_scale = pull_back(q, pool, slots, d_out, d_lse, layout, kv_scale)
    expected_q, expected_values = dense_gradient(q, values, slots, d_out, d_lse)
    assert calc_diff(d_q, expected_q) <= FLOAT32
    assert d_pool.dtype == jax.dtypes.float0
    expected_scale = np.sum(expected_values * values) / kv_scale if layout.scaled else 0.0
    np.testing.assert_allclose(d_scale, expected_scale, rtol=1e-4)


def test_nothing_not_named_touches_the_gradient():
    pool, _, q, slots, d_out, d_lse = make(KV_BF16)
    clean = pull_back(q, pool, slots, d_out, d_lse, KV_BF16)
    poisoned, d_lse = pool.copy(), d_lse.copy()
    poisoned[np.setdiff1d(np.arange(ROWS), slots)] = np.nan
    d_lse[1] = np.nan  # of an empty row, whose lse is -inf
    got = pull_back(q, poisoned, slots, d_out, d_lse, KV_BF16)
    for one, other in zip(jax.tree.leaves(clean), jax.tree.leaves(got), strict=True):
        assert_bitwise_equal(one, other)


def test_bf16_queries_get_bf16_gradients_of_the_same_numbers():
    pool, values, q, slots, d_out, d_lse = make(KV_BF16, dtype=ml_dtypes.bfloat16)
    d_out = d_out.astype(ml_dtypes.bfloat16).astype(np.float32)
    _, d_q, _, _ = pull_back(q, pool, slots, d_out, d_lse, KV_BF16)
    assert d_q.dtype == ml_dtypes.bfloat16
    expected_q, _ = dense_gradient(q.astype(np.float64), values, slots, d_out, d_lse)
    assert calc_diff(d_q, expected_q) <= QUANTISED_INPUTS


def test_results_are_the_same_with_and_without_a_gradient():
    pool, _, q, slots, d_out, d_lse = make(KV_BF16)
    results, *_ = pull_back(q, pool, slots, d_out, d_lse, KV_BF16)
    q, pool, slots = jnp.asarray(q), jnp.asarray(pool), jnp.asarray(slots)
    plain = sparse_mla(q[..., :512], q[..., 512:], pool, slots, layout=KV_BF16, softmax_scale=SCALE)
    for one, other in zip(results, plain, strict=True):
        assert_bitwise_equal(one, other)
