"""Everything that SGLang 0.5.23 lacks on a machine without an accelerator. On one with a GPU nothing here acts.

SGLang's own way onto a CPU (``SGLANG_USE_CPU_ENGINE=1``) needs a build of ``sgl_kernel`` that is on no package index. A
*platform plugin* (entry-point group ``sglang.srt.platforms``) needs none: SGLang then takes its torch code paths, and
this module fills the three gaps that are left for DeepSeek-V3.2:

1. argument resolution asks ``torch.cuda`` for a compute capability (``srt/arg_groups/model_hook.py``,
   ``_dsa_kv_cache_dtype_default`` and ``_dsa_split_backend_resolution`` in ``overrides.py``);
2. the capturer behind ``--enable-return-indexer-topk`` is made on CUDA and NPU only;
3. that capturer's host buffer is pinned through the CUDA runtime.

With ``SGLANG_USE_CPU_ENGINE=1`` the platform stays SGLang's own, and other attention backends run as if this package
were not installed.
"""

import contextlib
import logging
import os

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from bridge.sglang import arguments

logger = logging.getLogger("jax_mla")

CAPABILITY = (9, 0)
"""The answer of (1): SGLang then keeps bf16 KV unless told otherwise, and 656-byte rows for fp8_e4m3, as on an H200."""


def activate() -> str | None:
    """SGLang's question whether this platform is the machine's: the class to use, or None."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or torch.accelerator.is_available():
        return None
    return f"{__name__}.CpuPlatform"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU that runs SGLang's torch code: no Triton, no graphs, no pinned memory."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities(supports_triton=False)

    def get_default_attention_backend(self) -> str:
        """For models without sparse attention; those with it get SGLang's "dsa", which needs a GPU."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device=None) -> bool:
        return False

    def get_device(self, device_id: int = 0) -> str:  # pyrefly: ignore[bad-override]
        """A name, as ``srt/arg_groups/serving_hook.py`` takes it apart; ``CpuDeviceMixin`` has a ``torch.device``."""
        return "cpu"

    def init_backend(self) -> None:
        """Called once in the scheduler, while ``srt/model_executor/model_runner.py`` is being imported."""
        _let_indexer_be_captured()
        logger.info("jax_mla: no accelerator; SGLang runs its torch code on the CPU, and can capture index selections")


@contextlib.contextmanager
def _device_capability():
    """Inside, ``torch.cuda.get_device_capability()`` answers ``CAPABILITY`` instead of raising."""
    real = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
    try:
        yield
    finally:
        torch.cuda.get_device_capability = real


def resolve(server_args, previous) -> None:
    """Wraps ``handle_model_specific_adjustments`` on a machine without accelerators, for this backend only: gap (1)."""
    from sglang.srt.arg_groups.overrides import resolving_view

    if not arguments.chosen(resolving_view(server_args)):
        return previous(server_args)
    with _device_capability():
        previous(server_args)


def _let_indexer_be_captured() -> None:
    """Gaps (2) and (3)."""
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def unpinned(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
        return allocator.allocate(dims, dtype=dtype, device=device)

    def create(original, *, model_config, num_tokens, max_running_requests, device):
        from sglang.srt.configs.model_config import get_num_indexer_layers
        from sglang.srt.runtime_context import get_exec
        from sglang.srt.state_capturer.indexer_topk import _create_indexer_capturer_raw

        if device != "cpu":
            return original(
                model_config=model_config,
                num_tokens=num_tokens,
                max_running_requests=max_running_requests,
                device=device,
            )
        return _create_indexer_capturer_raw(
            enable=get_exec().features.enable_return_indexer_topk,
            num_indexer_layers=get_num_indexer_layers(model_config.hf_text_config),
            index_topk=getattr(model_config.hf_text_config, "index_topk", 0),
            num_tokens=num_tokens,
            max_running_requests=max_running_requests,
            device=device,
        )

    ALLOC_MEMORY_FUNCS["cpu"] = unpinned
    HookRegistry.register("sglang.srt.state_capturer.indexer_topk.create_indexer_capturer", create, HookType.AROUND)
    HookRegistry.apply_hooks()
