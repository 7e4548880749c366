"""``pip install .`` alone is enough for every op: README's lines run where only the wheel is, and what it requires.

Without a network: the wheel is built here, and the distributions that its metadata names, and theirs, are linked from
this environment into one that has nothing else.
"""

import importlib.metadata as metadata
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_readme import PREAMBLE, lines_of_ops

ROOT = Path(__file__).parents[1]
ABSENT = ("torch", "sglang", "flax", "optax", "triton", "transformers", "safetensors", "pytest", "rich")


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(names: list[str]) -> dict[str, metadata.Distribution]:
    """The distributions called ``names``, and all that they require without an extra, by name."""
    found, todo = {}, [normalised(name) for name in names]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        for text in found[name].requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(normalised(requirement.name))
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of an environment that has this project's wheel and what it requires, and nothing else."""
    at = tmp_path_factory.mktemp("plain")
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(at)], cwd=ROOT, check=True, capture_output=True)
    [wheel] = at.glob("*.whl")
    venv.create(at / "venv", with_pip=False, symlinks=True)
    [site] = (at / "venv").glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        [declared] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        requires = metadata.Distribution.at(site / Path(declared).parent).requires or []
    plain = [Requirement(x) for x in requires if "extra ==" not in x]
    for distribution in required([x.name for x in plain]).values():
        for top in {Path(str(f)).parts[0] for f in distribution.files or () if ".." not in Path(str(f)).parts}:
            link = site / top
            if top != "__pycache__" and not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    return at / "venv" / "bin" / "python"


def run(python: Path, code: str) -> str:
    """What ``code`` prints, run away from the checkout."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(
        [python, "-c", code], cwd=python.parent, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_environment_lacks_everything_else(python):
    code = "import importlib.util, sys; print([x for x in sys.argv[1:] if importlib.util.find_spec(x)])"
    code = code.replace("sys.argv[1:]", repr(ABSENT))
    assert run(python, code).strip() == "[]"
    assert str(python.parent.parent) in run(python, "import jax_mla; print(jax_mla.__file__)")


def test_every_op_runs_in_it(python):
    script = "\n".join(f"{PREAMBLE}\n{code}\nprint('ran', {name!r})" for name, code in lines_of_ops().items())
    script += "\nimport sys; assert not set(sys.modules) & {'torch', 'flax', 'sglang'}"
    assert re.findall(r"^ran (\w+)$", run(python, script), re.MULTILINE) == list(lines_of_ops())


def test_modules_say_which_extra_they_need(python):
    code = "try:\n    import jax_mla.nn\nexcept ImportError as e:\n    print(e)"
    assert "pip install 'jax-mla[nn]'" in run(python, code)
