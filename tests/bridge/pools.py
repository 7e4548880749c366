"""SGLang's own pools and batches, small, without a server."""

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

LATENT, ROPE, PAGE = 512, 64, 64
DTYPES = {"bf16": torch.bfloat16, "fp8_656": torch.float8_e4m3fn, "fp8_576": torch.float8_e4m3fn}
ROWS = {"bf16": 576, "fp8_656": 656, "fp8_576": 576}


@contextmanager
def sglang_pools() -> Generator:
    """Makes SGLang's pools: ``make(layout) -> (DSATokenToKVPool, ReqToTokenPool)`` with 4 pages and 3 requests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, ReqToTokenPool
        from sglang.srt.runtime_context import get_parallel

    def make(layout="bf16", **changed):
        options: dict[str, Any] = dict(
            size=4 * PAGE,
            page_size=PAGE,
            kv_lora_rank=LATENT,
            dtype=DTYPES.get(layout, torch.bfloat16),
            qk_rope_head_dim=ROPE,
            layer_num=2,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=ROWS.get(layout, 576),
        )
        table = ReqToTokenPool(size=3, max_context_len=2 * PAGE, device="cpu", enable_memory_saver=False)
        return DSATokenToKVPool(**(options | changed)), table

    with get_parallel().override(attn_cp_size=1, attn_cp_rank=0, attn_dcp_size=1):
        yield make


def runner(pool, table):
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["DeepseekV32ForCausalLM"]))
    return SimpleNamespace(
        device="cpu", token_to_kv_pool=pool, req_to_token_pool=table, kv_cache_dtype=pool.dtype, model_config=config
    )


def extend(backend, pairs, order_seed=0):
    """A ForwardBatch that extends request i by ``new`` behind ``cached`` tokens, its slots drawn at random."""
    slots = torch.randperm(4 * PAGE, generator=torch.Generator().manual_seed(order_seed)) + 1
    where = []
    for request, (cached, new) in enumerate(pairs):
        mine = slots[request * 2 * PAGE :][: cached + new]
        backend.req_to_token[request, : cached + new] = mine.to(torch.int32)
        where.append(mine[cached:])
    cached, new = [c for c, _ in pairs], [n for _, n in pairs]
    positions = torch.cat([torch.arange(c, c + n) for c, n in pairs]) if pairs else torch.zeros(0)
    return SimpleNamespace(
        forward_mode=SimpleNamespace(
            name="EXTEND" if pairs else "IDLE", is_idle=lambda: not pairs, is_decode=lambda: False
        ),
        batch_size=len(pairs),
        req_pool_indices=torch.arange(len(pairs)),
        extend_seq_lens=torch.tensor(new),
        extend_prefix_lens=torch.tensor(cached),
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=cached,
        positions=positions.long(),
        out_cache_loc=torch.cat(where) if where else torch.zeros(0, dtype=torch.int64),
    )
