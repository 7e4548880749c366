"""``python -m bench recall``: what the trained model of ``jax_mla.recall`` answers, by who runs it.

The same texts, each ending in questions, go to transformers, to our nnx module and to SGLang through our backend; for
each KV layout, and for dense attention and each number of selected tokens. A question counts as answered if the token
that the model finds likeliest is the answer. Then, in our module alone, the selections that must not work.

- transformers (fp32): reads latents back from the layout's rows as ``bridge.demo.hf.RoundingCache`` makes them; its
  indexer has no FP8.
- nnx (fp32): ``kv_layout``, and an indexer with FP8 and the Hadamard rotation, as the caches that serve have them.
- SGLang (bf16): a server for each layout and selection. Raw FP8 rows are what SGLang keeps where both of its DSA
  backends are TileLang's; the attention is ours all the same.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.table import Table

from bridge.demo.recall import Text, likeliest, text
from jax_mla.layouts import KV_BF16, KV_FP8_576, KV_FP8_656, KVLayout
from jax_mla.nn import load_hf, with_selectors
from jax_mla.recall.evaluate import SABOTAGES
from jax_mla.recall.model import with_topk

LENGTHS = (1024, 2048, 4096, 8192)
SELECTIONS = (0, 64, 128, 256)
"""``index_topk``; 0 is dense."""
QUESTIONS = 64
TILELANG = ("--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "tilelang")
LAYOUTS: dict[str, tuple[KVLayout, tuple[str, ...]]] = {
    "bf16": (KV_BF16, ("--kv-cache-dtype", "bfloat16")),
    "fp8_656": (KV_FP8_656, ("--kv-cache-dtype", "fp8_e4m3")),
    "fp8_576": (KV_FP8_576, ("--kv-cache-dtype", "fp8_e4m3", *TILELANG)),
}
"""By name, and what SGLang is told."""


@dataclass(frozen=True)
class Cell:
    """One figure: ``right`` of ``questions`` answered by ``runtime``."""

    runtime: str
    kv: str
    selection: str
    length: int
    right: int
    questions: int

    @property
    def share(self) -> float:
        return self.right / self.questions

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"share": round(self.share, 4)}


def texts(length: int, count: int, questions: int = QUESTIONS, seed: int = 1 << 20) -> list[Text]:
    """``count`` texts that end in ``questions`` questions."""
    return [text(length, questions, seed + i) for i in range(count)]


def name_of(topk: int) -> str:
    return f"top {topk}" if topk else "dense"


def _cells(runtime: str, kv: str, selection: str, given: Sequence[Text], likeliest: Callable) -> Cell:
    right = sum(text.right(likeliest(text)) for text in given)
    return Cell(runtime, kv, selection, len(given[0].tokens), right, sum(len(text.answers) for text in given))


def nnx_likeliest(model: Any, attention: Any) -> Callable[[Text], np.ndarray]:
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, tokens):
        model = nnx.merge(graph, state)
        return model.head(model.hidden(tokens[None], attention)).argmax(-1)[0]

    return lambda text: np.asarray(run(state, jnp.asarray(text.tokens)))


def of_nnx(folder: Path, kv: str, topks: Iterable[int], all_texts: Sequence[Sequence[Text]]) -> Iterator[Cell]:
    """Our module's figures."""
    how: dict[str, Any] = dict(quantize_indexer=True, hadamard=True, kv_layout=LAYOUTS[kv][0])
    model = load_hf(folder, dtype=jnp.float32, progress=False, **how)
    for topk in topks:
        run = nnx_likeliest(with_topk(model, topk) if topk else model, "sparse" if topk else "dense")
        for given in all_texts:
            yield _cells("nnx", kv, name_of(topk), given, run)


