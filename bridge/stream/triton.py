"""A JAX function as a ``Program``, by the installed Triton: ``JAX_MLA_COMPILER=triton``.

Pallas' Triton IR, as XLA gets it, in the hands of another Triton: for a kernel that XLA's gets wrong, and to compare
the two. It computes the same, not bit for bit. It compiles kernels only, so the functions with more in them (of
``bridge.ops``, ``slots_of`` and ``topk_prefill``) stay XLA's; ``lane`` says in the log which. It needs JAX, on any
platform, and no GPU.
"""

import re
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bridge.stream.build import of_chip, results_of
from bridge.stream.program import Array, Launch, Pointer, Program, Result, Role
from jax_mla.aot.chips import Chip
from jax_mla.pallas_triton import Kernel, kernels_of

NOTHING = bytes(16)
"""What Triton's own parameters behind ours, memory that our kernels use none of, point to."""


def build(
    name: str, function: Callable, parameters: Sequence[Array], arch: str, donated: Sequence[int] = ()
) -> Program:
    """As ``bridge.stream.build.build``. Raises ``pallas_triton.MoreThanKernels``; ``ValueError`` for results that are
    no memory of their own and no donated parameter; and what Triton raises."""
    chip, arguments = of_chip(name, parameters, arch)
    lowered = kernels_of(function, *arguments, for_target=chip.target)
    shapes = results_of(name, function, arguments, chip)
    inplace = {x for kernel in lowered.kernels for x in kernel.outputs if x < len(parameters)}
    if inplace != set(donated):
        raise ValueError(f"{name}: expected parameters {sorted(donated)} to be written in place, got {sorted(inplace)}")
    own = [x for x in lowered.results if x >= len(parameters) and x not in lowered.constants]
    if len(set(lowered.results)) != len(lowered.results) or len(own) + len(inplace) != len(lowered.results):
        raise ValueError(f"{name}: expected each result in memory of its own, got buffers {lowered.results}")

    constants = [*lowered.constants.values(), NOTHING]
    places: dict[int, tuple[Role, int]] = {number: ("constant", i) for i, number in enumerate(lowered.constants)}
    places |= {number: ("output", i) for i, number in enumerate(lowered.results) if number in own}
    temporaries = []
    for number in range(len(parameters), len(lowered.sizes)):
        if number not in places:
            places[number] = "temporary", len(temporaries)
            temporaries.append(lowered.sizes[number])
    places |= {number: ("parameter", number) for number in range(len(parameters))}

    codes, launches = [], []
    for kernel in lowered.kernels:
        code, threads, shared, count = _compile(name, kernel, chip, arch)
        if code not in codes:
            codes.append(code)
        numbers = (*kernel.inputs, *kernel.outputs)
        pointers = [Pointer(*places[x], 0, lowered.sizes[x]) for x in numbers]
        pointers += [Pointer("constant", len(constants) - 1, 0, len(NOTHING))] * (count - len(numbers))
        launches.append(Launch(kernel.name, codes.index(code), kernel.grid, (threads, 1, 1), shared, tuple(pointers)))
    return Program(
        name=name,
        arch=arch,
        versions={package: version(package) for package in ("jax", "jaxlib", "triton")},
        parameters=tuple(parameters),
        results=tuple(
            Result(x, number if number < len(parameters) else None)
            for x, number in zip(shapes, lowered.results, strict=True)
        ),
        launches=tuple(launches),
        codes=tuple(codes),
        constants=tuple(constants),
        temporaries=tuple(temporaries),
    )


def _compile(name: str, kernel: Kernel, chip: Chip, arch: str) -> tuple[bytes, int, int, int]:
    """Machine code, threads, bytes of shared memory, and how many parameters it takes. Raises ``ValueError`` for a
    kernel that wants more than to be launched with pointers."""
    import triton
    from triton.backends.compiler import GPUTarget

    cuda = chip.target.platform == "cuda"
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), chip.warp) if cuda else GPUTarget("hip", arch, chip.warp)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, f"{kernel.name}.ttir")
        source.write_text(kernel.ir)
        options = dict(num_warps=kernel.num_warps, num_stages=kernel.num_stages)
        compiled: Any = triton.compile(str(source), target=target, options=options)
    about = compiled.metadata
    for more in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "tmem_size"):
        if getattr(about, more, 0):
            raise ValueError(f"{name}: kernel {kernel.name!r}: expected no {more}, got {getattr(about, more)}")
    if about.num_ctas != 1 or about.name != kernel.name:
        raise ValueError(f"{name}: expected {kernel.name!r} in one block, got {about.name!r} in {about.num_ctas}")
    text = compiled.asm["ptx" if cuda else "amdgcn"]
    kinds = re.findall(rf"\.param \.(\w+) [^\n]*{kernel.name}_param_\d+" if cuda else r"\.value_kind: +(\w+)", text)
    count = len(kernel.inputs) + len(kernel.outputs)
    if len(kinds) < count or set(kinds) != {"u64" if cuda else "global_buffer"}:
        raise ValueError(f"{name}: kernel {kernel.name!r}: expected {count} pointers and perhaps more, got {kinds}")
    code = compiled.asm["cubin" if cuda else "hsaco"]
    return code, about.num_warps * about.warp_size, about.shared, len(kinds)
