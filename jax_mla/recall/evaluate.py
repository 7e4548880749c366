"""``python -m jax_mla.recall.evaluate MODEL``: what a trained model recalls, at which length, with which selection.

``MODEL`` is a folder that ``jax_mla.recall.train`` wrote. The questions are the last 64 slots of each text, so that a
text of 8,192 tokens has 1,983 records. Beside dense attention and the indexer's selection of 64, 128 and 256 tokens
stand selections that must not work: tokens at random, the most recent, the indexer with its RoPE interleaved (GLM's),
and each text with the selection of its neighbour in the batch.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from jax_mla.nn import DeepseekV32, load_hf, with_selectors
from jax_mla.nn.attention import Attention
from jax_mla.nn.indexer import Neighbours, most_recent, other_rope, random_tokens
from jax_mla.recall import tasks
from jax_mla.recall.model import with_topk

LENGTHS = (1024, 2048, 4096, 8192)
QUESTIONS = 64
SABOTAGES: dict[str, Callable[[Any], Any]] = {
    "random": lambda indexer: random_tokens(0),
    "most recent": lambda indexer: most_recent,
    "wrong RoPE": other_rope,
    "neighbour's": Neighbours,
}
"""What takes the place of each indexer."""


def accuracy(
    model: DeepseekV32,
    length: int,
    attention: Attention = "sparse",
    *,
    texts: int = 4,
    questions: int = QUESTIONS,
    batch: int = 2,
    seed: int = 1 << 20,
) -> float:
    """Of ``texts`` texts of ``length`` tokens that end in ``questions`` questions: the share that ``model`` answers.

    Raises ``ValueError`` unless ``texts`` is a multiple of ``batch``, which is at least 2 (a neighbour is needed).
    """
    if batch < 2 or texts % batch:
        raise ValueError(f"accuracy: texts expected a multiple of batch, at least 2, got {texts} and {batch}")
    graph, state = nnx.split(model)

    @jax.jit
    def right(state, keys):
        made = jax.vmap(lambda key: tasks.recall(key, length, last=questions))(keys)
        logits = nnx.merge(graph, state)(made.tokens, attention)
        assert isinstance(logits, jax.Array)
        return ((logits[:, :-1].argmax(-1) == made.tokens[:, 1:]) & made.answers[:, 1:]).sum()

    keys = jax.random.split(jax.random.key(seed), texts).reshape(-1, batch)
    return float(np.mean([int(right(state, k)) / (batch * questions) for k in keys]))


def rows(model: DeepseekV32, topk: tuple[int, ...]) -> dict[str, tuple[DeepseekV32, Attention]]:
    """What is measured, by name: dense, ``topk`` tokens selected, and each sabotage of the first of them."""
    made: dict[str, tuple[DeepseekV32, Attention]] = {"dense": (model, "dense")}
    made |= {f"top {k}": (with_topk(model, k), "sparse") for k in topk}
    first = with_topk(model, topk[0])
    return made | {
        f"top {topk[0]}, {name}": (with_selectors(first, make), "sparse") for name, make in SABOTAGES.items()
    }


def measure(
    model: DeepseekV32,
    lengths: tuple[int, ...] = LENGTHS,
    topk: tuple[int, ...] = (64, 128, 256),
    *,
    console: Console | None = None,
    **how,
) -> dict[str, dict[int, float]]:
    """``accuracy`` of each of ``rows`` at each length; ``how``: what else ``accuracy`` takes.

    With a ``console``, each figure is written there as soon as it is known, and a table at the end.
    """
    variants = rows(model, topk)
    figures: dict[str, dict[int, float]] = {name: {} for name in variants}
    for length in lengths:
        for name, (variant, attention) in variants.items():
            figures[name][length] = accuracy(variant, length, attention, **how)
            if console:
                console.print(f"{length} tokens, {name}: {100 * figures[name][length]:.1f} %")
    if console:
        table = Table("selection", *(str(length) for length in lengths), title="% of questions answered")
        for name, of_length in figures.items():
            table.add_row(name, *(f"{100 * of_length[length]:.1f}" for length in lengths))
        console.print(table)
    return figures


def integers(context, parameter, given: str) -> tuple[int, ...]:
    """A click callback: comma-separated integers."""
    try:
        return tuple(int(x) for x in given.split(","))
    except ValueError:
        raise click.BadParameter(f"expected integers with commas between, got {given!r}") from None


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--lengths", default=",".join(map(str, LENGTHS)), callback=integers, help="Tokens of a text.")
@click.option("--texts", default=4, show_default=True, help="Texts for each figure, two at a time.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Where figures go as JSON.")
def main(model: Path, lengths: tuple[int, ...], texts: int, dtype: str, output: Path | None):
    figures = measure(load_hf(model, dtype=jnp.dtype(dtype), progress=False), lengths, texts=texts, console=Console())
    if output:
        output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
