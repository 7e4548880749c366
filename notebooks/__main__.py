"""``python -m notebooks``: executes every notebook, top to bottom, in a fresh kernel of this interpreter.

The ``.py`` is the source. What was executed goes to ``build/notebooks``, or with ``--update`` into the paired
``.ipynb`` beside it, outputs and all. A cell that raises fails, and so does one that writes to stderr, as a warning
would, and one that goes to the network.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")  # jupyter_core warns where it has to guess

import jupytext  # noqa: E402
import nbformat  # noqa: E402
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager  # noqa: E402
from jupyter_client.manager import AsyncKernelManager  # noqa: E402
from nbclient import NotebookClient  # noqa: E402

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "notebooks"
TIMEOUT = 300  # seconds a cell

NO_NETWORK = """
def refuse(event, arguments):
    address = arguments[1] if event == "socket.connect" else arguments[0] if event == "socket.getaddrinfo" else ""
    host = address[0] if isinstance(address, tuple) else address if event == "socket.getaddrinfo" else None
    if host is not None and host not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"a notebook needs no network, and this one wants {arguments}")
__import__("sys").addaudithook(refuse)
"""


class ThisInterpreter(KernelSpecManager):
    """The one kernel there is, whatever is installed on the machine."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        argv += [f"--IPKernelApp.exec_lines={NO_NETWORK}", "--InlineBackend.rc={}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def sources() -> list[Path]:
    """The notebooks' ``.py`` files, in order."""
    return sorted(HERE.glob("[0-9]*.py"))


def read(path: Path) -> nbformat.NotebookNode:
    """The notebook that ``path``, a ``.py`` or an ``.ipynb``, holds."""
    return cast(nbformat.NotebookNode, jupytext.read(path))


def execute(source: Path) -> nbformat.NotebookNode:
    """The notebook of ``source``, executed. Raises ``CellExecutionError`` where a cell raises, and ``RuntimeError`` for
    one that writes to stderr."""
    notebook = read(source)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"  # the same every time
    with TemporaryDirectory() as sockets:
        manager = AsyncKernelManager(kernel_spec_manager=ThisInterpreter(), transport="ipc", ip=f"{sockets}/kernel")
        client = NotebookClient(notebook, km=manager, timeout=TIMEOUT, record_timing=False, coalesce_streams=True)
        client.execute(cwd=str(HERE), cleanup_kc=True)
    notebook.metadata.language_info.pop("version", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                raise RuntimeError(f"{source.name}: a cell wrote to stderr:\n{output.text}\nThe cell:\n{cell.source}")
    return notebook


def in_sync(source: Path) -> bool:
    """Whether the ``.ipynb`` beside ``source`` has the same cells."""
    paired = source.with_suffix(".ipynb")
    if not paired.exists():
        return False
    one, other = ([(c.cell_type, c.source) for c in read(p).cells] for p in (source, paired))
    return one == other


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m notebooks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--update", action="store_true", help="write into the .ipynb files beside the .py files")
    parser.add_argument("which", nargs="*", help="only those whose names begin like this, e.g. 03")
    arguments = parser.parse_args()
    chosen = [x for x in sources() if not arguments.which or x.name.startswith(tuple(arguments.which))]
    if not chosen:
        parser.error(f"which: expected the beginning of {', '.join(x.stem for x in sources())}, got {arguments.which}")
    for source in chosen:
        start = time.monotonic()
        print(f"{source.name} ...", end=" ", flush=True)
        notebook = execute(source)
        directory = HERE if arguments.update else BUILD
        directory.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, directory / f"{source.stem}.ipynb")
        print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
