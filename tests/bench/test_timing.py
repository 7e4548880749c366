"""The clock and the roofline's arithmetic."""

import jax
import pytest

from bench import timing
from bench.timing import Probe, Roofline, measure, measure_roofline
from jax_mla.cost import Cost


def test_measure_counts_calls_and_rounds(monkeypatch):
    """Programs of 4 calls that take 8 ms: 2000 µs a call, as many programs a round as fill it."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setitem(timing.ROUND_S, "gpu", 0.016)
    started = []

    def run(i):
        started.append(i)
        now[0] += 0.008

    took = measure(run, lambda handle: None, 4, "gpu", 0.1)
    assert took.median_us == pytest.approx(2000)
    assert took.calls_a_round == 8
    assert took.rounds == 7  # 16 ms each, up to 100 ms
    assert started == list(range(3 + 1 + 2 * 7))  # never the same inputs twice in a row
    assert took.host_us == pytest.approx(2000)  # here starting one is all there is


def test_measure_takes_at_least_five_rounds():
    assert measure(lambda i: i, lambda handle: None, 1, "cpu", 0.0).rounds == 5


class Runner:
    """Programs that take the host 30 µs to submit, and the device 2 µs a call."""

    def __init__(self, monkeypatch, device_us):
        self.now = self.free = 0.0
        self.device_us = device_us
        self.calls = 0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def repeat(self, calls):
        self.calls = calls

    def start(self, _):
        self.now += 30e-6
        self.free = max(self.free, self.now) + self.calls * self.device_us * 1e-6

    def wait(self, _):
        self.now = max(self.now, self.free)


def test_a_wait_that_something_else_held_up_makes_no_program_long(monkeypatch):
    runner = Runner(monkeypatch, 50)
    held_up = iter([0, 2e-3])

    def wait(_):
        runner.now = max(runner.now, runner.free) + next(held_up, 0)

    monkeypatch.setattr(runner, "wait", wait)
    timing.lengthen(runner, timing.PROGRAM_CALLS, "gpu")
    assert runner.calls == 16


@pytest.mark.parametrize(("device_us", "calls"), [(500, 1), (100, 4), (50, 16), (8, 64), (2, 64), (0.1, 64)])
def test_a_program_is_long_enough_to_hide_the_host(monkeypatch, device_us, calls):
    runner = Runner(monkeypatch, device_us)
    timing.lengthen(runner, timing.PROGRAM_CALLS, "gpu")
    assert runner.calls == calls
    took = measure(runner.start, runner.wait, calls, "gpu", 0.0)
    assert took.host_us == pytest.approx(30 / calls)
    assert took.median_us == pytest.approx(max(device_us, 30 / calls), rel=0.02)


def test_a_reference_stays_as_it_is(monkeypatch):
    runner = Runner(monkeypatch, 2)
    timing.lengthen(runner, (1,), "gpu")
    assert runner.calls == 1


def test_roofline_takes_the_larger_limit():
    roofline = Roofline(copy_gb_s=10.0, product_gflop_s={"f32": 50.0, "bf16": 100.0})
    assert roofline.time_us(Cost(10_000), "bf16") == (1.0, "memory")
    assert roofline.time_us(Cost(10_000, 100_000_000), "bf16") == (1000.0, "product")


def test_a_wider_product_will_do():
    roofline = Roofline(copy_gb_s=1.0, product_gflop_s={"f32": 50.0, "bf16": 20.0})
    assert roofline.rate("fp8") == roofline.rate("bf16") == roofline.rate("f32") == 50.0
    assert Roofline(1.0, {"f32": 50.0, "bf16": 99.0}).rate("f32") == 50.0


@pytest.mark.parametrize("dtypes", [("f32", "bf16"), ("fp8",)])
def test_measure_roofline(monkeypatch, dtypes):
    monkeypatch.setitem(timing.PROBES, "cpu", Probe(1, 64, dtypes))
    roofline = measure_roofline(jax.devices("cpu")[0], 0.0)
    assert roofline.copy_gb_s > 0
    assert roofline.product_gflop_s.keys() == set(dtypes)
    assert all(rate > 0 for rate in roofline.product_gflop_s.values())
