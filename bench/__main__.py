"""``python -m bench kernels``: every op, checked and timed, beside what this machine could do at best."""

import sys
import time
from pathlib import Path

import click
import jax
from rich.console import Console
from rich.table import Table

from bench import results, timing
from bench.kernels import OPS, SETS, Case, cases
from bench.results import Row
from bench.run import Outcome, outcomes
from bench.timing import Roofline

DEFAULT_SHAPES = {"cpu": "small", "gpu": "real"}


@click.group(help=__doc__)
def main():
    pass


def find_device(name: str) -> jax.Device:
    """JAX's first device of the platform called ``name``, or of its own choice for "auto"."""
    try:
        return jax.devices(None if name == "auto" else name)[0]
    except RuntimeError as e:
        raise click.ClickException(f"--device {name}: JAX finds none here ({e})") from None


def split_ops(_, __, value: str | None) -> tuple[str, ...]:
    ops = tuple(value.split(",")) if value else OPS
    for op in ops:
        if op not in OPS:
            raise click.BadParameter(f"{op!r} is none of {', '.join(OPS)}")
    return ops


@main.command()
@click.option("--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto", show_default=True)
@click.option("--ops", callback=split_ops, help="Comma-separated; all of them if not given.")
@click.option(
    "--shapes", type=click.Choice(SETS), help="If not given, small on a CPU and real on a GPU; tiny is for tests."
)
@click.option("--seconds", default=0.4, show_default=True, help="How long each row is timed.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write this run's rows to a file.")
@click.option("--save", is_flag=True, help="Keep this run's rows in bench/results/<device>.jsonl.")
@click.option("--check", is_flag=True, help="Fail on a row that is slower than that file says.")
def kernels(device, ops, shapes, seconds, json_file, save, check):
    """Check each op against float64 and time it, in each implementation that runs here, beside the roofline.

    One row each: error in the named metric, median time of a call, GB/s and GFLOP/s of what the op has to move and to
    multiply (jax_mla/cost.py), and the share of the roofline, which is measured first, in the same run.

    --check compares shares of the roofline with the baseline's, and allows 10 % on a GPU. On a CPU, whose memory and
    cores others use too, it can only see what has become 3 times slower.
    """
    console = Console(width=None if sys.stdout.isatty() else 160)
    progress = Console(stderr=True)
    chosen = find_device(device)
    platform = timing.platform_of(chosen)
    shapes = shapes or DEFAULT_SHAPES[platform]
    context = results.context_of(chosen)
    stored = results.path_of(context["device"])
    if check and not stored.exists():
        raise click.ClickException(
            f"--check: no baseline of {context['device']!r}; make one with --save, and commit it"
        )
    baseline = results.read(stored) if check else []
    if check and not any(row.shapes == shapes and row.op in ops for row in baseline):
        raise click.ClickException(f"--check: bench/results/{stored.name} has no row of these ops at {shapes} shapes")

    rows: list[Row] = []
    skipped: list[str] = []
    faults: list[str] = []
    with jax.default_device(chosen):
        with progress.status("measuring the roofline"):
            roofline = timing.measure_roofline(chosen, seconds)
        table = make_table(context, roofline)
        for case in cases(shapes):
            if case.op not in ops:
                continue
            start = time.monotonic()
            with progress.status(f"{case.op} {case.label}"):
                for outcome in outcomes(case, platform, seconds=seconds):
                    if outcome.time is not None:
                        add_line(table, case, outcome, roofline)
                        rows.append(results.row_of(context, shapes, case, outcome, roofline))
                    else:
                        why = f"{case.op} ({case.label}), {outcome.implementation}: {outcome.why}"
                        (faults if outcome.failed else skipped).append(why)
            if not progress.is_terminal:
                progress.print(f"{case.op} {case.label}: {time.monotonic() - start:.0f} s", highlight=False)
            table.add_section()
            if json_file:  # as they come, so that a run cut short leaves what it has measured
                results.write(json_file, rows)
    console.print(table)
    for why in skipped:
        console.print(f"not run: {why}", style="dim", markup=False, highlight=False)

    if check:
        faults += results.compare(rows, baseline, results.SLACK[platform])
    if save and not faults:
        results.save(stored, rows)
        console.print(f"kept in bench/results/{stored.name}")
    for fault in faults:
        console.print(fault, style="bold red", markup=False, highlight=False)
    if faults:
        sys.exit(1)
    if check:
        console.print(f"no row is more than {results.SLACK[platform]:g} times slower than bench/results/{stored.name}")


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
    return table


def add_line(table: Table, case: Case, outcome: Outcome, roofline: Roofline) -> None:
    assert outcome.time is not None
    us = outcome.time.median_us
    least, limit = roofline.time_us(case.cost, case.operand)
    table.add_row(
        case.op,
        case.label,
        outcome.implementation,
        f"{outcome.error:.2g} {case.metric[0]}",
        f"{us:,.1f}" if us < 1000 else f"{us:,.0f}",
        f"{case.cost.bytes / us * 1e-3:,.2f}",
        f"{case.cost.flops / us * 1e-3:,.1f}" if case.cost.flops else "",
        f"{least / us:.1%}",
        limit,
    )


if __name__ == "__main__":
    main()
