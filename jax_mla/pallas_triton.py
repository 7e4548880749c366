"""The only door to Pallas' Triton lowering, and to ``jax._src``.

JAX has deprecated that lowering (0.11.0) and still offers no other way to write a kernel for ROCm, so everything that
we need of it passes through here and nothing else imports ``jax.experimental.pallas.triton``: when it goes, this file
is what changes. Its deprecation warning is silenced here, that one and by its text; the upper bound on ``jax`` in
``pyproject.toml`` is what it asks for.

Three things it does not offer are added below, for our kernels only: they have compiler parameters of their own, whose
lowering rule (``jax.extend.pallas``) switches them on while it runs.

- Offsets of 64 bits for arrays of more than 2^31 elements: it computes with 32 bits up to 4 GiB, whatever an element's
  size, so that a byte-sized pool of 2 to 4 GiB was addressed with offsets that overflow.
- ``maxNumImpreciseAcc`` of a product of FP8 tiles, without which Triton takes no FP8 matrix instruction on Hopper.
- PTX for elementwise functions (``native``) where that is worth it.
"""

import math
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax._src.lib.mlir import ir as _ir
from jax._src.lib.mlir.dialects import hlo
from jax._src.pallas.triton import lowering as _lowering
from jax._src.pallas.triton.pallas_call_registration import pallas_call_lowering as _pallas_call_lowering
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import triton as plgpu
from jax.extend.pallas import register_lowering_rule
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


def _lowered(f: Callable, args, t: Target):
    """``jit(f)(*args)`` lowered for ``t``; arguments that it doesn't use are parameters all the same."""
    with lowering_for(t):
        return jax.jit(f, keep_unused=True).trace(*args).lower(lowering_platforms=(t.platform,))


def _ir_of(config) -> str:
    """The Triton IR of a kernel's custom call, as text."""
    with _lowering._new_ir_context():
        return str(_ir.Module.parse(_ir.StringAttr(config["ir"]).value_bytes))


def lower(f: Callable, *args, for_target: Target) -> str:
    """StableHLO of ``jit(f)(*args)`` lowered for ``for_target``; its kernels stand in it as Triton IR.

    - `args`: arrays or ``jax.ShapeDtypeStruct``.
    """
    return _lowered(f, args, for_target).as_text()


def triton_ir(f: Callable, *args, for_target: Target) -> dict[str, tuple[list[tuple[int, ...]], str]]:
    """Of each kernel in ``jit(f)(*args)``, by name: the shapes of what it is called with, inputs and then outputs, and
    its Triton IR as text, whose ``%arg0`` is a pointer to the first of them."""
    kernels = {}

    def visit(op):
        config: Any = op.attributes["mhlo.backend_config"] if "mhlo.backend_config" in op.attributes else None
        if op.name == "stablehlo.custom_call" and _text(op, "call_target_name") == KERNEL_TARGET:
            text = _ir_of(config)
            shapes = [tuple(_ir.RankedTensorType(x.type).shape) for x in (*op.operands, *op.results)]
            kernels[_ir.StringAttr(config["name"]).value] = shapes, text
        for region in op.regions:
            for block in region:
                for inner in block:
                    visit(inner.operation)

    module: Any = _lowered(f, args, for_target).compiler_ir("stablehlo")
    visit(module.operation)
    return kernels


@dataclass(frozen=True)
class Kernel:
    """A kernel of a lowered function: Triton IR as text, and how it is launched.

    - `inputs`, `outputs`: numbers of ``Lowered``'s buffers; an output in an input's memory has its number.
    """

    name: str
    ir: str
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Lowered:
    """A function that is kernels and nothing else, in their order. Buffers have numbers: first the parameters.

    - `sizes`: bytes of each buffer. - `constants`: what those hold that nothing writes. - `results`: those returned.
    """

    kernels: tuple[Kernel, ...]
    sizes: tuple[int, ...]
    constants: dict[int, bytes]
    results: tuple[int, ...]


PASSED_ON = ("stablehlo.reshape", "stablehlo.bitcast_convert", "sdy.sharding_constraint")
"""Operations whose result is what they are given, byte for byte."""


