"""Runs a case: checks each implementation and each peer against the oracle, then times it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from bench import timing
from bench.kernels import CHECKED_ROWS, Case
from bench.peers import Missing, Peer, torch_for
from bench.timing import Time

IMPLEMENTATIONS = {"cpu": ("xla", "reference"), "gpu": ("pallas", "xla", "reference")}
MAX_SETS = 256  # of inputs


@dataclass(frozen=True)
class Outcome:
    """What became of one implementation at one case. `time` is None where it was not timed, and `why` then says why
    not; `failed` is whether that is a fault, as a wrong result is."""

    implementation: str
    peer: bool
    time: Time | None = None
    error: float | None = None
    why: str = ""
    failed: bool = False


class Inputs:
    """A case's inputs on JAX's default device, and in numpy those of the first call.

    `varied` are so many that what the calls move, counted as the case's cost counts it, is twice what a cache holds.
    """

    def __init__(self, case: Case, platform: str, seed: int):
        rng = np.random.default_rng(seed)
        sets = math.ceil(2 * timing.CACHE_BYTES[platform] / case.cost.bytes)
        shared = case.shared(rng)
        varied = [case.varied(rng) for _ in range(min(max(2, sets), MAX_SETS))]
        self.first = shared, varied[0]
        self.rows = rng.choice(case.rows, min(case.rows, CHECKED_ROWS), replace=False)
        self.shared, self.varied = jax.device_put((shared, varied))


class JaxRunner:
    """Runs ``call(shared, varied)``, a function of JAX arrays, in compiled programs of `calls` calls one after another.

    Under ``jit``, as a model calls the ops: checks of arguments' values are not in the time.
    """

    calls = 1

    def __init__(self, case: Case, inputs: Inputs, call: Callable[[tuple, tuple], Any]):
        self.inputs = inputs
        donated = 1 if case.donated else 0

        def program(pools, shared, group):
            outputs = []
            for varied in group:
                if outputs and not donated:  # one after the other, as they are where each writes the pool
                    varied, _ = lax.optimization_barrier((varied, outputs[-1]))
                outputs.append(call((*pools, *shared), varied))
                if donated:
                    pools = (outputs.pop(),)
            return pools if donated else outputs

        self._program = jax.jit(program, donate_argnums=0)
        self._pools, self._shared = inputs.shared[:donated], inputs.shared[donated:]
        self._donated = bool(donated)

    def _group(self, first: int) -> tuple:
        sets = self.inputs.varied
        return tuple(sets[(first + j) % len(sets)] for j in range(self.calls))

    def output(self):
        """What the first call gives, in numpy."""
        out = self._program(jax.tree.map(lambda x: x.copy(), self._pools), self._shared, (self.inputs.varied[0],))
        return jax.tree.map(np.asarray, out[0])

    def start(self, i: int):
        if not self._donated:
            return self._program((), self._shared, self._group(i * self.calls))
        if i == 0:
            self._pools = jax.tree.map(lambda x: x.copy(), self._pools)  # the inputs stay for others
        self._pools = self._program(self._pools, self._shared, self._group(i * self.calls))
        return self._pools

    wait = staticmethod(jax.block_until_ready)


class TorchRunner:
    """Runs a peer of PyTorch, call by call."""

    calls = 1

    def __init__(self, case: Case, inputs: Inputs, platform: str, peer: Peer):
        self._torch, device = torch_for(platform)
        self._peer = peer

        def put(arrays):
            return tuple(self._torch.from_numpy(np.array(x)).to(device) for x in arrays)

        self._shared, self._varied = put(inputs.first[0]), [put(varied) for varied in inputs.varied]
        self._on_gpu = platform == "gpu"

    def output(self):
        return self.start(0).cpu().numpy()

    def start(self, i: int):
        return self._peer.call(self._torch, self._shared, self._varied[i % len(self._varied)])

    def wait(self, _):
        if self._on_gpu:
            self._torch.cuda.synchronize()


def outcomes(case: Case, platform: str, *, seconds: float, seed: int = 0) -> Iterator[Outcome]:
    """Of each implementation that ``platform`` could have, then of each peer, on JAX's default device.

    - `seconds`: how long each is timed.
    - `seed`: of the inputs.
    """
    inputs = Inputs(case, platform, seed)
    jax_runner = partial(JaxRunner, case, inputs)
    for name in IMPLEMENTATIONS[platform]:
        if name in case.refused:
            yield Outcome(name, False, why=case.refused[name])
        else:
            make = partial(jax_runner, partial(case.call, name))
            yield _outcome(case, name, make, inputs, platform, seconds)
    for name, peer in case.peers.items():
        if peer.library == "jax":
            make = partial(jax_runner, partial(peer.call, jax))
        else:
            make = partial(TorchRunner, case, inputs, platform, peer)
        yield _outcome(case, name, make, inputs, platform, seconds)


def _outcome(case: Case, name: str, make: Callable, inputs: Inputs, platform: str, seconds: float) -> Outcome:
    peer = name in case.peers
    check = case.peer_error if peer else case.error
    assert check is not None
    metric, bound = case.metric
    try:
        runner = make()
        error = check(*inputs.first, runner.output(), inputs.rows)
        if not error <= bound:
            return Outcome(name, peer, None, error, f"{error:.3g} {metric}, more than {bound:g}", failed=not peer)
        if platform == "gpu" and isinstance(runner, JaxRunner) and name != "reference":
            if timing.measure(runner.start, runner.wait, 1, platform, 0.0).median_us < timing.SHORT_US:
                runner.calls = timing.SHORT_CALLS
        time = timing.measure(runner.start, runner.wait, runner.calls, platform, seconds)
    except Missing as missing:
        return Outcome(name, peer, why=str(missing))
    except Exception as e:  # one that can't run is a row that says so, and the run goes on to fail at its end
        return Outcome(name, peer, why=f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}", failed=True)
    return Outcome(name, peer, time, error)
