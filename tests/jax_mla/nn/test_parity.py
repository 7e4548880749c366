"""Our model beside transformers' own, at random weights in fp32: logits, and who selects what."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from tests.jax_mla.nn.models import MODELS, ours, transformers_model

BATCH, LENGTH = 2, 90


def ids() -> np.ndarray:
    return np.random.default_rng(3).integers(1, 128, (BATCH, LENGTH), dtype=np.int32)


def theirs(model, tokens: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits, and what each indexer selected, int32 ``[B, T, k]``, in the order of the layers that have one."""
    selected = []
    hooks = [
        layer.self_attn.indexer.register_forward_hook(lambda _, __, out: selected.append(out.numpy()))
        for layer in model.model.layers
        if layer.self_attn.indexer is not None
    ]
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()).logits.numpy()
    for hook in hooks:
        hook.remove()
    return logits, selected


@pytest.mark.parametrize("model_type", MODELS)
def test_dense_logits(model_type):
    hf = transformers_model(model_type, index_topk=LENGTH)
    expected, _ = theirs(hf, ids())
    got = nnx.jit(lambda model, x: model(x))(ours(hf), jnp.asarray(ids()))
    assert np.abs(expected).max() > 1
    assert np.abs(got - expected).max() <= 2e-4


@pytest.mark.parametrize("model_type", MODELS)
def test_sparse_logits_and_each_layers_selection(model_type):
    hf = transformers_model(model_type)
    logits, selected = theirs(hf, ids())
    model = ours(hf)
    got = nnx.jit(lambda model, x: model(x, attention="sparse"))(model, jnp.asarray(ids()))
    mine = nnx.jit(lambda model, x: model.selections(x))(model, jnp.asarray(ids()))
    order = iter(selected)
    last = np.empty((BATCH, LENGTH, 0), np.int64)
    for kind, chosen in zip(model.config.indexer_types, mine, strict=True):
        last = next(order) if kind == "full" else last
        for b in range(BATCH):
            for t in range(LENGTH):
                expected = {s for s in last[b, t].tolist() if s <= t}
                assert set(chosen[b, t].tolist()) - {-1} == expected, (b, t)
    assert np.abs(got - logits).max() <= 2e-4
    dense = nnx.jit(lambda model, x: model(x))(model, jnp.asarray(ids()))
    assert np.abs(dense - logits)[:, 40:].max() > 0.01