class MoreThanKernels(ValueError):
    """A function that does more than to call kernels; says what."""


def kernels_of(f: Callable, *args, for_target: Target) -> Lowered:
    """``jit(f)(*args)``, lowered.

    Raises ``MoreThanKernels``, which names them, for operations that are no kernels.
    """
    module: Any = _lowered(f, args, for_target).compiler_ir("stablehlo")
    functions = {
        _ir.StringAttr(op.attributes["sym_name"]).value: op for op in module.body if "sym_name" in op.attributes
    }
    kernels: list[Kernel] = []
    sizes: list[int] = []
    constants: dict[int, bytes] = {}
    others: list[str] = []

    def new(value) -> int:
        kind: Any = _ir.RankedTensorType(value.type)
        sizes.append(math.prod(kind.shape) * max(kind.element_type.width, 8) // 8)
        return len(sizes) - 1

    def run(function, given: list[int]) -> list[int]:
        [block] = function.regions[0]
        known = dict(zip(block.arguments, given, strict=True))
        for op in (x.operation for x in block):
            inputs = [known.get(x, -1) for x in op.operands]
            if op.name in ("func.return", "return"):
                return inputs
            if op.name == "func.call":
                outputs = run(functions[_ir.FlatSymbolRefAttr(op.attributes["callee"]).value], inputs)
            elif op.name in PASSED_ON or (op.name == "stablehlo.convert" and op.operands[0].type == op.results[0].type):
                outputs = inputs
            elif op.name == "stablehlo.constant":
                outputs = [new(op.results[0])]
                value = np.array(_ir.DenseElementsAttr(op.attributes["value"]))
                constants[outputs[0]] = value.tobytes()
            elif op.name == "stablehlo.custom_call" and _text(op, "call_target_name") == KERNEL_TARGET:
                aliases = [hlo.OutputOperandAlias(x) for x in _ir.ArrayAttr(op.attributes["output_operand_aliases"])]
                at = {(x.output_tuple_indices or [0])[0]: inputs[x.operand_index] for x in aliases}
                outputs = [at[i] if i in at else new(x) for i, x in enumerate(op.results)]
                kernels.append(_kernel_of(op, inputs, outputs))
            else:
                others.append(op.name)
                outputs = [new(x) for x in op.results]
            known |= zip(op.results, outputs, strict=True)
        raise AssertionError("a function that returns nothing")

    main = functions["main"]
    parameters = [new(x) for x in main.regions[0].blocks[0].arguments]
    results = run(main, parameters)
    if others:
        raise MoreThanKernels(f"expected kernels and nothing else, got {', '.join(dict.fromkeys(others))}")
    return Lowered(tuple(kernels), tuple(sizes), constants, tuple(results))


def _text(op, name: str) -> str:
    return _ir.StringAttr(op.attributes[name]).value


def _kernel_of(op, inputs: list[int], outputs: list[int]) -> Kernel:
    config: Any = op.attributes["mhlo.backend_config"]
    x, y, z, warps, stages = (
        _ir.IntegerAttr(config[name]).value for name in ("grid_x", "grid_y", "grid_z", "num_warps", "num_stages")
    )
    return Kernel(
        _ir.StringAttr(config["name"]).value, _ir_of(config), (x, y, z), warps, stages, tuple(inputs), tuple(outputs)
    )


KERNEL_TARGET = plgpu.CUSTOM_CALL_TARGET_NAME
"""Name of the custom call that holds a kernel in lowered StableHLO."""


IMPRECISE = 1 << 30  # products that a tensor core may add up in its own precision: all


@dataclass(frozen=True)
class _Params(plgpu.CompilerParams):
    """Ours: `imprecise_fp8`, whether FP8 products on Hopper are added up as its tensor cores do (some 14 bits)."""

    imprecise_fp8: bool = False


class _Ours(threading.local):
    """The parameters of the kernel of ours that this thread is lowering, if any."""

    params: _Params | None = None


_ours = _Ours()


@contextmanager
def _lowering_ours(params: _Params):
    before, _ours.params = _ours.params, params
    try:
        yield
    finally:
        _ours.params = before


def _lower_ours(context, *inputs, compiler_params, **rest):
    with _lowering_ours(compiler_params):
        return _pallas_call_lowering(context, *inputs, compiler_params=compiler_params, **rest)


register_lowering_rule(_Params, _lower_ours, "gpu")

_offsets_of = _lowering._compute_offsets_from_indices


def _wide_offsets_of(block_info, nd_indexer):
    """Pallas' own, told of elements so wide that it takes 64 bits, where offsets need more than 31. It reads the dtype
    for that decision alone."""
    whole = block_info.full_shape_dtype
    if _ours.params is not None and math.prod(whole.shape) > 2**31:
        block_info = replace(block_info, full_shape_dtype=jax.ShapeDtypeStruct(whole.shape, jnp.complex128))
    return _offsets_of(block_info, nd_indexer)


class _Dialect:
    """Triton's dialect as Pallas' lowering sees it, with our ``dot``."""

    def __init__(self, dialect):
        self._dialect = dialect

    def __getattr__(self, name):
        return getattr(self._dialect, name)

    def dot(self, a, b, c, **attributes):
        if _ours.params is not None and _ours.params.imprecise_fp8 and "f8E" in str(a.type):
            attributes["max_num_imprecise_acc"] = IMPRECISE
        return self._dialect.dot(a, b, c, **attributes)


_lowering._compute_offsets_from_indices = _wide_offsets_of
setattr(_lowering, "tt_dialect", _Dialect(_lowering.tt_dialect))  # noqa: B010 (it is not the module it was typed as)


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
    imprecise_fp8: bool = False,
) -> tuple[Array, ...]:
    """Runs ``kernel(*input_refs, *output_refs)`` on each point of ``grid``; every ref is a whole array in memory.

    - `aliases`: input number → number of the output that is the same memory.
    - `imprecise_fp8`: see ``dot``.

    Raises ``ValueError`` for a number of warps that is no power of two, of which Triton's compiler ends the process.
    """
    if not are_powers_of_two(num_warps):
        raise ValueError(f"{name}: expected num_warps to be a power of two, got {num_warps}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return pl.pallas_call(
            kernel,
            out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs),
            grid=grid,
            name=name,
            interpret=interpret,
            input_output_aliases=aliases or {},
            compiler_params=_Params(num_warps=num_warps, num_stages=num_stages, imprecise_fp8=imprecise_fp8),
        )(*inputs)


