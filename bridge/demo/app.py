"""The demo itself: five servers one after another, a few questions, the table, a verdict."""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path

import jax
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from bridge.demo import compare, hf, recall
from bridge.demo.compare import Case, Row
from bridge.demo.server import ServerError, serve
from bridge.demo.tiny import checkpoint
from jax_mla.recall import MODEL

ARGUMENTS = (
    *("--context-length", "4096", "--max-total-tokens", "8192", "--max-running-requests", "4"),
    *("--dtype", "bfloat16", "--enable-return-indexer-topk", "--sleep-on-idle"),
)


class Steps:
    """What the demo is doing: a live line with the seconds on a terminal, a line for each step anywhere else."""

    def __init__(self, console: Console, total: int) -> None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn()
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.progress.add_task("", total=total)
        self.start = time.monotonic()
        self.prefix = ""

    def __call__(self, text: str) -> None:
        line = f"{self.prefix}{text}"
        self.progress.update(self.task, description=line)
        if self.progress.disable:
            seconds = time.monotonic() - self.start
            self.progress.console.print(f"[{seconds:5.0f} s] {line}", markup=False, highlight=False)

    def done(self) -> None:
        self.progress.advance(self.task)


def run_recall(console: Console, steps: Steps) -> tuple[Row, list]:
    """The trained model, served: its row, and its answers to the first questions."""
    steps.prefix = f"trained, {recall.CASE}: "
    text = recall.text(recall.LENGTH, recall.QUESTIONS, seed=0)
    with serve(
        MODEL, *ARGUMENTS, "--kv-cache-dtype", recall.CASE.kv_cache_dtype, name="trained", report=steps
    ) as server:
        steps("answering questions")
        replies = recall.converse(server, text)
        for question, answer, right in replies:
            verdict = "as the text says" if answer == right else f"the text says {right}"
            shown = f"[bold]...{escape(question)}[/] [dim]→[/] {escape(answer)}  [dim]{escape(verdict)}[/]"
            console.print(f"  {recall.LENGTH} tokens {shown}", highlight=False)
        row = recall.row(server, text)
        steps("stopping the server")
    steps.done()
    return row, replies


def run_case(case: Case, models: dict[int, hf.Models], steps: Steps) -> list[Row]:
    """One server of random weights: its rows. `models` keeps transformers' by `index_topk`."""
    steps.prefix = f"{case}: "
    folder = checkpoint(case.tiny)
    name = f"{case.index_topk}-{case.kv_cache_dtype}"
    with serve(folder, *ARGUMENTS, "--kv-cache-dtype", case.kv_cache_dtype, name=name, report=steps) as server:
        steps(f"giving the log-probabilities of {compare.TOKENS} tokens")
        served = compare.ask(server, case)
        steps("stopping the server")
    steps("running transformers")
    if case.index_topk not in models:
        models[case.index_topk] = hf.load(folder)
    rows = list(compare.rows(case, served, models[case.index_topk]))
    steps.done()
    return rows


def table(rows: list[Row]) -> Table:
    """The rows as rich shows them: figure by figure with its bound."""
    view = Table(title=f"SGLang against transformers in fp32, {compare.TOKENS} tokens", title_justify="left")
    for heading in ("index_topk", "KV cache", "measured against", "figures and bounds", "in bf16", ""):
        view.add_column(heading)
    for row in rows:
        bounded = [figure for figure in row.figures if figure.bound is not None]
        figures = "\n".join(
            f"{figure.name} [{'green' if figure.passed else 'bold red'}]{figure.value:.4f}[/] "
            f"{'≤' if figure.relation == '<=' else '≥'} {figure.bound:g}"
            for figure in bounded
        )
        own = "\n".join("" if figure.own is None else f"{figure.own:.4f}" for figure in bounded)
        verdict = "[green]ok[/]" if row.passed else "[bold red]out of bounds[/]"
        view.add_row(str(row.case.index_topk), row.case.kv_cache_dtype, row.against, figures, own, verdict)
    return view


@contextlib.contextmanager
def interruptible() -> Generator[None]:
    """Inside, SIGTERM ends this process as Ctrl-C does, so that the server is stopped then too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(json_file: Path | None) -> int:
    """Runs all cases and shows them; 0 if every row keeps its bounds, 1 otherwise."""
    jax.config.update("jax_platforms", "cpu")  # the servers have the accelerator, if there is one
    disable_progress_bar()
    console = Console(width=None if sys.stdout.isatty() else 150)
    start = time.monotonic()
    console.print(
        f"Served by SGLang {version('sglang')} through jax_mla: first a two-layer DeepSeek-V3.2 that was trained to "
        "find records by their keys, then one with random weights, whose every rounding shows.",
        highlight=False,
    )
    rows: list[Row] = []
    models: dict[int, hf.Models] = {}
    steps = Steps(console, 1 + len(compare.CASES))
    with interruptible(), steps.progress:
        try:
            row, replies = run_recall(console, steps)
            rows.append(row)
            for case in compare.CASES:
                rows += run_case(case, models, steps)
        except (ServerError, ValueError) as error:
            console.print(f"[bold red]{steps.prefix}no figures[/]\n{escape(str(error))}", highlight=False)
            return 1
    console.print(table(rows))
    console.print(
        "in bf16: transformers in bf16 by the same figure, what a correct model in bf16 comes to. "
        f"same: share of the selected indices that a reference indexer with the same FP8 selects too, in rows past "
        f"{compare.SPARSE} keys. gap: how far under its last one the others score, "
        "in units of what FP8 moves that row's scores; small means a near-tie.",
        style="dim",
        highlight=False,
    )
    seconds = time.monotonic() - start
    failed = sum(not row.passed for row in rows)
    if json_file is not None:
        packages = ("jax-mla", "jax", "sglang", "torch", "transformers")
        report = {
            "passed": not failed,
            "seconds": round(seconds, 1),
            "versions": {name: version(name) for name in packages},
            "rows": [row.json() for row in rows],
            "answers": replies,
        }
        json_file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    verdict = f"{failed} of {len(rows)} rows are out of bounds" if failed else f"all {len(rows)} rows are within bounds"
    console.print(f"[{'bold red' if failed else 'bold green'}]{verdict}[/] ({seconds:.0f} s; the servers are stopped)")
    return 1 if failed else 0
