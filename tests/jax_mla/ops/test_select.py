"""``select`` against a stable sort in Python."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from jax_mla import select
from jax_mla.ops.select import kernel
from jax_mla.ops.select.config import Config
from tests.jax_mla.oracles import padded, top_k
from tests.numerics import assert_bitwise_equal

T, S = 8, 300
LENGTHS = np.array([300, 0, 1, 64, 63, 65, -5, 200], np.int32)
STARTS = np.array([0, 300, 299, 0, 237, 7, 5, 100], np.int32)


def random(rng, shape):
    return rng.standard_normal(shape)


def few_levels(rng, shape):
    """Most are ties; 0 and -0 are one level."""
    x = rng.integers(-2, 3, shape).astype(np.float64)
    return np.where((x == 0) & (rng.random(shape) < 0.5), -0.0, x)


def low_bits(rng, shape):
    """Differ in their last ten bits only."""
    return (np.float32(1.5).view(np.int32) + rng.integers(0, 1024, shape)).astype(np.int32).view(np.float32)


def not_numbers(rng, shape):
    """Half of them NaN of either sign, -inf or inf; -0 and the smallest normal numbers too."""
    odd = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800000, 0xFF800000, 0x7F800000, 0x80000000, 0, 0x800000, 0x80800000]
    x = rng.standard_normal(shape).astype(np.float32)
    return np.where(rng.random(shape) < 0.5, rng.choice(np.array(odd, np.uint32), shape).view(np.float32), x)


def all_nan(rng, shape):
    return np.full(shape, np.nan)


def all_minus_inf(rng, shape):
    return np.full(shape, -np.inf)


def ascending(rng, shape):
    return np.broadcast_to(np.arange(shape[1]), shape)


KINDS = [random, few_levels, low_bits, not_numbers, all_nan, all_minus_inf, ascending]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def logits_of(kind, shape=(T, S), seed: int = 0) -> np.ndarray:
    return kind(np.random.default_rng(seed), shape).astype(np.float32)


def run(logits, lengths, k, **options) -> np.ndarray:
    call: dict[str, Any] = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    return np.asarray(select(jnp.asarray(logits), jnp.asarray(lengths), k, **call))


def oracle(logits, lengths, k, starts=None, table=None, table_rows=None) -> np.ndarray:
    rows = []
    for t, length in enumerate(lengths):
        start = 0 if starts is None else starts[t]
        chosen = top_k(logits[t], start, length, k)
        if table is not None and table.ndim == 1:
            chosen = [max(table[start + p], -1) for p in chosen]
        elif table is not None:
            chosen = [max(table[table_rows[t], p], -1) for p in chosen]
        rows.append(chosen)
    return padded(rows, k)


def tables(dims: int) -> dict:
    """No table, one for the columns, or one for requests; some of their entries are negative."""
    rng = np.random.default_rng(1)
    if dims == 0:
        return {}
    table = rng.permutation(10_000)[: S if dims == 1 else 5 * S].astype(np.int32)
    table[rng.random(len(table)) < 0.05] = -1
    table[rng.random(len(table)) < 0.05] = -9
    if dims == 1:
        return dict(table=table)
    return dict(table=table.reshape(5, S), table_rows=np.array([4, 0, 1, 3, 3, 2, 0, 4], np.int32))


@kinds
@pytest.mark.parametrize("dims", [0, 1, 2])
@pytest.mark.parametrize("starts", [None, STARTS], ids=["from 0", "windows"])
def test_is_a_stable_sort(how, kind, dims, starts):
    logits, more = logits_of(kind), tables(dims) | ({} if starts is None else dict(starts=starts))
    got = run(logits, LENGTHS, 64, **more, **how)
    assert got.dtype == np.int32
    assert_bitwise_equal(got, oracle(logits, LENGTHS, 64, **more))
    if dims:
        window = {} if starts is None else dict(starts=starts)
        both = run(logits, LENGTHS, 64, **more, **how, with_positions=True)
        assert_bitwise_equal(both, np.stack([got, oracle(logits, LENGTHS, 64, **window)]))


@pytest.mark.parametrize(
    "columns, k", [(64, 64), (40, 64), (1500, 7), (2100, 2048), (1, 3), (300, 1), (1, 1), (1030, 1024)]
)
def test_any_k(how, columns, k):
    """k the length, over the length, over the columns, 1, and longer rows than a tile."""
    lengths = np.clip(np.array([columns, columns - 1, 1, 0, k, k + 1, k - 1, -(2**31)], np.int64), -(2**31), columns)
    for kind in (few_levels, not_numbers, random):
        logits = logits_of(kind, (T, columns))
        assert_bitwise_equal(run(logits, lengths.astype(np.int32), k, **how), oracle(logits, lengths, k))


def test_a_row_of_k_tokens_or_fewer_is_all_of_it(how):
    for kind in KINDS:
        lengths = np.array([64, 63, 1, 2, 64, 5, 0, -1], np.int32)
        got = run(logits_of(kind), lengths, 64, **how)
        assert_bitwise_equal(got, padded([list(range(max(n, 0))) for n in lengths], 64))


def test_ties_go_to_the_lower_position(how):
    logits = np.zeros((1, S), np.float32)
    logits[0, [10, 200, 250]] = 1
    logits[0, 5] = -0.0
    got = run(logits, np.array([S], np.int32), 6, **how)
    assert got.tolist() == [[0, 1, 2, 10, 200, 250]]


def test_nan_loses_to_minus_infinity(how):
    logits = np.full((2, S), -np.inf, np.float32)
    logits[:, :100] = np.nan
    logits[1, :100] = -np.nan
    got = run(logits, np.array([S, S], np.int32), 201, **how)
    assert_bitwise_equal(got, np.array([[0, *range(100, 300)]] * 2, np.int32))


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_what_lies_outside_of_a_window_is_not_looked_at(how, poison):
    logits = logits_of(random)
    s = np.arange(S)
    outside = (s < STARTS[:, None]) | (s >= (STARTS + LENGTHS)[:, None])
    want = oracle(logits, LENGTHS, 64, starts=STARTS)
    assert_bitwise_equal(
        run(np.where(outside, poison, logits).astype(np.float32), LENGTHS, 64, starts=STARTS, **how), want
    )


def test_a_row_alone_gives_the_same(how):
    logits, more = logits_of(few_levels), tables(2) | dict(starts=STARTS)
    together = run(logits, LENGTHS, 64, **more, **how)
    assert_bitwise_equal(run(logits, LENGTHS, 64, **more, **how), together)
    for t in (0, 5):
        one = {name: x if name == "table" else x[t : t + 1] for name, x in more.items()}
        assert_bitwise_equal(run(logits[t : t + 1], LENGTHS[t : t + 1], 64, **one, **how), together[t : t + 1])


@pytest.mark.parametrize("starts", [None, STARTS], ids=["from 0", "windows"])
@pytest.mark.parametrize(
    "tiles",
    [Config(256, 256, 128, 1), Config(512, 256, 128, 2), Config(512, 512, 256, 4), Config(4096, 512, 128, 16)],
    ids=str,
)
def test_any_tile(tiles, starts):
    for kind in KINDS:
        logits = logits_of(kind)
        got = run(logits, LENGTHS, 64, starts=starts, implementation="pallas", interpret=True, config=tiles)
        assert_bitwise_equal(got, oracle(logits, LENGTHS, 64, starts=starts))


@pytest.mark.parametrize("sink", [False, True], ids=["anywhere", "position 0"])
@pytest.mark.parametrize("tiles", [Config(256, 256, 128, 1), Config(512, 256, 128, 2)], ids=str)
def test_any_number_of_stages(tiles, sink):
    """Rows much shorter than the widest, so that parts hold few keys or none; the first of each the largest, or not."""
    rng = np.random.default_rng(0)
    columns = 1300  # six parts pass on 128 each, then three, then two
    lengths = np.array([columns, 1000, 300, 257, 256, 65], np.int32)
    logits = rng.integers(-3, 4, (len(lengths), columns)).astype(np.float32)
    logits[::2] = rng.standard_normal((len(lengths[::2]), columns))
    logits[rng.random(logits.shape) < 0.02] = np.nan
    if sink:
        logits[:, 0] = 10
    got = run(logits, lengths, 64, implementation="pallas", interpret=True, config=tiles)
    assert_bitwise_equal(got, oracle(logits, lengths, 64))


@pytest.mark.parametrize("k, columns", [(8200, 32773), (16384, 65541), (32768, 70000)])
def test_more_equal_keys_than_sixteen_bits_count(k, columns):
    got = run(np.zeros((1, columns), np.float32), np.array([columns]), k, implementation="pallas", interpret=True)
    assert_bitwise_equal(got, np.arange(k, dtype=np.int32)[None])


@pytest.mark.parametrize("width, length, k", [(262145, 5000, 2048), (163840, 20000, 4096)])
def test_short_rows_of_wide_logits(width, length, k):
    logits = np.random.default_rng(0).standard_normal((1, width)).astype(np.float32)
    logits[0, 0] = 9
    got = run(logits, np.array([length]), k, implementation="pallas", interpret=True)
    want = np.sort(np.argsort(-logits[0, :length], kind="stable")[:k])
    assert_bitwise_equal(got, want.astype(np.int32)[None])


def test_tiles_that_cannot_be_are_refused():
    for tiles in (
        Config(256, 256, 32, 1),
        Config(256, 128, 128, 1),
        Config(128, 256, 128, 1),
        Config(384, 256, 128, 1),
    ):
        with pytest.raises(ValueError, match="select: config expected powers of two, 128 <= kept .*got Config"):
            run(
                np.zeros((1, 300), np.float32),
                np.array([300]),
                64,
                implementation="pallas",
                interpret=True,
                config=tiles,
            )
    with pytest.raises(NotImplementedError, match="select: expected k of at most 32768 .*got 40000"):
        run(np.zeros((1, 300), np.float32), np.array([300]), 40000, implementation="pallas", interpret=True)


def under_jit(how, logits, lengths, k, **arrays):
    call = jax.jit(lambda logits, lengths, arrays: select(logits, lengths, k, **arrays, **how))
    return np.asarray(call(jnp.asarray(logits), jnp.asarray(lengths), {n: jnp.asarray(x) for n, x in arrays.items()}))


def test_under_jit_columns_outside_are_never_selected(how):
    logits = logits_of(random)
    starts = np.array([-3, 299, 300, -40, 0, 310, -(2**31), 0], np.int32)
    lengths = np.array([9, 5, 5, 45, 301, 3, 10, 2**31 - 1], np.int32)
    inside = [range(max(s, 0), min(s + n, S)) for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    want = [
        [p + columns.start - start for p in top_k(logits[t], columns.start, len(columns), 16)]
        for t, (start, columns) in enumerate(zip(starts.tolist(), inside, strict=True))
    ]
    assert_bitwise_equal(under_jit(how, logits, lengths, 16, starts=starts), padded(want, 16))


def test_under_jit_what_a_table_lacks_is_minus_one(how):
    logits, table = logits_of(ascending), np.arange(1000, 1040, dtype=np.int32).reshape(2, 20)
    lengths = np.array([10, 10, 10, 10, 30, 0, 20, 10], np.int32)
    rows = np.array([0, 1, 2, -1, 1, 0, 1, 2**31 - 1], np.int32)
    got = under_jit(how, logits, lengths, 12, table=table, table_rows=rows)
    want = padded(
        [list(range(1000, 1010)), list(range(1020, 1030)), [], [], [1038, 1039], [], list(range(1028, 1040)), []], 12
    )
    assert_bitwise_equal(got, want)


LEVELS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan])


@given(
    values=st.lists(LEVELS, min_size=30, max_size=30),
    windows=st.lists(st.tuples(st.integers(0, 15), st.integers(-3, 15)), min_size=2, max_size=2),
)
def test_any_values_and_windows(how, values, windows):
    logits = np.array(values, np.float32).reshape(2, 15)
    starts = np.array([start for start, _ in windows], np.int32)
    lengths = np.array([min(n, 15 - start) for start, n in windows], np.int32)
    assert_bitwise_equal(run(logits, lengths, 6, starts=starts, **how), oracle(logits, lengths, 6, starts=starts))


ONES, ROWS = np.ones(T, np.int32), np.zeros(T, np.int32)
BAD_CALLS = [
    ("no k", dict(k=0), ValueError, "select: k expected at least 1, got 0"),
    ("a length over the columns", dict(lengths=ONES * 301), ValueError, r"lengths expected .*301\) .*got 301 to 301"),
    (
        "a window that ends outside",
        dict(starts=ONES, lengths=ONES * 300),
        ValueError,
        r"lengths expected values in .*, 1\) \(columns past the end of logits\), got 1 to 1",
    ),
    ("a window that begins outside", dict(starts=-ONES), ValueError, r"starts expected values in \[0, 301\).*got -1"),
    ("a table without rows", dict(table=np.zeros((5, S), np.int32)), ValueError, "table_rows expected int32.*got None"),
    ("rows without a table", dict(table_rows=ROWS), ValueError, "table_rows expected .*None otherwise"),
    ("rows with a flat table", dict(table=np.zeros(S, np.int32), table_rows=ROWS), ValueError, "table_rows expected"),
    (
        "a row beyond",
        dict(table=np.zeros((5, S), np.int32), table_rows=ROWS + 5),
        ValueError,
        r"table_rows .*\[0, 5\).*got 5",
    ),
    (
        "a table too short",
        dict(table=np.zeros((5, 9), np.int32), table_rows=ROWS, lengths=ONES * 10),
        ValueError,
        "of table",
    ),
    ("a table of other columns", dict(table=np.zeros(S - 1, np.int32)), TypeCheckError, "table"),
    ("positions beside none", dict(with_positions=True), ValueError, "with_positions expected a table beside it"),
    ("logits in bf16", dict(logits=jnp.zeros((T, S), jnp.bfloat16)), TypeCheckError, "logits"),
    ("lengths as floats", dict(lengths=np.ones(T, np.float32)), TypeCheckError, "lengths"),
    ("too few lengths", dict(lengths=ONES[:-1]), TypeCheckError, "lengths"),
    ("too few starts", dict(starts=ONES[:-1]), TypeCheckError, "starts"),
    ("k as a float", dict(k=64.0), TypeCheckError, "'k'"),
    ("no such implementation", dict(implementation="sort"), TypeCheckError, "implementation"),
    ("no GPU", dict(implementation="pallas"), NotImplementedError, "select: implementation='pallas' expected a GPU"),
]


@pytest.mark.parametrize("bad, error, says", [case[1:] for case in BAD_CALLS], ids=[case[0] for case in BAD_CALLS])
def test_refusals(bad, error, says):
    with pytest.raises(error, match=says):
        run(**(dict(logits=logits_of(random), lengths=np.maximum(LENGTHS, 0) // 2, k=64) | bad))


def test_a_window_that_overflows_is_refused_and_under_jit_cut(how):
    logits, length, start = jnp.arange(7.0)[None], jnp.array([2**31 - 1], jnp.int32), jnp.array([5], jnp.int32)
    with pytest.raises(ValueError, match="select: lengths expected"):
        select(logits, length, 3, starts=start, **how)
    assert jax.jit(lambda n: select(logits, n, 3, starts=start, **how))(length).tolist() == [[0, 1, -1]]


def clustered(rng, n):
    """Two heaps far from each other, the boundary in one of them."""
    return np.where(np.arange(n) < n - 2049, -1e30, 1e30 * (1 - 1e-4 * rng.random(n)))


@pytest.mark.parametrize(
    "draw, most",
    [
        (lambda rng, n: rng.standard_normal(n), 13),
        (lambda rng, n: np.maximum(rng.standard_normal((n, 8)), 0) @ rng.random(8), 12),  # as an indexer's scores are
        (lambda rng, n: rng.exponential(size=n), 10),
        (lambda rng, n: -rng.exponential(size=n), 14),
        (lambda rng, n: rng.random(n), 10),
        (lambda rng, n: rng.standard_cauchy(n), 32),
        (lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.integers(-30, 30, n), 40),
        (clustered, 45),
    ],
    ids=["normal", "sums of relus", "exponential", "below", "uniform", "cauchy", "all sizes", "clustered"],
)
def test_the_search_takes_few_counts(draw, most, monkeypatch):
    """Each count is a pass over all keys: of 32,768 keys, on average over ten rows, no more than ``most``."""
    counts = []

    def counting(unfinished, narrow, state):
        n = 0
        while bool(unfinished(state)):
            state, n = narrow(state), n + 1
        counts.append(n)
        return state

    monkeypatch.setattr(kernel.lax, "while_loop", counting)
    rng, n, k = np.random.default_rng(0), 32768, 2048
    for _ in range(10):
        key = kernel.sort_key(jnp.asarray(draw(rng, n), jnp.float32)).reshape(-1, 128)
        threshold, above, exact = kernel._search(key, jnp.int32(n), jnp.int32(k), jnp.int32(k))
        reaching = int(jnp.sum(key >= threshold))
        assert reaching == k if exact else int(above) == int(jnp.sum(key > threshold)) < k < reaching
    assert np.mean(counts) <= most and max(counts) <= kernel.SURE + 2 * 32
