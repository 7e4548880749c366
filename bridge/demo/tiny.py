"""A tiny DeepseekV32ForCausalLM checkpoint: every part of the real architecture, random weights, under a second."""

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bridge.demo import BUILD

FORMAT = 2
"""Raised whenever the files written below change for one and the same `Tiny`: older folders are then not found."""

CACHE = BUILD / "tiny"

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Tiny:
    """What may be chosen, under Hugging Face's names; the rest is DeepSeek-V3.2's own and the layouts depend on it.

    `hidden_size` must not be a multiple of 256: there SGLang takes a fused GEMM that it compiles at first use.
    `n_routed_experts` 0 makes every layer dense; otherwise layer 0 is dense and the others are MoE.
    """

    num_hidden_layers: int = 2
    hidden_size: int = 320
    intermediate_size: int = 512
    num_attention_heads: int = 16
    q_lora_rank: int = 192
    index_n_heads: int = 64
    index_topk: int = 2048
    n_routed_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    max_position_embeddings: int = 163840
    vocab_size: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("n_routed_experts", "seed") else 1
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{field.name} must be an integer of at least {least}, got {value!r}")
        if self.hidden_size % 256 == 0:
            raise ValueError(f"hidden_size must not be a multiple of 256 (SGLang's fused GEMM), got {self.hidden_size}")
        if self.vocab_size < 259:
            raise ValueError(f"vocab_size must be at least 259 (256 bytes and 3 special tokens), got {self.vocab_size}")

    @property
    def dense_layers(self) -> int:
        return 1 if self.n_routed_experts else self.num_hidden_layers

    def config(self) -> dict[str, Any]:
        """config.json, as Hugging Face has it for deepseek-ai/DeepSeek-V3.2 (SGLang needs its rope_scaling)."""
        chosen = dataclasses.asdict(self)
        del chosen["seed"]
        chosen["n_routed_experts"] = self.n_routed_experts or 8
        return chosen | {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "num_key_value_heads": self.num_attention_heads,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "index_head_dim": 128,
            "first_k_dense_replace": self.dense_layers,
            "moe_layer_freq": 1,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "ep_size": 1,
            "num_nextn_predict_layers": 0,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "use_cache": True,
            "pretraining_tp": 1,
        }

    def name(self) -> str:
        """`tiny-<16 hex digits>`: the same for the same checkpoint, another for any other."""
        text = json.dumps([FORMAT, dataclasses.asdict(self)], sort_keys=True)
        return "tiny-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def weights(tiny: Tiny) -> dict[str, Any]:
    """Every tensor of the checkpoint under Hugging Face's names: N(0, 1/fan_in) in bf16, norms 1, biases 0.

    What is added to the residual stream (`o_proj`, `down_proj`) is scaled by (2 `num_hidden_layers`)^-½ as in GPT-2 and
    Megatron, so that the layers' rounding does not outgrow the model.
    """
    import torch

    c = tiny.config()
    hidden, heads, q_lora = tiny.hidden_size, tiny.num_attention_heads, tiny.q_lora_rank
    latent, rope, nope, value, index = (
        c[n] for n in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim")
    )
    generator = torch.Generator().manual_seed(tiny.seed)
    tensors: dict[str, torch.Tensor] = {}
    residual = (2 * tiny.num_hidden_layers) ** -0.5

    def matrix(name: str, rows: int, columns: int, std: float | None = None) -> None:
        sample = torch.randn(rows, columns, generator=generator) * (columns**-0.5 if std is None else std)
        tensors[f"{name}.weight"] = sample.to(torch.bfloat16)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = torch.ones(size, dtype=torch.bfloat16)

    def mlp(name: str, inner: int) -> None:
        matrix(f"{name}.gate_proj", inner, hidden)
        matrix(f"{name}.up_proj", inner, hidden)
        matrix(f"{name}.down_proj", hidden, inner, std=inner**-0.5 * residual)

    matrix("model.embed_tokens", tiny.vocab_size, hidden, std=1.0)
    matrix("lm_head", tiny.vocab_size, hidden)
    norm("model.norm", hidden)
    for number in range(tiny.num_hidden_layers):
        layer = f"model.layers.{number}"
        attention = f"{layer}.self_attn"
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        matrix(f"{attention}.q_a_proj", q_lora, hidden)
        norm(f"{attention}.q_a_layernorm", q_lora)
        matrix(f"{attention}.q_b_proj", heads * (nope + rope), q_lora)
        matrix(f"{attention}.kv_a_proj_with_mqa", latent + rope, hidden)
        norm(f"{attention}.kv_a_layernorm", latent)
        matrix(f"{attention}.kv_b_proj", heads * (nope + value), latent)
        matrix(f"{attention}.o_proj", hidden, heads * value, std=(heads * value) ** -0.5 * residual)
        matrix(f"{attention}.indexer.wq_b", tiny.index_n_heads * index, q_lora)
        matrix(f"{attention}.indexer.wk", index, hidden)
        tensors[f"{attention}.indexer.k_norm.weight"] = torch.ones(index)
        tensors[f"{attention}.indexer.k_norm.bias"] = torch.zeros(index)
        matrix(f"{attention}.indexer.weights_proj", tiny.index_n_heads, hidden)
        if number < tiny.dense_layers:
            mlp(f"{layer}.mlp", tiny.intermediate_size)
            continue
        matrix(f"{layer}.mlp.gate", tiny.n_routed_experts, hidden)
        tensors[f"{layer}.mlp.gate.e_score_correction_bias"] = torch.zeros(tiny.n_routed_experts)
        for expert in range(tiny.n_routed_experts):
            mlp(f"{layer}.mlp.experts.{expert}", tiny.moe_intermediate_size)
        mlp(f"{layer}.mlp.shared_experts", tiny.moe_intermediate_size)
    return tensors


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer without merges: ids 0–2 special, 3–258 the bytes, the rest one filler word each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{i}\u0120" for i in range(len(words), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:3]])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


def checkpoint(tiny: Tiny, cache: Path = CACHE) -> Path:
    """The folder of this checkpoint below `cache`, written first if it isn't there: whole or not at all."""
    from safetensors.torch import save_file

    folder = cache / tiny.name()
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
    try:
        (draft / "config.json").write_text(json.dumps(tiny.config(), indent=2) + "\n")
        save_file(weights(tiny), draft / "model.safetensors", metadata={"format": "pt"})
        write_tokenizer(draft, tiny.vocab_size)
        draft.chmod(0o755)
        try:
            os.rename(draft, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process wrote the same bytes first
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder
