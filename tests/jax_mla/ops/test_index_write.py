"""``index_write`` and ``index_pack`` against LayerNorm, complex numbers and exact scales in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from jax_mla import E4M3FN, E4M3FNUZ, IndexLayout, cos_sin_table, index_pack, index_write
from jax_mla.ops.index_write.config import Config
from tests.jax_mla import oracles
from tests.numerics import assert_bitwise_equal

CAPACITY = 128
POSITIONS = 300
SLOTS = [5, -1, 63, 64, 65, 0, 127, 3, 16, 15, 47, 48, 100, 90, 33, 77, 2, -9, 111]
"""19, which is more than a tile: scattered, on page edges, the last, and three that nothing is written to."""

SKIPPED = np.array(SLOTS) <= 0
AT = np.array(SLOTS)[~SKIPPED]
LAYOUTS = [IndexLayout(1), IndexLayout(16), IndexLayout(64), IndexLayout(16, preshuffle=True)]
LAYOUTS += [IndexLayout(64, preshuffle=True), IndexLayout(64, E4M3FNUZ, preshuffle=True), IndexLayout(1, E4M3FNUZ)]


def name(layout: IndexLayout) -> str:
    return f"{layout.page_size}{'-preshuffle' if layout.preshuffle else ''}-{layout.fp8}"


layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name)
some_layouts = pytest.mark.parametrize("layout", [IndexLayout(16), LAYOUTS[5]], ids=name)


def noise(layout: IndexLayout) -> np.ndarray:
    shape = (CAPACITY // layout.page_size, layout.page_bytes)
    return np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)


def tokens(dtype=jnp.bfloat16) -> dict[str, Any]:
    """Keys with a mean far from 0, of a deviation as small as eps, and of none at all; positions from first to last."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((19, 128)) * 10.0 ** rng.uniform(-1, 2, (19, 1))
    k[3] = 300 + rng.standard_normal(128)
    k[4] *= 1e-3
    k[6] = 7
    k[7] += 0.5
    positions = rng.integers(0, POSITIONS, 19)
    positions[[0, 2]] = 0, POSITIONS - 1
    return dict(
        k=jnp.asarray(k, dtype),
        norm_weight=jnp.asarray(1 + 0.3 * rng.standard_normal(128), jnp.float32),
        norm_bias=jnp.asarray(0.3 * rng.standard_normal(128), jnp.float32),
        cos_sin=cos_sin_table(POSITIONS, factor=40.0),
        positions=jnp.asarray(positions, jnp.int32),
    )


def quantised(k, norm_weight, norm_bias, cos_sin, positions, fp8, interleaved, hadamard):
    """float64 keys before rounding, and their scales."""
    y = oracles.rope(oracles.layer_norm(k, norm_weight, norm_bias), cos_sin, np.asarray(positions), interleaved)
    return oracles.index_quantise(y @ oracles.hadamard(128) if hadamard else y, fp8.name)


def written(layout, dtype=jnp.bfloat16, data=None, pool=None, **options):
    """Codes and scales of all slots after a write into ``pool``, else into noise."""
    pool = jnp.asarray(noise(layout)) if pool is None else pool
    slots = jnp.asarray(SLOTS, jnp.int32)
    after = index_write(pool, slots, **(data or tokens(dtype)), layout=layout, **options)
    return oracles.index_pool_rows(after, layout.page_size, layout.preshuffle)


def check(layout, codes, scales, data, interleaved=False, hadamard=False):
    """The bytes at ``AT`` are right, all others are the noise's."""
    want, want_scale = quantised(**data, fp8=layout.fp8, interleaved=interleaved, hadamard=hadamard)
    assert_bitwise_equal(scales[AT], want_scale[~SKIPPED].astype(np.float32))
    slack = 1e-6 * layout.fp8.max
    oracles.assert_codes_are_nearest(codes[AT], want[~SKIPPED], layout.fp8.name, slack)
    rest = np.setdiff1d(np.arange(CAPACITY), AT)
    old_codes, old_scales = oracles.index_pool_rows(noise(layout), layout.page_size, layout.preshuffle)
    assert_bitwise_equal(codes[rest], old_codes[rest])
    assert_bitwise_equal(scales[rest].view(np.uint32), old_scales[rest].view(np.uint32))


@layouts
def test_each_layout(how, layout):
    data = tokens()
    poisoned = data | dict(k=jnp.where(SKIPPED[:, None], jnp.nan, data["k"]))
    check(layout, *written(layout, data=poisoned, **how), data)


@pytest.mark.parametrize(
    "interleaved, hadamard, fp8",
    [(False, False, E4M3FN), (True, False, E4M3FN), (False, True, E4M3FN), (True, True, E4M3FNUZ)],
)
def test_each_kind_of_rope_with_and_without_hadamard(how, interleaved, hadamard, fp8):
    layout = IndexLayout(64, fp8)
    codes, scales = written(layout, jnp.float32, interleaved=interleaved, hadamard=hadamard, **how)
    check(layout, codes, scales, tokens(jnp.float32), interleaved, hadamard)


