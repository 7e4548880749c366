"""``kv_write`` and ``kv_pack``: the bytes they put, where they put them, and that they put nothing elsewhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from jax_mla import KV_BF16, KV_FP8_576, KV_FP8_656, KVLayout, kv_layout, kv_pack, kv_write
from jax_mla.ops.kv_write.config import Config
from tests.jax_mla.oracles import assert_kv_rows, fp8_name, kv_values
from tests.numerics import assert_bitwise_equal

ROWS = 130
SLOTS = [5, -1, 63, 64, 65, 0, 129, -7, 3]
"""Scattered, on page edges, the last, and four that nothing is written to."""

LAYOUTS = [(KV_BF16, 1.0), (KV_FP8_656, 1.0), (KV_FP8_576, 0.05), (kv_layout("fp8_576", "e4m3fnuz"), 0.25)]
layouts = pytest.mark.parametrize("layout, kv_scale", LAYOUTS, ids=["bf16", "fp8_656", "fp8_576-fn", "fp8_576-fnuz"])


def noise(layout: KVLayout) -> np.ndarray:
    """Random bytes of a pool, most of them no sensible numbers."""
    return np.random.default_rng(1).integers(0, 256, (ROWS, layout.row_bytes), dtype=np.uint8)


def pool_of(layout: KVLayout, content: np.ndarray) -> jax.Array:
    return jnp.asarray(content.view(layout.dtype))


def bytes_of(pool) -> np.ndarray:
    return np.ascontiguousarray(pool).view(np.uint8)


def tokens(t: int, dtype=jnp.bfloat16, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Latents of very different sizes, a tile of zeros, one of a single number, values that saturate; and ropes."""
    rng = np.random.default_rng(seed)
    nope = rng.standard_normal((t, 512)) * 10.0 ** rng.uniform(-4, 2, (t, 1))
    nope[0, 128:256] = 0
    nope[0, 256:384] = np.arange(128) == 7
    return jnp.asarray(nope, dtype), jnp.asarray(rng.standard_normal((t, 64)) * 3, dtype)


@layouts
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_writes_its_rows_and_nothing_else(how, layout, kv_scale, dtype):
    k_nope, k_rope = tokens(9, dtype)
    written = np.array(SLOTS) > 0
    k_nope, k_rope = (jnp.where(written[:, None], x, jnp.nan) for x in (k_nope, k_rope))
    before = noise(layout)
    slots = jnp.asarray(SLOTS, jnp.int32)
    after = bytes_of(kv_write(pool_of(layout, before), slots, k_nope, k_rope, layout=layout, kv_scale=kv_scale, **how))
    at = np.array(SLOTS)[written]
    fp8 = fp8_name(layout)
    assert_kv_rows(after[at], np.asarray(k_nope)[written], np.asarray(k_rope)[written], layout.name, fp8, kv_scale)
    rest = np.setdiff1d(np.arange(ROWS), at)
    assert_bitwise_equal(after[rest], before[rest])


@layouts
def test_one_token(how, layout, kv_scale):
    before = noise(layout)
    k_nope, k_rope = tokens(1)
    write: dict[str, Any] = dict(layout=layout, kv_scale=jnp.float32(kv_scale) if layout.scaled else 1.0, **how)
    after = bytes_of(kv_write(pool_of(layout, before), jnp.asarray([64], jnp.int32), k_nope, k_rope, **write))
    assert_kv_rows(after[64:65], k_nope, k_rope, layout.name, fp8_name(layout), kv_scale)
    assert_bitwise_equal(np.delete(after, 64, 0), np.delete(before, 64, 0))


@layouts
def test_pack_gives_the_rows_that_write_writes(layout, kv_scale):
    k_nope, k_rope = tokens(9)
    rows = bytes_of(kv_pack(k_nope, k_rope, layout=layout, kv_scale=kv_scale))
    assert_kv_rows(rows, k_nope, k_rope, layout.name, fp8_name(layout), kv_scale)
    slots = jnp.arange(1, 10, dtype=jnp.int32)
    pool = kv_write(pool_of(layout, noise(layout)), slots, k_nope, k_rope, layout=layout, kv_scale=kv_scale)
    assert_bitwise_equal(bytes_of(pool)[1:10], rows)


def test_a_tile_of_zeros_reads_back_as_zeros(how):
    pool = pool_of(KV_FP8_656, noise(KV_FP8_656))
    k_nope = jnp.zeros((1, 512)).at[:, :128].set(-0.0)
    pool = kv_write(pool, jnp.asarray([7], jnp.int32), k_nope, jnp.zeros((1, 64)), layout=KV_FP8_656, **how)
    row = np.asarray(pool)[7]
    assert not row[512:528].any(), "scales"
    assert (kv_values(row[None], "fp8_656", "e4m3fn", 1.0) == 0).all()
    assert (np.asarray(KV_FP8_656.unpack(pool[7])) == 0).all()


@pytest.mark.parametrize("fp8, largest", [("e4m3fn", 448.0), ("e4m3fnuz", 240.0)])
def test_one_scale_for_all_saturates(how, fp8, largest):
    layout = kv_layout("fp8_576", fp8)
    k_nope = jnp.full((1, 512), 1e6).at[:, 100:].set(-1e6)
    pool = kv_write(
        pool_of(layout, noise(layout)),
        jnp.asarray([7], jnp.int32),
        k_nope,
        jnp.full((1, 64), 1e6),
        layout=layout,
        kv_scale=0.5,
        **how,
    )
    values = kv_values(np.asarray(pool)[7:8], "fp8_576", fp8, 0.5)
    assert (values[0, :100] == largest / 2).all() and (values[0, 100:512] == -largest / 2).all()
    assert (values[0, 512:] == largest / 2).all()


