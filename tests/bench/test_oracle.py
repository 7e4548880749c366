"""The oracle says when a result is wrong."""

import numpy as np
import pytest

from bench import oracle
from bench.kernels import cases
from bench.run import Inputs, JaxRunner

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
