"""``index_logits_paged`` against float64, over pages whose every unread byte is poison."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from jax_mla import E4M3FNUZ, IndexLayout, index_logits_paged
from jax_mla.ops.index_logits_paged.config import Config
from tests.jax_mla.ops import dyadic
from tests.jax_mla.oracles import FP8, LARGEST, NAN_BYTE, fp8_codes, index_logits, index_pool
from tests.numerics import FLOAT32, assert_bitwise_equal, assert_close_where_finite

CAPACITY, COLUMNS, MAX_LEN = 512, 100, 70
LENGTHS = [70, 0, 1, 65, 63, 64, -4, 3]
REQUESTS = [5, 0, 3, 3, 7, 1, 6, 2]
"""Rows of the table, in no order; the third and fourth are the same request's, at two lengths."""

LAYOUTS = [IndexLayout(1), IndexLayout(16), IndexLayout(64), IndexLayout(16, preshuffle=True)]
LAYOUTS += [IndexLayout(64, preshuffle=True), IndexLayout(64, E4M3FNUZ, preshuffle=True), IndexLayout(1, E4M3FNUZ)]


def name(layout: IndexLayout) -> str:
    return f"{layout.page_size}{'-preshuffle' if layout.preshuffle else ''}-{layout.fp8}"


class Batch:
    """A batch with exact logits. What no row may read is ``poison``: "NaN", or "needle", a key that outshines all."""

    def __init__(self, layout: IndexLayout, heads: int = 8, next_n: int = 1, poison: str = "NaN", seed: int = 0):
        rng = np.random.default_rng(seed)
        fp8 = layout.fp8.name
        self.layout, self.next_n, rows = layout, next_n, len(REQUESTS) * next_n
        self.q8 = dyadic.fp8_numbers(rng, (rows, heads, 128), fp8)
        self.weights = dyadic.weights(rng, (rows, heads))
        self.keys = dyadic.fp8_numbers(rng, (CAPACITY, 128), fp8).astype(np.float64)
        self.scales = dyadic.scales(rng, CAPACITY)
        self.requests, self.lengths = np.array(REQUESTS, np.int32), np.array(LENGTHS, np.int32)
        self.table = rng.permutation(np.arange(1, CAPACITY))[: 5 * COLUMNS].reshape(5, COLUMNS)
        self.table = np.concatenate([self.table, self.table[:3]]).astype(np.int32)  # requests that share their prefix
        self.table[5, 40:] = rng.permutation(self.table[3, 40:])
        self.table[[3, 5, 5, 7], [7, 0, 69, 20]] = -1, -1, -7, -1  # holes
        self.poison = poison

    def read_slots(self) -> set[int]:
        rows = zip(self.requests, self.lengths, strict=True)
        return {int(s) for r, n in rows for s in self.table[r, : max(n, 0)] if s >= 0}

    def pool(self) -> np.ndarray:
        unread = np.setdiff1d(np.arange(CAPACITY), list(self.read_slots()))
        assert 0 in unread and len(unread) > 50
        fp8 = self.layout.fp8.name
        codes, scales = fp8_codes(self.keys, fp8), self.scales.copy()
        codes[unread] = NAN_BYTE[fp8] if self.poison == "NaN" else fp8_codes(LARGEST[fp8], fp8)
        scales[unread] = np.nan if self.poison == "NaN" else 1e30
        return index_pool(codes, scales, self.layout.page_size, self.layout.preshuffle)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arguments; what stands past a request's length in the table is wild."""
        table = self.table.copy()
        for r in range(len(table)):
            table[r, max([0, *self.lengths[self.requests == r]]) :] = 2**31 - 1
        names = dict(pool=self.pool(), token_table=table, requests=self.requests, lengths=self.lengths)
        return dict(q8=self.q8, weights=self.weights) | names

    def run(self, arrays: dict | None = None, jit: bool = False, **options) -> np.ndarray:
        static: dict[str, Any] = dict(layout=self.layout, max_len=MAX_LEN, next_n=self.next_n) | options
        call = lambda x: index_logits_paged(**x, **static)  # noqa: E731
        arrays = {name: jnp.asarray(x) for name, x in (arrays or self.arrays()).items()}
        return np.asarray((jax.jit(call) if jit else call)(arrays)) + np.float32(0)  # -0 becomes 0

    def oracle(self) -> np.ndarray:
        want = np.full((len(self.q8), MAX_LEN), -np.inf)
        for t in range(len(want)):
            b, i = divmod(t, self.next_n)
            for s in range(self.lengths[b] - self.next_n + i + 1):
                slot = self.table[self.requests[b], s]
                if slot >= 0:
                    key, scale = self.keys[slot][None], self.scales[slot][None]
                    want[t, s] = index_logits(self.q8[t : t + 1], self.weights[t : t + 1], key, scale)[0, 0] + 0.0
        return want


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_each_layout(how, layout):
    batch = Batch(layout)
    want = batch.oracle()
    assert np.isfinite(want).sum(axis=1).tolist() == [68, 0, 1, 64, 62, 64, 0, 3]
    assert_bitwise_equal(batch.run(**how), want.astype(np.float32))


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_rows_of_a_request_see_one_token_more_each(how, next_n):
    batch = Batch(IndexLayout(64), next_n=next_n)
    assert_bitwise_equal(batch.run(**how), batch.oracle().astype(np.float32))


