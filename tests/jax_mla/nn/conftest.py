"""These tests compile whole models to run them once, so XLA is asked to be quick about it."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def quick_compilation():
    """The same programs, optimised less."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
