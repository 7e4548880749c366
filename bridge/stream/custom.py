"""Functions as operators of torch's, which ``torch.compile`` and graphs see through: ``torch.ops.jax_mla.<name>``.

``operators()`` registers all of ``bridge.ops``. Their fakes, which say what results are like, ask JAX.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from bridge.stream.lane import Function, Lane, arrays_of, lane_for
from bridge.stream.launch import TORCH_DTYPES

TYPES = {str: "str", int: "int", float: "float", bool: "bool"}
"""A static argument's annotation → torch's name of its type."""


def schema_of(function: Function) -> str:
    """What torch is told of it: arrays by position, those that are written marked, static arguments by name.

    Raises ``TypeError`` for a static argument that isn't annotated with one of ``TYPES``.
    """
    arguments = [
        f"Tensor({chr(97 + function.written.index(name))}!) {name}" if name in function.written else f"Tensor {name}"
        for name in function.arrays
    ]
    static = []
    for name, parameter in inspect.signature(function.make).parameters.items():
        if parameter.annotation not in TYPES:
            expected = "an annotation of str, int, float or bool"
            raise TypeError(f"{function.name}: {name}: expected {expected}, got {parameter.annotation}")
        if parameter.default is not parameter.empty:
            raise TypeError(f"{function.name}: {name}: expected no default, got {parameter.default!r}")
        static.append(f"{TYPES[parameter.annotation]} {name}")
    star = ["*", *static] if static else []
    results = ", ".join(["Tensor"] * len(function.results))
    return f"({', '.join(arguments + star)}) -> ({results})"


class ByDevice:
    """The lane that serves the device of a call's tensors (``lane_for``), made at the first call there."""

    def __init__(self):
        self._lanes: dict[torch.device, Lane] = {}

    def __call__(self, function: Function, *tensors: torch.Tensor, **static: Any) -> tuple[torch.Tensor, ...]:
        device = tensors[0].device
        if device not in self._lanes:
            self._lanes[device] = lane_for(device)
        return self._lanes[device](function, *tensors, **static)


@cache
def operators() -> dict[str, Any]:
    """All of ``bridge.ops.FUNCTIONS`` as ``torch.ops.jax_mla.<name>``, by name; registered by the first call. They take
    and write what the functions do; on a CPU, where the jit lane can't write in place, those that write raise."""
    from bridge.ops import FUNCTIONS

    lane = ByDevice()
    return {function.name: register(function, lane) for function in FUNCTIONS}


def register(function: Function, lane: Callable[..., tuple[torch.Tensor, ...]]) -> Any:
    """``torch.ops.jax_mla.<name>``, which runs ``function`` on ``lane``. It gives the results that are not written in
    place, as torch wants operators that write.

    Raises ``ValueError`` for a name that has been registered: torch would replace the operator without a word.
    """
    if function.name in _registered:
        raise ValueError(f"{function.name}: expected an operator that isn't registered yet, got one that is")
    _registered.add(function.name)
    inplace = len(function.written)

    def run(*tensors: torch.Tensor, **static: Any):
        return _as_torch(lane(function, *tensors, **static)[inplace:])

    def fake(*tensors: torch.Tensor, **static: Any):
        return _as_torch(empty_results(function, tensors, static)[inplace:])

    operator = torch.library.custom_op(
        f"jax_mla::{function.name}", run, mutates_args=function.written, schema=schema_of(function)
    )
    operator.register_fake(fake)
    return operator


_registered: set[str] = set()


def _as_torch(results: Sequence[torch.Tensor]):
    return None if not results else results[0] if len(results) == 1 else tuple(results)


def empty_results(function: Function, tensors: tuple[torch.Tensor, ...], static: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors like the results, by JAX's own rules, without computing any."""
    import jax

    from jax_mla.pallas_triton import H200, lowering_for

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays_of(function, tensors)]
    with lowering_for(H200):  # any card: shapes are the same on all, and JAX needn't look for one
        results = jax.tree.leaves(jax.eval_shape(function.make(**static), *shapes))
    for x in results:
        if x.dtype.name not in TORCH_DTYPES:
            raise ValueError(f"{function.name}: expected results of {sorted(TORCH_DTYPES)}, got {x.dtype.name}")
    return [torch.empty(x.shape, dtype=TORCH_DTYPES[x.dtype.name], device=tensors[0].device) for x in results]
