"""One function on both lanes."""

import jax.numpy as jnp
import pytest
import torch

from bridge.stream import Function, Jit, Stream, cache
from bridge.stream.lane import chosen
from bridge.stream.program import Array
from tests.bridge.stream.fake import ARCH, program

COMPILED = []


def make(*, factor: float):
    COMPILED.append(factor)
    return lambda x, y: (factor * x + y, jnp.sum(x, axis=1))


AFFINE = Function("affine", make, ("x", "y"), ("both", "total"))
X, Y = torch.arange(12, dtype=torch.float32).reshape(3, 4), torch.ones(3, 4)
ARRAYS = (Array((3, 4), "float32"),) * 2


def test_the_jit_lane_is_the_function():
    both, total = Jit()(AFFINE, X, Y, factor=3.0)
    assert torch.equal(both, 3 * X + Y) and torch.equal(total, X.sum(1))


def test_the_jit_lane_compiles_once():
    COMPILED.clear()
    jit = Jit()
    for _ in range(3):
        jit(AFFINE, X, Y, factor=7.0)
    assert COMPILED == [7.0]


def reciprocal(*, k: float):
    return lambda x: 0 * x + 1 / jnp.float32(k)


def test_equal_static_arguments_that_differ_are_told_apart(driver):
    function, jit, stream = Function("reciprocal", reciprocal, ("x",), ("y",)), Jit(), Stream(driver, ARCH)
    (plus,), (minus,) = jit(function, X, k=0.0), jit(function, X, k=-0.0)
    assert torch.all(plus == torch.inf) and torch.all(minus == -torch.inf)
    arrays = ARRAYS[:1]
    launchers = {id(stream.launcher(function, arrays, k=k)) for k in (1.0, True, 1, 1.0)}
    assert len(launchers) == 3


def test_what_a_function_is_not():
    with pytest.raises(ValueError, match="name: expected an identifier, got '../f'"):
        Function("../f", make, ("x",), ("y",))
    with pytest.raises(TypeError, match="f: make: expected a function, got int"):
        Function("f", 3, ("x",), ("y",))  # pyrefly: ignore


@pytest.mark.parametrize("lane", ["jit", "stream"])
def test_another_number_of_results_is_refused_and_not_kept(driver, lane, cache_folder):
    wrong = Function("wrong", make, ("x", "y"), ("only",))
    run = Jit() if lane == "jit" else Stream(driver, ARCH)
    with pytest.raises(ValueError, match="wrong: expected (it to give only, got 2 arrays|a program of .*)"):
        run(wrong, X, Y, factor=3.0)
    assert not cache_folder.exists() or list(cache_folder.glob("*.program")) == []


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_the_jit_lane_does_not_pretend_to_write_in_place():
    doubled = Function("doubled", lambda: lambda x: 2 * x, ("x",), (), ("x",))
    with pytest.raises(RuntimeError, match="doubled: x: expected to be written in place, got a result elsewhere"):
        Jit()(doubled, X.clone())


def test_the_stream_lane_compiles_once_and_keeps_it(driver, cache_folder):
    COMPILED.clear()
    stream = Stream(driver, ARCH)
    for _ in range(2):
        both, total = stream(AFFINE, X, Y, factor=3.0)
        assert both.shape == (3, 4) and total.shape == (3,)
    assert len(driver.launches()) >= 2
    assert COMPILED == [3.0] and len(list(cache_folder.iterdir())) == 1
    Stream(driver, ARCH)(AFFINE, X, Y, factor=3.0)
    assert COMPILED == [3.0]
    stream(AFFINE, X, Y, factor=4.0)
    stream(AFFINE, X[:2], Y[:2], factor=3.0)
    assert COMPILED == [3.0, 4.0, 3.0]


def test_what_would_have_to_be_compiled_during_a_capture_is_refused(driver):
    COMPILED.clear()
    stream = Stream(driver, ARCH)
    stream.prepare([(AFFINE, ARRAYS, dict(factor=3.0))], progress=False)
    driver.is_capturing = True
    stream(AFFINE, X, Y, factor=3.0)
    driver.log()
    with pytest.raises(RuntimeError, match=r"affine: expected to be prepared for float32\[3, 4\], .* before a graph"):
        stream(AFFINE, X, Y, factor=5.0)
    assert COMPILED == [3.0] and driver.log() == []


@pytest.mark.parametrize("lane", ["jit", "stream"])
def test_bad_calls_are_refused_by_name(driver, lane):
    run = Jit() if lane == "jit" else Stream(driver, ARCH)
    with pytest.raises(ValueError, match="affine: expected 2 tensors, x, y, got 1"):
        run(AFFINE, X, factor=3.0)
    with pytest.raises(ValueError, match="affine: y: expected one of .*, got torch.float64"):
        run(AFFINE, X, Y.double(), factor=3.0)
    assert driver.launches() == []


def test_a_program_of_another_function_is_refused(driver):
    """As a file under the wrong name would be."""
    cache.put("affine", cache.key(AFFINE, ARRAYS, dict(factor=3.0), ARCH), program())
    with pytest.raises(ValueError, match="affine: expected a program of float32"):
        Stream(driver, ARCH)(AFFINE, X, Y, factor=3.0)


@pytest.mark.parametrize(
    "device, asked, lane",
    [
        ("cuda", None, "stream"),
        ("cuda", "jit", "jit"),
        ("cuda", "stream", "stream"),
        ("cpu", None, "jit"),
        ("cpu", "jit", "jit"),
    ],
)
def test_the_lane_that_serves(monkeypatch, device, asked, lane):
    monkeypatch.setenv("JAX_MLA_LANE", asked or "")
    assert chosen(device) == lane


@pytest.mark.parametrize("device, asked", [("cpu", "stream"), ("cuda", "triton"), ("cpu", "Jit")])
def test_other_lanes_are_refused(monkeypatch, device, asked):
    monkeypatch.setenv("JAX_MLA_LANE", asked)
    with pytest.raises(ValueError, match=f"^JAX_MLA_LANE: expected .* on '{device}', got '{asked}'$"):
        chosen(device)


def test_chips_that_programs_can_t_be_built_for_are_refused_with_the_lane_that_serves_them(driver, monkeypatch):
    from bridge.stream import driver as drivers
    from jax_mla.aot.chips import CHIPS

    assert set(drivers.ARCHS) == set(CHIPS)
    monkeypatch.setattr(drivers, "for_device", lambda device: driver)
    monkeypatch.setattr(drivers, "arch_of", lambda device: "sm_80")
    with pytest.raises(ValueError, match="^cuda:0: expected one of .* on the stream lane, got sm_80; JAX_MLA_LANE=jit"):
        Stream.of(torch.device("cuda", 0))
