"""Selection by XLA, and as a Pallas kernel of one program a row.

Both find the k-th largest key by its bits, from the highest down, by counting; then they go through the row once more
and put each chosen position behind those before it. No sort, so no order to depend on.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla import pallas_triton as pt

NOT_A_CANDIDATE = -(2**31)
NAN = NOT_A_CANDIDATE + 1


def sort_key(logits, inside):
    """int32 keys in the order of ``logits``: candidates above ``NOT_A_CANDIDATE``, NaN lowest of them, -0 as +0."""
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)
    key = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = jnp.where(logits == logits, key, NAN)
    return jnp.where(inside, key, NOT_A_CANDIDATE)


def xla(logits, lengths, starts, table, table_rows, *, k):
    rows, columns = logits.shape
    starts = jnp.zeros_like(lengths) if starts is None else starts
    s = jnp.arange(columns)
    key = sort_key(logits, (s >= starts[:, None]) & (s - starts[:, None] < lengths[:, None]))

    def bit(i, threshold):
        higher = threshold + (jnp.int32(1) << (31 - i))  # wraps from the least int32 to 0 for the sign bit
        return jnp.where(jnp.sum(key >= higher[:, None], axis=1) >= k, higher, threshold)

    threshold = lax.fori_loop(0, 32, bit, jnp.full((rows,), NOT_A_CANDIDATE, jnp.int32))[:, None]
    above, tied = key > threshold, (key == threshold) & (key > NOT_A_CANDIDATE)
    room = k - jnp.sum(above, axis=1, keepdims=True)
    chosen = above | (tied & (jnp.cumsum(tied, axis=1) <= room))
    place = jnp.where(chosen, jnp.cumsum(chosen, axis=1) - 1, k)  # past the end: dropped
    row = jnp.arange(rows)[:, None]
    value = (s - starts[:, None]) if table is None else jnp.broadcast_to(s, key.shape)
    if table is not None and table.ndim == 1:
        value = jnp.broadcast_to(jnp.maximum(table, -1), key.shape)
    out = jnp.full((rows, k), -1, jnp.int32).at[row, place].set(value, mode="drop")
    if table is None or table.ndim == 1:
        return out
    known = (out >= 0) & (table_rows >= 0)[:, None]
    slots = table.at[jnp.maximum(table_rows, 0)[:, None], out - starts[:, None]].get(mode="fill", fill_value=-1)
    return jnp.where(known, jnp.maximum(slots, -1), -1)


def _kernel(
    logits_ref,  # [T, S]
    lengths_ref,  # [T]
    starts_ref,  # [T]
    table_ref,  # [S] or [R, C], or [1] and not read
    table_rows_ref,  # [T], or [1] and not read
    out_ref,  # [T, k], and a column that is nobody's where interpret mode needs one
    *,
    k,
    table_dims,
    columns,
):
    t = pt.program_id(0)
    length = jnp.maximum(lengths_ref[t], 0)
    start = starts_ref[t]
    end = start + jnp.minimum(length, logits_ref.shape[1] - start)
    first = jnp.maximum(start, 0) // columns * columns
    tiles = jnp.maximum(pt.cdiv(end - first, columns), 0)

    def tile(i):
        s = first + i * columns + jnp.arange(columns)
        inside = (s >= start) & (s < end)
        row = jnp.full((columns,), t)
        return s, sort_key(pt.load(logits_ref.at[row, s], mask=inside, other=0.0), inside)

    # Four bits a pass: how many keys begin with the bits found so far and go on with each of the 16 digits.
    digits = jnp.arange(16)

    def digit(i, found):
        threshold, above = found
        shift = 28 - 4 * i

        def count(j, total):
            biased = tile(j)[1] ^ NOT_A_CANDIDATE  # unsigned order of the bits = signed order of the keys
            prefix = lax.shift_right_logical(lax.shift_right_logical(biased, shift), 4)
            same = prefix == lax.shift_right_logical(lax.shift_right_logical(threshold, shift), 4)
            mine = lax.shift_right_logical(biased, shift) & 15
            hit = same[:, None] & (mine[:, None] == digits[None, :])
            return total + jnp.sum(hit.astype(jnp.int32), axis=0)

        total = lax.fori_loop(0, tiles, count, jnp.zeros((16,), jnp.int32))
        larger = above + jnp.sum(total) - jnp.cumsum(total)  # keys above, for each digit chosen
        chosen = jnp.max(jnp.where(larger + total >= k, digits, 0))
        larger = jnp.sum(jnp.where(digits == chosen, larger, 0))
        return threshold | (chosen << shift), larger

    threshold, above = lax.fori_loop(0, 8, digit, (jnp.int32(0), jnp.int32(0)))
    threshold = threshold ^ NOT_A_CANDIDATE
    above = jnp.where(threshold == NOT_A_CANDIDATE, 0, above)
    nobodys = out_ref.shape[1] - 1

    def emit(j, done):
        placed, ties = done
        s, key = tile(j)
        tied = (key == threshold) & (key > NOT_A_CANDIDATE)
        rank = ties + jnp.cumsum(tied.astype(jnp.int32))
        chosen = (key > threshold) | (tied & (rank <= k - above))
        place = placed + jnp.cumsum(chosen.astype(jnp.int32)) - 1
        if table_dims == 0:
            value = s - start
        elif table_dims == 1:
            value = jnp.maximum(pt.load(table_ref.at[s], mask=chosen, other=-1), -1)
        else:
            request = table_rows_ref[t]
            known = (request >= 0) & (request < table_ref.shape[0]) & (s - start < table_ref.shape[1])
            row = jnp.full((columns,), request)
            value = jnp.maximum(pt.load(table_ref.at[row, s - start], mask=chosen & known, other=-1), -1)
        pt.store(out_ref.at[jnp.full((columns,), t), jnp.where(chosen, place, nobodys)], value, mask=chosen)
        return placed + jnp.sum(chosen.astype(jnp.int32)), ties + jnp.sum(tied.astype(jnp.int32))

    placed, _ = lax.fori_loop(0, tiles, emit, (jnp.int32(0), jnp.int32(0)))

    def pad(j, _):
        place = j * columns + jnp.arange(columns)
        empty = (place >= placed) & (place < k)
        at = out_ref.at[jnp.full((columns,), t), jnp.where(empty, place, nobodys)]
        pt.store(at, jnp.full((columns,), -1, jnp.int32), mask=empty)

    lax.fori_loop(placed // columns, pt.cdiv(k, columns), pad, None)


def pallas(logits, lengths, starts, table, table_rows, *, k, config, interpret):
    rows = logits.shape[0]
    unread = jnp.zeros((1,), jnp.int32)
    out = pt.kernel_call(
        partial(_kernel, k=k, table_dims=0 if table is None else table.ndim, columns=config.columns),
        (
            logits,
            lengths,
            jnp.zeros_like(lengths) if starts is None else starts,
            unread if table is None else table,
            unread if table_rows is None else table_rows,
        ),
        # Interpret mode stores what was there where a mask is off: those lanes get a column of their own.
        (jax.ShapeDtypeStruct((rows, k + interpret), jnp.int32),),
        name="select",
        grid=(rows,),
        num_warps=config.num_warps,
        num_stages=1,
        interpret=interpret,
    )[0]
    return out[:, :k]
