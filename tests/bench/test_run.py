"""Runners: what they call, with which inputs, in which order."""

import contextlib
from dataclasses import replace

import jax
import numpy as np
import pytest

from bench import kernels, timing
from bench.peers import TorchPeer
from bench.run import Inputs, JaxRunner, TorchRunner, outcomes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore:.*CUDA initialization.*")

SETS = 6
CASE = kernels.select(3, 64, 4)


@pytest.fixture
def inputs(monkeypatch):
    monkeypatch.setitem(timing.CACHE_BYTES, "cpu", SETS * CASE.cost.bytes // 2)
    return Inputs(CASE, "cpu", seed=0)


def test_inputs_are_twice_what_a_cache_holds(inputs):
    assert len(inputs.varied) == SETS
    assert len({np.asarray(logits).tobytes() for logits, _ in inputs.varied}) == SETS
    assert [id(varied) for varied in inputs.group(4, 4)] == [id(inputs.varied[i]) for i in (4, 5, 0, 1)]


@pytest.mark.parametrize("kernels", [False, True])
def test_a_program_is_so_many_calls_on_their_own_inputs(inputs, kernels):
    runner = JaxRunner(CASE, inputs, lambda shared, varied: CASE.call("xla", shared, varied), kernels)
    alone = [np.asarray(CASE.call("xla", (), varied)) for varied in inputs.varied]
    runner.repeat(4)
    _, seen = runner.wait(runner.start(1))
    expected = [alone[i] for i in (4, 5, 0, 1)]
    assert np.array_equal(seen, [x[0, 0] for x in expected] if kernels else expected)
    runner.repeat(2 * SETS + 1)
    for start in (0, 1):
        _, seen = runner.wait(runner.start(start))
        expected = [alone[i % SETS] for i in range(2 * SETS + 1)]
        assert np.array_equal(seen, [x[0, 0] for x in expected] if kernels else expected)
    assert np.array_equal(runner.output(), alone[0])


@pytest.mark.parametrize("case", [CASE, kernels.quantize(64, 256)], ids=lambda case: case.op)
def test_no_call_of_a_program_is_left_out_or_done_in_part(case):
    inputs = Inputs(case, "cpu", seed=0)
    runner = JaxRunner(case, inputs, lambda shared, varied: case.call("xla", shared, varied))

    def flops(calls: int) -> float:
        analysis = runner._program.lower((), (), inputs.group(0, calls), calls).compile().cost_analysis()
        assert analysis is not None
        return analysis["flops"]

    assert flops(5) > 4.9 * flops(1)


def test_a_result_is_given_once():
    """A second time is a copy, of as many bytes."""
    case = kernels.quantize(64, 256)
    inputs = Inputs(case, "cpu", seed=0)
    runner = JaxRunner(case, inputs, lambda shared, varied: case.call("xla", shared, varied))
    memory = runner._program.lower((), (), inputs.group(0, 1), 1).compile().memory_analysis()
    results = sum(np.asarray(x).nbytes for x in jax.tree.leaves(runner.output()))
    assert memory is not None and results <= memory.output_size_in_bytes < 1.1 * results


def test_a_pool_is_written_call_after_call(monkeypatch):
    case = kernels.kv_write(2, "fp8_656", 64)
    monkeypatch.setitem(timing.CACHE_BYTES, "cpu", 2 * case.cost.bytes)
    inputs = Inputs(case, "cpu", seed=0)
    runner = JaxRunner(case, inputs, lambda shared, varied: case.call("xla", shared, varied))
    (pool,), before = inputs.shared, np.asarray(inputs.shared[0]).copy()
    for varied in inputs.varied:
        pool = case.call("xla", (pool,), varied)
    runner.repeat(len(inputs.varied))
    (written,), _ = runner.wait(runner.start(0))
    assert np.array_equal(written, pool)
    assert np.array_equal(np.asarray(inputs.shared[0]), before)


def test_both_pools_of_a_layer_are_written_call_after_call(monkeypatch):
    case = kernels.layer(128, 3, 16, "fp8_656", 256, index_heads=8)
    monkeypatch.setitem(timing.CACHE_BYTES, "cpu", 2 * case.cost.bytes)
    inputs = Inputs(case, "cpu", seed=0)
    runner = JaxRunner(case, inputs, lambda shared, varied: case.call("xla", shared, varied))
    pools, out = inputs.shared[:2], None
    for varied in inputs.varied:
        *pools, _, _, _, out, _ = case.call("xla", (*pools, *inputs.shared[2:]), varied)
    runner.repeat(len(inputs.varied))
    written, seen = runner.wait(runner.start(0))
    for ours, theirs in zip(written, pools, strict=True):
        assert np.array_equal(ours, theirs)
    assert out is not None and len(seen) == len(inputs.varied)
    assert np.array_equal(seen[-1][-2], out)


class Graph:
    """Keeps what was called while it was captured, and does it again."""

    capturing: list | None = None

    def __init__(self):
        self.held = []

    def replay(self):
        for number in self.held:
            CALLED.append(number)


CALLED: list[int] = []


@pytest.mark.parametrize(("calls", "graphs"), [(1, 6), (2, 3), (4, 1), (16, 1)])
def test_a_peer_runs_in_graphs_of_so_many_calls(inputs, monkeypatch, calls, graphs):
    import torch

    CALLED.clear()
    numbers = iter(range(SETS))

    def make(torch, shared):
        def bind(varied):
            number = next(numbers)

            def call():
                (CALLED if Graph.capturing is None else Graph.capturing).append(number)
                return varied[0][:, :4].int()

            return call

        return bind

    @contextlib.contextmanager
    def capture(graph, pool, capture_error_mode):
        assert pool == "one pool" and capture_error_mode == "thread_local"
        Graph.capturing = graph.held
        yield
        Graph.capturing = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "one pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runner = TorchRunner(CASE, inputs, "cpu", TorchPeer(make))
    runner._on_gpu = True
    runner.repeat(calls)
    assert CALLED == []  # captured, not run
    for i in range(graphs + 1):
        runner.start(i)
    runner.wait(None)
    expected = [j % SETS for i in range(graphs) for j in range(i * calls, (i + 1) * calls)]
    assert CALLED == expected + expected[:calls]


def test_a_peer_that_can_not_be_captured_is_called_one_by_one(inputs, monkeypatch, caplog):
    import torch

    @contextlib.contextmanager
    def refuse(graph, pool, capture_error_mode):
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "one pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    called = []
    peer = TorchPeer(lambda torch, shared: lambda varied: lambda: called.append(varied[0].data_ptr()))
    runner = TorchRunner(CASE, inputs, "cpu", peer)
    runner._on_gpu = True
    runner.repeat(4)
    assert not runner.captured
    assert [record.getMessage() for record in caplog.records] == [
        "not captured, so timed call by call: operation not permitted when stream is capturing"
    ]
    runner.start(1)
    assert len(called) == 4 and len(set(called)) == 4


def test_a_check_of_a_peers_own_is_the_one_that_counts():
    case = replace(
        CASE,
        peers={
            "lenient": replace(CASE.peers["lax.top_k"], error=lambda *_: 3.0, metric=("of its own", 4.0)),
            "strict": replace(CASE.peers["lax.top_k"], error=lambda *_: 5.0, metric=("of its own", 4.0)),
        },
    )
    with jax.default_device(jax.devices("cpu")[0]):
        found = {o.implementation: o for o in outcomes(case, "cpu", seconds=0.0)}
    assert found["lenient"].time is not None and found["lenient"].metric == ("of its own", 4.0)
    assert found["strict"].time is None and found["strict"].failed
    assert found["strict"].why == "5 of its own, more than 4"
    assert found["xla"].metric == CASE.metric
