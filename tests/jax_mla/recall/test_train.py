import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from jax_mla.nn import load_hf
from jax_mla.recall import evaluate, tasks, train
from jax_mla.recall.model import CONFIG, create
from jax_mla.recall.train import PRESETS


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recall") / "out"
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam raises a float to an integer's power
        result = CliRunner().invoke(train.main, [str(folder), "--preset", "smoke"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return folder


def test_writes_what_it_says(out):
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [(x["kind"], x["step"]) for x in lines] == [(k, s) for k in ("dense", "warmup", "sparse") for s in (2, 3)]
    assert all(np.isfinite(x["lm"]) for x in lines)
    assert all((x["kl"] > 0) == (x["kind"] != "dense") for x in lines)
    names = {path.name for path in (out / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert (out / "model/model.safetensors").stat().st_size < 5 << 20


def weights(folder):
    model = load_hf(folder, dtype=jnp.float32, progress=False)
    assert model.config == CONFIG
    return {name: np.asarray(value) for name, value in train.named(model).items()}


def test_each_stage_trains_what_it_should(out):
    made = create(dtype=jnp.float32)
    stages = [{name: np.asarray(x) for name, x in train.named(made).items()}]
    stages += [weights(out / f"stage-{i}") for i in range(3)]
    changed = [{n for n in a if (a[n] != b[n]).any()} for a, b in zip(stages, stages[1:], strict=False)]
    indexers = {name for name in stages[0] if "indexer" in name}
    assert changed[0].isdisjoint(indexers) and len(changed[0]) > 10
    assert changed[1] and changed[1] <= indexers
    assert changed[2] & indexers and changed[2] - indexers


def test_evaluates_every_selection(out):
    model = load_hf(out / "model", progress=False)
    figures = evaluate.measure(model, (96,), (64, 128), texts=2, questions=4, console=Console(quiet=True))
    assert list(figures) == ["dense", "top 64", "top 128", *(f"top 64, {x}" for x in evaluate.SABOTAGES)]
    assert all(0 <= figures[name][96] <= 1 for name in figures)
    assert figures["dense"] == figures["top 128"]
    with pytest.raises(ValueError, match="accuracy: texts expected a multiple of batch, at least 2, got 3 and 2"):
        evaluate.accuracy(model, 96, texts=3)


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_presets_begin_dense_and_warm_up_before_they_select(name):
    stages = PRESETS[name].stages
    kinds = [stage.kind for stage in stages]
    assert kinds[0] == "dense" and kinds.index("warmup") < kinds.index("sparse")
    assert max(stage.length for stage in stages) >= 4096 and all(stage.length <= tasks.LONGEST for stage in stages)
