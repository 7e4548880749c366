"""``index_logits_ragged`` against float64, in windows of every kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jax_mla import index_logits_ragged
from jax_mla.ops.index_logits_ragged.config import Config
from tests.jax_mla.ops import dyadic
from tests.jax_mla.oracles import FP8, LARGEST, index_logits
from tests.numerics import FLOAT32, assert_bitwise_equal, assert_close_where_finite, assert_same_mask

T, S = 13, 300
WINDOWS = [(0, 300), (0, 0), (300, 300), (5, 3), (-7, 4), (290, 999), (0, 1), (299, 300), (128, 256), (127, 129)]
WINDOWS += [(53, 153), (-(2**31), 2**31 - 1), (200, 201)]
"""All, none at either end, reversed, cut at 0 and at S, one token, on edges of tiles, misaligned, the widest."""

FORMATS = sorted(FP8)


def exact_inputs(heads: int, fp8: str) -> list[np.ndarray]:
    rng = np.random.default_rng(heads)
    q8, k8 = dyadic.fp8_numbers(rng, (T, heads, 128), fp8), dyadic.fp8_numbers(rng, (S, 128), fp8)
    starts, ends = np.array(WINDOWS, np.int32).T
    return [q8, dyadic.weights(rng, (T, heads)), k8, dyadic.scales(rng, S), starts, ends]


def oracle(q8, weights, k8, k_scale, starts, ends) -> np.ndarray:
    s = np.arange(len(k8))
    inside = (s >= starts[:, None]) & (s < ends[:, None])
    return np.where(inside, index_logits(q8, weights, k8, k_scale), -np.inf) + 0.0  # -0 becomes 0


def run(arrays, **options) -> np.ndarray:
    return np.asarray(index_logits_ragged(*(jnp.asarray(x) for x in arrays), **options)) + np.float32(0)


HEADS = [(1, "e4m3fn"), (5, "e4m3fnuz"), (8, "e4m3fn"), (64, "e4m3fn"), (64, "e4m3fnuz")]


@pytest.mark.parametrize("heads, fp8", HEADS)
def test_exact_inputs_give_exact_logits(how, heads, fp8):
    arrays = exact_inputs(heads, fp8)
    assert_bitwise_equal(run(arrays, **how), oracle(*arrays).astype(np.float32))


@pytest.mark.parametrize("fp8", FORMATS)
def test_random_inputs(how, fp8):
    arrays = exact_inputs(64, fp8)
    rng = np.random.default_rng(0)
    arrays[0] = (rng.standard_normal((T, 64, 128)) * 30).astype(FP8[fp8])
    arrays[1] = rng.standard_normal((T, 64)).astype(np.float32)
    arrays[2] = (rng.standard_normal((S, 128)) * 30).astype(FP8[fp8])
    arrays[3] = np.exp(rng.standard_normal(S)).astype(np.float32)
    assert_close_where_finite(run(arrays, **how), oracle(*arrays), FLOAT32)


def test_one_row_of_one_token(how):
    rng = np.random.default_rng(0)
    arrays = [dyadic.fp8_numbers(rng, (1, 8, 128), "e4m3fn"), dyadic.weights(rng, (1, 8))]
    arrays += [dyadic.fp8_numbers(rng, (1, 128), "e4m3fn"), dyadic.scales(rng, 1)]
    arrays += [np.zeros(1, np.int32), np.ones(1, np.int32)]
    want = oracle(*arrays)
    assert want.shape == (1, 1) and want[0, 0] != 0
    assert_bitwise_equal(run(arrays, **how), want.astype(np.float32))


@pytest.mark.parametrize("poison", ["NaN", "needle"])
def test_keys_outside_of_a_window_do_not_touch_it(how, poison):
    """One window in the middle; what lies around it is NaN, or the key of another request that outshines all others."""
    arrays = exact_inputs(8, "e4m3fn")
    arrays[4], arrays[5] = np.full(T, 100, np.int32), np.full(T, 101, np.int32) + np.arange(T, dtype=np.int32)
    want = oracle(*arrays)
    outside = (np.arange(S) < 100) | (np.arange(S) >= 113)
    arrays[2][outside] = np.nan if poison == "NaN" else LARGEST["e4m3fn"]
    arrays[3][outside] = np.nan if poison == "NaN" else 1e30
    assert_bitwise_equal(run(arrays, **how), want.astype(np.float32))


def test_a_negative_scale_or_weight_is_taken_as_it_is(how):
    arrays = exact_inputs(8, "e4m3fn")
    arrays[1], arrays[3] = -np.abs(arrays[1]), -arrays[3]
    want = oracle(*arrays)
    assert (want[np.isfinite(want)] >= 0).all()
    assert_bitwise_equal(run(arrays, **how), want.astype(np.float32))


@pytest.mark.parametrize(
    "tiles", [dict(rows=0), dict(rows=3), dict(keys=8), dict(num_warps=3), dict(num_stages=0)], ids=str
)
def test_tiles_that_cannot_be_are_refused(tiles):
    q8, k8 = jnp.zeros((2, 8, 128), jnp.float8_e4m3fn), jnp.zeros((40, 128), jnp.float8_e4m3fn)
    rest = jnp.ones((2, 8)), k8, jnp.ones(40), jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.int32)
    with pytest.raises(ValueError, match="index_logits_ragged: config expected .*, got Config"):
        index_logits_ragged(q8, *rest, implementation="pallas", interpret=True, config=Config(**tiles))


@pytest.mark.parametrize("tiles", [Config(1, 64), Config(4, 128), Config(16, 256)], ids=str)
def test_any_tile(tiles):
    arrays = exact_inputs(5, "e4m3fn")
    got = run(arrays, implementation="pallas", interpret=True, config=tiles)
    assert_bitwise_equal(got, oracle(*arrays).astype(np.float32))


def test_same_bits_each_time_and_under_jit(how):
    arrays = exact_inputs(8, "e4m3fn")
    arrays[1] = np.random.default_rng(0).standard_normal((T, 8)).astype(np.float32)
    first = run(arrays, **how)
    assert_bitwise_equal(run(arrays, **how), first)
    jitted = jax.jit(lambda *x: index_logits_ragged(*x, **how))
    assert_same_mask(jitted(*arrays), first)
    assert_bitwise_equal(np.asarray(jitted(*arrays)) + np.float32(0), first)


BAD_CALLS = [
    (
        "keys of another format",
        2,
        np.zeros((S, 128), FP8["e4m3fnuz"]),
        ValueError,
        "k8 expected q8's dtype float8_e4m3fn, got",
    ),
    (
        "queries not in fp8",
        0,
        np.zeros((T, 8, 128), np.float32),
        ValueError,
        "float8_e4m3fn or float8_e4m3fnuz, got float32",
    ),
    ("keys of 64", 2, np.zeros((S, 64), FP8["e4m3fn"]), TypeCheckError, "k8"),
    ("scales of other keys", 3, np.ones(S - 1, np.float32), TypeCheckError, "k_scale"),
    ("scales with an axis", 3, np.ones((S, 1), np.float32), TypeCheckError, "k_scale"),
    ("too few windows", 4, np.zeros(T - 1, np.int32), TypeCheckError, "starts"),
    ("windows as floats", 5, np.zeros(T, np.float32), TypeCheckError, "ends"),
    ("weights of other heads", 1, np.zeros((T, 4), np.float32), TypeCheckError, "weights"),
]


@pytest.mark.parametrize("at, bad, error, says", [case[1:] for case in BAD_CALLS], ids=[case[0] for case in BAD_CALLS])
def test_refusals(at, bad, error, says):
    arrays = exact_inputs(8, "e4m3fn")
    arrays[at] = bad
    with pytest.raises(error, match=says):
        run(arrays)


def test_refuses_logits_over_the_budget():
    arrays = exact_inputs(8, "e4m3fn")
    run(arrays, max_logits_bytes=4 * T * S)
    says = r"max_logits_bytes expected at most 15,599 bytes of logits \(attention.topk_prefill.*got 15,600 bytes"
    with pytest.raises(ValueError, match=says):
        run(arrays, max_logits_bytes=4 * T * S - 1)


def test_refuses_what_it_cannot_run():
    with pytest.raises(NotImplementedError, match="index_logits_ragged: implementation='pallas' expected a GPU"):
        run(exact_inputs(8, "e4m3fn"), implementation="pallas")
    with pytest.raises(TypeCheckError, match="implementation"):
        run(exact_inputs(8, "e4m3fn"), implementation="Pallas")
