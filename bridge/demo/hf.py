"""transformers' own deepseek_v32 on the same tokens: what SGLang's answers are measured against.

Read in transformers 5.19.0 (`models/deepseek_v32/modeling_deepseek_v32.py`): attention's RoPE is interleaved, the
indexer's is NeoX (half-split) on the first 64 of 128; the indexer has no Hadamard rotation, which changes no dot
product, and no FP8, which does. `RoundingCache` and `Indexers` put in what SGLang's caches round, by jax_mla's rules.
"""

from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer, apply_rotary_pos_emb

from bridge.sglang.cache import HADAMARD
from jax_mla.fp8 import AMAX_FLOOR, E4M3FN, decode
from jax_mla.hadamard import hadamard_matrix
from jax_mla.layouts import KVLayout
from jax_mla.ops.kv_write import kv_pack
from jax_mla.ops.quantize import quantize


class Models(NamedTuple):
    """DeepseekV32ForCausalLM of one checkpoint, attention in plain torch: in fp32, and in bf16."""

    exact: Any
    rounded: Any


def load(folder: Path) -> Models:
    def model(dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()

    return Models(model(torch.float32), model(torch.bfloat16))


class RoundingCache(DynamicCache):
    """A cache that gives back each latent and RoPE part as `layout` would: written by its rule and read again."""

    def __init__(self, model: Any, layout: KVLayout) -> None:
        super().__init__(config=model.config)
        self.layout = layout

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_, **__):
        """Takes and returns the normalised latent `[1, 1, T, 512]` and the key's RoPE part `[1, 1, T, 64]`."""
        latent, rope = (jnp.asarray(x.float().reshape(-1, x.shape[-1]).numpy()) for x in (key_states, value_states))
        rows = self.layout.unpack(kv_pack(latent, rope, layout=self.layout))
        read = torch.from_numpy(np.array(rows)).to(key_states.dtype)[None, None]
        width = latent.shape[1]
        return super().update(read[..., :width], read[..., width:], layer_idx)


def logprobs(model: Any, ids: Sequence[int], layout: KVLayout | None = None) -> np.ndarray:
    """float32 `[T - 1]`: the natural log-probability of each token but the first, given those before it.

    With `layout`, the KV cache rounds as that layout does.
    """
    tokens = torch.tensor([ids])
    cache = None if layout is None else RoundingCache(model, layout)
    with torch.no_grad():
        predicted = model(tokens, past_key_values=cache, use_cache=cache is not None).logits[0].float().log_softmax(-1)
    return predicted[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()


def indexer_fp8(x: torch.Tensor) -> torch.Tensor:
    """`x [..., 128]`, rotated, as read back from the indexer's FP8: e4m3fn, power-of-two scales, amax floor 1e-4."""
    rows = jnp.asarray(x.reshape(-1, x.shape[-1]).float().numpy())
    rows = rows @ hadamard_matrix(x.shape[-1]) if HADAMARD else rows
    codes, scales = quantize(rows, fp8=E4M3FN, scale="ue8m0", amax_floor=AMAX_FLOOR, implementation="reference")
    return torch.from_numpy(np.array(decode(codes, E4M3FN) * scales)).reshape(x.shape)


class Scores(NamedTuple):
    """One layer's index scores, float32 `[T, T]`, -inf above the diagonal."""

    exact: np.ndarray
    quantised: np.ndarray


class Indexers:
    """Inside `with Indexers(model, …) as indexers`, the model's indexers quantise as the index cache does.

    They select by the quantised scores, ties to the lower position, or as they are told: `selected` is int32
    `[T, layers, index_topk]`, -1 for none. After one sequence, `indexers.scores` has an entry for each layer.
    """

    def __init__(self, model: Any, selected: np.ndarray | None = None) -> None:
        self.modules: list[DeepseekV32Indexer] = [layer.self_attn.indexer for layer in model.model.layers]
        self.selected = selected
        self.scores: list[Scores] = []

    def __enter__(self) -> "Indexers":
        for module in self.modules:
            module.forward = MethodType(self._forward, module)
        return self

    def __exit__(self, *error: object) -> None:
        for module in self.modules:
            del module.forward

    @torch.no_grad()
    def _forward(self, module: DeepseekV32Indexer, hidden_states, q_resid, position_embeddings, mask, *_, **__):
        layer = len(self.scores)
        cos, sin = position_embeddings
        rope = module.qk_rope_head_dim
        q = module.wq_b(q_resid).unflatten(-1, (module.n_heads, module.head_dim))
        k = module.k_norm(module.wk(hidden_states)).unsqueeze(2)
        q_rope, k_rope = apply_rotary_pos_emb(q[..., :rope], k[..., :rope], cos, sin, unsqueeze_dim=2)
        q, k = (
            torch.cat([q_rope, q[..., rope:]], -1)[0].float(),
            torch.cat([k_rope, k[..., rope:]], -1)[0, :, 0].float(),
        )
        weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype))[0].float()
        weights *= module.n_heads**-0.5 * module.softmax_scale
        future = torch.ones(len(k), len(k), dtype=torch.bool).triu(1)

        def scores(q: torch.Tensor, k: torch.Tensor) -> np.ndarray:
            logits = torch.einsum("ths,th->ts", torch.einsum("thd,sd->ths", q, k).relu(), weights)
            return logits.masked_fill(future, -torch.inf).numpy()

        self.scores.append(Scores(scores(q, k), scores(indexer_fp8(q), indexer_fp8(k))))
        if self.selected is None:
            selected = picks(self.scores[-1].quantised, module.index_topk)
        else:
            selected = self.selected[:, layer]
        # transformers scatters the indices into a mask: a second mention of the row's first stands for "none".
        selected = np.where(selected < 0, selected[:, :1], selected)
        return torch.from_numpy(selected.astype(np.int32))[None]


def picks(scores: np.ndarray, k: int) -> np.ndarray:
    """int32 `[T, k]`: the positions of each row's `k` largest scores, ties to the lower position, -1 for none."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int32)
    order[np.take_along_axis(scores, order, axis=1) == -np.inf] = -1
    return np.pad(order, ((0, 0), (0, k - order.shape[1])), constant_values=-1)
