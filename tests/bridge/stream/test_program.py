"""Programs: what they refuse, their file, and what XLA's executables become."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

import jax_mla
from bridge.dtypes import DTYPES
from bridge.stream.build import build
from bridge.stream.launch import Launcher
from bridge.stream.program import BYTES, Array, Launch, Program, Result
from jax_mla import IndexLayout, kv_layout
from jax_mla.aot.chips import CHIPS
from tests.bridge.stream.fake import pointer, program

CHIPS_BY_NAME = pytest.mark.parametrize("arch", list(CHIPS))


def test_sizes_are_those_of_torch_s_dtypes():
    assert {name: dtype.itemsize for dtype, name in DTYPES.items()} == BYTES


def test_a_file_holds_all_of_it():
    assert Program.from_bytes(program().to_bytes()) == program()


@pytest.mark.parametrize(
    "data",
    [b"", b"PK", program().to_bytes()[:-30], program().to_bytes().replace(b"program.json", b"another.json")],
    ids=["empty", "short", "cut", "another"],
)
def test_other_files_are_refused(data):
    with pytest.raises(ValueError, match="program: expected a file of format 1, got"):
        Program.from_bytes(data)


def test_a_file_with_any_byte_changed_is_refused_or_the_same():
    data = program().to_bytes()
    for i in range(0, len(data), 7):
        changed = data[:i] + bytes([data[i] ^ 0xFF]) + data[i + 1 :]
        try:
            assert Program.from_bytes(changed) == program()
        except ValueError as e:
            assert "expected a file of format 1" in str(e)


def test_a_file_of_another_format_is_refused(monkeypatch):
    monkeypatch.setattr("bridge.stream.program.FORMAT", 2)
    data = program().to_bytes()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="another format"):
        Program.from_bytes(data)


@pytest.mark.parametrize(
    "wrong, says",
    [
        (pointer("parameter", 2, 8), "argument 0: there is no Pointer"),
        (pointer("parameter", 0, 65), "argument 0: there is no Pointer"),
        (pointer("parameter", 0, 8, offset=57), "argument 0: there is no Pointer"),
        (pointer("parameter", 0, 8, offset=-8), "argument 0: there is no Pointer"),
        (pointer("temporary", 1, 8), "argument 0: there is no Pointer"),
        (pointer("constant", 0, 5), "argument 0: there is no Pointer"),
        (pointer("elsewhere", 0, 5), "argument 0: there is no Pointer"),
        (pointer("parameter", 0, -8, offset=70), "argument 0: there is no Pointer"),
        (pointer("parameter", 0, 8), "expected a launch with a pointer to result 0"),
    ],
    ids=str,
)
def test_pointers_to_nothing_are_refused(wrong, says):
    with pytest.raises(ValueError, match=f"example: .*{says}"):
        program(launches=(Launch("f", 0, (1, 1, 1), (1, 1, 1), 0, (wrong,)),))


def test_other_inconsistencies_are_refused():
    with pytest.raises(ValueError, match="kernel 'copy_4' is in code 2 of 2"):
        program(launches=(replace(program().launches[0], code=2),))
    with pytest.raises(ValueError, match=r"result 0 is int32\[4, 8\], written over a float32\[4, 8\]"):
        program(results=(Result(Array((4, 8), "int32"), 1), program().results[1]))


def sparse_mla(layout, q_nope, q_rope, pool, slots):
    return jax_mla.sparse_mla(q_nope, q_rope, pool, slots, layout=layout, softmax_scale=0.1, implementation="pallas")


def layer(index, kv, pools, seen, keys, query, new, q_mla):
    """A layer's attention in decode."""
    how: dict[str, Any] = dict(implementation="pallas")
    (index_pool, kv_pool), (table, requests, lengths, slots) = pools, seen
    (k, norm, bias, cos_sin), (q, weights), (q_nope, q_rope) = keys, query, q_mla
    index_pool = jax_mla.index_write(index_pool, slots, k, norm, bias, cos_sin, lengths, layout=index, **how)
    kv_pool = jax_mla.kv_write(kv_pool, slots, *new, layout=kv, **how)
    q8, folded = jax_mla.index_query(q, weights, cos_sin, lengths, fp8=index.fp8, **how)
    max_len = table.shape[1]
    logits = jax_mla.index_logits_paged(
        q8, folded, index_pool, table, requests, lengths, layout=index, max_len=max_len, **how
    )
    chosen = jax_mla.select(logits, lengths, 2048, table=table, table_rows=requests, **how)
    assert not isinstance(chosen, tuple)
    out, lse = jax_mla.sparse_mla(q_nope, q_rope, kv_pool, chosen, layout=kv, softmax_scale=0.1, **how)
    return index_pool, kv_pool, chosen, out, lse