@layouts
def test_the_pool_is_donated(how, layout, kv_scale):
    pool = pool_of(layout, noise(layout))
    address = pool.unsafe_buffer_pointer()
    slots = jnp.asarray(SLOTS, jnp.int32)
    after = kv_write(pool, slots, *tokens(9), layout=layout, kv_scale=kv_scale, **how)
    assert pool.is_deleted()
    assert after.unsafe_buffer_pointer() == address


@layouts
def test_under_jit_a_slot_beyond_the_pool_is_not_written(how, layout, kv_scale):
    before = noise(layout)
    slots = jnp.asarray([ROWS, 2**31 - 1, ROWS + 5, -(2**31), 0, 0, -1, 1, ROWS - 1], jnp.int32)
    write = jax.jit(lambda *x: kv_write(*x, layout=layout, kv_scale=kv_scale, **how))
    k_nope, k_rope = tokens(9)
    after = bytes_of(write(pool_of(layout, before), slots, k_nope, k_rope))
    assert_bitwise_equal(after[[0, *range(2, ROWS - 1)]], before[[0, *range(2, ROWS - 1)]])
    fp8 = fp8_name(layout)
    assert_kv_rows(after[[1, ROWS - 1]], k_nope[7:], k_rope[7:], layout.name, fp8, kv_scale)


DISTINCT_SLOTS = st.permutations([*range(-6, 9), *range(ROWS - 3, ROWS)]).map(lambda order: order[:9])


@layouts
@given(slots=DISTINCT_SLOTS)
def test_any_slots(how, layout, kv_scale, slots):
    before = noise(layout)
    k_nope, k_rope = tokens(9)
    rows = bytes_of(kv_pack(k_nope, k_rope, layout=layout, kv_scale=kv_scale))
    after = bytes_of(
        kv_write(
            pool_of(layout, before),
            jnp.asarray(slots, jnp.int32),
            k_nope,
            k_rope,
            layout=layout,
            kv_scale=kv_scale,
            **how,
        )
    )
    want = before.copy()
    for slot, row in zip(slots, rows, strict=True):
        if slot > 0:
            want[slot] = row
    assert_bitwise_equal(after, want)


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
def test_any_tile(rows):
    before = noise(KV_FP8_656)
    slots = jnp.asarray(SLOTS, jnp.int32)
    default, tiled = (
        kv_write(
            pool_of(KV_FP8_656, before),
            slots,
            *tokens(9),
            layout=KV_FP8_656,
            implementation="pallas",
            interpret=True,
            config=config,
        )
        for config in (None, Config(rows=rows))
    )
    assert_bitwise_equal(tiled, default)


BAD_CALLS = [
    (
        "a pool of another layout",
        dict(layout=KV_FP8_656),
        ValueError,
        r"pool expected uint8\[N, 656\].*bfloat16\[130, 576",
    ),
    (
        "a pool of bytes",
        dict(layout=KV_FP8_576),
        ValueError,
        r"pool expected uint8\[N, 576\].*got bfloat16\[130, 576\]",
    ),
    (
        "a slot beyond",
        dict(slots=[130] * 9),
        ValueError,
        r"slots expected values in .*130\) \(the pool's rows\), got 130",
    ),
    ("a scale without a place", dict(kv_scale=0.5), ValueError, "kv_scale expected 1.0 for the bf16 layout, got 0.5"),
    ("no scale of Python's", dict(kv_scale=2), TypeCheckError, "kv_scale"),
    ("a scale for each token", dict(kv_scale=jnp.ones(9)), TypeCheckError, "kv_scale"),
    ("too few slots", dict(slots=[1] * 8), TypeCheckError, "k_nope"),
    ("slots as floats", dict(slots=jnp.ones(9)), TypeCheckError, "slots"),
    ("latents too short", dict(k_nope=jnp.zeros((9, 511))), TypeCheckError, "k_nope"),
    ("latents as integers", dict(k_nope=jnp.zeros((9, 512), jnp.int8)), TypeCheckError, "k_nope"),
    ("ropes with a head axis", dict(k_rope=jnp.zeros((9, 1, 64))), TypeCheckError, "k_rope"),
    ("no such implementation", dict(implementation="cuda"), TypeCheckError, "implementation"),
    ("no such layout", dict(layout="bf16"), TypeCheckError, "layout"),
    (
        "tiles for XLA",
        dict(implementation="xla", config=Config()),
        ValueError,
        "config expected implementation='pallas'",
    ),
    ("interpreted XLA", dict(interpret=True), ValueError, "interpret=True expected implementation='pallas', got None"),
    ("no GPU", dict(implementation="pallas"), NotImplementedError, "expected a GPU, got platform 'cpu'; use"),
]


@pytest.mark.parametrize("bad, error, says", [case[1:] for case in BAD_CALLS], ids=[case[0] for case in BAD_CALLS])
def test_refusals_leave_the_pool_alone(bad, error, says):
    before = noise(KV_BF16)
    pool = pool_of(KV_BF16, before)
    k_nope, k_rope = tokens(9)
    call = dict(slots=SLOTS, k_nope=k_nope, k_rope=k_rope, layout=KV_BF16) | bad
    call["slots"] = jnp.asarray(call["slots"], None if isinstance(call["slots"], jax.Array) else jnp.int32)
    with pytest.raises(error, match=says):
        kv_write(pool, **call)
    assert not pool.is_deleted()
    assert_bitwise_equal(bytes_of(pool), before)


def test_refuses_a_pool_with_a_head_axis():
    pool = jnp.zeros((ROWS, 1, 576), jnp.bfloat16)
    with pytest.raises(TypeCheckError, match="pool"):
        kv_write(pool, jnp.asarray(SLOTS, jnp.int32), *tokens(9), layout=KV_BF16)
    assert not pool.is_deleted()
