"""The ops in order: prefill against decode, against an indexer in numpy from raw keys on, and against transformers'."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jax_mla import (
    E4M3FN,
    E4M3FNUZ,
    KV_BF16,
    KV_FP8_656,
    IndexLayout,
    cos_sin_table,
    index_query,
    index_write,
    kv_write,
    sparse_mla,
    topk_decode,
    topk_prefill,
)
from tests.jax_mla import oracles
from tests.jax_mla.ops import dyadic
from tests.numerics import BF16_ROW, QUANTISED_INPUTS, assert_bitwise_equal, assert_close, assert_same_mask, calc_diff

CAPACITY, COLUMNS, HEADS, K = 512, 110, 8, 32
CACHED = [50, 0, 0, 99, 1, 30]
NEW = [20, 33, 1, 1, 64, 5]
LENGTHS = [c + n for c, n in zip(CACHED, NEW, strict=True)]
REQUESTS = [4, 0, 6, 1, 5, 2]
"""Rows of the token table. The last request shares the first one's first 30 tokens."""

PADDED_TOKENS, PADDED_ROWS = 320, 130


@dataclass
class Batch:
    """What every row of a prefill needs: the requests' tokens one after the other, then padding."""

    table: np.ndarray  # [7, COLUMNS]
    k_slots: np.ndarray  # [PADDED_TOKENS]
    starts: np.ndarray  # [PADDED_ROWS]
    lengths: np.ndarray  # [PADDED_ROWS]
    positions: np.ndarray  # [PADDED_ROWS]
    rows_of: list[range]  # for each request, its rows


def batch(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    slots = iter(rng.permutation(np.arange(1, CAPACITY)))
    table = np.full((7, COLUMNS), CAPACITY - 1, np.int32)
    for request, length in zip(REQUESTS, LENGTHS, strict=True):
        table[request, :length] = [next(slots) for _ in range(length)]
    table[REQUESTS[-1], :30] = table[REQUESTS[0], :30]
    k_slots = np.full(PADDED_TOKENS, -1, np.int32)
    starts, lengths = np.full(PADDED_ROWS, sum(LENGTHS), np.int32), np.zeros(PADDED_ROWS, np.int32)
    start, row, rows_of = 0, 0, []
    for request, cached, length in zip(REQUESTS, CACHED, LENGTHS, strict=True):
        k_slots[start : start + length] = table[request, :length]
        rows_of.append(range(row, row + length - cached))
        for t in range(cached, length):
            starts[row], lengths[row] = start, t + 1
            row += 1
        start += length
    return Batch(table, k_slots, starts, lengths, np.maximum(lengths - 1, 0), rows_of)


def jnps(**arrays) -> dict[str, Any]:
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def windows(b: Batch) -> dict[str, Any]:
    """What ``topk_prefill`` is told of a batch."""
    return jnps(k_slots=b.k_slots, starts=b.starts, lengths=b.lengths)


@dataclass
class Exact:
    """Queries and a pool whose logits are exact in float32, with many ties among them."""

    q8: np.ndarray
    weights: np.ndarray
    keys: np.ndarray
    scales: np.ndarray

    def __init__(self, fp8: str, rows: int = PADDED_ROWS):
        rng = np.random.default_rng(1)
        self.q8 = np.sign(dyadic.fp8_numbers(rng, (rows, HEADS, 128), fp8).astype(np.float32)).astype(oracles.FP8[fp8])
        self.q8[..., 3:] = 0
        self.weights = np.sign(dyadic.weights(rng, (rows, HEADS)))
        self.keys, self.scales = dyadic.fp8_numbers(rng, (CAPACITY, 128), fp8), np.ones(CAPACITY, np.float32)

    def pool(self, layout: IndexLayout) -> jax.Array:
        codes = self.keys.view(np.uint8)
        return jnp.asarray(oracles.index_pool(codes, self.scales, layout.page_size, layout.preshuffle))

    def arguments(self, layout: IndexLayout, rows=slice(None)) -> dict[str, Any]:
        return jnps(q8=self.q8[rows], weights=self.weights[rows], index_pool=self.pool(layout))

    def scores(self, t: int, slots) -> np.ndarray:
        row = self.q8[t : t + 1], self.weights[t : t + 1]
        return oracles.index_logits(*row, self.keys[slots], self.scales[slots])[0]


LAYOUTS = [IndexLayout(1), IndexLayout(64), IndexLayout(64, E4M3FNUZ, preshuffle=True)]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=["1", "64", "64-preshuffle-fnuz"])