def dot(a: Array, b: Array, *, trans_b: bool = False) -> Array:
    """``a @ b`` (or ``a @ b.T``) of 2-D tiles of one dtype, accumulated in float32; float32 tiles are not rounded.

    FP8 tiles on Hopper: exactly, converted to float16 first, or with ``kernel_call(imprecise_fp8=True)`` by its FP8
    instructions, about twice as fast, whose sums keep some 14 bits (a relative error of 5e-5 over 128 products).
    """
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (1 if trans_b else 0,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def native(interpret: bool) -> bool:
    """Whether the kernel being traced may hold PTX: it is compiled, and for CUDA."""
    return not interpret and target().platform == "cuda"


def ptx(code: str, inputs: Sequence[Array], dtype, *, pack: int) -> Array:
    """``code`` on each ``pack`` elements of ``inputs``, of one shape, where ``native``: `$0` is the result, `$1` and on
    the inputs, each as many 32-bit registers as ``pack`` of its elements fill."""
    registers = sum(-(-pack * x.dtype.itemsize // 4) for x in inputs)
    [result] = plgpu.elementwise_inline_asm(
        code,
        args=inputs,
        constraints=",".join(["=r"] + ["r"] * registers),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(inputs[0].shape, dtype)],
    )
    return result


def exp2(x: Array, native: bool) -> Array:
    """``2^x`` in float32; by the card's own instruction (2 ulp, results under 2^-126 become 0) where ``native``."""
    return ptx("ex2.approx.ftz.f32 $0, $1;", [x], jnp.float32, pack=1) if native else jnp.exp2(x)


def are_powers_of_two(*sizes: int) -> bool:
    """Whether all of ``sizes`` are powers of two from 1 on."""
    return all(n >= 1 and n & (n - 1) == 0 for n in sizes)


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
