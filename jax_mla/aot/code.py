"""What a kernel's machine code says of itself: registers, spills, memory, and every instruction with its name.

On ROCm the figures are those of the code object's metadata, on CUDA those of the cubin's ``.nv.info``.

Sources: LLVM, *User Guide for AMDGPU Backend*, "Code Object V5 Metadata"; NVIDIA, *CUDA Binary Utilities*, and for the
attributes' numbers the ``EIATTR_*`` names that ``cuobjdump -elf`` prints beside them.
"""

import io
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgpack
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection, SymbolTableSection

from jax_mla.aot import cdna, sass

NT_AMDGPU_METADATA = 32
REGCOUNT, FRAME_SIZE = 0x2F, 0x11
RESERVED_SHARED = 1024
"""Bytes at the beginning of a program's shared memory on sm_90 that are the driver's and count in no limit."""


@dataclass(frozen=True)
class Instruction:
    """- `offset`: bytes from the kernel's beginning. - `name`: "v_add_f32", "LDG.128".
    - `target`: where a branch goes, or None. - `falls_through`: whether the next instruction may follow."""

    offset: int
    name: str
    target: int | None = None
    falls_through: bool = True


@dataclass(frozen=True)
class Code:
    """One kernel's machine code.

    - `vgprs`: 32-bit registers of a thread, of which `agprs` hold matrix accumulators; `sgprs` of a wave (AMD).
    - `vector_spills`, `scalar_spills`: registers that the compiler keeps in memory instead. NVIDIA's says only how many
      bytes of stack a thread has: words of that, which Triton has no other use for.
    - `local_bytes`: of a thread's memory: scratch, or local memory.
    - `shared_bytes`: fixed shared memory (LDS) of a program; what a launch adds is not known here.
    """

    name: str
    vgprs: int
    agprs: int
    sgprs: int
    vector_spills: int
    scalar_spills: int
    local_bytes: int
    shared_bytes: int
    size: int
    instructions: tuple[Instruction, ...]

    def counts(self) -> Counter[str]:
        """How often each instruction stands in the code."""
        return Counter(x.name for x in self.instructions)


def read(elf: bytes, name: str) -> Code:
    """The kernel called ``name`` in an ELF file of either make.

    Raises ``ValueError`` for another file, for a kernel that isn't in it, and for code that can't be decoded to its
    last byte.
    """
    try:
        file = ELFFile(io.BytesIO(elf))
        match file["e_machine"]:
            case "EM_AMDGPU":
                return _read_amdgpu(file, name)
            case "EM_CUDA":
                return _read_cuda(file, name)
            case machine:
                raise ValueError(f"{name}: expected code for AMDGPU or CUDA, got {machine}")
    except ELFError as e:
        raise ValueError(f"{name}: expected a whole ELF file, got {len(elf)} bytes that are none ({e})") from e


def _function(file: ELFFile, name: str) -> bytes:
    for table in file.iter_sections():
        if not isinstance(table, SymbolTableSection):
            continue
        for symbol in table.get_symbol_by_name(name) or ():
            if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_size"]:
                section = file.get_section(symbol["st_shndx"])
                start = symbol["st_value"] - section["sh_addr"]
                body = section.data()[start : start + symbol["st_size"]]
                if len(body) == symbol["st_size"]:
                    return body
    raise ValueError(f"{name}: expected a function of that name in the code object, found none")


def amdgpu_metadata(file: ELFFile) -> Mapping:
    """The metadata of an AMDGPU code object: its target and its kernels."""
    for section in file.iter_sections():
        if isinstance(section, NoteSection):
            for note in section.iter_notes():
                if note["n_name"] == "AMDGPU" and note["n_type"] in (NT_AMDGPU_METADATA, "NT_AMDGPU_METADATA"):
                    return msgpack.unpackb(note["n_descdata"])
    raise ValueError("expected an AMDGPU code object with metadata, found none")


def _read_amdgpu(file: ELFFile, name: str) -> Code:
    metadata = amdgpu_metadata(file)
    arch = metadata["amdhsa.target"].split("-")[-1].split(":")[0]
    kernels = {k[".name"]: k for k in metadata["amdhsa.kernels"]}
    if name not in kernels:
        raise ValueError(f"{name}: expected among the code object's kernels, which are {', '.join(kernels)}")
    k = kernels[name]
    body = _function(file, name)
    decoded = cdna.instructions(body, arch)
    instructions = tuple(
        Instruction(at, what, cdna.branch_target(body, at, what), what not in cdna.NO_WAY_ON) for at, what in decoded
    )
    starts, names = {x.offset for x in instructions}, [x.name for x in instructions]
    strays = [x.target for x in instructions if x.target is not None and x.target not in starts]
    if "s_endpgm" not in names or names[-1] not in ("s_endpgm", "s_branch"):
        raise ValueError(f"{name}: expected code that ends in s_endpgm or a branch, got {names[-1:]}")
    if strays:
        raise ValueError(f"{name}: expected branches to instructions, got one to byte {strays[0]}")
    return Code(
        name=name,
        vgprs=k[".vgpr_count"],
        agprs=k[".agpr_count"],
        sgprs=k[".sgpr_count"],
        vector_spills=k[".vgpr_spill_count"],
        scalar_spills=k[".sgpr_spill_count"],
        local_bytes=k[".private_segment_fixed_size"],
        shared_bytes=k[".group_segment_fixed_size"],
        size=len(body),
        instructions=instructions,
    )


def nv_info(data: bytes) -> Iterable[tuple[int, bytes | int]]:
    """The attributes of an ``.nv.info`` section: number, and bytes or a 16-bit value."""
    at = 0
    while at + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == 4:
            if at + value > len(data):
                break
            yield attribute, data[at : at + value]
            at += value
        elif form in (1, 2, 3):
            yield attribute, value
        else:
            raise ValueError(f".nv.info: expected attributes of form 1 to 4, got {form} at byte {at - 4}")
    if at != len(data):
        raise ValueError(f".nv.info: expected attributes to its end, the last is cut short at byte {at} of {len(data)}")


def _read_cuda(file: ELFFile, name: str) -> Code:
    info, symbols = file.get_section_by_name(".nv.info"), file.get_section_by_name(".symtab")
    if info is None or not isinstance(symbols, SymbolTableSection):
        raise ValueError(f"{name}: expected a cubin with .nv.info and .symtab, found none")
    of_kernel = {}
    for attribute, value in nv_info(info.data()):
        if isinstance(value, bytes) and len(value) == 8:
            symbol, number = struct.unpack("<II", value)
            if symbols.get_symbol(symbol).name == name:
                of_kernel[attribute] = number
    if REGCOUNT not in of_kernel or FRAME_SIZE not in of_kernel:
        raise ValueError(f"{name}: expected its registers and stack frame in .nv.info, found neither or one")
    shared = file.get_section_by_name(f".nv.shared.{name}")
    body = _function(file, name)
    local = of_kernel[FRAME_SIZE]
    return Code(
        name=name,
        vgprs=of_kernel[REGCOUNT],
        agprs=0,
        sgprs=0,
        vector_spills=-(-local // 4),
        scalar_spills=0,
        local_bytes=local,
        shared_bytes=max(0, shared["sh_size"] - RESERVED_SHARED) if shared else 0,
        size=len(body),
        instructions=tuple(Instruction(*x) for x in sass.instructions(body)),
    )
