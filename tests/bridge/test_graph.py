"""Decode in a graph: the metadata that a graph makes anew at each replay, and what a capture would record."""

import unittest
from types import SimpleNamespace

import pytest
import torch

from bridge.sglang import metadata
from bridge.stream import Stream
from bridge.stream.driver import CUDA
from tests.bridge.pools import LATENT, PAGE, ROPE, runner
from tests.bridge.stream import fake
from tests.bridge.stream.conftest import cache_folder, driver, fake_library  # noqa: F401
from tests.bridge.test_backend import tensors
from tests.bridge.test_indexer import HIDDEN, LORA, module
from tests.bridge.test_kit import fp8_prefixes, kit  # noqa: F401

DECODE = SimpleNamespace(name="DECODE", is_idle=lambda: False, is_decode=lambda: True)
HEADS = 4


def batch(lengths, requests, slots):
    """What SGLang captures with: static int64 tensors of the captured size, padded rows with the backend's fill."""
    return SimpleNamespace(
        forward_mode=DECODE,
        batch_size=len(lengths),
        seq_lens=torch.tensor(lengths),
        req_pool_indices=torch.tensor(requests),
        positions=torch.tensor([max(n - 1, 0) for n in lengths]),
        out_cache_loc=torch.tensor(slots),
    )


def test_padded_rows_write_nothing_and_real_ones_where_they_should():
    table = torch.zeros(3, 128, dtype=torch.int32)
    rows = metadata.static_decode(batch([5, 9, 0, 0], [1, 2, 0, 0], [70, 80, 0, 0]), table)
    assert (rows.count, rows.max_len) == (4, 128)
    assert rows.lengths.tolist() == [5, 9, 0, 0] and rows.positions.tolist() == [4, 8, 0, 0]
    assert rows.write_slots.tolist() == [70, 80, -1, -1] and rows.requests.tolist() == [1, 2, 0, 0]
    assert {x.dtype for x in (rows.lengths, rows.positions, rows.write_slots, rows.requests)} == {torch.int32}


@pytest.fixture
def streaming(pools, driver, monkeypatch):  # noqa: F811
    """A backend on the stream lane, whose driver only records."""
    from bridge.sglang import backend as module
    from bridge.sglang.cache import InPlaceWriter

    lane = Stream(driver, fake.ARCH)
    monkeypatch.setattr(module, "lane_for", lambda device: lane)
    monkeypatch.setattr(module, "writer_for", lambda device: InPlaceWriter())
    return module.JaxMLABackend(runner(*pools("fp8_656"))), lane


def layer_calls(backend, driver, layer: int, fb, rows: int, other=lambda topk: topk):  # noqa: F811
    """One layer's indexer and attention; the kernels that were launched, and their addresses."""
    from bridge.sglang import indexer as ours

    draw = torch.Generator().manual_seed(layer)
    x, q_lora = (torch.randn(rows, n, generator=draw).to(torch.bfloat16) for n in (HIDDEN, LORA))
    driver.log()
    topk = ours.forward(backend, module(), x, q_lora, fb.positions, fb, layer)
    assert topk is not None
    given = tensors(rows)
    attention = SimpleNamespace(
        layer_id=layer, tp_q_head_num=HEADS, v_head_dim=LATENT, head_dim=LATENT + ROPE, scaling=0.07
    )
    ropes = dict(q_rope=given["q_rope"], k_rope=given["k_rope"])
    out = backend.forward_decode(given["q"], given["k"], given["k"], attention, fb, topk_indices=other(topk), **ropes)
    assert out.shape == (rows, HEADS * LATENT)
    return driver.launches()


@pytest.mark.parametrize("driver", [CUDA], indirect=True)
def test_a_layer_of_a_capture_is_a_few_launches_on_its_own_pools(streaming, driver, monkeypatch):  # noqa: F811
    from sglang.srt.state_capturer import indexer_topk

    monkeypatch.setattr(indexer_topk, "get_global_indexer_capturer", lambda: None)
    backend, lane = streaming
    fb = batch([5, 9, 0, 0], [1, 2, 0, 0], [70, 80, 0, 0])
    backend.init_cuda_graph_state(4, 4)
    backend.init_forward_metadata_out_graph(fb, in_capture=True)
    backend.init_forward_metadata_in_graph(fb)
    layer_calls(backend, driver, 0, fb, 4)  # SGLang's warm-up
    driver.is_capturing = True  # from here on a program that isn't loaded is an error
    backend.init_forward_metadata_in_graph(fb)
    seen = [layer_calls(backend, driver, layer, fb, 4) for layer in (0, 1)]
    for layer, launches in enumerate(seen):
        names = [name.rstrip("_0123456789") for name, _, _ in launches]
        assert names == [
            *("index_write", "index_query", "index_logits_paged", "select"),
            *("kv_write_fp", "sparse_mla_fp"),  # and a merge, where more than a few tokens are selected
        ]
        pools = backend.caches.index(layer).data_ptr(), backend.caches.kv(layer).data_ptr()
        addresses = [set(found) for _, _, found in launches]
        assert [pools[0] in found for found in addresses] == [True, False, True, False, False, False]
        assert [pools[1] in found for found in addresses] == [False, False, False, False, True, True]
    assert len(lane._launchers) == 4


