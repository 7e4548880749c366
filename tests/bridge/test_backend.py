"""``JaxMLABackend`` over SGLang's own pools, without a server: what it computes, what it refuses before it writes."""

from types import SimpleNamespace

import pytest
import torch

from tests.bridge.pools import DTYPES, LATENT, PAGE, ROPE, extend, runner

HEADS, TOPK = 4, 16


def cached(layout: str, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """float32 [576]: what a cache of ``layout`` holds of one token."""
    if layout == "fp8_656":
        tiles = latent.float().view(4, 128)
        scale = tiles.abs().amax(1, keepdim=True) / 448
        latent = ((tiles / scale).to(torch.float8_e4m3fn).float() * scale).flatten()
    elif layout == "fp8_576":
        latent, rope = latent.to(torch.float8_e4m3fn), rope.to(torch.float8_e4m3fn)
    return torch.cat([latent.float(), rope.float()])


@pytest.fixture
def backend_of(pools):
    from bridge.sglang.backend import JaxMLABackend

    return lambda *args, **kwargs: JaxMLABackend(runner(*pools(*args, **kwargs)))


LAYER = SimpleNamespace(layer_id=1, tp_q_head_num=HEADS, v_head_dim=LATENT, head_dim=LATENT + ROPE, scaling=0.07)


def tensors(rows: int, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = dict(q=(rows, HEADS, LATENT), q_rope=(rows, HEADS, ROPE), k=(rows, 1, LATENT), k_rope=(rows, 1, ROPE))
    return {n: torch.randn(s, generator=draw).to(torch.bfloat16) for n, s in shapes.items()}


def latest(backend, rows: int):
    """The positions of the last ``TOPK`` tokens that each row sees; -1 behind them."""
    picked = torch.full((rows, TOPK), -1, dtype=torch.int32)
    for t, length in enumerate(backend.batch.rows.lengths[:rows].tolist()):
        visible = torch.arange(max(0, length - TOPK), length, dtype=torch.int32)
        picked[t, : len(visible)] = visible
    return picked


def call(backend, fb, given, picked, **options):
    q, k = given["q"], given["k"]
    ropes = dict(q_rope=given["q_rope"], k_rope=given["k_rope"])
    return backend.forward_extend(q, k, k, LAYER, fb, topk_indices=picked, **(ropes | options))


@pytest.mark.parametrize("layout", DTYPES)
def test_writes_its_tokens_and_attends_to_them(backend_of, layout):
    """Two chunks of two requests, against attention written out over the tokens that were given."""
    backend = backend_of(layout)
    kept = {}  # (request, position) -> its token
    for chunk, pairs in enumerate([[(0, 40), (0, 65)], [(40, 23), (65, 1)]]):
        fb = extend(backend, pairs)
        backend.init_forward_metadata(fb)
        given = tensors(sum(n for _, n in pairs), seed=chunk)
        picked = latest(backend, len(given["q"]))
        out = call(backend, fb, given, picked)
        assert out.shape == (len(given["q"]), HEADS * LATENT) and out.dtype == torch.bfloat16
        tokens = [(r, p) for r, (c, n) in enumerate(pairs) for p in range(c, c + n)]
        for t, token in enumerate(tokens):
            kept[token] = cached(layout, given["k"][t, 0], given["k_rope"][t, 0])
        for t, (request, _) in enumerate(tokens):
            keys = torch.stack([kept[request, p] for p in picked[t].tolist() if p >= 0])
            query = torch.cat([given["q"][t], given["q_rope"][t]], -1).float()
            expected = (query @ keys.T * LAYER.scaling).softmax(-1) @ keys[:, :LATENT]
            assert (out[t].float().view(HEADS, LATENT) - expected).norm() < 0.02 * expected.norm()
    other = backend.token_to_kv_pool.kv_buffer[0]
    assert not other.any(), "another layer was written"


def test_rows_that_sglang_pads_give_zero_and_write_nothing(backend_of):
    backend = backend_of()
    fb = extend(backend, [(0, 5)])
    backend.init_forward_metadata(fb)
    given = tensors(8)
    picked = torch.full((8, TOPK), -1, dtype=torch.int32)
    picked[:5] = latest(backend, 5)
    out = call(backend, fb, given, picked)
    assert out.shape == (8, HEADS * LATENT) and out[:5].any(1).all() and not out[5:].any()
    written = backend.token_to_kv_pool.kv_buffer[1].flatten(1).any(1).nonzero().flatten().tolist()
    assert written == sorted(fb.out_cache_loc.tolist())


def test_dummy_slots_are_not_written(backend_of):
    backend = backend_of()
    fb = extend(backend, [(0, 6)])
    fb.out_cache_loc[2], fb.out_cache_loc[4] = 0, -1
    backend.init_forward_metadata(fb)
    call(backend, fb, tensors(6), latest(backend, 6))
    written = backend.token_to_kv_pool.kv_buffer[1].flatten(1).any(1).nonzero().flatten().tolist()
    assert written == sorted(s for s in fb.out_cache_loc.tolist() if s > 0)


def test_a_row_that_selects_nothing_is_zero(backend_of):
    backend = backend_of()
    fb = extend(backend, [(0, 3)])
    backend.init_forward_metadata(fb)
    picked = latest(backend, 3)
    picked[1] = -1
    out = call(backend, fb, tensors(3), picked)
    assert not out[1].any() and out[0].any() and out[2].any()


@pytest.mark.parametrize("rows", [0, 4])
def test_an_idle_batch_is_zeros(backend_of, rows):
    backend = backend_of()
    fb = extend(backend, [])
    backend.init_forward_metadata(fb)
    picked = torch.full((rows, TOPK), -1, dtype=torch.int32)
    assert not call(backend, fb, tensors(rows), picked).any()
    assert not backend.token_to_kv_pool.kv_buffer[1].any()


def test_a_slot_beyond_the_pool_is_refused_and_the_pool_untouched(backend_of):
    backend = backend_of()
    fb = extend(backend, [(0, 5)])
    fb.out_cache_loc[3] = 5 * PAGE
    with pytest.raises(
        ValueError, match=r"^out_cache_loc: expected slots below 320, the size of SGLang's pools, got 320$"
    ):
        backend.init_forward_metadata(fb)
    assert not backend.token_to_kv_pool.kv_buffer[1].any()


def rows_too_few(given, picked):
    return {n: t[:3] for n, t in given.items()}, picked, {}


def selection_too_short(given, picked):
    return given, picked[:2], {}


def selection_of_int64(given, picked):
    return given, picked.long(), {}


def no_selection(given, picked):
    return given, None, {}


def no_rope(given, picked):
    return given, picked, {"q_rope": None}


def no_key_rope(given, picked):
    return given, picked, {"k_rope": None}


def sinks(given, picked):
    return given, picked, {"attn_sink": torch.zeros(HEADS)}


def half_precision(given, picked):
    return given | {"q": given["q"].double()}, picked, {}


WRONG = [
    (rows_too_few, ValueError, r"^q: expected 5 rows or more, got 3"),
    (selection_too_short, ValueError, r"topk_indices 2$"),
    (selection_of_int64, ValueError, r"^slots_of: positions: expected one of .*got torch.int64"),
    (no_selection, ValueError, r"expected q_rope and topk_indices, got Tensor and NoneType"),
    (no_rope, ValueError, r"expected q_rope and topk_indices, got NoneType and Tensor"),
    (no_key_rope, ValueError, r"expected k_rope \[T, 1, 64\], got None"),
    (sinks, NotImplementedError, r"got \['attn_sink'\]: not served yet"),
    (half_precision, ValueError, r"^sparse_mla: q_nope: expected one of .*got torch.float64"),
]


@pytest.mark.parametrize("change, error, message", WRONG, ids=[change.__name__ for change, _, _ in WRONG])
def test_wrong_arguments_are_refused_and_the_pool_untouched(backend_of, change, error, message):
    backend = backend_of()
    fb = extend(backend, [(0, 5)])
    backend.init_forward_metadata(fb)
    given, picked, options = change(tensors(5), latest(backend, 5))
    with pytest.raises(error, match=message):
        call(backend, fb, given, picked, **options)
    assert not backend.token_to_kv_pool.kv_buffer[1].any()


def test_graphs_are_refused(backend_of):
    with pytest.raises(
        NotImplementedError,
        match=r"^cuda_graph_config: expected disabled graphs on the jit lane .*, got a capture of 8",
    ):
        backend_of().init_cuda_graph_state(8, 8)


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(dtype=torch.float16), r"^kv_cache_dtype: expected bfloat16 or fp8_e4m3, got a pool of torch.float16"),
        (dict(kv_lora_rank=256), r"^token_to_kv_pool: expected rows of 576 elements for layout bf16 .*, got 320"),
        (dict(page_size=128, index_kpool=2), r"^index_kpool: expected 1, one index key for each token, got 2"),
    ],
)
def test_pools_of_another_layout_are_refused(backend_of, changed, message):
    with pytest.raises(ValueError, match=message):
        backend_of(**changed)


