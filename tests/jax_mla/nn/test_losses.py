"""What trains the indexer, against float64; where its gradient goes and where it does not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_mla.nn import DeepseekV32, DeepseekV32Config, indexer_kl, with_selectors
from jax_mla.nn import attention as attention_module
from jax_mla.nn.indexer import Neighbours, most_recent, other_rope, random_tokens
from tests.jax_mla.nn.models import OWN, SMALL
from tests.numerics import FLOAT32, assert_bitwise_equal, calc_diff

IDS = jnp.asarray(np.random.default_rng(2).integers(1, 128, (2, 60), dtype=np.int32))


def make(model_type="deepseek_v32", layers=2, **how: Any) -> DeepseekV32:
    config = DeepseekV32Config.from_hf_config(
        dict(model_type=model_type) | SMALL | OWN[model_type] | dict(initializer_range=0.15, num_hidden_layers=layers)
    )
    return DeepseekV32(config, rngs=nnx.Rngs(9), dtype=jnp.float32, **how)


def kl64(scores, attention, mask):
    found = np.zeros(scores.shape[:-1])
    for at in np.ndindex(found.shape):
        p, s = attention[at][mask[at]].astype(np.float64), scores[at][mask[at]].astype(np.float64)
        if p.sum() > 0:
            p = p / p.sum()
            log_q = s - s.max() - np.log(np.exp(s - s.max()).sum())
            found[at] = np.sum(np.where(p > 0, p * (np.log(np.where(p > 0, p, 1)) - log_q), 0))
    return found


def test_is_the_divergence():
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((3, 7, 40)).astype(np.float32) * 5
    attention = rng.random((3, 7, 40)).astype(np.float32) * (rng.random((3, 7, 40)) < 0.7)
    mask = rng.random((3, 7, 40)) < 0.6
    mask[0, 0], mask[1, 1] = False, np.arange(40) == 5
    attention[2, 2] = 0
    got = indexer_kl(jnp.asarray(scores), jnp.asarray(attention), jnp.asarray(mask))
    expected = kl64(scores, attention, mask)
    assert calc_diff(got, expected) <= FLOAT32
    assert got[0, 0] == got[2, 2] == 0 and abs(got[1, 1]) < 1e-6
    outside = np.where(mask, scores, np.nan)
    assert_bitwise_equal(indexer_kl(jnp.asarray(outside), jnp.asarray(attention), jnp.asarray(mask)), got)


def test_gradient_is_softmax_minus_attention():
    rng = np.random.default_rng(1)
    scores, attention = rng.standard_normal((5, 30)).astype(np.float32), rng.random((5, 30)).astype(np.float32)
    mask = rng.random((5, 30)) < 0.5
    mask[3] = False
    d_scores, d_attention = jax.grad(lambda s, a: indexer_kl(s, a, jnp.asarray(mask)).sum(), (0, 1))(
        jnp.asarray(scores), jnp.asarray(attention)
    )
    q = np.exp(scores.astype(np.float64)) * mask
    p = attention.astype(np.float64) * mask
    total = [np.maximum(x.sum(-1, keepdims=True), 1e-300) for x in (q, p)]
    assert calc_diff(d_scores, q / total[0] - p / total[1]) <= FLOAT32
    assert not d_attention.any()


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_each_loss_trains_its_own_part(attention):
    """The divergence reaches every indexer's every parameter and nothing else, the logits all else and no indexer."""
    model = make()

    def gradient(of):
        def loss(model):
            logits, kl = model(IDS, attention=attention, with_indexer_kl=True)
            return kl.sum() if of == "kl" else jnp.mean(jax.nn.log_softmax(logits)[..., 5])

        found = nnx.jit(nnx.grad(loss))(model)
        return {".".join(map(str, p)): np.asarray(x) for p, x in nnx.to_flat_state(found)}

    for of in ("kl", "logits"):
        for name, x in gradient(of).items():
            assert np.isfinite(x).all(), name
            assert bool(x.any()) == (("indexer" in name) == (of == "kl")), (of, name)


