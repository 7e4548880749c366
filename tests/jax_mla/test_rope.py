"""Rotary embedding against complex numbers, YaRN against DeepSeek's formula and against transformers."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jax_mla import cos_sin_table
from jax_mla.rope import rotate, rotation
from tests.jax_mla.oracles import rope
from tests.numerics import FLOAT32, assert_bitwise_equal, assert_close

DEEPSEEK: dict[str, Any] = dict(
    rope_theta=10000.0, factor=40.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0
)


def test_table_is_cosines_then_sines():
    position, j = np.arange(5000)[:, None], np.arange(32)[None, :]
    turn = np.exp(1j * position * 10000.0 ** (-2 * j / 64))
    table = np.asarray(cos_sin_table(5000))
    assert table.dtype == np.float32 and table.shape == (5000, 64)
    np.testing.assert_allclose(table, np.concatenate([turn.real, turn.imag], axis=1), rtol=0, atol=1e-7)


def test_table_of_another_base_and_size():
    table = np.asarray(cos_sin_table(10, 8, rope_theta=100.0))
    angle = 9 * 100.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(table[9], [*np.cos(angle), *np.sin(angle)], rtol=0, atol=1e-7)


def yarn_frequency(j: int, factor: float) -> float:
    """DeepSeek-V3.2 ``precompute_freqs_cis``, for one frequency of 32."""
    plain = 10000.0 ** (-2 * j / 64)

    def dimension(rotations: float) -> float:
        return 64 * math.log(4096 / (rotations * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = math.floor(dimension(32)), math.ceil(dimension(1))
    assert 0 <= low < high <= 63
    smooth = 1 - min(max((j - low) / (high - low), 0), 1)
    return plain / factor * (1 - smooth) + plain * smooth


@pytest.mark.parametrize("factor", [4.0, 40.0])
def test_yarn_is_deepseeks_formula(factor):
    frequency = np.array([yarn_frequency(j, factor) for j in range(32)])
    assert frequency[0] == 1 and frequency[31] == pytest.approx(10000.0 ** (-62 / 64) / factor)
    turn = np.exp(1j * np.arange(8192)[:, None] * frequency)
    table = np.asarray(cos_sin_table(8192, **(DEEPSEEK | {"factor": factor})))
    np.testing.assert_allclose(table, np.concatenate([turn.real, turn.imag], axis=1), rtol=0, atol=1e-7)


def test_yarn_is_that_of_transformers():
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = DeepseekV3Config(
        rope_parameters=dict(rope_type="yarn", mscale=1.0, mscale_all_dim=1.0, **DEEPSEEK),
        max_position_embeddings=163840,
        qk_rope_head_dim=64,
    )
    frequency, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    table = np.asarray(cos_sin_table(2, **DEEPSEEK), np.float64)
    assert magnitude == 1.0
    np.testing.assert_allclose(np.arctan2(table[1, 32:], table[1, :32]), frequency.numpy(), rtol=1e-6)


def turned(x, cos_sin, interleaved):
    """``x`` ``[T, D]`` by ``jax_mla.rope``, row ``t`` at position ``t``."""
    partner, f, sign, rotated = rotation(jnp.arange(x.shape[1]), 64, interleaved)
    cos = jnp.where(rotated, cos_sin[:, f], 1.0)
    sin = jnp.where(rotated, cos_sin[:, 32 + f], 0.0)
    return rotate(x, x[:, partner], cos, sin, sign)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_product_of_complex_numbers(interleaved):
    x = np.random.default_rng(0).standard_normal((300, 128)).astype(np.float32)
    cos_sin = cos_sin_table(300, **DEEPSEEK)
    y = np.asarray(turned(jnp.asarray(x), cos_sin, interleaved))
    assert_close(y, rope(x, cos_sin, range(300), interleaved), FLOAT32)
    assert_bitwise_equal(y[:, 64:], x[:, 64:])
    assert_bitwise_equal(y[0], x[0])


def test_a_quarter_turn_by_hand():
    cos_sin = jnp.concatenate([jnp.zeros((1, 32)), jnp.ones((1, 32))], axis=1)
    x = jnp.arange(1.0, 129.0)[None]
    neox, neighbours = np.asarray(turned(x, cos_sin, False))[0], np.asarray(turned(x, cos_sin, True))[0]
    assert neox[[0, 1, 31, 32, 63, 64]].tolist() == [-33, -34, -64, 1, 32, 65]
    assert neighbours[[0, 1, 2, 3, 62, 63, 64]].tolist() == [-2, 1, -4, 3, -64, 63, 65]
