"""The two lanes on which a function of JAX runs on torch's tensors.

A ``Function`` says once what it is: a function of arrays, in JAX, made of jax_mla's ops. Each lane takes its shapes
from the tensors that it is called with, and everything else from there.

- *jit*: through DLPack and ``jax.jit``, on JAX's own stream. Any function; on a CPU too. Costs the host 0.1 ms and more
  a call, and can't be captured in a graph.
- *stream*: compiled once by XLA for tensors of these shapes, kept on disk (``cache``), and launched on torch's stream
  (``launch``). Functions that compile to kernels and nothing else (``build``). It launches what XLA compiled.
"""

import inspect
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bridge.dtypes import DTYPES
from bridge.stream import cache as disk
from bridge.stream import driver as drivers
from bridge.stream.driver import Driver
from bridge.stream.launch import Launcher
from bridge.stream.program import Array, Program

logger = logging.getLogger("jax_mla")


@dataclass(frozen=True)
class Function:
    """- `name`: unique; what errors, the cache and profiles call it.
    - `make`: from static arguments, all plain values, the function of JAX arrays, which gives an array or a flat tuple.
      Called when something is compiled, and so the place to import JAX.
    - `arrays`: its parameters' names. - `written`: those that it writes in place, its first results in that order.
    - `results`: the names of the others.
    """

    name: str
    make: Callable[..., Callable]
    arrays: tuple[str, ...]
    results: tuple[str, ...]
    written: tuple[str, ...] = ()

    def __post_init__(self):
        if not self.name.isidentifier():
            raise ValueError(f"name: expected an identifier, got {self.name!r}")
        if not inspect.isfunction(self.make):  # whose text the cache can tell from another's
            raise TypeError(f"{self.name}: make: expected a function, got {type(self.make).__name__}")

    @property
    def donated(self) -> tuple[int, ...]:
        return tuple(self.arrays.index(name) for name in self.written)

    def program(self, arrays: tuple[Array, ...], arch: str, **static: Any) -> Program:
        """The program of arrays like ``arrays``: kept, or built and then kept."""
        hashed = disk.key(self, arrays, static, arch)
        program = disk.get_or(self.name, hashed, partial(self._build, arrays, arch, static))
        return self._check(program, arrays, f"; delete {disk.path_of(self.name, hashed)}")

    def _build(self, arrays: tuple[Array, ...], arch: str, static: dict[str, Any]) -> Program:
        from bridge.stream import build, triton  # which need JAX
        from jax_mla.pallas_triton import MoreThanKernels

        how = self.name, self.make(**static), arrays, arch, self.donated
        said = "jax_mla: compiling %s with %s for %s, %s, %s"
        if disk.compiler() == "triton":
            logger.info(said, self.name, "Triton", arch, _listed(arrays), static)
            try:
                return self._check(triton.build(*how), arrays)
            except MoreThanKernels as e:
                logger.warning("jax_mla: XLA compiles %s, although Triton was asked for: %s", self.name, e)
        logger.info(said, self.name, "XLA", arch, _listed(arrays), static)
        return self._check(build.build(*how), arrays)

    def _check(self, program: Program, arrays: tuple[Array, ...], advice: str = "") -> Program:
        wanted = self.name, arrays, (*self.donated, *[None] * len(self.results))
        got = program.name, program.parameters, tuple(x.parameter for x in program.results)
        if got != wanted:
            raise ValueError(f"{self.name}: expected a program of {_words(*wanted)}, got {_words(*got)}{advice}")
        return program


def _words(name: str, arrays: tuple[Array, ...], results: tuple[int | None, ...]) -> str:
    return f"{_listed(arrays)}, {name!r}, with results in {results}"


def arrays_of(function: Function, tensors: tuple[torch.Tensor, ...]) -> tuple[Array, ...]:
    """What ``tensors`` are. Raises ``ValueError`` for another number of them, and for dtypes that JAX doesn't have."""
    if len(tensors) != len(function.arrays):
        names = ", ".join(function.arrays)
        raise ValueError(f"{function.name}: expected {len(function.arrays)} tensors, {names}, got {len(tensors)}")
    for name, tensor in zip(function.arrays, tensors, strict=True):
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{function.name}: {name}: expected one of {sorted(DTYPES.values())}, got {tensor.dtype}")
    return tuple(Array(tuple(x.shape), DTYPES[x.dtype]) for x in tensors)


