"""What every selector must do, tried on one: for whoever writes a new one, and for the tests of those that are here."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_mla.nn.attention import _pick
from jax_mla.nn.config import DeepseekV32Config
from jax_mla.nn.indexer import rows_of


class NotASelector(AssertionError):
    """A selector that breaks one of its rules; the message says which, and where."""


def check_selector(selector: Any, config: DeepseekV32Config, *, length: int | None = None, seed: int = 0) -> None:
    """Tries ``selector`` on random hidden states of 2 requests of ``length`` tokens, by default three
    times ``config.index_topk``. Raises ``NotASelector`` unless

    - it returns scores (floats ``[B, T, S]``) or positions (integers ``[B, T, k]``, -1 for none), or a function of
      ``(start, size)`` that gives those of some rows, the same as of all at once;
    - it picks each position once for a row, and at most ``index_topk``; those after the row's own don't count;
    - what it picks does not depend on tokens after the row, nor on the other request;
    - it comes to the same under ``jit`` and a second time.

    Raises ``ValueError`` for a ``length`` whose first two thirds are ``index_topk`` or less: nothing to choose from.
    """
    length = 3 * config.index_topk if length is None else length
    if length // 3 * 2 <= config.index_topk:
        raise ValueError(f"length: expected over 3/2 of index_topk {config.index_topk}, got {length}")
    keys = jax.random.split(jax.random.key(seed), 4)
    hidden = jax.random.normal(keys[0], (2, length, config.hidden_size), jnp.float32)
    q_latent = jax.random.normal(keys[1], (2, length, config.q_lora_rank), jnp.float32)
    positions = jnp.arange(length, dtype=jnp.int32)

    def pick(hidden: Array, q_latent: Array, start: int, size: int) -> Array:
        given = rows_of(selector(hidden, q_latent, positions), start, size)
        if given.ndim != 3 or given.shape[:2] != (2, size):
            raise NotASelector(f"expected [2, {size}, ...] for rows {start} to {start + size}, got {list(given.shape)}")
        picked = _pick(given, start, config.index_topk, length)[0]
        row = start + jnp.arange(size, dtype=jnp.int32)[:, None]
        return jnp.where(picked <= row, picked, -1)

    whole = np.asarray(pick(hidden, q_latent, 0, length))
    for b, t in np.ndindex(2, length):
        row = whole[b, t][whole[b, t] >= 0]
        _require(len(set(row.tolist())) == len(row), "each position once", b, t, row)
        _require(len(row) <= config.index_topk, f"at most index_topk {config.index_topk} positions", b, t, row)

    def same(other: Array, rows: slice, requests: slice, what: str):
        one = whole[requests, rows]
        differ = np.argwhere((np.sort(np.asarray(other), -1) != np.sort(one, -1)).any(-1))
        if differ.size:
            b, t = differ[0] + (requests.start or 0, rows.start or 0)
            raise NotASelector(f"expected {what}; row {t} of request {b} differs, and {len(differ) - 1} more")

    everywhere = slice(None)
    same(pick(hidden, q_latent, 0, length), everywhere, everywhere, "the same a second time")
    compiled = jax.jit(pick, static_argnums=(2, 3))
    same(compiled(hidden, q_latent, 0, length), everywhere, everywhere, "the same under jit")
    third = length // 3
    part = slice(third, 2 * third)
    same(pick(hidden, q_latent, third, third), part, everywhere, "the same of some rows as of all")
    noise = 3 * jax.random.normal(keys[2], hidden.shape)
    other = hidden.at[:, 2 * third :].add(noise[:, 2 * third :]), q_latent.at[:, 2 * third :].add(1.0)
    same(pick(*other, 0, length)[:, : 2 * third], slice(0, 2 * third), everywhere, "nothing to depend on later tokens")
    other = hidden.at[1].add(noise[1]), q_latent.at[1].add(1.0)
    same(pick(*other, 0, length)[:1], everywhere, slice(0, 1), "nothing to depend on the other request")


def _require(holds: bool, what: str, request: int, row: int, got: Any) -> None:
    if not holds:
        raise NotASelector(f"expected {what}; row {row} of request {request} got {got.tolist()}")
