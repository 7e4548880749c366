"""A JAX function as a ``Program``: compiled by XLA for a chip that need not be there, and taken out of its executable.

It needs JAX, on any platform: no client of a GPU is made.
"""

from collections.abc import Callable, Sequence
from importlib.metadata import version

import jax

from bridge.stream.program import Array, Launch, Pointer, Program, Result, array_of
from jax_mla.aot import compiler, plugins
from jax_mla.aot.chips import CHIPS, Chip
from jax_mla.aot.executable import Executable
from jax_mla.pallas_triton import lowering_for


def build(
    name: str, function: Callable, parameters: Sequence[Array], arch: str, donated: Sequence[int] = ()
) -> Program:
    """``function`` of arrays like ``parameters``, compiled for ``arch``.

    - `function`: gives an array or a flat tuple of them. Those `donated` come back as results, written in place; which
      result that is, XLA says.
    - `arch`: one of ``jax_mla.aot.chips.CHIPS``.

    Most of what XLA makes of a function are kernels: Pallas' as they are, and what stands around them, fused. Raises
    ``ValueError`` for a function with more than kernels (copies, calls of libraries, loops), for a donated parameter
    that no result is written into, and for an executable that can't be read; ``plugins.Unavailable`` without the
    compiler; and what JAX and XLA raise.
    """
    chip, arguments = of_chip(name, parameters, arch)
    executable = compiler.build(function, *arguments, chip=chip, donate=donated)
    return of_executable(name, executable, parameters, results_of(name, function, arguments, chip), arch, donated)


def of_chip(name: str, parameters: Sequence[Array], arch: str) -> tuple[Chip, list[jax.ShapeDtypeStruct]]:
    """The chip called ``arch``, and ``parameters`` as JAX has them. Raises ``ValueError`` for a chip that it isn't."""
    if arch not in CHIPS:
        raise ValueError(f"{name}: expected one of {', '.join(CHIPS)}, got {arch!r}")
    return CHIPS[arch], [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in parameters]


def results_of(name: str, function: Callable, arguments: Sequence[jax.ShapeDtypeStruct], chip: Chip) -> list[Array]:
    """What ``function`` gives on ``chip``."""
    with lowering_for(chip.target):
        return [array_of(name, x) for x in jax.tree.leaves(jax.eval_shape(function, *arguments))]


def of_executable(
    name: str,
    executable: Executable,
    parameters: Sequence[Array],
    results: Sequence[Array],
    arch: str,
    donated: Sequence[int] = (),
) -> Program:
    """The same, of a function that is compiled already."""
    if executable.arch.split(":")[0] != arch:
        raise ValueError(f"{name}: expected code for {arch}, got {executable.arch}")
    if executable.others:
        raise ValueError(
            f"{name}: expected kernels and nothing else, got {', '.join(executable.others)}; copies, calls of "
            "libraries and loops that XLA runs can't be launched without it"
        )
    if len(executable.outputs) != len(results):
        raise ValueError(f"{name}: expected {len(results)} results, got {len(executable.outputs)}")
    if len(set(executable.outputs)) != len(results):
        raise ValueError(f"{name}: expected each result in memory of its own, got {executable.outputs}")
    inplace = {number for role, number in executable.outputs if role == "parameter"}
    if inplace != set(donated):
        raise ValueError(f"{name}: expected parameters {sorted(donated)} to be written in place, got {sorted(inplace)}")
    codes: list[bytes] = []
    launches = []
    temporaries, constants = sorted(executable.temporaries), sorted(executable.constants)
    places = {"temporary": temporaries, "constant": constants}
    for kernel in executable.kernels:
        if kernel.zeroed:
            raise ValueError(f"{name}: kernel {kernel.name!r} wants zeros in its arguments {kernel.zeroed}: not served")
        if kernel.code not in codes:
            codes.append(kernel.code)
        pointers = [
            Pointer(a.role, places[a.role].index(a.number) if a.role in places else a.number, a.offset, a.size)
            for a in kernel.arguments
        ]
        code = codes.index(kernel.code)
        launches.append(Launch(kernel.name, code, kernel.grid, kernel.threads, kernel.shared_bytes, tuple(pointers)))
    return Program(
        name=name,
        arch=arch,
        versions=versions(arch),
        parameters=tuple(parameters),
        results=tuple(
            Result(array, number if role == "parameter" else None)
            for array, (role, number) in zip(results, executable.outputs, strict=True)
        ),
        launches=tuple(launches),
        codes=tuple(codes),
        constants=tuple(executable.constants[i] for i in constants),
        temporaries=tuple(executable.temporaries[i] for i in temporaries),
    )


def versions(arch: str) -> dict[str, str]:
    """What decides about the machine code, beside the function: JAX, and the plugin that has XLA's compiler."""
    wheel, _ = plugins.WHEELS[CHIPS[arch].target.platform]
    return {"jax": version("jax"), "jaxlib": version("jaxlib"), wheel: version("jax")}  # plugins.library says so
