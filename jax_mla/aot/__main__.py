"""Compile every kernel with XLA's own compilers, for chips that need not be there, and say what came out.

One row a kernel: registers, spills, memory, matrix instructions, widths of loads and stores, and what its instructions
and its bytes take at best.

Exit status 1, and a line in words, for a kernel that doesn't compile, a vector spill in a decode kernel beyond those
that report.ACCEPTED_SPILLS names, more shared memory than the chip has, and index logits without FP8 matrix
instructions.
"""

import json
import re
import sys
import time
from pathlib import Path

import click
import jax
from rich.console import Console

from jax_mla.aot import compiler, plugins
from jax_mla.aot.cases import OPS, SETS, Case, cases
from jax_mla.aot.chips import CHIPS, Chip
from jax_mla.aot.report import Row, add_line, failures, make_table, row_of
from jax_mla.cost import Cost

WIDTH = 230  # of a table that goes to a file


@click.command(help=__doc__)
@click.option(
    "--target",
    "targets",
    type=click.Choice(list(CHIPS)),
    multiple=True,
    help="Only this chip; may be given repeatedly.",
)
@click.option("--set", "which", type=click.Choice(SETS), default="ci", show_default=True)
@click.option("--op", "ops", type=click.Choice(OPS), multiple=True, help="Only this op; repeatable.")
@click.option("--match", default="", help="Only cases with this regular expression in 'op shape', e.g. 'mla.* H 16 '.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the rows to a file, one a line.")
def main(targets, which, ops, match, json_file):
    jax.config.update("jax_platforms", "cpu")  # nothing runs on a GPU, be there one or not
    console, progress = Console(width=None if sys.stdout.isatty() else WIDTH), Console(stderr=True)
    try:
        pattern = re.compile(match)
    except re.error as e:
        raise click.BadParameter(f"{match!r} is no regular expression: {e}", param_hint="--match") from None
    chosen = {
        name: [
            case
            for case in cases(CHIPS[name], which)
            if (not ops or case.op in ops) and pattern.search(f"{case.op} {case.label}")
        ]
        for name in targets or CHIPS
    }
    if not any(chosen.values()):
        raise click.ClickException(f"no case of the set {which!r} is left by --op and --match")
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    faults: list[str] = []
    for name, of_chip in chosen.items():
        chip, table, start = CHIPS[name], make_table(CHIPS[name]), time.monotonic()
        for case in of_chip:
            with progress.status(f"{name} {case.op} {case.label}"):
                new, fault = compile_case(case, chip)
            for row in new:
                add_line(table, row)
                faults += failures(row)
            faults += fault
            rows += new
            if json_file:  # as they come, so that a run cut short leaves what it has
                json_file.write_text("".join(json.dumps(row.json()) + "\n" for row in rows), encoding="utf-8")
        console.print(table)
        console.print(f"{name}: {len(of_chip)} cases in {time.monotonic() - start:.0f} s\n", highlight=False)
    for fault in faults:
        console.print(fault, style="bold red", markup=False, highlight=False)
    if faults:
        sys.exit(1)
    console.print(f"{len(rows)} kernels, and nothing is wrong with them", highlight=False)


def compile_case(case: Case, chip: Chip) -> tuple[list[Row], list[str]]:
    """The rows of a case, or what is wrong with it."""

    def fault(what: str, e: Exception | None = None) -> tuple[list[Row], list[str]]:
        why = f": {type(e).__name__}: {str(e).strip() or 'no message'}" if e else ""
        return [], [f"{chip.name} {case.op} ({case.label}): {what}{why[:1000]}"]

    start = time.monotonic()
    try:
        built = compiler.build(case.call, *case.arguments, chip=chip, donate=case.donate)
    except plugins.Unavailable as e:
        raise click.ClickException(str(e)) from None
    except Exception as e:  # whatever a compiler raises
        return fault("does not compile", e)
    try:
        kernels = compiler.codes(built)
    except ValueError as e:
        return fault("its machine code can't be read", e)
    try:
        trips = case.trips()
    except Exception as e:  # the op's Config has become another
        return fault("how often its loops run is not known", e)
    own = [(kernel, code) for kernel, code in kernels if kernel.name.startswith(case.op)]
    if not own:
        return fault("expected its kernel in what XLA made of it, got none")
    others = (*(kernel.name for kernel, _ in kernels if not kernel.name.startswith(case.op)), *built.others)
    seconds = time.monotonic() - start
    first, *rest = own
    rows = [row_of(case, chip, *first, case.cost, trips, others, seconds)]
    for kernel, code in rest:  # those that merge: they move once what their arguments hold
        moved = Cost(sum(argument.size for argument in kernel.arguments))
        rows.append(row_of(case, chip, kernel, code, moved, (1, 1), others, 0.0))
    return rows, []


if __name__ == "__main__":
    main()
