"""Decoding on pools is the model itself: prompts in one go, in chunks, token by token, in every layout."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_mla import KV_BF16, KV_FP8_576, KV_FP8_656, IndexLayout
from jax_mla.nn import DeepseekV32, DeepseekV32Config, decode, generate, make_cache, prefill, with_selectors
from jax_mla.nn.indexer import most_recent
from tests.jax_mla.nn.models import OWN, SMALL
from tests.numerics import FLOAT32, QUANTISED_INPUTS, assert_bitwise_equal, assert_close

SIZES = dict(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128, index_n_heads=4)
LAYOUTS = [(KV_BF16, 1.0), (KV_FP8_656, 1.0), (KV_FP8_576, 0.02)]
layouts = pytest.mark.parametrize("kv_layout, kv_scale", LAYOUTS, ids=["bf16", "fp8_656", "fp8_576"])
IDS = np.random.default_rng(5).integers(1, 128, (3, 70), dtype=np.int32)
COUNTS = np.array([70, 1, 33], np.int32)
PREFILL, DECODE = nnx.jit(prefill), nnx.jit(decode)
"""Each is compiled once for all tests that ask for the same."""
FLIPS = 1e-4
"""Bar of ``calc_diff`` where a latent beside the midpoint of two FP8 codes may fall to either: 6 % of one number."""


def assert_same_logits(got, expected, kv_layout=KV_BF16):
    """Of three requests; the second one's single token has nothing to round differently."""
    assert_close(got, expected, QUANTISED_INPUTS if kv_layout == KV_BF16 else FLIPS)
    assert_close(got[1:2], expected[1:2], FLOAT32)


def make(model_type, kv_layout=KV_BF16, kv_scale=1.0, **how: Any) -> DeepseekV32:
    config = DeepseekV32Config.from_hf_config(
        dict(model_type=model_type) | SMALL | OWN[model_type] | SIZES | dict(initializer_range=0.15)
    )
    how = dict(quantize_indexer=True, dtype=jnp.float32) | how
    return DeepseekV32(config, rngs=nnx.Rngs(1), kv_layout=kv_layout, kv_scale=kv_scale, **how)


def last_logits(model, attention):
    """The model's logits after each request's last token, without a cache."""
    logits = nnx.jit(lambda m, x: m(x, attention=attention))(model, jnp.asarray(IDS))
    return np.asarray(logits)[np.arange(len(IDS)), COUNTS - 1]


@pytest.mark.parametrize("model_type, attention", [("deepseek_v32", "dense"), ("glm_moe_dsa", "sparse")])
@layouts
def test_prefill_is_the_model(model_type, kv_layout, kv_scale, attention):
    model = make(model_type, kv_layout, kv_scale)
    cache = make_cache(model, 3, 80, kv_layout=kv_layout, kv_scale=kv_scale)
    run = nnx.jit(lambda m, x, n, cache: prefill(m, x, n, cache, attention=attention))
    got, after = run(model, jnp.asarray(IDS), jnp.asarray(COUNTS), cache)
    assert_same_logits(got, last_logits(model, attention), kv_layout)
    assert after.lengths.tolist() == COUNTS.tolist()


@pytest.mark.parametrize("model_type, page_size", [("deepseek_v32", 1), ("glm_moe_dsa", 64)])
def test_chunks_and_tokens_are_the_same_as_one_prefill(model_type, page_size):
    model = make(model_type)
    cache = make_cache(model, 3, 80, index_layout=IndexLayout(page_size))
    whole, _ = PREFILL(model, jnp.asarray(IDS), jnp.asarray(COUNTS), cache)
    at, rows = 0, np.zeros(whole.shape, np.float32)
    for chunk in (30, 1, 39):
        counts = np.clip(COUNTS - at, 0, chunk)
        ids = np.full((3, chunk), 127, np.int32)
        ids[:, :chunk] = IDS[:, at : at + chunk]
        if chunk == 1 and counts.all():
            logits, cache = DECODE(model, jnp.asarray(ids[:, 0]), cache)
        else:
            logits, cache = PREFILL(model, jnp.asarray(ids), jnp.asarray(counts), cache)
        assert np.isnan(logits[counts == 0]).all()
        for b in np.flatnonzero(counts):
            rows[b] = np.asarray(logits[b])
        at += chunk
    assert_same_logits(rows, whole)


