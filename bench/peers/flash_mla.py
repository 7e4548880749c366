"""DeepSeek's FlashMLA: sparse decode over 656-byte rows and sparse prefill over bf16 rows.

Either of the package ``flash_mla`` (on PyPI ``sgl-flash-mla``, which keeps the kernels of Hopper behind ``use_legacy``)
or of vLLM, whose library ``_flashmla_C.abi3.so`` is looked for in an installed vllm, or at the path in the environment
variable ``JAX_MLA_FLASHMLA``.

On Hopper it takes 64 or 128 heads: fewer are filled up with zeros, and what it does with those is in its time. It
rounds the scales of 656-byte rows to bf16, and is checked against rows with scales so rounded. The schedule of a decode
is made at the first call and kept, as a server keeps it for all layers of a step.
"""

import importlib.util
import inspect
import os
from pathlib import Path
from types import SimpleNamespace

from bench.peers.base import Check, Missing, TorchPeer, library, needs_gpu

LIBRARY = "JAX_MLA_FLASHMLA"
PACKAGES = ("sgl-flash-mla", "flash-mla", "vllm", "torch")
BLOCK = 64  # slots of a page of the cache; the kernel reads single slots whatever it is


def padded_heads(heads: int) -> int:
    """The head count that the kernels take for ``heads``; raises ``Missing`` for more than 128."""
    if heads > 128:
        raise Missing(f"FlashMLA takes 64 or 128 heads, not {heads}")
    return 64 if heads <= 64 else 128


def label(heads: int) -> str:
    """FlashMLA's name in a table, which says what it pads."""
    return "FlashMLA" if heads in (64, 128) else f"FlashMLA, {heads} heads padded to {padded_heads(heads)}"


def _package(module):
    """``prefill`` and ``decode`` of the package flash_mla."""
    legacy = {"use_legacy": True} if "use_legacy" in inspect.signature(module.flash_mla_sparse_fwd).parameters else {}

    def prefill(q, kv, indices, scale):
        return module.flash_mla_sparse_fwd(q, kv, indices, scale, **legacy)

    def decode(q, cache, indices, scale, plan):
        if "plan" not in plan:
            plan["plan"] = module.get_mla_metadata()[0]
        return module.flash_mla_with_kvcache(
            q, cache, None, None, 512, plan["plan"], None, scale, is_fp8_kvcache=True, indices=indices, **legacy
        )

    return SimpleNamespace(prefill=prefill, decode=decode)


def _vllm(torch, path: Path):
    """The same of vLLM's library."""
    torch.ops.load_library(str(path))
    ops = torch.ops._flashmla_C

    def prefill(q, kv, indices, scale):
        return ops.sparse_prefill_fwd(q, kv, indices, scale, 512, None, None, None)

    def decode(q, cache, indices, scale, plan):
        kept = plan.get("schedule"), plan.get("splits")
        nothing = (None,) * 3
        out, lse, plan["schedule"], plan["splits"] = ops.sparse_decode_fwd(
            q, cache, indices, None, None, *kept, *nothing, 512, scale, None
        )
        return out, lse

    return SimpleNamespace(prefill=prefill, decode=decode)


def provider(torch):
    """``prefill(q, kv, indices, scale)`` and ``decode(q, cache, indices, scale, plan)``, of whichever is installed."""
    if importlib.util.find_spec("flash_mla") is not None:
        return _package(library("flash_mla", "sgl-flash-mla"))
    if os.environ.get(LIBRARY):
        return _vllm(torch, Path(os.environ[LIBRARY]))
    vllm = importlib.util.find_spec("vllm")
    if vllm is not None and vllm.origin is not None:
        built = sorted(Path(vllm.origin).parent.glob("_flashmla_C*.so"))
        if built:
            return _vllm(torch, built[0])
    raise Missing("sgl-flash-mla is not installed, nor is vllm")


def queries(torch, nope, rope):
    """``[T, 64 or 128, 576]``, zeros in the heads that are not there."""
    rows, heads, _ = nope.shape
    q = torch.zeros(rows, padded_heads(heads), 576, dtype=nope.dtype, device=nope.device)
    q[:, :heads, :512], q[:, :heads, 512:] = nope, rope
    return q


def _check_slots(which) -> None:
    if which.shape[1] % 128:
        raise Missing(f"FlashMLA takes a multiple of 128 slots a row, not {which.shape[1]}")


def decode(heads: int, softmax_scale: float, error: Check) -> TorchPeer:
    """Of a pool of fp8_656 rows; ``error`` checks against scales rounded to bf16."""

    def make(torch, shared):
        (pool,) = shared
        needs_gpu(pool, "FlashMLA")
        flash_mla, plan = provider(torch), {}
        cache = pool.view(-1, BLOCK, 1, 656)

        def bind(varied):
            nope, rope, which = varied
            _check_slots(which)
            q, indices = queries(torch, nope, rope)[:, None], which[:, None].contiguous()
            return lambda: flash_mla.decode(q, cache, indices, softmax_scale, plan)

        return bind

    def result(raw):
        out, lse = raw
        return out[:, 0, :heads], lse[:, :heads, 0]

    return TorchPeer(make, result, error, packages=PACKAGES)


def prefill(heads: int, softmax_scale: float) -> TorchPeer:
    """Of a pool of bf16 rows."""

    def make(torch, shared):
        (pool,) = shared
        needs_gpu(pool, "FlashMLA")
        flash_mla = provider(torch)
        kv = pool[:, None]

        def bind(varied):
            nope, rope, which = varied
            _check_slots(which)
            q, indices = queries(torch, nope, rope), which[:, None].contiguous()
            return lambda: flash_mla.prefill(q, kv, indices, softmax_scale)

        return bind

    def result(raw):
        out, _, lse = raw
        return out[:, :heads], lse[:, :heads]

    return TorchPeer(make, result, packages=PACKAGES)
