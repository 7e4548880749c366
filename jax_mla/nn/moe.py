"""Experts, picked for each token by a gate with a bias that only the choice sees."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Float32, Int32

from jax_mla.nn.config import DeepseekV32Config
from jax_mla.nn.layers import MLP, Build, product


class LoadBias(nnx.Variable):
    """What the choice of experts is corrected by. No gradient reaches it, so it is not an ``nnx.Param``."""


class Gate(nnx.Module):
    r"""$w = \sigma(W x)$ in float32; the ``num_experts_per_tok`` largest of $w + b$ in the best ``topk_group`` groups.

    A group is as good as its two best experts together. Their $w$ sum up to ``routed_scaling_factor``, with
    ``norm_topk_prob``; else each is multiplied by it.
    """

    def __init__(self, config: DeepseekV32Config, *, build: Build):
        self.config = config
        self.weight = build.matrix(config.n_routed_experts, config.hidden_size)
        self.e_score_correction_bias = LoadBias(jnp.zeros(config.n_routed_experts, jnp.float32))

    def __call__(self, x: Float[Array, "N hidden"]) -> tuple[Int32[Array, "N k"], Float32[Array, "N k"]]:
        """Experts and their weights."""
        c = self.config
        scores = jax.nn.sigmoid(product("ni,oi->no", x.astype(jnp.float32), self.weight[...].astype(jnp.float32)))
        choice = lax.stop_gradient(scores) + self.e_score_correction_bias[...]
        groups = choice.reshape(-1, c.n_group, c.n_routed_experts // c.n_group)
        best = lax.top_k(lax.top_k(groups, 2)[0].sum(-1), c.topk_group)[1]
        kept = (best[..., None] == jnp.arange(c.n_group)).any(1)
        choice = jnp.where(kept[..., None], groups, -jnp.inf).reshape(choice.shape)
        experts = lax.top_k(choice, c.num_experts_per_tok)[1]
        weights = jnp.take_along_axis(scores, experts, axis=1)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return experts, weights * c.routed_scaling_factor


class Experts(nnx.Module):
    """All routed experts, ``[experts, out, in]`` each.

    One expert after the other goes over all tokens: ``n_routed_experts / num_experts_per_tok`` times the products that
    are needed, and the memory of one.
    """

    def __init__(self, config: DeepseekV32Config, *, build: Build):
        n, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_proj = build.matrix(n, inner, hidden)
        self.up_proj = build.matrix(n, inner, hidden)
        self.down_proj = build.matrix(n, hidden, inner)
        self.dtype = build.dtype

    def __call__(
        self, x: Float[Array, "N hidden"], experts: Int32[Array, "N k"], weights: Float32[Array, "N k"]
    ) -> Float[Array, "N hidden"]:
        x = x.astype(self.dtype)

        @jax.checkpoint
        def add(total, expert):
            number, gate, up, down = expert
            share = jnp.where(experts == number, weights, 0.0).sum(-1, keepdims=True)
            gate, up, down = (w.astype(self.dtype) for w in (gate, up, down))
            inner = jax.nn.silu(product("ni,oi->no", x, gate)) * product("ni,oi->no", x, up)
            return total + product("ni,oi->no", inner, down, jnp.dtype(jnp.float32)) * share, None

        numbers = jnp.arange(self.gate_proj.shape[0], dtype=jnp.int32)
        matrices = (numbers, self.gate_proj[...], self.up_proj[...], self.down_proj[...])
        return lax.scan(add, jnp.zeros(x.shape, jnp.float32), matrices)[0].astype(self.dtype)


class MoE(nnx.Module):
    """The picked experts' weighted sum, and the shared experts, which see every token."""

    def __init__(self, config: DeepseekV32Config, *, build: Build):
        self.gate = Gate(config, build=build)
        self.experts = Experts(config, build=build)
        self.shared_experts = MLP(
            config.hidden_size, config.moe_intermediate_size * config.n_shared_experts, build=build
        )

    def __call__(self, x: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        rows = x.reshape(-1, x.shape[-1])
        return self.experts(rows, *self.gate(rows)).reshape(x.shape) + self.shared_experts(x)
