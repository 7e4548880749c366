"""Tiny models of transformers' two, random in every parameter, and the same ones as ours."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import DeepseekV32Config as HfDeepseekConfig
from transformers import DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM
from transformers import GlmMoeDsaConfig as HfGlmConfig

from jax_mla.nn import DeepseekV32, DeepseekV32Config

SMALL: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=96,
    intermediate_size=80,
    moe_intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    kv_lora_rank=64,
    q_lora_rank=48,
    qk_rope_head_dim=16,
    qk_nope_head_dim=24,
    v_head_dim=20,
    index_head_dim=32,
    index_n_heads=16,
    index_topk=24,
    first_k_dense_replace=1,
    max_position_embeddings=4096,
    pad_token_id=0,
)
"""What both have in common. Fields may be replaced."""

YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64, rope_theta=1e4, mscale=1.0)
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v32": dict(num_hidden_layers=2, rope_parameters=YARN | dict(mscale_all_dim=1.0)),
    "glm_moe_dsa": dict(num_hidden_layers=3, indexer_types=["full", "shared", "full"], rms_norm_eps=1e-5),
}
MODELS = {
    "deepseek_v32": (HfDeepseekConfig, DeepseekV32ForCausalLM),
    "glm_moe_dsa": (HfGlmConfig, GlmMoeDsaForCausalLM),
}


def transformers_model(model_type: str, **change: Any) -> Any:
    """transformers' model in fp32, eager: matrices N(0, 1/in), norms about 1, biases about 0."""
    make_config, make = MODELS[model_type]
    config = make_config(**(SMALL | OWN[model_type] | change))
    config._attn_implementation = "eager"
    model = make(config).float().eval()
    generator = torch.Generator().manual_seed(7)
    for name, x in model.state_dict().items():
        noise = torch.randn(x.shape, generator=generator)
        if name.endswith("embed_tokens.weight"):
            x.copy_(noise)
        elif x.ndim >= 2:
            x.copy_(noise * x.shape[-1] ** -0.5)
        else:
            x.copy_(0.1 * noise + float("norm.weight" in name))
    return model


def ours(model: Any, **how: Any) -> DeepseekV32:
    """The same weights as ours, in fp32 unless ``how`` says otherwise."""
    config = DeepseekV32Config.from_hf_config(model.config.to_dict())
    made = DeepseekV32(config, rngs=nnx.Rngs(0), **(dict(dtype=jnp.float32) | how))
    given = {name.removeprefix("model."): x.numpy() for name, x in model.state_dict().items()}
    for name in [name for name in given if name.endswith("gate_up_proj")]:
        halves = np.split(given.pop(name), 2, axis=1)
        given |= {name.replace("gate_up", half): x for half, x in zip(("gate", "up"), halves, strict=True)}
    state = nnx.state(made, nnx.Variable)
    flat = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    flat = {name: variable for name, variable in flat.items() if "rngs" not in name}
    assert set(flat) == set(given), set(flat) ^ set(given)
    for name, variable in flat.items():
        assert variable.shape == given[name].shape, name
        variable[...] = jnp.asarray(given[name], variable.dtype)
    nnx.update(made, state)
    return made
