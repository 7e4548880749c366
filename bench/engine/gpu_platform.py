"""A CUDA card for an SGLang without ``sgl_kernel``: its torch and Triton code, and its own graph runner.

SGLang takes a platform from outside through the entry-point group ``sglang.srt.platforms`` (``machine.py`` writes it).
"""

from sglang.srt.platforms.cuda import CudaDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


def activate() -> str:
    return f"{__name__}.GpuPlatform"


class GpuPlatform(CudaDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = device_type = "cuda"
    capabilities = PlatformCapabilities(supports_triton=True, graph_capture=True)

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_default_attention_backend(self) -> str:
        return "jax_mla"

    def get_graph_runner_cls(self) -> type:
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

        return DecodeCudaGraphRunner

    def get_full_graph_backend_cls(self) -> type:
        from sglang.srt.model_executor.runner_backend import FullCudaGraphBackend

        return FullCudaGraphBackend

    def is_pin_memory_available(self, device=None) -> bool:
        return True
