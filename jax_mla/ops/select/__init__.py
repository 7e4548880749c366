"""Exact top-k of each row's window, in ascending order of position."""

import numpy as np
from jax import Array
from jaxtyping import Float32, Int32

from jax_mla.ops import base
from jax_mla.ops.select.config import Config
from jax_mla.ops.select.kernel import pallas, xla
from jax_mla.ops.select.reference import reference

IMPLEMENTATIONS = {"xla": xla, "pallas": pallas, "reference": reference}


@base.typed
def select(
    logits: Float32[Array, "T S"],
    lengths: Int32[Array, " T"],
    k: int,
    *,
    starts: Int32[Array, " T"] | None = None,
    table: Int32[Array, " S"] | Int32[Array, "R C"] | None = None,
    table_rows: Int32[Array, " T"] | None = None,
    with_positions: bool = False,
    implementation: base.Implementation = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Int32[Array, "T k"] | tuple[Int32[Array, "T k"], Int32[Array, "T k"]]:
    r"""The positions of the ``k`` largest of ``logits[t, starts[t] : starts[t] + lengths[t]]``.

    $$\mathrm{out}_t = \mathrm{sort}\big(\{p : |\{q : l_q > l_p \vee (l_q = l_p \wedge q < p)\}| < k\}\big)$$

    then -1 up to ``k``. Ties go to the lower position; the result is a set written in ascending order, so it is the
    same bits on every run and every rank. -0 equals +0, and on a CPU subnormal numbers do too; NaN ranks below
    everything, -inf included. A row of ``k`` tokens or fewer gives ``0 .. length - 1`` whatever its logits are, an
    empty one gives all -1.

    - `logits`: float32 ``[T, S]``; outside of a row's window it may hold anything, NaN too.
    - `lengths`: int32 ``[T]``, tokens in the window; 0 or less is empty.
    - `k`: how many, e.g. ``index_topk`` 2048; may exceed ``S``.
    - `starts`: int32 ``[T]``, where the window begins, None for 0. Positions count from there.
    - `table`: give slots instead of positions. int32 ``[S]``: the slot of each column of ``logits`` (prefill). int32
      ``[R, C]``: the slot of each token of each request (SGLang's ``req_to_token``; decode), in row ``table_rows[t]``.
      An entry < 0 stays -1.
    - `table_rows`: int32 ``[T]``, with a 2-D ``table`` only; a row outside of ``[0, R)`` gives all -1.
    - `with_positions`: give both, slots and then positions, in the same order; -1 for a slot may stand at a position.

    Returns int32 ``[T, k]``, or two of them ``with_positions``.

    Raises ``jaxtyping.TypeCheckError`` for wrong shapes and dtypes; ``ValueError`` for ``k < 1``, a ``table`` without
    its rows, rows or ``with_positions`` without a table, and outside ``jit`` for a window or a row that lies outside;
    under ``jit`` what lies outside is never selected.

    Source: DeepSeek-V3.2 ``inference/model.py::Indexer``; ties as aiter's ``top_k_per_row_* (stable=True)``.
    """
    op = "select"
    base.refuse_unless(k >= 1, op, "k", "at least 1", k)
    table_shape = None if table is None or table.ndim == 1 else table.shape
    expected = "int32 [T] with a 2-D table and None otherwise"
    base.refuse_unless((table_rows is not None) == (table_shape is not None), op, "table_rows", expected, table_rows)
    base.refuse_unless(table is not None or not with_positions, op, "with_positions", "a table beside it", "none")
    base.refuse_outside(op, "starts", starts, 0, logits.shape[1] + 1, "the columns of logits")
    if starts is None:
        base.refuse_outside(op, "lengths", lengths, -(2**31), logits.shape[1] + 1, "the columns of logits")
    elif base.is_concrete(starts) and base.is_concrete(lengths):
        past = np.asarray(lengths, np.int64) + np.asarray(starts) - logits.shape[1]
        base.refuse_outside(op, "lengths", past, -(2**32), 1, "columns past the end of logits")
    if table_shape is not None:
        base.refuse_outside(op, "lengths", lengths, -(2**31), table_shape[1] + 1, "the columns of table")
        base.refuse_outside(op, "table_rows", table_rows, 0, table_shape[0], "the rows of table")
    return base.run(
        op,
        IMPLEMENTATIONS,
        implementation,
        interpret,
        lambda: Config.of(logits.shape[1], k),
        config,
        (logits, lengths, starts, table, table_rows),
        dict(k=k, with_positions=with_positions),
    )
