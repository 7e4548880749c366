"""DeepSeek-V3.2 as flax nnx modules: its configuration, its layers, its checkpoints and what trains it.

Needs the ``nn`` extra; nothing in ``jax_mla`` imports it.
"""

try:
    import flax.nnx as _nnx  # noqa: F401
except ImportError as error:
    raise ImportError("jax_mla.nn expected flax, which is not installed: pip install 'jax-mla[nn]'") from error

from jax_mla.nn.cache import Cache as Cache
from jax_mla.nn.cache import decode as decode
from jax_mla.nn.cache import generate as generate
from jax_mla.nn.cache import make_cache as make_cache
from jax_mla.nn.cache import prefill as prefill
from jax_mla.nn.check import NotASelector as NotASelector
from jax_mla.nn.check import check_selector as check_selector
from jax_mla.nn.checkpoint import load_hf as load_hf
from jax_mla.nn.checkpoint import save_hf as save_hf
from jax_mla.nn.config import DeepseekV32Config as DeepseekV32Config
from jax_mla.nn.config import RopeParameters as RopeParameters
from jax_mla.nn.indexer import Indexer as Indexer
from jax_mla.nn.indexer import Selector as Selector
from jax_mla.nn.indexer import with_selectors as with_selectors
from jax_mla.nn.losses import indexer_kl as indexer_kl
from jax_mla.nn.model import DeepseekV32 as DeepseekV32
