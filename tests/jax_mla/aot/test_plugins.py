"""Compilers that are not there, or of another version, are named, with what to do; stand-ins are built once."""

import ctypes
import subprocess
import sys

import jax
import pytest

from jax_mla.aot import plugins
from jax_mla.aot.plugins import Unavailable, library, stand_ins, wanted


def install(folder, platform: str, version: str | None):
    """A wheel without a compiler in it."""
    wheel, path = plugins.WHEELS[platform]
    (folder / path).parent.mkdir(parents=True)
    (folder / path).write_bytes(b"")
    if version:
        info = folder / f"{wheel.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wheel}\nVersion: {version}\n")


@pytest.mark.parametrize("platform", plugins.WHEELS)
def test_library(platform, tmp_path, monkeypatch):
    own, site, other = (tmp_path / name for name in ("own", "site", "other"))
    monkeypatch.setattr(plugins, "FOLDER", own)
    monkeypatch.setattr("sys.path", [str(site), str(other)])
    wheel, path = plugins.WHEELS[platform]
    with pytest.raises(
        Unavailable, match=rf"{wheel}: expected in .*own or on Python's path.*uv pip install .*{wheel}=="
    ):
        library(platform)
    install(other, platform, jax.__version__)
    assert library(platform) == other / path
    install(site, platform, "0.0.1")
    with pytest.raises(Unavailable, match=rf"expected {jax.__version__}, JAX's version, got 0\.0\.1 in .*site"):
        library(platform)
    install(own, platform, None)
    with pytest.raises(Unavailable, match=r"got one of no version in .*own"):
        library(platform)


def test_stand_ins(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = ["libjaxmlatest.so.7", "libjaxmlatestempty.so.1"]
    folder = stand_ins(names, ["hipInit", "_ZN3foo3barEv"])
    assert folder.parent == tmp_path / "jax-mla" and sorted(x.name for x in folder.iterdir()) == sorted(names)
    assert [x.name for x in folder.parent.iterdir()] == [folder.name]
    first, empty = (ctypes.CDLL(str(folder / name)) for name in names)
    assert first.hipInit() == first._ZN3foo3barEv() == plugins.HIP_ERROR_NO_DEVICE
    assert not hasattr(empty, "hipInit")
    monkeypatch.setenv("PATH", "")  # what is there needs no compiler
    assert stand_ins(names, ["hipInit", "_ZN3foo3barEv"]) == folder
    with pytest.raises(Unavailable, match="no cc: apt-get install gcc"):
        stand_ins(names, ["hipInit"])


def test_a_compiler_that_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Unavailable, match="stand-ins.*-shared"):
        stand_ins(["lib.so"], ["not a name"])
    assert list((tmp_path / "jax-mla").iterdir()) == []


def test_wanted():
    """The libraries of ROCm, and nothing of the C library's."""
    rocm = library("rocm")
    needed, symbols = wanted(rocm)
    assert "libamdhip64.so.7" in needed and not any(name.startswith(("libc.", "libstdc++")) for name in needed)
    assert "hipMalloc" in symbols and "malloc" not in symbols and len(symbols) > 300


def test_the_plugins_need_no_stand_in_for_cuda():
    needed, _ = wanted(library("cuda"))
    assert needed == []


def test_importing_jax_is_quiet():
    """Nothing of the compilers' folder is seen by JAX."""
    code = "import jax; print(jax.devices())"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "CpuDevice" in done.stdout
