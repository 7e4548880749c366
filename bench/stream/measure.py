"""What ``python -m bench stream`` compares and times. Raises ``AssertionError`` where the lanes differ."""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.stream import ops
from bench.stream.layer import Layer, Shape
from bridge.stream import Jit, Stream
from bridge.stream.lane import arrays_of

LAYERS = 61
"""DeepSeek-V3.2's, as many as a graph is timed with."""

ROOT = Path(__file__).resolve().parents[2]


def same(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raises unless both have the same bytes."""
    a, b = (x.detach().contiguous().view(torch.uint8) for x in (a, b))
    if not torch.equal(a, b):
        raise AssertionError(f"{name}: expected the same bytes, got {int((a != b).sum())} of {a.numel()} that differ")


def host_us(call: Callable[[], Any], calls: int = 20, rounds: int = 15) -> float:
    """The host's time of a call, while the device's queue has room: the median of rounds."""
    call()
    took = []
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        took.append((time.perf_counter() - start) / calls * 1e6)
    gc.enable()
    torch.cuda.synchronize()
    return median(took)


def functions(stream: Stream, jit: Jit, device: torch.device, fp8: str) -> Iterator[dict]:
    """Each function on both lanes, bitwise, and what a call takes the host."""
    for label, function, tensors, static in ops.cases(stream, device, fp8):
        name = f"{function.name} {label}".strip()
        copies = [[x.clone() if i in function.donated else x for i, x in enumerate(tensors)] for _ in range(2)]
        for a, b in zip(stream(function, *copies[0], **static), jit(function, *copies[1], **static), strict=True):
            same(name, a, b)
        launcher = stream.launcher(function, arrays_of(function, tensors), **static)
        yield dict(
            what="function",
            name=function.name,
            label=label,
            bitwise=True,
            launches=len(launcher.program.launches),
            bound_us=host_us(launcher.bind(*copies[0])),
            stream_us=host_us(lambda c=copies[0], f=function, s=static: stream(f, *c, **s)),
            jit_us=host_us(lambda c=copies[1], f=function, s=static: jit(f, *c, **s)),
        )


def replays(stream: Stream, jit: Jit, device: torch.device, shape: Shape, steps: int) -> dict:
    """A layer captured once and replayed ``steps`` times over other batches, each step beside the jit lane, which has
    pools of its own; all results and both pools bitwise, and every 20th beside the ops' references."""
    layer = Layer(shape, device)
    layer.fill(stream)
    layer.step(0)
    bound = layer.bind(stream)
    graph = capture(bound)
    eager = dict(layer.tensors) | {n: layer.tensors[n].clone() for n in ("index_pool", "kv_pool")}
    rows = edges = padded = 0
    for number in range(steps):
        layer.step(number)
        graph.replay()
        layer.run(jit, eager)
        for name in ("topk", "chosen", "out", "lse", "index_pool", "kv_pool"):
            same(f"step {number}: {name}", layer.tensors[name], eager[name])
        lengths = layer.tensors["lengths"]
        rows += int((lengths > 0).sum())
        padded += int((lengths <= 0).sum())
        edges += int(((lengths > 1) & (lengths % shape.page == 1)).sum())
        if not bool(torch.isfinite(layer.tensors["out"]).all()):
            raise AssertionError(f"step {number}: expected finite results, got some that are not")
        if number % REFERENCE_EVERY == 0:
            against_reference(f"step {number}", layer)
    return dict(
        what="replays",
        layer=str(shape),
        steps=steps,
        bitwise=True,
        rows=rows,
        padded_rows=padded,
        rows_on_new_pages=edges,
        launches=layer.launches(stream),
    )


REFERENCE_EVERY = 20


def against_reference(where: str, layer: Layer) -> None:
    """Raises unless a step's selection and attention are what the ops' references make of the same pools: all but a
    hundredth of the tokens, which may be near-ties of FP8 scores, and ``calc_diff`` of 5e-6."""
    from bridge.dlpack import to_jax, to_torch
    from jax_mla import IndexLayout, index_query, kv_layout, sparse_mla, topk_decode
    from jax_mla.fp8 import fp8_format

    shape = layer.shape
    how: dict[str, Any] = dict(implementation="reference")
    t = {name: to_jax(x, name) for name, x in layer.tensors.items()}
    _, (_, _, _, topk), _, (_, _, _, attend) = layer.calls()
    fp8, index = fp8_format(shape.fp8), IndexLayout(shape.page, fp8_format(shape.fp8))
    query = t["q"], t["weights"], t["cos_sin"], t["positions"]
    q8, folded = index_query(*query, fp8=fp8, interleaved=topk["interleaved"], hadamard=topk["hadamard"], **how)
    seen = t["index_pool"], t["table"], t["requests"], t["lengths"]
    static = dict(k=shape.k, layout=index, max_len=shape.context, as_slots=False)
    expected = topk_decode(q8, folded, *seen, **static, **how)
    assert not isinstance(expected, tuple)
    expected = to_torch(expected)
    for row, (ours, theirs) in enumerate(zip(layer.tensors["topk"], expected, strict=True)):
        count = int((theirs >= 0).sum())
        found = int(torch.isin(ours[ours >= 0], theirs[theirs >= 0]).sum())
        if int((ours >= 0).sum()) != count or found < 0.99 * count:
            raise AssertionError(f"{where}, row {row}: expected the reference's {count} tokens, got {found} of them")
    layout = kv_layout(shape.layout, attend["fp8"])
    given = t["q_nope"], t["q_rope"], t["kv_pool"], t["chosen"]
    out, lse = sparse_mla(*given, layout=layout, softmax_scale=attend["softmax_scale"], **how)
    for name, reference in (("out", out), ("lse", lse)):
        ours, theirs = layer.tensors[name].double(), to_torch(reference).double()
        finite = torch.isfinite(theirs)
        if not torch.equal(finite, torch.isfinite(ours)):
            raise AssertionError(f"{where}: {name}: expected -inf where the reference has it")
        ours, theirs = ours[finite], theirs[finite]
        error = float(1 - 2 * (ours * theirs).sum() / (ours**2 + theirs**2).sum()) if ours.any() else 0.0
        if not error <= 5e-6:
            raise AssertionError(f"{where}: {name}: expected a calc_diff of 5e-6 at most, got {error:.2g}")


def capture(calls: list[Callable[[], Any]], times: int = 1) -> torch.cuda.CUDAGraph:
    """A graph of ``calls``, which have been called before."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            for call in calls:
                call()
    return graph


def layers(stream: Stream, jit: Jit, device: torch.device, shape: Shape, length: int) -> dict:
    """Host and device time of a layer with ``length`` tokens a row, beside what a launch of torch's own takes the
    host."""
    layer = Layer(shape, device)
    layer.fill(stream)
    layer.step(0, length)
    bound = layer.bind(stream)
    eager = dict(layer.tensors)

    def run_bound():
        for call in bound:
            call()

    graph = capture(bound, LAYERS)
    graph.replay()
    took = []
    for _ in range(20):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        took.append(events[0].elapsed_time(events[1]) * 1e3 / LAYERS)
    return dict(
        what="layer",
        layer=str(shape),
        length=length,
        launches=layer.launches(stream),
        graph_gpu_us=median(took),
        graph_host_us=host_us(graph.replay, 2) / LAYERS,
        torch_launch_us=host_us(partial(torch.zeros(8, device=device).add_, 1)),
        bound_us=host_us(run_bound),
        stream_us=host_us(lambda: layer.run(stream, dict(eager))),
        jit_us=host_us(lambda: layer.run(jit, dict(eager)), 5),
    )


def starts() -> Iterator[dict]:
    """A layer in processes of their own: one that builds its programs, where JAX is on the CPU, and two that find them
    and can't import JAX. All three give the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for name, more in (("cold", ["--build"]), ("warm", []), ("warm again", [])):
            file = Path(folder, f"{len(results)}.pt")
            environment = os.environ | dict(JAX_MLA_CACHE=str(Path(folder, "cache")), JAX_PLATFORMS="cpu")
            command = [sys.executable, "-m", "bench.stream.alone", "8", str(file), *more]
            done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise AssertionError(f"{name}: {done.stderr[-3000:]}")
            row = json.loads(done.stdout.splitlines()[-1])
            if row["client"] not in ("none", "cpu") or (not more and row["plugins"]):
                raise AssertionError(f"{name}: expected no GPU client of JAX's, got {row}")
            results.append(torch.load(file))
            for key, value in results[0].items():
                same(f"{name}: {key}", results[-1][key], value)
            yield dict(what="start", name=name, bitwise=True) | row
