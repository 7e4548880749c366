"""Checkpoints in Hugging Face's files: config.json and safetensors, whole or in shards.

One rule makes the name table: a parameter's name is its path in the model with ``model.`` before it, but for
``lm_head.weight``; of stacked experts, ``experts.gate_proj`` is ``experts.0.gate_proj.weight`` and on. So the table is
read off the model, and there is no second list to keep.

A weight is bf16, f16 or f32, or FP8 (e4m3) with the float32 ``<name>_scale_inv`` of each 128 by 128 block, which it is
multiplied by. A file is read through its header (safetensors' format: 8 bytes of length, JSON, then the tensors), since
the library's numpy side cannot read FP8.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors.numpy import save_file

from jax_mla.nn.config import DeepseekV32Config
from jax_mla.nn.model import DeepseekV32
from jax_mla.nn.moe import LoadBias

DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn}
BLOCK = 128
"""Rows and columns of a weight that share an FP8 scale."""
SCALE = "_scale_inv"
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: the parameter at ``path``, or its part number ``expert``."""

    path: tuple[str | int, ...]
    expert: int | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: ``dtype`` as safetensors call it, bytes from ``start`` of the file on."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def read(self) -> np.ndarray:
        """Its values, mapped and not yet read."""
        return np.memmap(self.file, DTYPES[self.dtype], "r", self.start, self.shape or (1,)).reshape(self.shape)


