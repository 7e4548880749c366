"""The cases: which op at which shape, its inputs, what it costs, and how its result is checked.

Shapes: "tiny" for tests; "small" for a CPU, where DSA is tried out; "real" for an accelerator that serves
DeepSeek-V3.2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_mla
from bench import oracle
from bench.peers import Peer
from jax_mla import IndexLayout, cost, kv_layout
from jax_mla.cost import Cost

SOFTMAX_SCALE = 0.1352337788608801  # DeepSeek-V3.2's: 192^-0.5 times mscale²
PAGES = IndexLayout(page_size=64)
CHECKED_ROWS = 16  # of a result; all where it has no more
REFERENCE_BYTES = 1 << 30  # the reference keeps what an op never would; beyond that it isn't run
SETS = ("tiny", "small", "real")
BF16 = ml_dtypes.bfloat16

HALF_ULPS = ("half ulps", 1.1)
CALC_DIFF = ("calc_diff", 5e-6)
WRONG = ("wrong", 0.0)
BARS = ("of the bars", 1.0)


@dataclass(frozen=True)
class Case:
    """One op at one shape. Arrays are numpy's here.

    - `shape`: what tells it from the op's other cases.
    - `operand`: "fp8", "bf16" or "f32", what its matrix products multiply.
    - `shared`: ``rng → arrays`` that all calls have in common, the donated pool first where ``donated``.
    - `varied`: ``rng → arrays`` that differ from call to call.
    - `call`: ``(implementation, shared, varied) → outputs``, the op itself.
    - `error`: ``(shared, varied, outputs, rows) → number`` in the unit of `metric`, whose second part is its bound; of
      a donated pool, `shared` holds what was in it before.
    - `rows`: rows of the result, from which those checked are drawn.
    - `refused`: implementation → why it is not run at this shape.
    - `peers`: by name, what else does the same work; checked by `peer_error`.
    """

    op: str
    shape: Mapping[str, int | str]
    operand: str
    cost: Cost
    shared: Callable[[np.random.Generator], tuple]
    varied: Callable[[np.random.Generator], tuple]
    call: Callable[[Any, Any, Any], Any]
    error: Callable[[Any, Any, Any, np.ndarray], float]
    metric: tuple[str, float]
    rows: int
    donated: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    peers: Mapping[str, Peer] = field(default_factory=dict)
    peer_error: Callable[[Any, Any, Any, np.ndarray], float] | None = None

    @property
    def label(self) -> str:
        return " ".join(f"{name} {value}" for name, value in self.shape.items())


def _normal(rng, shape, dtype=np.float32):
    return rng.standard_normal(shape, np.float32).astype(dtype)


def _bytes(rng, rows: int, columns: int):
    """Random bytes; a multiple of 8 in all."""
    return rng.integers(0, 2**64, rows * columns // 8, np.uint64).view(np.uint8).reshape(rows, columns)


def _angles(positions: int):
    return np.asarray(jax_mla.cos_sin_table(positions))


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
        shared=lambda rng: (),
        varied=lambda rng: (_normal(rng, (tokens, columns), BF16),),
        call=call,
        error=error,
        metric=HALF_ULPS,
        rows=tokens,
    )


def index_write(tokens: int, slots: int) -> Case:
    positions = 4096

    def call(impl, shared, varied):
        (pool, weight, bias, cos_sin), (at, k, position) = shared, varied
        return jax_mla.index_write(pool, at, k, weight, bias, cos_sin, position, layout=PAGES, implementation=impl)

    def error(shared, varied, out, rows):
        (pool, weight, bias, cos_sin), (at, k, position) = shared, varied
        return oracle.index_write(pool, out, at, k, weight, bias, cos_sin, position, rows)

    return Case(
        op="index_write",
        shape=dict(T=tokens, page=PAGES.page_size),
        operand="bf16",
        cost=cost.index_write(tokens, 2),
        shared=lambda rng: (
            _bytes(rng, slots // PAGES.page_size, PAGES.page_bytes),
            1 + 0.1 * _normal(rng, 128),
            0.1 * _normal(rng, 128),
            _angles(positions),
        ),
        varied=lambda rng: (
            1 + rng.choice(slots - 1, tokens, replace=False).astype(np.int32),
            _normal(rng, (tokens, 128), BF16),
            rng.integers(0, positions, tokens, np.int32),
        ),
        call=call,
        error=error,
        metric=HALF_ULPS,
        rows=tokens,
        donated=True,
        refused={"reference": f"it unrolls {tokens} tokens"} if tokens > 16 else {},
    )


def index_query(tokens: int, heads: int = 64) -> Case:
    positions = 4096

    def call(impl, shared, varied):
        (cos_sin,), (q, weights, position) = shared, varied
        return jax_mla.index_query(q, weights, cos_sin, position, implementation=impl)

    def error(shared, varied, out, rows):
        (cos_sin,), (q, weights, position), (q8, folded) = shared, varied, out
        return oracle.index_query(q, weights, cos_sin, position, q8, folded, rows)

    return Case(
        op="index_query",
        shape=dict(T=tokens, Hi=heads),
        operand="bf16",
        cost=cost.index_query(tokens, heads, 2),
        shared=lambda rng: (_angles(positions),),
        varied=lambda rng: (
            _normal(rng, (tokens, heads, 128), BF16),
            rng.uniform(0.5, 1.5, (tokens, heads)).astype(BF16),
            rng.integers(0, positions, tokens, np.int32),
        ),
        call=call,
        error=error,
        metric=HALF_ULPS,
        rows=tokens,
    )


def _queries(rng, rows, heads):
    """FP8 queries and weights such as ``index_query`` gives."""
    weights = rng.uniform(0, 2, (rows, heads)).astype(np.float32) * 2.0**-8 * 128**-0.5 * heads**-0.5
    return (64 * _normal(rng, (rows, heads, 128))).clip(-448, 448).astype(oracle.FP8), weights.astype(np.float32)


def index_logits_ragged(rows: int, keys: int, heads: int = 64) -> Case:
    """The last ``rows`` tokens of one request of ``keys``, causal."""
    starts = np.zeros(rows, np.int32)
    ends = np.arange(keys - rows + 1, keys + 1, dtype=np.int32)

    def varied(rng):
        k8 = (64 * _normal(rng, (keys, 128))).clip(-448, 448).astype(oracle.FP8)
        return *_queries(rng, rows, heads), k8, np.full(keys, 2.0**-6, np.float32), starts, ends

    def call(impl, shared, varied):
        q8, weights, k8, k_scale, starts, ends = varied
        return jax_mla.index_logits_ragged(q8, weights, k8, k_scale, starts, ends, implementation=impl)

    def error(shared, varied, out, chosen):
        q8, weights, k8, k_scale, _, ends = varied
        visible = np.arange(keys) < ends[chosen, None]
        k = k8.astype(np.float64)[None]
        return oracle.index_logits(q8[chosen], weights[chosen], k, k_scale[None], visible, out[chosen])

    return Case(
        op="index_logits_ragged",
        shape=dict(T=rows, S=keys, Hi=heads),
        operand="fp8",
        cost=cost.index_logits_ragged(rows, keys, heads, int(ends.sum())),
        shared=lambda rng: (),
        varied=varied,
        call=call,
        error=error,
        metric=CALC_DIFF,
        rows=rows,
        refused=_too_large("it makes products", 4 * rows * heads * keys),
    )


def index_logits_paged(requests: int, length: int, next_n: int = 1, heads: int = 64, pool_bytes: int = 0) -> Case:
    """``requests`` of ``length`` tokens, out of as many as fill a pool of ``pool_bytes``; its pages in no order."""
    held = max(requests, pool_bytes // (length * 132))
    pages = length // 64

    def shared(rng):
        pool = _bytes(rng, 1 + held * pages, PAGES.page_bytes)
        pool[:, :8192] &= 0xBF  # keys from -2 to 2: no NaN
        pool[:, 8192:] = np.full((len(pool), 64), 1.0, np.float32).view(np.uint8)
        first = (1 + rng.permutation(held * pages)).reshape(held, pages, 1) * 64
        return pool, (first + np.arange(64)).reshape(held, length).astype(np.int32)

    def varied(rng):
        which = rng.choice(held, requests, replace=False).astype(np.int32)
        return *_queries(rng, requests * next_n, heads), which, np.full(requests, length, np.int32)

    def call(impl, shared, varied):
        (pool, table), (q8, weights, which, lengths) = shared, varied
        static = dict(layout=PAGES, max_len=length, next_n=next_n, implementation=impl)
        return jax_mla.index_logits_paged(q8, weights, pool, table, which, lengths, **static)

    def error(shared, varied, out, chosen):
        (pool, table), (q8, weights, which, lengths) = shared, varied
        worst = 0.0
        for t in chosen:
            b, i = t // next_n, t % next_n
            k, scale = oracle.unpack_index(pool, table[which[b]])
            visible = np.arange(length)[None] < lengths[b] - next_n + i + 1
            row = [t]
            diff = oracle.index_logits(q8[row], weights[row], k[None], scale[None, :, 0], visible, out[row])
            worst = max(worst, diff)
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
    )


def select(rows: int, window: int, k: int = 2048) -> Case:
    """Every window is the whole row, so that peers that know no windows do the same work."""

    def call(impl, shared, varied):
        logits, lengths = varied
        return jax_mla.select(logits, lengths, k, implementation=impl)

    return Case(
        op="select",
        shape=dict(T=rows, S=window, k=k),
        operand="f32",
        cost=cost.select(rows, window, k),
        shared=lambda rng: (),
        varied=lambda rng: (_normal(rng, (rows, window)), np.full(rows, window, np.int32)),
        call=call,
        error=lambda shared, varied, out, chosen: oracle.select(varied[0], k, out, chosen),
        metric=WRONG,
        rows=rows,
        peers={
            "lax.top_k": Peer("jax", lambda jax, shared, varied: jax.lax.top_k(varied[0], k)[1]),
            "torch.topk": Peer("torch", lambda torch, shared, varied: torch.topk(varied[0], k, sorted=False).indices),
        },
        peer_error=lambda shared, varied, out, chosen: oracle.select_values(varied[0], k, out, chosen),
    )


def _kv_scale(layout: str) -> float:
    return 2.0**-5 if layout == "fp8_576" else 1.0


def kv_write(tokens: int, layout: str, slots: int) -> Case:
    kv, kv_scale = kv_layout(layout), _kv_scale(layout)

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
        shared=lambda rng: (_bytes(rng, slots, kv.row_bytes).view(kv.dtype),),
        varied=lambda rng: (
            1 + rng.choice(slots - 1, tokens, replace=False).astype(np.int32),
            _normal(rng, (tokens, 512), BF16),
            _normal(rng, (tokens, 64), BF16),
        ),
        call=call,
        error=error,
        metric=HALF_ULPS,
        rows=tokens,
        donated=True,
    )


def sparse_mla(rows: int, heads: int, selected: int, layout: str, slots: int) -> Case:
    """Each row reads ``selected`` slots of its own while there are any left, as different requests do."""
    kv, kv_scale = kv_layout(layout), _kv_scale(layout)

    def shared(rng):
        k = jnp.asarray(_normal(rng, (min(slots, 4096), 576)))
        packed = np.asarray(jax_mla.kv_pack(k[:, :512], k[:, 512:], layout=kv, kv_scale=kv_scale))
        return (packed[rng.integers(0, len(packed), slots)],)

    def varied(rng):
        if rows * selected <= slots:
            which = rng.permutation(slots)[: rows * selected].reshape(rows, selected)
        else:
            which = np.stack([rng.choice(slots, selected, replace=False) for _ in range(rows)])
        q = 0.2 * _normal(rng, (rows, heads, 576))
        return q[..., :512].astype(BF16), q[..., 512:].astype(BF16), which.astype(np.int32)

    def call(impl, shared, varied):
        (pool,), (nope, rope, which) = shared, varied
        static = dict(layout=kv, softmax_scale=SOFTMAX_SCALE, kv_scale=kv_scale, implementation=impl)
        return jax_mla.sparse_mla(nope, rope, pool, which, **static)

    def error(shared, varied, out, chosen):
        (pool,), (nope, rope, which), (got, lse) = shared, varied, out
        return oracle.sparse_mla(nope, rope, pool, which, layout, kv_scale, SOFTMAX_SCALE, got, lse, chosen)

    return Case(
        op="sparse_mla",
        shape=dict(T=rows, H=heads, K=selected, N=slots, layout=layout),
        operand="bf16",
        cost=cost.sparse_mla(rows, heads, selected, min(rows * selected, slots), kv.row_bytes, 2),
        shared=shared,
        varied=varied,
        call=call,
        error=error,
        metric=BARS,
        rows=rows,
        refused=_too_large("it gathers rows", 4 * 576 * rows * selected),
    )


LAYOUTS = ("bf16", "fp8_656", "fp8_576")


def _tiny() -> list[Case]:
    return [
        quantize(4, 256),
        index_write(3, 256),
        index_query(3, 8),
        index_logits_ragged(4, 96, 8),
        index_logits_paged(2, 128, 2, 8),
        select(3, 200, 16),
        *(kv_write(3, layout, 64) for layout in LAYOUTS),
        *(sparse_mla(2, 3, 16, layout, 64) for layout in LAYOUTS),
    ]


def _small() -> list[Case]:
    return [
        quantize(2048, 7168),
        index_write(1, 1 << 16),
        index_write(512, 1 << 16),
        index_query(8),
        index_query(512),
        index_logits_ragged(256, 4096),
        index_logits_paged(1, 4096, pool_bytes=64 << 20),
        index_logits_paged(8, 4096, pool_bytes=64 << 20),
        index_logits_paged(4, 4096, 2, pool_bytes=64 << 20),
        select(1, 16384),
        select(64, 8192),
        *(kv_write(tokens, layout, 1 << 16) for tokens in (1, 512) for layout in LAYOUTS),
        *(sparse_mla(8, 16, 2048, layout, 1 << 16) for layout in LAYOUTS),
        sparse_mla(64, 16, 512, "bf16", 4096),
    ]


def _real() -> list[Case]:
    pool = 1 << 29
    return [
        quantize(8192, 7168),
        index_write(1, 1 << 20),
        index_write(8192, 1 << 20),
        index_query(64),
        index_query(4096),
        index_logits_ragged(4096, 8192),
        index_logits_ragged(4096, 32768),
        index_logits_paged(1, 65536, pool_bytes=pool),
        index_logits_paged(64, 8192, pool_bytes=pool),
        index_logits_paged(64, 65536),
        index_logits_paged(64, 65536, 2),
        select(1, 65536),
        select(64, 65536),
        select(128, 32768),
        select(4096, 32768),
        *(kv_write(tokens, layout, 1 << 18) for tokens in (1, 8192) for layout in LAYOUTS),
        *(sparse_mla(rows, 16, 2048, "fp8_656", 1 << 19) for rows in (1, 64, 128)),
        *(sparse_mla(128, 16, 2048, layout, 1 << 19) for layout in ("bf16", "fp8_576")),
        *(sparse_mla(128, 128, 2048, layout, 1 << 19) for layout in ("fp8_656", "fp8_576")),
        *(sparse_mla(4096, heads, 2048, "bf16", 1 << 15) for heads in (16, 128)),
    ]


def cases(shapes: str) -> list[Case]:
    """All cases of "tiny", "small" or "real"."""
    return {"tiny": _tiny, "small": _small, "real": _real}[shapes]()


OPS = tuple(dict.fromkeys(case.op for case in _tiny()))
