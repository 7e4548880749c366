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

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from bench import results
from bridge.demo.recall import Text, likeliest, text
from jax_mla.layouts import KV_BF16, KV_FP8_576, KV_FP8_656, KVLayout
from jax_mla.nn import load_hf, with_selectors
from jax_mla.recall import MODEL
from jax_mla.recall.evaluate import SABOTAGES
from jax_mla.recall.model import with_topk
from jax_mla.recall.tasks import SLOT

KEPT = results.RESULTS / "recall.jsonl"
CARD = MODEL / "README.md"
LENGTHS = (1024, 2048, 4096, 8192)
TOPK = (0, 64, 128, 256)
"""``index_topk``; 0 is dense."""
QUESTIONS = 64
"""At the end of a text; a quarter of its slots where it is too short for so many."""
TILELANG = ("--dsa-prefill-backend", "tilelang", "--dsa-decode-backend", "tilelang")
LAYOUTS: dict[str, tuple[KVLayout, tuple[str, ...]]] = {
    "bf16": (KV_BF16, ("--kv-cache-dtype", "bfloat16")),
    "fp8_656": (KV_FP8_656, ("--kv-cache-dtype", "fp8_e4m3")),
    "fp8_576": (KV_FP8_576, ("--kv-cache-dtype", "fp8_e4m3", *TILELANG)),
}
"""By name, and what SGLang is told."""
BEGIN, END = "<!-- python -m bench recall --card -->", "<!-- end -->"

Answer = Callable[[Sequence[Text]], Iterable[np.ndarray]]
"""The likeliest token after each position of each text."""


@dataclass(frozen=True)
class Way:
    """Who runs the model, and how."""

    runtime: str
    kv: str
    topk: int
    sabotage: str = ""

    @property
    def selection(self) -> str:
        return (f"top {self.topk}" if self.topk else "dense") + (f", {self.sabotage}" if self.sabotage else "")

    def __str__(self) -> str:
        return f"{self.runtime}, {self.kv}, {self.selection}"


@dataclass(frozen=True)
class Cell:
    """One figure: ``right`` of the ``questions`` of texts of ``length`` tokens are answered."""

    runtime: str
    kv: str
    selection: str
    length: int
    right: int
    questions: int

    @property
    def percent(self) -> float:
        return 100 * self.right / self.questions


def ways(by: Sequence[str], kv: Sequence[str], topk: Sequence[int], sabotage: bool) -> list[Way]:
    """All that are measured, in the table's order. Sabotaged is the smallest selection there is."""
    made = [Way(name, layout, k) for layout in kv for k in topk for name in by]
    least = min((k for k in topk if k), default=0)
    return made + [Way("nnx", "bf16", least, name) for name in SABOTAGES if sabotage and least]


@contextmanager
def by_nnx(folder: Path, way: Way, longest: int) -> Generator[Answer]:
    how: dict[str, Any] = dict(quantize_indexer=True, hadamard=True, kv_layout=LAYOUTS[way.kv][0])
    model = load_hf(folder, dtype=jnp.float32, progress=False, **how)
    if way.topk:
        model = with_topk(model, way.topk)
    if way.sabotage:
        model = with_selectors(model, SABOTAGES[way.sabotage])
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, tokens):
        model: Any = nnx.merge(graph, state)
        return model.head(model.hidden(tokens, "sparse" if way.topk else "dense")).argmax(-1)

    def answer(texts: Sequence[Text]) -> Iterator[np.ndarray]:
        for two in zip(texts[::2], texts[1::2], strict=True):  # a neighbour's selection needs a neighbour
            yield from np.asarray(run(state, jnp.asarray(np.stack([one.tokens for one in two]))))

    yield answer


@contextmanager
def by_transformers(folder: Path, way: Way, longest: int) -> Generator[Answer]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from bridge.demo.hf import RoundingCache

    config = AutoConfig.from_pretrained(folder)
    config.index_topk = way.topk or longest
    how: Any = dict(dtype=torch.float32, attn_implementation="eager", config=config)
    model = AutoModelForCausalLM.from_pretrained(folder, **how).eval()

    def answer(texts: Sequence[Text]) -> Iterator[np.ndarray]:
        for one in texts:
            ids, cache = torch.tensor(one.tokens, dtype=torch.long)[None], RoundingCache(model, LAYOUTS[way.kv][0])
            with torch.no_grad():
                yield model(ids, past_key_values=cache, use_cache=True).logits[0].argmax(-1).numpy()

    yield answer