def of_sabotage(folder: Path, topk: int, all_texts: Sequence[Sequence[Text]]) -> Iterator[Cell]:
    """Our module's figures with selections that must not work; texts are taken two at a time, for the neighbour's."""
    model = with_topk(load_hf(folder, dtype=jnp.float32, progress=False, quantize_indexer=True, hadamard=True), topk)
    for name, make in SABOTAGES.items():
        graph, state = nnx.split(with_selectors(model, make))

        @jax.jit
        def run(state, tokens, graph=graph):
            other = nnx.merge(graph, state)
            return other.head(other.hidden(tokens, "sparse")).argmax(-1)

        for given in all_texts:
            likeliest = np.asarray(run(state, jnp.asarray(np.stack([text.tokens for text in given]))))
            right = sum(text.right(row) for text, row in zip(given, likeliest, strict=True))
            questions = sum(len(text.answers) for text in given)
            yield Cell("nnx", "none", f"top {topk}, {name}", len(given[0].tokens), right, questions)


def of_transformers(folder: Path, kv: str, topks: Iterable[int], all_texts: Sequence[Sequence[Text]]) -> Iterator[Cell]:
    """transformers' figures."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from bridge.demo.hf import RoundingCache

    layout = LAYOUTS[kv][0]
    for topk in topks:
        config = AutoConfig.from_pretrained(folder)
        config.index_topk = topk or max(len(given[0].tokens) for given in all_texts)
        how: Any = dict(dtype=torch.float32, attn_implementation="eager", config=config)
        model = AutoModelForCausalLM.from_pretrained(folder, **how).eval()

        def run(text: Text, model=model) -> np.ndarray:
            ids = torch.tensor(text.tokens, dtype=torch.long)[None]
            with torch.no_grad():
                logits = model(ids, past_key_values=RoundingCache(model, layout), use_cache=True).logits
            return logits[0].argmax(-1).numpy()

        for given in all_texts:
            yield _cells("transformers", kv, name_of(topk), given, run)


def of_sglang(folder: Path, kv: str, topks: Iterable[int], all_texts: Sequence[Sequence[Text]]) -> Iterator[Cell]:
    """SGLang's figures, through our backend."""
    import json

    from bridge.demo.server import serve

    longest = max(len(given[0].tokens) for given in all_texts)
    size = ("--context-length", str(longest + 64), "--max-total-tokens", str(2 * longest + 1024))
    fixed = (*size, "--max-running-requests", "2", "--dtype", "bfloat16", "--disable-radix-cache", "--sleep-on-idle")
    for topk in topks:
        override = ("--json-model-override-args", json.dumps({"index_topk": topk or longest + 64}))
        name = f"recall-{kv}-{topk}"
        with serve(folder, *fixed, *LAYOUTS[kv][1], *override, name=name) as server:
            for given in all_texts:
                yield _cells("SGLang", kv, name_of(topk), given, partial(likeliest, server))


RUNTIMES = {"transformers": of_transformers, "nnx": of_nnx, "sglang": of_sglang}


def table(cells: Sequence[Cell]) -> Table:
    """% answered: a line for each runtime, layout and selection."""
    lengths = sorted({cell.length for cell in cells})
    view = Table("by", "KV cache", "selection", *(f"{n:,}" for n in lengths), title="% of questions answered")
    lines: dict[tuple[str, str, str], dict[int, float]] = {}
    for cell in cells:
        lines.setdefault((cell.runtime, cell.kv, cell.selection), {})[cell.length] = 100 * cell.share
    for names, line in lines.items():
        view.add_row(*names, *(f"{line[n]:.1f}" if n in line else "" for n in lengths))
    return view


def markdown(cells: Sequence[Cell]) -> str:
    """The same as the model card has it: a row for each layout and selection, transformers / nnx / SGLang in a cell."""
    lengths = sorted({cell.length for cell in cells})
    found = {(c.runtime, c.kv, c.selection, c.length): 100 * c.share for c in cells}
    lines = [f"| KV cache | selection | {' | '.join(f'{n:,}' for n in lengths)} |", "|---" * (2 + len(lengths)) + "|"]
    for kv, selection in dict.fromkeys((c.kv, c.selection) for c in cells):
        at = [[found.get((r, kv, selection, n)) for r in ("transformers", "nnx", "SGLang")] for n in lengths]
        columns = [" / ".join("–" if x is None else f"{x:.1f}" for x in row) for row in at]
        lines.append(f"| {kv} | {selection} | {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"
