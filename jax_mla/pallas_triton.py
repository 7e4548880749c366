"""The only door to Pallas' Triton lowering.

JAX has deprecated that lowering (0.11.0) and still offers no other way to write a kernel for ROCm, so everything that
we need of it passes through here and nothing else imports ``jax.experimental.pallas.triton``: when it goes, this file
is what changes. Its deprecation warning is silenced here, that one and by its text; the upper bound on ``jax`` in
``pyproject.toml`` is what it asks for.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import triton as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

load = plgpu.load
store = plgpu.store
program_id = pl.program_id
cdiv = pl.cdiv
when = pl.when


@dataclass(frozen=True)
class Target:
    """What a trace is lowered for: ``platform`` "cpu", "cuda" or "rocm", and the chip, e.g. "gfx942"."""

    platform: str
    kind: str

    @property
    def is_gpu(self) -> bool:
        return self.platform != "cpu"

    @property
    def max_shared_bytes(self) -> int:
        """Shared memory (LDS) that one program may take."""
        if self.platform == "rocm":
            return 64 << 10 if self.kind.startswith("gfx94") else 160 << 10
        return 227 << 10


GFX942 = Target("rocm", "gfx942")
GFX950 = Target("rocm", "gfx950")
H200 = Target("cuda", "NVIDIA H200")


def target() -> Target:
    """The target of the trace under way: ``lowering_for``'s, else the default device's."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if device.platform == "cpu":
        return Target("cpu", device.device_kind)
    arch = str(getattr(device, "compute_capability", device.device_kind))  # "gfx942:…" on ROCm, "9.0" on CUDA
    return Target("rocm", arch.split(":")[0]) if arch.startswith("gfx") else Target("cuda", device.device_kind)


def lowering_for(t: Target):
    """Context in which kernels trace for ``t`` although this machine has no such device."""
    device = AbstractDevice(t.kind, 1, t.platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=device))


def lower(f: Callable, *args, for_target: Target) -> str:
    """StableHLO of ``jit(f)(*args)`` lowered for ``for_target``; its kernels stand in it as Triton IR.

    - `args`: arrays or ``jax.ShapeDtypeStruct``.
    """
    with lowering_for(for_target):
        return jax.jit(f).trace(*args).lower(lowering_platforms=(for_target.platform,)).as_text()


KERNEL_TARGET = plgpu.CUSTOM_CALL_TARGET_NAME
"""Name of the custom call that holds a kernel in lowered StableHLO."""


def kernel_call(
    kernel: Callable,
    inputs: Sequence[Array],
    outputs: Sequence[jax.ShapeDtypeStruct | Array],
    *,
    name: str,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    interpret: bool,
    aliases: dict[int, int] | None = None,
) -> tuple[Array, ...]:
    """Runs ``kernel(*input_refs, *output_refs)`` on each point of ``grid``; every ref is a whole array in memory.

    - `aliases`: input number → number of the output that is the same memory.
    """
    for x in (*inputs, *outputs):
        refuse_32_bit_overflow(name, x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return pl.pallas_call(
            kernel,
            out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs),
            grid=grid,
            name=name,
            interpret=interpret,
            input_output_aliases=aliases or {},
            compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        )(*inputs)


def refuse_32_bit_overflow(name: str, x) -> None:
    """Pallas addresses an array of at most 4 GiB with 32-bit *element* offsets, which overflow past 2^31 elements."""
    if x.size > 2**31 and x.size * x.dtype.itemsize <= 2**32:
        raise NotImplementedError(
            f"{name}: expected arrays of at most 2^31 elements or more than 4 GiB, got {x.dtype.name}{list(x.shape)}: "
            "Pallas' Triton lowering would address it with 32-bit offsets that overflow; use implementation='xla'"
        )


def dot(a: Array, b: Array, *, trans_b: bool = False) -> Array:
    """``a @ b`` (or ``a @ b.T``) of 2-D tiles of one dtype, accumulated in float32; float32 tiles are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (1 if trans_b else 0,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def block(n: int, at_least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``at_least``: tiles have no other sizes."""
    return max(at_least, pl.next_power_of_2(n))


def compile_only_devices(platform: str, library: str, target_config: str) -> list[jax.Device]:
    """Devices that can be compiled for and not run on, of a PJRT plugin that needs no such device in this machine.

    - `platform`: "cuda" or "rocm". - `library`: path of the plugin, a shared library whose own libraries can be found.
    - `target_config`: XLA's ``GpuTargetConfigProto`` in text form, which describes the chip.

    ``jax.experimental.topologies`` is the public way, and knows only plugins whose ``initialize()`` succeeded, which
    ROCm's does not without a GPU. Where it fails, this takes by hand the steps that it takes behind that, with
    ``jax._src``. Seen to work with jax 0.11.2.
    """
    options = dict(target_config=target_config, topology="1x1x1")
    try:
        return topologies.get_topology_desc("chip", platform=platform, **options).devices
    except NotImplementedError:
        pass
    from jax._src.lib import xla_client

    if platform not in _LOADED:
        _LOADED[platform] = xla_client.load_pjrt_plugin_dynamically(platform, library)
        xla_client.initialize_pjrt_plugin(platform)
    topology = xla_client.make_c_api_device_topology(_LOADED[platform], "chip", **options)
    return topology._make_compile_only_devices()


_LOADED = {}


def compile_only(f: Callable, *args, device: jax.Device, donate: Sequence[int] = ()) -> jax.stages.Compiled:
    """``jit(f)`` compiled for ``device``, one of ``compile_only_devices``, at the shapes of ``args``.

    - `args`: ``jax.ShapeDtypeStruct``, of which those that ``f`` doesn't use are parameters all the same; or None.
    - `donate`: numbers of those whose memory the result takes over.
    """
    mesh = jax.sharding.Mesh(np.asarray([device]), ("x",), axis_types=(AxisType.Explicit,))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), args)
    with jax.set_mesh(mesh):
        return jax.jit(f, keep_unused=True, donate_argnums=tuple(donate)).lower(*placed).compile()
