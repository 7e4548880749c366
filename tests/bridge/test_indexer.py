"""The indexer's forward on a stand-in for SGLang's module, against the indexer written out in torch.

The stand-in has what SGLang's ``Indexer`` has: projections, a LayerNorm, a rotary table. The pools are SGLang's own.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bridge.sglang import metadata
from tests.bridge.pools import PAGE, extend, runner

HIDDEN, LORA, HEADS, TOPK = 48, 32, 8, 24


def linear(rows: int, columns: int, seed: int):
    weight = torch.randn(columns, rows, generator=torch.Generator().manual_seed(seed)) * rows**-0.5
    return lambda x: (x.float() @ weight.T).to(torch.bfloat16), weight


def module(neox: bool = True, **changed):
    """An ``Indexer`` of SGLang's shape; ``**changed`` replaces attributes."""
    projections = {
        name: linear(*shape, seed)[0]
        for seed, (name, shape) in enumerate(
            {"wq_b": (LORA, HEADS * 128), "wk": (HIDDEN, 128), "weights_proj": (HIDDEN, HEADS)}.items()
        )
    }
    norm = SimpleNamespace(
        weight=torch.nn.Parameter(1 + 0.1 * torch.randn(128, generator=torch.Generator().manual_seed(7))),
        bias=torch.nn.Parameter(0.1 * torch.randn(128, generator=torch.Generator().manual_seed(8))),
        variance_epsilon=1e-6,
    )
    angles = torch.outer(torch.arange(4.0 * PAGE), 10000.0 ** -(torch.arange(32) / 32))
    fields = dict(
        n_heads=HEADS,
        head_dim=128,
        rope_head_dim=64,
        index_topk=TOPK,
        is_neox_style=neox,
        use_dsa_indexer_fusion=False,
        num_init_tokens=0,
        num_local_tokens=0,
        k_norm=norm,
        rotary_emb=SimpleNamespace(cos_sin_cache=torch.cat([angles.cos(), angles.sin()], -1)),
        wq_b=lambda x: (projections["wq_b"](x), None),
        wk=lambda x: (projections["wk"](x), None),
        _weights_proj_bf16_in_fp32_out=lambda x: projections["weights_proj"](x).float(),
    )
    return SimpleNamespace(**(fields | changed))


def rotated(indexer, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE on the first 64 of the last 128 columns of float32 ``x`` [T, ..., 128]."""
    cos, sin = indexer.rotary_emb.cos_sin_cache[positions].chunk(2, -1)
    while cos.ndim < x.ndim:
        cos, sin = cos[:, None], sin[:, None]
    if indexer.is_neox_style:
        a, b = x[..., :32], x[..., 32:64]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = x[..., :64:2], x[..., 1:64:2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([turned, x[..., 64:]], -1)


def scores(indexer, x, q_lora, x_seen, positions_seen, position: int) -> torch.Tensor:
    """One row's unquantised scores of all tokens that it sees. Hadamard leaves dot products as they are."""
    k = indexer.wk(x_seen)[0].float()
    k = torch.nn.functional.layer_norm(k, (128,), indexer.k_norm.weight, indexer.k_norm.bias, 1e-6).detach()
    k = rotated(indexer, k, positions_seen)
    q = rotated(indexer, indexer.wq_b(q_lora[None])[0].float().view(1, HEADS, 128), torch.tensor([position]))[0]
    w = indexer._weights_proj_bf16_in_fp32_out(x[None])[0] * HEADS**-0.5 * 128**-0.5
    return w @ torch.relu(q @ k.T)


def decode(backend, lengths):
    """A ForwardBatch that adds one token to each request, behind the tokens that ``extend`` gave it."""
    slots = [int(backend.req_to_token[r, n - 2]) for r, n in enumerate(lengths)]
    free = [s for s in range(1, 4 * PAGE) if s not in set(backend.req_to_token.flatten().tolist())]
    for request, (n, slot) in enumerate(zip(lengths, free, strict=False)):
        backend.req_to_token[request, n - 1] = slot
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name="DECODE", is_idle=lambda: False, is_decode=lambda: True),
        batch_size=len(slots),
        req_pool_indices=torch.arange(len(lengths)),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        positions=torch.tensor(lengths) - 1,
        out_cache_loc=torch.tensor(free[: len(lengths)]),
    )


@pytest.fixture
def backend(pools):
    from bridge.sglang.backend import JaxMLABackend

    return JaxMLABackend(runner(*pools()))


