"""The tiny checkpoint: the same every time, whole or not at all, and refused where SGLang would not serve it."""

import json

import pytest
import safetensors.torch
import transformers

from bridge.demo import tiny
from bridge.demo.tiny import Tiny, checkpoint

SMALL = Tiny(num_hidden_layers=2, hidden_size=64, intermediate_size=32, num_attention_heads=1, index_n_heads=1)


def test_written_once_and_the_same_again(tmp_path):
    first, again = checkpoint(SMALL, tmp_path / "a"), checkpoint(SMALL, tmp_path / "b")
    assert first.name == again.name
    assert first.joinpath("model.safetensors").read_bytes() == again.joinpath("model.safetensors").read_bytes()
    written = first.stat().st_mtime_ns
    assert checkpoint(SMALL, tmp_path / "a") == first and first.stat().st_mtime_ns == written


def test_another_choice_is_another_folder():
    assert len({SMALL.name(), Tiny().name(), Tiny(index_topk=64).name(), Tiny(seed=1).name()}) == 4


def test_nothing_is_left_of_one_that_failed(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(tiny, "write_tokenizer", fail)
    with pytest.raises(OSError, match="no space"):
        checkpoint(SMALL, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_config_has_hugging_face_names():
    config = Tiny(index_topk=64).config()
    assert config["architectures"] == ["DeepseekV32ForCausalLM"]
    assert config["index_topk"] == 64 and config["index_head_dim"] == 128
    assert config["rope_scaling"]["type"] == "yarn"
    assert json.loads(json.dumps(config)) == config


def test_experts_are_there_when_asked_for(tmp_path):
    moe = Tiny(**{**SMALL.__dict__, "n_routed_experts": 4})
    names = safetensors.torch.load_file(checkpoint(moe, tmp_path) / "model.safetensors").keys()
    assert "model.layers.0.mlp.down_proj.weight" in names
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names


@pytest.mark.parametrize(
    "choice, message",
    [
        ({"hidden_size": 512}, "hidden_size .* 256"),
        ({"num_hidden_layers": 0}, "num_hidden_layers .* at least 1, got 0"),
        ({"vocab_size": 100}, "vocab_size .* 259"),
        ({"index_topk": 6.5}, "index_topk must be an integer"),
    ],
)
def test_refused(choice, message):
    with pytest.raises(ValueError, match=message):
        Tiny(**choice)


def test_the_tokenizer_gives_back_what_it_is_given(tmp_path):
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint(SMALL, tmp_path))
    text = "Sparse: 7 × 6 = 42\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "user: hi\nassistant: "
