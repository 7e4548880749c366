"""A layer's attention in decode as SGLang runs it on Hopper: its own kernels, DeepGEMM's logits and FlashMLA."""

from bench.peers import deep_gemm, flash_mla, sglang
from bench.peers.base import Check, TorchPeer

PACKAGES = (*sglang.PACKAGES, *deep_gemm.PACKAGES, *flash_mla.PACKAGES)


def decode(
    heads: int, index_heads: int, selected: int, length: int, page_size: int, softmax_scale: float, error: Check
) -> TorchPeer:
    """Of one request of ``length`` tokens in a pool of fp8_656 rows; plans and schedules are made beforehand, as they
    are once for all layers. ``error`` checks against scales rounded to bf16 and keys
    and queries as SGLang makes them."""

    def make(torch, shared):
        index_pool, kv_pool, weight, bias, cos_sin, table = shared
        topk = sglang.load(kv_pool, "topk_v2", "attention.dsv4.topk")
        gemm = deep_gemm.load(kv_pool, index_heads)
        attention, schedule = flash_mla.provider(torch), {}
        writes_keys = sglang.index_write(page_size).make(torch, (index_pool, weight, bias, cos_sin))
        writes_kv = sglang.kv_write("fp8_656", 1.0).make(torch, (kv_pool,))
        queries = sglang.index_query(index_heads).make(torch, (cos_sin,))
        keys = index_pool.view(-1, page_size, 1, 132)
        cache = kv_pool.view(-1, flash_mla.BLOCK, 1, 656)

        def bind(varied):
            which, position, k, q, weights, nope, rope, q_nope, q_rope, lengths = varied
            slots = table[which.long()]
            at = slots[:, length - 1].contiguous()
            write_key, write_kv = writes_keys((at, k, position)), writes_kv((at, nope, rope))
            query = queries((q, weights, position))
            pages = (slots[:, ::page_size] // page_size).to(torch.int32).contiguous()
            context = lengths[:, None].contiguous()
            gemm_plan = gemm.get_paged_mqa_logits_metadata(context, page_size, gemm.get_num_sms())
            topk_plan = topk.plan_topk_v2(lengths)
            chosen = torch.empty(1, selected, dtype=torch.int32, device=lengths.device)
            padded = flash_mla.queries(torch, q_nope, q_rope)[:, None]

            def call():
                write_key()
                write_kv()
                q8, folded = query()
                logits = gemm.fp8_paged_mqa_logits(
                    q8[:, None], keys, folded[..., 0], context, pages, gemm_plan, length, clean_logits=False
                )
                topk.topk_transform_paged_v2(logits, lengths, pages, chosen, page_size, topk_plan)
                out, lse = attention.decode(padded, cache, chosen[:, None], softmax_scale, schedule)
                return index_pool, kv_pool, q8, folded[..., 0], chosen, out, lse

            return call

        return bind

    def result(raw):
        *others, out, lse = raw
        return *others, out[:, 0, :heads], lse[:, :heads, 0]

    return TorchPeer(make, result, error, packages=tuple(dict.fromkeys(PACKAGES)))
