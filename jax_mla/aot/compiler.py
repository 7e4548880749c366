"""Compiles a function for a chip that isn't there, and reads its kernels."""

from collections.abc import Callable, Sequence

from jax_mla import pallas_triton
from jax_mla.aot import code, executable, plugins
from jax_mla.aot.chips import Chip
from jax_mla.aot.code import Code
from jax_mla.aot.executable import Executable, Kernel


def build(f: Callable, *args, chip: Chip, donate: Sequence[int] = ()) -> Executable:
    """``f`` compiled for ``chip`` at the shapes of ``args`` (``jax.ShapeDtypeStruct``, arrays or None), those in
    ``donate`` donated.

    Raises ``plugins.Unavailable`` where the compiler is not installed, and what JAX and XLA raise.
    """
    runtime = pallas_triton.compile_only(f, *args, device=plugins.device(chip), donate=donate).runtime_executable()
    assert runtime is not None
    return executable.read(runtime.serialize())


def codes(built: Executable) -> list[tuple[Kernel, Code]]:
    """Each kernel of ``built`` with its machine code. Raises ``ValueError`` for code that can't be decoded."""
    return [(kernel, code.read(kernel.code, kernel.name)) for kernel in built.kernels]


def inspect(f: Callable, *args, chip: Chip, donate: Sequence[int] = ()) -> list[tuple[Kernel, Code]]:
    """The kernels of ``build``, with ``codes``."""
    return codes(build(f, *args, chip=chip, donate=donate))
