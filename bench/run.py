"""Runs a case: checks each implementation and each peer against the oracle, then times it."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench import peers, timing
from bench.case import Case, Source
from bench.peers import JaxPeer, Missing, Peer, TorchPeer
from bench.timing import Time

logger = logging.getLogger(__name__)

PROGRAM_CALLS_OF = {"reference": (1,), "xla": (1, 4)}  # what is not meant to be fast: compiling it takes longest
IMPLEMENTATIONS = {"cpu": ("xla", "reference"), "gpu": ("pallas", "xla", "reference")}
CHECKED_ROWS = 16  # of a result; all where it has no more
MAX_SETS = 32  # of inputs
MAX_GRAPHS = 16


@dataclass(frozen=True)
class Outcome:
    """What became of one implementation at one case. `time` is None where it was not timed, and `why` then says why
    not; `failed` is whether that is a fault, as a wrong result is. `metric`: of `error`, and its bound. `versions`: of
    the packages a peer comes from. `part`: whether it is a peer that does only a part of the op's work."""

    implementation: str
    peer: bool
    time: Time | None = None
    error: float | None = None
    why: str = ""
    failed: bool = False
    metric: tuple[str, float] = ("", 0.0)
    versions: dict[str, str] | None = field(default=None)
    part: bool = False


class Inputs:
    """A case's inputs on JAX's default device, and in numpy those of the first call.

    `varied` are so many that what the calls move, counted as the case's cost counts it, is twice what a cache holds;
    but no more than ``MAX_SETS``, so calls that move less than some 16 MB may find inputs in a cache of that size, as
    they do in a model, where the op before has just written them. Pools are too large for a cache in any case.
    """

    def __init__(self, case: Case, platform: str, seed: int):
        source = Source(seed)
        sets = math.ceil(2 * timing.CACHE_BYTES[platform] / case.cost.bytes)
        self.shared = case.shared(source)
        self.varied = [case.varied(source) for _ in range(min(max(2, sets), MAX_SETS))]
        self.first: tuple[tuple, tuple] = jax.device_get((self.shared, self.varied[0]))
        self.rows = np.random.default_rng(seed).choice(case.rows, min(case.rows, CHECKED_ROWS), replace=False)

    def group(self, first: int, calls: int) -> list[tuple]:
        """The inputs of ``calls`` calls from the ``first`` on."""
        return [self.varied[(first + j) % len(self.varied)] for j in range(calls)]


class JaxRunner:
    """Runs ``call(shared, varied)``, a function of JAX arrays, in compiled programs of `calls` calls one after another.

    Under ``jit``, as a model calls the ops: checks of arguments' values are not in the time. What the host does for a
    program goes by its arguments and results, some µs for each, so a program of many calls takes every set of inputs
    once, whatever it calls with them, and gives of each result of our kernels one number, without which XLA would leave
    the call out. Of what it compiles itself it would do no more than that number needs: those results are all given.

    - `kernels`: whether ``call`` is made of kernels of ours.
    """

    calls = 1

    def __init__(self, case: Case, inputs: Inputs, call: Callable[[tuple, tuple], Any], kernels: bool = False):
        self.inputs = inputs
        donated = case.donated
        only_pool = donated == 1

        def program(pools, shared, sets, calls):
            result, seen = (), []
            for j in range(calls):
                varied = sets[j % len(sets)]
                if j and not only_pool:  # one after the other, as they are where all they give is a pool
                    varied, _ = lax.optimization_barrier((varied, result))
                result = call((*pools, *shared), varied)
                if donated:
                    result = result if isinstance(result, tuple) else (result,)
                    pools, result = result[:donated], result[donated:]
                seen.append(_glance(result) if kernels else result)
            if kernels:
                return pools, result if calls == 1 else (), jnp.stack(seen)
            return pools, (), seen

        self._program = jax.jit(program, donate_argnums=0, static_argnums=3)
        self._pools, self._shared = inputs.shared[:donated], inputs.shared[donated:]
        self._donated, self._kernels = donated, kernels

    def repeat(self, calls: int) -> None:
        """From now on so many calls in a program."""
        self.calls = calls

    def output(self):
        """What the first call gives, in numpy."""
        pools, out, seen = self._program(self._copies(), self._shared, [self.inputs.varied[0]], 1)
        if not self._kernels:
            (out,) = seen
        if not self._donated:
            return jax.device_get(out)
        return jax.device_get((*pools, *out) if out else pools[0])

    def _copies(self) -> tuple:
        return jax.tree.map(lambda x: x.copy(), self._pools)

    def start(self, i: int):
        """Pools, and of each call what it gave, or one number of that."""
        if i == 0 and self._donated:
            self._pools = self._copies()  # the inputs stay for others
        different = len(self.inputs.varied)
        sets = self.inputs.varied if self.calls >= different else self.inputs.group(i * self.calls, self.calls)
        self._pools, _, seen = self._program(self._pools, self._shared, sets, self.calls)
        return self._pools, seen

    wait = staticmethod(jax.block_until_ready)


