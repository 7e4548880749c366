"""The plugin, in processes of its own: it registers, or says what is wrong; and what it holds on to of SGLang."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bridge.demo.tiny import Tiny, checkpoint
from bridge.sglang import arguments, contract

OTHER_VERSION = """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.5.99" if name == "sglang" else real(name)
"""
"""As a ``sitecustomize.py``: every Python process takes SGLang for another version."""


def python(*arguments: str, folder: Path | None = None, seconds: float = 240) -> subprocess.CompletedProcess:
    """Runs Python in a process of its own, ``folder`` first on its path."""
    import os

    paths = [str(folder)] if folder else []
    paths += [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, paths))}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)


def test_the_installed_sglang_has_all_that_the_bridge_uses():
    assert contract.problem() is None
    assert contract.missing() == []


def test_entry_points_are_installed():
    plugins = {e.name: e.value for e in importlib.metadata.entry_points(group="sglang.srt.plugins")}
    platforms = {e.name: e.value for e in importlib.metadata.entry_points(group="sglang.srt.platforms")}
    assert plugins["jax_mla"] == "bridge.sglang.plugin:register"
    assert platforms["jax_mla_cpu"] == "bridge.sglang.cpu:activate"


def test_register():
    """In one process: the name is accepted, CUDA graphs go off for it and for nothing else, and JAX is not loaded."""
    model = checkpoint(Tiny())
    ran = python(
        "-c",
        f"""
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
from sglang.srt.plugins import load_plugins
load_plugins()
assert "jax" not in sys.modules and "sglang.srt.models.deepseek_v2" not in sys.modules
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.server_args import prepare_server_args
from sglang.srt.arg_groups.overrides import resolving_view
from bridge.sglang import plugin
assert ATTENTION_BACKENDS["jax_mla"] is plugin._create
def resolved(*arguments):
    args = prepare_server_args(["--model-path", {str(model)!r}, "--device", "cpu", *arguments])
    args.resolve_once()
    return resolving_view(args)
ours = resolved("--attention-backend", "jax_mla", "--kv-cache-dtype", "fp8_e4m3")
assert (ours.attention_backend, ours.page_size, ours.kv_cache_dtype) == ("jax_mla", 64, "fp8_e4m3")
graphs = ours.cuda_graph_config
assert graphs.decode.backend == graphs.prefill.backend == "disabled", graphs
for wrong in (["--enable-two-batch-overlap"], ["--prefill-attention-backend", "torch_native"]):
    try:
        resolved("--attention-backend", "jax_mla", *wrong)
    except ValueError as error:
        print("refused:", error)
import torch
if not torch.accelerator.is_available():
    try:
        torch.cuda.get_device_capability()
    except (RuntimeError, AssertionError):
        print("torch.cuda is as it was")
    try:
        resolved("--attention-backend", "torch_native")
    except Exception as error:
        print("not ours:", error)
assert "jax" not in sys.modules
print("done")
""",
    )
    assert ran.returncode == 0, ran.stderr
    assert "done" in ran.stdout
    lines = [line for line in ran.stderr.splitlines() if "jax_mla" in line]
    registered = [line for line in lines if "registered --attention-backend jax_mla with SGLang 0.5.23" in line]
    assert len(registered) == 1, lines
    assert any("the jit lane; CUDA graphs: prefill disabled, decode disabled" in line for line in lines), lines
    assert "refused: --enable-two-batch-overlap: expected False, got True" in ran.stdout
    assert "refused: --attention-backend: expected jax_mla in both phases, got prefill torch_native" in ran.stdout
    if not torch.accelerator.is_available():
        assert "torch.cuda is as it was" in ran.stdout
        assert "not ours:" in ran.stdout  # SGLang's own failure without a GPU: the stand-in is for this backend only


def test_another_version_of_sglang_is_a_clear_error_and_not_an_invalid_choice(tmp_path):
    """The user's own command line, on an SGLang that says it is another version."""
    (tmp_path / "sitecustomize.py").write_text(OTHER_VERSION)
    server = ["-m", "sglang.launch_server", "--model-path", str(checkpoint(Tiny())), "--device", "cpu"]
    ran = python(*server, "--attention-backend", "jax_mla", folder=tmp_path)
    assert ran.returncode != 0
    last = ran.stderr.strip().splitlines()[-1]
    assert "written for SGLang 0.5.23, and SGLang 0.5.99 is installed; install sglang==0.5.23" in last, ran.stderr
    assert "invalid choice" not in ran.stderr


