"""Ragged index logits by XLA, and as a Pallas kernel of one program for each block of keys and block of rows,
which goes through the rows with one tile of keys."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla import pallas_triton as pt
from jax_mla.fp8 import E4M3FN, from_bits, to_bits
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


def as_kernel_reads(codes, fp8):
    """FP8 codes as a kernel takes them: e4m3fn as such, which Triton can copy to shared memory ahead of time and
    multiply from there; of e4m3fnuz, whose casts Pallas refuses, the bytes."""
    return codes if fp8 == E4M3FN else to_bits(codes)


def load_codes(at, mask, fp8):
    """The fp8 codes at ``at``; zeros where ``mask`` is off."""
    return pt.load(at, mask=mask, other=0.0) if fp8 == E4M3FN else from_bits(pt.load(at, mask=mask, other=0), fp8)


def load_query(q_ref, weights_ref, t, block_h, fp8):
    """fp8 ``[block_h, 128]`` and float32 ``[block_h]`` of row ``t``; heads past the last are zeros."""
    head, column = jnp.arange(block_h), jnp.arange(INDEX_HEAD_DIM)
    inside = head < q_ref.shape[1]
    mask = jnp.broadcast_to(inside[:, None], (block_h, INDEX_HEAD_DIM))
    q = load_codes(q_ref.at[t, head[:, None], column[None, :]], mask, fp8)
    return q, pt.load(weights_ref.at[t, head], mask=inside, other=0.0)


def score(k, k_scale, q, w):
    """Logits ``[block_k]`` of fp8 keys ``[block_k, 128]`` against one row's fp8 heads ``[block_h, 128]``."""
    return jnp.sum(jnp.maximum(pt.dot(k, q, trans_b=True), 0.0) * w[None, :], axis=1) * k_scale


def _kernel(
    q_ref,  # [T, Hi, 128]
    weights_ref,  # [T, Hi]
    k_ref,  # [S, 128]
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
    first, first_row = pt.program_id(0) * keys, pt.program_id(1) * rows
    s = first + jnp.arange(keys)
    inside = s < k_ref.shape[0]
    here = jnp.minimum(rows, q_ref.shape[0] - first_row)

    def store(t, value):
        pt.store(logits_ref.at[t, s], value, mask=inside)

    t = first_row + jnp.arange(rows)
    start = pt.load(starts_ref.at[t], mask=t < q_ref.shape[0], other=0)
    end = pt.load(ends_ref.at[t], mask=t < q_ref.shape[0], other=0)
    seen = jnp.max(((start < first + keys) & (end > first) & (start < end)).astype(jnp.int32))

    @pt.when(seen > 0)
    def _():
        column = jnp.arange(INDEX_HEAD_DIM)
        mask = jnp.broadcast_to(inside[:, None], (keys, INDEX_HEAD_DIM))
        k = load_codes(k_ref.at[s[:, None], column[None, :]], mask, fp8)
        k_scale = pt.load(k_scale_ref.at[s], mask=inside, other=0.0)

        def row(i, _):  # no condition in it: Triton would not read the next row's query ahead
            q, w = load_query(q_ref, weights_ref, first_row + i, block_h, fp8)
            visible = (s >= starts_ref[first_row + i]) & (s < ends_ref[first_row + i])
            store(first_row + i, jnp.where(visible, score(k, k_scale, q, w), -jnp.inf))

        lax.fori_loop(0, here, row, None)

    @pt.when(seen == 0)
    def _():
        def row(i, _):
            store(first_row + i, jnp.full((keys,), -jnp.inf, jnp.float32))

        lax.fori_loop(0, here, row, None)


def pallas(q8, weights, k8, k_scale, starts, ends, *, fp8, config, interpret):
    config.check()
    t, h, _ = q8.shape
    return pt.kernel_call(
        partial(_kernel, fp8=fp8, block_h=pt.block(h, 16), rows=config.rows, keys=config.keys),
        (as_kernel_reads(q8, fp8), weights, as_kernel_reads(k8, fp8), k_scale, starts, ends),
        (jax.ShapeDtypeStruct((t, k8.shape[0]), jnp.float32),),
        name="index_logits_ragged",
        grid=(pt.cdiv(k8.shape[0], config.keys), pt.cdiv(t, config.rows)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        imprecise_fp8=config.imprecise,
    )[0]
