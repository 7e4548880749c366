"""What the indexer does to a query's head and to a key alike: its angles, and the way from float32 to FP8."""

import jax.numpy as jnp

from jax_mla import pallas_triton as pt
from jax_mla.fp8 import AMAX_FLOOR, quantize_block
from jax_mla.hadamard import hadamard_signs
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


def times_hadamard(y):
    """float32 ``[rows, 128]`` times the Hadamard matrix, as three products in bf16, whose numbers of 8 bits add up to
    the 24 of a float32: the matrix' are ±1 but for their scale, and the sums are float32's."""
    signs = hadamard_signs(INDEX_HEAD_DIM).astype(jnp.bfloat16)
    total, rest = None, y
    for _ in range(3):
        part = rest.astype(jnp.bfloat16)
        rest = rest - part.astype(jnp.float32)
        product = pt.dot(part, signs)
        total = product if total is None else total + product
    return total * INDEX_HEAD_DIM**-0.5


def finish(y, *, fp8, hadamard):
    """uint8 codes and ue8m0 scales ``[rows, 1]`` of the rotated heads ``y`` ``[rows, 128]``."""
    if hadamard:
        y = times_hadamard(y)
    amax = jnp.maximum(jnp.max(jnp.abs(y), axis=-1), AMAX_FLOOR)
    return quantize_block(y, amax[..., None], fp8, "ue8m0")
