"""The shapes: "tiny" for tests; "small" for a CPU, where DSA is tried out; "real" for an accelerator that serves
DeepSeek-V3.2."""

from collections.abc import Iterator

from bench.case import Case
from bench.kernels import (
    index_logits_paged,
    index_logits_ragged,
    index_query,
    index_write,
    kv_write,
    layer,
    quantize,
    select,
    sparse_mla,
)

SETS = ("tiny", "small", "real")
LAYOUTS = ("bf16", "fp8_656", "fp8_576")


def _tiny() -> Iterator[Case]:
    yield quantize(4, 256)
    yield index_write(3, 256)
    yield index_query(3, 8)
    yield index_logits_ragged(4, 96, 8)
    yield index_logits_paged(2, 128, 2, 8)
    yield select(3, 200, 16)
    for layout in LAYOUTS:
        yield kv_write(3, layout, 64)
        yield sparse_mla(2, 3, 16, layout, 64)
    yield layer(128, 3, 16, "fp8_656", 256, index_heads=8)


def _small() -> Iterator[Case]:
    yield quantize(2048, 7168)
    for tokens in (1, 512):
        yield index_write(tokens, 1 << 16)
    for tokens in (8, 512):
        yield index_query(tokens)
    yield index_logits_ragged(256, 4096)
    for requests, next_n in ((1, 1), (8, 1), (4, 2)):
        yield index_logits_paged(requests, 4096, next_n, pool_bytes=64 << 20)
    yield select(1, 16384)
    yield select(64, 8192)
    for tokens in (1, 512):
        for layout in LAYOUTS:
            yield kv_write(tokens, layout, 1 << 16)
    for layout in LAYOUTS:
        yield sparse_mla(8, 16, 2048, layout, 1 << 16)
    yield sparse_mla(64, 16, 512, "bf16", 4096)
    yield layer(8192, 16, 2048, "fp8_656", 1 << 16)


def _real() -> Iterator[Case]:
    pool = 1 << 29
    yield quantize(8192, 7168)
    for tokens in (1, 8192):
        yield index_write(tokens, 1 << 20)
    for tokens in (1, 64, 4096):
        yield index_query(tokens)
    for keys in (8192, 32768):
        yield index_logits_ragged(4096, keys)
    yield index_logits_paged(1, 65536, pool_bytes=pool)
    yield index_logits_paged(64, 8192, pool_bytes=pool)
    yield index_logits_paged(64, 65536)
    yield index_logits_paged(64, 65536, 2)
    for rows, window in ((1, 65536), (64, 65536), (128, 32768), (4096, 32768)):
        yield select(rows, window)
    for tokens in (1, 8192):
        for layout in LAYOUTS:
            yield kv_write(tokens, layout, 1 << 18)
    for rows in (1, 64, 128):
        yield sparse_mla(rows, 16, 2048, "fp8_656", 1 << 19)
    for layout in ("bf16", "fp8_576"):
        yield sparse_mla(128, 16, 2048, layout, 1 << 19)
    for layout in ("fp8_656", "fp8_576"):
        yield sparse_mla(128, 128, 2048, layout, 1 << 19)
    for heads in (16, 128):
        yield sparse_mla(4096, heads, 2048, "bf16", 1 << 15)
    for length in (8192, 131072):
        yield layer(length, 16, 2048, "fp8_656", 1 << 21)


def cases(shapes: str) -> list[Case]:
    """All cases of "tiny", "small" or "real"."""
    return list({"tiny": _tiny, "small": _small, "real": _real}[shapes]())


OPS = tuple(dict.fromkeys(case.op for case in _tiny()))