def test_problem_names_both_versions_and_what_to_do(monkeypatch):
    monkeypatch.setattr(contract, "installed", lambda: "0.5.24")
    assert "SGLang 0.5.23, and SGLang 0.5.24 is installed; install sglang==0.5.23" in str(contract.problem())
    monkeypatch.setattr(contract, "installed", lambda: None)
    assert "SGLang is not installed; pip install" in str(contract.problem())
    monkeypatch.setattr(contract, "installed", lambda: contract.VERSION)
    monkeypatch.setattr(contract, "missing", lambda: ["srt/a.py:f"])
    assert "lacks srt/a.py:f" in str(contract.problem())


def test_a_renamed_function_is_found_missing(tmp_path):
    """Names are looked for in source text: in classes, behind imports and in branches too."""
    for file in contract.NAMES:
        source = contract._source_root() / file
        target = tmp_path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text().replace("def forward_native(", "def forward_torch("))
    (tmp_path / "srt/platforms/cpu.py").unlink()
    assert contract.missing(tmp_path) == [
        "srt/layers/attention/dsa/dsa_indexer.py:Indexer.forward_native",
        "srt/platforms/cpu.py:CpuDeviceMixin",
    ]


def view(**changed):
    """SGLang's resolving view with this backend and defaults."""
    fields = {name: expected for name, (expected, _) in arguments.UNSUPPORTED.items()}
    backends = {"attention_backend": "jax_mla", "prefill_attention_backend": None, "decode_attention_backend": None}
    return SimpleNamespace(**(fields | backends | changed))


@pytest.mark.parametrize(
    "field, value",
    [
        ("speculative_algorithm", "EAGLE"),
        ("enable_two_batch_overlap", True),
        ("enable_pdmux", True),
        ("enable_prefill_cp", True),
        ("dcp_size", 2),
        ("enable_hisparse", True),
        ("enable_unified_memory", True),
        ("dllm_algorithm", "x"),
        ("decode_attention_backend", "dsa"),
    ],
)
def test_what_is_not_served_is_refused_by_its_option(field, value, sglang):
    arguments.refuse_unsupported(view())
    option = "--attention-backend" if field == "decode_attention_backend" else f"--{field.replace('_', '-')}"
    with pytest.raises(ValueError, match=rf"^{option}: expected .*, got .*{value}"):
        arguments.refuse_unsupported(view(**{field: value}))


def test_all_that_is_not_served_is_named_at_once(sglang):
    with pytest.raises(ValueError, match="--dcp-size.*; --enable-hisparse"):
        arguments.refuse_unsupported(view(dcp_size=4, enable_hisparse=True))


def test_the_cpu_platform_stays_away_from_accelerators_and_from_sglangs_cpu_engine(monkeypatch, sglang):
    from bridge.sglang import cpu

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    assert cpu.activate() == "bridge.sglang.cpu.CpuPlatform"
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert cpu.activate() is None
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert cpu.activate() is None


@pytest.mark.parametrize(
    "lane, given, expected",
    [
        ("", {}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cpu"}),
        ("", {"JAX_PLATFORMS": ""}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cpu"}),
        ("", {"JAX_PLATFORMS": "cuda"}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": "cuda"}),
        ("jit", {}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_PLATFORMS": None}),
        ("jit", {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}),
    ],
)
def test_what_jax_is_told_on_a_gpu(monkeypatch, caplog, lane, given, expected):
    """In a process that hasn't imported it; what someone set stays, with a warning."""
    import os

    from bridge.sglang import plugin

    monkeypatch.setenv("JAX_MLA_LANE", lane)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("INFO", logger="jax_mla"):
        plugin._settle_jax()
    assert {name: os.environ.get(name) for name in expected} == expected
    foreign = [name for name, value in given.items() if value]
    assert [name for name in foreign if f"{name}={given[name]} is left as it is" in caplog.text] == foreign