def _glance(result) -> jax.Array:
    """A number of each array in ``result``, added up."""
    numbers = [x.reshape(-1)[0].astype(jnp.float32) for x in jax.tree.leaves(result)]
    return sum(numbers, jnp.float32(0))


class TorchRunner:
    """Runs a peer of PyTorch: on a GPU in CUDA graphs of `calls` calls one after another, which stand beside the
    programs of ``JaxRunner``; on a CPU, and where a peer can't be captured, call by call."""

    calls = 1
    captured = True

    def __init__(self, case: Case, inputs: Inputs, platform: str, peer: TorchPeer):
        self._torch, _ = peers.torch_for(platform)
        self._peer = peer
        self._on_gpu = platform == "gpu"
        if self._on_gpu:
            self._torch.cuda.empty_cache()  # what peers before it kept: JAX holds most of the memory

        def put(arrays):
            return tuple(peers.to_torch(self._torch, x) for x in arrays)

        jax.block_until_ready((inputs.shared, inputs.varied))
        shared = put(inputs.shared)
        pools = tuple(pool.clone() for pool in shared[: case.donated])
        bind = peer.make(self._torch, (*pools, *shared[case.donated :]))
        self._calls = [bind(put(varied)) for varied in inputs.varied]
        self._graphs = []

    def repeat(self, calls: int) -> None:
        """From now on so many calls in a graph."""
        self.calls = calls
        if not self._on_gpu:
            return
        torch = self._torch
        self._graphs.clear()
        if not self.captured:
            return
        some = max(1, min(len(self._calls) // calls, MAX_GRAPHS))
        memory = torch.cuda.graph_pool_handle()
        for g in range(some):
            group = [self._calls[(g * calls + j) % len(self._calls)] for j in range(calls)]
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):  # JAX has threads too
                    outputs = [call() for call in group]  # all alive, as a program's outputs are
            except RuntimeError as e:
                logger.warning("not captured, so timed call by call: %s", e)
                self.captured = False
                self._graphs.clear()
                break
            del outputs
            self._graphs.append(graph)
        torch.cuda.synchronize()

    def output(self):
        """What the first call gives, in numpy. The first of all calls: it compiles what has to be compiled."""
        raw = self._calls[0]()
        if self._on_gpu:
            self._torch.cuda.synchronize()
        return jax.tree.map(partial(peers.to_numpy, self._torch), self._peer.result(raw))

    def start(self, i: int):
        if self._graphs:
            self._graphs[i % len(self._graphs)].replay()
            return None
        for j in range(self.calls):
            self._calls[(i * self.calls + j) % len(self._calls)]()
        return None

    def wait(self, _):
        if self._on_gpu:
            self._torch.cuda.synchronize()


def outcomes(case: Case, platform: str, *, seconds: float, seed: int = 0) -> Iterator[Outcome]:
    """Of each implementation that ``platform`` could have, then of each peer, on JAX's default device.

    - `seconds`: how long each is timed.
    - `seed`: of the inputs.
    """
    inputs = Inputs(case, platform, seed)
    for name in IMPLEMENTATIONS[platform]:
        if name in case.refused:
            yield Outcome(name, False, why=case.refused[name])
        else:
            make = partial(JaxRunner, case, inputs, partial(case.call, name), kernels=name == "pallas")
            yield _outcome(case, name, make, inputs, platform, seconds)
    for name, peer in case.peers.items():
        if isinstance(peer, JaxPeer):
            make = partial(JaxRunner, case, inputs, peer.call)
        else:
            make = partial(TorchRunner, case, inputs, platform, peer)
        yield _outcome(case, name, make, inputs, platform, seconds, peer)


def _outcome(
    case: Case, name: str, make: Callable, inputs: Inputs, platform: str, seconds: float, peer: Peer | None = None
) -> Outcome:
    check, metric = case.error, case.metric
    result = partial(Outcome, name, peer is not None)
    if peer is not None:
        check, metric = peer.error or check, peer.metric or metric
        result = partial(result, versions=peers.versions(peer.packages), part=peer.part)
    result = partial(result, metric=metric)
    unit, bound = metric
    try:
        runner = make()
        error = check(*inputs.first, runner.output(), inputs.rows)
        if not error <= bound:
            return result(error=error, why=f"{error:.3g} {unit}, more than {bound:g}", failed=True)
        if platform == "gpu":
            timing.lengthen(runner, PROGRAM_CALLS_OF.get(name, timing.PROGRAM_CALLS), platform)
            seconds = 0.0 if name == "reference" else seconds  # the fewest rounds: no one waits for it
        time = timing.measure(runner.start, runner.wait, runner.calls, platform, seconds)
    except Missing as missing:
        return result(why=str(missing))
    except Exception as e:  # one that can't run is a row that says so, and the run goes on
        return result(why=f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}", failed=True)
    if isinstance(runner, TorchRunner) and not runner.captured:
        return replace(result(time=time, error=error), implementation=f"{name}, call by call")
    return result(time=time, error=error)
