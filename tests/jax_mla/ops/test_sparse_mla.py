"""``sparse_mla`` against float64 attention over the numbers that the pool's bytes stand for."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from jax_mla import KV_BF16, KV_FP8_576, KV_FP8_656, KVLayout, kv_layout, sparse_mla
from jax_mla.ops.sparse_mla.config import Config
from jax_mla.pallas_triton import GFX942, GFX950, H200, kernel_call, lowering_for
from tests.jax_mla.oracles import FP8, LARGEST, NAN_BYTE, fp8_name, kv_values, sparse_attention
from tests.numerics import (
    BF16_ROW,
    FLOAT32,
    QUANTISED_INPUTS,
    assert_bitwise_equal,
    assert_close,
    assert_same_mask,
    calc_diff,
)

ROWS = 300
SCALE = 192**-0.5 * 1.8739
LAYOUTS = [(KV_BF16, 1.0), (KV_FP8_656, 1.0), (KV_FP8_576, 0.05), (kv_layout("fp8_576", "e4m3fnuz"), 0.1)]
some_layouts = pytest.mark.parametrize("layout, kv_scale", LAYOUTS[:2], ids=["bf16", "fp8_656"])
layouts = pytest.mark.parametrize("layout, kv_scale", LAYOUTS, ids=["bf16", "fp8_656", "fp8_576-fn", "fp8_576-fnuz"])


def pool_bytes(layout: KVLayout, kv_scale: float, rng) -> np.ndarray:
    """uint8 ``[ROWS, row_bytes]`` of values of size 1, written without the op that writes them."""
    latent, rope = rng.standard_normal((ROWS, 512)), rng.standard_normal((ROWS, 64))
    both = np.concatenate([latent, rope], axis=1)
    if layout.name == "bf16":
        return both.astype(ml_dtypes.bfloat16).view(np.uint8)
    if layout.name == "fp8_576":
        return (both / kv_scale).astype(FP8[fp8_name(layout)]).view(np.uint8)
    scales = np.exp(rng.standard_normal((ROWS, 4)) - 4).astype("<f4")
    scales[::7, 1] = 0  # tiles of zeros, whatever their codes
    codes = (latent / np.exp(-4)).astype(FP8["e4m3fn"]).view(np.uint8)
    codes[::7, 128:256] = 0xFE
    return np.concatenate([codes, scales.view(np.uint8), rope.astype(ml_dtypes.bfloat16).view(np.uint8)], axis=1)


def poison_bytes(layout: KVLayout, poison: str) -> np.ndarray:
    """A row of NaN, or of the largest numbers there are."""
    if layout.name == "bf16":
        return np.full(576, np.nan if poison == "NaN" else 3e38, ml_dtypes.bfloat16).view(np.uint8)
    row = np.full(layout.row_bytes, NAN_BYTE[fp8_name(layout)], np.uint8)
    if poison == "needle":
        row[:] = np.full(1, LARGEST[fp8_name(layout)], FP8[fp8_name(layout)]).view(np.uint8)
        if layout.name == "fp8_656":
            row[512:528] = np.full(4, 1e30, "<f4").view(np.uint8)
            row[528:] = np.full(64, 3e38, ml_dtypes.bfloat16).view(np.uint8)
    elif layout.name == "fp8_656":
        row[512:] = 0xFF
    return row


def selection(t: int, k: int, rng) -> np.ndarray:
    """Holes anywhere, the first and last row of the pool, one twice; row 1 is empty, row 2 a single slot at its end."""
    slots = rng.choice(np.arange(50, 250), (t, k)).astype(np.int32)
    slots[rng.random((t, k)) < 0.3] = -1
    slots[0, 0], slots[0, -1] = -1, ROWS - 1
    if k > 4:
        slots[0, 1:5] = 0, 77, 77, -(2**31)
    if t > 2:
        slots[1] = -1
        slots[2] = -1
        slots[2, -1] = 60
    return slots


class Case:
    def __init__(self, layout=KV_BF16, kv_scale=1.0, t=4, heads=16, k=48, dtype=jnp.bfloat16, poison="NaN", seed=0):
        rng = np.random.default_rng(seed)
        self.layout, self.kv_scale = layout, kv_scale
        self.q_nope = jnp.asarray(rng.standard_normal((t, heads, 512)), dtype)
        self.q_rope = jnp.asarray(rng.standard_normal((t, heads, 64)), dtype)
        self.slots = selection(t, k, rng)
        self.content, self.poison = pool_bytes(layout, kv_scale, rng), poison_bytes(layout, poison)

    def pool(self) -> jax.Array:
        """The pool, poison where no slot points to."""
        content = np.broadcast_to(self.poison, self.content.shape).copy()
        used = np.unique(self.slots[(self.slots >= 0) & (self.slots < ROWS)])
        content[used] = self.content[used]
        return jnp.asarray(content.view(self.layout.dtype))

    def run(self, rows=slice(None), jit=False, **options):
        static: dict[str, Any] = dict(layout=self.layout, softmax_scale=SCALE, kv_scale=self.kv_scale) | options
        call = lambda *x: sparse_mla(*x, **static)  # noqa: E731
        slots = jnp.asarray(self.slots)
        return (jax.jit(call) if jit else call)(self.q_nope[rows], self.q_rope[rows], self.pool(), slots[rows])

    def check(self, out, lse, row_bar: float, lse_error: float = 2e-6):
        assert out.dtype == self.q_nope.dtype and lse.dtype == jnp.float32
        values = kv_values(self.content, self.layout.name, fp8_name(self.layout), self.kv_scale)
        slots = np.where(self.slots < ROWS, self.slots, -1)
        want, want_lse = sparse_attention(self.q_nope, self.q_rope, values, slots, SCALE)
        assert calc_diff(out, want) <= QUANTISED_INPUTS
        assert_close(out, want, row_bar)
        assert_same_mask(lse, want_lse)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=lse_error)
        empty = (slots < 0).all(axis=1)
        assert not np.asarray(out)[empty].any()


@layouts
@pytest.mark.parametrize("poison", ["NaN", "needle"])
def test_each_layout(how, layout, kv_scale, poison):
    case = Case(layout, kv_scale, poison=poison)
    case.check(*case.run(**how), BF16_ROW)


@layouts
def test_queries_in_float32(how, layout, kv_scale):
    case = Case(layout, kv_scale, dtype=jnp.float32)
    case.check(*case.run(**how), FLOAT32)


@pytest.mark.parametrize("spread", [1, 12, 40])
def test_scales_of_any_size_and_sign(how, spread):
    """fp8_656: a row's four scales, and those of different rows, 2^±spread apart; some negative, some zero."""
    case = Case(KV_FP8_656, t=3, heads=4, k=40)
    rng = np.random.default_rng(7)
    scales = np.exp2(rng.uniform(-spread, min(spread, 12), (ROWS, 4))) / 448
    scales[::5] *= -1
    scales[::9] = 0
    case.content[:, 512:528] = scales.astype("<f4").view(np.uint8)
    case.q_nope = case.q_nope * jnp.bfloat16(2.0**-12)
    out, lse = case.run(**how)
    values = kv_values(case.content, "fp8_656", "e4m3fn", 1.0)
    want, want_lse = sparse_attention(
        case.q_nope, case.q_rope, values, np.where(case.slots < ROWS, case.slots, -1), SCALE
    )
    assert calc_diff(out, want) <= QUANTISED_INPUTS
    np.testing.assert_allclose(lse, want_lse, rtol=8.01 / 65536, atol=1e-5)


