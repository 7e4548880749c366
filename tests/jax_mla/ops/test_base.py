"""Which implementation runs, and what is refused before any does."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jax_mla
from jax_mla.ops import base
from jax_mla.pallas_triton import GFX942, GFX950, H200, lowering_for, target


def test_an_implementation_for_each_platform():
    assert target().platform == "cpu" and not target().is_gpu
    assert base.choose("op", None, False) == "xla"
    for card in (GFX942, GFX950, H200):
        with lowering_for(card):
            assert target() == card
            assert base.choose("op", None, False) == "pallas"
            for named in ("xla", "pallas", "reference"):
                assert base.choose("op", named, False) == named
    assert base.choose("op", "pallas", True) == "pallas"


def test_what_is_named_and_cannot_run_raises():
    with pytest.raises(NotImplementedError) as refusal:
        base.choose("op", "pallas", False)
    for part in ("op", "implementation='pallas'", "expected a GPU", "'cpu'", "implementation='xla'", "interpret=True"):
        assert part in str(refusal.value)
    for named in (None, "xla", "reference"):
        with pytest.raises(ValueError, match=f"op: interpret=True expected implementation='pallas', got {named!r}"):
            base.choose("op", named, True)


def test_values_are_checked_where_there_are_values():
    x = jnp.asarray([-3, 0, 9], jnp.int32)
    base.refuse_outside("op", "x", x, -3, 10, "what")
    base.refuse_outside("op", "x", None, 0, 1, "what")
    base.refuse_outside("op", "x", x[:0], 0, 1, "what")
    for low, high in ((-2, 10), (-3, 9)):
        with pytest.raises(ValueError, match=rf"op: x expected values in \[{low}, {high}\) \(what\), got -3 to 9"):
            base.refuse_outside("op", "x", x, low, high, "what")
    jax.jit(lambda x: base.refuse_outside("op", "x", x, 0, 1, "what"))(x)


def test_each_op_is_compiled_once_for_its_static_arguments():
    traces = []

    def f(x, *, factor):
        traces.append(factor)
        return x * factor

    def call(x, factor):
        return base.run("op", {"xla": f}, None, False, dict, None, (x,), dict(factor=factor))

    for _ in range(3):
        assert call(jnp.ones(4), 2.0).tolist() == [2.0] * 4
        assert call(jnp.ones(4), 3.0).tolist() == [3.0] * 4
    assert traces == [2.0, 3.0]


def python(program: str, **environment: str) -> list[str]:
    """Words that a fresh interpreter prints."""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_jax_mla_loads_nothing_that_it_does_not_need():
    """Nor does it touch a device: it would find that there is no such platform."""
    program = "import sys, jax_mla; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = set(python(program, JAX_PLATFORMS="no_such_platform"))
    assert {"jax", "jax_mla", "numpy"} <= loaded
    assert not loaded & set("torch sglang transformers flax bridge bench triton pytest safetensors".split())


def test_it_works_with_nothing_but_its_dependencies():
    program = """
import sys
from importlib.metadata import packages_distributions

needed = {"jax", "jaxlib", "numpy", "ml_dtypes", "jaxtyping", "beartype", "opt_einsum", "scipy", "wadler_lindig"}
others = set(packages_distributions()) - needed - {"jax_mla"}
assert {"pytest", "hypothesis"} <= others


class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in others:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing)
import jax.numpy as jnp
import jax_mla

codes, scales = jax_mla.quantize(jnp.ones((2, 128)), fp8=jax_mla.E4M3FN, scale="ue8m0")
print(codes[1, 127], scales[1, 0])
"""
    assert python(program) == ["120", "0.00390625"]  # 0x78 is 256


def test_empty_arrays_are_refused_by_name():
    with pytest.raises(ValueError, match=r"select: expected arrays that are not empty, got float32\[0, 4\]"):
        jax_mla.select(jnp.zeros((0, 4)), jnp.zeros(0, jnp.int32), 2)