@layouts
@pytest.mark.parametrize("as_slots", [True, False])
def test_prefill_is_a_stable_sort_of_exact_scores(how, layout, as_slots):
    b, exact = batch(), Exact(layout.fp8.name)
    got = topk_prefill(**exact.arguments(layout), **windows(b), k=K, layout=layout, as_slots=as_slots, **how)
    want, ties = [], 0
    for t, (start, length) in enumerate(zip(b.starts, b.lengths, strict=True)):
        slots = b.k_slots[start : start + length]
        scores = exact.scores(t, slots)
        chosen = oracles.top_k(scores, 0, length, K)
        ties += length > K and (scores == np.sort(scores)[-K]).sum() > 1
        want.append([slots[p] if as_slots else p for p in chosen])
    assert ties > 50, "rows whose last place is shared"
    assert_bitwise_equal(got, oracles.padded(want, K))


@pytest.mark.parametrize(
    "layout, next_n", list(zip(LAYOUTS, [1, 4, 2], strict=True)), ids=["1", "64", "64-preshuffle-fnuz"]
)
def test_decode_picks_what_prefill_picks(how, layout, next_n):
    """The last ``next_n`` rows of each request, and a padded request in the middle of the batch."""
    b, exact = batch(), Exact(layout.fp8.name)
    for as_slots in (True, False):
        options: dict[str, Any] = dict(k=K, layout=layout, as_slots=as_slots, **how)
        prefill = topk_prefill(**exact.arguments(layout), **windows(b), **options)
        served = [i for i, n in enumerate(NEW) if n >= next_n]
        rows = np.array([b.rows_of[i][-next_n:] for i in served]).ravel()
        requests, lengths = [REQUESTS[i] for i in served], [LENGTHS[i] for i in served]
        requests.insert(1, 0)
        lengths.insert(1, 0)
        q_rows = np.insert(rows, [next_n] * next_n, 0)
        told = jnps(token_table=b.table, requests=np.array(requests, np.int32), lengths=np.array(lengths, np.int32))
        rest: dict[str, Any] = dict(max_len=COLUMNS, next_n=next_n)
        decode = topk_decode(**exact.arguments(layout, q_rows), **told, **options, **rest)
        decode = np.asarray(decode)
        assert (decode[next_n : 2 * next_n] == -1).all()
        assert_bitwise_equal(np.delete(decode, range(next_n, 2 * next_n), 0), np.asarray(prefill)[rows])


@pytest.mark.parametrize("rows", [1, 65])
def test_blocks_of_rows_pick_what_one_block_picks(how, rows):
    layout, b, exact = IndexLayout(64), batch(), Exact("e4m3fn")
    arrays = exact.arguments(layout) | windows(b)
    whole = topk_prefill(**arrays, k=K, layout=layout, **how)
    assert (np.asarray(whole) >= 0).sum() > 2000
    blocks = topk_prefill(**arrays, k=K, layout=layout, logits_bytes=4 * PADDED_TOKENS * rows + 3, **how)
    assert_bitwise_equal(blocks, whole)


