"""Every adapter, against stand-ins that are as strict about layouts as the kernels, checked as a run checks it; and the
stand-ins' signatures against SGLang's own source."""

import ast
import importlib.metadata
import importlib.util
import inspect
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import kernels, peers
from bench.peers import aiter, base, deep_gemm, flash_mla, sglang
from bench.run import Inputs, JaxRunner, TorchRunner
from bench.sets import SETS, cases
from tests.bench.peers import fakes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*", "ignore:.*CUDA initialization.*")

CASES = {
    "index_write": kernels.index_write(3, 256),
    "index_query": kernels.index_query(3, 8),
    "index_logits_ragged": kernels.index_logits_ragged(4, 96, 32),
    "index_logits_paged": kernels.index_logits_paged(2, 128, 1, 32),
    "index_logits_paged two rows": kernels.index_logits_paged(2, 128, 2, 32),
    "select": kernels.select(3, 1024, 512),
    "select many rows": kernels.select(sglang.RAGGED_ROWS, 1024, 512),
    "kv_write bf16": kernels.kv_write(3, "bf16", 64),
    "kv_write fp8_656": kernels.kv_write(3, "fp8_656", 64),
    "kv_write fp8_576": kernels.kv_write(3, "fp8_576", 64),
    "sparse_mla bf16": kernels.sparse_mla(2, 16, 128, "bf16", 512),
    "sparse_mla bf16 many rows": kernels.sparse_mla(1024, 2, 128, "bf16", 256),
    "sparse_mla fp8_656": kernels.sparse_mla(2, 16, 128, "fp8_656", 512),
    "sparse_mla fp8_656 128 heads": kernels.sparse_mla(1, 128, 128, "fp8_656", 512),
    "sparse_mla fp8_576": kernels.sparse_mla(2, 16, 128, "fp8_576", 512),
    "layer": kernels.layer(256, 16, 128, "fp8_656", 512, index_heads=32),
}
PAIRS = [(name, peer) for name, case in CASES.items() for peer in case.peers]


@pytest.fixture(scope="module")
def inputs():
    made = {}

    def of(name):
        if name not in made:
            made[name] = Inputs(replace(CASES[name], cost=replace(CASES[name].cost, bytes=1 << 40)), "cpu", seed=3)
        return made[name]

    return of


@pytest.fixture
def stood_in(monkeypatch):
    fakes.install_all(monkeypatch)
    for module in (aiter, deep_gemm, flash_mla, sglang):
        monkeypatch.setattr(module, "needs_gpu", lambda *_: None)


def runner_of(case, inputs, peer):
    if isinstance(peer, peers.JaxPeer):
        return JaxRunner(case, inputs, peer.call)
    return TorchRunner(case, inputs, "cpu", peer)


def error_of(case, inputs: Inputs, peer, output) -> float:
    return (peer.error or case.error)(*inputs.first, output, inputs.rows)


@pytest.mark.parametrize(("name", "peer"), PAIRS)
def test_an_adapter_gives_the_peer_its_layout_and_us_ours(stood_in, inputs, name, peer):
    case, given = CASES[name], inputs(name)
    peer = case.peers[peer]
    runner = runner_of(case, given, peer)
    _, bound = peer.metric or case.metric
    assert error_of(case, given, peer, runner.output()) <= bound
    runner.wait(runner.start(0))  # a second set of inputs, after the first
    runner.wait(runner.start(1))


def test_a_peer_writes_to_a_pool_of_its_own(stood_in, inputs):
    for name in ("kv_write fp8_656", "index_write", "layer"):
        case, given = CASES[name], inputs(name)
        pools = case.donated
        for peer in case.peers.values():
            runner_of(case, given, peer).output()
        for before, now in zip(given.first[0][:pools], given.shared[:pools], strict=True):
            assert np.array_equal(np.asarray(now), before)


def test_fp8_products_are_what_costs_the_bound(stood_in, inputs):
    """The bound of 576-byte peers is some times what rounding queries and probabilities to fp8 costs, not a hundred."""
    case, given = CASES["sparse_mla fp8_576"], inputs("sparse_mla fp8_576")
    peer = case.peers["SGLang Triton"]
    assert peer.metric is not None
    error = error_of(case, given, peer, runner_of(case, given, peer).output())
    assert peer.metric[1] / 20 < error < peer.metric[1] / 2


def test_flash_mla_keeps_its_schedule(stood_in, inputs, monkeypatch):
    made = []
    monkeypatch.setattr(fakes.Schedule, "__init__", lambda self: made.append(self))
    case, given = CASES["sparse_mla fp8_656"], inputs("sparse_mla fp8_656")
    runner = runner_of(case, given, case.peers[flash_mla.label(16)])
    for i in range(3):
        runner.start(i)
    assert [schedule.used for schedule in made] == [3]