def test_a_row_of_zeros_weighs_one():
    """As padding tokens leave it: no scale at all, so that nothing is left of its lse but ln 1."""
    case = Case(KV_FP8_656, t=1, heads=2, k=1)
    case.content[:, 512:528] = 0
    case.q_rope = jnp.zeros_like(case.q_rope)
    case.slots[:] = 60
    out, lse = case.run(implementation="pallas", interpret=True)
    assert not np.asarray(out).any() and np.abs(np.asarray(lse)).max() <= 1e-6


def test_very_low_scores_are_scores():
    case = Case(KV_BF16, t=1, heads=2, k=3)
    case.content[:] = np.ones(576, ml_dtypes.bfloat16).view(np.uint8)
    case.q_nope, case.q_rope = jnp.full_like(case.q_nope, -1e28), jnp.zeros_like(case.q_rope)
    case.slots[:] = 60
    _, lse = case.run(implementation="pallas", interpret=True)
    assert np.isfinite(np.asarray(lse)).all() and (np.asarray(lse) < -1e29).all()


@pytest.mark.parametrize(
    "tiles", [dict(heads=12), dict(heads=8), dict(keys=0), dict(splits=0), dict(num_warps=3), dict(loads=3)], ids=str
)
def test_tiles_that_cannot_be_are_refused(tiles):
    with pytest.raises(ValueError, match="sparse_mla: config expected .*, got Config"):
        Case(KV_BF16).run(implementation="pallas", interpret=True, config=Config(**tiles))