def test_without_filling_what_a_row_sees_is_the_same(how):
    batch = Batch(IndexLayout(64), next_n=2)
    want = batch.oracle().astype(np.float32)
    seen = np.isfinite(want)
    assert 0 < seen.sum() < seen.size
    np.testing.assert_array_equal(batch.run(**how, fill=False)[seen], want[seen])


@pytest.mark.parametrize("heads", [1, 5, 64])
def test_each_number_of_heads(how, heads):
    batch = Batch(IndexLayout(64, preshuffle=True), heads)
    assert_bitwise_equal(batch.run(**how), batch.oracle().astype(np.float32))


@pytest.mark.parametrize("layout", [IndexLayout(64), IndexLayout(16, E4M3FNUZ, preshuffle=True)], ids=name)
def test_random_inputs(how, layout):
    batch = Batch(layout, 64)
    rng = np.random.default_rng(0)
    fp8 = FP8[layout.fp8.name]
    batch.q8 = (rng.standard_normal(batch.q8.shape) * 30).astype(fp8)
    batch.weights = rng.standard_normal(batch.weights.shape).astype(np.float32)
    batch.keys = (rng.standard_normal((CAPACITY, 128)) * 30).astype(fp8).astype(np.float64)
    batch.scales = np.exp(rng.standard_normal(CAPACITY)).astype(np.float32)
    assert_close_where_finite(batch.run(**how), batch.oracle(), FLOAT32)


@pytest.mark.parametrize("next_n", [1, 4])
def test_needles_next_door_are_not_found(how, next_n):
    """Unread slots, slot 0 among them, hold the largest key there is: whoever reads one has it on top."""
    batch = Batch(IndexLayout(64), next_n=next_n, poison="needle")
    assert_bitwise_equal(batch.run(**how), batch.oracle().astype(np.float32))


@pytest.mark.parametrize("next_n", [1, 4])
def test_a_request_alone_gives_the_same_bits(how, next_n):
    batch = Batch(IndexLayout(64), next_n=next_n)
    batch.weights = np.random.default_rng(0).standard_normal(batch.weights.shape).astype(np.float32)
    together = batch.run(**how)
    assert_bitwise_equal(batch.run(**how), together)
    for b in (0, 3):
        alone, rows = batch.arrays(), slice(b * next_n, (b + 1) * next_n)
        alone |= {name: alone[name][rows] for name in ("q8", "weights")}
        alone |= {name: alone[name][b : b + 1] for name in ("requests", "lengths")}
        assert_bitwise_equal(batch.run(alone, **how), together[rows])


def test_under_jit_what_lies_outside_gives_minus_inf(how):
    batch = Batch(IndexLayout(16), next_n=2)
    want, arrays = batch.oracle(), batch.arrays()
    arrays["token_table"][5, [3, 4]] = CAPACITY, 2**31 - 1
    arrays["requests"][[3, 4]] = 8, -1
    want[:2, [3, 4]] = want[6:10] = -np.inf
    assert_bitwise_equal(batch.run(arrays, jit=True, **how), want.astype(np.float32))


def test_under_jit_a_length_over_max_len_is_cut(how):
    batch = Batch(IndexLayout(16))
    want, arrays = batch.oracle(), batch.arrays()
    arrays["lengths"][0] = 80
    assert_bitwise_equal(batch.run(arrays, jit=True, **how), want.astype(np.float32))


@pytest.mark.parametrize(
    "tiles", [dict(blocks=-1), dict(blocks=3), dict(keys=8), dict(num_warps=0), dict(num_stages=0)], ids=str
)
def test_tiles_that_cannot_be_are_refused(tiles):
    layout, ints = IndexLayout(1), jnp.zeros(1, jnp.int32)
    q8, pool = jnp.zeros((1, 8, 128), jnp.float8_e4m3fn), jnp.zeros((9, layout.page_bytes), jnp.uint8)
    static: dict[str, Any] = dict(layout=layout, max_len=8, implementation="pallas", interpret=True)
    with pytest.raises(ValueError, match="index_logits_paged: config expected .*, got Config"):
        index_logits_paged(
            q8, jnp.ones((1, 8)), pool, jnp.zeros((1, 8), jnp.int32), ints, ints, config=Config(**tiles), **static
        )


