"""The ops in order: how one layer's sparse attention picks its tokens, in prefill and in decode.

A decode step of one layer, T query rows, as ``bridge``, the notebooks and the tests all run it::

    index_pool = index_write(index_pool, slots, k, ..., positions)         # or index_pack and a scatter of one's own
    q8, weights = index_query(q, weights, cos_sin, positions)
    selected = topk_decode(q8, weights, index_pool, token_table, requests, lengths, k=index_topk, ...)
    kv_pool = kv_write(kv_pool, slots, k_nope, k_rope, layout=...)
    out, lse = sparse_mla(q_nope, q_rope, kv_pool, selected, layout=..., softmax_scale=...)

Everything that changes from batch to batch is an array; what is static (``k``, ``layout``, ``max_len``) changes the
compiled program. Rows that only fill a batch up have length 0: they select nothing, attend to nothing and give 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float32, Int32, Shaped, UInt8

from jax_mla.layouts import IndexLayout
from jax_mla.ops.base import Implementation, is_concrete, refuse_outside, refuse_unless, typed
from jax_mla.ops.index_logits_paged import index_logits_paged
from jax_mla.ops.index_logits_ragged import index_logits_ragged
from jax_mla.ops.select import select
from jax_mla.pallas_triton import cdiv

LOGITS_BYTES = 512 << 20


@typed
def topk_prefill(
    q8: Shaped[Array, "T Hi 128"],
    weights: Float32[Array, "T Hi"],
    index_pool: UInt8[Array, "pages page_bytes"],
    k_slots: Int32[Array, " S"],
    starts: Int32[Array, " T"],
    lengths: Int32[Array, " T"],
    *,
    k: int,
    layout: IndexLayout,
    as_slots: bool = True,
    with_positions: bool = False,
    logits_bytes: int = LOGITS_BYTES,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Int32[Array, "T k"] | tuple[Int32[Array, "T k"], Int32[Array, "T k"]]:
    """The ``k`` tokens that each query row of a prefill attends to, in ascending order, -1 padded.

    Goes through the rows in blocks whose logits take at most ``logits_bytes``.

    - `q8`, `weights`: from ``index_query``.
    - `index_pool`: uint8 ``[pages, layout.page_bytes]``, which holds the new tokens' keys already.
    - `k_slots`: int32 ``[S]``, the slots of all tokens of all requests, one request after the other, cached prefixes
      included; -1 where padded.
    - `starts`, `lengths`: int32 ``[T]``. Row ``t`` sees ``k_slots[starts[t] : starts[t] + lengths[t]]``: ``starts`` is
      where its request begins, ``lengths`` counts its tokens up to the row's own.
    - `as_slots`: slots of the KV pool, or positions in the request. `with_positions`: both, slots first.

    A slot that is not in the pool scores NaN, the lowest: it is selected only in a row that selects all it sees, and is
    -1 there.

    Returns int32 ``[T, k]``, or two. Raises what ``index_logits_ragged`` and ``select`` raise, and ``ValueError`` for a
    ``logits_bytes`` under one row's and, outside ``jit``, a slot beyond the pool.
    """
    t, s = q8.shape[0], k_slots.shape[0]
    refuse_unless(s >= 1, "topk_prefill", "k_slots", "at least one", s)
    rows = logits_bytes // (4 * s)
    refuse_unless(rows >= 1, "topk_prefill", "logits_bytes", f"at least {4 * s:,} for one row", f"{logits_bytes:,}")
    refuse_outside("topk_prefill", "starts", starts, 0, s + 1, "the keys of k_slots")
    if is_concrete(starts) and is_concrete(lengths):
        past = np.asarray(lengths, np.int64) + np.asarray(starts) - s
        refuse_outside("topk_prefill", "lengths", past, -(2**32), 1, "keys past the end of k_slots")
    layout.check_pool("topk_prefill", index_pool)
    pool_slots = index_pool.shape[0] * layout.page_size
    refuse_outside("topk_prefill", "k_slots", k_slots, -(2**31), pool_slots, "the pool's slots")
    k8, k_scale = layout.read(index_pool, k_slots)
    there = layout.holds(index_pool, k_slots)
    k_scale = jnp.where(there, k_scale, jnp.nan)  # ranks below all scores, at the cost of one row and not of all logits
    table = jnp.where(there, k_slots, -1) if as_slots else None
    impl = dict(implementation=implementation, interpret=interpret)

    def block(q8, weights, starts, lengths):
        windows = starts, starts + lengths
        logits = index_logits_ragged(q8, weights, k8, k_scale, *windows, max_logits_bytes=logits_bytes, **impl)
        return select(logits, lengths, k, starts=starts, table=table, with_positions=with_positions, **impl)

    blocks = cdiv(t, rows)
    if blocks <= 1:
        return block(q8, weights, starts, lengths)
    rows = cdiv(t, blocks)

    def cut(x):
        padded = jnp.pad(x, [(0, blocks * rows - t)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(blocks, rows, *x.shape[1:])

    selected = lax.map(lambda x: block(*x), tuple(cut(x) for x in (q8, weights, starts, lengths)))
    return jax.tree.map(lambda x: x.reshape(blocks * rows, k)[:t], selected)


@typed
def topk_decode(
    q8: Shaped[Array, "T Hi 128"],
    weights: Float32[Array, "T Hi"],
    index_pool: UInt8[Array, "pages page_bytes"],
    token_table: Int32[Array, "R C"],
    requests: Int32[Array, " B"],
    lengths: Int32[Array, " B"],
    *,
    k: int,
    layout: IndexLayout,
    max_len: int,
    next_n: int = 1,
    as_slots: bool = True,
    with_positions: bool = False,
    implementation: Implementation = None,
    interpret: bool = False,
) -> Int32[Array, "T k"] | tuple[Int32[Array, "T k"], Int32[Array, "T k"]]:
    """The ``k`` tokens that each query row of a decode step attends to, in ascending order, -1 padded.

    - `q8`, `weights`: from ``index_query``, ``next_n`` rows for each request.
    - `index_pool`: uint8 ``[pages, layout.page_bytes]``, which holds the new tokens' keys already.
    - `token_table`: int32 ``[R, C]``, the slot of each token of each request; `requests`: int32 ``[B]``, its rows.
    - `lengths`: int32 ``[B]``, tokens of each request, the new ones included; 0 where padded.
    - `max_len`: at least the largest of ``lengths``; columns of the logits.
    - `next_n`: query rows a request; row i of n sees ``lengths[b] - n + i + 1`` tokens.
    - `as_slots`: slots of the KV pool, or positions in the request. `with_positions`: both, slots first.

    Returns int32 ``[B * next_n, k]``, or two. Raises what ``index_logits_paged`` and ``select`` raise.
    """
    impl = dict(implementation=implementation, interpret=interpret)
    batch, how = (token_table, requests, lengths), dict(layout=layout, max_len=max_len, next_n=next_n, fill=False)
    logits = index_logits_paged(q8, weights, index_pool, *batch, **how, **impl)
    seen = lengths
    if next_n > 1:
        seen = (lengths[:, None] + (jnp.arange(next_n, dtype=jnp.int32) - next_n + 1)).reshape(-1)
    if not as_slots:
        return select(logits, seen, k, with_positions=with_positions, **impl)
    of_rows = requests if next_n == 1 else jnp.repeat(requests, next_n)
    return select(logits, seen, k, table=token_table, table_rows=of_rows, with_positions=with_positions, **impl)


@typed
def slots_of(
    positions: Int32[Array, "T k"],
    table: Int32[Array, " S"] | Int32[Array, "R C"],
    rows: Int32[Array, " T"],
    lengths: Int32[Array, " T"],
) -> Int32[Array, "T k"]:
    """Slots of request-local ``positions``. None stays none: -1 gives -1, and so does a position that its row does not
    see.

    - `table`, `rows`: where row ``t`` finds its request's slots: ``k_slots`` and ``starts``, as in prefill, or
      ``token_table`` and ``requests``, as in decode.
    - `lengths`: int32 ``[T]``, tokens that each row sees.
    """
    at = (rows[:, None] + positions,) if table.ndim == 1 else (rows[:, None], positions)
    there = (positions >= 0) & (positions < lengths[:, None])
    for axis, size in zip(at, table.shape, strict=True):
        there &= (axis >= 0) & (axis < size)
    return jnp.where(there, table.at[at].get(mode="clip"), -1)  # one kernel: XLA checks both axes of "fill" in another
