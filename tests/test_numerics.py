"""The tests' own measures fail when they should."""

import ml_dtypes
import numpy as np
import pytest

from tests.numerics import assert_bitwise_equal, assert_close, assert_same_mask, assert_within_one_ulp, calc_diff


def test_calc_diff_is_the_formula():
    x, y = np.random.default_rng(0).standard_normal((2, 1000))
    assert calc_diff(x, y) == pytest.approx(1 - 2 * np.dot(x, y) / (np.dot(x, x) + np.dot(y, y)), abs=1e-12)
    assert calc_diff(x, 1.001 * x) == pytest.approx(5e-7, rel=0.01)
    assert calc_diff(np.zeros(3), np.zeros(3)) == 0
    assert calc_diff(np.zeros(3), np.array([0, 0, 1e-30])) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_calc_diff_refuses_what_is_not_a_number(bad):
    for x, y in ((np.array([1, bad]), np.ones(2)), (np.ones(2), np.array([1, bad])), (np.array([bad]),) * 2):
        with pytest.raises(ValueError, match="finite"):
            calc_diff(x, y)


def test_calc_diff_refuses_shapes_that_differ():
    with pytest.raises(ValueError, match="equal shapes"):
        calc_diff(np.ones((2, 1)), np.ones((1, 2)))


def test_assert_close_looks_at_each_row():
    x = np.ones((1000, 8))
    y = x.copy()
    y[500] *= 1.01  # 5e-8 of the whole
    assert calc_diff(x, y) < 5e-6
    with pytest.raises(AssertionError, match=r"row \(500,\)"):
        assert_close(x, y, 5e-6)


def test_assert_bitwise_equal_names_the_first_place():
    x = np.zeros((3, 4), ml_dtypes.bfloat16)
    y = x.copy()
    y[1, 2] = -0.0
    with pytest.raises(AssertionError, match=r"1 of 12 differ, first at \(1, 2\): 0.* and -0"):
        assert_bitwise_equal(x, y)
    with pytest.raises(AssertionError, match="dtypes"):
        assert_bitwise_equal(x, x.astype(np.float32))
    with pytest.raises(AssertionError, match="shapes"):
        assert_bitwise_equal(x, x[:1])
    assert_bitwise_equal(np.array([np.nan]), np.array([np.nan]))


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
def test_assert_same_mask(value):
    with pytest.raises(AssertionError, match=r"first at \(1,\)"):
        assert_same_mask(np.array([0, value]), np.zeros(2))


def test_assert_within_one_ulp():
    x = np.array([1.0, 2.0], np.float32)
    once = np.nextafter(x, np.float32(9))
    assert_within_one_ulp(x, once)
    with pytest.raises(AssertionError, match="2 differ"):
        assert_within_one_ulp(x, np.nextafter(once, np.float32(9)))
