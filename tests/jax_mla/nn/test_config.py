"""The configuration: transformers' own fields and defaults, there and back, and refusals that name the field."""

import json

import pytest
from transformers import DeepseekV32Config as HfDeepseek
from transformers import GlmMoeDsaConfig as HfGlm

from bridge.demo.tiny import Tiny
from jax_mla.nn import DeepseekV32Config, RopeParameters

HF = {"deepseek_v32": HfDeepseek, "glm_moe_dsa": HfGlm}
SAME = [
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads",
    "n_shared_experts n_routed_experts routed_scaling_factor kv_lora_rank q_lora_rank qk_rope_head_dim v_head_dim",
    "qk_nope_head_dim n_group topk_group num_experts_per_tok norm_topk_prob max_position_embeddings rms_norm_eps",
    "initializer_range index_topk index_head_dim index_n_heads qk_head_dim first_k_dense_replace",
]


@pytest.mark.parametrize("model_type", HF)
def test_defaults_and_their_json_are_transformers_own(model_type):
    hf = HF[model_type]()
    for config in (
        DeepseekV32Config.from_hf_config({"model_type": model_type}),
        DeepseekV32Config.from_hf_config(hf.to_dict()),
    ):
        for name in " ".join(SAME).split():
            assert getattr(config, name) == getattr(hf, name), name
        assert list(config.mlp_layer_types) == hf.mlp_layer_types
        assert list(config.indexer_types) == getattr(hf, "indexer_types", ["full"] * hf.num_hidden_layers)


@pytest.mark.parametrize("model_type", HF)
def test_there_and_back_by_way_of_transformers(model_type):
    given = Tiny(num_hidden_layers=3).config() | {"model_type": model_type}
    config = DeepseekV32Config.from_hf_config(given)
    assert config == DeepseekV32Config.from_hf_config(config.to_hf_config())
    written = {name: value for name, value in config.to_hf_config().items() if name != "model_type"}
    assert config == DeepseekV32Config.from_hf_config(HF[model_type](**written).to_dict())
    assert config.rope_parameters == RopeParameters(10000.0, "yarn", 40.0, 4096, 32.0, 1.0, 1.0, 1.0)
    assert config.softmax_scale == pytest.approx(0.1352, abs=1e-4)
    assert hash(config) == hash(DeepseekV32Config.from_hf_config(given))


def test_a_path_or_its_folder(tmp_path):
    given = Tiny().config()
    (tmp_path / "config.json").write_text(json.dumps(given))
    expected = DeepseekV32Config.from_hf_config(given)
    for path in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert DeepseekV32Config.from_hf_config(path) == expected


@pytest.mark.parametrize(
    "schedule",
    [{}, {"index_topk_freq": 3}, {"index_topk_freq": 2, "index_skip_topk_offset": 1}, {"index_topk_pattern": "FFSSFS"}],
)
def test_schedules_of_shared_layers_are_transformers_own(schedule):
    config = DeepseekV32Config.from_hf_config({"model_type": "glm_moe_dsa", "num_hidden_layers": 6} | schedule)
    assert list(config.indexer_types) == HfGlm(num_hidden_layers=6, **schedule).indexer_types


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "llama"}, "model_type.*'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act.*'silu'.*'gelu'"),
        ({"topk_method": "greedy"}, "topk_method.*'noaux_tc'.*'greedy'"),
        ({"scoring_func": "softmax"}, "scoring_func.*'softmax'"),
        ({"attention_bias": True}, "attention_bias.*True"),
        ({"num_key_value_heads": 1}, "num_key_value_heads.*num_attention_heads 16.*1"),
        ({"sliding_window": 7}, "sliding_window.*7"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type.*'longrope'"),
        ({"rope_scaling": {"type": "yarn"}}, "factor.*None"),
        ({"rope_scaling": {"short_factor": [1.0]}}, "rope_parameters.*short_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method.*'awq'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "weight_block_size.*64"),
        ({"index_topk": 0}, "index_topk.*at least 1.*0"),
        ({"index_head_dim": 32}, "index_head_dim.*64.*32"),
        ({"n_group": 3}, "n_group.*8 experts.*3"),
        ({"topk_group": 3}, "topk_group.*2.*3"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok.*4.*5"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types.*2 of.*dense"),
        ({"indexer_types": ["full", "shared"]}, "indexer_types.*all full"),
        ({"indexer_rope_interleave": True}, "indexer_rope_interleave.*False.*True"),
    ],
)
def test_refusals_name_the_field_and_the_value(change, words):
    with pytest.raises(ValueError, match=words):
        DeepseekV32Config.from_hf_config(Tiny().config() | change)
