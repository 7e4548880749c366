"""DeepSeek's DeepGEMM: the indexer's logits. On PyPI ``sgl-deep-gemm``; it compiles with nvcc at the first call, so it
needs ``CUDA_HOME``.

Called as SGLang calls it, with ``clean_logits=False``: what lies outside of a row's window is left as it was, where our
op writes -inf. So only what is visible is checked. The schedule of paged logits is made beforehand.
"""

from bench.peers.base import Check, Missing, TorchPeer, library, needs_gpu

PACKAGES = ("sgl-deep-gemm", "deep-gemm", "apache-tvm-ffi", "torch")
HEADS = (32, 64)


def load(tensor, heads: int):
    """The module; raises ``Missing``."""
    needs_gpu(tensor, "DeepGEMM")
    if heads not in HEADS:
        raise Missing(f"DeepGEMM takes 32 or 64 heads, not {heads}")
    return library("deep_gemm", "sgl-deep-gemm")


def ragged(error: Check) -> TorchPeer:
    """Logits of keys one after the other."""

    def make(torch, shared):
        def bind(varied):
            q8, weights, k8, k_scale, starts, ends = varied
            deep_gemm = load(q8, q8.shape[1])
            return lambda: deep_gemm.fp8_mqa_logits(q8, (k8, k_scale), weights, starts, ends, clean_logits=False)

        return bind

    return TorchPeer(make, error=error, packages=PACKAGES)


def paged(next_n: int, max_len: int, error: Check) -> TorchPeer:
    """Logits of keys in pages of 64 tokens, which its layout and ours put the same way: keys, then scales."""

    def make(torch, shared):
        pool, table = shared
        cache = pool.view(-1, 64, 1, 132)
        blocks = (table[:, ::64] // 64).to(torch.int32)

        def bind(varied):
            q8, weights, which, lengths = varied
            deep_gemm = load(q8, q8.shape[1])
            q = q8.view(-1, next_n, *q8.shape[1:])
            block_table = blocks[which.long()].contiguous()
            later = torch.arange(next_n, dtype=torch.int32, device=lengths.device) - (next_n - 1)
            context = (lengths[:, None] + later).contiguous()
            schedule = deep_gemm.get_paged_mqa_logits_metadata(context, 64, deep_gemm.get_num_sms())
            return lambda: deep_gemm.fp8_paged_mqa_logits(
                q, cache, weights, context, block_table, schedule, max_len, clean_logits=False
            )

        return bind

    return TorchPeer(make, error=error, packages=PACKAGES)
