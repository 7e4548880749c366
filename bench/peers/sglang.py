"""SGLang's own kernels: top-k, sparse MLA in Triton and in TileLang, and the writes of both caches.

They come in its Python package and are compiled at the first call: those in CUDA with nvcc, those in Triton with
triton. Where they take what our op takes, they are checked as it is. Its Triton and TileLang attention gives no lse;
with 576-byte rows it rounds queries and probabilities to fp8 too, which ``FP8_PRODUCTS`` allows for.
"""

from bench.peers.base import Check, Missing, TorchPeer, library, needs_gpu

PACKAGES = ("sglang", "triton", "apache-tvm-ffi", "torch")
KERNELS = "sglang.kernels.ops"
FP8_PRODUCTS = ("calc_diff", 5e-3)
RAGGED_ROWS = 512  # SGLang's prefill has no plan; its decode has one


def load(tensor, name: str, module: str):
    """``name``'s module under ``sglang.kernels.ops``; raises ``Missing``."""
    needs_gpu(tensor, f"SGLang's {name}")
    return library(f"{KERNELS}.{module}", "sglang")


def fast_topk(k: int, error: Check) -> TorchPeer:
    """Any order, and ties anyhow."""

    def make(torch, shared):
        def bind(varied):
            logits, lengths = varied
            if k not in (512, 2048):
                raise Missing(f"SGLang's fast_topk selects 512 or 2048, not {k}")
            module = load(logits, "fast_topk", "attention.fast_topk")
            starts = torch.zeros_like(lengths)
            return lambda: module.fast_topk(logits, lengths, k, starts)

        return bind

    return TorchPeer(make, error=error, packages=PACKAGES)


def topk_v2(k: int, error: Check) -> TorchPeer:
    """Any order, and ties anyhow: with a plan, made beforehand, as in its decode; without one for many rows, as in its
    prefill."""

    def make(torch, shared):
        def bind(varied):
            logits, lengths = varied
            module = load(logits, "topk_v2", "attention.dsv4.topk")
            rows = len(logits)
            out = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
            if rows >= RAGGED_ROWS:
                offsets = torch.zeros_like(lengths)

                def ragged():
                    module.topk_transform_ragged_v2(logits, lengths, out_offsets=offsets, out_indices=out)
                    return out

                return ragged
            plan = module.plan_topk_v2(lengths)

            def paged():
                module.topk_transform_paged_v2(logits, lengths, None, out, 1, plan)
                return out

            return paged

        return bind

    return TorchPeer(make, error=error, packages=PACKAGES)


def _typed(torch, pool, layout: str):
    """The pool as ``[slots, 1, 576]`` of numbers."""
    return (pool if layout == "bf16" else pool.view(torch.float8_e4m3fn))[:, None]


def triton_decode(layout: str, softmax_scale: float, kv_scale: float, error: Check | None) -> TorchPeer:
    """Of bf16 or fp8_576 rows, whose one scale goes into the softmax's and into the result."""

    def make(torch, shared):
        (pool,) = shared
        module = load(pool, "Triton decode", "attention.dsa.triton_sparse_mla_decode")
        kv = _typed(torch, pool, layout)

        def bind(varied):
            nope, rope, which = varied
            indices, scale = which[:, None].contiguous(), softmax_scale * kv_scale
            return lambda: module.triton_sparse_mla_decode(nope, rope, kv, indices, scale)

        return bind

    metric = FP8_PRODUCTS if layout == "fp8_576" else None
    return TorchPeer(make, lambda raw: (raw[0] * kv_scale, None), error, metric, PACKAGES)


def triton_prefill(softmax_scale: float) -> TorchPeer:
    """Of bf16 rows; one query a program, all its heads in it."""

    def make(torch, shared):
        (pool,) = shared
        module = load(pool, "Triton prefill", "attention.dsa.triton_sparse_mla_prefill")

        def bind(varied):
            nope, rope, which = varied
            if nope.shape[1] > 32:
                raise Missing(f"SGLang's Triton prefill is for 32 heads at most, not {nope.shape[1]}")
            q = torch.cat([nope, rope], dim=-1)
            lengths = torch.full((len(which),), which.shape[1], dtype=torch.int32, device=which.device)
            out = torch.empty_like(nope)
            return lambda: module.sparse_mla_prefill(q, pool, which, softmax_scale, topk_length=lengths, out=out)

        return bind

    return TorchPeer(make, lambda raw: (raw, None), packages=PACKAGES)


