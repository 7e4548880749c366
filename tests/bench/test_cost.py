"""The formulas against counts by hand, byte by byte, of small arrays like those that an op gets and gives."""

import ml_dtypes
import numpy as np
import pytest

from bench.sets import SETS, cases
from jax_mla import cost


def size(*arrays):
    """Bytes of ``(shape, dtype)`` pairs."""
    return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in arrays)


BF16, F32, I32, U8 = ml_dtypes.bfloat16, np.float32, np.int32, np.uint8


def test_quantize():
    assert cost.quantize(3, 256, 2) == cost.Cost(size(((3, 256), BF16), ((3, 256), U8), ((3, 2), F32)), 0)
    assert cost.quantize(1, 128, 4).bytes == 512 + 128 + 4


def test_index_write():
    read = size(((5, 128), BF16), ((5,), I32), ((5,), I32), ((5, 64), F32), ((2, 128), BF16))
    assert cost.index_write(5, 2) == cost.Cost(read + 5 * 132, 0)


def test_index_query():
    read = size(((5, 8, 128), BF16), ((5, 8), BF16), ((5,), I32), ((5, 64), F32))
    written = size(((5, 8, 128), U8), ((5, 8), F32))
    assert cost.index_query(5, 8, 2) == cost.Cost(read + written, 0)


def test_index_logits_ragged():
    """Two rows over three keys, causal: the first sees two, the second three."""
    read = size(((3, 128), U8), ((3,), F32), ((2, 4, 128), U8), ((2, 4), F32), ((2,), I32), ((2,), I32))
    counted = cost.index_logits_ragged(2, 3, 4, 2 + 3)
    assert counted == cost.Cost(read + size(((2, 3), F32)), (2 + 3) * 4 * 128 * 2)


def test_index_logits_paged():
    """Two requests of ten tokens with two rows each, which see nine and ten."""
    keys = 2 * size(((10, 128), U8), ((10,), F32), ((10,), I32))
    rows = size(((4, 8, 128), U8), ((4, 8), F32), ((4, 12), F32))
    requests = size(((2,), I32), ((2,), I32))
    assert cost.index_logits_paged(2, 2, 10, 12, 8) == cost.Cost(keys + rows + requests, 2 * (9 + 10) * 8 * 128 * 2)


def test_select():
    assert cost.select(3, 100, 7) == cost.Cost(size(((3, 100), F32), ((3,), I32), ((3, 7), I32)), 0)


@pytest.mark.parametrize(("row_bytes", "total"), [(1152, 2308), (656, 1812), (576, 1732)])
def test_kv_write(row_bytes, total):
    assert cost.kv_write(1, row_bytes, 2) == cost.Cost(total, 0)
    assert cost.kv_write(9, row_bytes, 2).bytes == 9 * total


def test_sparse_mla():
    """Two rows that share one of their slots: 2 · 4 slots, 7 of them distinct."""
    read = 7 * 656 + size(((2, 4), I32), ((2, 16, 576), BF16))
    written = size(((2, 16, 512), BF16), ((2, 16), F32))
    products = 2 * 16 * 4 * (576 + 512) * 2
    assert cost.sparse_mla(2, 16, 4, 7, 656, 2) == cost.Cost(read + written, products)


def test_layer():
    """The sum of what its parts do to one token of one request."""
    alone = [
        cost.index_write(1, 2),
        cost.kv_write(1, 656, 2),
        cost.index_query(1, 64, 2),
        cost.index_logits_paged(1, 1, 8192, 8192, 64),
        cost.select(1, 8192, 2048),
        cost.sparse_mla(1, 16, 2048, 2048, 656, 2),
    ]
    total = cost.layer(8192, 16, 2048, 64, 656)
    assert total.bytes == sum(part.bytes for part in alone)
    assert total.flops == 8192 * 64 * 128 * 2 + 2 * 16 * 2048 * (576 + 512)


def test_published_figures():
    """What is generally counted for DeepSeek-V3.2's shapes, in GFLOP and MB."""
    decode = cost.sparse_mla(128, 128, 2048, 128 * 2048, 656, 2)
    assert (round(decode.flops / 1e9, 2), round(decode.bytes / 1e6, 1)) == (73.01, 208.7)
    ragged = cost.index_logits_ragged(4096, 32768, 64, sum(range(28673, 32769)))
    assert round(ragged.flops / 1e9, 2) == 2061.62


@pytest.mark.parametrize("shapes", SETS)
def test_each_case_is_another(shapes):
    keys = [(case.op, tuple(case.shape.items())) for case in cases(shapes)]
    assert len(set(keys)) == len(keys)
    assert all(case.cost.bytes > 0 for case in cases(shapes))