@contextmanager
def by_sglang(folder: Path, way: Way, longest: int) -> Generator[Answer]:
    from bridge.demo.server import serve

    size = ("--context-length", str(longest + 64), "--max-total-tokens", str(2 * longest + 1024))
    fixed = (*size, "--max-running-requests", "2", "--dtype", "bfloat16", "--disable-radix-cache", "--sleep-on-idle")
    override = ("--json-model-override-args", json.dumps({"index_topk": way.topk or longest + 64}))
    with serve(folder, *fixed, *LAYOUTS[way.kv][1], *override, name=f"recall-{way.kv}-{way.topk}") as server:
        yield lambda texts: (likeliest(server, one) for one in texts)


RUNTIMES = {"transformers": by_transformers, "nnx": by_nnx, "SGLang": by_sglang}


def digest(folder: Path) -> str:
    """Of the weights: SHA-256, 16 digits."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]


def read(file: Path, of: dict[str, Any]) -> list[Cell]:
    """The figures that a file has of runs with these fields."""
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    names = [field.name for field in fields(Cell)]
    return [Cell(**{name: line[name] for name in names}) for line in lines if of.items() <= line.items()]


def run(folder: Path, wanted: Sequence[Way], lengths: Sequence[int], texts: int, file: Path | None) -> list[Cell]:
    """Measures, and returns, a figure for each way and length. Those that ``file`` has of this model and as many texts
    are taken from there; the others are added to it as they come. Raises ``ValueError`` for a bad length."""
    if min(lengths) < 4 * SLOT + 1:
        raise ValueError(f"lengths: expected at least {4 * SLOT + 1}, a question and three records, got {min(lengths)}")
    given = {n: [text(n, min(QUESTIONS, (n - 1) // SLOT // 4), (1 << 20) + i) for i in range(texts)] for n in lengths}
    console, which = Console(width=None if Console().is_terminal else 160), dict(model=digest(folder), texts=texts)
    context = results.context_of(jax.devices()[0]) | which
    known = {(c.runtime, c.kv, c.selection, c.length): c for c in (read(file, which) if file else [])}
    cells = []
    for way in wanted:
        names = (way.runtime, way.kv, way.selection)
        missing = [n for n in lengths if (*names, n) not in known]
        if missing:
            with RUNTIMES[way.runtime](folder, way, max(lengths)) as answer:
                for n in missing:
                    right = sum(one.right(row) for one, row in zip(given[n], answer(given[n]), strict=True))
                    cell = Cell(*names, n, right, sum(len(one.answers) for one in given[n]))
                    known[*names, n] = cell
                    console.print(f"{way}, {n:,} tokens: {cell.percent:.1f} %", highlight=False)
                    if file:
                        with file.open("a") as out:
                            out.write(json.dumps(context | asdict(cell)) + "\n")
        cells += [known[*names, n] for n in lengths]
    console.print(table(cells))
    return cells


def table(cells: Sequence[Cell]) -> Table:
    """% answered: a line for each runtime, layout and selection."""
    lengths = sorted({cell.length for cell in cells})
    view = Table("by", "KV cache", "selection", *(f"{n:,}" for n in lengths), title="% of questions answered")
    lines: dict[tuple[str, str, str], dict[int, float]] = {}
    for cell in cells:
        lines.setdefault((cell.runtime, cell.kv, cell.selection), {})[cell.length] = cell.percent
    for names, line in lines.items():
        view.add_row(*names, *(f"{line[n]:.1f}" if n in line else "" for n in lengths))
    return view


def markdown(cells: Sequence[Cell]) -> str:
    """The same as the model's card has it: a row for each layout and selection, the three runtimes in a cell."""
    lengths = sorted({cell.length for cell in cells})
    found = {(c.runtime, c.kv, c.selection, c.length): c.percent for c in cells}
    lines = [f"| KV cache | selection | {' | '.join(f'{n:,}' for n in lengths)} |", "|---" * (2 + len(lengths)) + "|"]
    for kv, selection in dict.fromkeys((c.kv, c.selection) for c in cells):
        at = [[found.get((name, kv, selection, n)) for name in RUNTIMES] for n in lengths]
        columns = [" / ".join("–" if x is None else f"{x:.1f}" for x in row) for row in at]
        lines.append(f"| {kv} | {selection} | {' | '.join(columns)} |")
    return "\n".join(lines)


def on_card(card: str, tables: str) -> str:
    """The card with these tables in place of those that it has, between `BEGIN` and `END`."""
    before, found, rest = card.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise click.ClickException(f"--card: expected {BEGIN} and, after it, {END} in the model's card, found none")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"
