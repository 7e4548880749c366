"""jax_mla's ops as functions for both lanes, and as torch's operators."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bridge import ops
from bridge.stream import Function, Jit, Stream
from bridge.stream.custom import operators, register, schema_of
from bridge.stream.program import Array
from jax_mla import IndexLayout, kv_layout, select
from jax_mla.aot.chips import CHIPS
from tests.bridge.stream.fake import ARCH

T, TABLE = 8, 4096


def calls(fp8: str) -> dict[str, tuple[Function, tuple[Array, ...], dict[str, Any]]]:
    """Each function, with arrays and static arguments as a decode batch has them, for a chip with ``fp8``."""
    f8 = f"float8_{fp8}"
    kv, index = kv_layout("fp8_576", fp8), IndexLayout(64)
    i32, bf16, f32 = (partial(_array, dtype) for dtype in ("int32", "bfloat16", "float32"))
    kv_pool, index_pool = _array("uint8", 512, kv.row_bytes), _array("uint8", 64, index.page_bytes)
    pages = dict(page_size=64, preshuffle=False, fp8=fp8)
    rope = dict(interleaved=False, hadamard=False)
    mla = dict(layout="fp8_576", fp8=fp8)
    angles = f32(4096, 64), i32(T)
    query = _array(f8, T, 64, 128), f32(T, 64)
    return {
        "kv_write": (ops.KV_WRITE, (kv_pool, i32(T), bf16(T, 512), bf16(T, 64)), mla),
        "index_write": (
            ops.INDEX_WRITE,
            (index_pool, i32(T), bf16(T, 128), f32(128), f32(128), *angles),
            pages | rope | dict(eps=1e-6),
        ),
        "index_query": (ops.INDEX_QUERY, (bf16(T, 64, 128), f32(T, 64), *angles), rope | dict(fp8=fp8)),
        "index_logits_paged": (
            ops.INDEX_LOGITS_PAGED,
            (*query, index_pool, i32(16, TABLE), i32(T), i32(T)),
            pages | dict(max_len=TABLE, next_n=1),
        ),
        "index_logits_ragged": (
            ops.INDEX_LOGITS_RAGGED,
            (*query, _array(f8, 256, 128), f32(256), i32(T), i32(T)),
            {},
        ),
        "topk_decode": (
            ops.TOPK_DECODE,
            (*(bf16(T, 64, 128), f32(T, 64)), *angles, index_pool, i32(16, TABLE), i32(T), i32(T)),
            pages | rope | dict(max_len=TABLE, k=2048),
        ),
        "topk_prefill": (
            ops.TOPK_PREFILL,
            (*(bf16(T, 64, 128), f32(T, 64)), *angles, index_pool, i32(256), i32(T), i32(T)),
            pages | rope | dict(k=2048),
        ),
        "slots_of": (ops.SLOTS_OF, (i32(T, 2048), i32(16, TABLE), i32(T), i32(T)), {}),
        "select": (ops.SELECT, (f32(T, TABLE), i32(T)), dict(k=2048)),
        "sparse_mla": (
            ops.SPARSE_MLA,
            (bf16(T, 16, 512), bf16(T, 16, 64), kv_pool, i32(T, 2048)),
            mla | dict(softmax_scale=0.1),
        ),
    }


def _array(dtype: str, *shape: int) -> Array:
    return Array(shape, dtype)


def zeros(arrays):
    from bridge.stream.launch import TORCH_DTYPES

    return [torch.zeros(x.shape, dtype=TORCH_DTYPES[x.dtype]) for x in arrays]


LAUNCHES = {"topk_decode": 3, "topk_prefill": 8}
"""Of a call at most; of a decode layer, with both its writes, 8."""

NAMES = pytest.mark.parametrize("name", [x.name for x in ops.FUNCTIONS])


def test_every_function_is_here():
    assert set(calls("e4m3fn")) == {x.name for x in ops.FUNCTIONS}


@NAMES
@pytest.mark.parametrize("arch", list(CHIPS))
def test_every_op_is_a_program_on_every_chip(name, arch):
    function, arrays, static = calls(CHIPS[arch].fp8.name)[name]
    program = function.program(arrays, arch, **static)
    assert 1 <= len(program.launches) <= LAUNCHES.get(name, 2) and program.arch == arch
    assert [x.parameter for x in program.results] == [*function.donated, *[None] * len(function.results)]


@NAMES
def test_every_op_is_an_operator_of_torch(name, driver):
    function, arrays, static = calls("e4m3fn")[name]
    own = Function(f"{name}_on_{driver.interface.library[3:7]}", *_rest(function))
    operator = register(own, Stream(driver, ARCH))
    tensors = zeros(arrays)
    driver.log()
    checks = ["test_faketensor"]
    if not any("float8" in x.dtype for x in arrays):  # torch's check of what is written computes with what is given
        checks.append("test_schema")
    torch.library.opcheck(operator, tuple(tensors), static, test_utils=checks)
    assert driver.launches()
    given = operator(*tensors, **static)
    given = () if given is None else given if isinstance(given, tuple) else (given,)
    assert len(given) == len(function.results)
    assert ("!" in schema_of(function)) == bool(function.written)


def _rest(function: Function):
    return function.make, function.arrays, function.results, function.written


def test_schemas():
    assert schema_of(ops.KV_WRITE) == (
        "(Tensor(a!) pool, Tensor slots, Tensor k_nope, Tensor k_rope, *, str layout, str fp8) -> ()"
    )
    assert schema_of(ops.SELECT) == "(Tensor logits, Tensor lengths, *, int k) -> (Tensor)"
    with pytest.raises(TypeError, match="f: k: expected an annotation of str, int, float or bool"):
        schema_of(Function("f", lambda k: lambda x: x, ("x",), ("y",)))


def test_the_jit_lane_is_the_op():
    function, (logits, lengths), static = calls("e4m3fn")["select"]
    numbers = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    counts = torch.arange(T, dtype=torch.int32) * 500
    (chosen,) = Jit()(function, numbers, counts, **static)
    expected = select(jnp.asarray(numbers), jnp.asarray(counts), 2048, implementation="xla")
    np.testing.assert_array_equal(chosen, expected)


def test_operators_are_registered_once(driver):
    function = Function(f"once_{driver.interface.library[3:7]}", *_rest(ops.SELECT))
    register(function, Stream(driver, ARCH))
    with pytest.raises(ValueError, match=f"{function.name}: expected an operator that isn't registered yet"):
        register(function, Stream(driver, ARCH))


def with_default(*, k: int = 3):
    return lambda x: x


def test_static_arguments_have_no_defaults():
    with pytest.raises(TypeError, match="f: k: expected no default, got 3"):
        schema_of(Function("f", with_default, ("x",), ("y",)))


def test_all_are_registered_by_one_call_and_run_where_their_tensors_are():
    assert operators() is operators() and set(operators()) == {x.name for x in ops.FUNCTIONS}
    _, (logits, lengths), static = calls("e4m3fn")["select"]
    numbers = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    counts = torch.arange(T, dtype=torch.int32) * 500
    chosen = torch.ops.jax_mla.select(numbers, counts, **static)
    assert torch.equal(chosen, Jit()(ops.SELECT, numbers, counts, **static)[0])
    _, arrays, static = calls("e4m3fn")["kv_write"]
    with pytest.raises(RuntimeError, match="kv_write: pool: expected to be written in place, got a result elsewhere"):
        torch.ops.jax_mla.kv_write(*zeros(arrays), **static)
