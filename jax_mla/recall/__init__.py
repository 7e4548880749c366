"""Synthetic tasks that a model answers only if the right tokens are selected, their tokenizer, training, evaluation."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
"""The folder of the trained model: for ``jax_mla.nn.load_hf``, transformers and SGLang."""
