"""Code objects: real ones, the same damaged, and what is none."""

import struct
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest

from jax_mla import quantize
from jax_mla.aot.chips import CHIPS
from jax_mla.aot.code import nv_info, read
from jax_mla.aot.compiler import build


def elf(machine: int) -> bytes:
    """A 64-bit file of ``machine`` without a section."""
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    return ident + struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, 0, 0, 64, 56, 0, 64, 0, 0)


@pytest.mark.parametrize(
    "data, why",
    [
        (b"", "expected a whole ELF file, got 0 bytes"),
        (b"MZ" + bytes(100), "expected a whole ELF file, got 102 bytes"),
        (elf(62), "code for AMDGPU or CUDA, got EM_X86_64"),
        (elf(224), "AMDGPU code object with metadata, found none"),
        (elf(190), "cubin with .nv.info and .symtab, found none"),
    ],
)
def test_refusals(data, why):
    with pytest.raises(ValueError, match=why):
        read(data, "k")


def test_nv_info():
    data = bytes.fromhex("042f0800 09000000 ff000000 031bff00 04110800 09000000 58000000")
    assert list(nv_info(data)) == [
        (0x2F, bytes.fromhex("09000000 ff000000")),
        (0x1B, 255),
        (0x11, bytes.fromhex("09000000 58000000")),
    ]
    assert list(nv_info(b"")) == []
    with pytest.raises(ValueError, match="form 1 to 4, got 9 at byte 4"):
        list(nv_info(bytes.fromhex("031bff00 092f0800")))
    for cut in (1, 6, 10):
        with pytest.raises(ValueError, match="cut short"):
            list(nv_info(data[:cut]))


@cache
def real(name: str) -> bytes:
    """The code object of ``quantize`` on a chip."""
    chip = CHIPS[name]
    f = partial(quantize, fp8=chip.fp8, implementation="pallas")
    return build(f, jax.ShapeDtypeStruct((64, 256), jnp.bfloat16), chip=chip).kernel().code


@pytest.mark.parametrize("name", CHIPS)
def test_a_real_code_object(name):
    code = read(real(name), "quantize")
    offsets = [x.offset for x in code.instructions]
    assert offsets[0] == 0 and offsets == sorted(set(offsets)) and offsets[-1] < code.size
    assert code.counts().total() == len(code.instructions)
    assert 0 < code.vgprs < 128 and code.vector_spills == code.local_bytes == 0
    with pytest.raises(ValueError, match="another: expected"):
        read(real(name), "another")
    with pytest.raises(ValueError, match="expected a whole ELF file, got 300 bytes"):
        read(real(name)[:300], "quantize")


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda code: code[:-4] + bytes.fromhex("000080bf"), "ends in s_endpgm or a branch, got .'s_nop'"),
        (lambda code: bytes.fromhex("ffffffff") + code[4:], "at byte 0 expected an instruction, got no instruction"),
        (lambda code: bytes.fromhex("ff7f82bf") + code[4:], "branches to instructions, got one to byte 131072"),
    ],
)
def test_damaged_code(change, why):
    elf = real("gfx942")
    end = bytes.fromhex("000081bf")
    size = read(elf, "quantize").size
    (start,) = [i for i in range(0, len(elf) - size, 4) if elf[i + size - 4 : i + size] == end and begins(elf, i, size)]
    body = elf[start : start + size]
    assert len(change(body)) == size
    with pytest.raises(ValueError, match=why):
        read(elf[:start] + change(body) + elf[start + size :], "quantize")


def begins(elf: bytes, start: int, size: int) -> bool:
    """Whether the code begins at ``start``: at the file's only multiple of 256 from which it fits."""
    return start % 256 == 0 and elf[start : start + 4] != bytes(4)
