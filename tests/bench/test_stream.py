"""What ``python -m bench stream`` runs, as far as a CPU goes: its batches, and what it calls different."""

import json

import pytest
import torch
from click.testing import CliRunner

from bench.__main__ import main
from bench.stream import command, measure
from bench.stream.layer import Layer, Shape
from bridge.ops import FUNCTIONS

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [Shape(context=512, requests=16), Shape(rows=4, context=512, layout="bf16")], ids=str)
def test_steps_are_batches_as_sglang_has_them(shape):
    """Rows of requests of their own, pages that no other has, a token's own slot at its end, padded rows; the rest of
    the table leads to page 0."""
    layer, seen = Layer(shape, CPU), set()
    t = layer.tensors
    addresses = {name: x.data_ptr() for name, x in t.items()}
    for number in range(60):
        before = t["lengths"].clone()
        layer.step(number)
        lengths, requests = t["lengths"], t["requests"].long()
        real = lengths > 0
        assert torch.equal(t["slots"] > 0, real) and len(set(requests[real].tolist())) == int(real.sum())
        assert torch.equal(t["positions"], (lengths - 1).clamp(min=0))
        held = []
        for b in torch.nonzero(real).flatten().tolist():
            row = t["table"][requests[b]]
            held += row[: lengths[b]].tolist()
            assert (row[lengths[b] :] == 1).all() and row[lengths[b] - 1] == t["slots"][b]
        assert len(set(held)) == len(held) and min(held, default=64) >= 64
        if number % 3:
            assert torch.equal(lengths, torch.where((before > 0) & (before < shape.context), before + 1, before))
        seen.add(int(real.sum()))
    assert {0, shape.rows} <= seen and addresses == {name: x.data_ptr() for name, x in t.items()}
    layer.step(1, length=77)
    assert t["lengths"].tolist() == [77] * shape.rows


def test_its_calls_are_a_layer_of_functions_that_are_there():
    calls = Layer(Shape(context=512), CPU).calls()
    assert [f.name for f, *_ in calls] == ["index_write", "topk_decode", "kv_write", "sparse_mla"]
    for function, names, results, _ in calls:
        assert function in FUNCTIONS and len(names) == len(function.arrays) and len(results) == len(function.results)


def test_one_bit_is_a_difference():
    a = torch.zeros(3)
    measure.same("zeros", a, torch.zeros(3))
    with pytest.raises(AssertionError, match="zeros: expected the same bytes, got 1 of 12 that differ"):
        measure.same("zeros", a, torch.tensor([0.0, -0.0, 0.0]))


def test_without_a_gpu_it_says_so():
    ran = CliRunner().invoke(main, ["stream"])
    assert ran.exit_code == 1 and "stream: expected a GPU that torch sees, got none" in ran.output
    ran = CliRunner().invoke(main, ["stream", "--parts", "all"])
    assert ran.exit_code == 2 and "'all' is none of functions, replays, layers, starts" in ran.output


def test_what_is_kept_has_the_lines_of_one_run():
    path = command.results.RESULTS / "stream" / "nvidia-h200.jsonl"
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    assert {x["what"] for x in lines} == {"function", "replays", "layer", "start"}
    assert len({x["commit"] for x in lines}) == 1 and "dirty" not in lines[0]["commit"]
    assert all(x["bitwise"] for x in lines if x["what"] != "layer")
    assert max(x["steps"] for x in lines if x["what"] == "replays") == 1000


def test_a_process_of_its_own_says_nothing_under_the_name_of_a_version():
    """The lines of a run begin with what all of them share."""
    path = command.results.RESULTS / "stream" / "nvidia-h200.jsonl"
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    assert {x["jax"] for x in lines} == {"0.11.2"}
    assert [x["client"] for x in lines if x["what"] == "start"] == ["cpu", "none", "none"]
