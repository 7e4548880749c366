"""The lightning indexer's forward on SGLang's own ``Indexer`` modules, where this backend is the active one.

The module keeps what it owns: the projections ``wq_b``, ``wk`` and ``weights_proj``, the weights of ``k_norm``, the
rotary table. LayerNorm, RoPE, Hadamard, quantisation, the cache, the scores and the selection are jax_mla's.

What it returns, SGLang hands on to the attention, to layers that share the selection, and to
``--enable-return-indexer-topk``: int32 [T, index_topk], request-local **positions** in ascending order, -1 behind them,
one row for each row of ``x``. (SGLang calls that unfused top-k. The attention looks the slots up.)
"""

import logging
from collections.abc import Callable, Iterator

import torch

from bridge import ops
from bridge.sglang import metadata
from bridge.sglang.cache import HADAMARD
from jax_mla.attention import LOGITS_BYTES

logger = logging.getLogger("jax_mla")


def install() -> None:
    """Wraps ``Indexer.forward_cuda`` (CUDA and ROCm) and ``forward_native`` (the CPU). Other backends keep theirs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    indexer = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer"
    for method in ("forward_cuda", "forward_native"):
        HookRegistry.register(f"{indexer}.{method}", _dispatch, HookType.AROUND)
    HookRegistry.apply_hooks()
    logger.info("jax_mla: Indexer.forward_cuda and forward_native go through jax_mla where it is the active backend")


def _dispatch(original, indexer, *args, **kwargs):
    from sglang.srt.model_executor.forward_context import get_attn_backend

    from bridge.sglang.backend import JaxMLABackend

    backend = get_attn_backend()
    if isinstance(backend, JaxMLABackend):
        return forward(backend, indexer, *args, **kwargs)
    return original(indexer, *args, **kwargs)


def forward(
    backend,
    indexer,
    x: torch.Tensor | tuple[torch.Tensor, ...],
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch,
    layer_id: int,
    return_indices: bool = True,
    use_cuda_graph: bool = True,
) -> torch.Tensor | None:
    """Writes the index keys of ``x`` and selects for each of its rows.

    - `x`: bf16 [T, hidden_size]; on ROCm also SGLang's (fp8, scale, bf16), of which the last is used.
    - `q_lora`: bf16 [T, q_lora_rank]. `positions` is what ``backend.batch`` was made from.
    - `return_indices`: False where the attention takes all tokens: keys are written, nothing is selected.

    Returns int32 [T, index_topk] of positions, None without ``return_indices``.
    """
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.dsa.dsa_indexer import _broadcast_indexer_topk_from_rank0
    from sglang.srt.state_capturer.indexer_topk import maybe_capture_indexer_topk

    check(indexer)
    if isinstance(x, tuple):
        if len(x) != 3:
            raise ValueError(f"x: expected [T, hidden_size] or (fp8, scale, bf16), got a tuple of {len(x)}")
        x = x[2]
    batch = backend.batch
    if batch is None:
        return x.new_full((x.shape[0], indexer.index_topk), -1, dtype=torch.int32) if return_indices else None
    rows, padded = batch.rows.count, len(batch.rows.lengths)
    if x.shape[0] < rows:
        raise ValueError(f"x: expected {rows} rows or more, as the batch has, got {x.shape[0]}")

    def rows_of(tensor: torch.Tensor) -> torch.Tensor:
        return metadata.pad(tensor[:rows].detach(), padded, 0)

    # All arguments are looked at before anything is written.
    cos_sin, positions = cos_sin_of(indexer), batch.rows.positions
    key, weights = _key_and_weights(indexer, x)
    norm = indexer.k_norm
    interleaved = not indexer.is_neox_style
    selections: Iterator[Callable] = iter(())
    if return_indices:
        q = indexer.wq_b(q_lora)[0].view(-1, indexer.n_heads, indexer.head_dim)
        query = rows_of(q), rows_of(weights), cos_sin, positions
        selections = selections_of(backend, batch, layer_id, query, k=indexer.index_topk, interleaved=interleaved)
    select = next(selections, None)
    keys = rows_of(key), norm.weight.detach(), norm.bias.detach(), cos_sin, positions
    how = dict(interleaved=interleaved, eps=float(norm.variance_epsilon))
    backend.writer.index(batch.calls, backend.caches, layer_id, batch.write_plan, keys, **how)()
    if not return_indices:
        return None

    parts = []
    while select is not None:
        parts.append(select())
        select = None  # and with it the memory for logits, which the next takes
        select = next(selections, None)
    slots, selected = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    topk = metadata.pad(selected[:rows], x.shape[0], -1)
    if not envs.SGLANG_DSA_TOPK_BROADCAST.get():  # which puts rank 0's selection in the place of this one
        batch.latest[:] = topk, slots
    return maybe_capture_indexer_topk(layer_id, _broadcast_indexer_topk_from_rank0(topk))


def selections_of(
    backend, batch, layer_id: int, query: tuple[torch.Tensor, ...], *, k: int, interleaved: bool
) -> Iterator[Callable]:
    """Calls that select for all rows of ``batch``: one, or in prefill as many as keep the logits of each within
    ``LOGITS_BYTES``; each is made when it is asked for."""
    seen = backend.caches.index(layer_id), *batch.lookup, batch.rows.lengths
    static = backend.caches.index_static | dict(interleaved=interleaved, hadamard=HADAMARD, k=k)
    if isinstance(batch.rows, metadata.Decode):
        yield batch.calls.bind(ops.TOPK_DECODE, *query, *seen, max_len=batch.rows.max_len, **static)
        return
    (q, weights, cos_sin, positions), (pool, k_slots, starts, lengths) = query, seen
    rows = metadata.rows_within(LOGITS_BYTES, len(q), len(k_slots))
    for first in range(0, len(q), rows):
        some = slice(first, first + rows)
        part = q[some], weights[some], cos_sin, positions[some], pool, k_slots, starts[some], lengths[some]
        yield batch.calls.bind(ops.TOPK_PREFILL, *part, **static)


def check(indexer) -> None:
    """Raises for an indexer that computes something else than the ops do."""
    if getattr(indexer.k_norm, "bias", None) is None:
        raise NotImplementedError(f"k_norm: expected a LayerNorm with bias, got {type(indexer.k_norm).__name__}")
    if indexer.num_init_tokens or indexer.num_local_tokens:
        raise NotImplementedError(
            f"index_init_tokens, index_local_tokens: expected 0, got {indexer.num_init_tokens} and "
            f"{indexer.num_local_tokens}: not served yet"
        )
    if (indexer.head_dim, indexer.rope_head_dim) != (128, 64):
        raise ValueError(
            f"index_head_dim, qk_rope_head_dim: expected 128 and 64, got {indexer.head_dim} and {indexer.rope_head_dim}"
        )


def _key_and_weights(indexer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``wk(x)`` [T, 128] and ``weights_proj(x)`` float32 [T, index_n_heads], by the module's own projections."""
    if indexer.use_dsa_indexer_fusion:  # CUDA and interleaved rope: one matrix for both
        key, weights = indexer._fused_k_weights(x)
        return key, weights.float()
    return indexer.wk(x)[0], indexer._weights_proj_bf16_in_fp32_out(x).float()


def cos_sin_of(indexer) -> torch.Tensor:
    """The rotary table, float32 [P, 64]: cosines, then sines. SGLang may keep it in bf16; made once per table then."""
    table = indexer.rotary_emb.cos_sin_cache
    kept = getattr(indexer, "_jax_mla_cos_sin", None)
    if kept is None or kept[0] is not table:
        kept = indexer._jax_mla_cos_sin = (table, table.detach().float().contiguous())
    return kept[1]
