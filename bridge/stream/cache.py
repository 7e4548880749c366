"""Programs on disk, under a hash of what decides about them, so that a server starts without compiling.

The hash is of the function: its name, arrays, results and static arguments, where it is written down and that file; of
the chip and the compiler; of the text of ``jax_mla``, ``bridge.ops`` and this package; of XLA_FLAGS and those of JAX's
settings that decide. The compiler's versions stand in the file, and a file of other versions than those installed is
built anew. So looking up needs neither JAX nor a compiler, and a folder that was filled elsewhere serves.
"""

import fcntl
import hashlib
import importlib.util
import json
import logging
import marshal
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from bridge.doctor import installed
from bridge.stream.program import FORMAT, Array, Program

logger = logging.getLogger("jax_mla")

VARIABLE = "JAX_MLA_CACHE"
SUFFIX = ".program"

COMPILER = "JAX_MLA_COMPILER"


def folder() -> Path:
    """``$JAX_MLA_CACHE``, or ``jax-mla/programs`` in ``$XDG_CACHE_HOME`` (``~/.cache``)."""
    if own := os.environ.get(VARIABLE):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jax-mla", "programs")


def _files() -> list[Path]:
    """Those of ``jax_mla``, which isn't imported for it, and those here that make programs."""
    spec = importlib.util.find_spec("jax_mla")
    assert spec is not None and spec.submodule_search_locations
    root, here = Path(spec.submodule_search_locations[0]), Path(__file__).parent
    return sorted([*root.rglob("*.py"), *here.glob("*.py"), here.parent / "ops.py"])


@cache
def sources() -> str:
    """A hash of ``_files``."""
    digest = hashlib.sha256()
    for path in _files():
        digest.update(f"{path.parent.name}/{path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _started() -> float:
    """When this process started, in seconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    (boot,) = (line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


def changed(files: list[Path] | None = None) -> bool:
    """Whether one of ``_files`` is newer than this process, which may then run what was there before."""
    return max(path.stat().st_mtime for path in files or _files()) > _started() + 1  # the kernel tells whole seconds


@cache
def _text_of(code) -> str:
    """A hash of the file that ``code`` is from; of itself, where there is none, as in a notebook."""
    file = Path(code.co_filename)
    return hashlib.sha256(file.read_bytes() if file.is_file() else marshal.dumps(code)).hexdigest()


def compiler() -> str:
    """What compiles programs: ``$JAX_MLA_COMPILER``, "xla" if it is not set; raises ``ValueError`` for another name."""
    name = os.environ.get(COMPILER) or "xla"
    if name not in ("xla", "triton"):
        raise ValueError(f"{COMPILER}: expected xla or triton, got {name!r}")
    return name


def key(function, arrays: tuple[Array, ...], static: dict[str, Any], arch: str) -> str:
    """The hash of a ``lane.Function`` of ``arrays``; raises ``TypeError`` for a static argument that isn't plain."""
    for argument, value in static.items():
        if not isinstance(value, str | int | float | bool):
            raise TypeError(
                f"{function.name}: {argument}: expected text, a number or a bool, got {type(value).__name__}"
            )
    code = function.make.__code__
    what = dict(
        format=FORMAT,
        name=function.name,
        make=[function.make.__qualname__, code.co_firstlineno, _text_of(code)],
        takes=[function.arrays, function.written, function.results],
        arrays=[str(x) for x in arrays],
        static=plain(static),
        arch=arch,
        compiler=compiler(),
        sources=sources(),
        flags=os.environ.get("XLA_FLAGS", ""),
        settings=[_setting("jax_default_matmul_precision", None), _setting("jax_enable_x64", False)],
    )
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def _setting(name: str, default: Any) -> str:
    """JAX's, or what JAX would have where it isn't imported."""
    jax = sys.modules.get("jax")
    value = getattr(jax.config, name) if jax else os.environ.get(name.upper()) or default
    return str(value).lower().replace("1", "true") if isinstance(default, bool) else str(value)


def plain(static: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Static arguments so that they can be told apart: True, 1 and 1.0 are equal, and so are 0.0 and -0.0."""
    return tuple((name, repr(value)) for name, value in sorted(static.items()))


def path_of(name: str, hashed: str) -> Path:
    return folder() / f"{name}-{hashed}{SUFFIX}"


def get(name: str, hashed: str) -> Program | None:
    """What is kept, if it was made by the versions that are installed, as far as they are.

    Raises ``ValueError``, which names the file, for one that isn't a program, and ``OSError`` for one that can't be
    read.
    """
    path = path_of(name, hashed)
    if not path.exists():
        return None
    data = path.read_bytes()
    try:
        program = Program.from_bytes(data)
    except ValueError as e:
        raise ValueError(f"{path}: {e}; delete it") from e
    for package, version in program.versions.items():
        found = installed(package)
        if found is not None and found != version:
            logger.info(
                "jax_mla: %s was built by %s %s, %s is installed: building it anew", path, package, version, found
            )
            return None
    return program


def put(name: str, hashed: str, program: Program) -> Path:
    """Keeps ``program``; a reader sees all of it or nothing."""
    path = path_of(name, hashed)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        scratch.write_bytes(program.to_bytes())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def get_or(name: str, hashed: str, build: Callable[[], Program]) -> Program:
    """What is kept, else what ``build`` gives, kept from then on. Of several processes one builds, the others wait.

    What can't be kept is built all the same, and the log says why: a folder that can't be written, and sources that
    were changed while this process ran, under whose hash something else would lie.
    """
    program = get(name, hashed)
    if program is not None:
        return program
    with _alone(name, hashed):
        program = get(name, hashed)
        if program is not None:
            return program
        program = build()
        if changed():
            logger.warning("jax_mla: %s is not kept: its sources were changed while this process ran", name)
            return program
        try:
            put(name, hashed, program)
        except OSError as e:
            logger.warning("jax_mla: %s is not kept: %s; %s says where programs are kept", name, e, VARIABLE)
    return program


@contextmanager
def _alone(name: str, hashed: str) -> Generator[None]:
    """One process at a time, where the folder can be written."""
    path = path_of(name, hashed).with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError:  # ``put`` says so
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def kept(arch: str | None = None) -> list[Program]:
    """All programs in the folder, of ``arch``; files that aren't any are named in the log and left out."""
    programs = []
    for path in sorted(folder().glob(f"*{SUFFIX}")):
        try:
            program = Program.from_bytes(path.read_bytes())
        except (ValueError, OSError) as e:
            logger.warning("jax_mla: %s: %s", path, e)
            continue
        if arch in (None, program.arch):
            programs.append(program)
    return programs
