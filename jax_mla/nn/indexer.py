"""Who picks the tokens that a layer attends to: DeepSeek's lightning indexer, or anything else that can be called.

A *selector* is called once a layer with the layer's normalised hidden states, the query latent and the positions, and
returns **scores** (floats: the ``index_topk`` largest that a row may see are selected) or **positions** (integers, -1
for none; what a row may not see is left out). Either as one array for all rows, or as a function of ``(start, size)``
that gives those of some rows, so that long contexts need not hold all. It is a plain function or an ``nnx.Module``,
whose parameters are then the model's::

    class Dots(nnx.Module):
        def __init__(self, config, rngs):
            self.q = nnx.Linear(config.q_lora_rank, 32, rngs=rngs)
            self.k = nnx.Linear(config.hidden_size, 32, rngs=rngs)

        def __call__(self, hidden, q_latent, positions):
            return jnp.einsum("btd,bsd->bts", self.q(q_latent), self.k(hidden))

    model = with_selectors(model, lambda indexer: Dots(model.config, nnx.Rngs(0)))
"""

from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Float32, Int32, Shaped

from jax_mla.fp8 import E4M3FN, Fp8Format, decode
from jax_mla.hadamard import hadamard_matrix
from jax_mla.nn.config import LATENT_NORM_EPS, DeepseekV32Config
from jax_mla.nn.layers import Build, LayerNorm, Linear, product, rope
from jax_mla.ops.index_head import finish
from jax_mla.ops.select import select
from jax_mla.rope import cos_sin_table

Rows = Callable[[Any, int], Array]


@runtime_checkable
class Selector(Protocol):
    """See the module's docstring. ``[B, T, S]`` or ``[B, T, k]``, or a function ``(start, size)`` that gives rows."""

    def __call__(
        self, hidden: Float[Array, "B T hidden"], q_latent: Float[Array, "B T q_lora"], positions: Int32[Array, " T"]
    ) -> Array | Rows: ...


def angles(config: DeepseekV32Config, length: int) -> Float32[Array, "length rope"]:
    """Cosines, then sines, of the first ``length`` positions."""
    r = config.rope_parameters
    table = cos_sin_table(
        length,
        config.qk_rope_head_dim,
        rope_theta=r.rope_theta,
        factor=r.factor,
        original_max_position_embeddings=r.original_max_position_embeddings,
        beta_fast=r.beta_fast,
        beta_slow=r.beta_slow,
    )
    return table * r.attention_scaling


