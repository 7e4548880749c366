"""The picture of a file of measurements: how near to the roofline each row is, ours and the peers'."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.case import label
from bench.results import Row

# Okabe and Ito's palette, which those who see fewer colours can tell apart too; no two series share a marker either.
BLUE, SKY, GREY, INK = "#0072B2", "#56B4E9", "#9A9A9A", "#222222"
OURS: dict[str, dict[str, Any]] = {
    "pallas": dict(color=BLUE, marker="o", markersize=8.5, zorder=5),
    "xla": dict(color=SKY, marker="s", markersize=6, zorder=4),
    "reference": dict(color=GREY, marker="|", markersize=8, zorder=2),
}
PEER_COLOURS = ("#D55E00", "#E69F00", "#CC79A7", "#009E73", "#000000")
PEER_MARKERS = ("^", "D", "v", "P", "X", "<", ">", "p", "d", "h", "H")
PART: dict[str, Any] = dict(color=GREY, marker="x", markersize=5.5, zorder=2)
LEAST = 1e-4  # of the roofline: what is less stands at the left edge
FIRST = ("pallas", "xla", "reference")  # the first of these that a case has is what its peers are held against


def family(row: Row) -> str:
    """A peer's name without what it says of one shape: "FlashMLA, 16 heads padded to 64" is FlashMLA."""
    return row.implementation.partition(",")[0]


def grouped(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """op → shape in words → its rows, in the order of the file."""
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault(row.op, {}).setdefault(label(row.shape), []).append(row)
    return groups


def own(case: Sequence[Row]) -> Row | None:
    """The row of a case that stands for us."""
    ours = {row.implementation: row for row in case if not row.peer}
    return next((ours[name] for name in FIRST if name in ours), None)


def best_peer(case: Sequence[Row]) -> Row | None:
    peers = [row for row in case if row.peer and not row.part]
    return min(peers, key=lambda row: row.time["median_us"]) if peers else None


def peer_styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each family of peers, the same ones for the same families in any order."""
    families = sorted({family(row) for row in rows if row.peer and not row.part})
    return {
        name: dict(
            color=PEER_COLOURS[i % len(PEER_COLOURS)],
            marker=PEER_MARKERS[i % len(PEER_MARKERS)],
            markersize=7,
            zorder=4,
            markeredgecolor="white",
            markeredgewidth=0.5,
        )
        for i, name in enumerate(families)
    }


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws ``rows``, all of one device and one set of shapes, as ``path`` says: a PNG, SVG or PDF file."""
    groups = grouped(rows)
    cases = sum(len(shapes) for shapes in groups.values())
    styles = peer_styles(rows)
    with_products = [case for shapes in groups.values() for case in shapes.values() if case[0].flops]
    lines = cases + len(groups)
    upper, lower = 0.245 * lines, 4.4 if with_products else 0.0
    height = upper + lower + 1.9
    figure = Figure(figsize=(13.5, height), dpi=130, facecolor="white")
    top = 1 - 1.15 / height
    axes = figure.add_axes((0.245, top - upper / height, 0.44, upper / height))
    _shares(axes, groups, styles)
    _title(figure, rows, height)
    _legend(figure, rows, styles, height)
    if with_products:
        below = figure.add_axes((0.075, 0.62 / height, 0.61, (lower - 1.0) / height))
        _roofline(below, with_products)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={} if path.suffix == ".pdf" else None)


