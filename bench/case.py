"""What a case is, and where its numbers come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bench import oracle
from bench.peers import Peer
from jax_mla.cost import Cost

LARGE = 1 << 17  # numbers; more are drawn by the device, fewer by the host, for whose draws nothing has to be compiled


class Source:
    """Random arrays on JAX's default device, the same ones for the same ``seed`` and platform."""

    def __init__(self, seed: int):
        self._host = np.random.default_rng(seed)
        self._keys = jax.random.key(seed)
        self._drawn = 0

    def _key(self):
        self._drawn += 1
        return jax.random.fold_in(self._keys, self._drawn)

    def normal(self, *shape: int, dtype=jnp.float32) -> Array:
        if np.prod(shape) > LARGE:
            return jax.random.normal(self._key(), shape, dtype)
        return jnp.asarray(self._host.standard_normal(shape, np.float32).astype(dtype))

    def fp8(self, *shape: int) -> Array:
        """e4m3fn numbers such as a quantised row holds: normal, 64 wide."""
        if np.prod(shape) > LARGE:
            return _to_fp8(jax.random.normal(self._key(), shape))
        normal = 64 * self._host.standard_normal(shape, np.float32)
        return jnp.asarray(normal.clip(-448, 448).astype(oracle.FP8))

    def uniform(self, low: float, high: float, *shape: int, dtype=jnp.float32) -> Array:
        return jnp.asarray(self._host.uniform(low, high, shape).astype(dtype))

    def bytes(self, *shape: int) -> Array:
        if np.prod(shape) > LARGE:
            return jax.random.bits(self._key(), shape, jnp.uint8)
        return jnp.asarray(self._host.integers(0, 256, shape, np.uint8))

    def integers(self, high: int, *shape: int) -> Array:
        """int32, from 0 to ``high`` excluded."""
        return jnp.asarray(self._host.integers(0, high, shape, np.int32))

    def permutation(self, n: int) -> Array:
        if n > LARGE:
            return jax.random.permutation(self._key(), n).astype(jnp.int32)
        return jnp.asarray(self._host.permutation(n).astype(np.int32))

    def choose(self, n: int, count: int) -> Array:
        """int32 ``[count]``, different numbers below ``n``."""
        return jnp.asarray(self._host.choice(n, count, replace=False).astype(np.int32))

    def choose_rows(self, n: int, rows: int, count: int) -> Array:
        """int32 ``[rows, count]``, different numbers below ``n`` in a row, and in all while there are any left."""
        if rows * count <= n:
            return self.choose(n, rows * count).reshape(rows, count)
        if rows * n > LARGE:
            return jnp.argsort(jax.random.uniform(self._key(), (rows, n)), axis=1)[:, :count].astype(jnp.int32)
        return jnp.stack([self.choose(n, count) for _ in range(rows)])


@jax.jit
def _to_fp8(normal):
    return (64 * normal).clip(-448, 448).astype(jnp.float8_e4m3fn)


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    - `shape`: what tells it from the op's other cases.
    - `operand`: "fp8", "bf16" or "f32", what its matrix products multiply.
    - `shared`: ``source → arrays`` that all calls have in common, the donated pools first.
    - `varied`: ``source → arrays`` that differ from call to call.
    - `call`: ``(implementation, shared, varied) → outputs``, the op itself.
    - `error`: ``(shared, varied, outputs, rows) → number`` of numpy arrays, in the unit of `metric`, whose second part
      is its bound; of a donated pool, `shared` holds what was in it before.
    - `rows`: rows of the result, from which those checked are drawn.
    - `donated`: how many pools the op writes. One is the op's only output; more are the first of its outputs.
    - `refused`: implementation → why it is not run at this shape.
    - `peers`: by name, what else does the same work.
    """

    op: str
    shape: Mapping[str, int | str]
    operand: str
    cost: Cost
    shared: Callable[[Source], tuple]
    varied: Callable[[Source], tuple]
    call: Callable[[Any, Any, Any], Any]
    error: Callable[[Any, Any, Any, np.ndarray], float]
    metric: tuple[str, float]
    rows: int
    donated: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)
    peers: Mapping[str, Peer] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return label(self.shape)


def label(shape: Mapping[str, int | str]) -> str:
    """A shape in words, "T 64 S 8192"."""
    return " ".join(f"{name} {value}" for name, value in shape.items())
