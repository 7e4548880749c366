"""The chips that kernels are compiled for: what XLA's compilers are told of them, and their limits.

Sources. MI300X (gfx942) and MI355X (gfx950): AMD's data sheets (peak rates without sparsity, memory, compute units,
clock), *AMD Instinct MI300 / CDNA 3* and *CDNA 4 Instruction Set Architecture* (registers, LDS, waves), LLVM's *User
Guide for AMDGPU Backend* (granularity of register allocation). H200 (sm_90): NVIDIA's *H200 Tensor Core GPU* data
sheet and the *CUDA C++ Programming Guide*, table of technical specifications per compute capability.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax_mla.fp8 import E4M3FN, E4M3FNUZ, Fp8Format
from jax_mla.pallas_triton import GFX942, GFX950, H200, Target


@dataclass(frozen=True)
class Chip:
    """- `name`: what ``--target`` calls it. - `model`: a card that has it. - `fp8`: its own 8-bit float format.
    - `cores`: compute units, or streaming multiprocessors. - `warp`: threads of a wave or warp.
    - `simds`: units of a core that issue, each with a register file of its own.
    - `shared_bytes`: of a core, `program_shared_bytes`: that one program may take.
    - `max_warps`: that one of them holds at most. - `clock_hz`: peak.
    - `bytes_s`: of memory, peak. - `flops_s`: of matrix products, dense, peak, by operand.
    """

    name: str
    model: str
    target: Target
    fp8: Fp8Format
    cores: int
    warp: int
    simds: int
    max_warps: int
    shared_bytes: int
    program_shared_bytes: int
    clock_hz: float
    bytes_s: float
    flops_s: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    l2_bytes: int

    @property
    def target_config(self) -> str:
        """XLA's ``GpuTargetConfigProto`` in text form. ``device_description_str`` becomes the device's kind."""
        if self.target.platform == "rocm":
            own = f'rocm_compute_capability {{ gcn_arch_name: "{self.name}:sramecc+:xnack-" }}'
            registers, block_limit = 128 << 10, 65536
        else:
            own = (
                "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES } "
                'driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" '
                'dnn_version: "9.10.0" device_vendor: "NVIDIA Corporation"'
            )
            registers, block_limit = 64 << 10, 65535
        default_shared = self.program_shared_bytes if self.target.platform == "rocm" else 48 << 10
        return f"""
            gpu_device_info {{
              name: "{self.model}" {own}
              threads_per_block_limit: 1024 threads_per_warp: {self.warp} threads_per_core_limit: 2048
              shared_memory_per_block: {default_shared} shared_memory_per_block_optin: {self.program_shared_bytes}
              shared_memory_per_core: {self.shared_bytes}
              core_count: {self.cores} fpus_per_core: 128 clock_rate_ghz: {self.clock_hz / 1e9}
              registers_per_core_limit: {registers} registers_per_block_limit: {registers}
              block_dim_limit_x: 2147483647 block_dim_limit_y: {block_limit} block_dim_limit_z: {block_limit}
              memory_bandwidth: {int(self.bytes_s)} device_memory_size: {self.memory_bytes}
              l2_cache_size: {self.l2_bytes} device_address_bits: 64
            }}
            platform_name: "{self.target.platform.upper()}"
            device_description_str: "{self.target.kind}"
        """


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="gfx942",
            model="AMD Instinct MI300X",
            target=GFX942,
            fp8=E4M3FNUZ,
            cores=304,
            warp=64,
            simds=4,
            max_warps=8,
            shared_bytes=64 << 10,
            program_shared_bytes=64 << 10,
            clock_hz=2.1e9,
            bytes_s=5.3e12,
            flops_s={"bf16": 1307.4e12, "fp8": 2614.9e12, "f32": 163.4e12},
            memory_bytes=192 * 10**9,
            l2_bytes=4 << 20,
        ),
        Chip(
            name="gfx950",
            model="AMD Instinct MI355X",
            target=GFX950,
            fp8=E4M3FN,
            cores=256,
            warp=64,
            simds=4,
            max_warps=8,
            shared_bytes=160 << 10,
            program_shared_bytes=160 << 10,
            clock_hz=2.4e9,
            bytes_s=8e12,
            flops_s={"bf16": 2516.6e12, "fp8": 5033.2e12, "f32": 157.3e12},
            memory_bytes=288 * 10**9,
            l2_bytes=4 << 20,
        ),
        Chip(
            name="sm_90",
            model="NVIDIA H200",
            target=H200,
            fp8=E4M3FN,
            cores=132,
            warp=32,
            simds=4,
            max_warps=16,
            shared_bytes=228 << 10,
            program_shared_bytes=227 << 10,
            clock_hz=1.98e9,
            bytes_s=4.8e12,
            flops_s={"bf16": 989.4e12, "fp8": 1978.9e12, "f32": 66.9e12},
            memory_bytes=141 * 10**9,
            l2_bytes=50 << 20,
        ),
    )
}
