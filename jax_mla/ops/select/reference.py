"""What selection means: a stable sort."""

import jax.numpy as jnp


def reference(logits, lengths, starts, table, table_rows, *, k, with_positions):
    rows, columns = logits.shape
    starts = jnp.zeros_like(lengths) if starts is None else jnp.maximum(starts, -(2**30))  # far left enough
    s = jnp.arange(columns)
    inside = (s >= starts[:, None]) & (s - starts[:, None] < lengths[:, None])
    nan = jnp.isnan(logits)
    # Descending by (in the window, a number, value); the sort is stable, so ties keep the order of their columns.
    value = -jnp.where(nan | (logits == 0), 0.0, logits)
    order = jnp.lexsort((jnp.broadcast_to(s, logits.shape), value, nan, ~inside), axis=1)[:, :k]
    chosen = jnp.where(jnp.take_along_axis(inside, order, axis=1), order, columns)
    chosen = jnp.pad(jnp.sort(chosen, axis=1), ((0, 0), (0, max(0, k - columns))), constant_values=columns)
    found = chosen < columns
    positions = chosen - starts[:, None]
    where = jnp.where(found, positions, -1)
    if table is None:
        return where
    if table.ndim == 1:
        slots = table[jnp.minimum(chosen, columns - 1)]
    else:
        found &= ((table_rows >= 0) & (table_rows < table.shape[0]))[:, None] & (positions < table.shape[1])
        slots = table[table_rows[:, None], jnp.where(found, positions, 0)]
    slots = jnp.where(found, jnp.maximum(slots, -1), -1)
    return (slots, where) if with_positions else slots