@pytest.mark.parametrize("heads", [1, 5, 8, 24, 64, 128])
def test_each_number_of_heads(how, heads):
    case = Case(KV_FP8_656, t=2, heads=heads, k=40)
    case.check(*case.run(**how), BF16_ROW)


@pytest.mark.parametrize("k", [1, 300])
def test_one_row(how, k):
    case = Case(t=1, heads=8, k=k, dtype=jnp.float32)
    case.check(*case.run(**how), FLOAT32)


@pytest.mark.parametrize(
    "layout, tiles",
    [
        (0, Config(splits=2)),
        (1, Config(heads=64, keys=64, splits=3)),
        (1, Config(splits=16)),
        (2, Config(keys=16, splits=5)),
        (3, Config(keys=64, splits=2)),
    ],
)
def test_any_tile_and_split(layout, tiles):
    """Parts of the selection that hold no key at all are among them, and in the last one no part of it."""
    case = Case(*LAYOUTS[layout], heads=20, k=100, dtype=jnp.float32)
    case.slots[3, :60] = -1
    case.check(*case.run(implementation="pallas", interpret=True, config=tiles), FLOAT32)


def test_split_selections_in_bf16():
    case = Case(KV_FP8_656, k=100)
    case.check(*case.run(implementation="pallas", interpret=True, config=Config(splits=4)), BF16_ROW)


@pytest.mark.parametrize("factor", [300.0, 1e-3])
def test_scores_of_thousands_and_of_nothing(how, factor):
    """Large scores neither overflow nor lose the sum; tiny ones give the mean."""
    case = Case(dtype=jnp.float32)
    case.q_nope, case.q_rope = case.q_nope * factor, case.q_rope * factor
    out, lse = case.run(**how)
    largest = float(np.asarray(lse)[0].max())
    if factor > 1:
        assert largest > 1000
        case.check(out, lse, 1e-6, lse_error=1e-6 * largest)
    else:
        assert largest < 5
        case.check(out, lse, FLOAT32)


def test_a_slot_that_stands_twice_counts_twice(how):
    case = Case(t=2, dtype=jnp.float32)
    case.slots[:] = -1
    case.slots[0, 7] = case.slots[1, 3] = case.slots[1, 40] = 60
    case.q_nope, case.q_rope = (jnp.broadcast_to(x[:1], x.shape) for x in (case.q_nope, case.q_rope))
    out, lse = (np.asarray(x, np.float64) for x in case.run(**how))
    np.testing.assert_allclose(lse[1] - lse[0], np.log(2), atol=1e-5)
    np.testing.assert_allclose(out[1], out[0], rtol=1e-5, atol=1e-6)


