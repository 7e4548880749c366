"""What reaches the driver, CUDA's and HIP's: recorded by one that is none."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from bridge.stream.driver import CUDA, HIP, Driver, DriverError, loaded
from bridge.stream.launch import Launcher
from bridge.stream.program import Array, Launch, Result
from tests.bridge.stream import fake
from tests.bridge.stream.fake import ARCH, ELF, STREAM, program


@pytest.fixture
def tensors():
    return torch.arange(64, dtype=torch.uint8), torch.zeros(4, 8)


@pytest.fixture
def out():
    return [torch.zeros(64, dtype=torch.uint8)]


def test_a_launch_has_the_grid_the_stream_and_the_addresses(driver, tensors, out):
    launcher = Launcher(program(), driver, ARCH)
    asked = driver.log()
    assert [x[0] for x in asked].count("load") == 2
    wanted = [["attribute", "8", "100000"]] if driver.interface is CUDA else []
    assert [x for x in asked if x[0] == "attribute"] == wanted
    first, second = launcher(*tensors, out=out)
    (copy, how, addresses), (fill, how_2, addresses_2) = driver.launches()
    assert (copy, fill) == ("copy_4", "fill_2")
    assert how == [48, 2, 3, 128, 1, 1, 100_000, STREAM] and how_2 == [16, 1, 1, 64, 1, 1, 0, STREAM]
    temporary = addresses[2] - 256
    assert addresses[0] == tensors[0].data_ptr() and addresses[3] == out[0].data_ptr()
    assert addresses_2 == [temporary, tensors[1].data_ptr()]
    assert bytes(launcher._constants[0].tolist()) == b"\1\2\3\4" and addresses[1] == launcher._constants[0].data_ptr()
    assert second is out[0] and first is tensors[1]


def test_results_are_written_where_they_belong(driver, tensors):
    launcher = Launcher(program(), driver, ARCH)
    pool, copied = launcher(*tensors)
    assert pool is tensors[1] and copied.data_ptr() not in [x.data_ptr() for x in tensors]
    assert copied[:48].tolist() == list(range(48))
    assert pool.view(torch.uint8).flatten()[:16].tolist() == [7] * 16


def test_addresses_follow_the_tensors(driver, tensors, out):
    launcher = Launcher(program(), driver, ARCH)
    for _ in range(2):
        other = tensors[0].clone(), tensors[1].clone()
        for given in (tensors, other, tensors):
            launcher(*given, out=out)
            (_, _, addresses), (_, _, addresses_2) = driver.launches()
            assert addresses[0] == given[0].data_ptr() and addresses_2[1] == given[1].data_ptr()


def test_a_bound_call_only_launches(driver, tensors, out):
    launcher = Launcher(program(), driver, ARCH)
    other = tensors[0].clone(), tensors[1].clone()
    call = launcher.bind(*tensors, out=out)
    driver.log()
    for _ in range(2):
        launcher(*other)
        driver.log()
        pool, copied = call()
        assert pool is tensors[1] and copied is out[0]
        (_, _, addresses), (_, _, addresses_2) = driver.launches()
        assert (addresses[0], addresses[3]) == (tensors[0].data_ptr(), out[0].data_ptr())
        assert addresses_2[1] == tensors[1].data_ptr()
    with pytest.raises(ValueError, match="expected 2 tensors"):
        launcher.bind(tensors[0])


def bad_tensors():
    good = torch.arange(64, dtype=torch.uint8), torch.zeros(4, 8)
    yield "shape", (good[0][:63], good[1]), r"parameter 0: expected torch.uint8 \(64,\).*got torch.uint8 \(63,\)"
    yield "dtype", (good[0].view(torch.int8), good[1]), "parameter 0: expected torch.uint8.*got torch.int8"
    yield "device", (good[0], good[1].to("meta")), "parameter 1: expected .* on cpu.*on meta"
    strided = torch.zeros(8, 4).t()
    yield "strides", (good[0], strided), r"parameter 1.*with strides \(1, 4\)"
    shifted = torch.zeros(65, dtype=torch.uint8)[1:]
    yield "alignment", (shifted, good[1]), "parameter 0: .*aligned to 16 bytes, .* at 0x"
    yield "number", good[:1], "expected 2 tensors, got 1"
    yield "type", (good[0], [1.0]), "parameter 1: expected .*got a list"
    yield "negative", (good[0], torch._neg_view(torch.zeros(4, 8))), "parameter 1: .*negative"
    yield "gradient", (good[0], torch.zeros(4, 8, requires_grad=True)), "parameter 1: .*requires grad"
    yield "nowhere", (good[0], torch._efficientzerotensor((4, 8))), "parameter 1: .* at 0x0"
    short = torch.zeros(64, dtype=torch.uint8)
    short.untyped_storage().resize_(32)
    yield "too small", (short, good[1]), "parameter 0: expected a storage of 64 bytes, got 32"
    memory = torch.zeros(128, dtype=torch.uint8)
    yield "in place over another", (memory[:64], memory.view(torch.float32).view(4, 8)), "parameter 1 is written"


@pytest.mark.parametrize("bad, says", [x[1:] for x in bad_tensors()], ids=[x[0] for x in bad_tensors()])
def test_what_does_not_fit_is_refused_and_nothing_is_launched(driver, bad, says):
    launcher = Launcher(program(), driver, ARCH)
    driver.log()
    with pytest.raises(ValueError, match=f"example: .*{says}|example: {says}"):
        launcher(*bad)
    assert driver.launches() == []


def test_results_that_do_not_fit_are_refused(driver, tensors):
    launcher = Launcher(program(), driver, ARCH)
    driver.log()
    memory = torch.zeros(128, dtype=torch.uint8)
    for out, says in [
        ([torch.zeros(63, dtype=torch.uint8)], r"result 1: expected torch.uint8 \(64,\)"),
        ([torch.zeros(128, dtype=torch.uint8)[::2]], "result 1: .*strides"),
        ([], "out to be 1 tensors, got 0"),
        ([memory[16:80]], "result 1: .*aligned to 64 bytes.* at 0x"),
        ([tensors[0]], "result 1: expected memory of its own, got some of parameter 0's"),
        (
            [tensors[1].view(torch.uint8).flatten()[64:]],
            "result 1: expected memory of its own, got some of parameter 1",
        ),
    ]:
        with pytest.raises(ValueError, match=says):
            launcher(*tensors, out=out)
    two = replace(
        program(),
        results=(*program().results, program().results[1]),
        launches=(*program().launches, replace(program().launches[0], pointers=(fake.pointer("output", 2, 64),))),
    )
    launcher = Launcher(two, driver, ARCH)
    driver.log()
    with pytest.raises(ValueError, match="result 1: expected memory of its own, got some of result 2's"):
        launcher(*tensors, out=[memory[:64], memory[:64]])
    assert driver.launches() == []


def test_a_launch_that_fails_says_which(driver, tensors):
    launcher = Launcher(program(), driver, ARCH)
    driver.fake.fake_fail(500)
    with pytest.raises(
        DriverError, match=r"example: 'copy_4' on a grid of \(48, 2, 3\): the launch failed: 500 \(.*[fF]ound"
    ):
        launcher(*tensors)


def test_code_that_cannot_be_loaded_says_so(driver):
    with pytest.raises(DriverError, match=r"example: .*ModuleLoadData of 7 bytes failed: 200 \(.*nvalid"):
        Launcher(program(codes=(b"not ELF", ELF)), driver, ARCH)
    gone = replace(program().launches[0], kernel="missing_4")
    with pytest.raises(DriverError, match="example: no kernel 'missing_4' in its code: 500"):
        Launcher(program(launches=(gone, *program().launches[1:])), driver, ARCH)
    with pytest.raises(ValueError, match="expected code for gfx942, which cpu is, got sm_90"):
        Launcher(program(), driver, "gfx942")
    if driver.interface is CUDA:
        large = replace(program().launches[0], shared_bytes=300_000)
        with pytest.raises(DriverError, match="'copy_4' wants 300000 bytes of shared memory"):
            Launcher(program(launches=(large, *program().launches[1:])), driver, ARCH)


def test_nothing_is_loaded_during_a_capture_and_what_is_loaded_runs(driver, tensors):
    launcher = Launcher(program(), driver, ARCH)
    driver.log()
    driver.is_capturing = True
    launcher(*tensors)
    assert len(driver.launches()) == 2
    with pytest.raises(RuntimeError, match="example: it must be loaded before a graph is captured"):
        Launcher(program(), driver, ARCH)
    assert driver.log() == []


def test_another_current_device_is_refused(driver, tensors):
    launcher = Launcher(program(), driver, ARCH)
    driver.log()
    driver.current = False
    with pytest.raises(ValueError, match="current device"):
        launcher(*tensors)
    assert driver.launches() == []


def test_each_call_has_what_lies_between_its_kernels_and_keeps_it_while_it_may_be_called(driver, tensors, out):
    launcher = Launcher(program(), driver, ARCH)
    calls = [launcher.bind(*tensors, out=out) for _ in range(3)]
    seen = []
    for stream, call in [(1, calls[0]), (2, calls[1]), (2, calls[2]), (1, calls[0])]:
        driver.on = stream
        call()
        (_, how, addresses), (_, how_2, addresses_2) = driver.launches()
        assert (how[-1], how_2[-1]) == (stream, stream) and addresses_2[0] == addresses[2] - 256
        seen.append(addresses_2[0])
    assert len(set(seen[:3])) == 3 and seen[0] == seen[3]


def test_what_was_interrupted_while_pointing_is_pointed_anew(driver, tensors, out, monkeypatch):
    launcher = Launcher(program(), driver, ARCH)
    launcher(*tensors, out=out)
    other = tensors[0].clone(), tensors[1].clone()
    with monkeypatch.context() as patch:
        places = launcher._call_places
        patch.setattr(launcher, "_call_places", [*places[:1], [(None, 0, 0)], *places[2:]])
        with pytest.raises(TypeError):
            launcher(*other, out=out)
    driver.log()
    launcher(*tensors, out=out)
    (_, _, addresses), _ = driver.launches()
    assert addresses[0] == tensors[0].data_ptr()


def test_threads_take_turns(driver):
    """One call's kernels all get that call's addresses, though another thread runs while the driver works."""
    size = 1 << 22
    array = Array((size,), "uint8")
    copy = Launch(
        "copy_2", 0, (size, 1, 1), (1, 1, 1), 0, (fake.pointer("parameter", 0, size), fake.pointer("output", 0, size))
    )
    fill = Launch("fill_1", 0, (8, 1, 1), (1, 1, 1), 0, (fake.pointer("output", 0, size),))
    both = program(parameters=(array,), results=(Result(array),), launches=(copy, fill), constants=(), temporaries=())
    launcher = Launcher(both, driver, ARCH)

    def calls(value: int) -> bool:
        x = torch.full((size,), value, dtype=torch.uint8)
        return all(
            torch.equal(launcher(x)[0][:16], torch.tensor([7] * 8 + [value] * 8, dtype=torch.uint8)) for _ in range(40)
        )

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(calls, (1, 2, 3)))


MAPS = """\
7f00 r-xp 00000000 08:01 1  {folder}/a/libamdhip64.so.7
7f01 r--p 00000000 08:01 1  {folder}/a/libamdhip64.so.7
7f02 r-xp 00000000 08:01 2  {folder}/b/libamdhip64.so.6
7f03 r-xp 00000000 08:01 3  {folder}/with space/libcuda.so.1 (deleted)
7f04 rw-p 00000000 00:00 0  [stack]
"""


def test_drivers_are_found_among_what_is_loaded(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(MAPS.format(folder=tmp_path))
    assert loaded("libcuda.so", maps) == [f"{tmp_path}/with space/libcuda.so.1"]
    assert loaded("libamdhip64.so", maps) == [f"{tmp_path}/a/libamdhip64.so.7", f"{tmp_path}/b/libamdhip64.so.6"]
    assert loaded("libnothing", maps) == []


@pytest.mark.parametrize("found", [[], ["/a/libamdhip64.so.7", "/b/libamdhip64.so.6"]], ids=["none", "two"])
def test_one_runtime_it_must_be(monkeypatch, found):
    monkeypatch.setattr("bridge.stream.driver.loaded", lambda prefix: found)
    with pytest.raises(DriverError, match="libamdhip64.so: expected one in this process, torch's, got"):
        Driver(HIP, torch.device("cuda:0"))
