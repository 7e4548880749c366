"""``python -m jax_mla.recall.train OUT --preset h200``: trains the model of ``jax_mla.recall`` from nothing.

Three kinds of stages, as DeepSeek-V3.2 was trained: ``dense``, the language model over contexts that grow; ``warmup``,
the indexers alone learn what dense attention looks at (all else stands still, and no gradient of it is computed);
``sparse``, the model reads only what is selected, and the indexers go on learning. Texts are made on the device, so
nothing is read.

Writes into ``OUT``: ``log.jsonl``, a line every few steps; ``stage-N``, the model in float32 after each stage, which
``--start`` goes on from; ``model``, the result in bf16 with its tokenizer, for transformers, SGLang and ``load_hf``.
"""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from jax_mla.nn import DeepseekV32, load_hf, save_hf
from jax_mla.recall import tasks
from jax_mla.recall.model import create
from jax_mla.recall.tasks import Batch
from jax_mla.recall.tokenizer import write_tokenizer

Kind = Literal["dense", "warmup", "sparse"]


@dataclass(frozen=True)
class Stage:
    """``steps`` steps on ``batch`` texts of ``length`` tokens each; the learning rate rises, then falls to a tenth."""

    kind: Kind
    length: int
    batch: int
    steps: int
    rate: float


@dataclass(frozen=True)
class Preset:
    """Stages in order, the dtype of activations, and how many steps a line of the log sums up."""

    stages: tuple[Stage, ...]
    dtype: str
    every: int = 20


PRESETS = {
    "h200": Preset(
        (
            Stage("dense", 128, 128, 400, 2e-3),
            Stage("dense", 512, 64, 500, 2e-3),
            Stage("dense", 2048, 16, 400, 1e-3),
            Stage("dense", 8192, 4, 250, 5e-4),
            Stage("warmup", 1024, 16, 600, 3e-3),
            Stage("warmup", 8192, 2, 150, 2e-3),
            Stage("sparse", 1024, 16, 400, 5e-4),
            Stage("sparse", 8192, 2, 200, 5e-4),
        ),
        "bfloat16",
    ),
    "cpu": Preset(
        (
            Stage("dense", 64, 32, 150, 2e-3),
            Stage("dense", 256, 16, 150, 2e-3),
            Stage("warmup", 512, 4, 150, 3e-3),
            Stage("sparse", 512, 4, 60, 5e-4),
            Stage("dense", 1024, 4, 80, 1e-3),
            Stage("warmup", 1024, 4, 200, 3e-3),
            Stage("warmup", 4096, 1, 60, 2e-3),
            Stage("sparse", 1024, 4, 120, 5e-4),
            Stage("sparse", 4096, 1, 60, 5e-4),
            Stage("warmup", 4096, 1, 60, 1e-3),
        ),
        "float32",
    ),
    "smoke": Preset(
        (Stage("dense", 96, 2, 3, 1e-3), Stage("warmup", 96, 2, 3, 1e-3), Stage("sparse", 96, 2, 3, 1e-3)),
        "float32",
        every=2,
    ),
}


