"""README.md keeps to its length, and its example runs as it stands, each op's lines by themselves too."""

import re
from pathlib import Path

import pytest

import jax_mla.ops

README = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
IMPORTS, NAMES, *OPS = EXAMPLE.split("\n\n")
OPS_OF_THE_PROJECT = sorted(x.name for x in Path(jax_mla.ops.__path__[0]).iterdir() if (x / "kernel.py").exists())
PREAMBLE = f"{IMPORTS}\n{NAMES}"


def lines_of_ops() -> dict[str, str]:
    """The example's lines by the op that they call; the preamble stands before each."""
    found = {}
    for lines in OPS:
        (op,) = [name for name in OPS_OF_THE_PROJECT if re.search(rf"\b{name}\(", lines)]
        found[op] = lines
    return found


def test_length():
    assert len(README.splitlines()) <= 180


def test_example(capsys):
    exec(compile(EXAMPLE, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == EXAMPLE.splitlines()[-1].rpartition("# ")[2]


def test_every_op_is_there_in_five_lines():
    assert sorted(lines_of_ops()) == sorted(OPS_OF_THE_PROJECT)
    for op, lines in lines_of_ops().items():
        assert len(lines.strip().splitlines()) <= 5, op


@pytest.mark.parametrize("op", OPS_OF_THE_PROJECT)
def test_lines_of_an_op_run_on_their_own(op):
    exec(compile(f"{PREAMBLE}\n{lines_of_ops()[op]}", "README.md", "exec"), {})


def test_commands_are_in_the_makefile():
    makefile = Path(__file__).parents[1].joinpath("Makefile").read_text(encoding="utf-8")
    commands = set(re.findall(r"\bmake ([a-z-]+)\b", README))
    assert commands and all(re.search(rf"^{command}:", makefile, re.MULTILINE) for command in commands)
