"""What is served, and what is asked of it."""

import random
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bridge.demo.tiny import Tiny

PROMPTS = (1, 2, 63, 64, 65, 200, 400, 700)
"""Lengths: a first page's edges, more than ``index_topk`` 64, and more than one chunk of ``CHUNK``."""
CHUNK = 256
NEW_TOKENS = 32
TIMED_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """One engine.

    - `lane`: "stream" or "jit". `graphs`: SGLang's backend of CUDA graphs in decode.
    - `radix`: with SGLang's radix cache, its core in Python; every prompt is then asked twice.
    """

    lane: Literal["stream", "jit"]
    graphs: Literal["full", "breakable", "disabled"]
    index_topk: int
    kv_cache_dtype: Literal["bfloat16", "fp8_e4m3"]
    radix: bool = False

    @property
    def tiny(self) -> Tiny:
        return Tiny(index_topk=self.index_topk)

    @property
    def model(self) -> tuple[int, str]:
        """Cases of one model, with one cache, compute the same."""
        return self.index_topk, self.kv_cache_dtype

    def __str__(self) -> str:
        radix = ", radix cache" if self.radix else ""
        return f"{self.lane} lane, graphs {self.graphs}, index_topk {self.index_topk}, {self.kv_cache_dtype}{radix}"

    @property
    def name(self) -> str:
        """For a file."""
        return "-".join(str(x) for x in asdict(self).values()).lower()

    def arguments(self) -> dict[str, Any]:
        """Of ``sglang.Engine``; the rest is SGLang's own."""
        graphs = dict(cuda_graph_max_bs_decode=len(PROMPTS), cuda_graph_backend_decode=self.graphs)
        return dict(
            attention_backend="jax_mla",
            kv_cache_dtype=self.kv_cache_dtype,
            dtype="bfloat16",
            disable_radix_cache=not self.radix,
            skip_tokenizer_init=True,
            max_total_tokens=8192,
            max_running_requests=len(PROMPTS),
            context_length=4096,
            mem_fraction_static=0.1,
            chunked_prefill_size=CHUNK,
            grammar_backend="none",
            sampling_backend="pytorch",
            log_level="info",
            **graphs,
        )

    def environment(self) -> dict[str, str]:
        return {"JAX_MLA_LANE": self.lane} | (
            {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"} if self.radix else {}
        )


def prompts(vocab_size: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for length in PROMPTS]


GRAPHS = tuple(
    Case(lane, graphs, 64, kv)
    for kv in ("bfloat16", "fp8_e4m3")
    for lane, graphs in (("stream", "disabled"), ("stream", "full"), ("stream", "breakable"), ("jit", "disabled"))
)
"""All ways to run one model: their tokens and log-probabilities are the same, bit for bit."""
DENSE = tuple(Case("stream", "full", 2048, kv) for kv in ("bfloat16", "fp8_e4m3"))
"""Everything is selected: what differs from transformers is rounding."""
RADIX = (Case("stream", "full", 64, "bfloat16", radix=True),)
CASES = (*GRAPHS[:4], *DENSE, *RADIX, *GRAPHS[4:])
