"""The command: every chip's compiler once for real, and every way to fail."""

import json
import subprocess
import sys
from dataclasses import replace

import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from jax_mla.aot import __main__ as command
from jax_mla.aot import plugins
from jax_mla.aot.__main__ import compile_case, main
from jax_mla.aot.cases import cases
from jax_mla.aot.chips import CHIPS
from tests.jax_mla.aot.test_report import GOOD, logits


def run(*arguments):
    return CliRunner().invoke(main, arguments)


def one(chip: str = "sm_90", op: str = "quantize"):
    return next(case for case in cases(CHIPS[chip], "ci") if case.op == op)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Target → rows of one kernel with FP8 products, by target, from a process of its own."""
    file = tmp_path_factory.mktemp("aot") / "rows.jsonl"
    which = ["--op", "index_logits_paged", "--match", "n 1 .* Hi 16 page 64$", "--json", str(file)]
    done = subprocess.run([sys.executable, "-m", "jax_mla.aot", *which], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kernels, and nothing is wrong with them" in done.stdout
    read = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["target"] for row in read] == list(CHIPS) and all(row["target"] in done.stdout for row in read)
    return {row["target"]: row for row in read}


@pytest.mark.parametrize("target", CHIPS)
def test_a_real_kernel(rows, target):
    row, chip = rows[target], CHIPS[target]
    assert row["kernel"] == row["op"] == "index_logits_paged" and row["phase"] == "decode"
    assert 0 < row["vgprs"] <= (512 if chip.warp == 64 else 255) and row["threads"] % chip.warp == 0
    assert row["vector_spills"] == row["local_bytes"] == 0
    assert row["shared_bytes"] <= chip.program_shared_bytes and row["warps"] >= 1
    assert row["grid"][0] == 64 and row["loads"] and row["stores"]
    assert row["matrix"].items() <= row["instructions"].items() and row["matrix"]
    smallest = 4 if chip.warp == 64 else 16
    assert row["code_bytes"] >= smallest * sum(row["instructions"].values())
    assert row["estimate_us"] == max(row["issue_us"], row["memory_us"]) >= row["memory_us"] > 0
    if chip.warp == 64:
        assert row["instructions"]["s_endpgm"] >= 1 and row["sgprs"] > 0
    else:
        assert row["instructions"]["EXIT"] >= 1
        assert not any(name.startswith("0x") for name in row["instructions"])
    fp8 = {"gfx942": "fp8_fp8", "gfx950": "f8f6f4"}.get(target)
    if fp8:
        assert any(fp8 in name for name in row["matrix"])


def test_help():
    text = run("--help").output
    for words in ("--target [gfx942|gfx950|sm_90]", "--set [ci|all]", "--op", "--match", "--json", "vector spill"):
        assert words in text


def test_arguments_that_are_none():
    assert "no regular expression" in run("--match", "(").output
    assert "no case of the set 'ci' is left" in run("--match", "nothing like it").output
    assert "'gfx906' is not one of" in run("--target", "gfx906").output
    assert all(run(*x).exit_code for x in (("--match", "("), ("--match", "nothing"), ("--target", "gfx906")))


@pytest.mark.parametrize(
    "row, words",
    [
        (replace(GOOD, vector_spills=1), "1 vector registers spilled in a decode kernel"),
        (replace(GOOD, shared_bytes=1 << 20), "1,048,576 bytes of shared memory, gfx942 has 65,536"),
        (logits(), "no FP8 matrix instruction"),
    ],
)
def test_a_failure_is_said_and_counts(row, words, monkeypatch):
    monkeypatch.setattr(command, "compile_case", lambda case, chip: ([row], []))
    result = run("--target", "gfx942", "--op", "quantize")
    assert result.exit_code == 1 and words in result.output and "nothing is wrong" not in result.output
    monkeypatch.setattr(command, "compile_case", lambda case, chip: ([GOOD], []))
    result = run("--target", "gfx942", "--op", "quantize")
    assert result.exit_code == 0 and "1 kernels, and nothing is wrong" in result.output


def test_a_kernel_that_does_not_compile(monkeypatch):
    def broken(x):
        raise NotImplementedError("no rule for sort")

    case = replace(one(), call=broken)
    rows, faults = compile_case(case, CHIPS["sm_90"])
    assert rows == [] and len(faults) == 1
    assert "sm_90 quantize" in faults[0] and "does not compile: NotImplementedError: no rule for sort" in faults[0]
    monkeypatch.setattr(command, "cases", lambda chip, which: [case])
    result = run("--target", "sm_90")
    assert result.exit_code == 1 and "no rule for sort" in result.output


def test_code_that_can_not_be_read(monkeypatch):
    def unreadable(built):
        raise ValueError("gfx942: at byte 0 expected an instruction")

    monkeypatch.setattr(command.compiler, "codes", unreadable)
    rows, (fault,) = compile_case(one(), CHIPS["sm_90"])
    assert rows == [] and "its machine code can't be read: ValueError: gfx942: at byte 0" in fault


def test_a_configuration_that_has_become_another():
    def of():
        raise AttributeError("'Config' object has no attribute 'keys'")

    rows, (fault,) = compile_case(replace(one(), trips=of), CHIPS["sm_90"])
    assert rows == [] and "how often its loops run is not known: AttributeError: 'Config' object" in fault


def test_kernels_beside_the_first():
    case = one(op="sparse_mla")
    first, merge = compile_case(case, CHIPS["sm_90"])[0]
    assert first.kernel.startswith("sparse_mla_") and merge.kernel == "sparse_mla_merge"
    assert first.trips == case.trips() and merge.trips == (1, 1)
    assert first.memory_us == 1e6 * case.cost.bytes / CHIPS["sm_90"].bytes_s and 0 < merge.memory_us < first.memory_us


def test_what_compiles_to_no_kernel_of_the_op():
    rows, faults = compile_case(replace(one(), call=lambda x: jnp.sort(x)), CHIPS["sm_90"])
    assert rows == [] and "expected its kernel in what XLA made of it, got none" in faults[0]


def test_more_shared_memory_than_there_is():
    """XLA refuses it itself, in words; were it to stop, the row would be a failure."""
    from jax_mla.ops.index_logits_paged.config import Config

    case = one(op="index_logits_paged")
    wide = replace(case, call=lambda *x: case.call(*x, config=Config(keys=4096, num_warps=4)))
    rows, faults = compile_case(wide, CHIPS["sm_90"])
    assert faults or any("shared memory" in words for row in rows for words in command.failures(row))


def test_a_compiler_that_is_missing(monkeypatch):
    def missing(platform):
        raise plugins.Unavailable("jax-cuda13-pjrt: expected in nowhere")

    plugins.device.cache_clear()
    monkeypatch.setattr(plugins, "library", missing)
    result = run("--target", "sm_90", "--op", "quantize")
    assert result.exit_code == 1 and "expected in nowhere" in result.output and "does not compile" not in result.output
