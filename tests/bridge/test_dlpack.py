"""The strict exchange: the same memory both ways, and a refusal by name of everything that would be a copy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge import dlpack
from bridge.dlpack import to_jax, to_torch
from bridge.dtypes import DTYPES

INT4: torch.dtype = vars(torch)["int4"]
"""A type that torch has and its stubs have not."""
BYTES = torch.arange(256, dtype=torch.uint8).repeat(16)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def of(dtype: torch.dtype, shape=(8, 128)) -> torch.Tensor:
    """A tensor of ``dtype`` that holds all sorts of bytes."""
    if dtype == torch.bool:
        return (torch.arange(np.prod(shape)) % 3 == 0).view(shape)
    count = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    return BYTES[:count].clone().view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_to_jax_and_back_is_one_memory(dtype):
    tensor = of(dtype)
    array = to_jax(tensor, "t")
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert (array.dtype.name, array.shape) == (DTYPES[dtype], (8, 128))
    bits = np.asarray(array).view(np.uint8)
    assert np.array_equal(bits, tensor.view(torch.uint8).numpy())
    again = to_torch(array)
    assert (again.data_ptr(), again.dtype, again.stride()) == (tensor.data_ptr(), dtype, (128, 1))


@pytest.mark.parametrize("name", DTYPES.values())
def test_jax_to_torch_and_back_is_one_memory(name):
    array = jnp.arange(96).astype(name).reshape(4, 24)
    tensor = to_torch(array)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    assert DTYPES[tensor.dtype] == name
    assert np.array_equal(np.asarray(to_jax(tensor)).view(np.uint8), np.asarray(array).view(np.uint8))


@pytest.mark.parametrize(
    "name, dtype", [("float8_e4m3fn", jnp.float8_e4m3fn), ("float8_e4m3fnuz", jnp.float8_e4m3fnuz)]
)
def test_every_fp8_byte_means_the_same_on_both_sides(name, dtype):
    tensor = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name))
    array = to_jax(tensor)
    assert array.dtype == dtype
    np.testing.assert_array_equal(np.asarray(array).astype(np.float32), tensor.float().numpy())


def test_a_write_in_torch_is_seen_by_jax_and_the_memory_outlives_its_first_name():
    tensor = torch.zeros(64)
    array = to_jax(tensor)
    tensor[3] = 5.0
    assert float(jnp.sum(array)) == 5.0
    del tensor
    assert float(array[3]) == 5.0


def test_to_torch_waits_for_what_is_still_being_computed():
    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 30, lambda i, y: y @ x, x)

    x = jnp.eye(700)
    result = slow(x)
    tensor = to_torch(result)
    assert result.is_ready()
    assert float(tensor.sum()) == 700.0


def strided(shape, permuted):
    tensor = torch.zeros(shape)
    return tensor.permute(permuted)


@given(shape=shapes, data=st.data())
def test_any_contiguous_shape_crosses_and_comes_back_row_major(shape, data):
    tensor = torch.zeros(shape)
    if tensor.numel():  # the strides of dimensions of size 1 mean nothing, and DLPack rewrites them
        strides = [data.draw(st.integers(1, 9)) if n == 1 else s for n, s in zip(shape, tensor.stride(), strict=True)]
        tensor = tensor.as_strided(shape, strides)
    array = to_jax(tensor)
    assert array.shape == shape
    back = to_torch(array)
    assert back.shape == shape and back.stride() == torch.empty(shape).stride()
    assert not tensor.numel() or back.data_ptr() == tensor.data_ptr()


@given(shape=st.lists(st.integers(2, 4), min_size=2, max_size=4).map(tuple), data=st.data())
def test_any_permutation_that_moves_memory_is_refused(shape, data):
    order = data.draw(st.permutations(range(len(shape))).filter(lambda p: list(p) != sorted(p)))
    with pytest.raises(ValueError, match=r"^pool: expected contiguous rows, strides .*call \.contiguous\(\)"):
        to_jax(torch.zeros(shape).permute(order), "pool")


REFUSED = {
    "int64": (torch.zeros(4, dtype=torch.int64), r"torch\.int64; .*int32 copy.*\.to\(torch\.int32\)"),
    "float64": (torch.zeros(4, dtype=torch.float64), r"torch\.float64; .*float32 copy.*\.to\(torch\.float32\)"),
    "complex64": (torch.zeros(4, dtype=torch.complex64), r"torch\.complex64"),
    "float8_e5m2": (torch.zeros(4, dtype=torch.float8_e5m2), r"torch\.float8_e5m2"),
    "float4": (
        torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        r"float4_e2m1fn_x2; .*\.view\(torch\.uint8\)",
    ),
    "int4": (torch.zeros(4, dtype=torch.uint8).view(INT4), r"torch\.int4; .*\.view\(torch\.uint8\)"),
    "columns": (
        torch.zeros(4, 8)[:, :4],
        r"contiguous rows, strides \(4, 1\) for shape \(4, 4\), got strides \(8, 1\)",
    ),
    "step": (torch.zeros(8)[::2], r"got strides \(2,\)"),
    "expanded": (torch.zeros(1, 4).expand(3, 4), r"got strides \(0, 1\)"),
    "transposed": (torch.zeros(3, 4).t(), r"got strides \(1, 4\)"),
    "misaligned": (torch.zeros(64)[1:], r"aligned to 64 bytes, got an address 4 bytes past that; .*\.clone\(\)"),
    "requires grad": (torch.zeros(4, requires_grad=True), r"requires grad; call \.detach\(\)"),
    "negative bit": (torch._neg_view(torch.zeros(4)), r"negative or conjugate bit set; call \.resolve_neg\(\)"),
    "meta": (torch.zeros(4, device="meta"), r"on 'cpu', where JAX computes, got one on 'meta'"),
    "sparse": (torch.zeros(4, 4).to_sparse(), r"dense tensor, got torch\.sparse_coo; call \.to_dense\(\)"),
    "no tensor": (np.zeros(4), r"expected a torch\.Tensor, got ndarray"),
}


@pytest.mark.parametrize("tensor, message", REFUSED.values(), ids=REFUSED)
def test_what_torch_cannot_lend_is_refused_by_name(tensor, message):
    with pytest.raises(ValueError, match=rf"^q_rope: .*{message}"):
        to_jax(tensor, "q_rope")


def test_what_jax_cannot_lend_is_refused_by_name():
    donated = jnp.zeros(64)
    jax.jit(lambda x: x + 1, donate_argnums=0)(donated)
    cases: dict[str, tuple[Any, str]] = {
        "int4": (jnp.zeros(4, jnp.int4), r"got int4; .*bitcast it to uint8"),
        "float4": (jnp.zeros(4, jnp.float4_e2m1fn), r"got float4_e2m1fn; .*bitcast"),
        "uint32": (jnp.zeros(4, jnp.uint32), r"got uint32; .*\.astype\(\)"),
        "deleted": (donated, r"got a deleted one"),
        "no array": (torch.zeros(4), r"expected a jax\.Array with values, got Tensor"),
    }
    for array, message in cases.values():
        with pytest.raises(ValueError, match=rf"^out: .*{message}"):
            to_torch(array, "out")
    with pytest.raises(ValueError, match=r"^out: .*outside of jax\.jit"):
        jax.jit(lambda x: to_torch(x, "out"))(jnp.zeros(4))


def test_a_copy_is_an_error(monkeypatch):
    """Whatever a later JAX does with a tensor: another address never passes for the same memory."""
    monkeypatch.setattr(dlpack.jax.dlpack, "from_dlpack", lambda tensor, copy: jnp.zeros(tuple(tensor.shape)))
    with pytest.raises(
        RuntimeError, match=r"^pool: expected one memory for both libraries, got \(64,\) torch\.float32 at"
    ):
        to_jax(torch.zeros(64), "pool")
