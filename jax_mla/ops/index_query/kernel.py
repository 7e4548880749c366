"""The indexer's queries by XLA, and as a Pallas kernel of one program a token."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla import pallas_triton as pt
from jax_mla.fp8 import from_bits
from jax_mla.layouts import INDEX_HEAD_DIM, QK_ROPE_HEAD_DIM
from jax_mla.ops.index_head import angles, finish, load_angles
from jax_mla.rope import rotate, rotation


def weight_scale(heads: int) -> float:
    """What a head's weight is multiplied with beside its query's scale: 128^-1/2 and heads^-1/2."""
    return INDEX_HEAD_DIM**-0.5 * heads**-0.5


def xla(q, weights, cos_sin, positions, *, fp8, interleaved, hadamard):
    t, h, d = q.shape
    partner, f, sign, rotated = rotation(jnp.arange(d), QK_ROPE_HEAD_DIM, interleaved)
    cos, sin = angles(cos_sin, positions, f, rotated)
    x = q.astype(jnp.float32)
    y = rotate(x, x[..., partner], cos[:, None], sin[:, None], sign)
    y = lax.optimization_barrier(y)  # XLA on a CPU computes the rotation anew for each of its uses otherwise
    codes, scale = finish(y.reshape(t * h, d), fp8=fp8, hadamard=hadamard)
    weights = weights.astype(jnp.float32) * scale.reshape(t, h) * weight_scale(h)
    return from_bits(codes.reshape(t, h, d), fp8), weights


def _kernel(q_ref, weights_ref, cos_sin_ref, positions_ref, codes_ref, out_ref, *, fp8, interleaved, hadamard, block):
    t = pt.program_id(0)
    heads = q_ref.shape[1]
    head, column = jnp.arange(block), jnp.arange(INDEX_HEAD_DIM)
    mask = jnp.broadcast_to((head < heads)[:, None], (block, INDEX_HEAD_DIM))
    partner, f, sign, rotated = rotation(column, QK_ROPE_HEAD_DIM, interleaved)
    cos, sin = load_angles(cos_sin_ref, jnp.full((1,), positions_ref[t]), f, rotated)
    row = jnp.full((block,), t)
    x = pt.load(q_ref.at[row[:, None], head[:, None], column[None, :]], mask=mask, other=0.0).astype(jnp.float32)
    xp = pt.load(q_ref.at[row[:, None], head[:, None], partner[None, :]], mask=mask, other=0.0).astype(jnp.float32)
    codes, scale = finish(rotate(x, xp, cos, sin, sign[None, :]), fp8=fp8, hadamard=hadamard)
    pt.store(codes_ref.at[row[:, None], head[:, None], column[None, :]], codes, mask=mask)
    w = pt.load(weights_ref.at[row, head], mask=head < heads, other=0.0).astype(jnp.float32)
    pt.store(out_ref.at[row, head], w * jnp.sum(scale, axis=1) * weight_scale(heads), mask=head < heads)


def pallas(q, weights, cos_sin, positions, *, fp8, interleaved, hadamard, config, interpret):
    t, h, d = q.shape
    codes, folded = pt.kernel_call(
        partial(_kernel, fp8=fp8, interleaved=interleaved, hadamard=hadamard, block=pt.block(h, 16)),
        (q, weights, cos_sin, positions),
        (jax.ShapeDtypeStruct((t, h, d), jnp.uint8), jax.ShapeDtypeStruct((t, h), jnp.float32)),
        name="index_query",
        grid=(t,),
        num_warps=config.num_warps,
        num_stages=1,
        interpret=interpret,
    )
    return from_bits(codes, fp8), folded