def parameters(model: Any) -> dict[tuple, nnx.Variable]:
    """A model's parameters and biases, by their paths; without its random state."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState)))
    return dict(flat)


def name_table(model: Any) -> dict[str, Place]:
    """Each tensor of a checkpoint, and where in the model it goes."""
    table = {}
    for path, variable in parameters(model).items():
        name = ".".join(map(str, path))
        if "experts" in path and "shared_experts" not in path:
            stem, _, matrix = name.rpartition(".")
            for expert in range(variable.shape[0]):
                table[f"model.{stem}.{expert}.{matrix}.weight"] = Place(path, expert, tuple(variable.shape[1:]))
        else:
            table[name if path[0] == "lm_head" else f"model.{name}"] = Place(path, None, tuple(variable.shape))
    return table


def load_hf(
    path: str | os.PathLike,
    *,
    dtype=jnp.bfloat16,
    param_dtype=jnp.float32,
    progress: bool = True,
    **how: Any,
) -> DeepseekV32:
    """The model in the folder ``path``.

    - `dtype`, `param_dtype`, and what else ``DeepseekV32`` takes. The gate's bias stays float32.
    - `progress`: whether to show a bar on stdout.

    Layers for speculation (``num_nextn_predict_layers``) are left out. Tensors are read one at a time, so this needs
    the memory of the model and of one parameter.

    Raises ``FileNotFoundError`` where there are no safetensors, and ``ValueError`` for a config that is not supported,
    and one that lists every tensor that is missing, unexpected, of another shape or of a dtype that isn't read. All of
    that before any weight is.
    """
    folder = Path(path)
    config = DeepseekV32Config.from_hf_config(folder)
    stored = _stored(folder, config)
    abstract = nnx.eval_shape(
        lambda: DeepseekV32(config, rngs=nnx.Rngs(0), dtype=dtype, param_dtype=param_dtype, **how)
    )
    table = name_table(abstract)
    _compare(table, stored, folder)

    graph, state = nnx.split(abstract)
    variables, values = dict(nnx.to_flat_state(state)), {}
    parts: dict[tuple, dict[int | None, tuple[Stored, Stored | None]]] = {}
    for name, place in table.items():
        parts.setdefault(place.path, {})[place.expert] = (stored[name], stored.get(name + SCALE))
    total = sum(x.size for x in stored.values())
    with _bar(progress) as bar:
        task = bar.add_task(f"loading {folder.name}", total=total)
        for place, tensors in parts.items():
            variable = variables[place]
            whole = np.empty(variable.shape, variable.dtype)
            for expert, (weight, scale) in tensors.items():
                whole[... if expert is None else expert] = _values(weight, scale)
                bar.advance(task, weight.size + (scale.size if scale else 0))
            values[place] = jnp.asarray(whole)
    filled = {place: variable.replace(values[place]) for place, variable in variables.items()}
    return nnx.merge(graph, nnx.from_flat_state(filled))


def save_hf(
    model: DeepseekV32,
    path: str | os.PathLike,
    *,
    dtype=jnp.bfloat16,
    shard_bytes: int = 5 << 30,
    progress: bool = True,
) -> None:
    """Writes ``model`` as transformers and SGLang load it: config.json, and safetensors in shards of ``shard_bytes``.

    - `dtype`: bf16, f16 or f32, of all but the gate's bias, which stays float32.

    Raises ``FileExistsError`` where ``path`` holds a model already, and ``ValueError`` for another dtype.
    """
    folder, dtype = Path(path), jnp.dtype(dtype)
    names = {np.dtype(x): name for name, x in DTYPES.items() if name != "F8_E4M3"}
    if dtype not in names:
        raise ValueError(f"dtype: expected bfloat16, float16 or float32, got {dtype.name}")
    there = sorted(x.name for x in folder.glob("*.safetensors*")) if folder.is_dir() else []
    if there:
        raise FileExistsError(f"path: expected a folder without a model, got {folder.name} with {', '.join(there)}")
    folder.mkdir(parents=True, exist_ok=True)
    variables, table = parameters(model), name_table(model)

    def dtype_of(place: Place) -> np.dtype:
        return np.dtype(np.float32) if isinstance(variables[place.path], LoadBias) else np.dtype(dtype)

    shards: list[list[str]] = [[]]
    sizes = [0]
    for name, place in table.items():
        size = int(np.prod(place.shape)) * dtype_of(place).itemsize
        if sizes[-1] and sizes[-1] + size > shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += size
    count = len(shards)
    files = [WHOLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    with _bar(progress) as bar:
        task = bar.add_task(f"saving {folder.name}", total=sum(sizes))
        for file, shard, size in zip(files, shards, sizes, strict=True):
            tensors = {}
            for name in shard:
                place = table[name]
                value = np.asarray(variables[place.path][... if place.expert is None else place.expert])
                tensors[name] = np.ascontiguousarray(value.astype(dtype_of(place)))
            save_file(tensors, folder / file, metadata={"format": "pt"})
            bar.advance(task, size)
    if count > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    config = model.config.to_hf_config() | {"dtype": dtype.name}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _bar(shown: bool) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, disable=not shown)


def _values(weight: Stored, scale: Stored | None) -> np.ndarray:
    """A weight, and with a scale its float32 values."""
    if scale is None:
        return weight.read()
    rows, columns = weight.shape
    spread = np.repeat(np.repeat(scale.read(), BLOCK, 0)[:rows], BLOCK, 1)[:, :columns]
    return weight.read().astype(np.float32) * spread


def _headers(file: Path) -> Iterator[tuple[str, Stored]]:
    size = file.stat().st_size
    with file.open("rb") as f:
        head = f.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > size - 8:
            raise ValueError(f"{file.name}: expected a whole safetensors file, got {size} bytes that are none")
        header: Mapping[str, Any] = json.loads(f.read(length))
    for name, x in header.items():
        if name == "__metadata__":
            continue
        start, end = x["data_offsets"]
        if 8 + length + end > size:
            raise ValueError(f"{file.name}: expected {8 + length + end} bytes for {name}, got {size}")
        yield name, Stored(file, x["dtype"], tuple(x["shape"]), 8 + length + start, end - start)


def _stored(folder: Path, config: DeepseekV32Config) -> dict[str, Stored]:
    """The tensors of a checkpoint by name, without those of layers for speculation."""
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    else:
        weight_map, files = None, [WHOLE]
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise FileNotFoundError(f"{folder.name}: expected {INDEX} or {WHOLE}, and there lacks {', '.join(absent)}")
    found = {}
    for file in files:
        for name, tensor in _headers(folder / file):
            if weight_map is None or weight_map.get(name) == file:
                found[name] = tensor
    if weight_map is not None:
        lost = sorted(set(weight_map) - set(found))
        if lost:
            raise ValueError(f"{INDEX}: expected its tensors in the files that it says, and these are not: {lost}")
    beyond = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
    left_out = tuple(f"model.layers.{i}." for i in beyond)
    return {name: tensor for name, tensor in found.items() if not name.startswith(left_out)}


def _compare(table: Mapping[str, Place], stored: Mapping[str, Stored], folder: Path) -> None:
    """Raises one ``ValueError`` for all that is wrong."""
    wrong = [f"missing: {name} {list(place.shape)}" for name, place in table.items() if name not in stored]
    for name, x in stored.items():
        weight = name.removesuffix(SCALE) if name.endswith(SCALE) else None
        if weight in stored and stored[weight].dtype == "F8_E4M3":
            blocks = tuple(-(-n // BLOCK) for n in stored[weight].shape)
            if (x.dtype, x.shape) != ("F32", blocks):
                wrong.append(f"scale: {name} expected F32{list(blocks)}, got {x.dtype}{list(x.shape)}")
        elif name not in table:
            wrong.append(f"unexpected: {name} {x.dtype}{list(x.shape)}")
        elif x.shape != table[name].shape:
            wrong.append(f"shape: {name} expected {list(table[name].shape)}, got {list(x.shape)}")
        elif x.dtype not in DTYPES:
            wrong.append(f"dtype: {name} expected {', '.join(DTYPES)}, got {x.dtype}")
        elif x.dtype == "F8_E4M3" and name + SCALE not in stored:
            wrong.append(f"missing: {name}{SCALE}, the scales of an FP8 weight")
    if wrong:
        raise ValueError(f"{folder.name}: {len(wrong)} tensors are not as its config.json says\n" + "\n".join(wrong))