def losses(model: DeepseekV32, batch: Batch, kind: Kind) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What a stage minimises, and what is written about it: cross-entropy, the share of answers that are right, KL."""
    attention = "sparse" if kind == "sparse" else "dense"
    if kind == "dense":
        logits, kl = model(batch.tokens, attention), jnp.zeros(1)
    else:
        logits, kl = model(batch.tokens, attention, with_indexer_kl=True)
    assert isinstance(logits, jax.Array)
    logits, targets, weights, answers = logits[:, :-1], batch.tokens[:, 1:], batch.weights[:, 1:], batch.answers[:, 1:]
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    lm = (entropy * weights).sum() / jnp.maximum(weights.sum(), 1.0)
    right = ((logits.argmax(-1) == targets) & answers).sum() / jnp.maximum(answers.sum(), 1)
    total = {"dense": lm, "warmup": kl.sum(), "sparse": lm + kl.sum()}[kind]
    return total, {"lm": lm, "answers": right, "kl": kl.sum()}


def steps(model: DeepseekV32, stage: Stage, key: jax.Array) -> Iterator[dict[str, jax.Array]]:
    """Trains ``model`` in place, with Adam from scratch: what ``losses`` writes, after each step.

    The model has its new weights when this is exhausted, and not before.
    """
    trained = nnx.PathContains("indexer") if stage.kind == "warmup" else nnx.Everything()
    graph, state, still = nnx.split(model, trained, ...)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, stage.rate, min(50, stage.steps // 4), stage.steps, stage.rate / 10
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.95))

    def step(state: Any, moments: Any, still: Any, key: jax.Array):
        batch = tasks.mixed(key, stage.batch, stage.length)
        loss = lambda state: losses(nnx.merge(graph, state, still), batch, stage.kind)  # noqa: E731
        gradient, figures = jax.grad(loss, has_aux=True)(state)
        updates, moments = optimizer.update(gradient, moments, state)
        return optax.apply_updates(state, updates), moments, figures

    compiled = jax.jit(step, donate_argnums=(0, 1))
    state = jax.tree.map(jnp.copy, state)  # the model keeps its own until the end
    moments = optimizer.init(state)
    for number in range(stage.steps):
        state, moments, figures = compiled(state, moments, still, jax.random.fold_in(key, number))
        yield figures
    nnx.update(model, state)


def train(model: DeepseekV32, preset: Preset, out: Path, *, skip: int = 0, seed: int = 0, console: Console) -> None:
    """All stages but the first ``skip``, and all files, in the folder ``out``, which exists."""
    with (out / "log.jsonl").open("a") as log:
        for number, stage in list(enumerate(preset.stages))[skip:]:
            began, waiting = time.perf_counter(), []
            for step, figures in enumerate(steps(model, stage, jax.random.fold_in(jax.random.key(seed), number)), 1):
                waiting.append(figures)
                if step % preset.every and step != stage.steps:
                    continue
                mean = {name: float(np.mean([float(f[name]) for f in waiting])) for name in waiting[0]}
                seconds = (time.perf_counter() - began) / len(waiting)
                line = dict(stage=number, kind=stage.kind, length=stage.length, step=step, **mean, step_s=seconds)
                log.write(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in line.items()}) + "\n")
                log.flush()
                console.print(
                    f"{number} {stage.kind} {stage.length} tokens, step {step}: lm {mean['lm']:.3f}, "
                    f"answers {100 * mean['answers']:.1f} %, KL {mean['kl']:.3f}, {seconds:.3f} s a step"
                )
                began, waiting = time.perf_counter(), []
            save_anew(model, out / f"stage-{number}", jnp.float32)
    save_anew(model, out / "model", jnp.bfloat16)


def named(model: DeepseekV32) -> dict[str, jax.Array]:
    """Every parameter, by its path in the model."""
    return {".".join(map(str, path)): value[...] for path, value in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def save_anew(model: DeepseekV32, folder: Path, dtype) -> None:
    """``save_hf`` and the tokenizer, instead of what an earlier run left in ``folder``."""
    shutil.rmtree(folder, ignore_errors=True)
    save_hf(model, folder, dtype=dtype, progress=False)
    write_tokenizer(folder)


@click.command(help=__doc__)
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--preset", type=click.Choice(sorted(PRESETS)), required=True)
@click.option("--start", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A model to go on from.")
@click.option("--skip", default=0, show_default=True, help="Stages to leave out, from the first on.")
@click.option("--seed", default=0, show_default=True)
def main(out: Path, preset: str, start: Path | None, skip: int, seed: int):
    chosen = PRESETS[preset]
    out.mkdir(parents=True, exist_ok=True)
    dtype = jnp.dtype(chosen.dtype)
    model = load_hf(start, dtype=dtype, progress=False) if start else create(seed=seed, dtype=dtype)
    train(model, chosen, out, skip=skip, seed=seed, console=Console())


if __name__ == "__main__":
    main()
