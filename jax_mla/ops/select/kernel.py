"""Selection by XLA, and as Pallas kernels.

XLA finds the k-th largest key by its bits, from the highest down, by counting, and a prefix sum gives each chosen
position its place. The kernels hold up to ``config.last`` keys of a row in registers and search for a threshold that
``k`` keys reach: a bracket that counting narrows, by interpolation between the values at its ends or by halving. Rows
that are longer go in stages: each program passes on the positions of its largest keys, up to ``config.kept``, until
one program can hold what is left of a row. Nothing is sorted, so there is no order to depend on.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla import pallas_triton as pt
from jax_mla.ops.select.config import LINE

NOT_A_CANDIDATE = -(2**31)
NAN = NOT_A_CANDIDATE + 1
FAR_LEFT = -(2**30)  # no window from further left is told apart, so that positions don't overflow
SURE = 12  # probes after which every second one halves the bracket


def sort_key(logits):
    """int32 keys above ``NOT_A_CANDIDATE`` in the order of ``logits``: NaN lowest, -0 as +0."""
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)
    return jnp.where(logits == logits, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN)


def xla(logits, lengths, starts, table, table_rows, *, k, with_positions):
    rows, columns = logits.shape
    starts = jnp.zeros_like(lengths) if starts is None else jnp.maximum(starts, FAR_LEFT)
    s = jnp.arange(columns)
    inside = (s >= starts[:, None]) & (s - starts[:, None] < lengths[:, None])
    key = jnp.where(inside, sort_key(logits), NOT_A_CANDIDATE)

    def bit(i, threshold):
        higher = threshold + (jnp.int32(1) << (31 - i))  # wraps from the least int32 to 0 for the sign bit
        return jnp.where(jnp.sum(key >= higher[:, None], axis=1) >= k, higher, threshold)

    threshold = lax.fori_loop(0, 32, bit, jnp.full((rows,), NOT_A_CANDIDATE, jnp.int32))[:, None]
    above, tied = key > threshold, (key == threshold) & (key > NOT_A_CANDIDATE)
    room = k - jnp.sum(above, axis=1, keepdims=True)
    chosen = above | (tied & (jnp.cumsum(tied, axis=1) <= room))
    place = jnp.where(chosen, jnp.cumsum(chosen, axis=1) - 1, k)  # past the end: dropped
    row = jnp.arange(rows)[:, None]
    out = jnp.full((rows, k), -1, jnp.int32)
    columns_of = out.at[row, place].set(jnp.broadcast_to(s, key.shape), mode="drop")
    found = columns_of >= 0
    positions = jnp.where(found, columns_of - starts[:, None], -1)
    if table is None:
        return positions
    if table.ndim == 1:
        slots = table.at[columns_of].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
    else:
        found &= (table_rows >= 0)[:, None]
        slots = table.at[jnp.maximum(table_rows, 0)[:, None], positions].get(mode="fill", fill_value=-1)
    slots = jnp.where(found, jnp.maximum(slots, -1), -1)
    return (slots, positions) if with_positions else slots


def _value(key):
    """What ``sort_key`` made ``key`` of; NaN for a key between those of two NaN."""
    return lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)


def _over_all(f, x):
    return f(x.reshape(-1))


def _search(key, n, k, most):
    """``(threshold, above, exact)`` of ``n`` keys, ``k`` to ``most`` of which are wanted, ``k <= n``; there may be more
    that are ``NOT_A_CANDIDATE``, and it is never the threshold.

    Where ``exact``, those of at least ``threshold`` are as many. Else the next larger ones, ``above < k``, are too few
    and those of at least ``threshold`` too many: equal ones are to be told apart by their position.
    """

    def unfinished(state):
        low, high, reaching, _, _, _ = state
        return (low < high) & (reaching > most)

    def narrow(state):
        # `reaching` keys >= low, `above` keys > high; above < k <= reaching; `streak`: how often in a row low (> 0) or
        # high (< 0) was moved
        low, high, reaching, above, streak, probes = state
        # How many are larger is drawn as a straight line from end to end, and its logarithm, which is one for the tail
        # of an exponential, in turn. An end that stays where it is a second time counts half, or the line would hang on
        # it (Illinois). Every sixth probe halves the bracket, from the twelfth on every second, whatever the keys are.
        linear = jnp.where(probes < SURE, probes % 2 == 1, probes % 4 == 2)
        halve = jnp.where(probes < SURE, probes % 6 == 5, probes % 2 == 1)

        def height(count):
            return jnp.where(linear, count, jnp.log2(count + 0.5))

        def halved(times):
            return lax.bitcast_convert_type((127 - jnp.maximum(times, 0)) << 23, jnp.float32)

        r, a, wanted = (x.astype(jnp.float32) for x in (reaching, above, k))
        at_low = (height(r) - height(wanted)) * halved(-streak - 1)
        at_high = (height(wanted) - height(a)) * halved(streak - 1)
        value = _value(low) + (_value(high) - _value(low)) * jnp.clip(at_low / (at_low + at_high), 0.02, 0.98)
        by_value = (value == value) & ~halve
        bits = lax.bitcast_convert_type(value, jnp.int32)
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        probe = jnp.clip(jnp.where(by_value, bits ^ ((bits >> 31) & 0x7FFFFFFF), middle), low, high - 1)
        larger = _over_all(jnp.sum, (key > probe).astype(jnp.int32))
        enough = larger >= k
        return (
            jnp.where(enough, probe + 1, low),
            jnp.where(enough, high, probe),
            jnp.where(enough, larger, reaching),
            jnp.where(enough, above, larger),
            jnp.where(enough, jnp.maximum(streak, 0) + 1, jnp.minimum(streak, 0) - 1),
            probes + 1,
        )

    lowest = jnp.maximum(_over_all(jnp.min, key), NAN)
    start = lowest, _over_all(jnp.max, key), n, jnp.int32(0), jnp.int32(0), jnp.int32(0)
    low, _, reaching, above, _, _ = lax.while_loop(unfinished, narrow, start)
    return low, above, reaching <= most


def _places(key, threshold, above, exact, k):
    """Of each key ``[lines, LINE]``, line by line, the place among those chosen, or -1; and how many those are."""

    def running(x):
        lines = jnp.sum(x, axis=1)
        return jnp.cumsum(x, axis=1) + (jnp.cumsum(lines) - lines)[:, None], jnp.sum(lines)

    def all_that_reach():
        count, total = running((key >= threshold).astype(jnp.int32))
        return jnp.where(key >= threshold, count - 1, -1), total

    def first_of_equals():  # 15 bits for the larger ones, fewer than k; 17 for the equal ones
        larger, equal = key > threshold, key == threshold
        both, total = running(larger.astype(jnp.int32) + (equal.astype(jnp.int32) << 15))
        room, equals = k - above, lax.shift_right_logical(both, 15)
        place = jnp.where(larger | (equal & (equals <= room)), (both & 0x7FFF) + jnp.minimum(equals, room) - 1, -1)
        return place, (total & 0x7FFF) + jnp.minimum(lax.shift_right_logical(total, 15), room)

    return lax.cond(exact, all_that_reach, first_of_equals)


def _put(ref, row, place, values):
    """Stores where ``place`` is not < 0. Interpret mode stores what was there where a mask is off: those lanes get a
    column of their own, the last."""
    at = jnp.where(place >= 0, place, ref.shape[-1] - 1)
    pt.store(ref.at[(*row, at)], values, mask=place >= 0)


def _kernel(*refs, names, k, width, columns, kept):
    """One program's part of a row. By name, where they are:

    - `logits` ``[T, S]``; `lengths`, `starts` ``[T]``; `table` ``[S]`` or ``[R, C]``, `table_rows` ``[T]``.
    - `positions` ``[T, parts, kept]`` in the window, which the stage before passed on, and how many, `counts`
      ``[T, parts]``.
    - `out` ``[T, k]`` of the last stage, and `where` beside it for positions; or what is passed on to the next:
      `positions_out`, `counts_out`.
    """
    ref: dict[str, Any] = dict(zip(names, refs, strict=True))
    t, part = pt.program_id(0), pt.program_id(1)
    first = part * columns
    column = jnp.arange(columns // LINE)[:, None] * LINE + jnp.arange(LINE)[None, :]
    asked = jnp.maximum(ref["starts"][t], FAR_LEFT) if "starts" in ref else 0
    start, length = jnp.maximum(asked, 0), jnp.maximum(ref["lengths"][t], 0)
    end = asked + jnp.minimum(length, width - asked)
    length = jnp.maximum(end - start, 0)

    def load():
        """Keys, ``NOT_A_CANDIDATE`` in columns that hold none; how many; and the function from a mask to their
        positions in the window, which are read again rather than kept."""
        logits = ref["logits"]
        if "positions" not in ref:
            n = jnp.minimum(length - first, columns)
            at = logits.at[t, start + first + column]

            def some():
                inside = column < n
                return jnp.where(inside, sort_key(pt.load(at, mask=inside, other=0.0)), NOT_A_CANDIDATE)

            return lax.cond(n == columns, lambda: sort_key(pt.load(at)), some), n, lambda _: first + column
        flat = first + column
        source = (first + jnp.arange(columns // LINE) * LINE) // kept
        count = pt.load(ref["counts"].at[t, source], mask=source < ref["counts"].shape[1], other=0)
        inside = flat % kept < count[:, None]

        def position(mask):
            return pt.load(ref["positions"].at[t, flat // kept, flat % kept], mask=mask & inside, other=0)

        key = sort_key(pt.load(logits.at[t, start + position(inside)], mask=inside, other=0.0))
        n = jnp.sum(jnp.minimum(jnp.maximum(count - (first + jnp.arange(columns // LINE) * LINE) % kept, 0), LINE))
        return jnp.where(inside, key, NOT_A_CANDIDATE), n, position

    def choose(wanted, most):
        key, n, position = load()
        wanted = jnp.minimum(wanted, n)
        threshold, above, exact = _search(key, n, wanted, jnp.minimum(most, n))
        place, total = _places(key, threshold, above, exact, wanted)
        return place, total, position

    if "out" not in ref:
        busy = (length > k) & (True if "positions" in ref else first < length)

        @pt.when(busy)
        def _():
            place, total, position = choose(k, kept)
            _put(ref["positions_out"], (t, part), place, position(place >= 0))
            ref["counts_out"][t, part] = total

        @pt.when(~busy)
        def _():
            ref["counts_out"][t, part] = 0

        return

    def of_table(position, mask):
        """What is written for ``position`` in the window."""
        if "table" not in ref:
            return position + (start - asked)
        table = ref["table"]
        if "table_rows" not in ref:
            return jnp.maximum(pt.load(table.at[start + position], mask=mask, other=-1), -1)
        request, position = ref["table_rows"][t], position + (start - asked)
        mask = mask & (request >= 0) & (request < table.shape[0]) & (position < table.shape[1])
        return jnp.maximum(pt.load(table.at[request, position], mask=mask, other=-1), -1)

    @pt.when(length > k)
    def _():
        place, _, position = choose(k, k)
        mask = place >= 0
        if "where" in ref:  # positions are read again for the slots, rather than kept: registers are few
            _put(ref["where"], (t,), place, position(mask) + (start - asked))
        _put(ref["out"], (t,), place, of_table(position(mask), mask))

    @pt.when(length <= k)
    def _():
        place = jnp.arange(pt.block(k))
        taken = place < jnp.minimum(length, k)
        at = jnp.where(place < k, place, -1)
        if "where" in ref:
            _put(ref["where"], (t,), at, jnp.where(taken, place + (start - asked), -1))
        _put(ref["out"], (t,), at, jnp.where(taken, of_table(place, taken), -1))


def pallas(logits, lengths, starts, table, table_rows, *, k, with_positions, config, interpret):
    config.check(k)
    rows, width = logits.shape
    spare = int(interpret)  # the column of _put
    windows = dict(lengths=lengths) | ({} if starts is None else dict(starts=starts))
    tables = {name: x for name, x in (("table", table), ("table_rows", table_rows)) if x is not None}

    def stage(name, inputs, outputs, columns, parts, num_warps):
        kernel = partial(_kernel, names=(*inputs, *outputs), k=k, width=width, columns=columns, kept=config.kept)
        out = pt.kernel_call(
            kernel,
            tuple(inputs.values()),
            tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in outputs.values()),
            name=name,
            grid=(rows, parts),
            num_warps=num_warps,
            num_stages=1,
            interpret=interpret,
        )
        return dict(zip(outputs, out, strict=True))

    source, left = dict(logits=logits), width
    while left > config.last:
        parts = pt.cdiv(left, config.part)
        kept = (rows, parts, config.kept + spare)
        outputs = dict(positions_out=kept, counts_out=(rows, parts))
        out = stage("select_some", source | windows, outputs, config.part, parts, config.num_warps)
        passed_on = dict(positions=out["positions_out"][..., : config.kept], counts=out["counts_out"])
        source, left = dict(logits=logits) | passed_on, parts * config.kept
    columns = pt.block(left, LINE)
    outputs = {name: (rows, k + spare) for name in (("out", "where") if with_positions else ("out",))}
    out = stage("select", source | windows | tables, outputs, columns, 1, config.warps_for(columns))
    return tuple(out[name][:, :k] for name in outputs) if with_positions else out["out"][:, :k]