@pytest.mark.parametrize("tiles", [Config(16, 1), Config(32), Config(128)], ids=str)
def test_any_tile(tiles):
    batch = Batch(IndexLayout(16), 5, next_n=2)
    got = batch.run(implementation="pallas", interpret=True, config=tiles)
    assert_bitwise_equal(got, batch.oracle().astype(np.float32))


EIGHT = dict(min_size=8, max_size=8)


@given(seed=st.integers(0, 2**32 - 1), lengths=st.lists(st.integers(-3, MAX_LEN), **EIGHT), data=st.data())
def test_any_table(how, seed, lengths, data):
    batch = Batch(IndexLayout(16, preshuffle=True), 5, next_n=2, seed=seed)
    batch.lengths[:] = lengths
    batch.requests[:] = data.draw(st.lists(st.integers(0, 7), **EIGHT))
    for r, s in data.draw(st.lists(st.tuples(st.integers(0, 7), st.integers(0, MAX_LEN - 1)), max_size=20)):
        batch.table[r, s] = -1
    assert_bitwise_equal(batch.run(**how), batch.oracle().astype(np.float32))


def arguments() -> dict:
    batch = Batch(IndexLayout(64))
    arrays = {name: jnp.asarray(x) for name, x in batch.arrays().items()}
    return arrays | dict(layout=batch.layout, max_len=MAX_LEN)


FNUZ = jnp.zeros((8, 8, 128), jnp.float8_e4m3fnuz)
BAD_CALLS = [
    ("queries of another format", dict(q8=FNUZ), ValueError, "q8 expected the layout's format e4m3fn, got e4m3fnuz"),
    (
        "queries not in fp8",
        dict(q8=jnp.zeros((8, 8, 128))),
        ValueError,
        "float8_e4m3fn or float8_e4m3fnuz, got float32",
    ),
    (
        "pages of another size",
        dict(layout=IndexLayout(16)),
        ValueError,
        r"pool expected uint8\[pages, 2112\].*got uint8\[8, 8448",
    ),
    ("no rows a request", dict(next_n=0), ValueError, "next_n expected 1 to 4, got 0"),
    ("five rows a request", dict(next_n=5), ValueError, "next_n expected 1 to 4, got 5"),
    ("rows of other requests", dict(next_n=2), ValueError, "q8 expected 8 requests of 2 rows, got 8 rows"),
    ("no columns", dict(max_len=0), ValueError, "max_len expected 1 to 100, got 0"),
    ("more columns than the table", dict(max_len=101), ValueError, "max_len expected 1 to 100, got 101"),
    (
        "a length over max_len",
        dict(lengths=jnp.full(8, 71)),
        ValueError,
        r"lengths expected .*71\) \(max_len\), got 71",
    ),
    (
        "a request beyond",
        dict(requests=jnp.full(8, 8)),
        ValueError,
        r"requests expected values in \[0, 8\).*got 8 to 8",
    ),
    ("a request before", dict(requests=jnp.full(8, -1)), ValueError, r"requests expected values in \[0, 8\).*got -1"),
    (
        "a slot beyond",
        dict(token_table=jnp.full((8, 100), 512)),
        ValueError,
        r"token_table expected .*512\).*got .*512",
    ),
    ("too few lengths", dict(lengths=jnp.zeros(7, jnp.int32)), TypeCheckError, "lengths"),
    ("a flat table", dict(token_table=jnp.zeros(100, jnp.int32)), TypeCheckError, "token_table"),
    ("a pool of bf16", dict(pool=jnp.zeros((8, 8448), jnp.bfloat16)), TypeCheckError, "pool"),
    ("weights in bf16", dict(weights=jnp.zeros((8, 8), jnp.bfloat16)), TypeCheckError, "weights"),
    ("no such implementation", dict(implementation=""), TypeCheckError, "implementation"),
    (
        "no GPU",
        dict(implementation="pallas"),
        NotImplementedError,
        "index_logits_paged: implementation='pallas' expected",
    ),
]


@pytest.mark.parametrize("bad, error, says", [case[1:] for case in BAD_CALLS], ids=[case[0] for case in BAD_CALLS])
def test_refusals(bad, error, says):
    with pytest.raises(error, match=says):
        index_logits_paged(**(arguments() | bad))
