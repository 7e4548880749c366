"""XLA's compilers for ROCm and CUDA, on a machine that has neither: found, loaded, and asked.

They are the shared libraries of the wheels ``jax-rocm7-pjrt`` and ``jax-cuda13-pjrt``. A wheel that is installed where
JAX finds it makes JAX print an error on every start without its GPU, so ``.ci/setup`` puts them in a folder of their
own, ``aot`` in the virtual environment, which nobody but this module looks into; beside that they are found where
``pip install`` puts them.

ROCm's plugin asks the dynamic linker for libraries of ROCm, eight in 0.11.2, which its compiler does not use: LLVM, lld
and the device libraries lie in the plugin. Where they can't be loaded, stand-ins are built with ``cc`` on first use, in
``$XDG_CACHE_HOME/jax-mla`` (``~/.cache/jax-mla``): every function that the plugin wants, each of which returns
``hipErrorNoDevice``. They are loaded before the plugin, and the linker matches the plugin's wishes with their names.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import jax
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

from jax_mla import pallas_triton
from jax_mla.aot.chips import Chip

WHEELS = {
    "rocm": ("jax-rocm7-pjrt", "jax_plugins/xla_rocm7/xla_rocm_plugin.so"),
    "cuda": ("jax-cuda13-pjrt", "jax_plugins/xla_cuda13/xla_cuda_plugin.so"),
}
"""Platform → the wheel and where the library lies in it."""

FOLDER = Path(sys.prefix, "aot")
"""Where ``.ci/setup`` puts the wheels."""

HIP_ERROR_NO_DEVICE = 100


class Unavailable(Exception):
    """A compiler that this machine lacks; says what to do about it."""


def library(platform: str) -> Path:
    """The plugin of ``platform``, of this JAX's version.

    Raises ``Unavailable`` where there is none or another version's: they would fail late and unclearly.
    """
    wheel, path = WHEELS[platform]
    install = f"uv pip install --no-deps --target {FOLDER} {wheel}=={jax.__version__}"
    for place in (FOLDER, *map(Path, sys.path)):
        if not (place / path).is_file():
            continue
        versions = {d.version for d in metadata.distributions(name=wheel, path=[str(place)])}
        if versions != {jax.__version__}:
            got = ", ".join(sorted(versions)) or "one of no version"
            raise Unavailable(f"{wheel}: expected {jax.__version__}, JAX's version, got {got} in {place}; {install}")
        return place / path
    raise Unavailable(f"{wheel}: expected in {FOLDER} or on Python's path, found in neither; {install}")


@functools.cache
def device(chip: Chip) -> jax.Device:
    """A device to compile for, with ``pallas_triton.compile_only``. Raises ``Unavailable``."""
    platform = chip.target.platform
    plugin = library(platform)
    if platform == "rocm":
        load_stand_ins(plugin)
    (only,) = pallas_triton.compile_only_devices(platform, str(plugin), chip.target_config)
    return only


@functools.cache
def load_stand_ins(plugin: Path) -> None:
    """Makes ``plugin`` loadable where ROCm is not installed. Raises ``Unavailable`` without a ``cc`` that works."""
    needed, symbols = wanted(plugin)
    missing = [name for name in needed if not _loads(name)]
    if missing:
        folder = stand_ins(missing, symbols)
        for name in missing:
            ctypes.CDLL(str(folder / name))


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def wanted(plugin: Path) -> tuple[list[str], list[str]]:
    """The libraries that ``plugin`` needs beside the C and C++ ones, and the functions that it wants of them."""
    with plugin.open("rb") as f:
        elf = ELFFile(f)
        dynamic, symbols = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".dynsym")
        versions = elf.get_section_by_name(".gnu.version")
        files = elf.get_section_by_name(".gnu.version_r")
        assert isinstance(dynamic, DynamicSection) and isinstance(symbols, SymbolTableSection)
        assert isinstance(versions, GNUVerSymSection) and isinstance(files, GNUVerNeedSection)
        from_system = set()  # version numbers of symbols that libc, libstdc++ and the like provide
        needed = [getattr(tag, "needed") for tag in dynamic.iter_tags("DT_NEEDED")]  # noqa: B009
        ours = [name for name in needed if not name.startswith(SYSTEM)]
        for file, entries in files.iter_versions():
            if file.name not in ours:
                from_system |= {entry["vna_other"] for entry in entries}
        names = [
            symbol.name
            for i, symbol in enumerate(symbols.iter_symbols())
            if symbol["st_shndx"] == "SHN_UNDEF"
            and symbol["st_info"]["bind"] == "STB_GLOBAL"
            and versions.get_symbol(i)["ndx"] not in from_system
        ]
    return ours, sorted(set(names))


SYSTEM = ("libc.", "libm.", "libdl.", "librt.", "libpthread.", "libstdc++.", "libgcc_s.", "ld-linux")


def stand_ins(names: list[str], symbols: list[str]) -> Path:
    """A folder with libraries called ``names``, the first of which has ``symbols``; built unless it is there."""
    source = "".join(f"int {s}(void) {{ return {HIP_ERROR_NO_DEVICE}; }}\n" for s in symbols)
    key = hashlib.sha256("\n".join([*names, source]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jax-mla")
    folder = cache / f"rocm-stand-ins-{key}"
    if folder.is_dir():
        return folder
    cc = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if cc is None:
        raise Unavailable("ROCm's stand-ins need a C compiler, found no cc: apt-get install gcc libc6-dev")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        build = Path(scratch, "build")
        build.mkdir()
        for i, name in enumerate(names):
            code = Path(scratch, "code.c")
            code.write_text(source if i == 0 else "typedef int nothing;\n")
            command = [cc, "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-o", str(build / name), str(code)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise Unavailable(f"stand-ins for ROCm's libraries: {' '.join(command)}: {done.stderr.strip()}")
        try:
            build.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder
