"""DeepSeek sparse attention (DSA) for JAX: the lightning indexer, its caches, top-k and sparse MLA.

Ops, each with a ``reference`` that says what it means, an XLA version and a Pallas kernel:

- ``quantize``: FP8 by blocks of 128 or by tensor
- ``index_write``, ``index_pack``: keys into the indexer's cache
- ``index_query``: the indexer's queries and head weights
- ``index_logits_ragged``, ``index_logits_paged``: its scores, in prefill and in decode
- ``select``: exact top-k
- ``kv_write``, ``kv_pack``: latents into the KV cache
- ``sparse_mla``: attention over the selected slots

and in order, for one layer: ``topk_prefill``, ``topk_decode``, ``slots_of`` (``jax_mla.attention``).
"""

from jax_mla.attention import slots_of as slots_of
from jax_mla.attention import topk_decode as topk_decode
from jax_mla.attention import topk_prefill as topk_prefill
from jax_mla.fp8 import E4M3FN as E4M3FN
from jax_mla.fp8 import E4M3FNUZ as E4M3FNUZ
from jax_mla.layouts import KV_BF16 as KV_BF16
from jax_mla.layouts import KV_FP8_576 as KV_FP8_576
from jax_mla.layouts import KV_FP8_656 as KV_FP8_656
from jax_mla.layouts import IndexLayout as IndexLayout
from jax_mla.layouts import KVLayout as KVLayout
from jax_mla.layouts import kv_layout as kv_layout
from jax_mla.ops.index_logits_paged import index_logits_paged as index_logits_paged
from jax_mla.ops.index_logits_ragged import index_logits_ragged as index_logits_ragged
from jax_mla.ops.index_query import index_query as index_query
from jax_mla.ops.index_write import index_pack as index_pack
from jax_mla.ops.index_write import index_write as index_write
from jax_mla.ops.kv_write import kv_pack as kv_pack
from jax_mla.ops.kv_write import kv_write as kv_write
from jax_mla.ops.quantize import quantize as quantize
from jax_mla.ops.select import select as select
from jax_mla.ops.sparse_mla import sparse_mla as sparse_mla
from jax_mla.rope import cos_sin_table as cos_sin_table
