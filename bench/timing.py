"""How long a call takes, and how long it would take if only the machine's own limits held.

Counted is the device's time for calls that stand one after the other in its queue, launch gaps on the device included,
as the layers of a model stand. All on the wall clock, after a warm-up, from the first call's start to the last one's
end; and calls go round among inputs that do not fit in a cache together.

A CPU runs one call at a time, to its end. On a GPU the host must not be what is measured. So calls are submitted in
*programs* of 1, 4, 16 or 64 calls, each waiting for the one before: a compiled program of JAX, which XLA itself submits
as a CUDA or HIP graph where it holds five kernels or more (``xla_gpu_graph_min_graph_size``,
``xla_gpu_enable_command_buffer``), or a CUDA graph of a peer's calls in torch; a peer that can't be captured is called
one by one, and its row says so. As many programs as fill a round are queued before the clock is read, so that what
submitting one costs hides behind the one before. For that a program must be long enough: at least ``PROGRAM_US``, and
twice what the host takes to submit it, which is measured too. A row whose longest program falls short of that is the
host's time (``Time.host_us`` beside ``median_us``). A profiler would name each kernel, but under one XLA leaves the
graphs and launches kernels singly, so it would time another program.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

PROGRAM_CALLS = (1, 4, 16, 64)  # calls in a program, the fewest that will do
PROGRAM_US = 400.0  # so that the few µs between two programs are lost in it
LONG_S = 1e-3  # a program that takes so long hides the host whatever that does
BURST = 8  # programs that are submitted to see how long submitting takes; a queue holds more
ROUND_S = {"cpu": 0.0, "gpu": 0.01}  # least time between two readings of the clock
CACHE_BYTES = {"cpu": 64 << 20, "gpu": 256 << 20}  # more than a cache holds; a CPU of many chiplets has more
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}


@dataclass(frozen=True)
class Time:
    """Of one call, in µs: median, 10th and 90th percentile over ``rounds`` readings of the clock; ``host_us`` is what
    the host took to submit it, 0 on a CPU."""

    median_us: float
    p10_us: float
    p90_us: float
    rounds: int
    calls_a_round: int
    host_us: float = 0.0


def measure(run: Callable[[int], object], wait: Callable[[object], object], calls: int, platform: str, seconds: float):
    """The ``Time`` of a call, from rounds of some ``seconds`` in all, at least five of them.

    - `run`: starts the i-th program of ``calls`` calls, and returns what ``wait`` waits for.
    - `platform`: "cpu" or "gpu".
    """
    submitted = 0.0

    def timed(first: int, programs: int) -> float:
        nonlocal submitted
        start = time.perf_counter()
        handle = run(first)
        for i in range(1, programs):
            handle = run(first + i)
        submitted = time.perf_counter() - start
        wait(handle)
        return time.perf_counter() - start

    timed(0, 1)  # compiles
    once = min(timed(i, 1) for i in (1, 2))
    programs = max(1, round(ROUND_S[platform] / once))
    done = 3
    host = 0.0
    if platform == "gpu":
        burst = BURST if once < LONG_S else 1
        timed(done, burst)
        done += burst
        host = submitted / (burst * calls) * 1e6
    samples: list[float] = []
    spent = 0.0
    while len(samples) < 5 or (spent < seconds and len(samples) < 1000):
        elapsed = timed(done, programs)
        done += programs
        spent += elapsed
        samples.append(elapsed / (programs * calls) * 1e6)
    low, median, high = np.percentile(samples, [10, 50, 90])
    return Time(float(median), float(low), float(high), len(samples), programs * calls, host)


def lengthen(runner, choices: Sequence[int], platform: str) -> None:
    """Has ``runner`` put as many calls in a program as make it long enough, few of ``choices`` or the last.

    Each size is compiled, which takes longer than all else; so the next to be tried is the one that would do if a call
    took as long as it does now. It takes no longer in more company, so none is left out that would have been enough.
    """
    calls = choices[0]
    while True:
        runner.repeat(calls)
        if calls == choices[-1]:
            return
        runner.wait(runner.start(0))
        waits = []
        for i in range(1, 4):  # the least of some: one that something else held up is no sign
            start = time.perf_counter()
            runner.wait(runner.start(i))
            waits.append(time.perf_counter() - start)
        if min(waits) >= LONG_S:
            return
        took = measure(runner.start, runner.wait, calls, platform, 0.0)
        if took.median_us * calls >= PROGRAM_US and took.host_us <= took.median_us / 2:
            return
        more = [c for c in choices if c > calls]
        calls = next((c for c in more if c * took.median_us >= PROGRAM_US), more[-1])


@dataclass(frozen=True)
class Roofline:
    """What this machine does at best, measured in this run.

    - `copy_gb_s`: bytes read plus bytes written, in GB/s, of a large array negated in place.
    - `product_gflop_s`: of a large square matrix product, by the dtype of its operands: "f32", "bf16", "fp8".
    """

    copy_gb_s: float
    product_gflop_s: dict[str, float]

    def rate(self, operand: str) -> float:
        """GFLOP/s of the fastest product that takes ``operand`` without rounding it: a wider one will do."""
        order = ["fp8", "bf16", "f32"]
        return max(self.product_gflop_s[d] for d in order[order.index(operand) :] if d in self.product_gflop_s)

    def time_us(self, cost, operand: str) -> tuple[float, str]:
        """The least time of ``cost`` in µs, and which limit sets it: "memory" or "product"."""
        memory = cost.bytes / self.copy_gb_s * 1e-3
        product = cost.flops / self.rate(operand) * 1e-3
        return max((memory, "memory"), (product, "product"))


def product(a, b):
    """``a @ b.T``, unrounded operands and in the way that reaches the units of their dtype: XLA takes those for FP8 for
    scaled products only."""
    if a.dtype == DTYPES["fp8"]:
        a, b = a.astype(jnp.bfloat16) * jnp.bfloat16(0.5), b.astype(jnp.bfloat16) * jnp.bfloat16(0.5)
    precision = lax.Precision.HIGHEST if a.dtype == DTYPES["f32"] else None
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=precision)


@dataclass(frozen=True)
class Probe:
    """What the roofline is measured with: an array of `megabytes`, and products of `size` cubed, of random numbers."""

    megabytes: int
    size: int
    dtypes: tuple[str, ...]


PROBES = {"cpu": Probe(256, 2048, ("f32", "bf16")), "gpu": Probe(2048, 8192, ("f32", "bf16", "fp8"))}


def measure_roofline(device: jax.Device, seconds: float) -> Roofline:
    """The ``Roofline`` of ``device``; ``seconds`` for each of its numbers."""
    platform = platform_of(device)
    probe = PROBES[platform]
    rng = np.random.default_rng(0)

    def put(x):
        return jax.device_put(x, device)

    negate = jax.jit(lambda x: -x, donate_argnums=0)
    state = [put(rng.random((probe.megabytes << 20) // 4, np.float32))]

    def run_negate(_):
        state[0] = negate(state[0])
        return state[0]

    took = measure(run_negate, jax.block_until_ready, 1, platform, seconds)
    copy = 2 * state[0].nbytes / took.median_us * 1e-3
    state.clear()

    multiply = jax.jit(product)
    rates = {}
    numbers = rng.standard_normal((probe.size, probe.size), np.float32)
    for name in probe.dtypes:
        x = put(numbers.astype(DTYPES[name]))
        pairs = [(x, x[::-1]), (x[::-1], x[:, ::-1])]

        def run_product(i, pairs=pairs):
            return multiply(*pairs[i % 2])

        took = measure(run_product, jax.block_until_ready, 1, platform, seconds)
        rates[name] = 2 * probe.size**3 / took.median_us * 1e-3
    return Roofline(copy, rates)


def platform_of(device: jax.Device) -> str:
    """ "cpu" or "gpu"; raises ``NotImplementedError`` for others, which no kernel here is for."""
    if device.platform in ("cpu", "gpu"):
        return device.platform
    if device.platform in ("cuda", "rocm"):
        return "gpu"
    raise NotImplementedError(f"bench: expected a CPU or a GPU, got a device of platform {device.platform!r}")
