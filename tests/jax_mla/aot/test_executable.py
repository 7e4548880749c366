"""The executable: kernels, launches and buffers out of one written by hand; another make of it is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jax_mla import KV_BF16, sparse_mla
from jax_mla.aot.chips import CHIPS
from jax_mla.aot.compiler import build
from jax_mla.aot.executable import Argument, read
from jax_mla.aot.schema import MESSAGES
from jax_mla.ops.sparse_mla.config import Config as SparseConfig
from tests.jax_mla.aot import files

TWO = files.gpu_executable(
    files.kernel_thunk("first", arguments=((0, 0, 64, False), (2, 0, 4, False), (3, 128, 512, True))),
    files.other_thunk("loop_fusion"),
    files.kernel_thunk("second", arguments=((3, 128, 512, False), (4, 0, 64, True), (1, 0, 512, True))),
    outputs=((4, [0]), (1, [1])),
)


def test_kernels_in_order_with_their_launches_and_buffers():
    executable = read(files.serialized(TWO))
    assert (executable.arch, executable.name) == ("gfx942", "jit_f")
    assert executable.others == ("loop_fusion",) and executable.temporaries == {3: 1024}
    assert executable.constants == {2: files.ONE}
    first, second = executable.kernels
    assert (first.name, first.code, first.grid, first.threads) == ("first", files.ELF, (5, 2, 1), (256, 1, 1))
    assert first.shared_bytes == 4096 and first.zeroed == ()
    assert first.arguments == (
        Argument("parameter", 3, 0, 64, False),
        Argument("constant", 2, 0, 4, False),
        Argument("temporary", 3, 128, 512, True),
    )
    assert second.arguments == (
        Argument("temporary", 3, 128, 512, False),
        Argument("parameter", 7, 0, 64, True),
        Argument("output", 1, 0, 512, True),
    )


def test_one_kernel_where_one_is_expected():
    one = read(files.serialized(files.gpu_executable(files.kernel_thunk(), arch="sm_90")))
    assert one.arch == "sm_90" and one.kernel() is one.kernels[0]
    assert one.kernel().arguments[1] == Argument("output", 0, 256, 32, True)
    with pytest.raises(ValueError, match="expected one kernel, got 2: first, second"):
        read(files.serialized(TWO)).kernel()
    none = read(files.serialized(files.gpu_executable(files.other_thunk("copy"))))
    with pytest.raises(ValueError, match="expected one kernel, got 0: none"):
        none.kernel()


def test_fields_that_stand_in_records_of_their_own():
    """Also those in messages of messages; fields that are not read are skipped."""
    proto = files.gpu_executable(files.kernel_thunk(code=b""))
    inner = files.split(
        "xla.gpu.GpuExecutableProto",
        ([13, 36, 3, 2, 2, 1], files.ELF),
        ([8], b"named"),
        ([3], b"asm text"),
        ([7, 2, 1], b"not read"),
        proto.SerializeToString(),
    )
    executable = read(files.serialized(None, inner=inner))
    assert executable.name == "named" and executable.kernel().code == files.ELF


def damaged(**changes):
    return files.serialized(files.gpu_executable(files.kernel_thunk(**changes)))


KERNEL = files.gpu_executable(files.kernel_thunk())


@pytest.mark.parametrize(
    "data, why",
    [
        (files.serialized(KERNEL, version=4), "version 3 of 'pjrt_ifrt', got version 4"),
        (files.serialized(KERNEL, runtime="tfrt"), "got version 3 of 'tfrt'"),
        (b"\x02\x08\x03" + bytes(80), "got version 3 of ''"),
        (b"\x01\xff" + bytes(80), "expected a message of type Metadata"),
        (files.serialized(KERNEL)[:-5], "expected a chunk"),
        (files.serialized(KERNEL, inner=b"x"), "signature"),
        (files.serialized(KERNEL, inner=files.riegeli()), "expected a split xla.gpu.GpuExecutableProto, got ''"),
        (files.serialized(KERNEL, inner=files.split("xla.cpu.Executable", b"")), "got 'xla.cpu.Executable'"),
        (
            files.serialized(KERNEL, inner=files.split("xla.gpu.GpuExecutableProto", b"")),
            "expected thunks, got none",
        ),
        (files.serialized(files.gpu_executable(files.kernel_thunk(), arch="")), "CUDA or ROCm, got neither"),
        (files.serialized(files.gpu_executable(files.kernel_thunk(), outputs=((1, [0, 1]),))), r"one at \[0, 1\]"),
        (damaged(code=b".version 8.0"), "expected kernel 'k' as an ELF file"),
        (damaged(arity=3), "to take 3 arguments, got 2"),
        (damaged(packing=[1, 0]), "to take one pointer a buffer"),
        (damaged(packing=[0]), "to take one pointer a buffer"),
        (damaged(clusters=(2, 1, 1)), "expected kernel 'k' without clusters"),
        (
            files.serialized(files.gpu_executable(files.kernel_thunk(), outputs=((1, [1]),))),
            r"outputs 0 to 0, got \[1\]",
        ),
    ],
)
def test_refusals(data, why):
    with pytest.raises(ValueError, match=why):
        read(data)


def test_paths_into_maps_are_refused():
    manifest = MESSAGES["Manifest"](type="xla.gpu.GpuExecutableProto")
    manifest.records.add().override.path.add(field=8, string_key="x")
    inner = files.riegeli(files.simple_chunk([manifest.SerializeToString(), b""]))
    with pytest.raises(ValueError, match="map's key in 'name'"):
        read(files.serialized(None, inner=inner))


def test_parts_that_are_messages_are_refused():
    inner = files.split("xla.gpu.GpuExecutableProto", ([6], b""))
    with pytest.raises(ValueError, match="a field of bytes or text in a part, got 'capability'"):
        read(files.serialized(None, inner=inner))


def test_parts_that_are_neither_are_refused():
    manifest = MESSAGES["Manifest"](type="xla.gpu.GpuExecutableProto")
    manifest.records.add()
    inner = files.riegeli(files.simple_chunk([manifest.SerializeToString(), b""]))
    with pytest.raises(ValueError, match="to be merged or to be a field, got neither"):
        read(files.serialized(None, inner=inner))


def with_constant(**fields):
    proto = files.gpu_executable(files.kernel_thunk(arguments=((2, 0, 4, False),)))
    del proto.constants[:]
    if fields:
        data = fields.pop("data", b"")
        proto.constants.add(**fields).content.data = data
    return files.serialized(proto)


@pytest.mark.parametrize(
    "data, why",
    [
        (with_constant(), "expected a constant for buffer 2, found none"),
        (with_constant(symbol="c", allocation=3, data=files.ONE), "expected a constant for buffer 2, found none"),
        (with_constant(symbol="c", allocation=2, data=b"\0"), "expected 4 bytes in 'c', got 1"),
        (with_constant(symbol="c", allocation=2), "expected 'c' in a module of 0 bytes, found none"),
    ],
)
def test_constants_that_are_missing(data, why):
    with pytest.raises(ValueError, match=why):
        read(data)


@pytest.mark.parametrize("name", CHIPS)
def test_a_real_one(name):
    """Two kernels: what the first writes, the second reads; and the constant is the KV cache's scale."""
    shapes = [jax.ShapeDtypeStruct((8, 16, n), jnp.bfloat16) for n in (512, 64)]
    pool, slots = jax.ShapeDtypeStruct((4096, 576), jnp.bfloat16), jax.ShapeDtypeStruct((8, 2048), jnp.int32)
    config = SparseConfig(splits=4)
    call = partial(sparse_mla, layout=KV_BF16, softmax_scale=0.1, implementation="pallas", config=config)
    executable = build(call, *shapes, pool, slots, chip=CHIPS[name])
    assert executable.arch.split(":")[0] == name and executable.others == ()
    first, merge = executable.kernels
    assert (first.name, merge.name) == ("sparse_mla_bf16", "sparse_mla_merge")
    assert first.grid == (8, 1, 4) and merge.grid == (8, 16, 4)
    parts = 4 * 8 * 4 * 16 * 512
    assert executable.constants.keys() == {x.number for x in first.arguments if x.role == "constant"}
    assert list(executable.constants.values()) == [files.ONE]
    read_by_first = [(x.role, x.number, x.size) for x in first.arguments if not x.written and x.role == "parameter"]
    assert read_by_first == [
        ("parameter", 0, 2 * 8 * 16 * 512),
        ("parameter", 1, 2 * 8 * 16 * 64),
        ("parameter", 3, 4 * 8 * 2048),
        ("parameter", 2, 2 * 4096 * 576),
    ]
    written = [(x.role, x.size) for x in first.arguments if x.written]
    assert written == [("temporary", parts), ("temporary", parts // 512)]
    assert [(x.role, x.size, x.written) for x in merge.arguments] == [
        ("temporary", parts, False),
        ("temporary", parts // 512, False),
        ("output", 2 * 8 * 16 * 512, True),
        ("output", 4 * 8 * 16, True),
    ]
    assert all(x.offset + x.size <= executable.temporaries[x.number] for x in merge.arguments if x.role == "temporary")
