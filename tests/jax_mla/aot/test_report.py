"""Each failure, on a row that has it and on one that just has not."""

from dataclasses import replace

import pytest
from rich.console import Console

from jax_mla.aot.chips import CHIPS
from jax_mla.aot.report import Row, add_line, failures, make_table

GOOD = Row(
    jax="0.11.2",
    target="gfx942",
    op="sparse_mla",
    label="T 64 H 16 K 2048 bf16",
    phase="decode",
    kernel="sparse_mla_bf16",
    vgprs=314,
    agprs=58,
    sgprs=47,
    vector_spills=0,
    scalar_spills=5,
    local_bytes=0,
    shared_bytes=8192,
    warps=1,
    code_bytes=6212,
    grid=(64, 1, 8),
    threads=256,
    matrix={"v_mfma_f32_16x16x16_bf16": 88},
    loads={16: 15, 4: 1},
    stores={16: 8},
    instructions={"v_add_f32": 3},
    others=(),
    trips=(8, 1),
    issue_us=10.5,
    memory_us=29.0,
    estimate_us=29.0,
    roofline_us=29.0,
    compile_s=1.0,
)
FP8, BF16 = {"v_mfma_f32_32x32x16_fp8_fp8": 16}, {"v_mfma_f32_32x32x8_bf16": 16}
F8F6F4 = {"v_mfma_f32_16x16x128_f8f6f4": 4}


def logits(**changes) -> Row:
    row = replace(GOOD, op="index_logits_ragged", kernel="index_logits_ragged", label="T 1", phase="prefill")
    return replace(row, **changes)


@pytest.mark.parametrize(
    "row",
    [
        GOOD,
        replace(GOOD, phase="prefill", vector_spills=9, local_bytes=36),
        replace(GOOD, scalar_spills=40),
        replace(GOOD, shared_bytes=64 << 10),
        replace(GOOD, target="gfx950", shared_bytes=160 << 10),
        replace(GOOD, target="sm_90", shared_bytes=227 << 10),
        logits(matrix=FP8),
        logits(matrix=FP8 | BF16),
        logits(matrix=F8F6F4, target="gfx950"),
        logits(matrix={"QGMMA.64x64x32.F32.E4M3.E4M3": 8}, target="sm_90"),
        replace(GOOD, target="sm_90", threads=256, vector_spills=40, local_bytes=160),
        logits(matrix={}, kernel="sparse_mla_merge"),
    ],
)
def test_no_failure(row):
    assert failures(row) == []


@pytest.mark.parametrize(
    "row, words",
    [
        (
            replace(GOOD, vector_spills=3, local_bytes=12),
            "gfx942 sparse_mla (T 64 H 16 K 2048 bf16), kernel sparse_mla_bf16: "
            "3 vector registers spilled in a decode kernel (12 bytes a thread)",
        ),
        (
            replace(GOOD, target="sm_90", threads=256, vector_spills=41, local_bytes=164),
            "41 vector registers spilled in a decode kernel (164 bytes a thread)",
        ),
        (replace(GOOD, shared_bytes=65537), "65,537 bytes of shared memory, gfx942 has 65,536"),
        (replace(GOOD, target="gfx950", shared_bytes=163841), "163,841 bytes of shared memory, gfx950 has 163,840"),
        (replace(GOOD, target="sm_90", shared_bytes=232449), "232,449 bytes of shared memory, sm_90 has 232,448"),
        (
            logits(matrix=BF16),
            "gfx942 index_logits_ragged (T 1), kernel index_logits_ragged: no FP8 matrix instruction in a kernel that "
            "multiplies e4m3fnuz; it has v_mfma_f32_32x32x8_bf16",
        ),
        (logits(matrix={}, target="gfx950"), "that multiplies e4m3fn; it has none"),
        (logits(matrix=BF16, kernel="index_logits_paged", op="index_logits_paged"), "no FP8 matrix instruction"),
    ],
)
def test_one_failure(row, words):
    (failure,) = failures(row)
    assert words in failure


def test_all_failures_of_a_row():
    worst = logits(phase="decode", vector_spills=1, shared_bytes=1 << 20, matrix={})
    assert len(failures(worst)) == 3


def test_json_has_every_field():
    written = GOOD.json()
    assert written["grid"] == (64, 1, 8) and written["loads"] == {16: 15, 4: 1}
    assert set(written) == set(GOOD.__dataclass_fields__)


@pytest.mark.parametrize("name", CHIPS)
def test_table(name):
    console = Console(width=230, record=True, quiet=True)
    table = make_table(CHIPS[name])
    add_line(table, replace(GOOD, target=name))
    console.quiet = False
    with console.capture() as captured:
        console.print(table)
    text = captured.get()
    for words in (
        name,
        CHIPS[name].model,
        "sparse_mla_bf16",
        "64·1·8 × 256",
        "88 v_mfma_f32_16x16x16_bf16",
        "15×16 1×4",
    ):
        assert words in text
    assert ("waves on a SIMD" in text) == name.startswith("gfx")
