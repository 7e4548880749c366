"""The whole model: embedding, layers, head."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Float32, Int32

from jax_mla.layouts import KVLayout
from jax_mla.nn.attention import Attended, Attention, SparseMLA
from jax_mla.nn.config import DeepseekV32Config
from jax_mla.nn.layers import MLP, Build, Embed, Linear, RMSNorm
from jax_mla.nn.moe import MoE


class DecoderLayer(nnx.Module):
    """Attention, then an MLP or experts, each after a norm and added to the residual stream."""

    def __init__(self, config: DeepseekV32Config, layer: int, *, build: Build, **how: Any):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build=build)
        self.self_attn = SparseMLA(config, layer, build=build, **how)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, build=build)
        sparse = config.mlp_layer_types[layer] == "sparse"
        mlp = MoE(config, build=build) if sparse else MLP(config.hidden_size, config.intermediate_size, build=build)
        self.mlp = mlp

    def feed_forward(self, x: Float[Array, "B T hidden"]) -> Float[Array, "B T hidden"]:
        """The second half."""
        return x + self.mlp(self.post_attention_layernorm(x))

    def __call__(
        self,
        x: Float[Array, "B T hidden"],
        attention: Attention,
        with_kl: bool = False,
        selected: Int32[Array, "B T k"] | None = None,
    ) -> Attended:
        attended = self.self_attn(self.input_layernorm(x), attention, with_kl, selected)
        return attended._replace(out=self.feed_forward(x + attended.out))


class DeepseekV32(nnx.Module):
    """DeepSeek-V3.2, or GLM-MoE-DSA. Differentiable, and blocked over queries so that long contexts fit.

    - `rngs`: its ``params`` stream makes the weights, N(0, ``config.initializer_range``²).
    - `dtype`: of activations and products; `param_dtype`: of parameters.
    - `quantize_indexer`, `hadamard`: the indexers' ``quantize`` and ``hadamard``. `kv_layout`, `kv_scale`: attention's.
    - `remat`: layers keep only their input for the gradient.

    Sequences are causal and start at position 0; what is padded at the right changes nothing before it.
    """

    def __init__(
        self,
        config: DeepseekV32Config,
        *,
        rngs: nnx.Rngs,
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        quantize_indexer: bool = False,
        hadamard: bool = False,
        kv_layout: KVLayout | None = None,
        kv_scale: float = 1.0,
        remat: bool = False,
    ):
        build = Build(rngs, config.initializer_range, jnp.dtype(dtype), jnp.dtype(param_dtype))
        self.config, self.dtype, self.remat = config, build.dtype, remat
        self.embed_tokens = Embed(config.vocab_size, config.hidden_size, build=build)
        how = dict(build=build, quantize=quantize_indexer, hadamard=hadamard, kv_layout=kv_layout, kv_scale=kv_scale)
        self.layers = nnx.List([DecoderLayer(config, layer, **how) for layer in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build=build)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, build=build)

    def _through(self, input_ids: Array, attention: Attention, with_kl: bool) -> Iterator[Attended]:
        if attention not in ("dense", "sparse"):
            raise ValueError(f"attention: expected 'dense' or 'sparse', got {attention!r}")
        x, selected = self.embed_tokens(input_ids), None
        for layer in self.layers:
            if self.remat:
                graph, state = nnx.split(layer)
                run = jax.checkpoint(
                    lambda state, x, selected, graph=graph: _run(graph, state, x, attention, with_kl, selected)
                )
                attended = run(state, x, selected)
            else:
                attended = layer(x, attention, with_kl, selected)
            x, selected = attended.out, attended.selected
            yield attended

    def hidden(
        self, input_ids: Int32[Array, "B T"], attention: Attention = "dense", with_indexer_kl: bool = False
    ) -> Float[Array, "B T hidden"] | tuple[Float[Array, "B T hidden"], Float32[Array, " layers"]]:
        """What goes into ``head``: the last layer's output after the norm. Arguments as for a call."""
        attended = list(self._through(input_ids, attention, with_indexer_kl))
        x = self.norm(attended[-1].out)
        return (x, jnp.stack([a.kl for a in attended])) if with_indexer_kl else x

    def head(self, x: Float[Array, "*rows hidden"]) -> Float32[Array, "*rows vocab"]:
        """Logits, float32."""
        return self.lm_head(x).astype(jnp.float32)

    def selections(self, input_ids: Int32[Array, "B T"]) -> list[Int32[Array, "B T k"]]:
        """The positions that each layer attends to, ascending in each row, -1 padded, in the sparse model."""
        return [a.selected for a in self._through(input_ids, "sparse", False) if a.selected is not None]

    def __call__(
        self, input_ids: Int32[Array, "B T"], attention: Attention = "dense", with_indexer_kl: bool = False
    ) -> Float32[Array, "B T vocab"] | tuple[Float32[Array, "B T vocab"], Float32[Array, " layers"]]:
        """Logits, and with ``with_indexer_kl`` each layer's mean ``indexer_kl``.

        - `attention`: "dense" attends to all tokens up to the row's own, "sparse" to the ``index_topk`` selected.
        - `with_indexer_kl`: over all of those ("dense": the warm-up) or over the selected ("sparse"); 0 for a layer
          that shares. Its gradient reaches the indexers and nothing else; the logits' reaches all else and no indexer.

        Raises ``ValueError`` for another ``attention``, and for the KL of a selector that returns no scores.
        """
        x = self.hidden(input_ids, attention, with_indexer_kl)
        return (self.head(x[0]), x[1]) if isinstance(x, tuple) else self.head(x)


def _run(graph, state, x, attention, with_kl, selected) -> Attended:
    return nnx.merge(graph, state)(x, attention, with_kl, selected)
