"""Writes by hand, for tests, the files that ``jax_mla.aot`` reads."""

import struct

import cramjam

from jax_mla.aot.riegeli import BLOCK_HEADER, BLOCK_SIZE, SIGNATURE
from jax_mla.aot.schema import MESSAGES

ELF, ONE = b"\x7fELF" + bytes(60), bytes.fromhex("0000803f")


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def chunk(kind: str, body: bytes, count: int, decoded: int) -> bytes:
    return struct.pack("<5Q", 0, len(body), 0, ord(kind) | count << 8, decoded) + body


def simple_chunk(records: list[bytes], codec: bytes = b"s") -> bytes:
    """A chunk of simple records."""

    def packed(data: bytes) -> bytes:
        if codec == b"\0":
            return data
        return varint(len(data)) + bytes(cramjam.snappy.compress_raw(data))

    sizes, values = packed(b"".join(varint(len(r)) for r in records)), packed(b"".join(records))
    body = codec + varint(len(sizes)) + sizes + values
    return chunk("r", body, len(records), sum(map(len, records)))


def riegeli(*chunks: bytes) -> bytes:
    """A file of ``chunks``, its signature's before them, and a block header at each multiple of 64 KiB."""
    plain, room = chunk("s", b"", 0, 0) + b"".join(chunks), BLOCK_SIZE - BLOCK_HEADER
    blocks = [plain[i : i + room] for i in range(0, len(plain), room)]
    header = SIGNATURE.ljust(BLOCK_HEADER, b"\0")
    return header + bytes(BLOCK_HEADER).join(blocks)


def split(message_type: str, *parts: tuple[list[int], bytes] | bytes) -> bytes:
    """A split message: parts are fields, as path and value, or more of the message."""
    manifest = MESSAGES["Manifest"](type=message_type)
    values = []
    for part in parts:
        if isinstance(part, bytes):
            manifest.records.add().merge.SetInParent()
            values.append(part)
        else:
            path, value = part
            override = manifest.records.add().override
            for field in path:
                override.path.add(field=field)
            values.append(value)
    return riegeli(simple_chunk([manifest.SerializeToString(), *values]))


def kernel_thunk(name: str = "k", code: bytes = ELF, arguments=((0, 0, 64, False), (1, 256, 32, True)), **changes):
    """A thunk; arguments are (buffer, offset, size, written)."""
    thunk = MESSAGES["Thunk"]()
    thunk.info.annotation = "pallas_call.0"
    for buffer, offset, size, written in arguments:
        piece = thunk.kernel.args.add().slice
        piece.allocation, piece.offset, piece.size = buffer, offset, size
        thunk.kernel.written.append(written)
    kernel = thunk.kernel.kernel
    kernel.name = kernel.loader.name = name
    kernel.loader.binary.data = code
    kernel.loader.arity = changes.get("arity", len(arguments))
    for i in changes.get("packing", range(len(arguments))):
        relocation = kernel.loader.packing.arguments.add().relocations.add()
        relocation.kind, relocation.argument = 1, i
    kernel.blocks.dim.x, kernel.blocks.dim.y, kernel.blocks.dim.z = 5, 2, 1
    kernel.threads.dim.x, kernel.threads.dim.y, kernel.threads.dim.z = 256, 1, 1
    kernel.clusters.dim.x, kernel.clusters.dim.y, kernel.clusters.dim.z = changes.get("clusters", (1, 1, 1))
    kernel.shared_bytes = 4096
    return thunk


def other_thunk(name: str):
    thunk = MESSAGES["Thunk"]()
    thunk.info.annotation = name
    return thunk


def gpu_executable(*thunks, arch: str = "gfx942", outputs=((1, []),)):
    """Buffer 0 is parameter 3, 1 is output 0, 2 a constant, 3 temporary, 4 parameter 7 and an output."""
    proto = MESSAGES["GpuExecutable"](name="jit_f")
    if arch.startswith("gfx"):
        proto.capability.rocm.arch = arch
    elif arch:
        proto.capability.cuda.major, proto.capability.cuda.minor = 9, 0
    proto.allocations.values.add(index=0, size=64, is_parameter=True, parameter=3)
    proto.allocations.values.add(index=1, size=512, live_out=True)
    proto.allocations.values.add(index=2, size=4, is_constant=True)
    proto.allocations.values.add(index=3, size=1024)
    proto.allocations.values.add(index=4, size=64, is_parameter=True, parameter=7, live_out=True)
    for allocation, index in outputs:
        output = proto.outputs.add()
        output.index.values.extend(index)
        output.info.allocation = allocation
    proto.constants.add(symbol="one", allocation=2).content.data = ONE
    proto.thunks.extend(thunks)
    return proto


def serialized(proto, *, version: int = 3, runtime: str = "pjrt_ifrt", inner: bytes | None = None) -> bytes:
    """What ``runtime_executable().serialize()`` would give."""
    metadata = MESSAGES["Metadata"](version=version, runtime=runtime, name="jit_f").SerializeToString()
    if inner is None:
        head = MESSAGES["GpuExecutable"](binary=b"dropped").SerializeToString()
        inner = split("xla.gpu.GpuExecutableProto", ([4], b""), head, proto.SerializeToString())
    return varint(len(metadata)) + metadata + split("xla.ExecutableAndOptionsProto", ([1], inner), b"")
