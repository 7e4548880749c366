"""How long a call takes, and how long it would take if only the machine's own limits held.

All on the wall clock, after a warm-up. A CPU runs one call at a time, to its end. An accelerator gets many before the
clock is read, so that what starting one costs hides behind the one before; and where a call is shorter than that, many
calls compiled into one *program*, each waiting for the one before. Calls go round among inputs that do not fit in a
cache together.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SHORT_US = 100.0  # a call is short on a GPU, when starting one from the host takes some 30 µs
SHORT_CALLS = 16  # short calls in a program
ROUND_S = {"cpu": 0.0, "gpu": 0.01}  # least time between two readings of the clock
CACHE_BYTES = {"cpu": 64 << 20, "gpu": 256 << 20}  # more than a cache holds; a CPU of many chiplets has more
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}


@dataclass(frozen=True)
class Time:
    """Of one call, in µs: median, 10th and 90th percentile over ``rounds`` readings of the clock."""

    median_us: float
    p10_us: float
    p90_us: float
    rounds: int
    calls_a_round: int


def measure(run: Callable[[int], object], wait: Callable[[object], object], calls: int, platform: str, seconds: float):
    """The ``Time`` of a call, from rounds of some ``seconds`` in all, at least five of them.

    - `run`: starts the i-th program of ``calls`` calls, and returns what ``wait`` waits for.
    - `platform`: "cpu" or "gpu".
    """

    def timed(first: int, programs: int) -> float:
        start = time.perf_counter()
        handle = run(first)
        for i in range(1, programs):
            handle = run(first + i)
        wait(handle)
        return time.perf_counter() - start

    timed(0, 1)  # compiles
    once = min(timed(i, 1) for i in (1, 2))
    programs = max(1, round(ROUND_S[platform] / once))
    samples: list[float] = []
    spent = 0.0
    while len(samples) < 5 or (spent < seconds and len(samples) < 1000):
        elapsed = timed(3 + len(samples) * programs, programs)
        spent += elapsed
        samples.append(elapsed / (programs * calls) * 1e6)
    low, median, high = np.percentile(samples, [10, 50, 90])
    return Time(float(median), float(low), float(high), len(samples), programs * calls)


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
