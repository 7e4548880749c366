"""What SGLang misses where parts of it, or this project, are not installed: as a folder for PYTHONPATH."""

import importlib.metadata
import importlib.util
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def supply(folder: Path) -> list[str]:
    """Writes into ``folder`` what is missing here, and says what that was.

    - This project's entry points and version, where it runs from a checkout.
    - A stand-in for ``sgl_kernel`` where it can't be imported, and with it the platform that does without.
    """
    supplied = []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if not any(importlib.metadata.distributions(name=project["name"])):
        _distribution(folder, project["name"], project["version"], project["entry-points"])
        supplied.append(f"{project['name']}, from this checkout")
    if importlib.util.find_spec("sgl_kernel") is None:
        stand_in = folder / "sgl_kernel"
        stand_in.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("standin.py"), stand_in / "__init__.py")
        entry = {"sglang.srt.platforms": {"bench_engine": "bench.engine.gpu_platform:activate"}}
        _distribution(folder, "bench-engine", "0", entry)
        supplied.append("a stand-in for sgl_kernel, and a platform that does without it")
    return supplied


def _distribution(folder: Path, name: str, version: str, entry_points: dict[str, dict[str, str]]) -> None:
    """What ``importlib.metadata`` takes for an installed package."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
