"""How near is near: each comparison of the tests by its name, none of them lenient by default."""

import numpy as np

QUANTISED_INPUTS = 5e-6
"""Bar of ``calc_diff`` for a result against float64 on the same quantised inputs (DeepGEMM's own)."""

FLOAT32 = 5e-11
"""The same where all that is rounded is rounded to float32: 5e-6 is a relative error of 0.3 %, this is one of 1e-5."""

BF16_ROW = 1e-5
"""The same for a single vector that one large weight rules, rounded to bf16: ``(2^-8)² / 2``, and its own rounding."""


def float64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def calc_diff(x, y) -> float:
    """``1 - 2 <x, y> / (|x|² + |y|²)`` in float64: half the squared relative error. 0 where both are all zeros."""
    x, y = float64(x), float64(y)
    if x.shape != y.shape:
        raise ValueError(f"calc_diff: expected equal shapes, got {x.shape} and {y.shape}")
    for name, values in (("x", x), ("y", y)):
        if not np.isfinite(values).all():
            raise ValueError(f"calc_diff: {name} expected finite numbers, got {values[~np.isfinite(values)][0]}")
    total = np.sum(x * x) + np.sum(y * y)
    return float(np.sum((x - y) ** 2) / total) if total > 0 else 0.0


def assert_close(x, y, bar: float) -> None:
    """``calc_diff`` of each vector along the last axis is at most ``bar``: one bad row can't hide in the rest."""
    x, y = float64(x), float64(y)
    if x.shape != y.shape:
        raise ValueError(f"assert_close: expected equal shapes, got {x.shape} and {y.shape}")
    for at in np.ndindex(x.shape[:-1]):
        diff = calc_diff(x[at], y[at])
        assert diff <= bar, f"row {at}: calc_diff {diff:.3g} > {bar:g}"


def assert_bitwise_equal(x, y) -> None:
    """The same dtype, shape and bytes: -0 is not +0, and a NaN equals only itself."""
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
    assert x.dtype == y.dtype, f"dtypes {x.dtype} and {y.dtype}"
    assert x.shape == y.shape, f"shapes {x.shape} and {y.shape}"
    bytes_differ = (x.reshape(-1, 1).view(np.uint8) != y.reshape(-1, 1).view(np.uint8)).any(axis=1).reshape(x.shape)
    if bytes_differ.any():
        at = tuple(int(i) for i in np.argwhere(bytes_differ)[0])
        raise AssertionError(f"{bytes_differ.sum()} of {x.size} differ, first at {at}: {x[at]} and {y[at]}")


def assert_within_one_ulp(x, y) -> None:
    """float32, not negative, and each the same as the other's or next to it: a division by way of the reciprocal."""
    x, y = np.asarray(x), np.asarray(y)
    assert x.dtype == y.dtype == np.float32, f"dtypes {x.dtype} and {y.dtype}"
    assert x.shape == y.shape, f"shapes {x.shape} and {y.shape}"
    differ = np.abs(x.view(np.int32).astype(np.int64) - y.view(np.int32)) > 1
    assert not differ.any(), f"{differ.sum()} differ, first {x[differ][0]!r} and {y[differ][0]!r}"


def assert_same_mask(x, y) -> None:
    """-inf, +inf and NaN stand in the same places."""
    x, y = float64(x), float64(y)
    assert x.shape == y.shape, f"shapes {x.shape} and {y.shape}"
    for name, found in (("-inf", np.isneginf), ("+inf", np.isposinf), ("NaN", np.isnan)):
        differ = found(x) != found(y)
        if differ.any():
            at = tuple(int(i) for i in np.argwhere(differ)[0])
            raise AssertionError(f"{name} in {differ.sum()} places of one only, first at {at}: {x[at]} and {y[at]}")


def assert_close_where_finite(x, y, bar: float) -> None:
    """``assert_same_mask``, then ``assert_close`` of the rest."""
    assert_same_mask(x, y)
    x, y = float64(x), float64(y)
    assert_close(np.where(np.isfinite(x), x, 0.0), np.where(np.isfinite(y), y, 0.0), bar)