@CHIPS_BY_NAME
def test_a_whole_layer_is_a_few_launches(arch):
    chip, t = CHIPS[arch], 8
    index, kv = IndexLayout(64, chip.fp8), kv_layout("fp8_576", chip.fp8.name)
    pools = Array((256, index.page_bytes), "uint8"), Array((1 << 14, kv.row_elements), "uint8")
    i32, bf16, f32 = (partial(_array, dtype) for dtype in ("int32", "bfloat16", "float32"))
    arrays = (
        *pools,
        *(i32(16, 8192), i32(t), i32(t), i32(t)),
        *(bf16(t, 128), f32(128), f32(128), f32(4096, 64), bf16(t, 64, 128), f32(t, 64)),
        *(bf16(t, 512), bf16(t, 64), bf16(t, 16, 512), bf16(t, 16, 64)),
    )

    def function(*x):
        return layer(index, kv, x[:2], x[2:6], x[6:10], x[10:12], x[12:14], x[14:])

    built = build("layer", function, arrays, arch, donated=(0, 1))
    assert [x.kernel.rstrip("_0123456789") for x in built.launches] == [
        *("index_write", "kv_write_fp", "index_query", "index_logits_paged", "select"),
        *("sparse_mla_fp", "sparse_mla_merge"),
    ]
    assert len(built.launches) <= 8
    assert [x.parameter for x in built.results] == [0, 1, None, None, None]
    assert [str(x.array) for x in built.results[2:]] == [
        *("int32[8, 2048]", "bfloat16[8, 16, 512]", "float32[8, 16]"),
    ]
    assert built.arch == arch and set(built.versions) >= {"jax", "jaxlib"}
    assert Program.from_bytes(built.to_bytes()) == built
    threads = {x.threads[0] % chip.warp for x in built.launches}
    assert threads == {0} and all(code.startswith(b"\x7fELF") for code in built.codes)


def _array(dtype: str, *shape: int) -> Array:
    return Array(shape, dtype)


@CHIPS_BY_NAME
def test_what_is_written_in_place_is_the_parameter_itself(arch):
    kv = kv_layout("fp8_576", CHIPS[arch].fp8.name)
    arrays = Array((512, 576), "uint8"), Array((4,), "int32"), Array((4, 512), "bfloat16"), Array((4, 64), "bfloat16")
    write = partial(jax_mla.kv_write, layout=kv, implementation="pallas")
    built = build("kv_write", write, arrays, arch, donated=(0,))
    (launch,) = built.launches
    assert [x.parameter for x in built.results] == [0]
    assert [(p.role, p.number) for p in launch.pointers if p.role != "constant"][-2:] == [("parameter", 0)] * 2
    with pytest.raises(ValueError, match="kv_write: expected (kernels and nothing else|parameters .* in place), got"):
        build("kv_write", write, arrays, arch)


def test_what_is_more_than_kernels_is_refused():
    x = Array((1 << 12,), "float32")
    with pytest.raises(ValueError, match="sorted: expected kernels and nothing else, got fusion"):
        build("sorted", jnp.sort, (x,), "sm_90")  # it begins with a copy
    with pytest.raises(ValueError, match="sorted: expected one of gfx942, gfx950, sm_90, got 'sm_80'"):
        build("sorted", jnp.sort, (x,), "sm_80")
    with pytest.raises(ValueError, match="complex: expected results of .*, got complex64"):
        build("complex", lambda x: lax.complex(x, x), (x,), "sm_90")


def test_what_xla_fuses_around_kernels_is_launched_too():
    built = build("twice", lambda x: (2 * x, jnp.sum(x)), (Array((1 << 12,), "float32"),), "gfx950")
    assert [str(x.array) for x in built.results] == ["float32[4096]", "float32[]"]
    assert built.launches and {p.role for x in built.launches for p in x.pointers} >= {"parameter", "output"}


def test_xla_s_launches_reach_the_driver(driver):
    """The same program on both drivers: all addresses lie in what was given or allocated."""
    import torch

    kv = kv_layout("fp8_576")
    arrays = Array((64, 16, 512), "bfloat16"), Array((64, 16, 64), "bfloat16"), Array((512, 576), "uint8")
    built = build("sparse_mla", partial(sparse_mla, kv), (*arrays, Array((64, 2048), "int32")), "sm_90")
    launcher = Launcher(built, driver, "sm_90")
    tensors = [
        torch.zeros(64, 16, 512, dtype=torch.bfloat16),
        torch.zeros(64, 16, 64, dtype=torch.bfloat16),
        torch.zeros(512, 576, dtype=torch.uint8),
        torch.zeros(64, 2048, dtype=torch.int32),
    ]
    driver.log()
    call = launcher.bind(*tensors)
    out, lse = call()
    between = call.args[2]  # what lies between kernels, in one block
    known = [*tensors, out, lse, between, *launcher._constants]
    (first, how, addresses), (second, _, merged) = driver.launches()
    assert (first, second) == ("sparse_mla_fp8_576", "sparse_mla_merge")
    assert tuple(how[:3]) == built.launches[0].grid and how[6] == built.launches[0].shared_bytes
    for launch, given in zip(built.launches, (addresses, merged), strict=True):
        for p, address in zip(launch.pointers, given, strict=True):
            holds = [x for x in known if x.data_ptr() <= address and address + p.size <= x.data_ptr() + x.nbytes]
            assert len(holds) == 1, p
    assert addresses[:2] == [x.data_ptr() for x in tensors[:2]] and merged[-2:] == [out.data_ptr(), lse.data_ptr()]
