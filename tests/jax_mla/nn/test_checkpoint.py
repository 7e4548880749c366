"""Checkpoints: there and back, from and to transformers, in shards and in FP8, and each way to be wrong."""

import json
import shutil
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import save_file

from jax_mla.nn import DeepseekV32, DeepseekV32Config, load_hf, save_hf
from jax_mla.nn.checkpoint import _headers, name_table, parameters
from tests.jax_mla.nn.models import MODELS, SMALL, ours, transformers_model
from tests.numerics import assert_bitwise_equal

IDS = np.random.default_rng(0).integers(1, 128, (2, 40), dtype=np.int32)


def config(**change) -> DeepseekV32Config:
    return DeepseekV32Config.from_hf_config(
        dict(model_type="deepseek_v32", num_hidden_layers=2, num_nextn_predict_layers=0) | SMALL | change
    )


def model(seed=0, **change) -> DeepseekV32:
    return DeepseekV32(config(**change), rngs=nnx.Rngs(seed), dtype=jnp.float32)


def read(folder) -> dict[str, np.ndarray]:
    """All tensors in a folder's safetensors."""
    return {name: np.array(x.read()) for file in folder.glob("*.safetensors") for name, x in _headers(file)}


def assert_same_parameters(one, other):
    one, other = parameters(one), parameters(other)
    assert one.keys() == other.keys()
    for path, variable in one.items():
        assert type(variable) is type(other[path]), path
        assert_bitwise_equal(variable[...], other[path][...])


@pytest.mark.parametrize("shard_bytes", [1 << 30, 40_000])
def test_there_and_back(tmp_path, shard_bytes):
    made = model()
    save_hf(made, tmp_path, dtype=jnp.float32, shard_bytes=shard_bytes, progress=False)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 3) == (shard_bytes == 40_000)
    back = load_hf(tmp_path, dtype=jnp.float32, progress=False)
    assert back.config == made.config
    assert_same_parameters(back, made)
    x = jnp.asarray(IDS)
    assert_bitwise_equal(nnx.jit(lambda m: m(x))(back), nnx.jit(lambda m: m(x))(made))


def test_bfloat16_is_rounded_once_and_the_gates_bias_not_at_all(tmp_path):
    made = model()
    parameters(made)["layers", 1, "mlp", "gate", "e_score_correction_bias"][...] += 1.001
    save_hf(made, tmp_path, progress=False)
    tensors = read(tmp_path)
    for name, place in name_table(made).items():
        expected = np.asarray(parameters(made)[place.path][... if place.expert is None else place.expert])
        bias = name.endswith("e_score_correction_bias")
        assert_bitwise_equal(tensors[name], expected if bias else expected.astype(ml_dtypes.bfloat16))
    back = load_hf(tmp_path, param_dtype=jnp.bfloat16, progress=False)
    assert {str(v.dtype) for v in parameters(back).values()} == {"bfloat16", "float32"}


@pytest.mark.parametrize("model_type", MODELS)
def test_what_transformers_saved(tmp_path, model_type):
    hf = transformers_model(model_type)
    hf.save_pretrained(tmp_path)
    assert_same_parameters(load_hf(tmp_path, dtype=jnp.float32, progress=False), ours(hf))


@pytest.mark.parametrize("model_type", MODELS)
def test_transformers_loads_what_is_saved(tmp_path, model_type):
    make: Any = MODELS[model_type][1]
    hf = transformers_model(model_type)
    save_hf(ours(hf), tmp_path, dtype=jnp.float32, progress=False)
    back, report = make.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert not any(report.values()), report
    tokens = torch.from_numpy(IDS).long()
    with torch.no_grad():
        assert torch.equal(back(tokens).logits, hf(tokens).logits)