@some_layouts
def test_a_row_alone_gives_the_same_bits(how, layout, kv_scale):
    case = Case(layout, kv_scale)
    together = case.run(**how)
    for x, y in zip(case.run(**how), together, strict=True):
        assert_bitwise_equal(x, y)
    for rows in (slice(0, 1), slice(3, 4)):
        for x, y in zip(case.run(rows, **how), together, strict=True):
            assert_bitwise_equal(x, y[rows])


@some_layouts
def test_under_jit_a_slot_beyond_the_pool_counts_as_none(how, layout, kv_scale):
    case = Case(layout, kv_scale, dtype=jnp.float32)
    case.slots[0, [9, 30]] = ROWS, 2**31 - 1
    case.slots[2] = ROWS + 7
    case.check(*case.run(jit=True, **how), FLOAT32)


def test_kv_scale_as_an_array(how):
    case = Case(KV_FP8_576, 0.05)
    as_float = case.run(**how)
    case.kv_scale = jnp.float32(0.05)
    for x, y in zip(case.run(**how), as_float, strict=True):
        assert_bitwise_equal(x, y)


@given(slots=st.lists(st.integers(-2, 30).map(lambda s: s if s < 30 else ROWS - 1), min_size=96, max_size=96))
def test_any_slots(how, slots):
    case = Case(KV_FP8_656, t=4, heads=5, k=24, dtype=jnp.float32)
    case.slots = np.array(slots, np.int32).reshape(4, 24)
    case.check(*case.run(**how), FLOAT32)


NOPE, ROPE = jnp.zeros((4, 16, 512), jnp.bfloat16), jnp.zeros((4, 16, 64), jnp.bfloat16)
SLOTS = jnp.zeros((4, 48), jnp.int32)
MANY = dict(q_nope=jnp.zeros((1, 129, 512)), q_rope=jnp.zeros((1, 129, 64)), slots=SLOTS[:1])
BAD_CALLS = [
    ("too many heads", MANY, ValueError, "sparse_mla: q_nope expected 1 to 128 heads, got 129"),
    ("no heads", dict(q_nope=NOPE[:, :0], q_rope=ROPE[:, :0]), ValueError, "q_nope expected 1 to 128 heads, got 0"),
    (
        "queries of two dtypes",
        dict(q_rope=ROPE.astype(jnp.float32)),
        ValueError,
        "q_rope expected q_nope's dtype bfloat16, got",
    ),
    (
        "a pool of another layout",
        dict(layout=KV_FP8_656),
        ValueError,
        r"pool expected uint8\[N, 656\].*got bfloat16\[300, 576\]",
    ),
    (
        "a pool of bytes",
        dict(layout=KV_FP8_576),
        ValueError,
        r"pool expected uint8\[N, 576\].*got bfloat16\[300, 576\]",
    ),
    ("a pool with a head axis", dict(pool=jnp.zeros((300, 1, 576), jnp.bfloat16)), TypeCheckError, "pool"),
    ("a scale without a place", dict(kv_scale=0.5), ValueError, "kv_scale expected 1.0 for the bf16 layout, got 0.5"),
    (
        "a slot beyond",
        dict(slots=SLOTS + 300),
        ValueError,
        r"slots expected values in .*300\) \(the pool's rows\), got 300",
    ),
    ("slots of other rows", dict(slots=SLOTS[:3]), TypeCheckError, "slots"),
    ("slots with a head axis", dict(slots=SLOTS[:, None]), TypeCheckError, "slots"),
    ("slots as floats", dict(slots=SLOTS.astype(jnp.float32)), TypeCheckError, "slots"),
    ("latents too short", dict(q_nope=NOPE[..., :511]), TypeCheckError, "q_nope"),
    ("ropes of other heads", dict(q_rope=ROPE[:, :8]), TypeCheckError, "q_rope"),
    ("a scale that is an integer", dict(softmax_scale=1), TypeCheckError, "softmax_scale"),
    ("no such layout", dict(layout="bf16"), TypeCheckError, "layout"),
    ("no such implementation", dict(implementation="flash"), TypeCheckError, "implementation"),
    (
        "no GPU",
        dict(implementation="pallas"),
        NotImplementedError,
        "sparse_mla: implementation='pallas' expected a GPU",
    ),
]


