"""DeepSeek-V3.2 as flax nnx modules: its configuration, its layers, its checkpoints and what trains it.

Needs the ``nn`` extra; nothing in ``jax_mla`` imports it.
"""

try:
    import flax.nnx as _nnx  # noqa: F401
except ImportError as error:
    raise ImportError("jax_mla.nn expected flax, which is not installed: pip install 'jax-mla[nn]'") from error

from jax_mla.nn.config import DeepseekV32Config as DeepseekV32Config
from jax_mla.nn.config import RopeParameters as RopeParameters