@pytest.fixture
def run(backend, monkeypatch):
    """``run(indexer, fb, x, q_lora) -> positions``, and what SGLang's capturer was given in ``run.captured``."""
    from sglang.srt.state_capturer import indexer_topk

    from bridge.sglang import indexer as ours

    class Run:
        def __init__(self):
            self.captured = []

        def capture(self, layer_id, topk_indices):
            self.captured.append((layer_id, topk_indices))

        def __call__(self, indexer, fb, x, q_lora, **options):
            backend.init_forward_metadata(fb)
            positions = torch.zeros(len(x), dtype=torch.int64)  # the batch's own are used
            return ours.forward(backend, indexer, x, q_lora, positions, fb, 1, **options)

    run = Run()
    monkeypatch.setattr(indexer_topk, "get_global_indexer_capturer", lambda: run)
    return run


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
def test_selects_what_torch_selects_in_prefill_behind_a_prefix_and_in_decode(backend, run, neox):
    """Three steps over one cache. A token that only one side selects scores within FP8's reach of the last selected."""
    indexer = module(neox)
    draw = torch.Generator().manual_seed(1)
    history = {r: torch.zeros(0, HIDDEN) for r in range(2)}
    for pairs in [[(0, 50), (0, 65)], [(50, 14), (65, 30)], [(64, 1), (95, 1)]]:
        decoding = all(new == 1 for _, new in pairs)
        fb = decode(backend, [c + n for c, n in pairs]) if decoding else extend(backend, pairs)
        rows = sum(n for _, n in pairs)
        x = torch.randn(rows, HIDDEN, generator=draw).to(torch.bfloat16)
        q_lora = torch.randn(rows, LORA, generator=draw).to(torch.bfloat16)
        positions = run(indexer, fb, x, q_lora)
        assert positions.shape == (rows, TOPK) and positions.dtype == torch.int32
        layer, captured = run.captured[-1]
        assert layer == 1 and torch.equal(captured, positions)
        t = 0
        for request, (cached, new) in enumerate(pairs):
            history[request] = torch.cat([history[request], x[t : t + new].float()])
            for position in range(cached, cached + new):
                seen = history[request][: position + 1].to(torch.bfloat16)
                exact = scores(indexer, x[t], q_lora[t], seen, torch.arange(position + 1), position)
                chosen = positions[t][positions[t] >= 0].long()
                assert len(chosen) == min(TOPK, position + 1) and (chosen.diff() > 0).all()
                assert (positions[t, len(chosen) :] == -1).all()
                best = exact.topk(len(chosen)).values
                reach = 0.3 * exact.std(correction=0)  # FP8 moves a score by a tenth of how far scores lie apart
                assert exact[chosen].min() >= best.min() - reach - 1e-3, (request, position)
                t += 1


def test_without_indices_it_still_writes_its_keys(backend, run):
    fb = extend(backend, [(0, 5)])
    assert (
        run(module(), fb, torch.ones(5, HIDDEN, dtype=torch.bfloat16), torch.ones(5, LORA), return_indices=False)
        is None
    )
    pages = backend.token_to_kv_pool.get_index_k_with_scale_buffer(1)
    keys = pages[:, : PAGE * 128].reshape(-1, 128)
    assert keys.any(1).nonzero().flatten().tolist() == sorted(fb.out_cache_loc.tolist())
    assert not backend.token_to_kv_pool.get_index_k_with_scale_buffer(0).any()


def test_padded_and_idle_rows_select_nothing(backend, run):
    x, q_lora = torch.ones(8, HIDDEN, dtype=torch.bfloat16), torch.ones(8, LORA, dtype=torch.bfloat16)
    selected = run(module(), extend(backend, [(0, 5)]), x, q_lora)
    assert (selected[:5, 0] == 0).all() and (selected[5:] == -1).all()
    selected = run(module(), extend(backend, []), x, q_lora)
    assert selected.shape == (8, TOPK) and (selected == -1).all()


def test_rocms_tuple_of_activations(backend, run):
    x, q_lora = torch.ones(5, HIDDEN, dtype=torch.bfloat16), torch.ones(5, LORA, dtype=torch.bfloat16)
    plain = run(module(), extend(backend, [(0, 5)]), x, q_lora)
    assert torch.equal(plain, run(module(), extend(backend, [(0, 5)]), (None, None, x), q_lora))
    with pytest.raises(ValueError, match=r"^x: expected \[T, hidden_size\] or \(fp8, scale, bf16\), got a tuple of 2"):
        run(module(), extend(backend, [(0, 5)]), (x, x), q_lora)


@pytest.mark.parametrize(
    "changed, error, message",
    [
        (
            dict(num_init_tokens=4),
            NotImplementedError,
            r"^index_init_tokens, index_local_tokens: expected 0, got 4 and 0",
        ),
        (dict(head_dim=64), ValueError, r"^index_head_dim, qk_rope_head_dim: expected 128 and 64, got 64 and 64"),
        (dict(k_norm=SimpleNamespace(weight=None)), NotImplementedError, r"^k_norm: expected a LayerNorm with bias"),
    ],
)
def test_other_indexers_are_refused_and_the_cache_untouched(backend, run, changed, error, message):
    x, q_lora = torch.ones(5, HIDDEN, dtype=torch.bfloat16), torch.ones(5, LORA, dtype=torch.bfloat16)
    with pytest.raises(error, match=message):
        run(module(**changed), extend(backend, [(0, 5)]), x, q_lora)
    assert not backend.token_to_kv_pool.get_index_k_with_scale_buffer(1).any()


def test_too_few_rows_are_refused_and_the_cache_untouched(backend, run):
    with pytest.raises(ValueError, match=r"^x: expected 5 rows or more, as the batch has, got 3"):
        run(module(), extend(backend, [(0, 5)]), torch.ones(3, HIDDEN), torch.ones(3, LORA))
    assert not backend.token_to_kv_pool.get_index_k_with_scale_buffer(1).any()


def test_only_this_backend_gets_our_forward(backend, monkeypatch):
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    from bridge.sglang import indexer as ours

    monkeypatch.setattr(ours, "forward", lambda *args: "ours")
    actives: list[tuple[Any, str]] = [(backend, "ours"), (SimpleNamespace(), "SGLang's")]
    for active, expected in actives:
        with forward_context(ForwardContext(attn_backend=active)):
            assert ours._dispatch(lambda *args: "SGLang's", None) == expected


def test_metadata_is_the_batchs(backend):
    backend.init_forward_metadata(extend(backend, [(0, 5)]))
    assert isinstance(backend.batch.rows, metadata.Prefill)
    backend.init_forward_metadata(extend(backend, []))
    assert backend.batch is None
