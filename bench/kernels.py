"""The ops as cases: at a shape, their inputs, what they cost, how a result is checked, and who else does the work.

``bench.sets`` says at which shapes they are measured.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np

import jax_mla
from bench import oracle, peers
from bench.case import Case, Source
from bench.peers import aiter, deep_gemm, flash_mla, plain, sglang
from bench.peers import layer as layer_peers
from jax_mla import IndexLayout, KVLayout, cost, kv_layout

SOFTMAX_SCALE = 0.1352337788608801  # DeepSeek-V3.2's: 192^-0.5 times mscale²
PAGES = IndexLayout(page_size=64)
POSITIONS = 4096  # rows of the rotary table
REFERENCE_BYTES = 1 << 30  # the reference keeps what an op never would; beyond that it isn't run
BF16 = jnp.bfloat16

HALF_ULPS = ("half ulps", 1.1)
CALC_DIFF = ("calc_diff", 5e-6)
WRONG = ("wrong", 0.0)
BARS = ("of the bars", 1.0)
SGLANG_INDEX = dict(interleaved=True, ue8m0=False)  # how its index kernels differ from our cases


def _too_large(what: str, size: int) -> dict[str, str]:
    return {"reference": f"{what} of {size / 2**30:.1f} GiB"} if size > REFERENCE_BYTES else {}


def quantize(tokens: int, columns: int) -> Case:
    def call(impl, shared, varied):
        (x,) = varied
        return jax_mla.quantize(x, fp8=jax_mla.E4M3FN, implementation=impl)

    def error(shared, varied, out, rows):
        (x,), (codes, scales) = varied, out
        return oracle.quantize(x, codes, scales, rows)

    return Case(
        op="quantize",
        shape=dict(T=tokens, N=columns),
        operand="bf16",
        cost=cost.quantize(tokens, columns, 2),
        shared=lambda source: (),
        varied=lambda source: (source.normal(tokens, columns, dtype=BF16),),
        call=call,
        error=error,
        metric=HALF_ULPS,
        rows=tokens,
    )


def _index_pool(source: Source, pages: int):
    """Keys from -2 to 2 with scales of 1."""
    keys = source.bytes(pages, PAGES.page_size * 128) & np.uint8(0xBF)  # no NaN
    one = jnp.asarray(np.full(PAGES.page_size, 1.0, np.float32).view(np.uint8))
    return jnp.concatenate([keys, jnp.broadcast_to(one, (pages, one.size))], axis=1)


def _norm(source: Source):
    """LayerNorm's weight and bias, and the rotary table."""
    table = jax_mla.cos_sin_table(POSITIONS)
    return 1 + 0.1 * source.normal(128), 0.1 * source.normal(128), table


def _pack_keys(k, weight, bias, cos_sin, position):
    """torch: the bytes of keys and of scales, made by ``jax_mla.index_pack``."""
    import torch

    arrays = (jnp.asarray(peers.to_numpy(torch, x)) for x in (k, weight, bias, cos_sin, position))
    packed = peers.to_torch(torch, jax_mla.index_pack(*arrays, layout=PAGES))
    return packed[:, :128].contiguous(), packed[:, 128:].contiguous()


