"""The oracle says when a result is wrong."""

import ml_dtypes
import numpy as np
import pytest

from bench import oracle
from bench.run import Inputs, JaxRunner
from bench.sets import cases

TINY = {f"{case.op}-{case.shape.get('layout', '')}".rstrip("-"): case for case in cases("tiny")}


def spoil(x):
    """One number of ``x`` changed: one bit of it, or a float32 a little off."""
    x = x.copy()
    flat = x.reshape(-1).view({1: np.uint8, 2: np.uint16}.get(x.dtype.itemsize, x.dtype))
    at = int(np.argmax(np.nan_to_num(np.abs(flat.astype(np.float64)), posinf=0)))
    flat[at] = flat[at] ^ 8 if flat.dtype.kind in "iu" else flat[at] * 0.9
    return x


@pytest.fixture(params=TINY, scope="module")
def case(request):
    return TINY[request.param]


@pytest.fixture(scope="module")
def result(case):
    inputs = Inputs(case, "cpu", seed=1)
    runner = JaxRunner(case, inputs, lambda shared, varied: case.call("reference", shared, varied))
    return inputs, runner.output()


def test_the_reference_is_right(case, result):
    inputs, output = result
    assert case.error(*inputs.first, output, inputs.rows) <= case.metric[1]


def test_a_spoilt_result_is_wrong(case, result):
    inputs, output = result
    spoilt = (spoil(output[0]), *output[1:]) if isinstance(output, tuple) else spoil(output)
    assert not case.error(*inputs.first, spoilt, inputs.rows) <= case.metric[1]


def test_nan_is_wrong(case, result):
    """NaN throughout, and -1 where indices are expected."""
    inputs, output = result
    first = output[0] if isinstance(output, tuple) else output
    if first.dtype.kind == "i":
        first = np.full_like(first, -1)
    elif first.dtype.itemsize == 1:
        first = np.full(first.view(np.uint8).shape, 0x7F, np.uint8).view(first.dtype)
    else:
        first = np.full_like(first, np.nan)
    spoilt = (first, *output[1:]) if isinstance(output, tuple) else first
    assert not case.error(*inputs.first, spoilt, inputs.rows) <= case.metric[1]


def test_half_ulps():
    """1.0625 lies midway between the fp8 numbers 1.0 and 1.125; 448 is the largest, 2^-10 half of the least."""
    exact = np.array([1.0625, 448.0, 2.0**-10])
    assert oracle.half_ulps(np.array([1.0, 448.0, 0.0]), exact, "fp8") == 1.0
    assert oracle.half_ulps(np.array([1.25, 448.0, 0.0]), exact, "fp8") == 3.0
    assert oracle.half_ulps(np.array([np.nan, 448.0, 0.0]), exact, "fp8") == np.inf


def test_calc_diff():
    x = np.array([3.0, 4.0])
    assert oracle.calc_diff(x, x) == 0
    assert oracle.calc_diff(x, -x) == 2


def test_select_values_takes_any_order():
    logits = np.array([[5.0, 1.0, 4.0, 3.0]], np.float32)
    assert oracle.select_values(logits, 2, np.array([[2, 0]]), [0]) == 0
    assert oracle.select_values(logits, 2, np.array([[3, 0]]), [0]) == 1


def test_rope_of_neighbours_is_that_of_halves_in_another_order():
    rng = np.random.default_rng(0)
    x, table, positions = rng.normal(size=(5, 3, 128)), rng.normal(size=(8, 64)), np.arange(5)
    order = np.r_[np.arange(32).repeat(2) + np.tile([0, 32], 32), 64:128]
    halves = oracle.rope(x, table, positions)
    assert np.array_equal(oracle.rope(x[..., order], table, positions, interleaved=True), halves[..., order])
    assert np.array_equal(halves[..., 64:], x[..., 64:])


def test_a_peer_without_lse_is_checked_by_its_result():
    case = TINY["sparse_mla-bf16"]
    inputs = Inputs(case, "cpu", seed=1)
    out, lse = JaxRunner(case, inputs, lambda shared, varied: case.call("xla", shared, varied)).output()
    assert case.error(*inputs.first, (out, None), inputs.rows) <= case.metric[1]
    assert not case.error(*inputs.first, (spoil(out), None), inputs.rows) <= case.metric[1]
    assert not case.error(*inputs.first, (out, spoil(lse)), inputs.rows) <= case.metric[1]


def test_scales_as_a_reader_in_bf16_sees_them():
    rows = np.zeros((1, 656), np.uint8)
    rows[0, :512] = np.ones(512, np.float32).astype(oracle.FP8).view(np.uint8)
    rows[0, 512:528] = np.full(4, 1.001, np.float32).view(np.uint8)
    assert oracle.unpack_kv(rows, "fp8_656", 1.0)[0, 0] == np.float32(1.001)
    rounded = float(ml_dtypes.bfloat16(1.001))
    assert oracle.unpack_kv(rows, "fp8_656", 1.0, "bf16")[0, 0] == rounded != np.float32(1.001)


def test_selection():
    """Keys whose scores are 0 to 15, exact in fp8."""
    pool = np.zeros((2, 64 * 132), np.uint8)
    pool[1, : 16 * 128].reshape(16, 128)[:, 0] = np.arange(16).astype(oracle.FP8).view(np.uint8)
    pool[1, 8192:] = np.ones(64, np.float32).view(np.uint8)
    query, weight = np.zeros((1, 128), np.float32).astype(oracle.FP8), np.ones(1, np.float32)
    query[0, 0] = 1

    def check(*chosen):
        slots = 64 + np.arange(16)
        return oracle.selection(query, weight, pool, slots, np.array(chosen, np.int32))

    assert check(64 + 14, 64 + 13, 64 + 15) == 0
    assert check(64 + 14, 64 + 12, 64 + 15) > 1
    assert check(64 + 14, 64 + 14, 64 + 15) == np.inf  # one twice
    assert check(64 + 14, 64 + 13, -1) == np.inf
    assert check(64 + 14, 64 + 13, 3) == np.inf  # not the request's
