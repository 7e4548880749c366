"""What a DeepSeek-V3.2 or a GLM-MoE-DSA is made of, under Hugging Face's names.

Read in transformers 5.19.0 (``models/deepseek_v32``, ``models/glm_moe_dsa``). The two differ in their defaults, in the
RoPE of the indexer (halves; interleaved in GLM) and in that GLM's layers may share the selection of the last layer
that has an indexer. Both: attention's RoPE interleaved, indexer keys through a layer norm (eps 1e-6), head weights
times ``index_n_heads^-0.5 index_head_dim^-0.5``, no Hadamard rotation, experts picked by sigmoid, bias and groups.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ARCHITECTURES = {"deepseek_v32": "DeepseekV32ForCausalLM", "glm_moe_dsa": "GlmMoeDsaForCausalLM"}

LATENT_NORM_EPS = 1e-6
"""Of ``q_a_layernorm``, ``kv_a_layernorm`` and the indexer's ``k_norm``, whatever ``rms_norm_eps`` is."""

GLM_DEFAULTS: dict[str, Any] = dict(
    vocab_size=154880,
    hidden_size=6144,
    intermediate_size=12288,
    num_hidden_layers=78,
    num_attention_heads=64,
    q_lora_rank=2048,
    v_head_dim=256,
    qk_nope_head_dim=192,
    n_group=1,
    topk_group=1,
    max_position_embeddings=202752,
    rms_norm_eps=1e-5,
    index_n_heads=32,
)
"""Where GLM-MoE-DSA's defaults are not DeepSeek-V3.2's."""

ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "pretraining_tp": (1,),
    "rope_interleave": (True,),
    "scoring_func": ("sigmoid",),
    "tie_word_embeddings": (False,),
    "topk_method": ("noaux_tc",),
}
"""Fields of a config.json that may be there with these values."""

IGNORED = frozenset(
    "_name_or_path architectures auto_map aux_loss_alpha chunk_size_feed_forward dtype ep_size head_dim id2label "
    "index_skip_topk_offset index_topk_freq index_topk_pattern is_encoder_decoder label2id output_attentions "
    "output_hidden_states output_router_logits problem_type qk_head_dim return_dict rope_scaling rope_theta "
    "router_aux_loss_coef seq_aux torch_dtype transformers_version use_cache".split()
)
"""Fields that change nothing here, or that are read into others."""


def _refuse(condition: bool, field: str, expected: str, got: object) -> None:
    if condition:
        raise ValueError(f"{field}: expected {expected}, got {got!r}")