@pytest.mark.parametrize("bad, error, says", [case[1:] for case in BAD_CALLS], ids=[case[0] for case in BAD_CALLS])
def test_refusals(bad, error, says):
    pool = jnp.zeros((ROWS, 576), jnp.bfloat16)
    good = dict(q_nope=NOPE, q_rope=ROPE, pool=pool, slots=SLOTS, layout=KV_BF16, softmax_scale=1.0)
    with pytest.raises(error, match=says):
        sparse_mla(**(good | bad))


def test_the_softmax_scale_must_be_given():
    call: Any = sparse_mla
    with pytest.raises(TypeError, match="softmax_scale"):
        call(NOPE, ROPE, jnp.zeros((ROWS, 576), jnp.bfloat16), SLOTS, layout=KV_BF16)


@pytest.mark.parametrize("splits", (1, 4))
def test_nan_is_seen_in_the_lse_too(splits):
    pool = jnp.zeros((300, 576), jnp.bfloat16).at[7].set(jnp.nan)
    slots = jnp.arange(1, 129, dtype=jnp.int32)[None]
    kw: dict[str, Any] = dict(
        layout=KV_BF16, softmax_scale=0.1, implementation="pallas", interpret=True, config=Config(splits=splits)
    )
    out, lse = sparse_mla(jnp.ones((1, 2, 512), jnp.bfloat16), jnp.ones((1, 2, 64), jnp.bfloat16), pool, slots, **kw)
    assert np.isnan(np.asarray(lse)).all() and np.isnan(np.asarray(out, np.float32)).all()


def test_half_precision_queries_are_refused():
    q, rope = jnp.ones((1, 2, 512), jnp.float16), jnp.ones((1, 2, 64), jnp.float16)
    pool, slots = jnp.zeros((300, 576), jnp.bfloat16), jnp.ones((1, 8), jnp.int32)
    with pytest.raises(ValueError, match="sparse_mla: q_nope expected bfloat16 or float32, got float16"):
        sparse_mla(q, rope, pool, slots, layout=KV_BF16, softmax_scale=0.1)


@pytest.mark.parametrize("splits", [1, 3, 15, 16, 23, 24, 25, 31, 32, 33, 64])
def test_any_number_of_splits_is_merged_on_a_power_of_two_of_warps(splits):
    """Another number of warps ends the process in Triton's compiler, so it is refused when the kernel is traced."""
    shapes = [(1, 16, 512), (1, 16, 64)], [(ROWS, 576)], [(1, 1536)]
    queries, pool, slots = (
        [jax.ShapeDtypeStruct(shape, dtype) for shape in some]
        for some, dtype in zip(shapes, ("bfloat16", "bfloat16", "int32"), strict=True)
    )
    how: dict[str, Any] = dict(layout=KV_BF16, softmax_scale=SCALE, implementation="pallas")
    with lowering_for(H200):
        jax.eval_shape(lambda *x: sparse_mla(*x, config=Config(splits=splits), **how), *queries, *pool, *slots)
    with pytest.raises(ValueError, match="f: expected num_warps to be a power of two, got 3"):
        kernel_call(lambda x: None, (), (), name="f", grid=(1,), num_warps=3, num_stages=1, interpret=False)


@pytest.mark.parametrize("target", [H200, GFX942, GFX950], ids=lambda target: target.kind)
def test_every_split_has_something_to_read(target):
    for layout, rows, heads in itertools.product([x for x, _ in LAYOUTS], (1, 3, 7, 8, 66, 128, 600), (1, 16, 17, 128)):
        for selected in (1, 64, 65, 520, 1024, 1536, 1900, 2048, 2049, 4000):
            config = Config.of(rows, heads, selected, layout, target)
            config.check()
            blocks = -(-selected // config.keys)
            of_a_split = -(-blocks // config.splits)
            assert (config.splits - 1) * of_a_split < blocks <= config.splits * of_a_split
