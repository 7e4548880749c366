"""What is built before the first request is what prefill then launches."""

from types import SimpleNamespace

import pytest
import torch

from bridge.stream import Stream
from bridge.stream.driver import CUDA
from tests.bridge.pools import LATENT, ROPE, extend, runner
from tests.bridge.stream import fake
from tests.bridge.stream.conftest import cache_folder, driver, fake_library  # noqa: F401
from tests.bridge.test_backend import tensors
from tests.bridge.test_indexer import HIDDEN, LORA, module

HEADS = 4


@pytest.fixture
def model(sglang):
    """One layer of SGLang's own classes; its indexer has what is asked of one, and nothing else."""
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.radix_attention import RadixAttention

    class Selecting(Indexer):
        def __init__(self):
            torch.nn.Module.__init__(self)
            for name, value in (vars(module()) | dict(layer_id=1)).items():
                object.__setattr__(self, name, value)

    attention = RadixAttention(
        HEADS, LATENT + ROPE, scaling=0.07, num_kv_heads=1, layer_id=1, v_head_dim=LATENT, prefix="layer"
    )
    dense = RadixAttention(HEADS, 192, scaling=0.07, num_kv_heads=HEADS, layer_id=1, v_head_dim=128, prefix="layer")
    return torch.nn.ModuleList([Selecting(), attention, dense])


@pytest.fixture
def backend(pools, driver, monkeypatch):  # noqa: F811
    from bridge.sglang import backend as module
    from bridge.sglang.cache import InPlaceWriter

    monkeypatch.setattr(module, "lane_for", lambda device: Stream(driver, fake.ARCH))
    monkeypatch.setattr(module, "writer_for", lambda device: InPlaceWriter())
    return module.JaxMLABackend(runner(*pools("fp8_656")))


def forward(backend, model, pairs) -> None:
    from bridge.sglang import indexer as ours

    fb, rows = extend(backend, pairs), sum(n for _, n in pairs)
    backend.init_forward_metadata(fb)
    x, q_lora = (torch.randn(rows, n).to(torch.bfloat16) for n in (HIDDEN, LORA))
    topk = ours.forward(backend, model[0], x, q_lora, fb.positions, fb, 1)
    given = tensors(rows)
    ropes = dict(q_rope=given["q_rope"], k_rope=given["k_rope"])
    backend.forward_extend(given["q"], given["k"], given["k"], model[1], fb, topk_indices=topk, **ropes)


@pytest.mark.parametrize("driver", [CUDA], indirect=True)
def test_a_prefill_of_any_size_finds_all_of_it(backend, model, driver, monkeypatch):  # noqa: F811
    from sglang.srt.state_capturer import indexer_topk

    from bridge.sglang import prepare

    monkeypatch.setattr(indexer_topk, "get_global_indexer_capturer", lambda: None)
    forward(backend, model, [(0, 3)])  # whatever was under way stays so
    before = backend.batch
    wanted = prepare.prefill(backend, model, most_rows=16, most_keys=200)
    assert backend.batch is before
    assert {f.name for f, _, _ in wanted} == {"index_write", "topk_prefill", "slots_of", "kv_write", "sparse_mla"}
    assert len(wanted) == 15
    backend.lane.prepare(wanted, progress=False)
    driver.is_capturing = True  # a program that isn't loaded is an error
    for pairs in ([(0, 1)], [(0, 4)], [(0, 5)], [(60, 1), (0, 7)], [(0, 16)], [(100, 9), (100, 2)]):
        forward(backend, model, pairs)
    with pytest.raises(RuntimeError, match="expected to be prepared for"):
        forward(backend, model, [(0, 17)])


def test_sizes_are_those_that_batches_are_rounded_to():
    from bridge.sglang import metadata, prepare

    for least, most in ((4, 1), (4, 4), (4, 100), (256, 5000)):
        assert prepare.sizes(least, most) == sorted({metadata.bucket(n, least) for n in range(1, most + 1)})


def test_it_can_be_left_for_later_and_ranks_begin_elsewhere(monkeypatch, caplog):
    from sglang.srt import runtime_context

    from bridge.sglang import prepare

    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_rank=1, tp_size=2))
    asked = []
    lane = SimpleNamespace(prepare=lambda wanted, progress: asked.append((wanted, progress)))
    backend = SimpleNamespace(lane=lane)
    arguments = SimpleNamespace(chunked_prefill_size=-1, max_prefill_tokens=16384)
    config = SimpleNamespace(context_len=4096)
    given = SimpleNamespace(server_args=arguments, model_config=config, model=None)
    monkeypatch.setattr(prepare, "prefill", lambda *x: [x[2:], "b", "c", "d"])
    prepare.at_start(backend, given)
    assert asked == [(["c", "d", (4096, 4096), "b"], False)]
    monkeypatch.setenv("JAX_MLA_PREPARE", "0")
    with caplog.at_level("INFO", logger="jax_mla"):
        prepare.at_start(backend, given)
    assert len(asked) == 1 and "JAX_MLA_PREPARE=0: programs for prefill are built when first wanted" in caplog.text
