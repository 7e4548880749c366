"""The lightning indexer's scores over contiguous keys, each query row in a window of its own (prefill)."""

from jax import Array
from jaxtyping import Float32, Int32, Shaped

from jax_mla.fp8 import format_of
from jax_mla.ops import base
from jax_mla.ops.index_logits_ragged.config import Config
from jax_mla.ops.index_logits_ragged.kernel import pallas, xla
from jax_mla.ops.index_logits_ragged.reference import reference
from jax_mla.pallas_triton import target

IMPLEMENTATIONS = {"xla": xla, "pallas": pallas, "reference": reference}
MAX_LOGITS_BYTES = 2 << 30


@base.typed
def index_logits_ragged(
    q8: Shaped[Array, "T Hi 128"],
    weights: Float32[Array, "T Hi"],
    k8: Shaped[Array, "S 128"],
    k_scale: Float32[Array, " S"],
    starts: Int32[Array, " T"],
    ends: Int32[Array, " T"],
    *,
    max_logits_bytes: int = MAX_LOGITS_BYTES,
    implementation: base.Implementation = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Float32[Array, "T S"]:
    r"""$$\mathrm{logits}_{t,s} = k^{scale}_s \sum_h w_{t,h}\, \mathrm{relu}(q8_{t,h} \cdot k8_s)$$

    for ``starts[t] <= s < ends[t]``, and -inf elsewhere. Products in FP8, sums in float32.

    - `q8`: float8 ``[T, index_n_heads, 128]`` and `weights`: float32 ``[T, index_n_heads]``, from ``index_query``.
    - `k8`: float8 ``[S, 128]`` of the same format, `k_scale`: float32 ``[S]``: the keys of all requests one after the
      other, as ``IndexLayout.read`` gives them. Keys outside of a row's window do not touch it, whatever they hold.
    - `starts`, `ends`: int32 ``[T]``; a window may be empty, and is cut at 0 and ``S``.
    - `max_logits_bytes`: refuse to make more than that. ``attention.topk_prefill`` goes through a long prompt in blocks
      of rows that fit; call it rather than raising this.

    Returns float32 ``[T, S]``.

    Raises ``jaxtyping.TypeCheckError`` for wrong shapes and dtypes, ``ValueError`` for formats that differ or logits of
    more than ``max_logits_bytes``.

    Source: DeepGEMM ``fp8_mqa_logits`` with ``clean_logits``; DeepSeek-V3.2 report (arXiv 2512.02556) eq. 1.
    """
    fp8 = format_of(q8.dtype)
    op = "index_logits_ragged"
    base.refuse_unless(k8.dtype == q8.dtype, op, "k8", f"q8's dtype {q8.dtype.name}", k8.dtype.name)
    size = 4 * q8.shape[0] * k8.shape[0]
    limit = f"at most {max_logits_bytes:,} bytes of logits (attention.topk_prefill goes in blocks of rows)"
    base.refuse_unless(size <= max_logits_bytes, op, "max_logits_bytes", limit, f"{size:,} bytes")
    return base.run(
        op,
        IMPLEMENTATIONS,
        implementation,
        interpret,
        lambda: Config.of(q8.shape[0], target()),
        config,
        (q8, weights, k8, k_scale, starts, ends),
        dict(fp8=fp8),
    )
