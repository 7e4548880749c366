"""README.md keeps to its length, and its example runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")


def test_length():
    assert len(README.splitlines()) <= 160


def test_example(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(example.splitlines()) <= 20
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == example.splitlines()[-1].rpartition("# ")[2]


def test_commands_are_in_the_makefile():
    makefile = Path(__file__).parents[1].joinpath("Makefile").read_text(encoding="utf-8")
    commands = set(re.findall(r"\bmake ([a-z-]+)\b", README))
    assert commands and all(re.search(rf"^{command}:", makefile, re.MULTILINE) for command in commands)
