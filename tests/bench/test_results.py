"""Rows: their schema, the file they are kept in, and what the check says of them."""

import json
from dataclasses import asdict, fields, replace

import jax
import pytest

from bench import results
from bench.results import Row, compare


def make_row(**changes):
    row = Row(
        device="A card",
        platform="gpu 1",
        jax="0.11.2",
        jaxlib="0.11.2",
        python="3.12.3",
        commit="0123456789ab",
        date="2026-12-01T00:00:00+00:00",
        shapes="real",
        op="select",
        shape={"T": 64, "S": 8192, "k": 2048},
        implementation="pallas",
        peer=False,
        part=False,
        versions=None,
        time={"median_us": 20.0, "p10_us": 20.0, "p90_us": 21.0, "rounds": 30, "calls_a_round": 16},
        error=0.0,
        metric="wrong",
        bound=0.0,
        bytes=2621440,
        flops=0,
        roofline={"copy_gb_s": 4000.0, "product_gflop_s": {"bf16": 8e5}, "time_us": 10.0, "limit": "memory"},
        share=0.5,
    )
    return replace(row, **changes)


def slower(row, times):
    return replace(row, time=row.time | {"median_us": times * 20.0, "p10_us": times * 20.0}, share=0.5 / times)


def test_a_row_survives_the_file(tmp_path):
    rows = [
        make_row(),
        make_row(op="kv_write", shape={"T": 1, "layout": "fp8_656"}, commit=None),
        make_row(implementation="FlashMLA", peer=True, versions={"sgl-flash-mla": "1.0.0"}),
    ]
    results.write(tmp_path / "a" / "x.jsonl", rows)
    assert results.read(tmp_path / "a" / "x.jsonl") == rows
    assert len((tmp_path / "a" / "x.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("change", [lambda r: r.pop("error"), lambda r: r.update(more=1)])
def test_another_schema_is_refused(tmp_path, change):
    record = asdict(make_row())
    change(record)
    (tmp_path / "x.jsonl").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="x.jsonl, line 1"):
        results.read(tmp_path / "x.jsonl")


def test_save_replaces_what_is_the_same_and_keeps_the_rest(tmp_path):
    path = tmp_path / "x.jsonl"
    old, other = make_row(), make_row(implementation="xla")
    results.save(path, [old, other])
    new = slower(old, 0.5)
    results.save(path, [new])
    assert results.read(path) == [new, other]


@pytest.mark.parametrize(("times", "slack", "faults"), [(1.0, 1.1, 0), (1.09, 1.1, 0), (1.12, 1.1, 1), (2.9, 3.0, 0)])
def test_compare_allows_the_slack(times, slack, faults):
    assert len(compare([slower(make_row(), times)], [make_row()], slack)) == faults


def test_compare_goes_by_the_ratio_to_the_roofline():
    """Twice as slow on a machine that itself has become twice as slow is no fault."""
    row = slower(make_row(), 2.0)
    assert compare([replace(row, roofline=row.roofline | {"time_us": 20.0})], [make_row()], 1.1) == []


def test_compare_names_what_is_missing():
    base = [make_row(), make_row(implementation="xla")]
    assert compare([make_row()], base, 1.1) == [
        "select (T 64 S 8192 k 2048), xla: in the baseline, and not measured now"
    ]


def test_compare_leaves_peers_alone():
    peer = make_row(implementation="torch.topk", peer=True)
    assert compare([make_row(), slower(peer, 5)], [make_row(), peer], 1.1) == []
    assert compare([make_row()], [make_row(), peer], 1.1) == []


def test_a_device_has_a_file_of_its_own():
    assert results.path_of("NVIDIA H200").name == "nvidia-h200.jsonl"
    assert results.path_of("AMD EPYC, 2 cores").name == "amd-epyc-2-cores.jsonl"


def test_context_fills_the_columns_of_a_run():
    context = results.context_of(jax.devices("cpu")[0])
    assert context.keys() <= {f.name for f in fields(Row)}
    assert context["jax"] == jax.__version__
    assert context["date"].endswith("+00:00")


def test_kept_results_can_be_read():
    for path in results.RESULTS.glob("*.jsonl"):
        rows = results.read(path)
        assert {results.path_of(row.device) for row in rows} == {path}
        assert len({row.key for row in rows}) == len(rows)
        assert all(row.error <= row.bound for row in rows)
