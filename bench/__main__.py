"""``python -m bench kernels``: every op, checked and timed, beside what this machine could do at best."""

import re
import sys
import time
from pathlib import Path

import click
import jax
from rich.console import Console
from rich.table import Table

from bench import results, timing
from bench.case import Case, label
from bench.results import Row
from bench.run import Outcome, outcomes
from bench.sets import OPS, SETS, cases
from bench.stream import PARTS
from bench.timing import Roofline
from jax_mla.recall.evaluate import integers

DEFAULT_SHAPES = {"cpu": "small", "gpu": "real"}
DEFAULT_SECONDS = {"cpu": 0.4, "gpu": 0.2}


@click.group(help=__doc__)
def main():
    pass


def find_device(name: str) -> jax.Device:
    """JAX's first device of the platform called ``name``, or of its own choice for "auto"."""
    try:
        return jax.devices(None if name == "auto" else name)[0]
    except RuntimeError as e:
        raise click.ClickException(f"--device {name}: JAX finds none here ({e})") from None


def some_of(known: tuple[str, ...]):
    """A click callback: the names, comma-separated, of some of ``known``; all of them if none is given."""

    def split(_, __, value: str | None) -> tuple[str, ...]:
        names = tuple(value.split(",")) if value else known
        for name in names:
            if name not in known:
                raise click.BadParameter(f"{name!r} is none of {', '.join(known)}")
        return names

    return split


def compiled(_, __, value: str | None) -> re.Pattern:
    try:
        return re.compile(value or "")
    except re.error as e:
        raise click.BadParameter(f"{value!r} is no regular expression: {e}") from None


def picture_file(_, __, value: Path | None) -> Path | None:
    if value is not None and value.suffix not in (".png", ".svg", ".pdf"):
        raise click.BadParameter(f"expected a name that ends in .png, .svg or .pdf, got {str(value)!r}")
    return value


@main.command()
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", show_default=True)
@click.option("--ops", callback=some_of(OPS), help="Comma-separated; all of them if not given.")
@click.option("--match", callback=compiled, help='Only cases whose "op shape", as printed, this is found in.')
@click.option(
    "--shapes", type=click.Choice(SETS), help="If not given, small on a CPU and real on a GPU; tiny is for tests."
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, 3600),
    help="How long each row is timed; if not given, 0.4 on a CPU, 0.2 on a GPU.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write this run's rows to a file.")
