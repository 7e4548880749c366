"""README.md keeps to its length, and its example runs as it stands, each op's lines by themselves too."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax.nnx import Rngs

import jax_mla.ops
from jax_mla import KV_FP8_656
from jax_mla import nn as nn

README = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
IMPORTS, NAMES, *OPS = EXAMPLE.split("\n\n")
OPS_OF_THE_PROJECT = sorted(x.name for x in Path(jax_mla.ops.__path__[0]).iterdir() if (x / "kernel.py").exists())
PREAMBLE = f"{IMPORTS}\n{NAMES}"


def lines_of_ops() -> dict[str, str]:
    """The example's lines by the op that they call; the preamble stands before each."""
    found = {}
    for lines in OPS:
        (op,) = [name for name in OPS_OF_THE_PROJECT if re.search(rf"\b{name}\(", lines)]
        found[op] = lines
    return found


def test_length():
    assert len(README.splitlines()) <= 180


def test_example(capsys):
    exec(compile(EXAMPLE, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == EXAMPLE.splitlines()[-1].rpartition("# ")[2]


def test_every_op_is_there_in_five_lines():
    assert sorted(lines_of_ops()) == sorted(OPS_OF_THE_PROJECT)
    for op, lines in lines_of_ops().items():
        assert len(lines.strip().splitlines()) <= 5, op


@pytest.mark.parametrize("op", OPS_OF_THE_PROJECT)
def test_lines_of_an_op_run_on_their_own(op):
    exec(compile(f"{PREAMBLE}\n{lines_of_ops()[op]}", "README.md", "exec"), {})


def test_the_whole_models_lines_run(tmp_path):
    (lines,) = re.findall(r"```python in-context\n(.*?)```", README, re.DOTALL)
    config = dict(vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1)
    config |= dict(num_attention_heads=2, q_lora_rank=16, qk_nope_head_dim=8, v_head_dim=8, index_n_heads=2)
    config |= dict(n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=1, index_topk=4)
    made = nn.DeepseekV32(nn.DeepseekV32Config.from_hf_config(config | {"model_type": "deepseek_v32"}), rngs=Rngs(0))
    nn.save_hf(made, tmp_path / "folder", progress=False)
    names = {name: getattr(nn, name) for name in ("load_hf", "generate", "make_cache")}
    names |= dict(KV_FP8_656=KV_FP8_656, input_ids=jnp.ones((4, 6), jnp.int32), counts=jnp.full(4, 6))
    names["load_hf"] = lambda folder, **how: nn.load_hf(tmp_path / folder, progress=False, **how)
    exec(compile(lines, "README.md", "exec"), names)
    assert names["logits"].shape == (4, 6, 64) and names["kl"].shape == (1,) and names["tokens"].shape == (4, 64)


def test_commands_are_in_the_makefile():
    makefile = Path(__file__).parents[1].joinpath("Makefile").read_text(encoding="utf-8")
    commands = set(re.findall(r"\bmake ([a-z-]+)\b", README))
    assert commands and all(re.search(rf"^{command}:", makefile, re.MULTILINE) for command in commands)
