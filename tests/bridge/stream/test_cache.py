"""What is kept on disk, and when it counts."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import jax
import pytest

from bridge.stream import Function, cache
from bridge.stream.program import Array
from tests.bridge.stream.fake import program

ARRAYS = (Array((4, 8), "float32"),)


def make(**static):
    raise AssertionError("nothing is to be compiled")


def other_make(**static):
    raise AssertionError("nothing is to be compiled")


F = Function("f", make, ("x",), ("y",))


def key(function=F, arrays=ARRAYS, static=None, arch="sm_90"):
    return cache.key(function, arrays, dict(k=2048, layout="bf16") if static is None else static, arch)


def test_a_key_is_of_everything_that_decides(monkeypatch):
    keys = {
        key(),
        key(replace(F, name="g")),
        key(replace(F, make=other_make)),
        key(replace(F, make=lambda **static: lambda x: x)),
        key(replace(F, results=("z",))),
        key(replace(F, results=(), written=("x",))),
        key(arrays=(Array((4, 9), "float32"),)),
        key(arrays=(Array((4, 8), "bfloat16"),)),
        key(static=dict(k=2048, layout="fp8_656")),
        key(static=dict(k=2048.0, layout="bf16")),
        key(static=dict(k=2048)),
        key(static=dict(k=True)),
        key(static=dict(k=1)),
        key(static=dict(k=0.0)),
        key(static=dict(k=-0.0)),
        key(arch="gfx942"),
    }
    assert len(keys) == 16
    assert key(static=dict(layout="bf16", k=2048)) == key()
    with jax.default_matmul_precision("highest"):
        assert key() not in keys
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=true")
    assert key() not in keys
    monkeypatch.undo()
    monkeypatch.setattr(cache, "sources", lambda: "other sources")
    assert key() not in keys


def test_sources_are_those_of_jax_mla():
    script = "from bridge.stream import cache; print(cache.sources())"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == cache.sources()


def test_static_arguments_are_plain():
    with pytest.raises(TypeError, match="f: layout: expected text, a number or a bool, got object"):
        key(static=dict(layout=object()))


def test_what_was_built_once_is_not_built_again(cache_folder):
    built = []

    def build():
        built.append(1)
        return program()

    assert cache.get("f", key()) is None
    for _ in range(2):
        assert cache.get_or("f", key(), build) == program()
    assert built == [1] and [x.name for x in cache_folder.iterdir()] == [f"f-{key()}.program"]
    assert list(map(str, cache_folder.glob(".*"))) == []
    assert cache.kept() == [program()] and cache.kept("gfx942") == []


def test_sources_that_changed_while_a_process_ran_are_not_kept(cache_folder, monkeypatch, caplog, tmp_path):
    """What it runs may be older than what it hashes."""
    assert not cache.changed()
    file = tmp_path / "edited.py"
    file.touch()
    os.utime(file, (time.time() + 2, time.time() + 2))
    assert cache.changed([file])
    os.utime(file, (0, 0))
    assert not cache.changed([file])
    monkeypatch.setattr(cache, "changed", lambda: True)
    with caplog.at_level("WARNING", logger="jax_mla"):
        assert cache.get_or("f", key(), program) == program()
    assert "f is not kept: its sources were changed while this process ran" in caplog.text
    assert list(cache_folder.iterdir()) == []


def test_a_folder_that_can_t_be_written_is_named_and_what_was_built_serves(monkeypatch, caplog, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_MLA_CACHE", str(tmp_path / "file" / "below"))
    with caplog.at_level("WARNING", logger="jax_mla"):
        assert cache.get_or("f", key(), program) == program()
    assert "f is not kept: " in caplog.text and "; JAX_MLA_CACHE says where programs are kept" in caplog.text


def test_of_several_processes_one_builds(cache_folder):
    script = """
import sys, time
from bridge.stream import cache
from tests.bridge.stream.fake import program
def build():
    print("built")
    time.sleep(1)
    return program()
assert cache.get_or("f", sys.argv[1], build) == program()
"""
    started = [
        subprocess.Popen([sys.executable, "-c", script, key()], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert sorted(x.communicate()[0] for x in started) == ["", "built\n"] and [x.returncode for x in started] == [0, 0]
    assert [x.name for x in cache_folder.iterdir()] == [f"f-{key()}.program"]


def test_settings_are_the_same_with_and_without_jax(monkeypatch):
    with_jax = key()
    monkeypatch.delitem(sys.modules, "jax")
    assert key() == with_jax
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    assert key() != with_jax


def test_other_versions_are_built_anew(caplog):
    cache.put("f", key(), program(versions={"jax": "0.0.1"}))
    with caplog.at_level("INFO", logger="jax_mla"):
        assert cache.get("f", key()) is None
    assert "was built by jax 0.0.1" in caplog.text
    cache.put("f", key(), program(versions={"a-package-that-is-not-here": "1"}))
    assert cache.get("f", key()) is not None


def test_a_damaged_file_is_an_error_that_names_it(cache_folder, caplog):
    path = cache.put("f", key(), program())
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{path}: program: expected a file of format 1.*; delete it"):
        cache.get("f", key())
    with caplog.at_level("WARNING", logger="jax_mla"):
        assert cache.kept() == []
    assert str(path) in caplog.text


WITHOUT_JAX = """
import sys
sys.modules["jax"] = sys.modules["jaxlib"] = None  # importing either is an ImportError
import torch
from bridge.stream import Function, cache
from bridge.stream.driver import CUDA
from bridge.stream.lane import Function, Stream
from tests.bridge.stream.fake import ARCH, FakeDriver, program
def make(**static):
    raise AssertionError("nothing is to be compiled")
f = Function("example", make, ("x", "pool"), ("copied",), ("pool",))
if sys.argv[2] == "put":
    cache.put("example", cache.key(f, program().parameters, dict(k=3), ARCH), program())
driver = FakeDriver(CUDA, sys.argv[1])
pool, copied = Stream(driver, ARCH)(f, torch.arange(64, dtype=torch.uint8), torch.zeros(4, 8), k=3)
print(copied[:48].tolist() == list(range(48)), [x[0] for x in driver.launches()])
"""


def test_what_is_kept_runs_in_a_process_without_jax(fake_library):
    for how in ("put", "get"):
        command = [sys.executable, "-c", WITHOUT_JAX, str(fake_library), how]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout.strip() == "True ['copy_4', 'fill_2']", done.stderr


def test_what_is_kept_is_anyone_s_to_read_and_nothing_else_stays(cache_folder, monkeypatch):
    path = cache.put("f", key(), program())
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask

    def full(self, data):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        cache.put("g", key(), program())
    assert list(cache_folder.iterdir()) == [path]


def test_a_program_s_head_is_json_that_a_person_can_read(cache_folder):
    import zipfile

    path = cache.put("f", key(), replace(program(), versions={"jax": "1"}))
    head = json.loads(zipfile.ZipFile(path).read("program.json"))
    assert head["versions"] == {"jax": "1"} and head["launches"][0]["kernel"] == "copy_4"