def tilelang(softmax_scale: float) -> TorchPeer:
    """SGLang's TileLang kernel, of bf16 rows. The package ``tilelang`` itself has none: its are examples in its
    repository."""

    def make(torch, shared):
        (pool,) = shared
        needs_gpu(pool, "TileLang")
        library("tilelang")
        module = load(pool, "TileLang kernel", "attention.dsa.tilelang_kernel")

        def bind(varied):
            nope, rope, which = varied
            q, indices = torch.cat([nope, rope], dim=-1), which[:, None].contiguous()
            return lambda: module.tilelang_sparse_fwd(q, pool[:, None], indices, softmax_scale)

        return bind

    return TorchPeer(make, lambda raw: (raw[0], None), packages=("tilelang", *PACKAGES))


def kv_write(layout: str, kv_scale: float) -> TorchPeer:
    """bf16: one kernel. fp8_656: one that quantises and one that scatters. fp8_576: one, which knows no scale, so the
    numbers are divided by it beforehand."""

    def make(torch, shared):
        (pool,) = shared
        buffer = load(pool, "set_mla_kv_buffer_triton", "kvcache.mla_buffer")
        if layout == "fp8_656":
            quantise = load(pool, "quantize_k_cache_separate", "quantization.dsa_quant_k_cache")
        rows = pool[:, None]

        def bind(varied):
            at, nope, rope = varied
            at = at.long()
            if layout == "fp8_576":
                nope, rope = nope / kv_scale, rope / kv_scale
            nope, rope = nope[:, None], rope[:, None]

            def call():
                if layout == "bf16":
                    buffer.set_mla_kv_buffer_triton(rows, at, nope, rope)
                elif layout == "fp8_656":
                    parts = quantise.quantize_k_cache_separate(nope, rope)
                    buffer.set_mla_kv_buffer_triton(rows, at, *parts)
                else:
                    fp8 = torch.float8_e4m3fn
                    buffer.set_mla_kv_buffer_triton_fp8_quant(pool, at, nope[:, 0], rope[:, 0], fp8)
                return pool

            return call

        return bind

    return TorchPeer(make, packages=PACKAGES)


def index_write(page_size: int, error: Check | None = None) -> TorchPeer:
    """LayerNorm, rotation, quantisation and the write, in one kernel. It rotates neighbours, 2 i with 2 i + 1, where
    our case rotates i with i + 32, and its scales are no powers of two: as much work, and ``error`` must know it. Keys
    go through bf16 to fp8."""

    def make(torch, shared):
        pool, weight, bias, cos_sin = shared
        module = load(pool, "fused_k_indexer_norm_rope_store", "attention.dsa.indexer_k")

        def bind(varied):
            at, k, position = varied
            at = at.long()

            def call():
                module.fused_k_indexer_norm_rope_store(k, pool, at, weight, bias, 1e-6, cos_sin, position, page_size)
                return pool

            return call

        return bind

    return TorchPeer(make, error=error, packages=PACKAGES)


def index_query(heads: int, error: Check | None = None) -> TorchPeer:
    """Rotation and quantisation, the scale folded into the weights. Rotation and scales are those of its
    ``index_write``."""

    def make(torch, shared):
        (cos_sin,) = shared
        module = load(cos_sin, "fused_q_indexer_rope_first_quant", "attention.dsa.indexer_q")
        factor = 128**-0.5 * heads**-0.5

        def bind(varied):
            q, weights, position = varied
            return lambda: module.fused_q_indexer_rope_first_quant(q, weights, factor, cos_sin, position)

        return bind

    def result(raw):
        q8, weights = raw
        return q8, weights[..., 0]

    return TorchPeer(make, result, error, packages=PACKAGES)
