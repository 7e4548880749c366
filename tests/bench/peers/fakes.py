"""Modules with the peers' functions, on the CPU and in plain torch: strict about layouts where the kernels are, and
written from the libraries' documentation, not from our adapters."""

import importlib.machinery
import sys
from types import ModuleType

import torch

FP8 = torch.float8_e4m3fn


def install(monkeypatch, name: str, **functions) -> ModuleType:
    """``name`` as an importable module of ``functions``, its packages too."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def laid_out(x: torch.Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """Fails unless ``x`` is contiguous and of ``dtype`` and ``shape``, None standing for any size."""
    assert x.dtype == dtype, x.dtype
    assert len(x.shape) == len(shape), x.shape
    assert all(wanted in (None, got) for got, wanted in zip(x.shape, shape, strict=True)), (x.shape, shape)
    assert x.is_contiguous()


def attention(q, kv, indices, scale):
    """``[T, H, 512]`` and lse ``[T, H]`` in float64, of queries ``[T, H, 576]`` and rows ``[N, 576]``."""
    chosen = kv.double()[indices.long()]
    s = torch.einsum("thd,tkd->thk", q.double(), chosen) * scale
    return torch.einsum("thk,tkd->thd", s.softmax(-1), chosen[..., :512]), s.logsumexp(-1)


# FlashMLA: flash_mla/flash_mla_interface.py of sgl-flash-mla 1.0.0


def flash_mla_sparse_fwd(
    q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, use_legacy=False, return_log2_lse=None
):
    assert use_legacy, "without it Hopper has no kernel"
    laid_out(q, torch.bfloat16, None, None, 576)
    assert q.shape[1] in (64, 128)
    laid_out(kv, torch.bfloat16, None, 1, 576)
    laid_out(indices, torch.int32, len(q), 1, None)
    assert indices.shape[2] % 128 == 0
    out, lse = attention(q, kv[:, 0], indices[:, 0], sm_scale)
    return out.bfloat16(), lse.float(), lse.float()


class Schedule:
    used = 0


def get_mla_metadata(*_, **__):
    return Schedule(), None


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits=None,
    softmax_scale=None,
    causal=False,
    is_fp8_kvcache=None,
    indices=None,
    attn_sink=None,
    use_legacy=False,
):
    assert use_legacy and is_fp8_kvcache and not causal
    assert isinstance(tile_scheduler_metadata, Schedule) and num_splits is None
    assert block_table is None and cache_seqlens is None and head_dim_v == 512
    assert indices is not None
    tile_scheduler_metadata.used += 1
    laid_out(q, torch.bfloat16, None, 1, None, 576)
    assert q.shape[2] in (64, 128)
    laid_out(k_cache, torch.uint8, None, None, 1, 656)
    laid_out(indices, torch.int32, len(q), 1, None)
    assert indices.shape[2] % 128 == 0
    rows = k_cache.reshape(-1, 656)
    latent = rows[:, :512].view(FP8).float().unflatten(1, (4, 128))
    scale = rows[:, 512:528].contiguous().view(torch.float32).bfloat16().float()  # as the kernel rounds it
    rope = rows[:, 528:].contiguous().view(torch.bfloat16).float()
    kv = torch.cat([(latent * scale[..., None]).flatten(1), rope], dim=1)
    out, lse = attention(q[:, 0], kv, indices[:, 0], softmax_scale)
    return out.bfloat16()[:, None], lse.float()[..., None]


# DeepGEMM: deep_gemm/__init__.py of sgl-deep-gemm 0.1.5.post1, DeepGEMM's tests/test_attention.py


def scores(q, keys, scale, weights):
    """float32 ``[T, S]``."""
    products = torch.einsum("thd,sd->ths", q.double(), keys.double()).relu()
    return (torch.einsum("ths,th->ts", products, weights.double()) * scale.double()).float()


def fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=0):
    keys, scale = kv
    laid_out(q, FP8, None, None, 128)
    assert q.shape[1] in (32, 64)
    laid_out(keys, FP8, None, 128)
    laid_out(scale, torch.float32, len(keys))
    laid_out(weights, torch.float32, len(q), q.shape[1])
    laid_out(ks, torch.int32, len(q))
    laid_out(ke, torch.int32, len(q))
    assert not clean_logits
    at = torch.arange(len(keys))
    visible = (at >= ks[:, None]) & (at < ke[:, None])
    return torch.where(visible, scores(q, keys, scale, weights), torch.tensor(12345.0))


def get_num_sms():
    return 4


def get_paged_mqa_logits_metadata(context_lens, block_kv, num_sms, indices=None):
    laid_out(context_lens, torch.int32, None, None)
    assert block_kv == 64
    return torch.full((num_sms + 1, 2), 7, dtype=torch.int32)


def fp8_paged_mqa_logits(
    q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False, indices=None
):
    laid_out(q, FP8, None, None, None, 128)
    requests, next_n, heads, _ = q.shape
    assert next_n in (1, 2) and heads in (32, 64)
    laid_out(kv_cache, torch.uint8, None, 64, 1, 132)
    laid_out(weights, torch.float32, requests * next_n, heads)
    laid_out(context_lens, torch.int32, requests, next_n)
    assert block_table.dtype == torch.int32 and len(block_table) == requests and block_table.stride(1) == 1
    assert torch.equal(schedule_meta, get_paged_mqa_logits_metadata(context_lens, 64, get_num_sms()))
    assert not clean_logits
    out = torch.full((requests * next_n, max_context_len), 12345.0)
    for b in range(requests):
        pages = kv_cache[block_table[b].long()].reshape(-1, 64 * 132)
        keys = pages[:, : 64 * 128].reshape(-1, 128).view(FP8)
        scale = pages[:, 64 * 128 :].contiguous().view(torch.float32).reshape(-1)
        for i in range(next_n):
            row, length = b * next_n + i, int(context_lens[b, i])
            out[row, :length] = scores(q[b, i][None], keys[:length], scale[:length], weights[row][None])[0]
    return out


# SGLang: sglang/kernels/ops of sglang 0.5.23


def fast_topk(score, lengths, topk, row_starts=None):
    assert topk in (512, 2048)
    laid_out(score, torch.float32, None, None)
    laid_out(lengths, torch.int32, len(score))
    assert row_starts is not None, "or it makes zeros, a kernel more"
    laid_out(row_starts, torch.int32, len(score))
    return score.topk(topk).indices.int().flip(1)


def plan_topk_v2(seq_lens, static_threshold=-1, *, out=None):
    laid_out(seq_lens, torch.int32, None)
    return torch.full((len(seq_lens) + 1, 2), 9, dtype=torch.int32)


def topk_transform_paged_v2(scores, seq_lens, page_tables, out_page_indices, page_size, metadata, out_raw_indices=None):
    assert scores.dtype == torch.float32 and scores.stride(0) % 4 == 0
    assert torch.equal(metadata, plan_topk_v2(seq_lens))
    laid_out(out_page_indices, torch.int32, len(scores), None)
    best = scores.topk(out_page_indices.shape[1]).indices.int()
    if page_tables is not None:
        laid_out(page_tables, torch.int32, len(scores), None)
        best = page_tables.gather(1, (best // page_size).long()) * page_size + best % page_size
    out_page_indices.copy_(best)


def topk_transform_ragged_v2(scores, seq_lens, *, out_offsets, out_indices, row_starts=None):
    assert scores.dtype == torch.float32 and scores.stride(0) % 4 == 0
    laid_out(seq_lens, torch.int32, len(scores))
    laid_out(out_offsets, torch.int32, len(scores))
    laid_out(out_indices, torch.int32, len(scores), None)
    out_indices.copy_(scores.topk(out_indices.shape[1]).indices.int() + out_offsets[:, None])


def fp8_attention(q_nope, q_rope, kv, indices, sm_scale):
    """What 576-byte rows get there: queries and probabilities in fp8 too."""
    q = torch.cat([q_nope, q_rope], dim=-1).to(kv.dtype).double()
    chosen = kv[:, 0].double()[indices[:, 0].long()]
    s = torch.einsum("thd,tkd->thk", q, chosen) * sm_scale
    p = (s - s.amax(-1, keepdim=True)).exp()
    weights = (p * 448).to(kv.dtype).double() / 448 if kv.dtype == FP8 else p
    return torch.einsum("thk,tkd->thd", weights, chosen[..., :512]) / p.sum(-1, keepdim=True)


def triton_sparse_mla_decode(q_nope, q_rope, kv, indices, sm_scale, d_v=512):
    assert q_nope.dtype == q_rope.dtype == torch.bfloat16
    assert kv.dtype in (torch.bfloat16, FP8) and kv.shape[1:] == (1, 576)
    assert q_nope.stride(-1) == q_rope.stride(-1) == 1
    laid_out(indices, torch.int32, len(q_nope), 1, None)
    return fp8_attention(q_nope, q_rope, kv, indices, sm_scale).bfloat16()[None]


def sparse_mla_prefill(
    q,
    kv,
    indices,
    sm_scale,
    d_v=512,
    *,
    topk_length=None,
    out=None,
    union=0,
    config=None,
    union_config=None,
    int64_indexing=None,
):
    laid_out(q, torch.bfloat16, None, None, 576)
    laid_out(kv, torch.bfloat16, None, 576)
    laid_out(indices, torch.int32, len(q), None)
    assert topk_length is not None, "or it counts them, a kernel more"
    laid_out(topk_length, torch.int32, len(q))
    assert torch.all(topk_length == indices.shape[1]) and out is not None
    laid_out(out, torch.bfloat16, len(q), q.shape[1], 512)
    return out.copy_(attention(q, kv, indices, sm_scale)[0])


def tilelang_sparse_fwd(q, kv, indices, sm_scale, d_v=512):
    laid_out(q, torch.bfloat16, None, None, 576)
    laid_out(kv, torch.bfloat16, None, 1, 576)
    laid_out(indices, torch.int32, len(q), 1, None)
    return attention(q, kv[:, 0], indices[:, 0], sm_scale)[0].bfloat16()[None]


def set_mla_kv_buffer_triton(kv_buffer, loc, cache_k_nope, cache_k_rope, *, reserved_skip_index=0):
    laid_out(kv_buffer, cache_k_nope.dtype, None, 1, cache_k_nope.shape[-1] + cache_k_rope.shape[-1])
    laid_out(loc, torch.int64, None)
    assert not (loc == reserved_skip_index).any()
    assert cache_k_nope.shape[:2] == cache_k_rope.shape[:2] == (len(loc), 1)
    kv_buffer[loc] = torch.cat([cache_k_nope, cache_k_rope], dim=-1)


def set_mla_kv_buffer_triton_fp8_quant(kv_buffer, loc, cache_k_nope, cache_k_rope, fp8_dtype, *, reserved_skip_index=0):
    laid_out(kv_buffer, torch.uint8, None, 576)
    assert cache_k_nope.shape == (len(loc), 512) and cache_k_rope.shape == (len(loc), 64)
    kv_buffer[loc] = torch.cat([cache_k_nope, cache_k_rope], dim=-1).to(fp8_dtype).view(torch.uint8)


def quantize_k_cache_separate(k_nope, k_rope, tile_size=128):
    assert k_nope.dtype == k_rope.dtype == torch.bfloat16 and k_nope.stride(-1) == k_rope.stride(-1) == 1
    tiles = k_nope.float().reshape(-1, 4, 128)
    scale = tiles.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    codes = (tiles / scale).to(FP8).view(torch.uint8).reshape(-1, 512)
    nope = torch.cat([codes, scale.reshape(-1, 4).view(torch.uint8)], dim=1)
    return nope[:, None], k_rope.reshape(-1, 64).contiguous().view(torch.uint8)[:, None]


def rotated(x, cos_sin, positions):
    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)
    shape = (len(x), *(1,) * (x.dim() - 2), 32)
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    a, b = x[..., :64].unflatten(-1, (32, 2)).unbind(-1)  # neighbours: jit/csrc/deepseek_v32/indexer_k.cuh
    return torch.cat([torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2), x[..., 64:]], dim=-1)


def plain_scale(x):
    return x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448


def fused_k_indexer_norm_rope_store(
    k_input, cache, out_cache_loc, weight, bias, eps, cos_sin_cache, positions, page_size
):
    laid_out(k_input, torch.bfloat16, None, 128)
    laid_out(cache, torch.uint8, None, page_size * 132)
    laid_out(out_cache_loc, torch.int64, len(k_input))
    laid_out(weight, torch.float32, 128)
    laid_out(bias, torch.float32, 128)
    laid_out(cos_sin_cache, torch.float32, None, 64)
    laid_out(positions, torch.int32, len(k_input))
    normal = torch.nn.functional.layer_norm(k_input.float(), (128,), weight, bias, eps)
    keys = rotated(normal, cos_sin_cache, positions).bfloat16().float()
    scale = plain_scale(keys)
    page, token = out_cache_loc // page_size, out_cache_loc % page_size
    cache[:, : page_size * 128].unflatten(1, (page_size, 128))[page, token] = (keys / scale).to(FP8).view(torch.uint8)
    cache[:, page_size * 128 :].unflatten(1, (page_size, 4))[page, token] = scale.view(torch.uint8)


def fused_q_indexer_rope_first_quant(q_input, weight, weight_scale, cos_sin_cache, positions):
    laid_out(q_input, torch.bfloat16, None, None, 128)
    laid_out(weight, torch.bfloat16, *q_input.shape[:2])
    laid_out(cos_sin_cache, torch.float32, None, 64)
    laid_out(positions, torch.int32, len(q_input))
    q = rotated(q_input.float(), cos_sin_cache, positions)
    scale = plain_scale(q)
    return (q / scale).to(FP8), weight[..., None].float() * weight_scale * scale


def aiter_fp8_mqa_logits(q, kv, scales, weights, ks, ke):
    return fp8_mqa_logits(q, (kv, scales), weights, ks, ke)


OPS = "sglang.kernels.ops."
SGLANG = {
    "attention.fast_topk": (fast_topk,),
    "attention.dsv4.topk": (plan_topk_v2, topk_transform_paged_v2, topk_transform_ragged_v2),
    "attention.dsa.triton_sparse_mla_decode": (triton_sparse_mla_decode,),
    "attention.dsa.triton_sparse_mla_prefill": (sparse_mla_prefill,),
    "attention.dsa.tilelang_kernel": (tilelang_sparse_fwd,),
    "attention.dsa.indexer_k": (fused_k_indexer_norm_rope_store,),
    "attention.dsa.indexer_q": (fused_q_indexer_rope_first_quant,),
    "kvcache.mla_buffer": (set_mla_kv_buffer_triton, set_mla_kv_buffer_triton_fp8_quant),
    "quantization.dsa_quant_k_cache": (quantize_k_cache_separate,),
}
OTHERS = {
    "flash_mla": (flash_mla_sparse_fwd, get_mla_metadata, flash_mla_with_kvcache),
    "deep_gemm": (fp8_mqa_logits, get_num_sms, get_paged_mqa_logits_metadata, fp8_paged_mqa_logits),
    "tilelang": (),
}


def install_all(monkeypatch) -> None:
    """All of the above, whether or not the real ones are installed."""
    install(monkeypatch, "sglang")
    for name, functions in {OPS + name: fs for name, fs in SGLANG.items()}.items():
        install(monkeypatch, name, **{f.__name__: f for f in functions})
    for name, functions in OTHERS.items():
        install(monkeypatch, name, **{f.__name__: f for f in functions})
    install(monkeypatch, "aiter")
    install(monkeypatch, "aiter.ops.triton.fp8_mqa_logits", fp8_mqa_logits=aiter_fp8_mqa_logits)