@click.option("--save", is_flag=True, help="Keep this run's rows in bench/results/<device>.jsonl, and draw them.")
@click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path),
    callback=picture_file,
    help="Draw this run's rows: a PNG, SVG or PDF file.",
)
@click.option("--check", is_flag=True, help="Fail on a row that is slower than that file says.")
def kernels(device, ops, match, shapes, seconds, json_file, save, picture, check):
    """Check each op against float64 and time it, in each implementation that runs here, beside the roofline and beside
    those peers that are installed.

    One row each: error in the named metric, median time of a call, GB/s and GFLOP/s of what the op has to move and to
    multiply (jax_mla/cost.py), the share of the roofline, which is measured first, in the same run, and how often the
    time of the fastest peer of the case it takes ("vs best peer"; below 1 is faster than every peer).

    --check compares shares of the roofline with the baseline's, and allows 10 % on a GPU. On a CPU, whose memory and
    cores others use too, it can only see what has become 3 times slower.

    Exit status: 0, or 1 if one of our rows is wrong, can't run or is slower than --check allows, or 2 for bad
    arguments. A peer that is missing, can't run or is wrong is named, and changes nothing: it is not ours to mend, and
    a run on a machine without it must not fail.
    """
    console = Console(width=None if sys.stdout.isatty() else 180)
    progress = Console(stderr=True)
    chosen = find_device(device)
    platform = timing.platform_of(chosen)
    shapes = shapes or DEFAULT_SHAPES[platform]
    seconds = DEFAULT_SECONDS[platform] if seconds is None else seconds
    context = results.context_of(chosen)
    stored = results.path_of(context["device"])
    if picture:
        drawing()

    def asked(op: str, shape) -> bool:
        return op in ops and match.search(f"{op} {label(shape)}") is not None

    wanted = [case for case in cases(shapes) if asked(case.op, case.shape)]
    if not wanted:
        raise click.ClickException(f"no case of {shapes} shapes matches {match.pattern!r}")
    if check and not stored.exists():
        raise click.ClickException(
            f"--check: no baseline of {context['device']!r}; make one with --save, and commit it"
        )
    baseline = [
        row for row in (results.read(stored) if check else []) if row.shapes == shapes and asked(row.op, row.shape)
    ]
    if check and not baseline:
        raise click.ClickException(f"--check: bench/results/{stored.name} has no row of these ops at {shapes} shapes")

    rows: list[Row] = []
    skipped: dict[str, list[str]] = {}
    faults: list[str] = []
    peers_faults: list[str] = []
    with jax.default_device(chosen):
        with progress.status("measuring the roofline"):
            roofline = timing.measure_roofline(chosen, seconds)
        table = make_table(context, roofline)
        for case in wanted:
            start = time.monotonic()
            measured: list[Outcome] = []
            spent: list[str] = []
            with progress.status(f"{case.op} {case.label}"):
                last = start
                for outcome in outcomes(case, platform, seconds=seconds):
                    spent.append(f"{outcome.implementation} {time.monotonic() - last:.1f}")
                    last = time.monotonic()
                    if outcome.time is not None:
                        measured.append(outcome)
                        rows.append(results.row_of(context, shapes, case, outcome, roofline))
                    elif outcome.failed:
                        fault_list = peers_faults if outcome.peer else faults
                        fault_list.append(f"{case.op} ({case.label}), {outcome.implementation}: {outcome.why}")
                    else:
                        where = case.op if outcome.peer else f"{case.op} ({case.label})"
                        skipped.setdefault(f"{outcome.implementation}: {outcome.why}", []).append(where)
            add_lines(table, case, measured, roofline)
            if not progress.is_terminal:
                text = f"{case.op} {case.label}: {time.monotonic() - start:.0f} s ({'; '.join(spent)})"
                progress.print(text, markup=False, highlight=False, soft_wrap=True)
            if json_file:  # as they come, so that a run cut short leaves what it has measured
                results.write(json_file, rows)
    console.print(table)
    for why, where in skipped.items():
        text = f"not run: {why}, for {', '.join(dict.fromkeys(where))}"
        console.print(text, style="dim", markup=False, highlight=False)
    for why in peers_faults:
        console.print(f"peer failed: {why}", style="yellow", markup=False, highlight=False)

    if check:
        faults += results.compare(rows, baseline, results.SLACK[platform])
    if save and not faults:
        results.save(stored, rows)
        console.print(f"kept in bench/results/{stored.name}")
    if picture and rows:
        draw(rows, picture, console)
    elif save and not faults:
        draw(results.read(stored), stored.with_suffix(".png"), console)
    for fault in faults:
        console.print(fault, style="bold red", markup=False, highlight=False)
    if faults:
        sys.exit(1)
    if check:
        console.print(f"no row is more than {results.SLACK[platform]:g} times slower than bench/results/{stored.name}")


@main.command()
@click.option("--steps", type=click.IntRange(1), default=1000, show_default=True, help="Replays of the captured layer.")
@click.option("--save", is_flag=True, help="Keep this run's lines in bench/results/stream/<device>.jsonl.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write this run's lines to a file.")
@click.option("--parts", callback=some_of(PARTS), help=f"Comma-separated: {', '.join(PARTS)}.")
def stream(parts, steps, save, json_file):
    """On a GPU: every function of bridge.ops on both lanes, bitwise; a decode layer captured in a graph and replayed
    over other batches, beside the jit lane; what the host and the device take; a process without JAX.

    Exit status: 1 if the lanes differ anywhere.
    """
    from bench.stream import command

    command.run(parts, steps, json_file, save)


@main.command()
@click.option("--match", default="", help='Only cases in whose name this is, such as "graphs full".')
@click.option("--save", is_flag=True, help="Keep this run's lines in bench/results/serving/<device>.jsonl.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write this run's lines to a file.")
def engine(match, save, json_file):
    """On a GPU: SGLang's engine with our backend, on both lanes, with each kind of CUDA graphs and without, beside
    transformers; what a step takes.

    Exit status: 1 if a case can't run, differs where it must not, or is further from transformers than the demo allows.
    """
    from bench.engine import command

    command.run(match, json_file, save)


