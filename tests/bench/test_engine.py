"""``python -m bench engine``, as far as a CPU goes: what it supplies to a bare machine, and what it calls wrong."""

import ast
import copy
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

from bench.__main__ import main
from bench.engine import command, machine
from bench.engine.case import CASES, DENSE, GRAPHS, PROMPTS, RADIX, prompts
from bridge.demo.tiny import checkpoint


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A folder supplied for a machine that has neither this project installed nor ``sgl_kernel``."""
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    supplied = machine.supply(tmp_path)
    monkeypatch.undo()
    return tmp_path, supplied


def test_a_bare_machine_gets_the_entry_points_that_an_installed_one_has(bare):
    folder, supplied = bare
    found = {x.name: x for x in importlib.metadata.distributions(path=[str(folder)])}
    assert set(found) == {"jax-mla", "bench-engine"} and len(supplied) == 2
    installed = importlib.metadata.distribution("jax-mla")
    assert found["jax-mla"].version == installed.version

    def points(x):
        return {(p.group, p.name, p.value) for p in x.entry_points}

    assert points(found["jax-mla"]) == points(installed) and points(installed)
    (platform,) = found["bench-engine"].entry_points
    assert platform.group == "sglang.srt.platforms" and platform.load()() == "bench.engine.gpu_platform.GpuPlatform"


def test_a_machine_that_has_all_gets_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert machine.supply(tmp_path) == [] and not list(tmp_path.iterdir())


def python(folder, code: str, *arguments: str) -> str:
    """What a process prints that finds the supplied packages."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_stand_in_raises_where_it_is_called(bare):
    code = """
import sgl_kernel, sgl_kernel.flash_attn
for name in (sgl_kernel.flash.mla, sgl_kernel.flash_attn.varlen):
    try:
        name(1)
    except NotImplementedError as error:
        print(error)
print(hasattr(sgl_kernel, "__all__"), hasattr(sgl_kernel.flash_attn, "__all__"))
"""
    assert python(bare[0], code).splitlines() == [
        "sgl_kernel.flash.mla: expected the package sglang-kernel, got a stand-in",
        "sgl_kernel.flash_attn.varlen: expected the package sglang-kernel, got a stand-in",
        "False False",
    ]


def test_every_import_of_it_that_sglang_has_finds_the_stand_in(bare):
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    statements = set()
    for path in Path(spec.submodule_search_locations[0]).rglob("*.py"):
        text = path.read_text()
        if "sgl_kernel" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [x.name for x in node.names] if isinstance(node, ast.Import) else []
            if any((name or "").split(".")[0] == "sgl_kernel" for name in names):
                statements.add(ast.unparse(node))
    assert len(statements) > 50 and any("sgl_kernel.quantization" in x for x in statements)
    assert python(bare[0], "\n".join([*sorted(statements), "print('all')"])) == "all\n"


def test_sglang_imports_what_it_needs_on_a_card(bare):
    """Made believe that there is one."""
    code = """
import os
from types import SimpleNamespace
import torch

card = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 << 30, multi_processor_count=132)
answers = dict(is_available=True, device_count=1, current_device=0, get_device_name="NVIDIA H200")
answers |= dict(get_device_capability=(9, 0), get_device_properties=card)
for name, answer in answers.items():
    setattr(torch.cuda, name, lambda *_, answer=answer: answer)
os.environ["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] = "1"
import sglang.srt.layers.attention.dsa.dsa_indexer
import sglang.srt.layers.quantization.gguf
import sglang.srt.managers.scheduler
import sglang.srt.models.deepseek_v2
from sglang.srt.platforms import current_platform

print(type(current_platform).__name__)
"""
    assert python(bare[0], code).splitlines()[-1] == "GpuPlatform"


@pytest.mark.filterwarnings("ignore::UserWarning:sglang.*", "ignore::DeprecationWarning")
def test_the_platform_has_what_sglang_asks_of_one():
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.model_executor.runner_backend import FullCudaGraphBackend

    from bench.engine.gpu_platform import GpuPlatform

    platform = GpuPlatform()
    assert platform.is_out_of_tree() and platform.device_type == "cuda"
    assert platform.get_graph_runner_cls() is DecodeCudaGraphRunner
    assert platform.get_full_graph_backend_cls() is FullCudaGraphBackend


