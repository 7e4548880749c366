"""``check_selector``: our selectors pass, and each rule has one that breaks it."""

import jax.numpy as jnp
import pytest
from flax import nnx

from jax_mla.nn import DeepseekV32, DeepseekV32Config, NotASelector, check_selector
from jax_mla.nn.indexer import Neighbours, most_recent, other_rope, random_tokens
from tests.jax_mla.nn.models import OWN, SMALL

CONFIG = DeepseekV32Config.from_hf_config(
    dict(model_type="deepseek_v32") | SMALL | OWN["deepseek_v32"] | dict(index_head_dim=128, num_hidden_layers=1)
)


def indexer(**how):
    return DeepseekV32(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32, **how).layers[0].self_attn.indexer


@pytest.mark.parametrize("quantize", [False, True])
def test_ours_pass(quantize):
    check_selector(indexer(quantize_indexer=quantize), CONFIG)
    check_selector(other_rope(indexer(quantize_indexer=quantize)), CONFIG)


def test_so_do_most_recent_and_random():
    check_selector(most_recent, CONFIG)
    check_selector(random_tokens(0), CONFIG)


def scores(hidden):
    return jnp.sin(jnp.cumsum(hidden[..., 0], axis=1))[:, None] + jnp.zeros((hidden.shape[1], 1))


def future(hidden, q_latent, positions):
    """Scores of a token that know the sequence's end."""
    return scores(hidden) + jnp.sin(hidden[:, -1:, :1] * positions.astype(jnp.float32))


def twice(hidden, q_latent, positions):
    return jnp.broadcast_to(positions[:, None] * jnp.zeros(2, jnp.int32), (*hidden.shape[:2], 2))


def too_many(hidden, q_latent, positions):
    every = jnp.broadcast_to(positions, (*hidden.shape[:2], hidden.shape[1]))
    return jnp.where(every <= positions[:, None], every, -1)


def flat(hidden, q_latent, positions):
    return hidden[..., 0]


def rows_from_0(hidden, q_latent, positions):
    return lambda start, size: jnp.cos(scores(hidden)[:, :size] * (40 + jnp.arange(size, dtype=jnp.float32))[:, None])


class Forgetful:
    """Something else each time."""

    def __init__(self):
        self.calls = 0

    def __call__(self, hidden, q_latent, positions):
        self.calls += 1
        return random_tokens(self.calls)(hidden, q_latent, positions)


BROKEN = [
    (future, "nothing to depend on later tokens"),
    (Neighbours, "nothing to depend on the other request"),
    (twice, "each position once"),
    (too_many, "at most index_topk 24 positions"),
    (flat, r"expected \[2, 72, ...\]"),
    (rows_from_0, "the same of some rows as of all"),
    (Forgetful, "the same a second time"),
]


@pytest.mark.parametrize("broken, message", BROKEN, ids=[x.__name__ for x, _ in BROKEN])
def test_each_rule_can_be_broken(broken, message):
    selector = Neighbours(indexer()) if broken is Neighbours else broken() if broken is Forgetful else broken
    with pytest.raises(NotASelector, match=message):
        check_selector(selector, CONFIG)


def test_it_is_no_use_where_nothing_is_chosen():
    """A row of at most index_topk tokens selects them all, and would pass with anything."""
    with pytest.raises(ValueError, match="length: expected over 3/2 of index_topk 24, got 37"):
        check_selector(most_recent, CONFIG, length=37)


def test_positions_that_a_row_does_not_see_are_left_out():
    def ahead(hidden, q_latent, positions):
        return jnp.broadcast_to(positions[:, None] + jnp.arange(2, dtype=jnp.int32), (*hidden.shape[:2], 2))

    check_selector(ahead, CONFIG)