def fp8_rounded(x: Float[Array, "... 128"], fp8: Fp8Format, hadamard: bool) -> Float32[Array, "... 128"]:
    """``x`` as read back from the indexer's FP8, by ``index_query``'s and ``index_write``'s own rule.

    Its gradient is that of the rotation alone: rounding counts as the identity.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)

    def read(rows):
        codes, scale = finish(rows, fp8=fp8, hadamard=hadamard)
        return decode(codes, fp8) * scale

    through = rows
    if hadamard:
        through = product("ni,ij->nj", rows, hadamard_matrix(rows.shape[-1]))
    return (lax.stop_gradient(read(rows)) + (through - lax.stop_gradient(through))).reshape(x.shape)


class Indexer(nnx.Module):
    r"""DeepSeek's lightning indexer: $I_{t,s} = \sum_h w_{t,h}\, \mathrm{relu}(q_{t,h} \cdot k_s)\, (d H_i)^{-1/2}$.

    Attributes that may be set at any time:

    - `quantize`: queries and keys go through the FP8 of ``index_query`` and ``index_write`` (``fp8``, and ``hadamard``
      before it); needs ``index_head_dim`` 128. Off: as they are, in the model's dtype.
    - `interleaved`: the RoPE, GLM-MoE-DSA's if true, DeepSeek-V3.2's if not.
    """

    def __init__(self, config: DeepseekV32Config, *, build: Build, quantize: bool = False, hadamard: bool = False):
        heads, dim = config.index_n_heads, config.index_head_dim
        if quantize and dim != 128:
            raise ValueError(f"index_head_dim: expected 128 where the indexer quantises, got {dim}")
        self.config, self.interleaved = config, config.indexer_interleaved
        self.quantize, self.hadamard, self.fp8 = quantize, hadamard, E4M3FN
        self.wq_b = Linear(config.q_lora_rank, heads * dim, build=build)
        self.wk = Linear(config.hidden_size, dim, build=build)
        self.k_norm = LayerNorm(dim, LATENT_NORM_EPS, build=build)
        self.weights_proj = Linear(config.hidden_size, heads, build=build, dtype=jnp.dtype(jnp.float32))

    def queries(self, q_latent: Float[Array, "B T q_lora"]) -> Float[Array, "B T Hi D"]:
        """What ``wq_b`` gives, before RoPE."""
        return self.wq_b(q_latent).reshape(*q_latent.shape[:2], self.config.index_n_heads, self.config.index_head_dim)

    def __call__(
        self, hidden: Float[Array, "B T hidden"], q_latent: Float[Array, "B T q_lora"], positions: Int32[Array, " T"]
    ) -> Rows:
        """A function that gives float32 scores ``[B, size, T]`` of the rows from ``start`` on."""
        c = self.config
        cos_sin = angles(c, hidden.shape[1])[positions]
        raw = self.wk(hidden)
        k = self.k_norm(raw)[:, :, None]
        q = self.queries(q_latent)
        if self.quantize:
            q, k = q.astype(jnp.float32), k.astype(jnp.float32)
        else:
            k = k.astype(raw.dtype)
        q, k = (rope(x, cos_sin, self.interleaved) for x in (q, k))
        if self.quantize:
            q, k = (fp8_rounded(x, self.fp8, self.hadamard) for x in (q, k))
        weights = self.weights_proj(hidden) * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)

        def rows(start, size: int) -> Array:
            q_rows, w_rows = (lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in (q, weights))
            dots = jax.nn.relu(product("bthd,bsd->bths", q_rows, k[:, :, 0], jnp.dtype(jnp.float32)))
            return product("bths,bth->bts", dots, w_rows)

        return rows


def rows_of(selected: Array | Rows, start, size: int) -> Array:
    """Some rows of what a selector returned."""
    return selected(start, size) if callable(selected) else lax.dynamic_slice_in_dim(selected, start, size, axis=1)


def top(scores: Float32[Array, "B T S"], first: Int32[Array, ""], k: int) -> Int32[Array, "B T k"]:
    """The ``k`` best that each row may see, by ``select``: ascending, -1 padded. Row ``t`` sees ``first + t + 1``."""
    b, t, s = scores.shape
    lengths = jnp.tile(first + 1 + jnp.arange(t, dtype=jnp.int32), b)
    selected = cast(Array, select(lax.stop_gradient(scores).reshape(b * t, s), lengths, k))
    return selected.reshape(b, t, k)


def mask_of(chosen: Int32[Array, "B T k"], columns: int) -> Bool[Array, "B T columns"]:
    """Which positions stand in each row."""
    b, t, _ = chosen.shape
    at = jnp.where(chosen < 0, columns, chosen)
    nothing = jnp.zeros((b, t, columns), bool)
    return nothing.at[jnp.arange(b)[:, None, None], jnp.arange(t)[None, :, None], at].set(True, mode="drop")


def with_selectors(model: Any, make: Callable[[Any], Any]) -> Any:
    """A model of the same parameters, whose every indexer is replaced by ``make(indexer)``."""
    other = nnx.merge(*nnx.split(model))
    for layer in other.layers:
        if layer.self_attn.indexer is not None:
            made = make(layer.self_attn.indexer)
            layer.self_attn.indexer = made if isinstance(made, nnx.Module) else nnx.static(made)
    return other


def most_recent(hidden: Array, q_latent: Array, positions: Array) -> Float32[Array, "B T S"]:
    """A selector of the last tokens: what a sliding window would see."""
    return jnp.broadcast_to(positions.astype(jnp.float32), (*hidden.shape[:2], hidden.shape[1]))


def random_tokens(seed: int) -> Selector:
    """A selector of any tokens."""

    def scores(hidden: Array, q_latent: Array, positions: Array) -> Float32[Array, "B T S"]:
        return jax.random.uniform(jax.random.key(seed), (*hidden.shape[:2], hidden.shape[1]))

    return scores


def other_rope(indexer: Indexer) -> Indexer:
    """The indexer with the RoPE of the other model. To be given to ``with_selectors``."""
    indexer.interleaved = not indexer.interleaved
    return indexer


class Neighbours(nnx.Module):
    """Each request gets what the indexer selects for the next one in the batch. To be given to ``with_selectors``."""

    def __init__(self, indexer: Selector):
        self.indexer = indexer

    def __call__(self, hidden: Shaped[Array, "B T hidden"], q_latent: Array, positions: Array) -> Rows:
        selected = self.indexer(hidden, q_latent, positions)
        return lambda start, size: jnp.roll(rows_of(selected, start, size), 1, axis=0)
