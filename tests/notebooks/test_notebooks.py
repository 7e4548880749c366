"""Each notebook runs from top to bottom, and its two files say the same.

To bring an ``.ipynb`` up to date with its ``.py``: ``python -m notebooks --update``.
"""

import pytest

from notebooks.__main__ import HERE, execute, in_sync, sources


@pytest.fixture(params=sources(), ids=lambda path: path.stem)
def source(request):
    return request.param


def test_there_are_notebooks():
    assert sources()


@pytest.mark.timeout(300)
def test_runs(source):
    notebook = execute(source)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


def test_the_two_files_are_in_sync(source):
    assert in_sync(source), f"{source.name} has changed: run python -m notebooks --update"


def test_kept_outputs_are_of_a_whole_run(source):
    text = source.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert '"output_type": "display_data"' in text
    assert '"output_type": "error"' not in text
    assert "/site-packages/" not in text  # no paths of the machine it ran on


def test_each_ipynb_has_its_py():
    assert {path.stem for path in HERE.glob("*.ipynb")} == {path.stem for path in sources()}


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("import warnings; warnings.warn('old', DeprecationWarning)", "wrote to stderr"),
        ("import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)", "needs no network"),
    ],
)
def test_a_bad_notebook_fails(tmp_path, cell, message):
    source = tmp_path / "1_bad.py"
    source.write_text(f"# %%\n{cell}\n")
    with pytest.raises(Exception, match=message):
        execute(source)