@dataclasses.dataclass(frozen=True)
class RopeParameters:
    """RoPE, plain (``rope_type`` "default") or with YaRN's interpolation ("yarn", which needs all fields)."""

    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self):
        _refuse(self.rope_type not in ("default", "yarn"), "rope_type", "'default' or 'yarn'", self.rope_type)
        _refuse(self.rope_theta <= 0, "rope_theta", "a positive number", self.rope_theta)
        _refuse(self.factor < 1, "factor", "at least 1", self.factor)
        _refuse(self.rope_type == "default" and self.factor != 1, "factor", "1 without YaRN", self.factor)

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def attention_scaling(self) -> float:
        """What cosines and sines are multiplied by: 1 where ``mscale`` equals ``mscale_all_dim``."""
        if self.rope_type == "default":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def softmax_factor(self) -> float:
        """What the softmax scale is multiplied by: the square of YaRN's ``mscale_all_dim``."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> "RopeParameters":
        """Of ``rope_parameters``, or of ``rope_scaling`` and ``rope_theta``. ``ValueError`` for what isn't there."""
        merged = {"rope_theta": given.get("rope_theta", 10000.0)}
        merged |= given.get("rope_scaling") or given.get("rope_parameters") or {}
        kind = merged.pop("type", None)
        merged.setdefault("rope_type", kind or "default")
        fields = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(merged) - fields)
        _refuse(bool(unknown), "rope_parameters", f"only {sorted(fields)}", unknown)
        if merged["rope_type"] == "yarn":
            for name in ("factor", "original_max_position_embeddings"):
                _refuse(merged.get(name) is None, f"rope_parameters.{name}", "a number with rope_type 'yarn'", None)
        values = {name: value for name, value in merged.items() if value is not None}
        whole = ("rope_type", "original_max_position_embeddings")
        typed: dict[str, Any] = {name: value if name in whole else float(value) for name, value in values.items()}
        return cls(**typed)

    def to_hf(self) -> dict[str, Any]:
        """``rope_parameters`` of a config.json."""
        if self.rope_type == "default":
            return {"rope_theta": self.rope_theta, "rope_type": self.rope_type}
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclasses.dataclass(frozen=True)
class DeepseekV32Config:
    """One model. Hashable, so that it can be a static argument.

    - `mlp_layer_types`: "dense" or "sparse" (experts) for each layer; empty: ``first_k_dense_replace`` dense ones.
    - `indexer_types`: "full", or "shared" for a layer that selects what the last full one did; empty: all full.
    - `num_nextn_predict_layers`: layers after the last, for speculation, whose tensors a checkpoint may have and that
      are left out.

    Raises ``ValueError`` that names the field, what was expected and what came.
    """

    model_type: str = "deepseek_v32"
    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    n_shared_experts: int = 1
    n_routed_experts: int = 256
    routed_scaling_factor: float = 2.5
    kv_lora_rank: int = 512
    q_lora_rank: int = 1536
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    qk_nope_head_dim: int = 128
    n_group: int = 8
    topk_group: int = 4
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    max_position_embeddings: int = 163840
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    pad_token_id: int | None = None
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    rope_parameters: RopeParameters = RopeParameters()
    first_k_dense_replace: int = 3
    mlp_layer_types: tuple[str, ...] = ()
    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 64
    indexer_types: tuple[str, ...] = ()
    num_nextn_predict_layers: int = 0

    def __post_init__(self):
        _refuse(self.model_type not in ARCHITECTURES, "model_type", f"one of {sorted(ARCHITECTURES)}", self.model_type)
        at_least_0 = {"first_k_dense_replace", "num_nextn_predict_layers", "pad_token_id", "bos_token_id"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "eos_token_id" or isinstance(value, bool):
                continue
            least = 0 if field.name in at_least_0 else 1
            if isinstance(value, int):
                _refuse(value < least, field.name, f"at least {least}", value)
        n, layers = self.num_hidden_layers, range(self.num_hidden_layers)
        if not self.mlp_layer_types:
            kinds = tuple("dense" if i < self.first_k_dense_replace else "sparse" for i in layers)
            object.__setattr__(self, "mlp_layer_types", kinds)
        if not self.indexer_types:
            object.__setattr__(self, "indexer_types", ("full",) * n)
        for name, kinds in (("mlp_layer_types", ("dense", "sparse")), ("indexer_types", ("full", "shared"))):
            got = getattr(self, name)
            _refuse(len(got) != n or not set(got) <= set(kinds), name, f"{n} of {' and '.join(kinds)}", got)
        shared = "shared" in self.indexer_types
        _refuse(shared and self.model_type != "glm_moe_dsa", "indexer_types", "all full", self.indexer_types)
        _refuse(shared and self.indexer_types[0] == "shared", "indexer_types", "full first", self.indexer_types)
        _refuse(self.qk_rope_head_dim % 2 == 1, "qk_rope_head_dim", "an even number", self.qk_rope_head_dim)
        least = self.qk_rope_head_dim
        _refuse(
            self.index_head_dim < least, "index_head_dim", f"at least qk_rope_head_dim {least}", self.index_head_dim
        )
        self._check_experts()

    def _check_experts(self):
        experts, groups = self.n_routed_experts, self.n_group
        _refuse(experts % groups > 0 or experts // groups < 2, "n_group", f"{experts} experts in groups of 2+", groups)
        _refuse(self.topk_group > groups, "topk_group", f"at most n_group {groups}", self.topk_group)
        most = experts // groups * self.topk_group
        got = self.num_experts_per_tok
        _refuse(got > most, "num_experts_per_tok", f"at most the {most} experts of topk_group groups", got)

    @property
    def qk_head_dim(self) -> int:
        """Columns of a query head: ``qk_nope_head_dim + qk_rope_head_dim``."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """``qk_head_dim^-0.5``, times YaRN's factor."""
        return self.qk_head_dim**-0.5 * self.rope_parameters.softmax_factor

    @property
    def indexer_interleaved(self) -> bool:
        """Whether the indexer's RoPE is interleaved: GLM-MoE-DSA's is, DeepSeek-V3.2's turns halves."""
        return self.model_type == "glm_moe_dsa"

    @classmethod
    def from_hf_config(cls, given: Mapping[str, Any] | str | os.PathLike) -> "DeepseekV32Config":
        """Of a config.json: its content, its path or its folder.

        A missing field has transformers' default. Raises ``ValueError`` for a field that is unknown and for a value
        that is not supported.
        """
        if not isinstance(given, Mapping):
            path = Path(given)
            given = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        assert isinstance(given, Mapping)
        model_type = given.get("model_type")
        _refuse(model_type not in ARCHITECTURES, "model_type", f"one of {sorted(ARCHITECTURES)}", model_type)
        glm = model_type == "glm_moe_dsa"
        own = {field.name for field in dataclasses.fields(cls)}
        values = dict(GLM_DEFAULTS) if glm else {}
        lists = ("mlp_layer_types", "indexer_types")
        values |= {name: value for name, value in given.items() if name in own - {"rope_parameters"}}
        values = {name: value for name, value in values.items() if name not in lists or value is not None}
        values["rope_parameters"] = RopeParameters.from_hf(given)
        for name, other in (("n_routed_experts", "num_local_experts"), ("n_routed_experts", "num_experts")):
            if other in given:
                values[name] = given[other]
        layers = values.get("num_hidden_layers", cls.num_hidden_layers)
        for name, value in given.items():
            if name in ONLY:
                _refuse(value not in ONLY[name], name, " or ".join(map(repr, ONLY[name][:1])), value)
            elif name == "num_key_value_heads":
                heads = values.get("num_attention_heads", cls.num_attention_heads)
                _refuse(value != heads, name, f"num_attention_heads {heads}", value)
            elif name == "indexer_rope_interleave":
                _refuse(value is not glm, name, f"{glm} for {model_type}", value)
            elif name == "layer_types":
                _refuse(
                    value is not None and set(value) != {"indexed_attention"}, name, "indexed_attention only", value
                )
            elif name == "quantization_config":
                _check_quantization(value)
            elif name not in own | IGNORED | {"num_local_experts", "num_experts"}:
                raise ValueError(f"{name}: expected a field of {model_type} that jax_mla.nn knows, got {value!r}")
        if glm and "indexer_types" not in values:
            values["indexer_types"] = _indexer_types(given, layers)
        for name in (*lists, "eos_token_id"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        for name in ("routed_scaling_factor", "initializer_range", "rms_norm_eps"):
            if name in values:
                values[name] = float(values[name])
        return cls(**values)

    def to_hf_config(self) -> dict[str, Any]:
        """config.json, as transformers and SGLang read it."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "rope_parameters"}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        if self.model_type != "glm_moe_dsa":
            del values["indexer_types"]
        rope = self.rope_parameters.to_hf()
        values |= {"rope_theta": self.rope_parameters.rope_theta, "rope_parameters": rope}
        if self.rope_parameters.rope_type == "yarn":
            scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
            values["rope_scaling"] = scaling | {"type": "yarn"}
        return values | {
            "architectures": [ARCHITECTURES[self.model_type]],
            "num_key_value_heads": self.num_attention_heads,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "tie_word_embeddings": False,
            "use_cache": True,
            "indexer_rope_interleave": self.indexer_interleaved,
        }


def _check_quantization(value: Mapping[str, Any] | None) -> None:
    """Nothing, or FP8 in blocks of 128 by 128, as ``load_hf`` reads it."""
    if value is None:
        return
    method, block = value.get("quant_method"), value.get("weight_block_size")
    _refuse(method != "fp8", "quantization_config.quant_method", "'fp8'", method)
    _refuse(list(block or ()) != [128, 128], "quantization_config.weight_block_size", "[128, 128]", block)


def _indexer_types(given: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """GLM's schedule of shared layers, from its pattern or its frequency and offset."""
    pattern = given.get("index_topk_pattern")
    if pattern is not None:
        if isinstance(pattern, str):
            _refuse(not set(pattern) <= {"F", "S"}, "index_topk_pattern", "F and S only", pattern)
            return tuple({"F": "full", "S": "shared"}[c] for c in pattern)
        return tuple(pattern)
    freq, offset = max(given.get("index_topk_freq", 1), 1), given.get("index_skip_topk_offset", 2)
    return tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers))
