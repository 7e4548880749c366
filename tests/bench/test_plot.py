"""What the picture says of a file of measurements."""

from dataclasses import replace

import pytest

from bench import plot, results
from tests.bench.test_results import make_row


def peer(name, us, part=False):
    row = make_row()
    time = row.time | {"median_us": us, "p10_us": us, "p90_us": us}
    return replace(row, implementation=name, peer=True, part=part, time=time, share=10.0 / us)


CASE = [
    make_row(implementation="xla"),
    make_row(),
    peer("A, 16 heads padded to 64", 8.0),
    peer("B", 9.0),
    peer("C", 1.0, True),
]


def test_ours_is_the_kernel_and_the_best_peer_does_the_whole_work():
    ours, best = plot.own(CASE), plot.best_peer(CASE)
    assert ours is not None and ours.implementation == "pallas"
    assert best is not None and best.implementation == "A, 16 heads padded to 64"
    assert plot.own(CASE[2:]) is None
    assert plot.best_peer(CASE[:2]) is None


def test_a_peer_is_drawn_alike_at_all_shapes():
    assert plot.peer_styles(CASE).keys() == {"A", "B"}
    assert plot.peer_styles(CASE) == plot.peer_styles(CASE[::-1])


def test_no_two_peers_look_alike():
    styles = plot.peer_styles([peer(f"peer {i}", 1.0) for i in range(11)]).values()
    assert len({style["marker"] for style in styles}) == 11


def test_rows_are_grouped_by_op_and_shape():
    other = make_row(op="kv_write", shape={"T": 1})
    groups = plot.grouped([CASE[0], other, CASE[1]])
    assert {op: list(shapes) for op, shapes in groups.items()} == {
        "select": ["T 64 S 8192 k 2048"],
        "kv_write": ["T 1"],
    }
    assert len(groups["select"]["T 64 S 8192 k 2048"]) == 2


@pytest.mark.parametrize("path", sorted(results.RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_kept_results_can_be_drawn(path, suffix, tmp_path):
    plot.draw(results.read(path), tmp_path / f"a{suffix}")
    assert (tmp_path / f"a{suffix}").stat().st_size > 10_000


def test_one_case_without_products_and_without_peers_can_be_drawn(tmp_path):
    plot.draw([make_row()], tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()