def test_an_unsupported_page_size_is_refused(pools):
    from bridge.sglang.cache import index_layout_of

    pool, _ = pools()
    pool.index_page_size = 32
    with pytest.raises(ValueError, match=r"^page_size: expected 1, 16 or 64, got 32"):
        index_layout_of(pool)


def test_other_models_are_refused(pools):
    from bridge.sglang.backend import JaxMLABackend

    _, table = pools()
    with pytest.raises(ValueError, match=r"expected a model with DeepSeek sparse attention .*with a SimpleNamespace$"):
        JaxMLABackend(runner(SimpleNamespace(dtype=torch.bfloat16), table))


def test_a_layer_without_index_keys_is_refused_by_its_number(backend_of):
    backend = backend_of(skip_topk_layers=[False, True])
    with pytest.raises(ValueError, match=r"^layer_id: expected a layer with index keys, got 1"):
        backend.caches.index(1)


def test_a_write_that_is_not_in_place_is_an_error_and_the_pool_untouched(backend_of):
    """What a JAX without aliasing would do on a GPU, XLA does here: it copies a donated import on a CPU."""
    from bridge.sglang.cache import Calls, InPlaceWriter
    from bridge.stream import Jit

    backend, writer = backend_of(), InPlaceWriter()
    plan = writer.plan(backend.caches, torch.arange(1, 5, dtype=torch.int32))
    latents, ropes = torch.ones(4, LATENT), torch.ones(4, ROPE)
    with pytest.raises(RuntimeError, match=r"^kv_write: pool: expected to be written in place, got a result elsewhere"):
        writer.kv(Calls(Jit()), backend.caches, 1, plan, latents, ropes)()
    assert not backend.token_to_kv_pool.kv_buffer[1].any()
