"""The model that comes with the package is the one that its code says, and needs its selection."""

import dataclasses
import filecmp

import jax.numpy as jnp
import pytest

from jax_mla.nn import DeepseekV32, load_hf, with_selectors
from jax_mla.nn.checkpoint import _headers
from jax_mla.recall import MODEL
from jax_mla.recall.evaluate import SABOTAGES, accuracy
from jax_mla.recall.model import CONFIG
from jax_mla.recall.tokenizer import write_tokenizer

LENGTH = 512
HOW = dict(texts=2, questions=48)


@pytest.fixture(scope="module")
def model() -> DeepseekV32:
    return load_hf(MODEL, dtype=jnp.float32, progress=False)


def test_is_of_its_config(model):
    assert model.config == dataclasses.replace(CONFIG, initializer_range=model.config.initializer_range)


def test_is_a_few_megabytes_of_bfloat16():
    tensors = dict(_headers(MODEL / "model.safetensors"))
    assert {x.dtype for name, x in tensors.items() if "bias" not in name} == {"BF16"}
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 5e6


def test_has_its_tokenizer_and_its_card(tmp_path):
    write_tokenizer(tmp_path)
    for file in tmp_path.iterdir():
        assert filecmp.cmp(file, MODEL / file.name, shallow=False), file.name
    assert "Apache-2.0" in (MODEL / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("selection", ["its own", *SABOTAGES])
def test_needs_its_selection(model, selection):
    """64 of up to 512 tokens: it answers, and with any other selection it falls by a third at least."""
    if selection == "its own":
        assert accuracy(model, LENGTH, **HOW) >= 0.97
    else:
        assert accuracy(with_selectors(model, SABOTAGES[selection]), LENGTH, **HOW) <= 0.65