def test_one_at_a_time_decodes_what_prefill_says():
    model = make("deepseek_v32")
    cache = make_cache(model, 3, 70)
    for t in range(40):
        logits, cache = DECODE(model, jnp.asarray(IDS[:, t]), cache)
    whole = nnx.jit(lambda m, x: m(x, attention="sparse"))(model, jnp.asarray(IDS))
    assert_close(logits, whole[:, 39], QUANTISED_INPUTS)


def test_generate_is_greedy_decoding():
    model = make("deepseek_v32")
    cache = make_cache(model, 3, 76)
    ids, counts = jnp.asarray(IDS), jnp.asarray(COUNTS)
    tokens, after = generate(model, ids, counts, cache, max_new_tokens=6)
    assert after.lengths.tolist() == (COUNTS + 5).tolist()
    logits, cache = PREFILL(model, ids, counts, cache)
    for i in range(6):
        assert tokens[:, i].tolist() == logits.argmax(-1).tolist()
        logits, cache = DECODE(model, tokens[:, i], cache)


def test_in_bfloat16_too():
    """XLA's CPU has no code for some products of bfloat16, and says so only when they run."""
    model = make("deepseek_v32", dtype=jnp.bfloat16)
    cache = make_cache(model, 3, 80)
    run = nnx.jit(lambda m, x, n, cache: prefill(m, x, n, cache, attention="dense"))
    got, _ = run(model, jnp.asarray(IDS), jnp.asarray(COUNTS), cache)
    assert_close(got, last_logits(make("deepseek_v32"), "dense"), 1e-3)  # of activations that are rounded at 2^-9
    _, after = nnx.jit(decode)(model, jnp.asarray(IDS[:, 0]), cache)
    assert after.lengths.tolist() == [1, 1, 1]


def test_nothing_else_in_the_pools_is_read():
    """Neither what lies in other requests' slots, nor in nobody's, nor what padding tokens say."""
    model = make("deepseek_v32")
    cache = make_cache(model, 3, 80)
    clean, _ = PREFILL(model, jnp.asarray(IDS), jnp.asarray(COUNTS), cache)
    poisoned = replace(
        cache,
        kv_pools=tuple(jnp.full_like(p, jnp.nan) for p in cache.kv_pools),
        index_pools=tuple(jnp.full_like(p, 0x7F) for p in cache.index_pools),
    )
    ids = np.where(np.arange(70) < COUNTS[:, None], IDS, 3)
    got, _ = PREFILL(model, jnp.asarray(ids), jnp.asarray(COUNTS), poisoned)
    assert_bitwise_equal(got, clean)


def test_what_does_not_fit_is_refused():
    model = make("deepseek_v32")
    cache = make_cache(model, 3, 64)
    with pytest.raises(ValueError, match="counts expected values in"):
        prefill(model, jnp.asarray(IDS), jnp.asarray(COUNTS), cache)
    with pytest.raises(ValueError, match="max_new_tokens expected values in"):
        generate(model, jnp.asarray(IDS[:, :60]), jnp.full(3, 60), cache, max_new_tokens=6)
    logits, _ = jax.jit(lambda x, n: prefill(model, x, n, cache))(jnp.asarray(IDS), jnp.asarray(COUNTS))
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1:]).all()


def test_models_that_no_cache_is_made_for():
    model = make("deepseek_v32", quantize_indexer=False)
    with pytest.raises(ValueError, match="quantize_indexer: expected True"):
        make_cache(model, 1, 64)
    with pytest.raises(ValueError, match="indexer: expected Indexer"):
        make_cache(with_selectors(make("deepseek_v32"), lambda _: most_recent), 1, 64)
    with pytest.raises(ValueError, match="kv_layout: expected the cache's bf16 or None, got fp8_656"):
        make_cache(make("deepseek_v32", KV_FP8_656), 1, 64)
    with pytest.raises(ValueError, match="kv_scale expected 1.0"):
        make_cache(make("deepseek_v32"), 1, 64, kv_scale=2.0)
    small = DeepseekV32Config.from_hf_config(dict(model_type="deepseek_v32") | SMALL | OWN["deepseek_v32"])
    with pytest.raises(ValueError, match="kv_lora_rank: expected 512"):
        make_cache(DeepseekV32(small, rngs=nnx.Rngs(0)), 1, 64)
