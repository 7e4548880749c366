"""Ragged index logits by XLA, and as a Pallas kernel of one program for each block of rows and block of keys."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla import pallas_triton as pt
from jax_mla.fp8 import from_bits, to_bits
from jax_mla.layouts import INDEX_HEAD_DIM


def products(q, k):
    """``q[i] . k[s]``, float32 ``[I, S]`` of ``q`` ``[I, 128]`` and ``k`` ``[S, 128]``."""
    return lax.dot_general(q, k, (((1,), (1,)), ((), ())), precision="highest")


def xla(q8, weights, k8, k_scale, starts, ends, *, fp8):
    k = k8.astype(jnp.float32)

    def add(total, head):  # one head after the other: never [T, H, S]
        q_h, w_h = head
        return total + w_h[:, None] * jnp.maximum(products(q_h, k), 0.0), None

    start = jnp.zeros((q8.shape[0], k.shape[0]), jnp.float32)
    logits = lax.scan(add, start, (jnp.swapaxes(q8.astype(jnp.float32), 0, 1), weights.T))[0] * k_scale
    s = jnp.arange(k8.shape[0])
    return jnp.where((s >= starts[:, None]) & (s < ends[:, None]), logits, -jnp.inf)


def load_query(q_ref, weights_ref, t, block_h, fp8):
    """fp8 ``[block_h, 128]`` and float32 ``[block_h]`` of row ``t``; heads past the last are zeros."""
    head, column = jnp.arange(block_h), jnp.arange(INDEX_HEAD_DIM)
    inside = head < q_ref.shape[1]
    row = jnp.full((block_h,), t)
    mask = jnp.broadcast_to(inside[:, None], (block_h, INDEX_HEAD_DIM))
    q = pt.load(q_ref.at[row[:, None], head[:, None], column[None, :]], mask=mask, other=0)
    return from_bits(q, fp8), pt.load(weights_ref.at[row, head], mask=inside, other=0.0)


def score(k, k_scale, q, w):
    """Logits ``[block_k]`` of fp8 keys ``[block_k, 128]`` against one row's fp8 heads ``[block_h, 128]``."""
    return jnp.sum(jnp.maximum(pt.dot(k, q, trans_b=True), 0.0) * w[None, :], axis=1) * k_scale


def _kernel(
    q_ref,  # [T, Hi, 128] u8
    weights_ref,  # [T, Hi]
    k_ref,  # [S, 128] u8
    k_scale_ref,  # [S]
    starts_ref,  # [T]
    ends_ref,  # [T]
    logits_ref,  # [T, S]
    *,
    fp8,
    block_h,
    rows,
    keys,
):
    first_row, first = pt.program_id(0) * rows, pt.program_id(1) * keys
    s = first + jnp.arange(keys)
    inside = s < k_ref.shape[0]
    column = jnp.arange(INDEX_HEAD_DIM)
    mask = jnp.broadcast_to(inside[:, None], (keys, INDEX_HEAD_DIM))
    k = from_bits(pt.load(k_ref.at[s[:, None], column[None, :]], mask=mask, other=0), fp8)
    k_scale = pt.load(k_scale_ref.at[s], mask=inside, other=0.0)

    def row(i, _):
        t = first_row + i
        start, end = starts_ref[t], ends_ref[t]

        def logits():
            q, w = load_query(q_ref, weights_ref, t, block_h, fp8)
            return jnp.where((s >= start) & (s < end), score(k, k_scale, q, w), -jnp.inf)

        touches = (start < first + keys) & (end > first)
        value = lax.cond(touches, logits, lambda: jnp.full((keys,), -jnp.inf, jnp.float32))
        pt.store(logits_ref.at[jnp.full((keys,), t), s], value, mask=inside)

    lax.fori_loop(0, jnp.minimum(rows, q_ref.shape[0] - first_row), row, None)


def pallas(q8, weights, k8, k_scale, starts, ends, *, fp8, config, interpret):
    t, h, _ = q8.shape
    return pt.kernel_call(
        partial(_kernel, fp8=fp8, block_h=pt.block(h, 16), rows=config.rows, keys=config.keys),
        (to_bits(q8), weights, to_bits(k8), k_scale, starts, ends),
        (jax.ShapeDtypeStruct((t, k8.shape[0]), jnp.float32),),
        name="index_logits_ragged",
        grid=(pt.cdiv(t, config.rows), pt.cdiv(k8.shape[0], config.keys)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )[0]
