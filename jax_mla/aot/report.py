"""One row for each kernel: what the table shows and ``--json`` writes; and which rows are failures."""

from dataclasses import asdict, dataclass

import jax
from rich.table import Table

from jax_mla.aot import analysis
from jax_mla.aot.cases import DECODE, Case
from jax_mla.aot.chips import CHIPS, Chip
from jax_mla.aot.code import Code
from jax_mla.aot.executable import Kernel
from jax_mla.cost import Cost

FP8_MATRIX_KERNELS = ("index_logits_ragged", "index_logits_paged")
FP8_MATRIX_CHIPS = ("gfx942", "gfx950", "sm_90")

ACCEPTED_SPILLS = {
    ("sm_90", "sparse_mla_bf16", 256): 40,
    ("sm_90", "select", 512): 12,
    ("gfx942", "index_logits_paged", 128): 14,
}
"""Vector spills that a decode kernel may have, by target, kernel and threads of a program. Twelve words of a
selection's 128 registers where it writes slots and positions, once, at its end: it saves a launch. Some of four rows of
128 index heads (DeepSeek has 64) against a page in tiles. Tiles of 64 heads hold their results in 128 registers of each
of 256 threads; ptxas keeps addresses of their products in local memory. On an H200, for 128 rows of 128 heads, they
take 350 µs with 30 spills, and tiles of 16 heads, which spill nothing, 526 µs."""


@dataclass(frozen=True)
class Row:
    """One kernel of one case on one chip. Bytes are bytes, times microseconds; widths of accesses are bytes a thread.

    - `jax`: the version whose compiler it was.
    - `warps`: resident at once: waves on a SIMD (gfx), warps on a multiprocessor (sm).
    - `matrix`: matrix instructions by name, `loads` and `stores`: accesses to global memory by width, `instructions`:
      all instructions, each as often as it stands in the code.
    - `others`: what XLA runs beside the op's own kernels.
    - `trips`, `issue_us`, `memory_us`, `estimate_us`, `roofline_us`: see ``jax_mla.aot.analysis``.
    """

    jax: str
    target: str
    op: str
    label: str
    phase: str
    kernel: str
    vgprs: int
    agprs: int
    sgprs: int
    vector_spills: int
    scalar_spills: int
    local_bytes: int
    shared_bytes: int
    warps: int
    code_bytes: int
    grid: tuple[int, int, int]
    threads: int
    matrix: dict[str, int]
    loads: dict[int, int]
    stores: dict[int, int]
    instructions: dict[str, int]
    others: tuple[str, ...]
    trips: tuple[int, int]
    issue_us: float
    memory_us: float
    estimate_us: float
    roofline_us: float
    compile_s: float

    def json(self) -> dict:
        return asdict(self)


def row_of(
    case: Case,
    chip: Chip,
    kernel: Kernel,
    code: Code,
    work: Cost,
    trips: tuple[int, int],
    others: tuple[str, ...],
    seconds: float,
) -> Row:
    """The row of one of a case's kernels, which has to do ``work``; its loops run ``trips`` times."""
    counts = code.counts()
    time = analysis.estimate(code, kernel, chip, work, case.operand, trips)
    return Row(
        jax=jax.__version__,
        target=chip.name,
        op=case.op,
        label=case.label,
        phase=case.phase,
        kernel=kernel.name,
        vgprs=code.vgprs,
        agprs=code.agprs,
        sgprs=code.sgprs,
        vector_spills=code.vector_spills,
        scalar_spills=code.scalar_spills,
        local_bytes=code.local_bytes,
        shared_bytes=code.shared_bytes + kernel.shared_bytes,
        warps=analysis.resident_warps(code, kernel, chip),
        code_bytes=code.size,
        grid=kernel.grid,
        threads=kernel.threads[0] * kernel.threads[1] * kernel.threads[2],
        matrix={name: n for name, n in sorted(counts.items()) if analysis.is_matrix(name)},
        loads=analysis.accesses(counts, "load"),
        stores=analysis.accesses(counts, "store"),
        instructions=dict(sorted(counts.items())),
        others=others,
        trips=trips,
        issue_us=time.issue_us,
        memory_us=time.memory_us,
        estimate_us=time.us,
        roofline_us=time.roofline_us,
        compile_s=seconds,
    )


def failures(row: Row) -> list[str]:
    """What is wrong with a kernel that compiled, in words."""
    chip = CHIPS[row.target]
    found = []
    accepted = ACCEPTED_SPILLS.get((row.target, row.kernel, row.threads), 0)
    if row.phase == DECODE and row.vector_spills > accepted:
        found.append(
            f"{row.vector_spills} vector registers spilled in a decode kernel ({row.local_bytes} bytes a thread)"
        )
    if row.shared_bytes > chip.program_shared_bytes:
        found.append(f"{row.shared_bytes:,} bytes of shared memory, {row.target} has {chip.program_shared_bytes:,}")
    expects_fp8 = row.kernel in FP8_MATRIX_KERNELS and row.target in FP8_MATRIX_CHIPS
    if expects_fp8 and not any(analysis.is_fp8_matrix(name) for name in row.matrix):
        got = ", ".join(row.matrix) or "none"
        found.append(f"no FP8 matrix instruction in a kernel that multiplies {chip.fp8}; it has {got}")
    return [f"{row.target} {row.op} ({row.label}), kernel {row.kernel}: {what}" for what in found]


COLUMNS = ("kernel", "shape")
FIGURES = ("VGPR", "AGPR", "SGPR", "spills", "local", "shared", "warps", "code", "grid × threads")
WORDS = ("matrix instructions", "loads", "stores")
TIMES = ("issue µs", "memory µs", "roofline µs")


def make_table(chip: Chip) -> Table:
    """An empty table for ``chip``'s rows."""
    warps = "waves on a SIMD" if chip.target.platform == "rocm" else "warps on a multiprocessor"
    table = Table(title=f"{chip.name}: {chip.model}, FP8 {chip.fp8}, jax {jax.__version__}", title_justify="left")
    table.caption = (
        f"warps: resident {warps}. loads and stores: instructions × bytes a thread. "
        "jax_mla/aot/analysis.py says what the times assume."
    )
    table.caption_justify = "left"
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for column in FIGURES:
        table.add_column(column, justify="right")
    for column in WORDS:
        table.add_column(column, no_wrap=True)
    for column in TIMES:
        table.add_column(column, justify="right")
    return table


def add_line(table: Table, row: Row) -> None:
    def widths(counts: dict[int, int]) -> str:
        return " ".join(f"{n}×{width}" for width, n in counts.items())

    def us(value: float) -> str:
        return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"

    spills = f"{row.vector_spills}" + (f"+{row.scalar_spills}s" if row.scalar_spills else "")
    table.add_row(
        row.kernel,
        row.label,
        str(row.vgprs),
        str(row.agprs) if row.target.startswith("gfx") else "",
        str(row.sgprs) if row.target.startswith("gfx") else "",
        spills,
        f"{row.local_bytes:,}",
        f"{row.shared_bytes:,}",
        str(row.warps),
        f"{row.code_bytes:,}",
        f"{'·'.join(map(str, row.grid))} × {row.threads}",
        "\n".join(f"{n} {name}" for name, n in row.matrix.items()),
        widths(row.loads),
        widths(row.stores),
        us(row.issue_us),
        us(row.memory_us),
        us(row.roofline_us),
        style="red" if failures(row) else None,
    )
