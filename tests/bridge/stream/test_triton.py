"""Programs by the installed Triton beside those by XLA, from the same kernels, without a GPU."""

from functools import partial

import jax.numpy as jnp
import pytest

import jax_mla
from bridge.stream import build, triton
from bridge.stream.lane import Function
from bridge.stream.program import Array, Program
from jax_mla.aot.chips import CHIPS
from jax_mla.layouts import kv_layout
from jax_mla.pallas_triton import MoreThanKernels
from tests.bridge.stream.test_ops import calls

KERNELS_ONLY = sorted(set(calls("e4m3fn")) - {"slots_of", "topk_prefill"})


def buffers(program: Program) -> list[list[tuple]]:
    """What each kernel's arguments are, apart from constants: parameters by number, and other memory by its size. Of
    several kernels it isn't compared which of the latter are results: XLA lets a result lie where a temporary was."""
    exact = ("parameter", "output") if len(program.launches) == 1 else ("parameter",)
    return [
        [(p.size, *((p.role, p.number) if p.role in exact else ())) for p in launch.pointers if p.role != "constant"]
        for launch in program.launches
    ]


@pytest.mark.parametrize("name", KERNELS_ONLY)
@pytest.mark.parametrize("arch", list(CHIPS))
def test_is_launched_as_xla_s(name, arch):
    """Two compilers and two ways to find out: what is launched how, and on what, must be the same."""
    function, arrays, static = calls(CHIPS[arch].fp8.name)[name]
    how = name, function.make(**static), arrays, arch, function.donated
    ours, theirs = triton.build(*how), build.build(*how)
    assert buffers(ours) == buffers(theirs)
    assert (ours.parameters, ours.results) == (theirs.parameters, theirs.results)
    for a, b in zip(ours.launches, theirs.launches, strict=True):
        assert (a.kernel.rstrip("_0123456789"), a.grid, a.threads, a.shared_bytes) == (
            *(b.kernel.rstrip("_0123456789"), b.grid, b.threads, b.shared_bytes),
        )
        assert a.kernel.encode() in ours.codes[a.code]
    assert set(ours.versions) == {"jax", "jaxlib", "triton"} and all(x.startswith(b"\x7fELF") for x in ours.codes)
    assert Program.from_bytes(ours.to_bytes()) == ours


@pytest.mark.parametrize("name", ["slots_of", "topk_prefill"])
def test_more_than_kernels_is_refused_by_name(name):
    function, arrays, static = calls("e4m3fn")[name]
    with pytest.raises(MoreThanKernels, match="expected kernels and nothing else, got .*stablehlo.gather"):
        triton.build(name, function.make(**static), arrays, "sm_90")


def test_what_is_not_donated_is_not_written():
    kv = kv_layout("fp8_576", "e4m3fn")
    arrays = Array((512, 576), "uint8"), Array((4,), "int32"), Array((4, 512), "bfloat16"), Array((4, 64), "bfloat16")
    write = partial(jax_mla.kv_write, layout=kv, implementation="pallas")
    with pytest.raises(ValueError, match=r"kv_write: expected parameters \[\] to be written in place, got \[0\]"):
        triton.build("kv_write", write, arrays, "sm_90")
    with pytest.raises(ValueError, match="kv_write: expected one of gfx942, gfx950, sm_90, got 'sm_80'"):
        triton.build("kv_write", write, arrays, "sm_80", (0,))


def test_results_without_memory_of_their_own_are_refused():
    x = (Array((8,), "float32"),)
    for f in (lambda x: x, lambda x: jnp.reshape(x, (2, 4)), lambda x: jnp.float32(3)):
        with pytest.raises(ValueError, match="f: expected each result in memory of its own, got buffers"):
            triton.build("f", f, x, "sm_90")


def test_it_is_asked_for_by_name_and_what_it_can_t_compile_is_named(monkeypatch, caplog, cache_folder):
    caplog.set_level("INFO", "jax_mla")
    function, arrays, static = calls("e4m3fn")["select"]
    by_xla = function.program(arrays, "sm_90", **static)
    monkeypatch.setenv("JAX_MLA_COMPILER", "triton")
    by_triton = function.program(arrays, "sm_90", **static)
    assert "triton" in by_triton.versions and "triton" not in by_xla.versions
    assert by_triton.parameters == by_xla.parameters
    assert len(list(cache_folder.iterdir())) == 2
    function, arrays, static = calls("e4m3fn")["slots_of"]
    assert "triton" not in function.program(arrays, "sm_90", **static).versions
    [warning] = [x.getMessage() for x in caplog.records if x.levelname == "WARNING"]
    assert warning.startswith("jax_mla: XLA compiles slots_of, although Triton was asked for: expected kernels and")
    monkeypatch.setenv("JAX_MLA_COMPILER", "gcc")
    with pytest.raises(ValueError, match="^JAX_MLA_COMPILER: expected xla or triton, got 'gcc'$"):
        Function("f", lambda: lambda x: x, ("x",), ("y",)).program((Array((8,), "float32"),), "sm_90")
