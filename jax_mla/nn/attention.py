"""Multi-head latent attention over all tokens or over the selected ones, blocked over queries."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32

from jax_mla.layouts import KVLayout
from jax_mla.nn.config import LATENT_NORM_EPS, DeepseekV32Config
from jax_mla.nn.indexer import Indexer, angles, mask_of, rows_of, top
from jax_mla.nn.layers import Build, Linear, RMSNorm, product, rope
from jax_mla.nn.losses import indexer_kl
from jax_mla.ops.kv_write import kv_pack

Attention = Literal["dense", "sparse"]

BLOCK_BYTES = 128 << 20
"""Most that one block's scores of all heads take, in float32."""


class Attended(NamedTuple):
    """What a layer's attention gives: its output ``[B, T, hidden]``, the positions int32 ``[B, T, k]`` that were
    selected (None if dense), and the mean of ``indexer_kl`` over all rows (0 unless asked for)."""

    out: Float[Array, "B T hidden"]
    selected: Int32[Array, "B T k"] | None
    kl: Float32[Array, ""]


class SparseMLA(nnx.Module):
    """One layer's attention. Attributes that may be set at any time:

    - `indexer`: any ``jax_mla.nn.indexer.Selector``, or None in a layer that shares.
    - `kv_layout`: latents and RoPE keys are read back from rows of this layout, as a cache would hold them, with
      `kv_scale` where the layout has one. None: as they are.
    """

    def __init__(
        self,
        config: DeepseekV32Config,
        layer: int,
        *,
        build: Build,
        quantize: bool,
        hadamard: bool,
        kv_layout: KVLayout | None = None,
        kv_scale: float = 1.0,
    ):
        c = self.config = config
        self.kv_layout, self.kv_scale = kv_layout, kv_scale
        heads = c.num_attention_heads
        self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank, build=build)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, LATENT_NORM_EPS, build=build)
        self.q_b_proj = Linear(c.q_lora_rank, heads * c.qk_head_dim, build=build)
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, build=build)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, LATENT_NORM_EPS, build=build)
        self.kv_b_proj = Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim), build=build)
        self.o_proj = Linear(heads * c.v_head_dim, c.hidden_size, build=build)
        full = c.indexer_types[layer] == "full"
        self.indexer: Any = Indexer(c, build=build, quantize=quantize, hadamard=hadamard) if full else nnx.static(None)

    def project(
        self, x: Float[Array, "B T hidden"], cos_sin: Array
    ) -> tuple[Array, tuple[Array, Array], tuple[Array, Array]]:
        """The query latent; queries ``[B, T, H, nope]`` and ``[B, T, H, rope]``; latents ``[B, T, kv_lora_rank]`` and
        the key's RoPE part ``[B, T, rope]``. All after their norms and RoPE."""
        c = self.config
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_latent).reshape(*x.shape[:2], c.num_attention_heads, c.qk_head_dim)
        q_nope, q_rope = q[..., : c.qk_nope_head_dim], rope(q[..., c.qk_nope_head_dim :], cos_sin, True)
        kv = self.kv_a_proj_with_mqa(x)
        latent = self.kv_a_layernorm(kv[..., : c.kv_lora_rank])
        k_rope = rope(kv[..., None, c.kv_lora_rank :], cos_sin, True)[:, :, 0]
        return q_latent, (q_nope, q_rope), (latent, k_rope)

    def __call__(
        self,
        x: Float[Array, "B T hidden"],
        attention: Attention,
        with_kl: bool = False,
        selected: Int32[Array, "B T k"] | None = None,
    ) -> Attended:
        """``x`` after the layer's norm. `selected`: what the last full layer selected, for a layer that shares."""
        c, (b, t, _) = self.config, x.shape
        q_latent, queries, (latent, k_rope) = self.project(x, angles(c, t))
        if self.kv_layout is not None:
            latent, k_rope = as_cached(latent, k_rope, self.kv_layout, self.kv_scale)
        kv = self.kv_b_proj(latent).reshape(b, t, c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim)
        k_nope, v = kv[..., : c.qk_nope_head_dim], kv[..., c.qk_nope_head_dim :]
        sparse, chosen = attention == "sparse", selected
        with_kl = with_kl and self.indexer is not None
        if self.indexer is not None and (sparse or with_kl):
            positions = jnp.arange(t, dtype=jnp.int32)
            chosen = self.indexer(lax.stop_gradient(x), lax.stop_gradient(q_latent), positions)
        if sparse and chosen is None:
            raise ValueError("indexer: expected one in the first layer of those that share, got None")

        def block(start, size: int):
            q_nope, q_rope = (lax.dynamic_slice_in_dim(q, start, size, axis=1) for q in queries)
            mask = jnp.arange(t) <= start + jnp.arange(size)[:, None]
            mask, picked, scores = jnp.broadcast_to(mask, (b, size, t)), None, None
            if chosen is not None and (sparse or with_kl):
                picked, scores = _pick(rows_of(chosen, start, size), start, c.index_topk, t)
            if sparse and picked is not None:
                mask &= mask_of(picked, t)
            s = product("bthd,bshd->bhts", q_nope, k_nope, F32) + product("bthd,bsd->bhts", q_rope, k_rope, F32)
            p = masked_softmax(s * c.softmax_scale, mask[:, None])
            out = product("bhts,bshd->bthd", p.astype(v.dtype), v)
            kl = jnp.zeros((b, size), jnp.float32)
            if with_kl:
                if scores is None:
                    raise ValueError("with_indexer_kl: expected a selector that returns scores (floats), got integers")
                kl = indexer_kl(scores, p.sum(1), mask)
            return out, (picked if sparse else None), kl

        rows = max(1, BLOCK_BYTES // (4 * b * t * max(c.num_attention_heads, c.index_n_heads)))
        out, picked, kl = in_blocks(block, t, rows)
        return Attended(self.o_proj(out.reshape(b, t, -1)), picked, kl.mean())


F32 = jnp.dtype(jnp.float32)


def as_cached(latent: Array, k_rope: Array, layout: KVLayout, kv_scale: float) -> tuple[Array, Array]:
    """What ``kv_write`` and a read make of them, float32 unless they are bfloat16. Rounding counts as the identity."""
    both = jnp.concatenate([latent, k_rope], axis=-1)
    rows = both.reshape(-1, both.shape[-1])
    packed = kv_pack(rows[:, : latent.shape[-1]], rows[:, latent.shape[-1] :], layout=layout, kv_scale=kv_scale)
    back = layout.unpack(lax.stop_gradient(packed), kv_scale).reshape(both.shape).astype(both.dtype)
    both = back + (both - lax.stop_gradient(both))  # the value is back's, to the bit
    return both[..., : latent.shape[-1]], both[..., latent.shape[-1] :]


def _pick(given: Array, start: Array | int, k: int, columns: int) -> tuple[Array, Array | None]:
    """Positions, and the scores that they were picked by, of some rows of what a selector returned."""
    if jnp.issubdtype(given.dtype, jnp.integer):
        return given.astype(jnp.int32), None
    if given.shape[-1] != columns:
        raise ValueError(f"selector: expected scores of all {columns} tokens in each row, got {list(given.shape)}")
    scores = given.astype(jnp.float32)
    return top(scores, jnp.asarray(start, jnp.int32), min(k, columns)), scores


def masked_softmax(s: Float32[Array, "*rows S"], mask: Bool[Array, "*#rows S"]) -> Float32[Array, "*rows S"]:
    """Softmax over the columns in ``mask``, and 0 elsewhere; a row without any is 0."""
    s = jnp.where(mask, s, -jnp.inf)
    largest = lax.stop_gradient(s.max(-1, keepdims=True))
    e = jnp.exp(s - jnp.where(largest > -jnp.inf, largest, 0.0))
    return e / jnp.maximum(e.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


def in_blocks(f, total: int, rows: int):
    """``f(start, size)``'s arrays, put together along axis 1 from blocks of about ``rows`` of ``total`` rows.

    Nothing of a block is kept for its gradient. The last block ends at the end, and may overlap the one before.
    """
    blocks = -(-total // rows)
    if blocks == 1:
        return jax.checkpoint(lambda: f(0, total))()
    rows = -(-total // blocks)
    starts = jnp.minimum(jnp.arange(blocks, dtype=jnp.int32) * rows, total - rows)
    made = lax.map(jax.checkpoint(lambda start: f(start, rows)), starts)
    rest = total - (blocks - 1) * rows

    def join(x):
        front = jnp.moveaxis(x[:-1], 0, 1).reshape(x.shape[1], (blocks - 1) * rows, *x.shape[3:])
        return jnp.concatenate([front, x[-1][:, rows - rest :]], axis=1)

    return jax.tree.map(join, made)
