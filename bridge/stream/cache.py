"""Programs on disk, under a hash of everything that decides about them, so that a server starts without compiling.

The hash is of the function's name and static arguments, its arrays, the chip, and the text of all of ``jax_mla``; the
compiler's versions stand in the file, and a file of other versions than those installed is built anew. So looking up
needs neither JAX nor a compiler, and a folder that was filled elsewhere serves.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from bridge.stream.program import FORMAT, Array, Program

logger = logging.getLogger("jax_mla")

VARIABLE = "JAX_MLA_CACHE"
SUFFIX = ".program"


def folder() -> Path:
    """``$JAX_MLA_CACHE``, or ``jax-mla/programs`` in ``$XDG_CACHE_HOME`` (``~/.cache``)."""
    if own := os.environ.get(VARIABLE):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jax-mla", "programs")


@cache
def sources() -> str:
    """A hash of the files of ``jax_mla``, which isn't imported for it."""
    spec = importlib.util.find_spec("jax_mla")
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key(name: str, arrays: tuple[Array, ...], static: dict[str, Any], arch: str) -> str:
    """The hash; raises ``TypeError`` for a static argument that isn't plain."""
    for argument, value in static.items():
        if not isinstance(value, str | int | float | bool | None):
            raise TypeError(f"{name}: {argument}: expected text, a number, a bool or None, got {type(value).__name__}")
    what = dict(
        format=FORMAT,
        name=name,
        arrays=[str(x) for x in arrays],
        static={k: repr(v) for k, v in sorted(static.items())},
        arch=arch,
        sources=sources(),
    )
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def path_of(name: str, hashed: str) -> Path:
    return folder() / f"{name}-{hashed}{SUFFIX}"


def get(name: str, hashed: str) -> Program | None:
    """What is kept, if it was made by the versions that are installed, as far as they are.

    Raises ``ValueError``, which names the file, for one that isn't a program.
    """
    path = path_of(name, hashed)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
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
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as scratch:
        scratch.write(program.to_bytes())
    Path(scratch.name).replace(path)
    return path


def get_or(name: str, hashed: str, build: Callable[[], Program]) -> Program:
    """What is kept, else what ``build`` gives, kept from then on."""
    program = get(name, hashed)
    if program is None:
        program = build()
        put(name, hashed, program)
    return program


def kept(arch: str | None = None) -> list[Program]:
    """All programs in the folder, of ``arch``; files that aren't any are named in the log and left out."""
    programs = []
    for path in sorted(folder().glob(f"*{SUFFIX}")):
        try:
            program = Program.from_bytes(path.read_bytes())
        except ValueError as e:
            logger.warning("jax_mla: %s: %s", path, e)
            continue
        if arch in (None, program.arch):
            programs.append(program)
    return programs


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
