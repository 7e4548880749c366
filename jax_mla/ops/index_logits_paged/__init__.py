"""The lightning indexer's scores over the paged index-K cache, 1 to 4 query rows a request (decode)."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32, Shaped, UInt8

from jax_mla.fp8 import format_of
from jax_mla.layouts import IndexLayout
from jax_mla.ops import base
from jax_mla.ops.index_logits_paged.config import Config
from jax_mla.ops.index_logits_paged.kernel import pallas, xla
from jax_mla.ops.index_logits_paged.reference import reference
from jax_mla.pallas_triton import target

IMPLEMENTATIONS = {"xla": xla, "pallas": pallas, "reference": reference}


@base.typed
def index_logits_paged(
    q8: Shaped[Array, "T Hi 128"],
    weights: Float32[Array, "T Hi"],
    pool: UInt8[Array, "pages page_bytes"],
    token_table: Int32[Array, "R C"],
    requests: Int32[Array, " B"],
    lengths: Int32[Array, " B"],
    *,
    layout: IndexLayout,
    max_len: int,
    next_n: int = 1,
    fill: bool = True,
    implementation: base.Implementation = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float32[Array, "T max_len"]:
    r"""$$\mathrm{logits}_{t,s} = k^{scale}_s \sum_h w_{t,h}\, \mathrm{relu}(q8_{t,h} \cdot k8_s)$$

    over the tokens $s$ that row $t$ sees of its request, and -inf elsewhere. Row ``t = b * next_n + i`` is the i-th of
    request ``b``'s rows and sees the first ``lengths[b] - next_n + i + 1`` tokens. Products in FP8, sums in float32.

    - `q8`: float8 ``[B * next_n, index_n_heads, 128]`` and `weights`: float32, from ``index_query``.
    - `pool`: uint8 ``[pages, layout.page_bytes]``, the index-K cache.
    - `token_table`: int32 ``[R, C]``: the slot of each token of each request (SGLang's ``req_to_token``). Only the
      first ``lengths[b]`` entries of a request's row are read; an entry < 0 gives -inf.
    - `requests`: int32 ``[B]``: which row of ``token_table``. `lengths`: int32 ``[B]``, in tokens; 0 or less for a
      padded row, whose logits are all -inf.
    - `max_len`: columns of the result, at least the largest of ``lengths`` and at most ``C``.
    - `next_n`: rows a request, 1 to 4.
    - `fill`: False where nobody reads what a row doesn't see, as ``select`` doesn't. Those columns may then hold
      anything, and what is wider than the longest row costs next to nothing.

    Returns float32 ``[B * next_n, max_len]``.

    Raises ``jaxtyping.TypeCheckError`` for wrong shapes and dtypes; ``ValueError`` for a pool that is not the layout's,
    another fp8 format, ``next_n``, ``max_len``, and outside ``jit`` for a length over ``max_len``, a request outside of
    the table and a slot beyond the pool. Under ``jit`` what lies outside reads as -inf.

    Source: DeepGEMM ``fp8_paged_mqa_logits``; SGLang 0.5.23 ``Indexer._get_topk_paged``.
    """
    op = "index_logits_paged"
    fp8 = format_of(q8.dtype)
    base.refuse_unless(fp8 == layout.fp8, op, "q8", f"the layout's format {layout.fp8}", fp8)
    layout.check_pool(op, pool)
    base.refuse_unless(1 <= next_n <= 4, op, "next_n", "1 to 4", next_n)
    rows = f"{requests.shape[0]} requests of {next_n} rows"
    base.refuse_unless(q8.shape[0] == requests.shape[0] * next_n, op, "q8", rows, f"{q8.shape[0]} rows")
    base.refuse_unless(0 < max_len <= token_table.shape[1], op, "max_len", f"1 to {token_table.shape[1]}", max_len)
    base.refuse_outside(op, "lengths", lengths, -(2**31), max_len + 1, "max_len")
    base.refuse_outside(op, "requests", requests, 0, token_table.shape[0], "the rows of token_table")
    if all(base.is_concrete(x) for x in (token_table, requests, lengths)):
        read = jnp.where(jnp.arange(token_table.shape[1]) < lengths[:, None], token_table[requests], -1)
        base.refuse_outside(op, "token_table", read, -(2**31), pool.shape[0] * layout.page_size, "the pool's slots")
    return base.run(
        op,
        IMPLEMENTATIONS,
        implementation,
        interpret,
        lambda: Config.of(requests.shape[0], max_len, target()),
        config,
        (q8, weights, pool, token_table, requests, lengths),
        dict(layout=layout, max_len=max_len, next_n=next_n, fill=fill),
    )
