"""What follows from machine code, on code written by hand."""

import pytest

from jax_mla.aot.analysis import (
    access,
    accesses,
    cycles,
    estimate,
    is_fp8_matrix,
    matrix_flops,
    resident_warps,
    weights,
)
from jax_mla.aot.chips import CHIPS
from jax_mla.aot.code import Code, Instruction
from jax_mla.aot.executable import Kernel
from jax_mla.cost import Cost

GFX942, GFX950, SM_90 = (CHIPS[name] for name in ("gfx942", "gfx950", "sm_90"))


def code(*instructions, **changes) -> Code:
    """Instructions are names, or name and the index to which it branches."""
    pairs = [(x, None) if isinstance(x, str) else x for x in instructions]
    made = tuple(Instruction(8 * i, name, None if to is None else 8 * to) for i, (name, to) in enumerate(pairs))
    fields = dict(vgprs=32, agprs=0, sgprs=32, vector_spills=0, scalar_spills=0, local_bytes=0, shared_bytes=0, size=8)
    return Code(name="k", instructions=made, **fields | changes)


def kernel(grid=(1, 1, 1), threads=256, shared_bytes=0) -> Kernel:
    return Kernel("k", b"", grid, (threads, 1, 1), shared_bytes, (), ())


@pytest.mark.parametrize(
    "name, flops, fp8",
    [
        ("v_mfma_f32_16x16x16_bf16", 2 * 16**3, False),
        ("v_mfma_f32_16x16x32_fp8_fp8", 2 * 16 * 16 * 32, True),
        ("v_mfma_f32_32x32x16_fp8_fp8", 2 * 32 * 32 * 16, True),
        ("v_mfma_f32_16x16x128_f8f6f4", 2 * 16 * 16 * 128, True),
        ("v_mfma_scale_f32_32x32x64_f8f6f4", 2 * 32 * 32 * 64, True),
        ("v_mfma_f32_4x4x4_16b_f16", 2 * 4**3 * 16, False),
        ("v_mfma_f32_16x16x4_f32", 2 * 16 * 16 * 4, False),
        ("v_smfmac_f32_16x16x64_fp8_fp8", 2 * 16 * 16 * 64, True),
        ("HMMA.16816.F32.BF16", 2 * 16 * 8 * 16, False),
        ("HMMA.1688.F32.TF32", 2 * 16 * 8 * 8, False),
        ("HGMMA.64x128x16.F32.BF16", 2 * 64 * 128 * 16 // 4, False),
        ("QGMMA.64x64x32.F32.E4M3.E4M3", 2 * 64 * 64 * 32 // 4, True),
        ("v_fma_f32", 0, False),
        ("v_cvt_pk_fp8_f32", 0, False),
        ("FFMA", 0, False),
    ],
)
def test_matrix_instructions(name, flops, fp8):
    assert (matrix_flops(name), is_fp8_matrix(name)) == (flops, fp8)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("global_load_dwordx4", ("load", 16)),
        ("global_load_dwordx3", ("load", 12)),
        ("global_load_ubyte_d16_hi", ("load", 1)),
        ("global_load_sbyte", ("load", 1)),
        ("global_load_short_d16", ("load", 2)),
        ("global_load_lds_dwordx4", ("load", 16)),
        ("buffer_load_dword", ("load", 4)),
        ("global_store_short_d16_hi", ("store", 2)),
        ("buffer_store_byte", ("store", 1)),
        ("flat_store_dwordx2", ("store", 8)),
        ("LDG.128", ("load", 16)),
        ("LDGSTS.128", ("load", 16)),
        ("STG.8", ("store", 1)),
        ("ds_read_b128", None),
        ("scratch_load_dword", None),
        ("global_atomic_add", None),
        ("LDS.128", None),
        ("LDL.32", None),
    ],
)
def test_accesses_to_global_memory(name, expected):
    assert access(name) == expected


def test_widths_widest_first():
    counts = code("LDG.32", "LDG.128", "STG.64", "LDGSTS.128").counts()
    assert accesses(counts, "load") == {16: 2, 4: 1} and list(accesses(counts, "load")) == [16, 4]
    assert accesses(counts, "store") == {8: 1}


def test_loops():
    body = code("a", "b", "c", ("BRA", 1), "d", "EXIT")
    assert weights(body, 10, 3) == [1, 10, 10, 10, 1, 1]
    nested = code("a", "outer", "inner", ("s_cbranch_scc1", 2), ("s_cbranch_scc1", 1), "end")
    assert weights(nested, 10, 3) == [1, 3, 30, 30, 3, 1]


@pytest.mark.parametrize(
    "chip, registers, sgprs, threads, shared, expected",
    [
        (GFX942, 64, 32, 256, 0, 8),
        (GFX942, 65, 32, 256, 0, 7),
        (GFX942, 129, 32, 256, 0, 3),
        (GFX942, 257, 32, 256, 0, 1),
        (GFX942, 512, 32, 256, 0, 1),
        (GFX942, 512, 32, 512, 0, 0),
        (GFX942, 64, 106, 256, 0, 7),
        (GFX942, 64, 32, 256, 16384, 4),
        (GFX942, 64, 32, 256, 65536, 1),
        (GFX942, 64, 32, 1024, 40000, 4),
        (GFX950, 64, 32, 256, 16384, 8),
        (GFX950, 64, 32, 256, 65536, 2),
        (SM_90, 32, 0, 128, 0, 64),
        (SM_90, 33, 0, 128, 0, 48),
        (SM_90, 255, 0, 128, 0, 8),
        (SM_90, 128, 0, 256, 0, 16),
        (SM_90, 32, 0, 128, 100 << 10, 8),
        (SM_90, 32, 0, 128, 227 << 10, 4),
    ],
)
def test_resident_warps(chip, registers, sgprs, threads, shared, expected):
    made = code(vgprs=registers, sgprs=sgprs)
    assert resident_warps(made, kernel(threads=threads, shared_bytes=shared), chip) == expected


def test_cycles():
    assert cycles("v_add_f32", GFX942) == 4 and cycles("FADD", SM_90) == 1
    assert cycles("s_waitcnt", GFX942) == cycles("UMOV", SM_90) == cycles("BAR", SM_90) == 0
    assert cycles("v_mfma_f32_16x16x16_bf16", GFX942) == pytest.approx(16, rel=0.01)
    assert cycles("v_mfma_f32_16x16x32_fp8_fp8", GFX942) == pytest.approx(16, rel=0.01)
    assert cycles("v_mfma_f32_16x16x128_f8f6f4", GFX950) == pytest.approx(32, rel=0.01)
    assert cycles("HMMA.16816.F32.BF16", SM_90) == pytest.approx(4, rel=0.1)


def test_estimate():
    body = code("v_add_f32", "global_load_dword", ("s_cbranch_scc1", 1), "s_endpgm")
    launch = kernel(grid=(304 * 4, 3, 1), threads=64)  # three waves on each SIMD
    time = estimate(body, launch, GFX942, Cost(53_000_000, 13_074_000_000), "bf16", (10, 1))
    assert time.issue_us == pytest.approx(3 * (4 + 10 * 4) / 2100)
    assert time.memory_us == pytest.approx(10)
    assert time.us == time.memory_us and time.roofline_us == pytest.approx(10)
    busy = estimate(body, launch, GFX942, Cost(0, 130_740_000_000), "bf16", (10_000_000, 1))
    assert busy.us == busy.issue_us and busy.roofline_us == pytest.approx(100)
