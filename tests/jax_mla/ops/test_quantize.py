"""``quantize`` against exact arithmetic."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jax_mla import E4M3FN, E4M3FNUZ, quantize
from tests.jax_mla.oracles import DIVISION, assert_codes_are_nearest, power_of_two
from tests.numerics import assert_bitwise_equal, assert_within_one_ulp

CASES = [  # each format, size of block and kind of scale, with both dtypes
    (E4M3FN, 128, "fp32", jnp.bfloat16),
    (E4M3FN, 128, "ue8m0", jnp.float32),
    (E4M3FN, None, "fp32", jnp.float32),
    (E4M3FN, None, "ue8m0", jnp.bfloat16),
    (E4M3FNUZ, 128, "fp32", jnp.float32),
    (E4M3FNUZ, 128, "ue8m0", jnp.bfloat16),
    (E4M3FNUZ, None, "fp32", jnp.bfloat16),
    (E4M3FNUZ, None, "ue8m0", jnp.float32),
]
cases = pytest.mark.parametrize("fp8, block, scale, dtype", CASES)


def data(dtype) -> jax.Array:
    """13 rows (not a multiple of any tile) of 2 blocks, of magnitudes 1e-5 to 1e4; blocks of zeros among them."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((13, 256)) * 10.0 ** rng.uniform(-5, 4, (13, 1))
    x[3] = 0
    x[5, 128:] = -0.0
    x[6, :128] = 1e-7
    return jnp.asarray(x, dtype)


def blocks_of(x, block) -> np.ndarray:
    x = np.asarray(x).astype(np.float64)
    return x.reshape(1, 1, -1) if block is None else x.reshape(len(x), -1, block)


@cases
@pytest.mark.parametrize("amax_floor", [0.0, 1e-4])
def test_codes_and_scales(how, fp8, block, scale, dtype, amax_floor):
    x = data(dtype)
    codes, s = (np.asarray(y) for y in quantize(x, fp8=fp8, block=block, scale=scale, amax_floor=amax_floor, **how))
    blocks = blocks_of(x, block)
    assert codes.dtype == np.uint8 and codes.shape == x.shape and s.shape == blocks.shape[:2]
    want = np.maximum(np.abs(blocks).max(axis=2), np.float64(np.float32(amax_floor))) / fp8.max
    if scale == "ue8m0":
        assert_bitwise_equal(s, power_of_two(np.maximum(want, 2.0**-126)).astype(np.float32))
    else:
        assert_within_one_ulp(s, want.astype(np.float32))
    exact = blocks / np.where(s > 0, s, 1).astype(np.float64)[..., None]
    assert_codes_are_nearest(codes.reshape(blocks.shape), exact, fp8.name, DIVISION * np.abs(exact))
    assert not (codes[3] & 0x7F).any(), "zeros read back as zeros"


@pytest.mark.parametrize("fp8", [E4M3FN, E4M3FNUZ], ids=str)
def test_power_of_two_scales_at_and_beside_powers_of_two(how, fp8):
    edge = (fp8.max * 2.0 ** np.arange(-13, 13)).astype(np.float32)
    amax = np.concatenate([edge, np.nextafter(edge, np.float32(1e9)), np.nextafter(edge, np.float32(0))])
    x = np.zeros((78, 128), np.float32)
    x[np.arange(78), np.arange(78)] = -amax
    codes, s = quantize(jnp.asarray(x), fp8=fp8, scale="ue8m0", **how)
    assert_bitwise_equal(s[:, 0], power_of_two(amax.astype(np.float64) / fp8.max).astype(np.float32))
    largest = np.asarray(codes)[np.arange(78), np.arange(78)].view(fp8.dtype).astype(np.float32)
    assert largest.tolist() == [-fp8.max] * 26 + [-fp8.max / 2 if fp8 == E4M3FN else -120.0] * 26 + [-fp8.max] * 26


@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
def test_nan_stays_in_its_block(how, scale):
    x = np.ones((13, 256), np.float32)
    x[2, 130] = np.nan
    codes, s = (np.asarray(y) for y in quantize(jnp.asarray(x), fp8=E4M3FN, scale=scale, **how))
    values = codes.view(E4M3FN.dtype).astype(np.float32) * s.repeat(128, axis=1)
    assert np.isnan(values[2, 130]) and not np.isnan(np.delete(s.ravel(), 5)).any()
    clean_codes, clean_s = quantize(jnp.ones((13, 256)), fp8=E4M3FN, scale=scale, **how)
    assert_bitwise_equal(np.delete(s.ravel(), 5), np.delete(np.asarray(clean_s).ravel(), 5))
    codes, clean_codes = (np.delete(np.asarray(x).reshape(26, 128), 5, 0) for x in (codes, clean_codes))
    assert_bitwise_equal(codes, clean_codes)


@cases
def test_same_bits_each_time_and_under_jit(how, fp8, block, scale, dtype):
    first = quantize(data(dtype), fp8=fp8, block=block, scale=scale, **how)
    again = jax.jit(lambda x: quantize(x, fp8=fp8, block=block, scale=scale, **how))(data(dtype))
    for x, y in zip(first, again, strict=True):
        assert_bitwise_equal(x, y)


def test_refusals():
    x = jnp.ones((4, 100))
    with pytest.raises(ValueError, match=r"quantize: x expected \[R, N\] with N % 128 == 0, got \(4, 100\)"):
        quantize(x, fp8=E4M3FN)
    for bad in (dict(block=64), dict(scale="e8m0"), dict(fp8="e4m3fn"), dict(implementation="triton")):
        with pytest.raises(TypeCheckError, match=next(iter(bad))):
            call: dict[str, Any] = dict(fp8=E4M3FN) | bad
            quantize(jnp.ones((4, 128)), **call)
    bad_inputs: list[Any] = [jnp.ones((4, 128), jnp.int32), jnp.ones(128), np.ones((4, 128), np.float32)]
    for bad_x in bad_inputs:
        with pytest.raises(TypeCheckError, match="parameter .x."):
            quantize(bad_x, fp8=E4M3FN)
