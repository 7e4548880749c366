"""The caches' bytes, given one by one, against what is read back from them."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_mla import E4M3FN, E4M3FNUZ, KV_BF16, KV_FP8_576, KV_FP8_656, IndexLayout, KVLayout, kv_layout
from tests.jax_mla.oracles import FP8, index_pool
from tests.numerics import assert_bitwise_equal

INDEX_LAYOUTS = [(1, False), (16, False), (64, False), (16, True), (64, True)]
index_layouts = pytest.mark.parametrize("page_size, preshuffle", INDEX_LAYOUTS)


def put(row: np.ndarray, at: int, hexadecimal: str) -> None:
    data = bytes.fromhex(hexadecimal)
    row[at : at + len(data)] = list(data)


@pytest.mark.parametrize(
    "layout, elements, row_bytes, dtype",
    [(KV_BF16, 576, 1152, "bfloat16"), (KV_FP8_656, 656, 656, "uint8"), (KV_FP8_576, 576, 576, "uint8")],
)
def test_kv_row_sizes(layout, elements, row_bytes, dtype):
    assert (layout.row_elements, layout.row_bytes, layout.dtype.name) == (elements, row_bytes, dtype)


def test_bf16_row():
    row = np.zeros(1152, np.uint8)
    put(row, 0, "80 3F")  # latent 0: 1
    put(row, 1022, "20 C1")  # latent 511: -10
    put(row, 1024, "00 40")  # rope 0: 2
    put(row, 1150, "80 BE")  # rope 63: -0.25
    got = np.asarray(KV_BF16.unpack(jnp.asarray(row.view(ml_dtypes.bfloat16))))
    want = np.zeros(576, np.float32)
    want[[0, 511, 512, 575]] = 1, -10, 2, -0.25
    assert_bitwise_equal(got, want)


def test_fp8_656_row():
    row = np.zeros((2, 656), np.uint8)
    put(row[1], 0, "38")  # latent 0: 1
    put(row[1], 127, "B8")  # latent 127: -1
    put(row[1], 128, "7E")  # latent 128: 448
    put(row[1], 511, "01")  # latent 511: 2^-9
    put(row[1], 512, "00 00 00 40")  # scale of 0 .. 127: 2
    put(row[1], 516, "00 00 80 3E")  # of 128 .. 255: 0.25
    put(row[1], 520, "00 00 80 3F")  # of 256 .. 383: 1
    put(row[1], 524, "00 00 80 43")  # of 384 .. 511: 256
    put(row[1], 528, "80 3F")  # rope 0: 1
    put(row[1], 654, "20 C1")  # rope 63: -10
    want = np.zeros((2, 576), np.float32)
    want[1, [0, 127, 128, 511, 512, 575]] = 2, -2, 112, 0.5, 1, -10
    assert_bitwise_equal(KV_FP8_656.unpack(jnp.asarray(row)), want)


def test_fp8_656_tile_of_scale_zero_reads_as_zero():
    row = np.zeros(656, np.uint8)
    row[128:256] = 0xFE
    row[256:384] = 0x7E
    put(row, 520, "00 00 00 80")  # scale of 256 .. 383: -0
    put(row, 524, "00 00 80 3F")
    row[384:512] = 0x38
    got = np.asarray(KV_FP8_656.unpack(jnp.asarray(row)))
    assert (got[:384] == 0).all() and (got[384:512] == 1).all() and (got[512:] == 0).all()
    row[130] = 0x7F
    assert np.isnan(np.asarray(KV_FP8_656.unpack(jnp.asarray(row)))).nonzero()[0].tolist() == [130], "NaN is to be seen"


@pytest.mark.parametrize("fp8, one, largest", [("e4m3fn", 0x38, 0x7E), ("e4m3fnuz", 0x40, 0x7F)])
def test_fp8_576_row(fp8, one, largest):
    row = np.zeros(576, np.uint8)
    row[[0, 511, 512, 575]] = one, one | 0x80, largest, one
    want = np.zeros(576, np.float32)
    want[[0, 511, 512, 575]] = 0.5, -0.5, 224 if fp8 == "e4m3fn" else 120, 0.5
    assert_bitwise_equal(kv_layout("fp8_576", fp8).unpack(jnp.asarray(row), 0.5), want)


def test_kv_layouts_by_name():
    assert kv_layout("bf16") == KV_BF16 and kv_layout("fp8_656") == KV_FP8_656 and kv_layout("fp8_576") == KV_FP8_576
    assert kv_layout("fp8_576", "e4m3fnuz").fp8 is E4M3FNUZ
    with pytest.raises(ValueError, match="layout: expected 'bf16', 'fp8_656' or 'fp8_576', got 'fp8'"):
        kv_layout("fp8")
    with pytest.raises(ValueError, match="fp8: expected e4m3fn.*fp8_656.*got e4m3fnuz"):
        kv_layout("fp8_656", "e4m3fnuz")
    with pytest.raises(ValueError, match="fp8: expected one of.*got 'e5m2'"):
        kv_layout("fp8_576", "e5m2")
    with pytest.raises(ValueError, match="fp8: expected None for bf16"):
        KVLayout("bf16", E4M3FN)
    with pytest.raises(ValueError, match="got None for fp8_576"):
        KVLayout("fp8_576", None)


@pytest.mark.parametrize("page_size, page_bytes", [(1, 132), (16, 2112), (64, 8448)])
def test_index_page_bytes(page_size, page_bytes):
    assert IndexLayout(page_size).page_bytes == page_bytes


@pytest.mark.parametrize(
    "page_size, preshuffle, token, column, key_byte, scale_byte",
    [
        (1, False, 0, 127, 127, 128),
        (16, False, 3, 5, 389, 2060),
        (64, False, 0, 0, 0, 8192),
        (64, False, 3, 5, 389, 8204),
        (64, False, 63, 127, 8191, 8444),
        (16, True, 0, 16, 256, 2048),
        (16, True, 1, 0, 16, 2052),
        (16, True, 15, 127, 2047, 2108),
        (64, True, 3, 5, 53, 8204),
        (64, True, 17, 35, 2579, 8260),  # 1 * 2048 + 2 * 256 + 1 * 16 + 3
        (64, True, 63, 127, 8191, 8444),
    ],
)
def test_index_offsets_worked_out_by_hand(page_size, preshuffle, token, column, key_byte, scale_byte):
    layout = IndexLayout(page_size, preshuffle=preshuffle)
    assert layout.key_base(token) + layout.key_column(column) == key_byte
    assert layout.key_columns[column] == layout.key_column(column)
    assert layout.scale_base(token) == scale_byte
    page, byte = layout.row_offsets(jnp.asarray([2 * page_size + token], jnp.int32))
    assert page.tolist() == [[2]]
    assert byte[0, column] == key_byte and byte[0, 128:].tolist() == list(range(scale_byte, scale_byte + 4))


@index_layouts
def test_every_byte_of_a_page_belongs_to_one_token(page_size, preshuffle):
    layout = IndexLayout(page_size, preshuffle=preshuffle)
    _, byte = layout.row_offsets(jnp.arange(page_size, dtype=jnp.int32))
    assert sorted(np.asarray(byte).ravel()) == list(range(layout.page_bytes))


@index_layouts
@pytest.mark.parametrize("fp8", [E4M3FN, E4M3FNUZ], ids=str)
def test_read_back(page_size, preshuffle, fp8):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (192, 128), dtype=np.uint8)
    scales = rng.standard_normal(192).astype(np.float32)
    pool = jnp.asarray(index_pool(codes, scales, page_size, preshuffle))
    slots = rng.permutation(192).reshape(3, 64).astype(np.int32)
    k8, k_scale = IndexLayout(page_size, fp8, preshuffle).read(pool, jnp.asarray(slots))
    assert k8.dtype == jnp.dtype(FP8[fp8.name])
    assert_bitwise_equal(np.asarray(k8).view(np.uint8), codes[slots])
    assert_bitwise_equal(k_scale, scales[slots])


@index_layouts
def test_no_slot_reads_as_zeros(page_size, preshuffle):
    layout = IndexLayout(page_size, preshuffle=preshuffle)
    pool = jnp.full((128 // page_size, layout.page_bytes), 0xFF, jnp.uint8)
    k8, k_scale = layout.read(pool, jnp.asarray([-1, -64, -(2**31)], jnp.int32))
    assert not np.asarray(k8).view(np.uint8).any() and (np.asarray(k_scale) == 0).all()


def test_index_layouts_that_do_not_exist():
    for page_size in (0, 2, 32, 128):
        with pytest.raises(ValueError, match=f"page_size: expected 1, 16 or 64, got {page_size}"):
            IndexLayout(page_size)
    with pytest.raises(ValueError, match="page_size: expected 16 or 64 for a preshuffled.*got 1"):
        IndexLayout(1, preshuffle=True)


def test_pools_of_another_layout():
    pages = jnp.zeros((3, 2112), jnp.uint8)
    with pytest.raises(ValueError, match=r"op: pool expected uint8\[pages, 8448\].*64 tokens, got uint8\[3, 2112\]"):
        IndexLayout(64).check_pool("op", pages)
    with pytest.raises(ValueError, match=r"op: pool expected uint8\[N, 656\].*fp8_656.*got uint8\[3, 576\]"):
        KV_FP8_656.check_pool("op", pages[:, :576])
    with pytest.raises(ValueError, match=r"op: pool expected bfloat16\[N, 576\].*got uint8\[3, 576\]"):
        KV_BF16.check_pool("op", pages[:, :576])
