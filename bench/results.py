"""What is kept of a measurement: one line of JSON, and the baseline that later runs are held against.

``bench/results/<device>.jsonl`` holds the newest row of each (shapes, op, shape, implementation) measured there.
"""

import datetime
import json
import os
import platform as host
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from bench.case import label

RESULTS = Path(__file__).parent / "results"

SLACK = {"gpu": 1.10, "cpu": 3.0}
"""How many times slower than its baseline a row may be, as a ratio to the roofline of its own run. Compared are fast
rounds, the 10th percentiles, which whatever else a machine does disturbs least. On two busy, shared CPU cores even
those differed by up to 2.04 times between two runs of the same code (and medians by 2.6): there the check sees what has
become three times slower, and is silent about less."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    - `device`: its name; `platform`: what JAX runs it with. `jax`, `jaxlib`, `python`: versions.
    - `commit`: of this repository, with "-dirty" where files differed; null outside of a checkout.
    - `date`: UTC. `shapes`: the set that `op` at `shape` is from. `peer`: whether another library did it.
    - `time`: of a call, in µs: median_us, p10_us, p90_us, rounds, calls_a_round.
    - `error`: in the unit of `metric`, at most `bound`.
    - `part`: whether a peer does only a part of the op's work, as a copy of as many bytes does.
    - `versions`: of the packages that a peer comes from; null for ours, and of peers measured before these were kept.
    - `bytes`, `flops`: what a call has to do (``jax_mla.cost``).
    - `roofline`: of this run: copy_gb_s, product_gflop_s by dtype; the least time_us of this row, and its limit,
      "memory" or "product".
    - `share`: of the roofline: its time over the median.
    """

    device: str
    platform: str
    jax: str
    jaxlib: str
    python: str
    commit: str | None
    date: str
    shapes: str
    op: str
    shape: dict[str, int | str]
    implementation: str
    peer: bool
    part: bool
    versions: dict[str, str] | None
    time: dict[str, float]
    error: float
    metric: str
    bound: float
    bytes: int
    flops: int
    roofline: dict[str, Any]
    share: float

    @property
    def key(self) -> tuple:
        """What tells it from other measurements on the same device."""
        return self.shapes, self.op, *sorted(self.shape.items()), self.implementation

    @property
    def fast_share(self) -> float:
        """The share of the roofline that the 10th percentile of the time has."""
        return self.roofline["time_us"] / self.time["p10_us"]

    @property
    def label(self) -> str:
        return f"{self.op} ({label(self.shape)}), {self.implementation}"


def row_of(context: dict[str, Any], shapes: str, case, outcome, roofline) -> Row:
    """The row of a case's outcome that was timed. `context`: from ``context_of``."""
    least, limit = roofline.time_us(case.cost, case.operand)
    metric, bound = outcome.metric
    return Row(
        **context,
        shapes=shapes,
        op=case.op,
        shape=dict(case.shape),
        implementation=outcome.implementation,
        peer=outcome.peer,
        part=outcome.part,
        versions=outcome.versions,
        time=asdict(outcome.time),
        error=outcome.error,
        metric=metric,
        bound=bound,
        bytes=case.cost.bytes,
        flops=case.cost.flops,
        roofline=asdict(roofline) | {"time_us": least, "limit": limit},
        share=least / outcome.time.median_us,
    )


def context_of(device: jax.Device) -> dict[str, Any]:
    """The columns that all rows of a run share."""
    return dict(
        device=device_name(device),
        platform=device.client.platform_version.splitlines()[-1],
        jax=version("jax"),
        jaxlib=version("jaxlib"),
        python=host.python_version(),
        commit=commit(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def device_name(device: jax.Device) -> str:
    """The card's name, or the CPU's with how many of its cores this process may use."""
    if device.platform != "cpu":
        return device.device_kind
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else []
    return f"{(names or [host.machine()])[0]}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str | None:
    """The commit that is checked out beside this file, or None where there is none, or no git."""
    try:
        git = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(git, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def path_of(device: str) -> Path:
    """Where the rows of ``device`` are kept."""
    return RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.jsonl"


def write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(rounded(asdict(row)), ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def rounded(x):
    """``x`` with six digits of each float in it."""
    if isinstance(x, dict):
        return {name: rounded(value) for name, value in x.items()}
    return float(f"{x:.6g}") if isinstance(x, float) else x


def read(path: Path) -> list[Row]:
    """The rows of a file. Raises ``ValueError`` for a line that is not exactly a ``Row``."""
    rows = []
    names = {f.name for f in fields(Row)}
    for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        record = json.loads(line)
        if record.keys() != names:
            raise ValueError(f"{path.name}, line {i}: expected {sorted(names)}, got {sorted(record)}")
        rows.append(Row(**record))
    return rows


def save(path: Path, rows: Sequence[Row]) -> None:
    """Puts ``rows`` in the place of those with the same key, and leaves the others."""
    kept = {row.key: row for row in (read(path) if path.exists() else ())}
    write(path, (kept | {row.key: row for row in rows}).values())


def compare(rows: Sequence[Row], baseline: Sequence[Row], slack: float) -> list[str]:
    """What is slower than the baseline by more than ``slack`` times, or was measured there and not now, in words.

    - `baseline`: of the cases that were asked for now. Peers are not ours to check.
    """
    now = {row.key: row for row in rows}
    faults = []
    for old in baseline:
        if old.peer:
            continue
        new = now.get(old.key)
        if new is None:
            faults.append(f"{old.label}: in the baseline, and not measured now")
        elif new.fast_share * slack < old.fast_share:
            slower = f"{old.fast_share / new.fast_share:.2f} times slower than the baseline's {old.fast_share:.2%}"
            faults.append(f"{new.label}: {new.fast_share:.2%} of the roofline, {slower} (commit {old.commit})")
    return faults
