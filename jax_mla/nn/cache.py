"""Decoding with a cache: the same layers, on paged pools and through the ops that serve.

``prefill`` writes a batch of prompts, or their next chunks, into the pools and returns the last token's logits;
``decode`` does one token each; ``generate`` does both. What they compute is the model with ``kv_layout`` set to the
cache's and ``quantize`` on: the ops know no indexer without FP8.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32, Int32

from jax_mla.attention import topk_decode, topk_prefill
from jax_mla.layouts import KV_BF16, KV_LORA_RANK, QK_ROPE_HEAD_DIM, IndexLayout, KVLayout
from jax_mla.nn.attention import Attention, SparseMLA
from jax_mla.nn.config import LATENT_NORM_EPS
from jax_mla.nn.indexer import Indexer, angles
from jax_mla.nn.layers import product
from jax_mla.nn.model import DeepseekV32
from jax_mla.ops.base import Implementation, is_concrete, refuse_outside
from jax_mla.ops.index_query import index_query
from jax_mla.ops.index_write import index_write
from jax_mla.ops.kv_write import kv_write
from jax_mla.ops.sparse_mla import sparse_mla

PAGES_OF_64 = IndexLayout(page_size=64)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["kv_pools", "index_pools", "token_table", "lengths", "kv_scale"],
    meta_fields=["kv_layout", "index_layout"],
)
@dataclass(frozen=True)
class Cache:
    """The cached tokens of ``B`` requests of at most ``C`` tokens.

    - `kv_pools`: a pool ``[N, row_elements]`` of ``kv_layout`` for each layer.
    - `index_pools`: uint8 ``[pages, page_bytes]`` of ``index_layout`` for each layer that has an indexer.
    - `token_table`: int32 ``[B, C]``, the slot of each token of each request, the same in all pools.
    - `lengths`: int32 ``[B]``, tokens that are cached.
    - `kv_scale`: float32, fp8_576 only.
    """

    kv_pools: tuple[Any, ...]  # Any: a pytree's leaves are arrays only most of the time
    index_pools: tuple[Any, ...]
    token_table: Any
    lengths: Any
    kv_scale: Any
    kv_layout: KVLayout = field(default=KV_BF16)
    index_layout: IndexLayout = field(default=PAGES_OF_64)

    @property
    def scale(self) -> Array | float:
        """``kv_scale`` as the ops take it."""
        return 1.0 if self.kv_scale is None else self.kv_scale


def make_cache(
    model: DeepseekV32,
    requests: int,
    max_len: int,
    *,
    kv_layout: KVLayout = KV_BF16,
    kv_scale: float = 1.0,
    index_layout: IndexLayout = PAGES_OF_64,
) -> Cache:
    """An empty cache of ``requests`` of up to ``max_len`` tokens each. Page 0 is nobody's, as in SGLang's pools.

    Raises ``ValueError`` for a model that is not of the cache's sizes (``kv_lora_rank`` 512, ``qk_rope_head_dim`` 64,
    ``index_head_dim`` 128), for an indexer that is replaced or does not quantise, and for a ``kv_scale`` that the
    layout has no place for.
    """
    c = model.config
    for name, expected in (("kv_lora_rank", KV_LORA_RANK), ("qk_rope_head_dim", QK_ROPE_HEAD_DIM)):
        if getattr(c, name) != expected:
            raise ValueError(f"{name}: expected {expected}, which the cache's layouts have, got {getattr(c, name)}")
    _check_model(model, kv_layout)
    kv_layout.check_scale("make_cache", kv_scale)
    page = index_layout.page_size
    pages = -(-max_len // page)
    slots = page + np.arange(requests * pages * page, dtype=np.int32).reshape(requests, -1)[:, :max_len]
    total = 1 + requests * pages
    indexers = sum(layer.self_attn.indexer is not None for layer in model.layers)
    return Cache(
        tuple(jnp.zeros((total * page, kv_layout.row_elements), kv_layout.dtype) for _ in model.layers),
        tuple(jnp.zeros((total, index_layout.page_bytes), jnp.uint8) for _ in range(indexers)),
        jnp.asarray(slots),
        jnp.zeros(requests, jnp.int32),
        jnp.float32(kv_scale) if kv_layout.scaled else None,
        kv_layout,
        index_layout,
    )


def prefill(
    model: DeepseekV32,
    input_ids: Int32[Array, "B T"],
    counts: Int32[Array, " B"],
    cache: Cache,
    *,
    attention: Attention = "sparse",
    implementation: Implementation = None,
) -> tuple[Float32[Array, "B vocab"], Cache]:
    """The next ``counts[b]`` tokens of each request go into the cache. Returns the logits after the last of them.

    - `input_ids`: ``[B, T]``, of which those from ``counts[b]`` on are padding and change nothing.
    - `counts`: 0 to ``T``. With 0 a request stays as it is; its logits are NaN.
    - `attention`: as for the model. Both write the indexer's cache.

    A token past the cache's ``C`` raises ``ValueError`` outside of ``jit``; under ``jit`` its logits are NaN.
    """
    _check_model(model, cache.kv_layout)
    b, t = input_ids.shape
    refuse_outside("prefill", "counts", counts, 0, t + 1, "tokens of input_ids")
    if is_concrete(counts) and is_concrete(cache.lengths):
        after = np.asarray(counts) + np.asarray(cache.lengths)
        refuse_outside("prefill", "counts", after, 0, cache.token_table.shape[1] + 1, "the cache's tokens")
    x, cache = _through(model, input_ids, counts, cache, attention, implementation)
    last = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = model.head(model.norm(last))
    return jnp.where(counts[:, None] > 0, logits, jnp.nan), cache


def decode(
    model: DeepseekV32,
    tokens: Int32[Array, " B"],
    cache: Cache,
    *,
    attention: Attention = "sparse",
    implementation: Implementation = None,
) -> tuple[Float32[Array, "B vocab"], Cache]:
    """``prefill`` of one token a request."""
    one = jnp.ones_like(tokens)
    return prefill(model, tokens[:, None], one, cache, attention=attention, implementation=implementation)


def generate(
    model: DeepseekV32,
    input_ids: Int32[Array, "B T"],
    counts: Int32[Array, " B"],
    cache: Cache,
    *,
    max_new_tokens: int,
    attention: Attention = "sparse",
    implementation: Implementation = None,
) -> tuple[Int32[Array, "B new"], Cache]:
    """Greedy: the prompts go into the cache, then ``max_new_tokens`` tokens, each the likeliest after those before.

    Compiled as one program. The last token is returned and not cached. Raises ``ValueError`` where a request would
    outgrow the cache.
    """
    longest = np.asarray(cache.lengths) + np.asarray(counts) + max_new_tokens - 1
    refuse_outside("generate", "max_new_tokens", longest, 0, cache.token_table.shape[1] + 1, "the cache's tokens")
    how = dict(attention=attention, implementation=implementation)
    return _generate(model, input_ids, counts, cache, max_new_tokens, tuple(how.items()))


@partial(nnx.jit, static_argnums=(4, 5))
def _generate(model, input_ids, counts, cache, max_new_tokens, how):
    graph, state = nnx.split(model)
    logits, cache = prefill(model, input_ids, counts, cache, **dict(how))

    def step(carry, _):
        token, cache = carry
        logits, cache = decode(nnx.merge(graph, state), token, cache, **dict(how))
        token_after = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (token_after, cache), token_after

    first = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    (_, cache), rest = jax.lax.scan(step, (first, cache), length=max_new_tokens - 1)
    return jnp.concatenate([first[None], rest]).T, cache


def _check_model(model: DeepseekV32, kv_layout: KVLayout) -> None:
    for layer in model.layers:
        indexer, rounded = layer.self_attn.indexer, layer.self_attn.kv_layout
        if rounded is not None and rounded != kv_layout:
            raise ValueError(f"kv_layout: expected the cache's {kv_layout.name} or None, got {rounded.name}")
        if indexer is None:
            continue
        if not isinstance(indexer, Indexer):
            raise ValueError(f"indexer: expected Indexer, which the cache is made for, got {type(indexer).__name__}")
        if not indexer.quantize:
            raise ValueError("quantize_indexer: expected True, the cache holds the indexer's keys in FP8, got False")


def _through(model, input_ids, counts, cache: Cache, attention, implementation) -> tuple[Array, Cache]:
    """All layers. The residual stream ``[B, T, hidden]``, and the cache after it."""
    b, t = input_ids.shape
    columns = cache.token_table.shape[1]
    offset = jnp.arange(t, dtype=jnp.int32)
    new = offset < counts[:, None]
    positions = jnp.where(new, cache.lengths[:, None] + offset, 0)  # [B, T]; 0 for padding, which is written nowhere
    slots = jnp.take_along_axis(cache.token_table, positions, axis=1, mode="fill", fill_value=-1)
    slots = jnp.where(new, slots, -1).reshape(-1)
    seen = jnp.where(new, positions + 1, 0).reshape(-1)  # tokens that a row sees, itself included; 0 for padding
    cos_sin = angles(model.config, columns)
    requests = jnp.arange(b, dtype=jnp.int32)
    impl = dict(implementation=implementation)
    kv_pools, index_pools, selected = list(cache.kv_pools), list(cache.index_pools), None
    number = 0
    x = model.embed_tokens(input_ids)
    for i, layer in enumerate(model.layers):
        mla: SparseMLA = layer.self_attn
        h = layer.input_layernorm(x)
        at = cos_sin.at[positions].get(mode="fill", fill_value=jnp.nan)
        q_latent, (q_nope, q_rope), (latent, k_rope) = mla.project(h, at)
        flat = partial(jnp.reshape, shape=(b * t, -1))
        how = dict(layout=cache.kv_layout, kv_scale=cache.scale, **impl)
        kv_pools[i] = kv_write(kv_pools[i], slots, flat(latent), flat(k_rope), **how)
        if mla.indexer is not None:
            where = (index_pools[number], slots, positions, cos_sin)
            pool, q8, weights = _index(mla.indexer, h, q_latent, *where, cache.index_layout, impl)
            index_pools[number] = pool
            number += 1
            if attention == "sparse":
                k = min(model.config.index_topk, columns)
                pick = dict(k=k, layout=cache.index_layout, **impl)
                if t == 1:
                    table = cache.token_table
                    selected = topk_decode(q8, weights, pool, table, requests, seen, max_len=columns, **pick)
                else:
                    starts = jnp.repeat(requests * columns, t)
                    selected = topk_prefill(q8, weights, pool, cache.token_table.reshape(-1), starts, seen, **pick)
        if attention == "dense":
            everything = jnp.repeat(cache.token_table, t, axis=0)
            selected = jnp.where(jnp.arange(columns) < seen[:, None], everything, -1)
        x = x + _attend(mla, q_nope, q_rope, kv_pools[i], selected, how).reshape(x.shape)
        x = layer.feed_forward(x)
    made = replace(cache, kv_pools=tuple(kv_pools), index_pools=tuple(index_pools), lengths=cache.lengths + counts)
    return x, made


def _index(indexer: Indexer, h, q_latent, pool, slots, positions, cos_sin, layout: IndexLayout, impl):
    """The pool with the new keys, and the queries, ready for the logits."""
    c, rows = indexer.config, slots.shape[0]
    angle = dict(interleaved=indexer.interleaved, hadamard=indexer.hadamard)
    norm, at = indexer.k_norm, positions.reshape(-1)
    k = indexer.wk(h).reshape(rows, c.index_head_dim)
    weight, bias = norm.weight[...].astype(jnp.float32), norm.bias[...].astype(jnp.float32)
    pool = index_write(pool, slots, k, weight, bias, cos_sin, at, layout=layout, eps=LATENT_NORM_EPS, **angle, **impl)
    q = indexer.queries(q_latent).reshape(rows, c.index_n_heads, c.index_head_dim)
    weights = indexer.weights_proj(h).reshape(rows, c.index_n_heads)
    q8, weights = index_query(q, weights, cos_sin, at, fp8=layout.fp8, **angle, **impl)
    return pool, q8, weights


def _attend(mla: SparseMLA, q_nope, q_rope, pool, selected, how) -> Float[Array, "rows hidden"]:
    """Absorbed attention over ``selected``, then the projections back."""
    c, heads = mla.config, mla.config.num_attention_heads
    matrix = mla.kv_b_proj.weight[...].reshape(heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
    matrix = matrix.astype(q_nope.dtype)
    up_k, up_v = matrix[:, : c.qk_nope_head_dim], matrix[:, c.qk_nope_head_dim :]
    rows = selected.shape[0]
    q = product("rhn,hnc->rhc", q_nope.reshape(rows, heads, -1), up_k)
    out, _ = sparse_mla(q, q_rope.reshape(rows, heads, -1), pool, selected, softmax_scale=c.softmax_scale, **how)
    return mla.o_proj(product("rhc,hvc->rhv", out, up_v).reshape(rows, -1))
