"""The gradient of sparse MLA, the same whichever implementation ran forward: gathers again, scatters what it finds.

With $p = e^{s - \\mathrm{lse}}$ of the kept keys, $d_o$ and $d_l$ the cotangents of ``out`` and ``lse``:

$$ds_{t,h,j} = p_{t,h,j}\\,\\big(d_o \\cdot c_j - \\sum_i p_{t,h,i}\\, d_o \\cdot c_i + d_l\\big), \\quad
  dq_{t,h} = \\sigma \\sum_j ds_{t,h,j}\\, k_j, \\quad
  dk_j = \\sum_{t,h} \\sigma\\, ds_{t,h,j}\\, q_{t,h} + p_{t,h,j}\\, (d_o, 0)$$

with $k = (c, r)$ the 576 values of a row. Sums are float32, in blocks of rows whose gathered keys stay under
``BLOCK_BYTES``; the pool's gradient is float32 ``[N, 576]`` until the end.
"""

from functools import wraps

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla.layouts import KV_LORA_RANK, QK_ROPE_HEAD_DIM

BLOCK_BYTES = 64 << 20
WIDTH = KV_LORA_RANK + QK_ROPE_HEAD_DIM


def differentiable(f):
    """``f`` (an implementation of ``sparse_mla``) with the gradient of this file.

    By queries and by ``kv_scale`` for every layout, by the pool too where its elements are numbers (bf16); FP8 codes
    have none. Reverse mode, once.
    """

    @wraps(f)
    def with_gradient(*arrays, layout, softmax_scale, **how):
        @jax.custom_vjp
        def op(*arrays):
            return f(*arrays, layout=layout, softmax_scale=softmax_scale, **how)

        def forward(*arrays):
            out, lse = op(*arrays)
            return (out, lse), (*arrays, lse)

        def backward(saved, cotangents):
            return _backward(*saved, *cotangents, layout=layout, softmax_scale=softmax_scale)

        op.defvjp(forward, backward)
        return op(*arrays)

    return with_gradient


def _blocks(x, rows, fill):
    """``x`` in blocks of ``rows`` along its first axis, the last one filled up with ``fill``."""
    count = -(-x.shape[0] // rows)
    x = jnp.pad(x, [(0, count * rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
    return x.reshape(count, rows, *x.shape[1:])


def _backward(q_nope, q_rope, pool, slots, kv_scale, lse, d_out, d_lse, *, layout, softmax_scale):
    t, _, _ = q_nope.shape
    n = pool.shape[0]
    is_float = jnp.issubdtype(pool.dtype, jnp.floating)
    q = jnp.concatenate([q_nope, q_rope], axis=-1)
    rows = max(1, min(t, BLOCK_BYTES // (slots.shape[1] * WIDTH * 4)))

    def product(equation, *factors):
        return jnp.einsum(equation, *factors, precision="highest")

    def block(carry, x):
        d_pool, d_scale = carry
        q, slots, lse, d_out, d_lse = x
        q, d_out = q.astype(jnp.float32), d_out.astype(jnp.float32)
        valid = (slots >= 0) & (slots < n)
        kv = layout.unpack(pool[jnp.where(valid, slots, 0)], kv_scale)
        kv = jnp.where(valid[..., None], kv, 0.0)
        kept = valid[:, None]  # an empty row's lse is -inf, its cotangent anything
        s = product("thd,tkd->thk", q, kv) * softmax_scale
        p = jnp.where(kept, jnp.exp(s - jnp.where(kept, lse[..., None], 0.0)), 0.0)
        d_p = product("thd,tkd->thk", d_out, kv[..., :KV_LORA_RANK])
        mean = jnp.sum(p * d_p, axis=-1, keepdims=True)
        d_s = jnp.where(kept, p * (d_p - mean + jnp.where(kept, d_lse[..., None], 0.0)), 0.0) * softmax_scale
        d_q = product("thk,tkd->thd", d_s, kv)
        if is_float or layout.scaled:
            d_kv = product("thk,thd->tkd", d_s, q)
            d_kv = d_kv.at[..., :KV_LORA_RANK].add(product("thk,thd->tkd", p, d_out))
            if is_float:
                d_pool = d_pool.at[jnp.where(valid, slots, n)].add(d_kv, mode="drop")
            else:
                d_scale = d_scale + jnp.sum(d_kv * kv) / kv_scale
        return (d_pool, d_scale), d_q

    start = (jnp.zeros((n, WIDTH) if is_float else (0, WIDTH), jnp.float32), jnp.zeros((), jnp.float32))
    xs = [_blocks(x, rows, fill) for x, fill in ((q, 0), (slots, -1), (lse, 0), (d_out, 0), (d_lse, 0))]
    (d_pool, d_scale), d_q = lax.scan(block, start, tuple(xs))
    d_q = d_q.reshape(-1, *q.shape[1:])[:t].astype(q_nope.dtype)
    d_nope, d_rope = d_q[..., :KV_LORA_RANK], d_q[..., KV_LORA_RANK:]
    d_scale = d_scale.astype(jnp.result_type(kv_scale))
    return d_nope, d_rope, d_pool.astype(pool.dtype) if is_float else None, None, d_scale
