"""Gradients and whole models on a GPU: the kernels that are compiled there, inside of what trains and decodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_mla import KV_BF16, KV_FP8_576, KV_FP8_656
from jax_mla.nn import load_hf, make_cache, prefill
from jax_mla.recall import MODEL, tasks
from jax_mla.recall.train import Stage, steps
from tests.jax_mla.ops.test_sparse_mla_grad import dense_gradient, make, pull_back
from tests.numerics import QUANTISED_INPUTS, calc_diff


def test_gradient_of_the_compiled_kernel():
    pool, values, q, slots, d_out, d_lse = make(KV_BF16)
    _, d_q, d_pool, _ = pull_back(q, pool, slots, d_out, d_lse, KV_BF16)
    expected_q, expected_pool = dense_gradient(q, values, slots, d_out, d_lse)
    assert calc_diff(d_q, expected_q) <= QUANTISED_INPUTS
    assert calc_diff(d_pool, expected_pool) <= QUANTISED_INPUTS


@pytest.mark.parametrize("kv_layout", [KV_BF16, KV_FP8_656, KV_FP8_576], ids=["bf16", "fp8_656", "fp8_576"])
def test_the_trained_model_answers(kv_layout):
    model = load_hf(MODEL, progress=False, quantize_indexer=True, hadamard=True, kv_layout=kv_layout)
    text = tasks.recall(jax.random.key(3), 1024, last=64)
    answers = np.flatnonzero(text.answers)
    logits = nnx.jit(lambda m, x: m(x[None], attention="sparse"))(model, text.tokens)[0]
    right = np.asarray(logits.argmax(-1))[answers - 1] == np.asarray(text.tokens)[answers]
    assert right.mean() >= 0.9
    cut = int(answers[0])
    cache = make_cache(model, 1, 1024, kv_layout=kv_layout)
    cached, _ = nnx.jit(prefill)(model, text.tokens[None, :cut], jnp.array([cut]), cache)
    assert int(cached[0].argmax()) == int(logits[cut - 1].argmax())


@pytest.mark.parametrize("kind", ["dense", "warmup", "sparse"])
def test_each_stage_trains(kind):
    model = load_hf(MODEL, progress=False)
    for figures in steps(model, Stage(kind, 512, 2, 3, 1e-4), jax.random.key(0)):
        assert np.isfinite([float(x) for x in figures.values()]).all()
