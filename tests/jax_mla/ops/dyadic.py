"""Inputs whose index logits float32 holds exactly, in whatever order they are summed: results must agree to the bit."""

import numpy as np

from tests.jax_mla.oracles import FP8


def fp8_numbers(rng, shape, fp8: str) -> np.ndarray:
    return rng.choice([-2, -1, -0.5, 0, 0.5, 1, 2], shape).astype(FP8[fp8])


def weights(rng, shape) -> np.ndarray:
    return (rng.integers(-8, 9, shape) / 8).astype(np.float32)


def scales(rng, shape) -> np.ndarray:
    return rng.choice([0.25, 0.5, 1.0, 2.0], shape).astype(np.float32)
