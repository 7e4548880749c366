"""What each op has to do, whatever does it: the two numbers that a roofline is made of.

Counted is what the op's contract demands, and nothing that one implementation does: every input that is needed read
once, every output written once, however often a kernel goes over them; padding and tiles don't count.

In the formulas: T query rows or tokens, H heads of attention, Hi heads of the indexer (of 128 columns), S keys, K
selected slots a row, ``itemsize`` bytes of an input number (bf16 2, f32 4).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """- `bytes`: the fewest that cross the device's memory.
    - `flops`: of matrix products, two a multiply-add. Elementwise work is not counted, so most ops have 0."""

    bytes: int
    flops: int = 0


def quantize(rows: int, columns: int, itemsize: int) -> Cost:
    """``R N itemsize`` read; ``R N`` codes and a scale of 4 for each 128 written."""
    numbers = rows * columns
    return Cost(numbers * itemsize + numbers + 4 * numbers // 128)


def index_write(tokens: int, itemsize: int) -> Cost:
    """A token: 128 numbers, its slot and its position (4 each), its row of 64 fp32 angles read; 132 bytes written.
    Once: ``k_norm``'s weight and bias."""
    return Cost(tokens * (128 * itemsize + 4 + 4 + 256 + 132) + 2 * 128 * itemsize)


def index_query(tokens: int, heads: int, itemsize: int) -> Cost:
    """A token: ``Hi`` heads of 128 numbers, ``Hi`` weights, its position (4), its row of 64 fp32 angles read; ``Hi``
    heads of 128 codes and ``Hi`` fp32 weights written."""
    return Cost(tokens * (heads * 128 * itemsize + heads * itemsize + 4 + 256 + heads * 128 + heads * 4))


def index_logits_ragged(rows: int, keys: int, heads: int, visible: int) -> Cost:
    """``132 S`` of keys with scales, ``T Hi (128 + 4)`` of queries with weights, ``8 T`` of windows read; ``4 T S`` of
    logits written (-inf too is a result). Products: ``2 · 128 · Hi`` for each ``visible`` pair of row and key."""
    return Cost(132 * keys + rows * heads * 132 + 8 * rows + 4 * rows * keys, 2 * 128 * heads * visible)


def index_logits_paged(requests: int, next_n: int, length: int, max_len: int, heads: int) -> Cost:
    """For each of ``B`` requests, all of ``length`` tokens: ``132`` of key with scale and ``4`` of token table a token,
    ``8`` of request and length read; for each of its ``next_n`` rows ``Hi (128 + 4)`` read and ``4 max_len`` written.
    Products: ``2 · 128 · Hi`` for each token that a row sees, ``length - n + i + 1`` for row ``i`` of ``n``."""
    seen = sum(length - next_n + i + 1 for i in range(next_n))
    a_request = length * (132 + 4) + 8 + next_n * (heads * 132 + 4 * max_len)
    return Cost(requests * a_request, requests * 2 * 128 * heads * seen)


def select(rows: int, window: int, k: int) -> Cost:
    """A row: ``4 window`` of logits and its length (4) read, ``4 K`` of positions written."""
    return Cost(rows * (4 * window + 4 + 4 * k))


def kv_write(tokens: int, row_bytes: int, itemsize: int) -> Cost:
    """A token: 576 numbers and its slot (4) read, a row of the layout written."""
    return Cost(tokens * (576 * itemsize + 4 + row_bytes))


def sparse_mla(rows: int, heads: int, selected: int, distinct: int, row_bytes: int, itemsize: int) -> Cost:
    """``distinct`` rows of the pool, each read once; ``4 T K`` of slots and ``T H 576 itemsize`` of queries read;
    ``T H 512 itemsize`` of output and ``4 T H`` of lse written. Products: ``2 (576 + 512)`` a row, head and slot."""
    per_head = 576 * itemsize + 512 * itemsize + 4
    return Cost(
        distinct * row_bytes + rows * (4 * selected + heads * per_head),
        2 * (576 + 512) * rows * heads * selected,
    )


def layer(length: int, heads: int, selected: int, index_heads: int, row_bytes: int) -> Cost:
    """One token of one request of ``length``: ``index_write``, ``kv_write``, ``index_query``, ``index_logits_paged``,
    ``select`` and ``sparse_mla``, summed. What one hands to the next counts as written and read, as it is today; one
    kernel for two of them could do with less."""
    parts = [
        index_write(1, 2),
        kv_write(1, row_bytes, 2),
        index_query(1, index_heads, 2),
        index_logits_paged(1, 1, length, length, index_heads),
        select(1, length, selected),
        sparse_mla(1, heads, selected, selected, row_bytes, 2),
    ]
    return Cost(sum(part.bytes for part in parts), sum(part.flops for part in parts))
