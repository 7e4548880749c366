"""What of SGLang 0.5.23 this package holds on to, and whether the installed SGLang still has it.

SGLang promises none of these names to anyone. They are looked up in its source text, without importing it: the check
runs in every process that SGLang starts, and some of these modules take seconds to import.
"""

import ast
import importlib.metadata
from pathlib import Path

VERSION = "0.5.23"

NAMES = {
    "kernels/ops/quantization/fp8_kernel.py": ("is_fp8_fnuz",),
    "srt/arg_groups/choices.py": ("ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices"),
    "srt/arg_groups/overrides.py": ("attention_backends_of", "declare_resolution", "resolving_view"),
    "srt/arg_groups/resolution_hooks.py": ("register_resolution_hook",),
    "srt/configs/model_config.py": ("get_num_indexer_layers",),
    "srt/environ.py": ("envs", "Envs.SGLANG_DSA_TOPK_BROADCAST"),
    "srt/layers/attention/attention_registry.py": ("ATTENTION_BACKENDS", "register_attention_backend"),
    "srt/layers/attention/base_attn_backend.py": (
        "AttentionBackend.forward",
        "AttentionBackend.forward_decode",
        "AttentionBackend.forward_extend",
        "AttentionBackend.init_forward_metadata",
        "AttentionBackend.init_forward_metadata_in_graph",
        "AttentionBackend.init_forward_metadata_out_graph",
        "AttentionBackend.forward_metadata",
        "SharedReadEnds.POST_REPLAY",
    ),
    "srt/layers/attention/dsa/dsa_indexer.py": (
        "Indexer.forward_cuda",
        "Indexer.forward_native",
        "Indexer._fused_k_weights",
        "Indexer._weights_proj_bf16_in_fp32_out",
        "_broadcast_indexer_topk_from_rank0",
    ),
    "srt/layers/radix_attention.py": ("RadixAttention",),
    "srt/layers/attention/dsa/utils.py": ("aiter_can_use_preshuffle_paged_mqa",),
    "srt/mem_cache/memory_pool.py": (
        "DSATokenToKVPool.get_index_k_with_scale_buffer",
        "MLATokenToKVPool.get_key_buffer",
        "ReqToTokenPool",
    ),
    "srt/mem_cache/pool_host/common.py": ("ALLOC_MEMORY_FUNCS",),
    "srt/model_executor/cuda_graph_config.py": ("Backend", "Phase", "with_phase"),
    "srt/model_executor/forward_batch_info.py": (
        "ForwardBatch.extend_prefix_lens",
        "ForwardBatch.extend_seq_lens_cpu",
        "ForwardBatch.out_cache_loc",
        "ForwardBatch.req_pool_indices",
        "ForwardBatch.seq_lens_cpu",
        "ForwardMode.DECODE",
        "ForwardMode.EXTEND",
        "ForwardMode.IDLE",
        "ForwardMode.MIXED",
    ),
    "srt/model_executor/forward_context.py": ("get_attn_backend",),
    "srt/models/deepseek_common/attention_backend_handler.py": (
        "AttentionBackendRegistry.register",
        "handle_attention_dsa",
    ),
    "srt/models/deepseek_common/utils.py": ("FORWARD_ABSORB_CORE_ATTENTION_BACKENDS",),
    "srt/plugins/hook_registry.py": ("HookRegistry.apply_hooks", "HookRegistry.register", "HookType.AROUND"),
    "srt/runtime_context.py": ("get_exec", "get_parallel"),
    "srt/state_capturer/indexer_topk.py": (
        "create_indexer_capturer",
        "_create_indexer_capturer_raw",
        "maybe_capture_indexer_topk",
    ),
    "srt/platforms/cpu.py": ("CpuDeviceMixin",),
    "srt/platforms/device_mixin.py": ("PlatformEnum.OOT",),
    "srt/platforms/interface.py": ("PlatformCapabilities", "SRTPlatform.init_backend"),
}
"""By file of SGLang: names and members of classes that ``bridge.sglang`` calls, overrides or hooks."""


def installed() -> str | None:
    """Version of the SGLang that is installed, None where there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def _source_root() -> Path:
    """Folder of the ``sglang`` package."""
    return Path(str(importlib.metadata.distribution("sglang").locate_file("sglang")))


def _defined(source: str) -> set[str]:
    """Names that a module's text binds at its top level, and ``Class.member`` for its classes."""
    found: set[str] = set()

    def visit(body, prefix=""):
        for node in body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(prefix + name)
                case ast.ClassDef(name=name, body=members):
                    found.add(prefix + name)
                    if not prefix:
                        visit(members, f"{name}.")
                case ast.Assign(targets=targets):
                    found.update(prefix + t.id for t in targets if isinstance(t, ast.Name))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(prefix + name)
                case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                    found.update(prefix + (a.asname or a.name) for a in aliases)
                case ast.If(body=then, orelse=other):
                    visit([*then, *other], prefix)

    visit(ast.parse(source).body)
    return found


def missing(root: Path | None = None) -> list[str]:
    """Entries of ``NAMES`` that the source under ``root`` (the installed SGLang's by default) does not define."""
    root = _source_root() if root is None else root
    gone = []
    for file, names in NAMES.items():
        path = root / file
        defined = _defined(path.read_text(encoding="utf-8")) if path.is_file() else set()
        gone += [f"{file}:{name}" for name in names if name not in defined]
    return gone


def problem() -> str | None:
    """Why this package cannot serve with the installed SGLang: one sentence naming both versions. None if it can."""
    version = installed()
    if version is None:
        return f"jax_mla is written for SGLang {VERSION}, and SGLang is not installed; pip install '.[sglang]'"
    if version != VERSION:
        return (
            f"jax_mla is written for SGLang {VERSION}, and SGLang {version} is installed; install sglang=={VERSION}, "
            f"or a jax_mla that names SGLang {version}"
        )
    if gone := missing():
        return (
            f"jax_mla is written for SGLang {VERSION}, and the installed SGLang {version} lacks {', '.join(gone)}; "
            f"install an unchanged sglang=={VERSION}"
        )
    return None
