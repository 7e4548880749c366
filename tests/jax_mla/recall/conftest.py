"""As for jax_mla.nn: whole models, compiled to be run a few times."""

from tests.jax_mla.nn.conftest import quick_compilation as quick_compilation