@pytest.mark.parametrize("driver", [CUDA], indirect=True)
def test_another_selection_s_slots_are_looked_up(streaming, driver, monkeypatch):  # noqa: F811
    """One that SGLang copied, or took from another rank."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.state_capturer import indexer_topk

    monkeypatch.setattr(indexer_topk, "get_global_indexer_capturer", lambda: None)
    monkeypatch.setattr(dsa_indexer, "_broadcast_indexer_topk_from_rank0_impl", lambda topk: None)
    backend, _ = streaming
    fb = batch([5, 9, 0, 0], [1, 2, 0, 0], [70, 80, 0, 0])
    backend.init_forward_metadata_in_graph(fb)
    assert "loop_select_fusion" not in [name for name, _, _ in layer_calls(backend, driver, 1, fb, 4)]
    copied = layer_calls(backend, driver, 1, fb, 4, torch.clone)
    backend.init_forward_metadata_in_graph(fb)
    with envs.SGLANG_DSA_TOPK_BROADCAST.override(True):
        received = layer_calls(backend, driver, 1, fb, 4)
    for launches in (copied, received):
        assert [name for name, _, _ in launches].count("loop_select_fusion") == 1


def test_the_whole_table_is_read_in_every_layer(pools):
    """So SGLang must not reuse it before a forward ends."""
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from bridge.sglang.backend import JaxMLABackend

    backend = JaxMLABackend(runner(*pools()))
    assert backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.POST_REPLAY
    assert backend.shared_read_ends(ForwardMode.EXTEND) is SharedReadEnds.UNKNOWN
    assert backend.get_cuda_graph_seq_len_fill_value() == 0


def test_other_forwards_in_a_graph_are_refused(pools):
    from bridge.sglang.backend import JaxMLABackend

    backend = JaxMLABackend(runner(*pools()))
    verify = SimpleNamespace(forward_mode=SimpleNamespace(name="TARGET_VERIFY", is_decode=lambda: False))
    with pytest.raises(NotImplementedError, match=r"^forward_mode: expected DECODE in a graph of .*got TARGET_VERIFY$"):
        backend.init_forward_metadata_out_graph(verify, in_capture=True)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", ["flashmla_kv_topk", "short_prefix_padding", "ragged_prefix", "long_prefix"])
def test_sglang_s_kit_of_graphs(kit, request, monkeypatch, case, fp8):  # noqa: F811
    """Its calls in their order, one capture's and one replay's, without a graph: on a CPU."""
    from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner

    from bridge.sglang.backend import JaxMLABackend

    if fp8:
        request.getfixturevalue("fp8_prefixes")
    monkeypatch.setattr(JaxMLABackend, "init_cuda_graph_state", lambda *_, **__: None)  # refused on this lane
    case = {c.name: c for c in kit.make_dsa_sparse_cases("jax_mla")}[f"dsa_sparse_decode_{case}"]
    options = dict(device="cpu", fp8_kv_cache=fp8, cuda_graph_capture_batch_size=case.batch_size)
    cuda_graph_decode_runner.run_dsa_sparse_cuda_graph_decode_case(unittest.TestCase(), case, **options)


def test_prefill_goes_in_blocks_of_rows_whose_logits_fit():
    assert metadata.rows_within(1 << 20, 64, 4096) == 64
    assert metadata.rows_within(1 << 20, 128, 4096) == 64
    assert metadata.rows_within(1 << 18, 64, 4096) == 16
    assert metadata.rows_within(1 << 17, 8, 4096) == 8
    with pytest.raises(ValueError, match=r"^extend_seq_lens: expected at most 4,096 tokens, cached and new.*got 8,192"):
        metadata.rows_within(1 << 18, 64, 8192)


def test_blocks_of_a_prefill_select_what_one_call_does(pools, monkeypatch):
    from sglang.srt.state_capturer import indexer_topk

    from bridge.sglang import indexer as ours
    from bridge.sglang.backend import JaxMLABackend
    from tests.bridge.pools import extend

    monkeypatch.setattr(indexer_topk, "get_global_indexer_capturer", lambda: None)
    found = []
    for most in (ours.LOGITS_BYTES, 4 * 16 * 256):
        backend = JaxMLABackend(runner(*pools()))
        monkeypatch.setattr(ours, "LOGITS_BYTES", most)
        fb = extend(backend, [(0, PAGE), (0, 33)])
        backend.init_forward_metadata(fb)
        draw = torch.Generator().manual_seed(0)
        x, q_lora = (torch.randn(PAGE + 33, n, generator=draw).to(torch.bfloat16) for n in (HIDDEN, LORA))
        found.append(ours.forward(backend, module(), x, q_lora, fb.positions, fb, 1))
    one, several = found
    assert one is not None and several is not None and torch.equal(one, several)
