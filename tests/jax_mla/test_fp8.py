"""Both 8-bit formats, code by code, against ml_dtypes; scales around powers of two against exact arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_mla import pallas_triton
from jax_mla.fp8 import (
    E4M3FN,
    E4M3FNUZ,
    block_scale,
    decode,
    encode,
    fn_to_fnuz,
    format_of,
    fp8_format,
    quantize_block,
)
from tests.jax_mla.oracles import DIVISION, FP8, LARGEST, assert_codes_are_nearest, power_of_two
from tests.numerics import assert_bitwise_equal, assert_within_one_ulp

ALL = np.arange(256, dtype=np.uint8)
INF = np.float32(np.inf)

formats = pytest.mark.parametrize("fp8", [E4M3FN, E4M3FNUZ], ids=str)


def values(fp8) -> np.ndarray:
    """float32 values of all codes, by ml_dtypes."""
    return ALL.view(FP8[fp8.name]).astype(np.float32)


def finite(fp8) -> np.ndarray:
    """The distinct finite values, ascending."""
    return np.unique(values(fp8)[np.isfinite(values(fp8))])


def encoded(x, fp8) -> np.ndarray:
    """Bytes from outside of jit, which must be those from inside."""
    x = jnp.asarray(x, jnp.float32)
    codes = np.asarray(encode(x, fp8))
    assert_bitwise_equal(codes, jax.jit(encode, static_argnums=1)(x, fp8))
    return codes


@formats
def test_decode_every_code(fp8):
    got, want = np.asarray(decode(jnp.asarray(ALL), fp8)), values(fp8)
    nan = np.isnan(want)
    assert nan.sum() == (2 if fp8 == E4M3FN else 1)
    assert (np.isnan(got) == nan).all()
    assert_bitwise_equal(got[~nan], want[~nan])
    assert np.nanmax(got) == LARGEST[fp8.name] == fp8.max


@formats
def test_encode_every_value(fp8):
    numbers = ~np.isnan(values(fp8))
    assert_bitwise_equal(encoded(values(fp8)[numbers], fp8), ALL[numbers])


@formats
def test_encode_every_midpoint_and_its_neighbours(fp8):
    v = finite(fp8)
    middle = (v[:-1] + v[1:]) / 2
    for x in (middle, np.nextafter(middle, INF), np.nextafter(middle, -INF)):
        assert_bitwise_equal(encoded(x, fp8), x.astype(FP8[fp8.name]).view(np.uint8))


@formats
def test_encode_all_magnitudes(fp8):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-fp8.max, fp8.max, 50_000), rng.standard_normal(50_000) * 0.01]).astype(np.float32)
    assert_bitwise_equal(encoded(x, fp8), x.astype(FP8[fp8.name]).view(np.uint8))


@formats
def test_encode_saturates(fp8):
    largest = np.float32(fp8.max)
    beyond = np.array([largest, np.nextafter(largest, INF), 1.01 * largest, 464, 480, 1e30, INF], np.float32)
    beyond = beyond[beyond >= largest]
    assert (encoded(beyond, fp8) == (0x7E if fp8 == E4M3FN else 0x7F)).all()
    assert (encoded(-beyond, fp8) == (0xFE if fp8 == E4M3FN else 0xFF)).all()


@formats
def test_encode_zeros_and_what_rounds_to_zero(fp8):
    half = finite(fp8)[finite(fp8) > 0][0] / 2  # the tie goes to 0, which is even
    x = np.array([0.0, -0.0, half, -half, 1e-30, -1e-30], np.float32)
    minus = 0x80 if fp8 == E4M3FN else 0
    assert encoded(x, fp8).tolist() == [0, minus, 0, minus, 0, minus]


@formats
def test_encode_nan(fp8):
    x = np.array([0x7FC00000, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(encoded(x, fp8).view(FP8[fp8.name]).astype(np.float32)).all()


@formats
def test_power_of_two_scales_at_and_beside_powers_of_two(fp8):
    edge = (np.float64(fp8.max) * 2.0 ** np.arange(-100, 119)).astype(np.float32)
    for amax in (edge, np.nextafter(edge, INF), np.nextafter(edge, np.float32(0))):
        want = power_of_two(amax.astype(np.float64) / fp8.max).astype(np.float32)
        assert_bitwise_equal(block_scale(jnp.asarray(amax), fp8, "ue8m0"), want)
    assert_bitwise_equal(block_scale(jnp.asarray(edge), fp8, "ue8m0"), (2.0 ** np.arange(-100, 119)).astype(np.float32))


@formats
@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
def test_scales_of_what_is_not_finite(fp8, scale):
    assert np.isnan(block_scale(jnp.float32(np.nan), fp8, scale))
    assert np.isposinf(block_scale(jnp.float32(np.inf), fp8, scale))


@formats
def test_smallest_power_of_two_scale_is_a_normal_number(fp8):
    for amax in (0.0, 1e-38, 1e-36):
        assert block_scale(jnp.float32(amax), fp8, "ue8m0") == np.float32(2.0**-126)


@formats
def test_fp32_scales_are_one_division(fp8):
    amax = np.exp(np.random.default_rng(0).standard_normal(10_000) * 5).astype(np.float32)
    assert_within_one_ulp(block_scale(jnp.asarray(amax), fp8, "fp32"), amax / np.float32(fp8.max))
    powers = np.float32(2.0) ** np.arange(-30, 30, dtype=np.float32)
    assert_bitwise_equal(block_scale(jnp.asarray(powers * np.float32(fp8.max)), fp8, "fp32"), powers)


@formats
@pytest.mark.parametrize("scale", ["fp32", "ue8m0"])
def test_quantize_block(fp8, scale):
    x = np.random.default_rng(0).standard_normal((6, 128)) * 10.0 ** np.arange(-3, 3)[:, None]
    x[2] = 0
    x = x.astype(np.float32)
    amax = np.abs(x).max(axis=1, keepdims=True)
    codes, s = (np.asarray(y) for y in quantize_block(jnp.asarray(x), jnp.asarray(amax), fp8, scale))
    want = amax / np.float32(fp8.max)
    if scale == "ue8m0":
        assert_bitwise_equal(s, power_of_two(np.maximum(want, 2.0**-126)).astype(np.float32))
    else:
        assert_within_one_ulp(s, want)
    exact = x / np.where(s > 0, s, 1).astype(np.float64)
    assert_codes_are_nearest(codes, exact, fp8.name, DIVISION * np.abs(exact))
    assert not codes[2].any()


def test_formats_by_name_and_by_dtype():
    assert fp8_format("e4m3fn") is E4M3FN and fp8_format("e4m3fnuz") is E4M3FNUZ
    assert format_of(jnp.float8_e4m3fn) is E4M3FN and format_of(jnp.float8_e4m3fnuz) is E4M3FNUZ
    with pytest.raises(ValueError, match=r"fp8.*e4m3fn.*e4m3fnuz.*'e5m2'"):
        fp8_format("e5m2")
    with pytest.raises(ValueError, match="fp8.*float8_e4m3fn.*got float8_e5m2"):
        format_of(jnp.float8_e5m2)


def in_a_kernel(f, x, dtype) -> np.ndarray:
    """``f(x)``, computed in a Pallas kernel that is interpreted."""

    def kernel(x_ref, out_ref):
        i = jnp.arange(x_ref.shape[0])
        pallas_triton.store(out_ref.at[i], f(pallas_triton.load(x_ref.at[i])))

    (out,) = pallas_triton.kernel_call(
        kernel,
        (jnp.asarray(x),),
        (jax.ShapeDtypeStruct(x.shape, dtype),),
        name="elementwise",
        grid=(1,),
        num_warps=4,
        num_stages=1,
        interpret=True,
    )
    return np.asarray(out)


@formats
def test_every_code_in_a_kernel(fp8):
    decoded = in_a_kernel(lambda codes: decode(codes, fp8), ALL, jnp.float32)
    want = values(fp8)
    nan = np.isnan(want)
    assert (np.isnan(decoded) == nan).all()
    assert_bitwise_equal(decoded[~nan], want[~nan])
    x = np.where(nan, 0, want).astype(np.float32)
    assert_bitwise_equal(in_a_kernel(lambda x: encode(x, fp8), x, jnp.uint8), np.where(nan, 0, ALL).astype(np.uint8))
    v = finite(fp8)
    middle = np.resize((v[:-1] + v[1:]) / 2, 256)
    for x in (middle, np.nextafter(middle, INF), np.nextafter(middle, -INF)):
        got = in_a_kernel(lambda x: encode(x, fp8), x, jnp.uint8)
        assert_bitwise_equal(got, x.astype(FP8[fp8.name]).view(np.uint8))


def test_every_code_of_a_checkpoint_for_a_card_with_fnuz():
    scales = np.float32(2.0) ** np.resize(np.arange(-60, 60, 7, dtype=np.float32), 256)
    codes, doubled = (np.asarray(x) for x in fn_to_fnuz(jnp.asarray(ALL), jnp.asarray(scales)))
    assert codes.dtype == np.uint8 and doubled.dtype == np.float32
    want = values(E4M3FN) * scales
    got = codes.view(FP8["e4m3fnuz"]).astype(np.float32) * doubled
    nan = np.isnan(want)
    assert nan.sum() == 2 and (np.isnan(got) == nan).all() and (codes[nan] == 0x80).all()
    assert (got[~nan] == want[~nan]).all()
    same = ~nan & (ALL != 0x80)
    assert_bitwise_equal(codes[same], ALL[same])
    assert codes[0x80] == 0