def test_flash_mla_of_vllm(stood_in, inputs, monkeypatch):
    """The same results through vLLM's two functions, whose library is named by the environment."""
    import torch

    class Ops:
        @staticmethod
        def sparse_prefill_fwd(q, kv, indices, scale, d_v, sink, length, out):
            return fakes.flash_mla_sparse_fwd(q, kv, indices, scale, d_v, sink, length, use_legacy=True)

        @staticmethod
        def sparse_decode_fwd(q, cache, indices, length, sink, schedule, splits, xkv, xidx, xlen, d_v, scale, out):
            assert (schedule is None) == (splits is None)
            static = dict(is_fp8_kvcache=True, indices=indices, use_legacy=True)
            out, lse = fakes.flash_mla_with_kvcache(q, cache, None, None, d_v, fakes.Schedule(), None, scale, **static)
            return out, lse, "schedule", "splits"

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "flash_mla" else found(name, *a))
    monkeypatch.setenv(flash_mla.LIBRARY, "/somewhere/_flashmla_C.abi3.so")
    loaded = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    monkeypatch.setattr(torch.ops, "_flashmla_C", Ops, raising=False)
    for name in ("sparse_mla bf16", "sparse_mla fp8_656"):
        case, given = CASES[name], inputs(name)
        peer = case.peers[flash_mla.label(16)]
        runner = runner_of(case, given, peer)
        assert error_of(case, given, peer, runner.output()) <= case.metric[1]
        runner.start(1)
    assert set(loaded) == {"/somewhere/_flashmla_C.abi3.so"}


def test_heads_that_flash_mla_has_no_kernel_for():
    assert [flash_mla.padded_heads(n) for n in (1, 64, 65, 128)] == [64, 64, 128, 128]
    assert flash_mla.label(128) == "FlashMLA"
    assert flash_mla.label(16) == "FlashMLA, 16 heads padded to 64"
    with pytest.raises(peers.Missing, match="not 129"):
        flash_mla.padded_heads(129)


@pytest.mark.parametrize(
    ("case", "peer", "why"),
    [
        (kernels.sparse_mla(2, 3, 16, "fp8_656", 64), "FlashMLA, 3 heads padded to 64", "multiple of 128 slots"),
        (kernels.sparse_mla(2, 3, 16, "bf16", 64), "FlashMLA, 3 heads padded to 64", "multiple of 128 slots"),
        (kernels.index_logits_ragged(4, 96, 8), "DeepGEMM", "32 or 64 heads, not 8"),
        (kernels.select(3, 200, 16), "SGLang fast_topk", "512 or 2048, not 16"),
        (kernels.sparse_mla(1024, 64, 16, "bf16", 64), "SGLang Triton", "32 heads at most, not 64"),
    ],
)
def test_a_shape_that_a_peer_can_not_do_is_missing(stood_in, case, peer, why):
    with pytest.raises(peers.Missing, match=why):
        runner_of(case, Inputs(replace(case, cost=replace(case.cost, bytes=1 << 40)), "cpu", 0), case.peers[peer])


def test_a_library_that_is_not_there(monkeypatch):
    with pytest.raises(peers.Missing, match="^no-such is not installed$"):
        peers.library("no_such_module", "no-such")
    fakes.install(monkeypatch, "half_there")

    def broken(name):
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr(base.importlib, "import_module", broken)
    with pytest.raises(peers.Missing, match="half_there of half-there needs other, which is not installed"):
        peers.library("half_there", "half-there")


def test_a_gpu_only_peer_on_a_cpu():
    import torch

    with pytest.raises(peers.Missing, match="^DeepGEMM runs on a GPU only$"):
        base.needs_gpu(torch.zeros(1), "DeepGEMM")


def test_versions_are_of_what_is_installed():
    assert peers.versions(("jax", "no-such-package")) == {"jax": importlib.metadata.version("jax")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "uint8", "int32"])
def test_arrays_go_to_torch_and_back_with_every_bit(dtype):
    import jax.numpy as jnp
    import torch

    x = jnp.arange(-8, 8).astype(dtype).reshape(4, 4)
    there = peers.to_torch(torch, x)
    assert str(there.dtype) == f"torch.{dtype}"
    back = peers.to_numpy(torch, there)
    assert back.dtype == x.dtype and np.array_equal(back.view(np.uint8), np.asarray(x).view(np.uint8))


def test_each_peer_of_a_case_has_a_name_of_its_own():
    for shapes in SETS:
        for case in cases(shapes):
            assert not {"pallas", "xla", "reference"} & set(case.peers)


SIGNATURES = [(module, function) for module, functions in fakes.SGLANG.items() for function in functions]


@pytest.mark.parametrize(("module", "function"), SIGNATURES, ids=[function.__name__ for _, function in SIGNATURES])
def test_stand_ins_take_what_sglang_takes(module, function):
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None, "the tests need the extra sglang"
    path = Path(spec.origin).parent / "kernels/ops" / f"{module.replace('.', '/')}.py"
    source = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = (n for n in source.body if isinstance(n, ast.FunctionDef) and n.name == function.__name__)
    theirs = [a.arg for a in (*found.args.posonlyargs, *found.args.args)], [a.arg for a in found.args.kwonlyargs]
    parameters = inspect.signature(function).parameters.values()
    ours = (
        [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD],
        [p.name for p in parameters if p.kind is p.KEYWORD_ONLY],
    )
    assert ours == theirs
