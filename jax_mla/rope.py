"""Rotary position embedding: the table of angles, and the rotation in a form that kernels and ``jnp`` alike can run."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array


def cos_sin_table(
    max_position: int,
    rope_dim: int = 64,
    *,
    rope_theta: float = 10000.0,
    factor: float = 1.0,
    original_max_position_embeddings: int = 4096,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> Array:
    """float32 ``[max_position, rope_dim]``: cosines of the ``rope_dim / 2`` angles, then their sines.

    YaRN's interpolation where ``factor > 1`` (DeepSeek-V3.2 ``inference/model.py::precompute_freqs_cis``). Same layout
    as SGLang's ``cos_sin_cache``. No magnitude factor: DeepSeek's ``mscale`` and ``mscale_all_dim`` are equal, so that
    it cancels here and goes into the softmax scale.
    """
    half = rope_dim // 2
    freq = 1.0 / rope_theta ** (np.arange(half, dtype=np.float64) * 2 / rope_dim)
    if factor > 1.0:

        def correction_dim(rotations: float) -> float:
            turns = original_max_position_embeddings / (rotations * 2 * math.pi)
            return rope_dim * math.log(turns) / (2 * math.log(rope_theta))

        low = max(math.floor(correction_dim(beta_fast)), 0)
        high = min(math.ceil(correction_dim(beta_slow)), rope_dim - 1)
        ramp = np.clip((np.arange(half) - low) / max(high - low, 1e-3), 0, 1)
        freq = freq / factor * ramp + freq * (1 - ramp)
    angle = np.arange(max_position, dtype=np.float64)[:, None] * freq
    return jnp.asarray(np.concatenate([np.cos(angle), np.sin(angle)], axis=1), jnp.float32)


def rotation(column: Array, rope_dim: int, interleaved: bool) -> tuple[Array, Array, Array, Array]:
    """A head's first ``rope_dim`` columns turned: ``y[c] = x[c] cos[f(c)] + sign(c) x[partner(c)] sin[f(c)]``.

    NeoX pairs column ``c`` with ``c + rope_dim / 2``; interleaved pairs ``2 i`` with ``2 i + 1``. Columns from
    ``rope_dim`` on are left as they are.

    - `column`: int32 ``[head_dim]``, its own index.

    Returns int32 ``partner``, int32 ``f`` (both in range for every column), float32 ``sign`` and bool ``rotated``.
    """
    half = rope_dim // 2
    rotated = column < rope_dim
    if interleaved:
        first, partner, f = column % 2 == 0, column ^ 1, column // 2
    else:
        first, partner, f = column < half, jnp.where(column < half, column + half, column - half), column % half
    sign = jnp.where(first, -1.0, 1.0)
    return jnp.where(rotated, partner, column), jnp.where(rotated, f, 0), sign, rotated


def rotate(x: Array, partner: Array, cos: Array, sin: Array, sign: Array) -> Array:
    """The rotated head, given ``x`` and ``x[partner]`` ``[..., head_dim]``, the angles' cosines and sines."""
    return x * cos + sign * partner * sin
