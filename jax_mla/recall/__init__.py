"""Synthetic tasks that a model answers only if the right tokens are selected, their tokenizer, training, evaluation."""