def test_norm_parameters_in_bf16(how):
    data = tokens()
    data |= {name: data[name].astype(jnp.bfloat16) for name in ("norm_weight", "norm_bias")}
    check(IndexLayout(16), *written(IndexLayout(16), data=data, **how), data)


def test_eps(how):
    """A key without deviation is its bias whatever eps is; one of a small deviation is not."""
    layout = IndexLayout(64)
    data = tokens(jnp.float32)
    (codes, scales), (other, other_scales) = (written(layout, data=data, eps=eps, **how) for eps in (1e-6, 1e-3))
    assert SLOTS[4] == 65 and SLOTS[6] == 127
    assert_bitwise_equal(codes[127], other[127])
    near, far = (oracles.fp8_values(c[65], "e4m3fn") * s[65] for c, s in ((codes, scales), (other, other_scales)))
    y = oracles.layer_norm(data["k"][4:5], data["norm_weight"], data["norm_bias"], 1e-3)
    y = oracles.rope(y, data["cos_sin"], np.asarray(data["positions"])[4:5], False)[0]
    np.testing.assert_allclose(far, y, rtol=2**-4, atol=2**-9)
    assert np.abs(near - far).max() > 0.3


@some_layouts
def test_the_smallest_scale(how, layout):
    """Magnitudes under 1e-4 are given 1e-4: DeepSeek's floor."""
    data = tokens() | dict(norm_weight=jnp.full(128, 1e-6), norm_bias=jnp.zeros(128))
    _, scales = written(layout, data=data, **how)
    assert (scales[AT] == oracles.power_of_two(1e-4 / layout.fp8.max)).all()


@pytest.mark.parametrize(
    "layout, interleaved, hadamard",
    [(LAYOUTS[0], False, False), (LAYOUTS[2], True, False), (LAYOUTS[4], False, True), (LAYOUTS[5], True, True)],
)
def test_pack_gives_the_bytes_that_write_writes(layout, interleaved, hadamard):
    options = dict(layout=layout, interleaved=interleaved, hadamard=hadamard)
    rows = np.asarray(index_pack(**tokens(), **options))
    assert rows.shape == (19, 132) and rows.dtype == np.uint8
    codes, scales = written(**options)
    assert_bitwise_equal(rows[~SKIPPED, :128], codes[AT])
    assert_bitwise_equal(rows[~SKIPPED, 128:], scales[AT].astype("<f4").view(np.uint8).reshape(-1, 4))
    page, byte = layout.row_offsets(jnp.asarray(SLOTS, jnp.int32))
    put = noise(layout)
    put[np.asarray(page)[~SKIPPED], np.asarray(byte)[~SKIPPED]] = rows[~SKIPPED]
    after = index_write(jnp.asarray(noise(layout)), jnp.asarray(SLOTS, jnp.int32), **tokens(), **options)
    assert_bitwise_equal(put, after)


@some_layouts
def test_the_pool_is_donated(how, layout):
    pool = jnp.asarray(noise(layout))
    address = pool.unsafe_buffer_pointer()
    after = index_write(pool, jnp.asarray(SLOTS, jnp.int32), **tokens(), layout=layout, **how)
    assert pool.is_deleted()
    assert after.unsafe_buffer_pointer() == address