def test_a_needle_in_thousands_of_tokens(how):
    """Ties for all places but the first; the needle stands at the first token, beyond 4096, and at the last."""
    n, slots_in_all, layout = 6000, 6400, IndexLayout(64, preshuffle=True)
    rng = np.random.default_rng(0)
    keys = np.sign(dyadic.fp8_numbers(rng, (slots_in_all, 128), "e4m3fn").astype(np.float32))
    table = np.stack([rng.permutation(np.arange(1, slots_in_all))[:n] for _ in range(3)]).astype(np.int32)
    keys[0], keys[7, :16] = 448, 2
    for row, at in zip(table, (0, 4100, n - 1), strict=True):
        row[row == 7] = row[at]
        row[at] = 7
    codes = oracles.fp8_codes(keys, "e4m3fn")
    pool = oracles.index_pool(codes, np.ones(slots_in_all), layout.page_size, layout.preshuffle)
    q8 = np.zeros((3, HEADS, 128), oracles.FP8["e4m3fn"])
    q8[..., :16] = 1
    arrays = jnps(q8=q8, weights=np.ones((3, HEADS), np.float32), index_pool=pool, token_table=table)
    arrays |= jnps(requests=np.arange(3, dtype=np.int32), lengths=np.full(3, n, np.int32))
    got = topk_decode(**arrays, k=K, layout=layout, max_len=n, as_slots=False, **how)
    scores = [oracles.index_logits(q8[:1], np.ones((1, HEADS)), keys[row], np.ones(n))[0] for row in table]
    want = [oracles.top_k(x, 0, n, K) for x in scores]
    assert [at in row for at, row in zip((0, 4100, n - 1), want, strict=True)] == [True] * 3
    assert_bitwise_equal(got, oracles.padded(want, K))


def assert_selected(got, scores, k: int) -> bool:
    """``got`` are the ``k`` best of ``scores``, ascending, then -1, but for near-ties; whether there was none of these.

    A near-tie is what one code that falls to the other side of a midpoint can turn over: 0.1 % of the largest score.
    """
    got = np.asarray(got)
    n = min(k, len(scores))
    assert (got[n:] == -1).all() and (np.diff(got[:n]) > 0).all() and (got[:n] >= 0).all()
    best = oracles.top_k(scores, 0, len(scores), k)
    apart = np.setxor1d(best, got[:n])
    if len(apart):
        slack = 1e-3 * np.abs(scores).max()
        kth = min(scores[best])
        assert np.abs(scores[apart] - kth).max() <= slack, f"{apart} for scores {scores[apart]} around {kth}"
    return len(apart) == 0


