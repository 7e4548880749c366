"""What prefill needs of the stream lane, built before the first request: ``JAX_MLA_PREPARE=0`` leaves it for then.

Decode needs nothing here: SGLang captures its graphs at start, and what they launch is built in the warm-ups before.
The calls that a forward would make are made on tensors without memory, on a lane that only writes them down.
"""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bridge.sglang import indexer as indexers
from bridge.sglang import metadata
from bridge.stream import Function
from bridge.stream.cache import folder
from bridge.stream.custom import empty_results
from bridge.stream.program import Array
from jax_mla.layouts import KV_LORA_RANK, QK_ROPE_HEAD_DIM

logger = logging.getLogger("jax_mla")

VARIABLE = "JAX_MLA_PREPARE"

Wanted = tuple[Function, tuple[Array, ...], dict[str, Any]]


class Recorder:
    """A lane that launches nothing: ``wanted`` is what it was asked for, each once."""

    name = "recorder"

    def __init__(self):
        self._wanted: dict[tuple, Wanted] = {}

    @property
    def wanted(self) -> list[Wanted]:
        return list(self._wanted.values())

    def launcher(self, function: Function, arrays: tuple[Array, ...], **static: Any) -> "Recorded":
        self._wanted[function.name, arrays, tuple(sorted(static.items()))] = function, arrays, static
        return Recorded(function, static)


class Recorded:
    def __init__(self, function: Function, static: dict[str, Any]):
        self._function, self._static = function, static

    def bind(self, *tensors: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        return lambda: tuple(empty_results(self._function, tensors, self._static))


def sizes(least: int, most: int) -> list[int]:
    """What ``metadata.bucket`` makes of all sizes up to ``most``."""
    found = [metadata.bucket(1, least)]
    while found[-1] < most:
        found.append(2 * found[-1])
    return found


def prefill(backend, model: torch.nn.Module, most_rows: int, most_keys: int) -> list[Wanted]:
    """What prefills of up to ``most_rows`` new tokens, behind ``most_keys`` at most with them, launch."""
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.radix_attention import RadixAttention

    modules = list(model.modules())
    absorbed = [x for x in modules if isinstance(x, RadixAttention) and x.v_head_dim == KV_LORA_RANK]
    attention = {(x.tp_q_head_num, x.scaling): x for x in absorbed}  # beside it stands one for dense prefill
    selecting = {
        (x.n_heads, x.index_topk, x.is_neox_style): x
        for x in modules
        if isinstance(x, Indexer) and len(backend.token_to_kv_pool.get_index_k_with_scale_buffer(x.layer_id))
    }
    for x in selecting.values():
        indexers.check(x)
    recorder = Recorder()
    before = backend.forward_metadata
    try:
        for rows in sizes(metadata.LEAST_ROWS, most_rows):
            for keys in sizes(metadata.LEAST_TOKENS, most_keys):
                if 2 * keys <= rows:  # keys hold the rows' own
                    continue
                _one(backend, recorder, rows, keys, list(selecting.values()), list(attention.values()))
    finally:
        backend.forward_metadata = before
    return recorder.wanted


def _one(backend, recorder: Recorder, rows: int, keys: int, selecting: list, attention: list) -> None:
    i32, bf16 = (partial(torch.empty, dtype=x, device="meta") for x in (torch.int32, torch.bfloat16))
    topk = i32(0)
    how = dict(count=rows, lengths=i32(rows), positions=i32(rows), write_slots=i32(rows))
    backend.take(metadata.Prefill(**how, k_slots=i32(keys), starts=i32(rows)), recorder)
    batch = backend.batch
    for x in selecting:
        cos_sin, norm, interleaved = indexers.cos_sin_of(x), x.k_norm, not x.is_neox_style
        weights = torch.empty(rows, x.n_heads, device="meta")
        query = bf16(rows, x.n_heads, x.head_dim), weights, cos_sin, batch.rows.positions
        for select in indexers.selections_of(
            backend, batch, x.layer_id, query, k=x.index_topk, interleaved=interleaved
        ):
            select()
        written = bf16(rows, x.head_dim), norm.weight.detach(), norm.bias.detach(), cos_sin, batch.rows.positions
        eps = float(norm.variance_epsilon)
        backend.writer.index(
            batch.calls, backend.caches, x.layer_id, batch.write_plan, written, interleaved=interleaved, eps=eps
        )()
        topk = i32(rows, x.index_topk)
    for x in attention:
        q, k = bf16(rows, x.tp_q_head_num, x.v_head_dim), bf16(rows, 1, x.v_head_dim)
        ropes = dict(q_rope=bf16(rows, x.tp_q_head_num, QK_ROPE_HEAD_DIM), k_rope=bf16(rows, 1, QK_ROPE_HEAD_DIM))
        backend.forward_extend(q, k, k, x, None, topk_indices=topk, **ropes)


def at_start(backend, runner) -> None:
    """Builds it all, or says that it doesn't. Of several ranks each begins elsewhere, and none builds what another
    does."""
    from sglang.srt.runtime_context import get_parallel

    if os.environ.get(VARIABLE) == "0":
        logger.info("jax_mla: %s=0: programs for prefill are built when first wanted, seconds each", VARIABLE)
        return
    arguments, most_keys = runner.server_args, runner.model_config.context_len
    chunk = arguments.chunked_prefill_size
    most_rows = min(chunk if chunk and chunk > 0 else arguments.max_prefill_tokens, most_keys)
    wanted = prefill(backend, runner.model, most_rows, most_keys)
    logger.info(
        "jax_mla: %s programs for prefills of up to %s new tokens and %s in all; those that aren't in %s are built now",
        *(len(wanted), most_rows, most_keys, folder()),
    )
    rank, ranks = get_parallel().tp_rank, get_parallel().tp_size
    first = len(wanted) * rank // ranks
    backend.lane.prepare([*wanted[first:], *wanted[:first]], progress=rank == 0)
    logger.info("jax_mla: programs for prefill are ready")