@main.command()
@click.argument("results_file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("picture", type=click.Path(path_type=Path), callback=picture_file)
@click.option("--shapes", type=click.Choice(SETS), help="If not given, the largest that the file has rows of.")
def plot(results_file, picture, shapes):
    """Draw the rows of a file such as bench/results/nvidia-h200.jsonl as a PNG, SVG or PDF."""
    try:
        rows = results.read(results_file)
    except ValueError as e:
        raise click.BadParameter(f"{results_file} holds no rows of this project's: {e}") from None
    draw(rows, picture, Console(), shapes)


def drawing():
    """The module that draws; says what it needs where that isn't installed."""
    try:
        from bench import plot
    except ModuleNotFoundError as e:
        raise click.ClickException(f"a picture needs {e.name}: pip install '.[bench]'") from None
    return plot


def draw(rows: list[Row], picture: Path, console: Console, shapes: str | None = None) -> None:
    present = {row.shapes for row in rows}
    shapes = shapes or next((name for name in reversed(SETS) if name in present), None)
    rows = [row for row in rows if row.shapes == shapes]
    if not rows:
        raise click.ClickException(f"no row of {shapes} shapes to draw")
    drawing().draw(rows, picture)
    console.print(f"drawn in {picture}", highlight=False)


def make_table(context: dict, roofline: Roofline) -> Table:
    products = ", ".join(f"{dtype} {rate:,.0f}" for dtype, rate in roofline.product_gflop_s.items())
    limits = f"here a copy moves {roofline.copy_gb_s:,.1f} GB/s; products in GFLOP/s: {products}"
    table = Table(title=f"{context['device']}, jax {context['jax']}", caption=limits, title_justify="left")
    table.caption_justify = "left"
    for column in ("op", "shape", "implementation"):
        table.add_column(column, overflow="fold")
    for column in ("error", "time, µs", "GB/s", "GFLOP/s", "of roofline"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("limit")
    table.add_column("vs best peer", justify="right", no_wrap=True)
    return table


def add_lines(table: Table, case: Case, measured: list[Outcome], roofline: Roofline) -> None:
    """One line for each outcome of ``case`` that was timed, and a rule below."""
    against = [o.time.median_us for o in measured if o.peer and not o.part and o.time is not None]
    for outcome in measured:
        assert outcome.time is not None
        us = outcome.time.median_us
        least, limit = roofline.time_us(case.cost, case.operand)
        versus = f"{us / min(against):.2f}" if against and not outcome.peer else ""
        table.add_row(
            case.op,
            case.label,
            outcome.implementation,
            f"{outcome.error:.2g} {outcome.metric[0]}",
            f"{us:,.1f}" if us < 1000 else f"{us:,.0f}",
            f"{case.cost.bytes / us * 1e-3:,.2f}",
            f"{case.cost.flops / us * 1e-3:,.1f}" if case.cost.flops else "",
            f"{least / us:.1%}",
            limit,
            versus,
            style="dim" if outcome.peer else None,
        )
    table.add_section()


@main.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path), required=False)
@click.option("--by", callback=some_of(("transformers", "nnx", "SGLang")), help="Who runs it. Default: all three.")
@click.option("--kv", callback=some_of(("bf16", "fp8_656", "fp8_576")), help="KV layouts. Default: all.")
@click.option("--topk", default="0,64,128,256", show_default=True, callback=integers, help="0 is dense.")
@click.option(
    "--lengths", default="1024,2048,4096,8192", show_default=True, callback=integers, help="Tokens of a text."
)
@click.option("--texts", type=click.IntRange(2), default=2, show_default=True, help="For each figure; an even number.")
@click.option("--sabotage/--no-sabotage", default=True, show_default=True, help="Selections that must not work, too.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="A file of figures: see above."
)
@click.option("--card", is_flag=True, help="Keep all in bench/results/recall.jsonl, and put it on the model's card.")
def recall(model, by, kv, topk, lengths, texts, sabotage, json_file, card):
    """What the trained MODEL answers (jax_mla.recall's own if not given), by who runs it, KV layout and selection; and
    with selections that must not work.

    Figures are added to the file as they come; those that it has already, of the same weights and as many texts, are
    not measured again, so that a run which was cut short goes on.
    """
    from bench import recall as bench

    if texts % 2:
        raise click.BadParameter(f"--texts: expected an even number, since two are run at a time, got {texts}")
    if min(topk) < 0:
        raise click.BadParameter(f"--topk: expected 0 or more, got {min(topk)}")
    if card and (model or json_file):
        raise click.UsageError("--card is of the model that comes with the package, and of bench/results/recall.jsonl")
    try:
        file = bench.KEPT if card else json_file
        cells = bench.run(model or bench.MODEL, bench.ways(by, kv, topk, sabotage), lengths, texts, file)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if card:
        bench.CARD.write_text(bench.on_card(bench.CARD.read_text("utf-8"), bench.markdown(cells)), "utf-8")


if __name__ == "__main__":
    main()
