"""Quantisation by XLA, and as a Pallas kernel of one program for each tile of rows and block of 128."""

from functools import partial

import jax
import jax.numpy as jnp

from jax_mla import pallas_triton as pt
from jax_mla.fp8 import block_scale, encode, quantize_block
from jax_mla.layouts import BLOCK


def xla(x, *, fp8, block, scale, amax_floor):
    x32 = x.astype(jnp.float32)
    blocks = x32.reshape(1, 1, -1) if block is None else x32.reshape(x.shape[0], -1, block)
    amax = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1), amax_floor)
    codes, s = quantize_block(blocks, amax[..., None], fp8, scale)
    return codes.reshape(x.shape), s[..., 0]


def _kernel(x_ref, codes_ref, scale_ref, *, fp8, scale, amax_floor, rows):
    row = pt.program_id(0) * rows + jnp.arange(rows)
    column = pt.program_id(1) * BLOCK + jnp.arange(BLOCK)
    inside = row < x_ref.shape[0]
    mask = jnp.broadcast_to(inside[:, None], (rows, BLOCK))
    x = pt.load(x_ref.at[row[:, None], column[None, :]], mask=mask, other=0.0).astype(jnp.float32)
    amax = jnp.maximum(jnp.max(jnp.abs(x), axis=1), amax_floor)
    codes, s = quantize_block(x, amax[:, None], fp8, scale)
    pt.store(codes_ref.at[row[:, None], column[None, :]], codes, mask=mask)
    block_number = jnp.full((rows,), pt.program_id(1), jnp.int32)
    pt.store(scale_ref.at[row, block_number], jnp.sum(s, axis=1), mask=inside)


def _encode_kernel(x_ref, scale_ref, codes_ref, *, fp8, rows):
    row = pt.program_id(0) * rows + jnp.arange(rows)
    column = pt.program_id(1) * BLOCK + jnp.arange(BLOCK)
    mask = (row < x_ref.shape[0])[:, None] & (column < x_ref.shape[1])[None, :]
    at = (row[:, None], column[None, :])
    s = scale_ref[0, 0]
    x = pt.load(x_ref.at[at], mask=mask, other=0.0).astype(jnp.float32)
    pt.store(codes_ref.at[at], encode(x / jnp.where(s > 0, s, 1.0), fp8), mask=mask)


def pallas(x, *, fp8, block, scale, amax_floor, config, interpret):
    rows, n = x.shape
    grid = (pt.cdiv(rows, config.rows), pt.cdiv(n, BLOCK))
    codes = jax.ShapeDtypeStruct(x.shape, jnp.uint8)
    options = dict(grid=grid, num_warps=config.num_warps, num_stages=1, interpret=interpret)
    if block is None:  # one number for the whole tensor is a reduction, which XLA does
        amax = jnp.maximum(jnp.max(jnp.abs(x.astype(jnp.float32))), amax_floor)
        s = block_scale(amax, fp8, scale).reshape(1, 1)
        kernel = partial(_encode_kernel, fp8=fp8, rows=config.rows)
        return pt.kernel_call(kernel, (x, s), (codes,), name="quantize_tensor", **options)[0], s
    kernel = partial(_kernel, fp8=fp8, scale=scale, amax_floor=amax_floor, rows=config.rows)
    scales = jax.ShapeDtypeStruct((rows, n // BLOCK), jnp.float32)
    return tuple(pt.kernel_call(kernel, (x,), (codes, scales), name="quantize", **options))