def answers(case) -> dict[str, Any]:
    """As an engine would give them, made up; the prompts' log-probabilities are none of a model."""
    said = [dict(tokens=[5, 6], prompt=[-1.0] * (n - 1), new=[-2.0, -3.0]) for n in PROMPTS]
    found: dict[str, Any] = dict(alone=said, batch=copy.deepcopy(said), up_s=1.0, first_request_s=1.0)
    found |= dict(ms_per_step_one=1.0, ms_per_step_batch=1.0)
    if case.radix:
        found |= dict(again=[[5, 6]] * len(PROMPTS), cached_tokens=[0] * 7 + [640])
    return found


def test_cases_are_all_ways_to_run_a_model_and_the_first_is_without_graphs():
    assert len(set(CASES)) == len(CASES) == len(GRAPHS) + len(DENSE) + len(RADIX)
    assert {(x.lane, x.graphs) for x in GRAPHS} >= {("stream", "full"), ("stream", "breakable"), ("jit", "disabled")}
    for case in CASES:
        first = next(x for x in CASES if x.model == case.model)
        assert first in DENSE or (first.lane, first.graphs) == ("stream", "disabled")
        assert case.arguments()["cuda_graph_backend_decode"] == case.graphs and case.environment()
    assert [len(x) for x in prompts(512)] == list(PROMPTS) and prompts(512) == prompts(512)


def test_one_bit_of_a_log_probability_is_a_fault():
    base, other = GRAPHS[0], GRAPHS[1]
    given = {base: answers(base), other: answers(other)}
    assert command.judge(base, given)[1] == [] and command.judge(other, given)[1] == []
    given[other]["batch"][3]["new"][1] -= 2**-20
    line, faults = command.judge(other, given)
    assert (
        line["alike"] == "differs" and len(faults) == 1 and "prompt 3 batch: expected the bits of stream" in faults[0]
    )


def test_tokens_that_a_batch_changes_are_a_fault_from_the_second_prompt_on():
    base = GRAPHS[0]
    given = {base: answers(base)}
    given[base]["batch"][0]["tokens"] = [5, 7]
    assert command.judge(base, given)[1] == []
    given[base]["batch"][1]["tokens"] = [5, 7]
    assert "6 have the tokens in a batch that they have alone" in command.judge(base, given)[1][0]


def test_a_radix_cache_that_gives_nothing_or_something_else_is_a_fault():
    base, radix = GRAPHS[0], RADIX[0]
    given = {base: answers(base), radix: answers(radix)}
    assert command.judge(radix, given)[1] == []
    given[radix]["cached_tokens"] = [0] * 8
    given[radix]["again"] = [[5, 7]] * 8
    assert len(command.judge(radix, given)[1]) == 2


def test_made_up_log_probabilities_are_too_far_from_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "checkpoint", partial(checkpoint, cache=tmp_path))
    line, faults = command.judge(DENSE[0], {DENSE[0]: answers(DENSE[0])})
    assert line["mean_abs_dlogprob"] > 1 and "|Δ log-probability|: expected at most 0.012 and 0.05" in faults[0]


def test_when_the_first_engine_does_not_start_the_others_are_not_tried(monkeypatch):
    tried = []

    def ends(case, folder):
        tried.append(case)
        raise click.ClickException("ended with exit code 1")

    monkeypatch.setattr(command, "one", ends)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    ran = CliRunner().invoke(main, ["engine", "--save"])
    assert ran.exit_code == 1 and tried == [CASES[0]] and ran.output.count("ended with exit code 1") == 1


def test_without_a_gpu_it_says_so():
    ran = CliRunner().invoke(main, ["engine"])
    assert ran.exit_code == 1 and "engine: expected a GPU that torch sees, got none" in ran.output