def test_fp8_in_blocks(tmp_path):
    """Weights whose sides are no multiples of 128, each block with a scale of its own."""
    made = model(hidden_size=200)
    save_hf(made, tmp_path, dtype=jnp.float32, progress=False)
    tensors, expected, rng = read(tmp_path), {}, np.random.default_rng(1)
    for name in list(tensors):
        if name.endswith("_proj.weight") and "weights_proj" not in name:
            rows, columns = tensors[name].shape
            codes = rng.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
            scale = rng.uniform(0.5, 2, (-(-rows // 128), -(-columns // 128))).astype(np.float32)
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scale
            values = np.zeros((rows, columns), np.float32)
            for i, j in np.ndindex(*values.shape):
                values[i, j] = np.float32(codes[i, j]) * scale[i // 128, j // 128]
            expected[name] = values
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    _write(tmp_path, made.config, tensors, quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]))
    back = load_hf(tmp_path, progress=False)
    table = name_table(back)
    assert any(max(x.shape) > 128 for x in expected.values()) and len(expected) > 10
    for name, values in expected.items():
        place = table[name]
        got = parameters(back)[place.path][... if place.expert is None else place.expert]
        assert_bitwise_equal(got, values)


def _write(folder, config: DeepseekV32Config, tensors, **more):
    fp8 = {n: x for n, x in tensors.items() if x.dtype == ml_dtypes.float8_e4m3fn}
    plain = {n: np.ascontiguousarray(x) for n, x in tensors.items() if n not in fp8}
    header, at, blobs = {}, 0, []
    for name, x in (plain | fp8).items():
        kind = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "int32": "I32"}[x.dtype.name]
        header[name] = dict(dtype=kind, shape=list(x.shape), data_offsets=[at, at + x.nbytes])
        at += x.nbytes
        blobs.append(x.tobytes())
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    (folder / "config.json").write_text(json.dumps(config.to_hf_config() | more))


def test_every_wrong_tensor_is_named_at_once(tmp_path):
    made = model()
    save_hf(made, tmp_path, progress=False)
    tensors = read(tmp_path)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    tensors["model.norm.weight"] = np.ones(95, np.float32)
    tensors["model.layers.0.self_attn.rotary.inv_freq"] = np.ones(3, np.float32)
    tensors["lm_head.weight"] = np.ones((128, 96), np.int32)
    tensors["model.embed_tokens.weight"] = np.ones((128, 96), ml_dtypes.float8_e4m3fn)
    q = "model.layers.0.self_attn.q_a_proj.weight"
    tensors[q] = tensors[q].astype(ml_dtypes.float8_e4m3fn)
    tensors[f"{q}_scale_inv"] = np.ones((2, 1), np.float32)
    _write(tmp_path, made.config, tensors)
    with pytest.raises(ValueError, match="6 tensors") as raised:
        load_hf(tmp_path, progress=False)
    for line in (
        "missing: model.layers.1.mlp.experts.3.up_proj.weight [40, 96]",
        "shape: model.norm.weight expected [96], got [95]",
        "unexpected: model.layers.0.self_attn.rotary.inv_freq F32[3]",
        "dtype: lm_head.weight expected BF16, F16, F32, F8_E4M3, got I32",
        "missing: model.embed_tokens.weight_scale_inv, the scales of an FP8 weight",
        f"scale: {q}_scale_inv expected F32[1, 1], got F32[2, 1]",
    ):
        assert line in str(raised.value).splitlines(), line


def test_layers_for_speculation_are_left_out(tmp_path):
    save_hf(model(num_hidden_layers=3), tmp_path, progress=False)
    values = json.loads((tmp_path / "config.json").read_text())
    values |= dict(num_hidden_layers=2, num_nextn_predict_layers=1, mlp_layer_types=["dense", "sparse"])
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert len(load_hf(tmp_path, progress=False).layers) == 2


def test_files_that_are_none(tmp_path):
    made = model()
    with pytest.raises(FileNotFoundError):
        load_hf(tmp_path / "nowhere", progress=False)
    save_hf(made, tmp_path, shard_bytes=40_000, progress=False)
    with pytest.raises(FileExistsError, match="without a model"):
        save_hf(made, tmp_path, progress=False)
    first, *_ = sorted(tmp_path.glob("*.safetensors"))
    whole = first.read_bytes()
    for cut in (4, 100, len(whole) - 1):
        first.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=first.name):
            load_hf(tmp_path, progress=False)
    first.unlink()
    with pytest.raises(FileNotFoundError, match=first.name):
        load_hf(tmp_path, progress=False)
    with pytest.raises(ValueError, match="bfloat16, float16 or float32, got int8"):
        save_hf(made, tmp_path / "other", dtype=jnp.int8, progress=False)


def test_a_shard_without_what_the_index_says(tmp_path):
    save_hf(model(), tmp_path, shard_bytes=40_000, progress=False)
    first, *_ = sorted(tmp_path.glob("*.safetensors"))
    save_file({"other": np.ones(1, np.float32)}, first)
    with pytest.raises(ValueError, match="in the files that it says"):
        load_hf(tmp_path, progress=False)


def test_the_bar(tmp_path, capsys):
    save_hf(model(), tmp_path, progress=False)
    assert capsys.readouterr().out == ""
    load_hf(tmp_path)
    assert f"loading {tmp_path.name}" in capsys.readouterr().out
