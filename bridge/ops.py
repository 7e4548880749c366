"""jax_mla's ops as functions for both lanes (``bridge.stream``): what they are called with from torch.

Static arguments are plain: ``layout`` is a KV layout's name, ``fp8`` an FP8 format's, ``page_size`` and ``preshuffle``
are the index pool's. A pool that is written comes first, and back. They run as kernels on a card and as XLA's versions
on a CPU. Everything else stands in the ops' own docstrings.
"""

from functools import partial

from bridge.stream.lane import Function


def _index_layout(page_size: int, preshuffle: bool, fp8: str):
    from jax_mla import IndexLayout
    from jax_mla.fp8 import fp8_format

    return IndexLayout(page_size, fp8_format(fp8), preshuffle)


def _kv_layout(layout: str, fp8: str):
    from jax_mla import kv_layout

    return kv_layout(layout, fp8)


def _kv_write(*, layout: str, fp8: str):
    from jax_mla import kv_write

    return partial(kv_write, layout=_kv_layout(layout, fp8))


def _index_write(*, page_size: int, preshuffle: bool, fp8: str, interleaved: bool, hadamard: bool, eps: float):
    from jax_mla import index_write

    layout = _index_layout(page_size, preshuffle, fp8)
    return partial(index_write, layout=layout, interleaved=interleaved, hadamard=hadamard, eps=eps)


def _index_query(*, fp8: str, interleaved: bool, hadamard: bool):
    from jax_mla import index_query
    from jax_mla.fp8 import fp8_format

    return partial(index_query, fp8=fp8_format(fp8), interleaved=interleaved, hadamard=hadamard)


def _index_logits_paged(*, page_size: int, preshuffle: bool, fp8: str, max_len: int, next_n: int):
    from jax_mla import index_logits_paged

    layout = _index_layout(page_size, preshuffle, fp8)
    return partial(index_logits_paged, layout=layout, max_len=max_len, next_n=next_n)


def _index_logits_ragged():
    from jax_mla import index_logits_ragged

    return index_logits_ragged


def _select(*, k: int):
    from jax_mla import select

    return partial(select, k=k)


def _sparse_mla(*, layout: str, fp8: str, softmax_scale: float):
    from jax_mla import sparse_mla

    return partial(sparse_mla, layout=_kv_layout(layout, fp8), softmax_scale=softmax_scale)


def _topk_decode(
    *, page_size: int, preshuffle: bool, fp8: str, interleaved: bool, hadamard: bool, max_len: int, k: int
):
    from jax_mla import topk_decode

    query = _index_query(fp8=fp8, interleaved=interleaved, hadamard=hadamard)
    static = dict(k=k, layout=_index_layout(page_size, preshuffle, fp8), max_len=max_len, with_positions=True)

    def topk(q, weights, cos_sin, positions, *seen):
        return topk_decode(*query(q, weights, cos_sin, positions), *seen, **static)

    return topk


def _topk_prefill(*, page_size: int, preshuffle: bool, fp8: str, interleaved: bool, hadamard: bool, k: int):
    from jax_mla import topk_prefill

    query = _index_query(fp8=fp8, interleaved=interleaved, hadamard=hadamard)
    static = dict(k=k, layout=_index_layout(page_size, preshuffle, fp8), with_positions=True)

    def topk(q, weights, cos_sin, positions, *seen):
        return topk_prefill(*query(q, weights, cos_sin, positions), *seen, **static)

    return topk


def _slots_of():
    from jax_mla import slots_of

    return slots_of


KV_WRITE = Function("kv_write", _kv_write, ("pool", "slots", "k_nope", "k_rope"), (), ("pool",))
INDEX_WRITE = Function(
    "index_write",
    _index_write,
    ("pool", "slots", "k", "norm_weight", "norm_bias", "cos_sin", "positions"),
    (),
    ("pool",),
)
INDEX_QUERY = Function("index_query", _index_query, ("q", "weights", "cos_sin", "positions"), ("q8", "folded"))
INDEX_LOGITS_PAGED = Function(
    "index_logits_paged",
    _index_logits_paged,
    ("q8", "weights", "pool", "token_table", "requests", "lengths"),
    ("logits",),
)
INDEX_LOGITS_RAGGED = Function(
    "index_logits_ragged", _index_logits_ragged, ("q8", "weights", "k8", "k_scale", "starts", "ends"), ("logits",)
)
SELECT = Function("select", _select, ("logits", "lengths"), ("positions",))
SPARSE_MLA = Function("sparse_mla", _sparse_mla, ("q_nope", "q_rope", "pool", "slots"), ("out", "lse"))

# Several ops in one call, as a layer has them after its write. Tokens are selected as slots and as positions in their
# request.
TOPK_DECODE = Function(
    "topk_decode",
    _topk_decode,
    ("q", "weights", "cos_sin", "positions", "pool", "token_table", "requests", "lengths"),
    ("slots", "topk"),
)
TOPK_PREFILL = Function(
    "topk_prefill",
    _topk_prefill,
    ("q", "weights", "cos_sin", "positions", "pool", "k_slots", "starts", "lengths"),
    ("slots", "topk"),
)
# For a selection of another batch's rows; no part of the attention, which so is compiled once for tables of all sizes.
SLOTS_OF = Function("slots_of", _slots_of, ("positions", "table", "rows", "lengths"), ("slots",))

FUNCTIONS = (
    *(KV_WRITE, INDEX_WRITE, INDEX_QUERY, INDEX_LOGITS_PAGED, INDEX_LOGITS_RAGGED, SELECT, SPARSE_MLA),
    *(TOPK_DECODE, TOPK_PREFILL, SLOTS_OF),
)
