"""What all ops share: which implementation runs, how it is compiled, and how arguments are refused."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Literal

import jax
import numpy as np
from beartype import beartype
from jax import Array
from jaxtyping import jaxtyped

from jax_mla import pallas_triton

Implementation = Literal["xla", "pallas", "reference"] | None

typed = jaxtyped(typechecker=beartype)
"""Checks shapes and dtypes of a public function's arguments against its annotations, at trace time under ``jit``."""


def choose(op: str, implementation: Implementation, interpret: bool) -> str:
    """The implementation that runs: the one named, else "pallas" on a GPU and "xla" on a CPU.

    Raises ``NotImplementedError`` where the one named can't run, and ``ValueError`` for ``interpret`` without "pallas".
    """
    if interpret and implementation != "pallas":
        raise ValueError(f"{op}: interpret=True expected implementation='pallas', got {implementation!r}")
    if implementation is None:
        return "pallas" if pallas_triton.target().is_gpu else "xla"
    if implementation == "pallas" and not interpret and not pallas_triton.target().is_gpu:
        raise NotImplementedError(
            f"{op}: implementation='pallas' expected a GPU, got platform 'cpu'; "
            "use implementation='xla', or interpret=True to run the kernel's Python on this machine"
        )
    return implementation


@cache
def _compiled(f: Callable, static: tuple, donate: tuple[int, ...]):
    return jax.jit(partial(f, **dict(static)), donate_argnums=donate)


def run(
    op: str,
    table: Mapping[str, Callable],
    implementation: Implementation,
    interpret: bool,
    make_config: Callable,
    config,
    arrays: tuple,
    static: dict,
    donate: tuple[int, ...] = (),
):
    """Calls the chosen function of ``table`` on ``arrays``, compiled once for each ``static``.

    The Pallas function also gets ``config``, made by ``make_config()`` where it is None, and ``interpret``.
    """
    name = choose(op, implementation, interpret)
    for x in arrays:
        if isinstance(x, jax.Array) and x.size == 0:
            raise ValueError(f"{op}: expected arrays that are not empty, got {x.dtype.name}{list(x.shape)}")
    if name == "pallas":
        static = static | {"config": make_config() if config is None else config, "interpret": interpret}
    elif config is not None:
        raise ValueError(f"{op}: config expected implementation='pallas', got {name!r}")
    with jax.named_scope(op):
        return _compiled(table[name], tuple(sorted(static.items())), donate)(*arrays)


def is_concrete(x: Array | np.ndarray) -> bool:
    """Whether ``x`` has values now, as outside of ``jit``."""
    return not isinstance(x, jax.core.Tracer)


def refuse_outside(op: str, name: str, x: Array | np.ndarray | None, low: int, high: int, what: str) -> None:
    """Raises ``ValueError`` if a value of ``x`` lies outside ``[low, high)``. Under ``jit`` there are none to see."""
    if x is None or not is_concrete(x) or x.size == 0:
        return
    values = np.asarray(x)  # numpy: under jit ``jnp`` would trace even a constant
    smallest, largest = int(values.min()), int(values.max())
    if smallest < low or largest >= high:
        raise ValueError(f"{op}: {name} expected values in [{low}, {high}) ({what}), got {smallest} to {largest}")


def refuse_unless(condition: bool, op: str, name: str, expected: str, got) -> None:
    """Raises ``ValueError`` that names the argument, what was expected and what came, unless ``condition``."""
    if not condition:
        raise ValueError(f"{op}: {name} expected {expected}, got {got}")
