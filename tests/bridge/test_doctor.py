"""The doctor: a healthy machine, every sick one we know, and a report that is whole in each case."""

import json

import pytest

from bridge import doctor
from bridge.sglang import contract
from bridge.stream import cache
from tests.bridge.stream.fake import program

VERSIONS = {"jax": "0.11.2", "jaxlib": "0.11.2", "torch": doctor.TORCH}


def named(findings, name):
    return [finding for finding in findings if finding.name == name]


def statuses(check) -> set[str]:
    return {finding.status for finding in check()}


@pytest.fixture
def versions(monkeypatch):
    """What is installed, to be changed by a test."""
    packages = dict(VERSIONS)
    monkeypatch.setattr(doctor, "installed", packages.get)
    return packages


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM", doctor.PREALLOCATE):
        monkeypatch.delenv(name, raising=False)


def test_this_machine_can_serve(capsys):
    assert doctor.main(json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["able"] is True
    assert {f["name"] for f in said["findings"]} >= {
        *("python", "jax", "sglang", "torch", "plugin", "host memory", "XLA memory"),
        *("device", "fp8", "dlpack", "write in place", "kernel", "runtimes", "programs"),
    }
    assert all(f["status"] == "ok" or f["advice"] for f in said["findings"])
    assert doctor.main(json=False) == 0
    text = capsys.readouterr().out
    assert text.rstrip().endswith("This machine can serve.")
    assert all(f["name"] in text for f in said["findings"])


def test_a_broken_check_is_a_finding_and_the_others_still_run(monkeypatch, capsys):
    def device():
        raise ImportError("libcuda.so.1: cannot open shared object file\nand more")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (doctor.python, device, doctor.kernel))
    assert doctor.main(json=False) == 1
    text = capsys.readouterr().out
    assert "fail  device          ImportError: libcuda.so.1: cannot open shared object file" in text
    assert text.count("\nok    kernel") == 1 and "can't serve" in text


@pytest.mark.parametrize(
    "change, found",
    [
        ({"jaxlib": "0.12.0"}, "jaxlib 0.12.0"),
        ({"jax-rocm7-plugin": "0.12.0", "jax-rocm7-pjrt": "0.12.0"}, "jax-rocm7-plugin 0.12.0"),
        ({"jax-rocm7-plugin": "0.11.2", "jax-rocm7-pjrt": "0.11.1"}, "jax-rocm7-pjrt 0.11.1"),
        ({"jax-cuda13-plugin": "0.12.0"}, "jax-cuda13-plugin 0.12.0"),
    ],
)
def test_jaxs_parts_must_be_one_version(versions, change, found):
    versions.update(change)
    (finding,) = doctor.jax_versions()
    assert finding.status == "fail" and found in finding.found
    assert "pip install jax==0.11.2 jaxlib==0.11.2" in finding.advice


@pytest.mark.parametrize("version", ["0.11.1", "0.13.0", "0.4.35"])
def test_jax_outside_of_what_is_supported(versions, version):
    versions.update(jax=version, jaxlib=version)
    (finding,) = doctor.jax_versions()
    assert finding.status == "fail" and "0.11.2 to below 0.13" in finding.advice


