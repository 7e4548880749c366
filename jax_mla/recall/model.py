"""The model that is trained: DeepSeek-V3.2's architecture, two layers of it, and what its weights start as.

The circuit that recalls is built in, not found by training: prototypes of two layers from random weights learned that
an answer is one of the text's digits and no more (44 % at 64 tokens after 800 steps, 30 % at 128 after 600 more, one
seed each of Adam and Muon; longer was not tried). Training sharpens it, and the indexers' weights are random at first.
What is there at the start, all else being N(0, 1/fan_in):

- The residual stream begins with three blocks of 64: a token's own code, that of the token before, and of the one
  before that. Embeddings fill the first and hold one constant after the blocks.
- Layer 0: head ``d - 1`` looks ``d`` tokens back (RoPE alone decides that, from the constant) and copies the code there
  into block ``d``.
- Layer 1: head 0 compares (own, before) of a question's second letter with (before, one before that) of all tokens, and
  copies the code of the one that agrees: the digit.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_mla.nn import DeepseekV32, DeepseekV32Config, RopeParameters
from jax_mla.nn.indexer import angles
from jax_mla.recall.tokenizer import BOS, EOS, PAD, VOCAB_SIZE

CODE = 64
"""Width of a block; a head's ``v_head_dim`` and ``qk_nope_head_dim`` are as wide."""

CONFIG = DeepseekV32Config(
    vocab_size=VOCAB_SIZE,
    hidden_size=224,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=4,
    q_lora_rank=96,
    qk_nope_head_dim=CODE,
    v_head_dim=CODE,
    n_routed_experts=8,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    first_k_dense_replace=2,
    index_n_heads=8,
    index_topk=64,
    max_position_embeddings=163840,
    rope_parameters=RopeParameters(
        rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
    ),
    bos_token_id=BOS,
    eos_token_id=EOS,
    pad_token_id=PAD,
)
"""1.9 M parameters."""


def create(config: DeepseekV32Config = CONFIG, seed: int = 0, **how) -> DeepseekV32:
    """A model to train; ``how``: what else ``DeepseekV32`` takes.

    Raises ``ValueError`` for a ``config`` of fewer than 2 layers, 2 heads, or whose sizes have no place for the blocks.
    """
    c, least = config, 3 * CODE + 1
    for name, low in (("num_hidden_layers", 2), ("num_attention_heads", 2), ("hidden_size", least)):
        if getattr(c, name) < low:
            raise ValueError(f"create: config.{name} expected at least {low}, got {getattr(c, name)}")
    if (c.qk_nope_head_dim, c.v_head_dim) != (CODE, CODE) or not CODE < c.q_lora_rank:
        got = (c.qk_nope_head_dim, c.v_head_dim, c.q_lora_rank)
        raise ValueError(f"create: config expected heads of {CODE}, q_lora_rank over {CODE}, got {got}")
    model = DeepseekV32(dataclasses.replace(c, initializer_range=1.0), rngs=nnx.Rngs(seed), **how)
    residual = (2 * c.num_hidden_layers) ** -0.5
    variables = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    weights = {path: np.array(value[...], np.float32) for path, value in variables.items()}
    for path, weight in weights.items():
        if weight.ndim == 2 and "embed_tokens" not in path:
            adds = "o_proj" in path or "down_proj" in path
            weight *= weight.shape[1] ** -0.5 * (residual if adds else 1.0)
    _seed({".".join(map(str, path)): weight for path, weight in weights.items()}, c)
    filled = {path: value.replace(jnp.asarray(weights[path], value[...].dtype)) for path, value in variables.items()}
    nnx.update(model, nnx.from_flat_state(filled))
    return _of_config(model, c)


def with_topk(model: DeepseekV32, k: int) -> DeepseekV32:
    """A model of the same parameters that selects ``k`` tokens. Raises ``ValueError`` for a ``k`` below 1."""
    other = nnx.merge(*nnx.split(model))
    return _of_config(other, dataclasses.replace(model.config, index_topk=k))