def _title(figure: Figure, rows: Sequence[Row], height: float) -> None:
    device, shapes = rows[0].device, rows[0].shapes
    commits = ", ".join(sorted({re.sub(r"^(\w{7})\w*", r"\1", str(row.commit)) for row in rows}))
    days = sorted({row.date[:10] for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    figure.text(0.012, 1 - 0.32 / height, f"jax_mla on {device}", fontsize=15, weight="bold", color=INK)
    text = f"{shapes} shapes · jax {rows[0].jax} · measured {when} at commit {commits}"
    figure.text(0.012, 1 - 0.58 / height, text, fontsize=9.5, color="#555555")


def _legend(figure: Figure, rows: Sequence[Row], styles: dict[str, dict[str, Any]], height: float) -> None:
    present = {row.implementation for row in rows if not row.peer}
    handles = [
        Line2D([], [], linestyle="", label=name if name == "reference" else f"ours, {name}", **style)
        for name, style in OURS.items()
        if name in present
    ]
    handles += [Line2D([], [], linestyle="", label=name, **style) for name, style in styles.items()]
    parts = sorted({family(row) for row in rows if row.part})
    handles += [Line2D([], [], linestyle="", label=f"{name} (less work)", **PART) for name in parts]
    figure.legend(
        handles=handles,
        loc="upper right",
        bbox_to_anchor=(0.992, 1 - 0.1 / height),
        ncols=min(5, -(-len(handles) // 3)),
        fontsize=8.5,
        frameon=False,
        handletextpad=0.1,
        columnspacing=1.2,
    )


def _time(us: float) -> str:
    return f"{us:,.1f}" if us < 1000 else f"{us:,.0f}"


def _shares(axes: Axes, groups: dict[str, dict[str, list[Row]]], styles: dict[str, dict[str, Any]]) -> None:
    """One line a case: x is the share of the roofline, to the right stand the times."""
    to_axes = axes.get_yaxis_transform()
    y = 0.0
    ticks, names = [], []
    least = min(row.share for shapes in groups.values() for case in shapes.values() for row in case)
    left = max(least / 1.6, LEAST)

    def write(x: float, text: str, **style):
        axes.text(x, y, text, transform=to_axes, va="center", clip_on=False, fontsize=8.5, **style)

    for x, head in ((1.12, "ours, µs"), (1.235, "peer, µs"), (1.315, "ratio"), (1.335, "best peer")):
        align = "left" if head == "best peer" else "right"
        axes.text(x, -0.9, head, transform=to_axes, ha=align, va="center", fontsize=8.5, color="#555555")
    for op, shapes in groups.items():
        axes.axhspan(y - 0.5, y + 0.5, color="#EEF2F5", zorder=0)
        write(-0.5, op, weight="bold", color=INK)
        y += 1
        for shape, case in shapes.items():
            ticks.append(y)
            names.append(shape)
            shares = [max(row.share, left) for row in case]
            axes.plot([min(shares), max(shares)], [y, y], color="#D9D9D9", linewidth=1, zorder=1)
            for row in case:
                style = OURS.get(row.implementation) if not row.peer else PART if row.part else styles[family(row)]
                if style is not None:
                    axes.plot([max(row.share, left)], [y], linestyle="", clip_on=False, **style)
            ours, peer = own(case), best_peer(case)
            if ours is not None:
                write(1.12, _time(ours.time["median_us"]), ha="right", color=INK)
            if peer is not None:
                write(1.235, _time(peer.time["median_us"]), ha="right", color=INK)
                write(1.335, peer.implementation, ha="left", color="#555555")
            if ours is not None and peer is not None:
                ratio = ours.time["median_us"] / peer.time["median_us"]
                bold = dict(weight="bold", color=BLUE) if ratio <= 1 else dict(color=INK)
                write(1.315, f"{ratio:.2f}", ha="right", **bold)
            y += 1
    axes.set_yticks(ticks, names, fontsize=8.5)
    axes.tick_params(axis="y", length=0, pad=9)
    axes.set_ylim(y - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlim(left, 1.5)
    axes.axvline(1, color=INK, linewidth=1.2, zorder=1)
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 3)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:g} %"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", labelsize=8, labeltop=True)
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(
        "share of the roofline that the run measured itself; at its left edge: that or less",
        fontsize=8.5,
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


ROOF_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def _roofline(axes: Axes, cases: Sequence[Sequence[Row]]) -> None:
    """Of cases with products: FLOP/s over FLOP a byte, under the limits; ours filled, the best peer hollow above or
    below it."""
    limits = cases[0][0].roofline
    rates, copy = limits["product_gflop_s"], limits["copy_gb_s"]
    rates = {
        dtype: rate for dtype, rate in rates.items() if dtype != "f32" or "fp8" not in rates
    }  # none multiplies f32
    intensities = [case[0].flops / case[0].bytes for case in cases]
    left, right = min(intensities) / 3, max(intensities) * 3
    for i, (dtype, rate) in enumerate(rates.items()):
        ridge = rate / copy
        axes.plot(
            [max(left, ridge), right], [rate / 1e3] * 2, color=GREY, linewidth=1.3, linestyle=("-", "--", ":")[i % 3]
        )
        text = f"{dtype}: {rate / 1e3:,.0f} TFLOP/s" if rate >= 1e4 else f"{dtype}: {rate:,.0f} GFLOP/s"
        axes.text(right * 1.05, rate / 1e3, text, va="center", fontsize=8, color="#555555")
    ridge = max(rates.values()) / copy
    axes.plot([left, ridge], [left * copy / 1e3, ridge * copy / 1e3], color=GREY, linewidth=1.3)
    at = left * 1.25
    axes.text(at, at * copy / 1e3 / 1.3, f"copy {copy:,.0f} GB/s", fontsize=8, color="#555555", va="top")
    ops = list(dict.fromkeys(case[0].op for case in cases))
    for case in cases:
        i = ops.index(case[0].op)
        marker, colour = ROOF_MARKERS[i % len(ROOF_MARKERS)], (BLUE, *PEER_COLOURS)[i % (1 + len(PEER_COLOURS))]
        ours, peer = own(case), best_peer(case)
        x = case[0].flops / case[0].bytes
        points = [
            (row.flops / row.time["median_us"] * 1e-6, full) for row, full in ((ours, True), (peer, False)) if row
        ]
        if len(points) == 2:
            axes.plot([x, x], [y for y, _ in points], color=colour, linewidth=0.8, alpha=0.6, zorder=2)
        for y, full in points:
            axes.plot(
                [x],
                [y],
                marker=marker,
                color=colour,
                markerfacecolor=colour if full else "white",
                markersize=7,
                zorder=3,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.grid(color="#EAEAEA", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("FLOP a byte that the op must move", fontsize=8.5)
    axes.set_ylabel("TFLOP/s", fontsize=8.5)
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles = []
    for i, op in enumerate(ops):
        colour = (BLUE, *PEER_COLOURS)[i % (1 + len(PEER_COLOURS))]
        handles.append(Line2D([], [], linestyle="", marker=ROOF_MARKERS[i % len(ROOF_MARKERS)], color=colour, label=op))
    if any(best_peer(case) is not None for case in cases):
        handles.append(
            Line2D([], [], linestyle="", marker="o", color=INK, markerfacecolor="white", label="hollow: best peer")
        )
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(1.01, 0.0), fontsize=8.5, frameon=False)