def test_a_fix_release_of_jax_goes_with_its_plugins(versions):
    versions.update({"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "jax-rocm7-plugin": "0.12.0", "jax-rocm7-pjrt": "0.12.0"})
    assert statuses(doctor.jax_versions) == {"ok"}


def test_no_jax_no_torch_no_sglang(versions, monkeypatch):
    versions.clear()
    monkeypatch.setattr(contract, "installed", lambda: None)
    assert statuses(doctor.jax_versions) == statuses(doctor.serving_versions) == {"fail"}


def test_another_sglang_and_another_torch(versions, monkeypatch):
    monkeypatch.setattr(contract, "installed", lambda: "0.5.24")
    versions["torch"] = "2.11.0+cu130"
    sglang, torch = doctor.serving_versions()
    assert sglang.status == "fail" and "0.5.23" in sglang.advice and "0.5.24" in sglang.advice
    assert torch.status == "warn" and doctor.TORCH in torch.advice


@pytest.mark.parametrize("version, status", [((3, 11), "fail"), ((3, 12), "ok"), ((3, 13), "warn")])
def test_python(monkeypatch, version, status):
    monkeypatch.setattr(doctor.sys, "version_info", version)
    assert statuses(doctor.python) == {status}


def test_plugin_not_installed(monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [])
    assert statuses(doctor.plugin) == {"fail"}


def test_plugin_shut_out_by_the_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "others")
    monkeypatch.setenv("SGLANG_PLATFORM", "other")
    findings = list(doctor.plugin())
    assert [f.status for f in findings if "SGLANG_PLUGINS" in f.found] == ["fail"]
    assert [f.status for f in findings if "SGLANG_PLATFORM" in f.found] == ["fail"]
    monkeypatch.setenv("SGLANG_PLUGINS", "jax_mla, jax_mla_cpu")
    monkeypatch.setenv("SGLANG_PLATFORM", "jax_mla_cpu")
    assert statuses(doctor.plugin) == {"ok"}


def test_a_wrong_kernel_is_found(monkeypatch):
    import jax_mla.ops.sparse_mla as op

    real = op.sparse_mla

    def wrong(*arrays, implementation=None, **options):
        out, lse = real(*arrays, implementation=implementation, **options)
        return (out if implementation == "reference" else out * 1.1), lse

    monkeypatch.setattr(op, "sparse_mla", wrong)
    (finding,) = doctor.kernel()
    assert finding.status == "fail" and "do not serve" in finding.advice


@pytest.mark.parametrize("value, status", [(None, "ok"), ("false", "ok"), ("true", "fail")])
def test_preallocation_on_a_gpu(monkeypatch, value, status):
    import torch

    from bridge import dlpack

    monkeypatch.setattr(dlpack, "torch_device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100 << 30, 141 << 30))
    if value is not None:
        monkeypatch.setenv(doctor.PREALLOCATE, value)
    monkeypatch.setenv("JAX_MLA_LANE", "jit")
    (finding,) = named(doctor.memory(), "XLA memory")
    assert finding.status == status and doctor.PREALLOCATE in finding.found
    monkeypatch.setenv("JAX_MLA_LANE", "stream")
    (finding,) = named(doctor.memory(), "XLA memory")
    assert finding.status == "ok" and "keeps JAX on the CPU" in finding.found


@pytest.mark.parametrize("lane, status", [("stream", "ok"), ("jit", "fail")])
def test_jax_on_the_cpu_will_do_for_the_stream_lane_alone(monkeypatch, lane, status):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("JAX_MLA_LANE", lane)
    (finding,) = named(doctor.device(), "device")
    assert finding.status == status


def test_two_runtimes_in_a_process_are_named(monkeypatch):
    files = {"libamdhip64.so": ["/a/libamdhip64.so.6", "/b/libamdhip64.so.7"], "libcuda.so": []}
    monkeypatch.setattr("bridge.stream.driver.loaded", files.get)
    (finding,) = doctor.runtimes()
    assert finding.status == "fail" and "/a/libamdhip64.so.6, /b/libamdhip64.so.7" in finding.found and finding.advice
    files["libamdhip64.so"].pop()
    assert [(f.status, f.found) for f in doctor.runtimes()] == [("ok", "/a/libamdhip64.so.6")]
    files["libamdhip64.so"].clear()
    assert [f.status for f in doctor.runtimes()] == ["ok"]


def test_what_the_cache_holds_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_MLA_CACHE", str(tmp_path))
    (finding,) = doctor.programs()
    assert finding.status == "ok" and finding.found == f"none, in {tmp_path}"
    for i in range(3):
        cache.put("example", f"{i}", program(arch="gfx950" if i else "sm_90"))
    (finding,) = doctor.programs()
    assert finding.found == f"sm_90 example (1), gfx950 example (2), in {tmp_path}"
