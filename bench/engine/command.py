"""Runs the cases one after the other, compares them, and keeps a line of each."""

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np
import torch
from rich.console import Console

from bench import results
from bench.engine import machine
from bench.engine.case import CASES, PROMPTS, Case, prompts
from bench.stream.command import table, write
from bridge.demo import BUILD, compare, hf
from bridge.demo.tiny import checkpoint
from jax_mla.layouts import KV_FP8_656

PACKAGES = ("sglang", "jax", "torch", "triton", "transformers")
SECONDS = 300


def run(match: str, json_file: Path | None, save: bool) -> None:
    if not torch.cuda.is_available():
        raise click.ClickException("engine: expected a GPU that torch sees, got none; on a CPU: python -m bridge demo")
    wanted = [case for case in CASES if match in str(case)]
    if not wanted:
        raise click.ClickException(f"--match: no case has {match!r} in it; they are {'; '.join(map(str, CASES))}")
    jax.config.update("jax_platforms", "cpu")  # the engines have the card
    console, device = Console(width=None if sys.stdout.isatty() else 160), torch.cuda.get_device_name()
    context = dict(device=device, date=today(), commit=results.commit(), versions=versions())
    lines: list[dict[str, Any]] = []
    answers: dict[Case, dict] = {}
    faults: list[str] = []

    def wrong(*found: str) -> None:
        for fault in found:
            console.print(fault, style="bold red", markup=False, highlight=False, soft_wrap=True)
        faults.extend(found)

    with tempfile.TemporaryDirectory() as temporary:
        for what in machine.supply(Path(temporary)):
            console.print(f"not installed here, supplied: {what}", highlight=False)
        for case in wanted:
            begun = time.monotonic()
            try:
                answers[case] = one(case, Path(temporary))
            except click.ClickException as error:
                wrong(f"{case}: {error.message}")
                if not answers:  # what kept the first from ending well keeps the others
                    break
                continue
            line, found = judge(case, answers)
            wrong(*found)
            lines.append(context | dict(what="engine") | line)
            text = f"{case}: {time.monotonic() - begun:.0f} s: {line}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            if json_file:
                write(json_file, lines)
    if lines:
        console.print(table([{"case": case_of(x)} | brief(x) for x in lines], {}))
    if faults:
        raise click.exceptions.Exit(1)
    if save:
        path = results.RESULTS / "serving" / results.path_of(device).name
        write(path, lines)
        console.print(f"kept in bench/results/serving/{path.name}")


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def versions() -> dict[str, str]:
    """Of what is installed of ``PACKAGES``."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError as error:
            raise click.ClickException(f"engine: expected {name} to be installed ({error})") from None
    return found


def case_of(line: dict) -> str:
    return ", ".join(str(line[name]) for name in ("lane", "graphs", "index_topk", "kv_cache_dtype"))


def brief(line: dict) -> dict:
    names = ("up_s", "first_request_s", "ms_per_step_one", "ms_per_step_batch", "alike", "batch_as_alone")
    return {name: line[name] for name in names}


def one(case: Case, folder: Path) -> dict:
    """What the engine of ``case`` answered, in a process whose log stays in ``build/engine``."""
    model = checkpoint(case.tiny)
    logs, result = BUILD / "engine", folder / f"{case.name}.json"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{case.name}.log"
    settings = dict(SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK="1", HF_HUB_OFFLINE="1", TORCH_COMPILE_DISABLE="1")
    paths = os.pathsep.join([str(folder), str(machine.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = settings | os.environ | case.environment() | {"PYTHONPATH": paths}
    environment.pop("JAX_PLATFORMS", None)
    command = [sys.executable, "-m", "bench.engine.child", str(CASES.index(case)), str(model), str(result)]
    with log.open("w") as output:
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            raise click.ClickException(f"no end after {SECONDS} s; {tail(log)}") from None
    if done.returncode or not result.exists():
        raise click.ClickException(f"ended with exit code {done.returncode}; {tail(log)}")
    return json.loads(result.read_text())


def tail(log: Path) -> str:
    """The end of a log, and where it is."""
    lines = log.read_text(errors="replace").splitlines()[-25:]
    return "\n".join([f"the end of build/engine/{log.name}:", *lines])


def judge(case: Case, answers: dict[Case, dict]) -> tuple[dict[str, Any], list[str]]:
    """The line of ``case``, and what is wrong with it: to the first case of a model its others must be equal."""
    mine, faults = answers[case], []
    line: dict[str, Any] = dict(
        lane=case.lane,
        graphs=case.graphs,
        index_topk=case.index_topk,
        kv_cache_dtype=case.kv_cache_dtype,
        radix_cache=case.radix,
        **{name: mine[name] for name in ("up_s", "first_request_s", "ms_per_step_one", "ms_per_step_batch")},
    )
    line["batch_as_alone"] = same = sum(
        x["tokens"] == y["tokens"] for x, y in zip(mine["alone"], mine["batch"], strict=True)
    )
    if same < len(PROMPTS) - 1:  # another shape of a product rounds otherwise, and of two tokens alike takes the other
        faults.append(f"{case}: of {len(PROMPTS)} prompts, {same} have the tokens in a batch that they have alone")
    first = next(x for x in answers if x.model == case.model)
    line["alike"] = "is compared with" if first is case else "bitwise"
    for name in () if case.radix else ("alone", "batch"):
        for number, (x, y) in enumerate(zip(mine[name], answers[first][name], strict=True)):
            if x != y:
                line["alike"] = "differs"
                faults.append(f"{case}: prompt {number} {name}: expected the bits of {first}, got others")
    if case.radix:
        line |= radix(case, mine, answers[first], faults)
    if case.index_topk >= max(PROMPTS) + len(mine["alone"][0]["tokens"]):
        line |= rounding(case, mine["alone"], faults)
    return line, faults


def radix(case: Case, mine: dict, first: dict, faults: list[str]) -> dict[str, Any]:
    """Asked again, a prompt comes from the cache, and its tokens are the same."""
    same = sum(x == y["tokens"] for x, y in zip(mine["again"], first["alone"], strict=True))
    if same < len(PROMPTS) - 1:
        faults.append(f"{case}: {same} of {len(PROMPTS)} prompts have the tokens again that they had without the cache")
    if not sum(mine["cached_tokens"]):
        faults.append(f"{case}: expected tokens from the cache, got none")
    return dict(alike=f"{same} of {len(PROMPTS)} tokens", cached_tokens=mine["cached_tokens"])


def rounding(case: Case, answers: list[dict], faults: list[str]) -> dict[str, float]:
    """How far from transformers in fp32, whose cache rounds alike; the demo's bounds."""
    model = hf.load(checkpoint(case.tiny)).exact
    layout = KV_FP8_656 if case.kv_cache_dtype == "fp8_e4m3" else None
    away = []
    for ids, said in zip(prompts(case.tiny.vocab_size), answers, strict=True):
        expected = hf.logprobs(model, ids + said["tokens"], layout)
        away.append(np.abs(np.array(said["prompt"] + said["new"]) - expected))
    every = np.concatenate(away)
    mean, largest = float(every.mean()), float(every.max())
    if not (mean <= compare.MEAN and largest <= compare.MAX):
        bounds = f"{compare.MEAN} and {compare.MAX}"
        faults.append(f"{case}: |Δ log-probability|: expected at most {bounds}, got {mean:.4f} and {largest:.4f}")
    return dict(mean_abs_dlogprob=mean, max_abs_dlogprob=largest)
