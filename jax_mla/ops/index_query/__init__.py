"""The indexer's queries: RoPE, optional Hadamard, FP8, and head weights that carry every scale."""

from jax import Array
from jaxtyping import Float, Float32, Int32, Shaped

from jax_mla.fp8 import E4M3FN, Fp8Format
from jax_mla.ops import base
from jax_mla.ops.index_query.config import Config
from jax_mla.ops.index_query.kernel import pallas, xla
from jax_mla.ops.index_query.reference import reference

IMPLEMENTATIONS = {"xla": xla, "pallas": pallas, "reference": reference}


@base.typed
def index_query(
    q: Float[Array, "T Hi 128"],
    weights: Float[Array, "T Hi"],
    cos_sin: Float32[Array, "P 64"],
    positions: Int32[Array, " T"],
    *,
    fp8: Fp8Format = E4M3FN,
    interleaved: bool = False,
    hadamard: bool = False,
    implementation: base.Implementation = None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Shaped[Array, "T Hi 128"], Float32[Array, "T Hi"]]:
    r"""Prepares the lightning indexer's queries for ``index_logits_ragged`` and ``index_logits_paged``.

    $$q8_{t,h} = \mathrm{fp8}(R\,q_{t,h} / s_{t,h}), \qquad
      w'_{t,h} = w_{t,h}\; s_{t,h}\; 128^{-1/2}\, H_i^{-1/2}$$

    with $R$ the rotation of the first 64 columns by the angles of ``positions[t]``, then Hadamard's if asked for, and
    $s$ the ue8m0 scale of each head's 128 (amax floor 1e-4). All in float32 up to the one rounding to FP8.

    - `q`: bf16 or f32 ``[T, index_n_heads, 128]``, what ``wq_b`` gave.
    - `weights`: bf16 or f32 ``[T, index_n_heads]``, what ``weights_proj`` gave.
    - `cos_sin`: float32 ``[P, 64]``, cosines then sines (``rope.cos_sin_table``; SGLang's ``cos_sin_cache``).
    - `positions`: int32 ``[T]`` in ``[0, P)``.
    - `fp8`: the format of the codes, the same as the index cache's.
    - `interleaved`: False is NeoX, DeepSeek-V3.2's; True pairs neighbours, GLM-5's.
    - `hadamard`: must be the same as for the keys.

    Returns ``q8`` of ``fp8.dtype`` ``[T, index_n_heads, 128]`` and float32 weights ``[T, index_n_heads]``.

    Raises ``jaxtyping.TypeCheckError`` for wrong shapes and dtypes and, outside ``jit``, ``ValueError`` for a position
    outside of ``cos_sin``; under ``jit`` the 64 codes that it would have turned become NaN.

    Source: DeepSeek-V3.2 ``inference/model.py::Indexer`` (as fixed in November 2025: NeoX). Differs from it in not
    rounding to bf16 after each step.
    """
    base.refuse_outside("index_query", "positions", positions, 0, cos_sin.shape[0], "the rows of cos_sin")
    return base.run(
        "index_query",
        IMPLEMENTATIONS,
        implementation,
        interpret,
        lambda: Config.of(q.shape[1]),
        config,
        (q, weights, cos_sin, positions),
        dict(fp8=fp8, interleaved=interleaved, hadamard=hadamard),
    )
