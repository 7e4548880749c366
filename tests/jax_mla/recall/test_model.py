import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_mla.recall import tasks
from jax_mla.recall.model import CONFIG, create, with_topk


def test_starts_with_what_recall_needs():
    model = create(dtype=jnp.float32)
    batch = jax.vmap(lambda key: tasks.recall(key, 129))(jax.random.split(jax.random.key(0), 8))
    logits = model(batch.tokens)
    assert isinstance(logits, jax.Array) and np.isfinite(logits).all()
    right = (logits[:, :-1].argmax(-1) == batch.tokens[:, 1:])[batch.answers[:, 1:]]
    assert float(right.mean()) > 0.2  # a digit at random: 0.1, and all 259 ids compete


def test_topk_is_changed_in_a_copy():
    model = create(dtype=jnp.float32)
    tokens = jnp.zeros((1, 20), jnp.int32)
    assert [x.shape for x in with_topk(model, 8).selections(tokens)] == [(1, 20, 8)] * 2
    assert [x.shape for x in model.selections(tokens)] == [(1, 20, 20)] * 2
    with pytest.raises(ValueError, match="index_topk: expected at least 1, got 0"):
        with_topk(model, 0)


@pytest.mark.parametrize(("field", "value"), [("num_hidden_layers", 1), ("hidden_size", 192), ("q_lora_rank", 64)])
def test_sizes_without_room_are_refused(field, value):
    config = dataclasses.replace(CONFIG, mlp_layer_types=(), indexer_types=(), **{field: value})
    with pytest.raises(ValueError, match=rf"create: config.*expected.*{value}"):
        create(config)
