"""``python -m bench stream``: runs ``measure``, prints a table, keeps lines of JSON."""

import json
import time
from importlib.metadata import version
from pathlib import Path

import click
import jax
import torch
from rich.console import Console
from rich.table import Table

from bench import results
from bench.stream import measure
from bench.stream.layer import Shape
from bridge.stream import Jit, Stream
from jax_mla.aot.chips import CHIPS


def run(parts: tuple[str, ...], steps: int, json_file: Path | None, save: bool) -> None:
    if not torch.cuda.is_available():
        raise click.ClickException("stream: expected a GPU that torch sees, got none")
    device = torch.device("cuda", torch.cuda.current_device())
    stream, jit = Stream.of(device), Jit()
    fp8 = CHIPS[stream.arch].fp8.name
    context = results.context_of(jax.devices()[0]) | dict(torch=version("torch"), arch=stream.arch)
    lines: list[dict] = []
    console, progress = Console(width=None if Console().is_terminal else 160), Console(stderr=True)

    def replays():
        for layout in ("fp8_656", "bf16", "fp8_576"):
            for rows in (8, 1):
                often = steps if (layout, rows) == ("fp8_656", 8) else max(steps // 10, 1)
                shape = Shape(layout=layout, rows=rows, fp8=fp8)
                yield measure.replays(stream, jit, device, shape, often)

    def layers():
        for rows, length, requests in ((1, 8192, 16), (1, 131072, 1), (64, 8192, 64)):
            shape = Shape(rows=rows, requests=requests, context=length, fp8=fp8)
            yield measure.layers(stream, jit, device, shape, length)

    measured = dict(
        functions=lambda: measure.functions(stream, jit, device, fp8),
        replays=replays,
        layers=layers,
        starts=measure.starts,
    )
    start = time.monotonic()
    for line in (line for part in parts for line in measured[part]()):
        lines.append(context | line)
        took, start = time.monotonic() - start, time.monotonic()
        progress.print(f"{took:.1f} s: {line}", markup=False, highlight=False, soft_wrap=True)
        if json_file:
            write(json_file, lines)
    for what in dict.fromkeys(line["what"] for line in lines):
        console.print(table([x for x in lines if x["what"] == what], context))
    if save:
        path = results.RESULTS / "stream" / results.path_of(context["device"]).name
        write(path, lines)
        console.print(f"kept in bench/results/stream/{path.name}")


def write(path: Path, lines: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(results.rounded(x)) + "\n" for x in lines))


def table(lines: list[dict], context: dict) -> Table:
    columns = [name for name in lines[0] if name not in context and name != "what"]
    made = Table(title=lines[0]["what"], title_justify="left")
    for name in columns:
        made.add_column(name, justify="left" if isinstance(lines[0][name], str) else "right", overflow="fold")
    for line in lines:
        made.add_row(*[f"{x:,.2f}" if isinstance(x, float) else str(x) for x in (line[name] for name in columns)])
    return made