def _of_config(model: DeepseekV32, config: DeepseekV32Config) -> DeepseekV32:
    model.config = config
    for layer in model.layers:
        layer.self_attn.config = config
    return model


def _seed(weights: dict[str, np.ndarray], c: DeepseekV32Config) -> None:
    """Writes the structure that the module's docstring describes into ``weights``, by their paths in the model."""
    own, before, earlier = (slice(i * CODE, (i + 1) * CODE) for i in range(3))
    constant, height, strength = 3 * CODE, 0.4 * c.hidden_size**0.5, 5.0
    nope, latent = c.qk_nope_head_dim, 0.5 * c.q_lora_rank**0.5
    identity = np.eye(c.hidden_size, dtype=np.float32)
    embed = weights["embed_tokens.weight"]
    weights["lm_head.weight"][:, earlier] = embed[:, own] * 0.5 * CODE**-0.5
    embed[:, own] *= 1.5
    embed[:, CODE : 3 * CODE] *= 0.05
    embed[:, constant] = height

    def of_layer(number: int):
        q_a, q_b, kv_a, o = (
            weights[f"layers.{number}.self_attn.{name}.weight"]
            for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
        )
        kv_a[c.kv_lora_rank :] *= 0.1
        q_b = q_b.reshape(c.num_attention_heads, c.qk_head_dim, c.q_lora_rank)
        q_b[:, nope:] *= 0.1
        return q_a, q_b, kv_a, o

    def read(number: int, head: int, value: np.ndarray, key: np.ndarray | None = None):
        """Has a head's values, and keys, be these maps ``[64, hidden]`` of the hidden state, through the latent."""
        attention = f"layers.{number}.self_attn"
        back = np.linalg.pinv(weights[f"{attention}.kv_a_proj_with_mqa.weight"][: c.kv_lora_rank])
        whole = weights[f"{attention}.kv_b_proj.weight"].reshape(c.num_attention_heads, -1, c.kv_lora_rank)
        whole[head, nope:] = value @ back
        if key is not None:
            whole[head, :nope] = key @ back

    # Layer 0: the first entry of the query latent is a constant, which RoPE's fast columns turn `d` tokens back.
    q_a, q_b, kv_a, o = of_layer(0)
    q_a[0], q_a[:, constant] = 0.0, 0.0
    q_a[0, constant] = latent / height
    cos_sin = np.asarray(angles(c, 3))
    half = cos_sin.shape[1] // 2
    size = np.where(np.arange(half) < half * 3 // 4, strength, 0.0)
    kv_a[c.kv_lora_rank :, constant] = np.stack([size, np.zeros(half)], 1).reshape(-1) / height
    for d, block in ((1, before), (2, earlier)):
        cos, sin = cos_sin[d, :half], cos_sin[d, half:]
        q_b[d - 1, :nope] *= 0.1
        q_b[d - 1, nope:, 0] = np.stack([size * cos, -size * sin], 1).reshape(-1) / latent
        columns = slice((d - 1) * CODE, d * CODE)
        o[:, columns] = 0.0
        o[block, columns] = 1.5 * np.eye(CODE)
        read(0, d - 1, value=identity[own])

    # Layer 1: one projection of two codes, of (own, before) for queries and of (before, earlier) for keys.
    q_a, q_b, kv_a, o = of_layer(1)
    two = np.random.default_rng(0).normal(size=(CODE, 2 * CODE)) * 1.5 * (2 * CODE) ** -0.5
    q_a[:CODE] = two @ identity[: 2 * CODE]
    q_b[:, :nope] *= 0.1
    q_b[0, :nope] = 1.5 * np.eye(nope, c.q_lora_rank)
    read(1, 0, value=identity[own], key=two @ identity[CODE : 3 * CODE])
    o[:, :CODE] = 0.0
    o[earlier, :CODE] = 3.0 * np.eye(CODE)