class Jitted:
    """``function`` on the jit lane, for tensors like ``arrays``."""

    def __init__(self, function: Function, arrays: tuple[Array, ...], compiled: Callable):
        self._function, self._arrays, self._compiled = function, arrays, compiled

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.bind(*tensors)()

    def bind(self, *tensors: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        """A call with these tensors, which are looked at now. Raises ``ValueError`` for those that can't be lent."""
        from bridge.dlpack import check

        function = self._function
        given = arrays_of(function, tensors)
        if given != self._arrays:
            raise ValueError(f"{function.name}: expected {_listed(self._arrays)}, got {_listed(given)}")
        for tensor, name in zip(tensors, function.arrays, strict=True):
            check(tensor, f"{function.name}: {name}")
        return partial(self._run, tensors)

    def _run(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        from bridge.dlpack import to_jax, to_torch

        function = self._function
        arrays = [to_jax(x, f"{function.name}: {n}") for x, n in zip(tensors, function.arrays, strict=True)]
        results = self._compiled(*arrays)
        results = results if isinstance(results, tuple) else (results,)
        if len(results) != len(function.written) + len(function.results):
            names = ", ".join((*function.written, *function.results))
            raise ValueError(f"{function.name}: expected it to give {names}, got {len(results)} arrays")
        given = tuple(to_torch(x, f"{function.name}: result {i}") for i, x in enumerate(results))
        inplace = [tensors[i] for i in function.donated]
        for name, was, now in zip(function.written, inplace, given, strict=False):
            if was.data_ptr() != now.data_ptr():  # a CPU's XLA writes into memory of its own
                raise RuntimeError(
                    f"{function.name}: {name}: expected to be written in place, got a result elsewhere; the jit lane "
                    "writes in place on GPUs only"
                )
        return (*inplace, *given[len(inplace) :])


def _listed(arrays: tuple[Array, ...]) -> str:
    return ", ".join(map(str, arrays))


class Jit:
    """The jit lane, wherever JAX computes."""

    name = "jit"

    def __init__(self):
        self._compiled: dict[tuple, Callable] = {}

    def __call__(self, function: Function, *tensors: torch.Tensor, **static: Any) -> tuple[torch.Tensor, ...]:
        """Those of the tensors that are written, and the results."""
        return self.launcher(function, arrays_of(function, tensors), **static)(*tensors)

    def launcher(self, function: Function, arrays: tuple[Array, ...], **static: Any) -> Jitted:
        """What runs ``function`` on tensors like ``arrays``."""
        import jax

        which = function, disk.plain(static)
        if which not in self._compiled:
            self._compiled[which] = jax.jit(function.make(**static), donate_argnums=function.donated)
        return Jitted(function, arrays, self._compiled[which])


class Stream:
    """The stream lane of one GPU. Keep it as long as graphs that its calls were captured in (``Launcher``)."""

    name = "stream"

    def __init__(self, driver: Driver, arch: str):
        self.driver, self.arch = driver, arch
        self._launchers: dict[tuple, Launcher] = {}

    @staticmethod
    def of(device: torch.device) -> "Stream":
        """The lane of ``device``. Raises ``ValueError`` for a chip that programs can't be built for."""
        driver, arch = drivers.for_device(device), drivers.arch_of(device)
        if arch not in drivers.ARCHS:
            raise ValueError(
                f"{device}: expected one of {', '.join(drivers.ARCHS)} on the stream lane, got {arch}; "
                f"{VARIABLE}=jit asks for the other lane"
            )
        return Stream(driver, arch)

    def __call__(self, function: Function, *tensors: torch.Tensor, out=None, **static: Any) -> tuple[torch.Tensor, ...]:
        """What ``Launcher`` gives. The first call with tensors of new shapes loads the program, and compiles it unless
        it is kept; during a capture that is an error."""
        return self.launcher(function, arrays_of(function, tensors), **static)(*tensors, out=out)

    def launcher(self, function: Function, arrays: tuple[Array, ...], **static: Any) -> Launcher:
        """What runs ``function`` on tensors like ``arrays``. Keep it where a call's few µs of looking it up count."""
        which = (function, arrays, disk.plain(static))
        found = self._launchers.get(which)
        if found is None:
            if self.driver.capturing():
                raise RuntimeError(
                    f"{function.name}: expected to be prepared for {_listed(arrays)}, {static} before a "
                    "graph is captured, got a first call during the capture: call it once before, or Stream.prepare"
                )
            program = function.program(arrays, self.arch, **static)
            found = self._launchers[which] = Launcher(program, self.driver, self.arch)
        return found

    def prepare(
        self, wanted: Iterable[tuple[Function, tuple[Array, ...], dict[str, Any]]], progress: bool = True
    ) -> None:
        """Has each of ``wanted``, a function, its arrays and its static arguments, ready to be launched: compiled,
        kept on disk, loaded. `progress`: a bar on stderr."""
        from rich.console import Console
        from rich.progress import track

        wanted = list(wanted)
        console = Console(stderr=True)
        for function, arrays, static in track(wanted, "jax_mla: kernels", console=console, disable=not progress):
            self.launcher(function, arrays, **static)


Lane = Jit | Stream

VARIABLE = "JAX_MLA_LANE"


def chosen(device_type: str) -> str:
    """The lane that serves tensors on "cpu" or "cuda": ``$JAX_MLA_LANE``, or "stream" on a GPU and "jit" on a CPU.

    Raises ``ValueError`` for a name that is no lane, and for "stream" on a CPU.
    """
    asked = os.environ.get(VARIABLE) or ("stream" if device_type == "cuda" else "jit")
    possible = ("stream", "jit") if device_type == "cuda" else ("jit",)
    if asked not in possible:
        raise ValueError(f"{VARIABLE}: expected {' or '.join(possible)} on {device_type!r}, got {asked!r}")
    return asked


def lane_for(device: torch.device) -> Lane:
    """A lane of ``chosen``'s name."""
    return Jit() if chosen(device.type) == "jit" else Stream.of(device)