@some_layouts
def test_under_jit_what_lies_outside(how, layout):
    """A slot beyond the pool is not written, a position outside of the table gives NaN, and neither touches others."""
    slots = np.array(SLOTS)
    slots[[0, 6, 7]] = CAPACITY, 2**31 - 1, -(2**31)
    data = tokens()
    data["positions"] = data["positions"].at[jnp.array([2, 4])].set(jnp.array([POSITIONS, -1]))
    write = jax.jit(lambda *x, **y: index_write(*x, **y, layout=layout, **how))
    after = write(jnp.asarray(noise(layout)), jnp.asarray(slots, jnp.int32), **data)
    codes, scales = oracles.index_pool_rows(after, layout.page_size, layout.preshuffle)
    assert np.isnan(oracles.fp8_values(codes[slots[[2, 4]], :64], layout.fp8.name)).all()
    clean_codes, clean_scales = written(layout, **how)
    old_codes, old_scales = oracles.index_pool_rows(noise(layout), layout.page_size, layout.preshuffle)
    rest = np.setdiff1d(np.arange(CAPACITY), slots[[2, 4]])
    others = np.isin(rest, slots)
    for got, new, old in ((codes, clean_codes, old_codes), (scales, clean_scales, old_scales)):
        new, old = (x[rest].view(np.uint32 if x.dtype == np.float32 else np.uint8) for x in (new, old))
        want = np.where(others.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
        assert_bitwise_equal(got[rest].view(want.dtype), want)


DISTINCT_SLOTS = st.permutations([*range(-10, 25), *range(CAPACITY - 5, CAPACITY)]).map(lambda order: order[:19])


@some_layouts
@given(slots=DISTINCT_SLOTS)
def test_any_slots(how, layout, slots):
    rows = np.asarray(index_pack(**tokens(), layout=layout))
    after = index_write(jnp.asarray(noise(layout)), jnp.asarray(slots, jnp.int32), **tokens(), layout=layout, **how)
    codes, scales = oracles.index_pool_rows(noise(layout), layout.page_size, layout.preshuffle)
    keep = np.array(slots) > 0
    codes[np.array(slots)[keep]] = rows[keep, :128]
    scales[np.array(slots)[keep]] = np.ascontiguousarray(rows[keep, 128:]).view("<f4")[:, 0]
    got_codes, got_scales = oracles.index_pool_rows(after, layout.page_size, layout.preshuffle)
    assert_bitwise_equal(got_scales.view(np.uint32), scales.view(np.uint32))
    apart = np.argwhere(got_codes != codes)
    assert set(apart[:, 0]) <= set(np.array(slots)[keep]), "a row that was not to be written"
    assert len(apart) <= 2, "codes beside a midpoint"


@some_layouts
def test_a_token_does_not_depend_on_its_neighbours(how, layout):
    data = tokens()
    others = jnp.arange(19) != 4
    changed = data | dict(k=jnp.where(others[:, None], data["k"] * 3 + 1, data["k"]).astype(jnp.bfloat16))
    (codes, scales), (other_codes, other_scales) = (written(layout, data=d, **how) for d in (data, changed))
    assert_bitwise_equal(codes[65], other_codes[65])
    assert scales[65] == other_scales[65]
    assert (codes[5] != other_codes[5]).any()


@pytest.mark.parametrize("rows", [16, 32])
def test_any_tile(rows):
    layout = IndexLayout(16)
    for default, tiled in zip(
        written(layout, implementation="pallas", interpret=True),
        written(layout, implementation="pallas", interpret=True, config=Config(rows=rows)),
        strict=True,
    ):
        assert_bitwise_equal(default.view(np.uint8), tiled.view(np.uint8))


BAD_CALLS = [
    (
        "pages of another size",
        dict(layout=IndexLayout(16)),
        ValueError,
        r"pool expected uint8\[pages, 2112\].*got uint8\[2, 8",
    ),
    (
        "a slot beyond",
        dict(slots=jnp.full(19, 128)),
        ValueError,
        r"slots expected values in .*128\) \(the pool's slots\), got 128",
    ),
    (
        "a position beyond",
        dict(positions=jnp.full(19, 300)),
        ValueError,
        r"positions expected values in \[0, 300\).*got 300",
    ),
    (
        "a position before",
        dict(positions=jnp.full(19, -1)),
        ValueError,
        r"positions expected values in \[0, 300\).*got -1",
    ),
    ("too few positions", dict(positions=jnp.ones(18, jnp.int32)), TypeCheckError, "positions"),
    ("positions as floats", dict(positions=jnp.ones(19)), TypeCheckError, "positions"),
    ("keys of 64", dict(k=jnp.ones((19, 64))), TypeCheckError, "'k'"),
    ("keys with a head axis", dict(k=jnp.ones((19, 1, 128))), TypeCheckError, "'k'"),
    ("a bias of 64", dict(norm_bias=jnp.ones(64)), TypeCheckError, "norm_bias"),
    ("a table in bf16", dict(cos_sin=jnp.ones((300, 64), jnp.bfloat16)), TypeCheckError, "cos_sin"),
    ("a table of 128", dict(cos_sin=jnp.ones((300, 128))), TypeCheckError, "cos_sin"),
    ("slots as floats", dict(slots=jnp.ones(19)), TypeCheckError, "slots"),
    ("no such implementation", dict(implementation="triton"), TypeCheckError, "implementation"),
    (
        "no GPU",
        dict(implementation="pallas"),
        NotImplementedError,
        "index_write: implementation='pallas' expected a GPU",
    ),
]


@pytest.mark.parametrize("bad, error, says", [case[1:] for case in BAD_CALLS], ids=[case[0] for case in BAD_CALLS])
def test_refusals_leave_the_pool_alone(bad, error, says):
    layout = IndexLayout(64)
    pool = jnp.asarray(noise(layout))
    call = dict(slots=jnp.asarray(SLOTS, jnp.int32), layout=layout) | tokens() | bad
    with pytest.raises(error, match=says):
        index_write(pool, **call)
    assert not pool.is_deleted()
    assert_bitwise_equal(pool, noise(layout))


def test_refuses_pools_of_bf16_and_positions_outside_in_pack():
    with pytest.raises(TypeCheckError, match="pool"):
        index_write(jnp.zeros((2, 8448), jnp.bfloat16), jnp.asarray(SLOTS, jnp.int32), **tokens(), layout=IndexLayout())
    beyond: dict[str, Any] = dict(positions=jnp.full(19, 300))
    with pytest.raises(ValueError, match=r"index_pack: positions expected values in \[0, 300\).*got 300"):
        index_pack(**(tokens() | beyond), layout=IndexLayout())
