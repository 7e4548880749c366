"""What the indexer's query preparation means, with RoPE as a product of complex numbers."""

import jax.numpy as jnp
from jax import lax

from jax_mla.fp8 import AMAX_FLOOR
from jax_mla.ops.quantize.reference import cast_reference, power_of_two_reference


def rope_reference(x, cos_sin, positions, interleaved):
    """``x`` ``[T, ..., 128]`` with its first 64 columns rotated."""
    inside = (positions >= 0) & (positions < cos_sin.shape[0])
    angle = jnp.where(inside[:, None], cos_sin[positions], jnp.nan)
    turn = lax.complex(angle[:, :32], angle[:, 32:]).reshape(x.shape[0], *(1,) * (x.ndim - 2), 32)
    pairs = x[..., :64].reshape(*x.shape[:-1], 32, 2) if interleaved else x[..., :64].reshape(*x.shape[:-1], 2, 32)
    axis = -1 if interleaved else -2
    real, imag = jnp.take(pairs, 0, axis=axis), jnp.take(pairs, 1, axis=axis)
    turned = lax.complex(real, imag) * turn
    y = jnp.stack([turned.real, turned.imag], axis=axis).reshape(*x.shape[:-1], 64)
    return jnp.concatenate([y, x[..., 64:]], axis=-1)


def hadamard_reference(x):
    """Sylvester's construction, doubled seven times."""
    h = jnp.ones((1, 1))
    for _ in range(7):
        h = jnp.block([[h, h], [h, -h]])
    return jnp.einsum("...i,ij->...j", x, h, precision="highest") / jnp.sqrt(128.0)


def quantize_reference(x, fp8):
    """fp8 values and ue8m0 scales ``[..., 1]`` of the last axis."""
    amax = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), AMAX_FLOOR)
    scale = power_of_two_reference(amax / fp8.max)
    return cast_reference(x / scale, fp8), scale


def reference(q, weights, cos_sin, positions, *, fp8, interleaved, hadamard):
    y = rope_reference(q.astype(jnp.float32), cos_sin, positions, interleaved)
    q8, scale = quantize_reference(hadamard_reference(y) if hadamard else y, fp8)
    return q8, weights.astype(jnp.float32) * scale[..., 0] * 128**-0.5 * q.shape[1] ** -0.5
