"""The kernels inside a compiled JAX function: their machine code, how they are launched, and on which buffers.

``jax.stages.Compiled.runtime_executable().serialize()`` gives bytes in which everything lies that is needed to launch a
kernel without XLA. From the outside in::

    varint, then as many bytes: what PJRT-IFRT knows of the executable
    Riegeli records of an ExecutableAndOptionsProto, split
      its serialized_executable: Riegeli records of a GpuExecutableProto, split
        its thunks, in the order in which they run
          of those that are custom kernels: an ELF file, grid, threads, dynamic shared memory, buffers

A message is split into a manifest and parts, which are fields too large for their place or more of the message.

Read strictly: what jaxlib 0.11.2 would not have written is an error and not a guess. Source: openxla/xla,
``util/split_proto/`` and ``service/gpu/gpu_executable.cc``; the fields are in ``schema``.
"""

import io
from dataclasses import dataclass
from typing import Literal, get_args

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection
from google.protobuf.message import DecodeError

from jax_mla.aot.riegeli import records, varint
from jax_mla.aot.schema import MESSAGES

IFRT_VERSION, IFRT_RUNTIME = 3, "pjrt_ifrt"
Role = Literal["parameter", "output", "constant", "temporary"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Argument:
    """One pointer that a kernel is given: a part of a buffer.

    - `role`, `number`: "parameter" n of the compiled function (flat, in order; those that it doesn't use are left out,
      see ``jax.jit(keep_unused=)``), "output" n of it (flat), or "constant" or "temporary", whose number is the
      buffer's own. A parameter that is donated to an output is a "parameter".
    - `offset`, `size`: bytes from the buffer's beginning, and bytes.
    - `written`: whether the kernel writes there.
    """

    role: Role
    number: int
    offset: int
    size: int
    written: bool


@dataclass(frozen=True)
class Kernel:
    """One launch of one kernel.

    - `name`: its symbol in ``code``, an ELF file: a cubin on CUDA, an HSA code object on ROCm.
    - `grid`: programs along x, y, z; `threads`: threads of a program along x, y, z.
    - `shared_bytes`: dynamic shared memory (LDS) to launch it with.
    - `arguments`: the pointers that it takes, in order.
    - `zeroed`: which of them must point at zeros beforehand.
    """

    name: str
    code: bytes
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared_bytes: int
    arguments: tuple[Argument, ...]
    zeroed: tuple[int, ...]


@dataclass(frozen=True)
class Executable:
    """What a compiled function runs.

    - `arch`: "sm_90", or "gfx942" and what is on: "gfx942:sramecc+:xnack-".
    - `name`: the module's.
    - `kernels`: in the order in which they run: Pallas', and those that XLA makes of what stands around them.
    - `others`: what runs beside them, copies, calls of libraries and loops, by their names in a profile.
    - `outputs`: where the function's results are, flat: ("output", its own number), or ("parameter", n) for a result
      that is written into a donated parameter.
    - `temporaries`: buffer → size in bytes, of those that the arguments call "temporary".
    - `constants`: buffer → what it holds, of those that they call "constant".
    """

    arch: str
    name: str
    kernels: tuple[Kernel, ...]
    others: tuple[str, ...]
    outputs: tuple[tuple[Role, int], ...]
    temporaries: dict[int, int]
    constants: dict[int, bytes]

    def kernel(self) -> Kernel:
        """The one kernel that there is; a ``ValueError`` that lists them if there is another number."""
        if len(self.kernels) != 1:
            names = ", ".join(k.name for k in self.kernels) or "none"
            raise ValueError(f"executable: expected one kernel, got {len(self.kernels)}: {names}")
        return self.kernels[0]


def read(serialized: bytes) -> Executable:
    """What lies in ``serialized``, the bytes of ``runtime_executable().serialize()``.

    Raises ``ValueError`` for bytes of another make: another version of the format, another split, a kernel that isn't
    an ELF file or whose arguments aren't plain pointers.
    """
    size, at = varint(serialized, 0)
    metadata = _parse("Metadata", serialized[at : at + size])
    if (metadata.version, metadata.runtime) != (IFRT_VERSION, IFRT_RUNTIME):
        raise ValueError(
            f"executable: expected version {IFRT_VERSION} of {IFRT_RUNTIME!r}, "
            f"got version {metadata.version} of {metadata.runtime!r}"
        )
    whole = _join(records(serialized[at + size :]), "xla.ExecutableAndOptionsProto", "ExecutableAndOptions")
    proto = _join(records(whole.executable), "xla.gpu.GpuExecutableProto", "GpuExecutable")
    if not proto.thunks:
        raise ValueError("executable: expected thunks, got none")
    allocations = {a.index: a for a in proto.allocations.values}
    outputs, results = {}, {}
    for output in proto.outputs:
        number, allocation = _flat(output.index.values), allocations[output.info.allocation]
        first = outputs.setdefault(allocation.index, number)
        results[number] = ("parameter", allocation.parameter) if allocation.is_parameter else ("output", first)
    if sorted(results) != list(range(len(results))):
        raise ValueError(f"executable: expected outputs 0 to {len(results) - 1}, got {sorted(results)}")
    kernels, others = [], []
    for thunk in proto.thunks:
        if thunk.HasField("kernel"):
            kernels.append(_kernel(thunk.kernel, allocations, outputs))
        else:
            others.append(thunk.info.annotation)
    used = {role: {x.number for kernel in kernels for x in kernel.arguments if x.role == role} for role in ROLES}
    return Executable(
        arch=_arch(proto.capability),
        name=proto.name,
        kernels=tuple(kernels),
        others=tuple(others),
        outputs=tuple(results[i] for i in range(len(results))),
        temporaries={i: allocations[i].size for i in sorted(used["temporary"])},
        constants={i: _constant(proto, i, allocations[i].size) for i in sorted(used["constant"])},
    )


def _constant(proto, allocation: int, size: int) -> bytes:
    """What a constant holds: it stands beside its name, or in the module under it."""
    for constant in proto.constants:
        if constant.allocation != allocation:
            continue
        data = constant.content.data or _symbol(proto.binary, constant.symbol)
        if len(data) < size:
            raise ValueError(f"executable: expected {size} bytes in {constant.symbol!r}, got {len(data)}")
        return data[:size]
    raise ValueError(f"executable: expected a constant for buffer {allocation}, found none")


def _symbol(elf: bytes, name: str) -> bytes:
    if elf.startswith(b"\x7fELF"):
        file = ELFFile(io.BytesIO(elf))
        table = file.get_section_by_name(".symtab")
        assert isinstance(table, SymbolTableSection)
        for symbol in table.get_symbol_by_name(name) or ():
            section = file.get_section(symbol["st_shndx"])
            start = symbol["st_value"] - section["sh_addr"]
            return section.data()[start : start + symbol["st_size"]]
    raise ValueError(f"executable: expected {name!r} in a module of {len(elf)} bytes, found none")


def _parse(name: str, data: bytes):
    message = MESSAGES[name]()
    try:
        message.ParseFromString(data)
    except DecodeError as e:
        raise ValueError(f"executable: expected a message of type {name}, got {len(data)} other bytes") from e
    return message


def _join(parts: list[bytes], expected: str, name: str):
    """The message whose manifest is the first of ``parts``."""
    manifest = _parse("Manifest", parts[0] if parts else b"")
    if manifest.type != expected or len(manifest.records) != len(parts) - 1:
        raise ValueError(
            f"executable: expected a split {expected}, got {manifest.type!r} "
            f"of {len(manifest.records)} parts in {len(parts)} records"
        )
    message = MESSAGES[name]()
    fields = []
    for record, part in zip(manifest.records, parts[1:], strict=True):
        if record.HasField("override"):
            fields.append((record.override.path, part))
        elif record.HasField("merge"):
            message.MergeFromString(part)
        else:
            raise ValueError("executable: expected a part to be merged or to be a field, got neither")
    for path, part in fields:  # now that the messages are there which the fields are in
        _override(message, path, part)
    return message


def _override(message, path, value: bytes) -> None:
    """Sets the field at ``path``, if it is one that we read."""
    for i, step in enumerate(path):
        field = message.DESCRIPTOR.fields_by_number.get(step.field)
        if field is None:
            return
        if step.string_key or step.int_key:
            raise ValueError(f"executable: expected a path of fields, got a map's key in {field.name!r}")
        if i == len(path) - 1:
            if field.type not in (field.TYPE_BYTES, field.TYPE_STRING) or field.is_repeated:
                raise ValueError(f"executable: expected a field of bytes or text in a part, got {field.name!r}")
            setattr(message, field.name, value if field.type == field.TYPE_BYTES else value.decode())
            return
        message = getattr(message, field.name)
        if field.is_repeated:
            message = message[step.index]


def _flat(index) -> int:
    """The number of an output, of whose tuple ``index`` is the place: () where the function gives one array."""
    if len(index) > 1:
        raise ValueError(f"executable: expected a flat tuple of outputs, got one at {list(index)}")
    return index[0] if index else 0


def _arch(capability) -> str:
    if capability.HasField("rocm"):
        return capability.rocm.arch
    if capability.HasField("cuda"):
        return f"sm_{capability.cuda.major}{capability.cuda.minor}"
    raise ValueError("executable: expected code for CUDA or ROCm, got neither")


def _kernel(thunk, allocations, outputs) -> Kernel:
    kernel, loader = thunk.kernel, thunk.kernel.loader
    code = loader.binary.data
    if not code.startswith(b"\x7fELF"):
        raise ValueError(f"executable: expected kernel {kernel.name!r} as an ELF file, got {code[:4]!r}")
    if not loader.arity == len(thunk.args) == len(thunk.written):
        raise ValueError(
            f"executable: expected kernel {kernel.name!r} to take {loader.arity} arguments, got {len(thunk.args)}"
        )
    clusters = kernel.clusters.dim
    if (clusters.x, clusters.y, clusters.z) not in ((0, 0, 0), (1, 1, 1)):
        raise ValueError(f"executable: expected kernel {kernel.name!r} without clusters, got {str(clusters).split()}")
    packed = [[(r.kind, r.argument) for r in a.relocations] for a in loader.packing.arguments]
    if packed and packed != [[(1, i)] for i in range(loader.arity)]:
        raise ValueError(f"executable: expected kernel {kernel.name!r} to take one pointer a buffer, got {packed}")

    def argument(i: int) -> Argument:
        piece = thunk.args[i].slice
        allocation = allocations[piece.allocation]
        if allocation.is_parameter:
            role, number = "parameter", allocation.parameter
        elif piece.allocation in outputs:
            role, number = "output", outputs[piece.allocation]
        else:
            role, number = "constant" if allocation.is_constant else "temporary", piece.allocation
        return Argument(role, number, piece.offset, piece.size, thunk.written[i])

    def dim(d) -> tuple[int, int, int]:
        return d.x, d.y, d.z

    return Kernel(
        name=loader.name or kernel.name,
        code=code,
        grid=dim(kernel.blocks.dim),
        threads=dim(kernel.threads.dim),
        shared_bytes=kernel.shared_bytes,
        arguments=tuple(argument(i) for i in range(len(thunk.args))),
        zeroed=tuple(thunk.zeroed),
    )