def index_write(tokens: int, slots: int) -> Case:
    def call(impl, shared, varied):
        (pool, weight, bias, cos_sin), (at, k, position) = shared, varied
        return jax_mla.index_write(pool, at, k, weight, bias, cos_sin, position, layout=PAGES, implementation=impl)

    def error(shared, varied, out, rows, **how):
        (pool, weight, bias, cos_sin), (at, k, position) = shared, varied
        return oracle.index_write(pool, out, at, k, weight, bias, cos_sin, position, rows, **how)

    return Case(
        op="index_write",
        shape=dict(T=tokens, page=PAGES.page_size),
        operand="bf16",
        cost=cost.index_write(tokens, 2),
        shared=lambda source: (source.bytes(slots // PAGES.page_size, PAGES.page_bytes), *_norm(source)),
        varied=lambda source: (
            1 + source.choose(slots - 1, tokens),
            source.normal(tokens, 128, dtype=BF16),
            source.integers(POSITIONS, tokens),
        ),
        call=call,
        error=error,
        metric=HALF_ULPS,
        rows=tokens,
        donated=1,
        refused={"reference": f"it unrolls {tokens} tokens"} if tokens > 16 else {},
        peers={
            "SGLang": sglang.index_write(PAGES.page_size, partial(error, **SGLANG_INDEX)),
            "torch.index_put_, packed before": plain.put_keys(_pack_keys, PAGES.page_size),
            "torch.copy_ of as many bytes": plain.copy(tokens, 132),
        },
    )


def index_query(tokens: int, heads: int = 64) -> Case:
    def call(impl, shared, varied):
        (cos_sin,), (q, weights, position) = shared, varied
        return jax_mla.index_query(q, weights, cos_sin, position, implementation=impl)

    def error(shared, varied, out, rows, **how):
        (cos_sin,), (q, weights, position), (q8, folded) = shared, varied, out
        return oracle.index_query(q, weights, cos_sin, position, q8, folded, rows, **how)

    return Case(
        op="index_query",
        shape=dict(T=tokens, Hi=heads),
        operand="bf16",
        cost=cost.index_query(tokens, heads, 2),
        shared=lambda source: (jax_mla.cos_sin_table(POSITIONS),),
        varied=lambda source: (
            source.normal(tokens, heads, 128, dtype=BF16),
            source.uniform(0.5, 1.5, tokens, heads, dtype=BF16),
            source.integers(POSITIONS, tokens),
        ),
        call=call,
        error=error,
        metric=HALF_ULPS,
        rows=tokens,
        peers={"SGLang": sglang.index_query(heads, partial(error, **SGLANG_INDEX))},
    )


def _queries(source: Source, rows: int, heads: int):
    """FP8 queries and weights such as ``index_query`` gives."""
    return source.fp8(rows, heads, 128), source.uniform(0, 2 * 2.0**-8 * 128**-0.5 * heads**-0.5, rows, heads)


def index_logits_ragged(rows: int, keys: int, heads: int = 64) -> Case:
    """The last ``rows`` tokens of one request of ``keys``, causal."""
    ends = np.arange(keys - rows + 1, keys + 1, dtype=np.int32)

    def varied(source):
        k8, k_scale = source.fp8(keys, 128), jnp.full(keys, 2.0**-6)
        return *_queries(source, rows, heads), k8, k_scale, jnp.zeros(rows, jnp.int32), jnp.asarray(ends)

    def call(impl, shared, varied):
        q8, weights, k8, k_scale, starts, ends = varied
        return jax_mla.index_logits_ragged(q8, weights, k8, k_scale, starts, ends, implementation=impl)

    def error(shared, varied, out, chosen, only_visible=False):
        q8, weights, k8, k_scale, _, ends = varied
        visible = np.arange(keys) < ends[chosen, None]
        got = np.where(visible, out[chosen], -np.inf) if only_visible else out[chosen]
        k = k8.astype(np.float64)[None]
        return oracle.index_logits(q8[chosen], weights[chosen], k, k_scale[None], visible, got)

    only_visible = partial(error, only_visible=True)
    return Case(
        op="index_logits_ragged",
        shape=dict(T=rows, S=keys, Hi=heads),
        operand="fp8",
        cost=cost.index_logits_ragged(rows, keys, heads, int(ends.sum())),
        shared=lambda source: (),
        varied=varied,
        call=call,
        error=error,
        metric=CALC_DIFF,
        rows=rows,
        refused=_too_large("it makes products", 4 * rows * heads * keys),
        peers={"DeepGEMM": deep_gemm.ragged(only_visible), "aiter Triton": aiter.ragged(only_visible)},
    )


def index_logits_paged(requests: int, length: int, next_n: int = 1, heads: int = 64, pool_bytes: int = 0) -> Case:
    """``requests`` of ``length`` tokens, out of as many as fill a pool of ``pool_bytes``; its pages in no order."""
    held = max(requests, pool_bytes // (length * 132))

    def shared(source):
        return _index_pool(source, 1 + held * length // 64), _table(source, held, length)

    def varied(source):
        which = source.choose(held, requests)
        return *_queries(source, requests * next_n, heads), which, jnp.full(requests, length, jnp.int32)

    def call(impl, shared, varied):
        (pool, table), (q8, weights, which, lengths) = shared, varied
        static = dict(layout=PAGES, max_len=length, next_n=next_n, implementation=impl)
        return jax_mla.index_logits_paged(q8, weights, pool, table, which, lengths, **static)

    def error(shared, varied, out, chosen, only_visible=False):
        (pool, table), (q8, weights, which, lengths) = shared, varied
        worst = 0.0
        for t in chosen:
            b, i = t // next_n, t % next_n
            k, scale = oracle.unpack_index(pool, table[which[b]])
            visible = np.arange(length)[None] < lengths[b] - next_n + i + 1
            row = [t]
            got = np.where(visible, out[row], -np.inf) if only_visible else out[row]
            worst = max(worst, oracle.index_logits(q8[row], weights[row], k[None], scale[None, :, 0], visible, got))
        return worst

    return Case(
        op="index_logits_paged",
        shape=dict(B=requests, n=next_n, S=length, Hi=heads, page=64),
        operand="fp8",
        cost=cost.index_logits_paged(requests, next_n, length, length, heads),
        shared=shared,
        varied=varied,
        call=call,
        error=error,
        metric=CALC_DIFF,
        rows=requests * next_n,
        peers={"DeepGEMM": deep_gemm.paged(next_n, length, partial(error, only_visible=True))},
    )


def _table(source: Source, requests: int, length: int):
    """int32 ``[requests, length]``: slots, by pages in no order; page 0 is no one's."""
    first = (1 + source.permutation(requests * length // 64)).reshape(requests, length // 64, 1) * 64
    return (first + jnp.arange(64, dtype=jnp.int32)).reshape(requests, length)


def select(rows: int, window: int, k: int = 2048) -> Case:
    """Every window is the whole row, so that peers that know no windows do the same work."""

    def call(impl, shared, varied):
        logits, lengths = varied
        return jax_mla.select(logits, lengths, k, implementation=impl)

    def values(shared, varied, out, chosen):
        return oracle.select_values(varied[0], k, out, chosen)

    return Case(
        op="select",
        shape=dict(T=rows, S=window, k=k),
        operand="f32",
        cost=cost.select(rows, window, k),
        shared=lambda source: (),
        varied=lambda source: (source.normal(rows, window), jnp.full(rows, window, jnp.int32)),
        call=call,
        error=lambda shared, varied, out, chosen: oracle.select(varied[0], k, out, chosen),
        metric=WRONG,
        rows=rows,
        peers={
            "SGLang topk_v2": sglang.topk_v2(k, values),
            "SGLang fast_topk": sglang.fast_topk(k, values),
            "lax.top_k": plain.lax_top_k(k, values),
            "torch.topk": plain.torch_topk(k, values),
        },
    )


def _kv_scale(layout: str) -> float:
    return 2.0**-5 if layout == "fp8_576" else 1.0


def _kv_rows(kv: KVLayout, kv_scale: float):
    def pack(nope, rope):
        """torch: rows made by ``jax_mla.kv_pack``."""
        import torch

        arrays = (jnp.asarray(peers.to_numpy(torch, x)) for x in (nope, rope))
        rows = jax_mla.kv_pack(*arrays, layout=kv, kv_scale=kv_scale)
        return peers.to_torch(torch, rows)

    return pack


def kv_write(tokens: int, layout: str, slots: int) -> Case:
    kv, kv_scale = kv_layout(layout), _kv_scale(layout)

    def shared(source):
        if layout == "bf16":
            return (source.normal(slots, kv.row_elements, dtype=BF16),)
        return (source.bytes(slots, kv.row_bytes),)

    def call(impl, shared, varied):
        (pool,), (at, nope, rope) = shared, varied
        return jax_mla.kv_write(pool, at, nope, rope, layout=kv, kv_scale=kv_scale, implementation=impl)

    def error(shared, varied, out, rows):
        (pool,), (at, nope, rope) = shared, varied
        return oracle.kv_write(pool, out, at, nope, rope, layout, kv_scale, rows)

    return Case(
        op="kv_write",
        shape=dict(T=tokens, layout=layout),
        operand="bf16",
        cost=cost.kv_write(tokens, kv.row_bytes, 2),
        shared=shared,
        varied=lambda source: (
            1 + source.choose(slots - 1, tokens),
            source.normal(tokens, 512, dtype=BF16),
            source.normal(tokens, 64, dtype=BF16),
        ),
        call=call,
        error=error,
        metric=HALF_ULPS,
        rows=tokens,
        donated=1,
        peers={
            "SGLang": sglang.kv_write(layout, kv_scale),
            "torch.index_put_, packed before": plain.put_rows(_kv_rows(kv, kv_scale)),
            "torch.copy_ of as many bytes": plain.copy(tokens, kv.row_bytes),
        },
    )


def _kv_pool(source: Source, slots: int, kv: KVLayout, kv_scale: float):
    """``slots`` rows, of a few thousand different ones."""
    k = source.normal(min(slots, 4096), 576)
    packed = jax_mla.kv_pack(k[:, :512], k[:, 512:], layout=kv, kv_scale=kv_scale)
    return packed[source.integers(len(packed), slots)]


def _attention_queries(source: Source, rows: int, heads: int):
    q = source.normal(rows, heads, 576, dtype=BF16) * BF16(0.2)
    return q[..., :512], q[..., 512:]


def _sparse_mla_peers(rows: int, heads: int, layout: str, kv_scale: float, error) -> dict[str, peers.Peer]:
    """Decode's kernels for the fp8 layouts; for bf16, prefill's."""
    if layout == "fp8_656":
        return {flash_mla.label(heads): flash_mla.decode(heads, SOFTMAX_SCALE, partial(error, scale="bf16"))}
    if layout == "fp8_576":
        rounds_more = partial(error, difference_only=True)
        return {"SGLang Triton": sglang.triton_decode(layout, SOFTMAX_SCALE, kv_scale, rounds_more)}
    found: dict[str, peers.Peer] = {flash_mla.label(heads): flash_mla.prefill(heads, SOFTMAX_SCALE)}
    if rows < 1024:
        found["SGLang Triton"] = sglang.triton_decode(layout, SOFTMAX_SCALE, 1.0, None)
    else:
        found["SGLang Triton"] = sglang.triton_prefill(SOFTMAX_SCALE)
    return found | {"TileLang": sglang.tilelang(SOFTMAX_SCALE)}


def sparse_mla(rows: int, heads: int, selected: int, layout: str, slots: int) -> Case:
    """Each row reads ``selected`` slots of its own while there are any left, as different requests do."""
    kv, kv_scale = kv_layout(layout), _kv_scale(layout)

    def varied(source):
        return *_attention_queries(source, rows, heads), source.choose_rows(slots, rows, selected)

    def call(impl, shared, varied):
        (pool,), (nope, rope, which) = shared, varied
        static = dict(layout=kv, softmax_scale=SOFTMAX_SCALE, kv_scale=kv_scale, implementation=impl)
        return jax_mla.sparse_mla(nope, rope, pool, which, **static)

    def error(shared, varied, out, chosen, **how):
        (pool,), (nope, rope, which), (got, lse) = shared, varied, out
        return oracle.sparse_mla(nope, rope, pool, which, layout, kv_scale, SOFTMAX_SCALE, got, lse, chosen, **how)

    return Case(
        op="sparse_mla",
        shape=dict(T=rows, H=heads, K=selected, N=slots, layout=layout),
        operand="bf16",
        cost=cost.sparse_mla(rows, heads, selected, min(rows * selected, slots), kv.row_bytes, 2),
        shared=lambda source: (_kv_pool(source, slots, kv, kv_scale),),
        varied=varied,
        call=call,
        error=error,
        metric=BARS,
        rows=rows,
        refused=_too_large("it gathers rows", 4 * 576 * rows * selected),
        peers=_sparse_mla_peers(rows, heads, layout, kv_scale, error),
    )


def layer(length: int, heads: int, selected: int, layout: str, slots: int, index_heads: int = 64) -> Case:
    """A layer's whole attention in decode, one request of ``length`` tokens, the newest of which is written first: all
    that ``jax_mla.attention`` lists. Different requests of the pools take turns.

    The check is each part's own: bytes written, queries, selection and result, of which the later take what the earlier
    gave.
    """
    kv, kv_scale = kv_layout(layout), _kv_scale(layout)
    held = slots // length

    def shared(source):
        pages = 1 + held * length // 64
        pools = _index_pool(source, pages), _kv_pool(source, pages * 64, kv, kv_scale)
        return *pools, *_norm(source), _table(source, held, length)

    def varied(source):
        which, position = source.choose(held, 1), source.integers(POSITIONS, 1)
        index = source.normal(1, 128, dtype=BF16), source.normal(1, index_heads, 128, dtype=BF16)
        weights = source.uniform(0.5, 1.5, 1, index_heads, dtype=BF16)
        latent = source.normal(1, 512, dtype=BF16), source.normal(1, 64, dtype=BF16)
        queries = _attention_queries(source, 1, heads)
        return which, position, *index, weights, *latent, *queries, jnp.full(1, length, jnp.int32)

    def call(impl, shared, varied):
        index_pool, kv_pool, norm_weight, norm_bias, cos_sin, table = shared
        which, position, k, q, weights, nope, rope, q_nope, q_rope, lengths = varied
        at = table[which, length - 1]
        rotary = cos_sin, position
        index_pool = jax_mla.index_write(
            index_pool, at, k, norm_weight, norm_bias, *rotary, layout=PAGES, implementation=impl
        )
        kv_pool = jax_mla.kv_write(kv_pool, at, nope, rope, layout=kv, kv_scale=kv_scale, implementation=impl)
        q8, folded = jax_mla.index_query(q, weights, *rotary, implementation=impl)
        static = dict(k=selected, layout=PAGES, max_len=length, implementation=impl)
        chosen = jax_mla.topk_decode(q8, folded, index_pool, table, which, lengths, **static)
        static = dict(layout=kv, softmax_scale=SOFTMAX_SCALE, kv_scale=kv_scale, implementation=impl)
        assert not isinstance(chosen, tuple)
        out, lse = jax_mla.sparse_mla(q_nope, q_rope, kv_pool, chosen, **static)
        return index_pool, kv_pool, q8, folded, chosen, out, lse

    def error(shared, varied, out, rows, scale="f32", **how):
        index_before, kv_before, norm_weight, norm_bias, cos_sin, table = shared
        which, position, k, q, weights, nope, rope, q_nope, q_rope, _ = varied
        index_pool, kv_pool, q8, folded, chosen, got, lse = out
        slots_of = table[which[0]]
        at = slots_of[-1:]
        norm = norm_weight, norm_bias
        written = oracle.index_write(index_before, index_pool, at, k, *norm, cos_sin, position, rows, **how)
        bound = HALF_ULPS[1]
        parts = [
            written / bound,
            oracle.kv_write(kv_before, kv_pool, at, nope, rope, layout, kv_scale, rows) / bound,
            oracle.index_query(q, weights, cos_sin, position, q8, folded, rows, **how) / bound,
            oracle.selection(q8[0], folded[0], index_pool, slots_of, chosen[0]),
            oracle.sparse_mla(
                q_nope, q_rope, kv_pool, chosen, layout, kv_scale, SOFTMAX_SCALE, got, lse, rows, scale=scale
            ),
        ]
        return max(parts, key=lambda part: part if np.isfinite(part) else np.inf)

    static = heads, index_heads, selected, length, PAGES.page_size, SOFTMAX_SCALE
    rounded = layer_peers.decode(*static, partial(error, scale="bf16", **SGLANG_INDEX))
    return Case(
        op="layer",
        shape=dict(B=1, S=length, H=heads, K=selected, layout=layout),
        operand="fp8",
        cost=cost.layer(length, heads, selected, index_heads, kv.row_bytes),
        shared=shared,
        varied=varied,
        call=call,
        error=error,
        metric=BARS,
        rows=1,
        donated=2,
        peers={"SGLang, DeepGEMM, FlashMLA": rounded} if layout == "fp8_656" else {},
    )
