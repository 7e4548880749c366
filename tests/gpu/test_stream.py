"""The two lanes on a card (``bench.stream.measure`` raises where they differ); what an AMD card must show first."""

import pytest
import torch

from bench.stream import measure, ops
from bench.stream.layer import Shape
from bridge.stream import Jit, Stream
from bridge.stream.lane import arrays_of
from jax_mla.aot.chips import CHIPS

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def stream():
    return Stream.of(DEVICE)


def fp8(stream: Stream) -> str:
    return CHIPS[stream.arch].fp8.name


@pytest.mark.parametrize("layout", ["bf16", "fp8_576", "fp8_656"])
def test_a_captured_layer_replayed_over_other_batches_is_the_jit_lane_s(stream, layout):
    shape = Shape(rows=5, requests=8, context=4096, layout=layout, fp8=fp8(stream))
    line = measure.replays(stream, Jit(), DEVICE, shape, steps=60)
    assert line["bitwise"] and line["rows"] > 20 and line["padded_rows"] > 20 and line["rows_on_new_pages"] > 0


def test_a_process_without_jax_runs_what_another_one_built():
    cold, warm, again = measure.starts()
    assert (cold["client"], warm["client"], again["client"]) == ("cpu", "none", "none") and warm["plugins"] == []


def test_triton_s_programs_compute_what_xla_s_do(stream, monkeypatch):
    """Not bit for bit: indices are the same, fp8 codes and scores as near as float32 sums in another order."""
    cases = ops.cases(stream, DEVICE, fp8(stream))
    xla = {f"{f.name} {label}": (f, x, static) for label, f, x, static in cases if "128 heads" not in label}
    monkeypatch.setenv("JAX_MLA_COMPILER", "triton")
    other = Stream.of(DEVICE)
    for name, (function, tensors, static) in xla.items():
        copies = [[x.clone() if i in function.donated else x for i, x in enumerate(tensors)] for _ in range(2)]
        theirs = stream(function, *copies[0], **static)
        launcher = other.launcher(function, arrays_of(function, tensors), **static)
        assert ("triton" in launcher.program.versions) == (function.name not in ("slots_of", "topk_prefill")), name
        for a, b in zip(theirs, launcher(*copies[1]), strict=True):
            if a.dtype in (torch.uint8, torch.int32):
                assert (a != b).float().mean() < 1e-3, name  # a code or a near-tie that rounding tipped
                continue
            a, b = a.float(), b.float()
            finite = torch.isfinite(a)
            assert torch.equal(finite, torch.isfinite(b)), name
            assert (a - b)[finite].norm() <= 1e-3 * a[finite].norm(), name