def test_divergence_of_the_model_is_that_of_its_attention():
    """In one layer: the heads' probabilities, summed, against the indexer's scores."""
    model = make(layers=1)
    layer = model.layers[0]
    x = layer.input_layernorm(model.embed_tokens(IDS))
    got = layer.self_attn(x, "dense", with_kl=True).kl
    mla = layer.self_attn
    q_latent, (q_nope, q_rope), (latent, k_rope) = mla.project(x, attention_module.angles(model.config, 60))
    kv = np.asarray(mla.kv_b_proj(latent), np.float64).reshape(2, 60, 4, -1)
    s = np.einsum("bthd,bshd->bhts", np.float64(q_nope), kv[..., :24])
    s = (s + np.einsum("bthd,bsd->bhts", np.float64(q_rope), np.float64(k_rope))) * model.config.softmax_scale
    causal = np.tril(np.ones((60, 60), bool))
    p = np.where(causal, np.exp(s - s.max(-1, keepdims=True)), 0)
    p = (p / p.sum(-1, keepdims=True)).sum(1)
    scores = np.asarray(mla.indexer(x, q_latent, jnp.arange(60))(0, 60))
    expected = kl64(scores, p, np.broadcast_to(causal, (2, 60, 60)))
    assert calc_diff(got[None], expected.mean()[None]) <= FLOAT32


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_blocks_and_remat_change_nothing(attention, monkeypatch):
    def results(**how):
        def loss(model):
            logits, kl = model(IDS, attention=attention, with_indexer_kl=True)
            return jnp.mean(jax.nn.log_softmax(logits)[..., 5]) + kl.sum(), logits

        made = make(layers=1 + (attention == "sparse"), **how)
        value, gradient = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(made)
        return [np.asarray(x) for x in jax.tree.leaves((value, nnx.to_pure_dict(gradient)))]

    plain = results()
    remat = results(remat=True)
    monkeypatch.setattr(attention_module, "BLOCK_BYTES", 17 * 2 * 60 * 4 * 16)  # 17 rows of 60: the last one overlaps
    blocked = results()
    for one, *others in zip(plain, remat, blocked, strict=True):
        for other in others:
            assert calc_diff(other, one) <= FLOAT32


def test_selectors_are_swapped_in_a_line():
    model = make(layers=1)

    def selected(other):
        return np.asarray(nnx.jit(lambda m: m.selections(IDS))(other)[0])

    k, own = model.config.index_topk, selected(model)
    recent = selected(with_selectors(model, lambda _: most_recent))
    assert recent[0, 50].tolist() == list(range(51 - k, 51))
    anything = selected(with_selectors(model, lambda _: random_tokens(0)))
    assert len(set(anything[0, 50]) & set(own[0, 50])) < k
    assert_bitwise_equal(selected(with_selectors(model, Neighbours)), np.roll(own, 1, axis=0))
    assert (selected(with_selectors(model, other_rope)) != own).any()
    assert_bitwise_equal(selected(model), own)  # the model itself is as it was


def test_positions_instead_of_scores_and_what_is_wrong():
    model = make(layers=1)
    first = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (2, 60, 8))
    fixed = with_selectors(model, lambda _: lambda hidden, q_latent, positions: first)
    logits = nnx.jit(lambda m: m(IDS, attention="sparse"))(fixed)
    assert np.isfinite(logits).all()
    with pytest.raises(ValueError, match="with_indexer_kl: expected a selector that returns scores"):
        fixed(IDS, attention="sparse", with_indexer_kl=True)
    short = with_selectors(model, lambda _: lambda hidden, q_latent, positions: jnp.zeros((2, 60, 59)))
    with pytest.raises(ValueError, match="selector: expected scores of all 60 tokens"):
        short(IDS, attention="sparse")
