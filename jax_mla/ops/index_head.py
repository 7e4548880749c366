"""What the indexer does to a query's head and to a key alike: its angles, and the way from float32 to FP8."""

import jax.numpy as jnp

from jax_mla import pallas_triton as pt
from jax_mla.fp8 import AMAX_FLOOR, quantize_block
from jax_mla.hadamard import hadamard_matrix
from jax_mla.layouts import INDEX_HEAD_DIM, QK_ROPE_HEAD_DIM


def angles(cos_sin, positions, f, rotated):
    """Cosines and sines ``[T, 128]`` of each column's angle at ``positions``; NaN for a position outside the table."""
    row = cos_sin.at[positions].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    half = QK_ROPE_HEAD_DIM // 2
    return jnp.where(rotated, row[:, f], 1.0), jnp.where(rotated, row[:, half + f], 0.0)


def load_angles(cos_sin_ref, positions, f, rotated):
    """``angles``, in a kernel."""
    known = ((positions >= 0) & (positions < cos_sin_ref.shape[0]))[:, None]
    row = jnp.where(known, positions[:, None], 0)
    inside = jnp.broadcast_to(known, (*positions.shape, *f.shape))
    cos = pt.load(cos_sin_ref.at[row, f[None, :]], mask=inside, other=jnp.nan)
    sin = pt.load(cos_sin_ref.at[row, (QK_ROPE_HEAD_DIM // 2 + f)[None, :]], mask=inside, other=jnp.nan)
    return jnp.where(rotated[None, :], cos, 1.0), jnp.where(rotated[None, :], sin, 0.0)


def finish(y, *, fp8, hadamard):
    """uint8 codes and ue8m0 scales ``[rows, 1]`` of the rotated heads ``y`` ``[rows, 128]``."""
    if hadamard:
        y = pt.dot(y, hadamard_matrix(INDEX_HEAD_DIM))
    amax = jnp.maximum(jnp.max(jnp.abs(y), axis=-1), AMAX_FLOOR)
    return quantize_block(y, amax[..., None], fp8, "ue8m0")