class Layer:
    """Raw keys of every token and raw queries of every row of a batch; and what an indexer in numpy makes of them."""

    def __init__(self, b: Batch, fp8, interleaved: bool, hadamard: bool):
        rng = np.random.default_rng(2)
        self.b, self.fp8 = b, fp8
        self.kind = dict(interleaved=interleaved, hadamard=hadamard)
        self.cos_sin = cos_sin_table(COLUMNS, factor=40.0)
        positions = np.concatenate([np.arange(n) for n in LENGTHS])
        self.slots = b.k_slots[: sum(LENGTHS)]
        _, first = np.unique(self.slots, return_index=True)  # shared tokens once
        self.slots, self.positions = self.slots[first].astype(np.int32), positions[first].astype(np.int32)
        bf16 = lambda *shape: np.asarray(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16))  # noqa: E731
        self.k, self.q, self.weights = bf16(len(first), 128), bf16(PADDED_ROWS, HEADS, 128), bf16(PADDED_ROWS, HEADS)
        self.norm = [np.float32(1 + 0.2 * rng.standard_normal(128)), np.float32(0.2 * rng.standard_normal(128))]

    def write(self, layout: IndexLayout, how) -> jax.Array:
        pool = jnp.zeros((CAPACITY // layout.page_size, layout.page_bytes), jnp.uint8)
        weight, bias = self.norm
        arrays = jnps(slots=self.slots, k=self.k, norm_weight=weight, norm_bias=bias, positions=self.positions)
        return index_write(pool, **arrays, cos_sin=self.cos_sin, layout=layout, **self.kind, **how)

    def query(self, rows, how) -> tuple[jax.Array, jax.Array]:
        arrays = jnps(q=self.q[rows], weights=self.weights[rows], positions=self.b.positions[rows].astype(np.int32))
        return index_query(**arrays, cos_sin=self.cos_sin, fp8=self.fp8, **self.kind, **how)

    def quantised(self, x, positions):
        y = oracles.rope(x, self.cos_sin, positions, self.kind["interleaved"])
        y, scale = oracles.index_quantise(y @ oracles.hadamard(128) if self.kind["hadamard"] else y, self.fp8.name)
        return oracles.fp8_values(oracles.fp8_codes(y, self.fp8.name), self.fp8.name), scale

    def scores(self) -> list[np.ndarray]:
        """float64 scores of each row's tokens."""
        k, k_scale = self.quantised(oracles.layer_norm(self.k, *self.norm), self.positions)
        keys, scales = np.zeros((CAPACITY, 128)), np.zeros(CAPACITY)
        keys[self.slots], scales[self.slots] = k, k_scale
        q, q_scale = self.quantised(self.q, self.b.positions)
        weights = self.weights.astype(np.float64) * q_scale / np.sqrt(128 * HEADS)
        windows = [self.b.k_slots[s : s + n] for s, n in zip(self.b.starts, self.b.lengths, strict=True)]
        return [
            oracles.index_logits(q[t : t + 1], weights[t : t + 1], keys[slots], scales[slots])[0]
            for t, slots in enumerate(windows)
        ]


@pytest.mark.parametrize(
    "layout, interleaved, hadamard",
    [(IndexLayout(64), False, False), (IndexLayout(16), True, True), (LAYOUTS[2], False, True)],
    ids=["neox", "interleaved-hadamard", "fnuz-hadamard"],
)
def test_an_indexer_in_numpy_picks_the_same(how, layout, interleaved, hadamard):
    """From raw keys and queries: LayerNorm, RoPE, FP8, scores, stable sort; ragged requests behind cached prefixes."""
    b = batch()
    layer = Layer(b, layout.fp8, interleaved, hadamard)
    q8, weights = layer.query(slice(None), how)
    arrays = dict(q8=q8, weights=weights, index_pool=layer.write(layout, how))
    got = topk_prefill(**arrays, **windows(b), k=K, layout=layout, as_slots=False, **how)
    same = [assert_selected(row, scores, K) for row, scores in zip(np.asarray(got), layer.scores(), strict=True)]
    assert np.mean(same) > 0.97


@pytest.mark.parametrize("kv", [KV_BF16, KV_FP8_656], ids=["bf16", "fp8_656"])
def test_one_layer_of_a_decode_step(how, kv):
    """All five ops in one compiled function, on pools that hold each request's past."""
    rng = np.random.default_rng(3)
    b, layout, q_heads, scale = batch(), IndexLayout(64), 16, 0.1352
    layer = Layer(b, E4M3FN, False, False)
    last = np.array([rows[-1] for rows in b.rows_of])
    new = np.array([b.table[r, n - 1] for r, n in zip(REQUESTS, LENGTHS, strict=True)], np.int32)
    is_new = np.isin(layer.slots, new)
    order = np.array([np.flatnonzero(layer.slots == slot)[0] for slot in new])
    nope, rope = (jnp.asarray(rng.standard_normal((len(layer.slots), d)), jnp.bfloat16) for d in (512, 64))
    q_nope, q_rope = (jnp.asarray(rng.standard_normal((7, q_heads, d)), jnp.bfloat16) for d in (512, 64))

    def pad(x, value=0):  # a seventh request that only fills the batch up
        return jnp.concatenate([jnp.asarray(x), jnp.full((1, *x.shape[1:]), value, x.dtype)])

    def step(index_pool, kv_pool, x):
        key = x["k"], x["norm_weight"], x["norm_bias"], x["cos_sin"], x["positions"]
        index_pool = index_write(index_pool, x["slots"], *key, layout=layout, **how)
        q8, weights = index_query(x["q"], x["weights"], x["cos_sin"], x["positions"], **how)
        told = x["table"], x["requests"], x["lengths"]
        selected = topk_decode(q8, weights, index_pool, *told, k=K, layout=layout, max_len=COLUMNS, **how)
        kv_pool = kv_write(kv_pool, x["slots"], x["nope"], x["rope"], layout=kv, **how)
        assert not isinstance(selected, tuple)
        out, lse = sparse_mla(q_nope, q_rope, kv_pool, selected, layout=kv, softmax_scale=scale, **how)
        return index_pool, kv_pool, selected, out, lse

    index_pool = jnp.full((CAPACITY // 64, layout.page_bytes), 0xFF, jnp.uint8)
    kv_pool = jnp.asarray(np.full((CAPACITY, kv.row_bytes), 0xFF, np.uint8).view(kv.dtype))
    old = [jnp.asarray(x)[~is_new] for x in (layer.slots, layer.k, layer.positions, nope, rope)]
    norm = jnps(norm_weight=layer.norm[0], norm_bias=layer.norm[1])
    arrays: dict[str, Any] = dict(slots=old[0], k=old[1], cos_sin=layer.cos_sin, positions=old[2], **norm)
    index_pool = index_write(index_pool, **arrays, layout=layout, **how)
    kv_pool = kv_write(kv_pool, old[0], old[3], old[4], layout=kv, **how)
    x = dict(
        slots=pad(new, -1),
        k=pad(layer.k[order]),
        cos_sin=layer.cos_sin,
        **norm,
        table=jnp.asarray(b.table),
        positions=pad(layer.positions[order]),
        q=pad(layer.q[last]),
        weights=pad(layer.weights[last]),
        requests=pad(np.array(REQUESTS, np.int32)),
        lengths=pad(np.array(LENGTHS, np.int32)),
        nope=pad(nope[order], jnp.nan),
        rope=pad(rope[order], jnp.nan),
    )
    index_pool, kv_pool, selected, out, lse = jax.jit(step)(index_pool, kv_pool, x)

    selected, scores = np.asarray(selected), layer.scores()
    for i, t in enumerate(last):
        slots = b.table[REQUESTS[i], : LENGTHS[i]]
        found = [int(np.flatnonzero(slots == slot)[0]) for slot in selected[i] if slot >= 0]
        assert_selected(found + [-1] * (K - len(found)), scores[t], K)
    assert (selected[6] == -1).all()
    rows = np.ascontiguousarray(kv_pool).view(np.uint8)
    oracles.assert_kv_rows(rows[layer.slots], nope, rope, kv.name, oracles.fp8_name(kv), 1.0)
    values = oracles.kv_values(rows, kv.name, oracles.fp8_name(kv), 1.0)
    want, want_lse = oracles.sparse_attention(q_nope, q_rope, values, selected, scale)
    assert calc_diff(out, want) <= QUANTISED_INPUTS
    assert_close(out, want, BF16_ROW)
    assert_same_mask(lse, want_lse)
    np.testing.assert_allclose(lse[:6], want_lse[:6], rtol=1e-6, atol=2e-6)


def test_the_indexer_of_transformers_picks_almost_the_same():
    """Its indexer works in float32, ours in FP8; with the other kind of RoPE the two have little in common."""
    import torch
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

    torch.manual_seed(0)
    n, k = 256, 32
    config = DeepseekV32Config(
        hidden_size=256, q_lora_rank=64, index_n_heads=HEADS, index_head_dim=128, qk_rope_head_dim=64, index_topk=k
    )
    theirs = DeepseekV32Indexer(config, 0).float()
    torch.nn.init.normal_(theirs.k_norm.weight, 1.0, 0.2)
    torch.nn.init.normal_(theirs.k_norm.bias, 0.0, 0.2)
    hidden, q_lora = torch.randn(1, n, 256), torch.randn(1, n, 64)
    cos_sin = cos_sin_table(n, factor=40.0)
    cos, sin = (torch.tensor(np.tile(x, 2))[None] for x in np.split(np.asarray(cos_sin), 2, axis=1))
    causal = torch.full((n, n), float("-inf")).triu(1)[None]
    with torch.no_grad():
        want = theirs(hidden, q_lora, (cos, sin), causal, torch.arange(n)[None])[0].numpy()
        q = theirs.wq_b(q_lora)[0].reshape(n, HEADS, 128).numpy()
        key, weights = theirs.wk(hidden)[0].numpy(), theirs.weights_proj(hidden)[0].numpy()
        norm = jnps(norm_weight=theirs.k_norm.weight.numpy(), norm_bias=theirs.k_norm.bias.numpy())
    layout, slots, positions = IndexLayout(64), jnp.arange(64, 64 + n, dtype=jnp.int32), jnp.arange(n, dtype=jnp.int32)

    def overlap(interleaved: bool) -> float:
        pool = jnp.zeros((5, layout.page_bytes), jnp.uint8)
        angles = dict(cos_sin=cos_sin, positions=positions, interleaved=interleaved)
        pool = index_write(pool, slots, jnp.asarray(key), **norm, **angles, layout=layout)
        q8, folded = index_query(jnp.asarray(q), jnp.asarray(weights), **angles)
        start = jnp.zeros(n, jnp.int32)
        got = topk_prefill(q8, folded, pool, slots, start, positions + 1, k=k, layout=layout, as_slots=False)
        return float(np.mean([len(set(want[t]) & set(np.asarray(got)[t])) / k for t in range(k, n)]))

    assert overlap(False) > 0.95
    assert overlap(True) < 0.9


def prefill_arguments() -> dict[str, Any]:
    layout = IndexLayout(64)
    return Exact("e4m3fn").arguments(layout) | windows(batch()) | dict(layout=layout, k=K)


FNUZ = jnp.zeros((PADDED_ROWS, HEADS, 128), jnp.float8_e4m3fnuz)
TOO_FAR = jnp.full(PADDED_TOKENS, CAPACITY, jnp.int32)
BAD_PREFILLS = [
    (
        "a budget under one row",
        dict(logits_bytes=1279),
        ValueError,
        "logits_bytes expected at least 1,280 for one row, got 1,279",
    ),
    (
        "a slot beyond the pool",
        dict(k_slots=TOO_FAR),
        ValueError,
        r"topk_prefill: k_slots expected values in .*512\).*got 512",
    ),
    (
        "pages of another size",
        dict(layout=IndexLayout(16)),
        ValueError,
        r"topk_prefill: pool expected uint8\[pages, 2112\]",
    ),
    (
        "queries of another format",
        dict(q8=FNUZ),
        ValueError,
        "k8 expected q8's dtype float8_e4m3fnuz, got float8_e4m3fn",
    ),
    ("no k", dict(k=0), ValueError, "select: k expected at least 1, got 0"),
    ("a window that ends outside", dict(lengths=TOO_FAR[:PADDED_ROWS]), ValueError, "topk_prefill: lengths expected"),
    ("too few windows", dict(starts=TOO_FAR[:3]), TypeCheckError, "starts"),
    ("no GPU", dict(implementation="pallas"), NotImplementedError, "implementation='pallas' expected a GPU"),
]


@pytest.mark.parametrize("bad, error, says", [c[1:] for c in BAD_PREFILLS], ids=[c[0] for c in BAD_PREFILLS])
def test_prefill_refuses(bad, error, says):
    with pytest.raises(error, match=says):
        topk_prefill(**(prefill_arguments() | bad))


def test_decode_refuses():
    b, layout = batch(), IndexLayout(64)
    told = jnps(token_table=b.table, requests=np.array(REQUESTS, np.int32), lengths=np.array(LENGTHS, np.int32))
    good: dict[str, Any] = Exact("e4m3fn", 6).arguments(layout) | told | dict(k=K, layout=layout, max_len=COLUMNS)
    for bad, says in (
        (dict(max_len=99), r"lengths expected values in .*100\) \(max_len\), got 1 to 100"),
        (dict(max_len=COLUMNS + 1), "max_len expected 1 to 110, got 111"),
        (dict(next_n=5), "next_n expected 1 to 4, got 5"),
        (dict(next_n=2), "q8 expected 6 requests of 2 rows, got 6 rows"),
        (dict(k=0), "k expected at least 1, got 0"),
        (dict(requests=jnp.full(6, 7, jnp.int32)), r"requests expected values in \[0, 7\)"),
        (dict(token_table=jnp.full((7, COLUMNS), CAPACITY, jnp.int32)), "token_table expected values"),
    ):
        call: dict[str, Any] = good | bad
        with pytest.raises(ValueError, match=says):
            topk_decode(**call)


@pytest.mark.parametrize("k_slots", ([1, 64, 2, 1000, 3, 4], [1, -1, 2, -1, 3, 4]), ids=("beyond the pool", "none"))
def test_under_jit_a_slot_that_is_not_in_the_pool_is_never_selected(how, k_slots):
    """Its score would be 0, more than the real ones', which are negative here."""
    layout = IndexLayout(16)
    rng = np.random.default_rng(0)
    one, zero, slots = jnp.ones(128), jnp.zeros(128), jnp.arange(1, 5, dtype=jnp.int32)
    keys = jnp.asarray(rng.standard_normal((4, 128)), jnp.float32)
    pool = jnp.zeros((4, layout.page_bytes), jnp.uint8)
    pool = index_write(pool, slots, keys, one, zero, cos_sin_table(64), slots, layout=layout)
    q = jnp.asarray(rng.standard_normal((1, HEADS, 128)), jnp.float32)
    q8, weights = index_query(q, -jnp.ones((1, HEADS)), cos_sin_table(64), slots[:1])
    start, length = jnp.zeros(1, jnp.int32), jnp.full(1, 6, jnp.int32)

    @jax.jit
    def selected(k_slots):
        return topk_prefill(q8, weights, pool, k_slots, start, length, k=4, layout=layout, **how)

    assert selected(jnp.array(k_slots, jnp.int32)).tolist() == [[1, 2, 3, 4]]


def test_prefill_refuses_windows_whatever_its_budget():
    layout = IndexLayout(16)
    pool, q8 = jnp.zeros((4, layout.page_bytes), jnp.uint8), jnp.zeros((2, HEADS, 128), E4M3FN.dtype)
    starts, lengths = jnp.zeros(2, jnp.int32), jnp.full(2, 9, jnp.int32)
    args = q8, jnp.zeros((2, HEADS)), pool, jnp.arange(1, 4, dtype=jnp.int32), starts, lengths
    for logits_bytes in (12, 1 << 20):
        with pytest.raises(ValueError, match="topk_prefill: lengths expected"):
            topk_prefill(*args, k=4, layout=layout, logits_bytes=logits_bytes)


def test_an_invalid_position_never_becomes_a_slot():
    """-1, a position behind the row's own, one beyond the table: none of them is slot 0, or any slot."""
    import jax.numpy as jnp

    from jax_mla import slots_of

    positions = jnp.array([[0, 1, 2, 3, -1], [-1, -1, 4, 0, 99]], jnp.int32)
    lengths = jnp.array([3, 5], jnp.int32)
    k_slots = jnp.array([10, 11, 12, 20, 21, 22, 23, 24], jnp.int32)
    expected = [[10, 11, 12, -1, -1], [-1, -1, 24, 20, -1]]
    assert slots_of(positions, k_slots, jnp.array([0, 3], jnp.int32), lengths).tolist() == expected
    table = jnp.array([[0] * 5, [20, 21, 22, 23, 24], [10, 11, 12, 77, 78]], jnp.int32)
    assert slots_of(positions, table, jnp.array([2, 1], jnp.int32), lengths).tolist() == expected
