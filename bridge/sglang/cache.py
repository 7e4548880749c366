"""SGLang's pools as jax_mla sees them: their layouts, and who writes into them.

SGLang owns the memory (``DSATokenToKVPool``, ``srt/mem_cache/memory_pool.py``) and lends it per layer. A new token's
latent and its index key are written before they are read in the same layer, by one of two writers:

- on a GPU jax_mla's kernels write in place;
- on a CPU XLA copies what it does not own, donated or not. There jax_mla only makes the bytes, and torch scatters them.

``writer_for`` decides that, once.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import torch

from bridge import ops
from bridge.dlpack import to_jax, to_torch
from bridge.stream import Function, Lane
from bridge.stream.lane import arrays_of
from jax_mla.fp8 import fp8_format
from jax_mla.layouts import KV_BF16, KV_FP8_656, IndexLayout, KVLayout, kv_layout
from jax_mla.ops.index_write import index_pack
from jax_mla.ops.kv_write import kv_pack

logger = logging.getLogger("jax_mla")

HADAMARD = True
"""Index queries and keys are rotated before they are quantised, as by DeepSeek-V3.2's own code (``rotate_activation``)
and by SGLang's unfused path. Scores stay the same up to rounding, outliers get smaller. One cache, one choice."""


def kv_layout_of(pool) -> KVLayout:
    """The row format of a ``DSATokenToKVPool``, from its dtype and its row."""
    formats = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e4m3fnuz: "e4m3fnuz"}
    if pool.dtype == torch.bfloat16:
        layout = KV_BF16
    elif pool.dtype not in formats:
        raise ValueError(f"kv_cache_dtype: expected bfloat16 or fp8_e4m3, got a pool of {pool.dtype}")
    elif pool.dsa_kv_cache_store_fp8:
        layout = KV_FP8_656
    else:
        layout = kv_layout("fp8_576", formats[pool.dtype])
    if pool.kv_cache_dim != layout.row_elements:
        raise ValueError(
            f"token_to_kv_pool: expected rows of {layout.row_elements} elements for layout {layout.name} "
            f"(kv_lora_rank 512, qk_rope_head_dim 64), got {pool.kv_cache_dim}"
        )
    return layout


def index_layout_of(pool) -> IndexLayout:
    """The page format of a ``DSATokenToKVPool``'s index keys."""
    from sglang.kernels.ops.quantization.fp8_kernel import is_fp8_fnuz
    from sglang.srt.layers.attention.dsa.utils import aiter_can_use_preshuffle_paged_mqa

    if pool.index_kpool != 1:
        raise ValueError(f"index_kpool: expected 1, one index key for each token, got {pool.index_kpool}")
    fp8 = fp8_format("e4m3fnuz" if is_fp8_fnuz() else "e4m3fn")
    return IndexLayout(pool.index_page_size, fp8, preshuffle=aiter_can_use_preshuffle_paged_mqa())


class Calls:
    """Functions on a lane, for one batch: each is looked up once, and not once for every layer."""

    def __init__(self, lane: Lane):
        self._lane = lane
        self._ready: dict[tuple, Any] = {}

    def bind(self, function: Function, *tensors: torch.Tensor, **static: Any) -> Callable[[], tuple[torch.Tensor, ...]]:
        """A call, whose tensors are looked at now. Those of one function are alike in all layers of a batch."""
        which = function.name, *static.values()
        ready = self._ready.get(which)
        if ready is None:
            ready = self._ready[which] = self._lane.launcher(function, arrays_of(function, tensors), **static)
        return ready.bind(*tensors)


@dataclass(frozen=True)
class Caches:
    """Both caches of one ``DSATokenToKVPool``.

    - `pool`: SGLang's pool; layers are asked for by SGLang's layer numbers.
    - `slots`: number of slots that either cache has. Valid ones to write are 1 to ``slots - 1``.
    """

    pool: Any
    kv_layout: KVLayout
    index_layout: IndexLayout
    slots: int

    def __str__(self) -> str:
        index = self.index_layout
        return (
            f"KV rows {self.kv_layout.name}, index pages of {index.page_size} tokens in {index.fp8}"
            f"{' preshuffled' if index.preshuffle else ''}, {self.slots} slots, on {self.pool.device}"
        )

    @property
    def kv_static(self) -> dict[str, Any]:
        """What ``bridge.ops`` calls the KV layout."""
        fp8 = self.kv_layout.fp8 or self.index_layout.fp8
        return dict(layout=self.kv_layout.name, fp8=fp8.name)

    @property
    def index_static(self) -> dict[str, Any]:
        """What ``bridge.ops`` calls the index layout."""
        index = self.index_layout
        return dict(page_size=index.page_size, preshuffle=index.preshuffle, fp8=index.fp8.name)

    @staticmethod
    def of(pool) -> "Caches":
        index_layout = index_layout_of(pool)
        pages = max(buffer.shape[0] for buffer in pool.index_k_with_scale_buffer)
        slots = min(pool.size + pool.page_size, pages * index_layout.page_size)
        return Caches(pool, kv_layout_of(pool), index_layout, slots)

    def kv(self, layer: int) -> torch.Tensor:
        """The layer's latents: ``[N, row_elements]``, bf16 or uint8."""
        buffer = self.pool.get_key_buffer(layer)
        element = torch.bfloat16 if self.kv_layout is KV_BF16 else torch.uint8
        return buffer.view(element).view(buffer.shape[0], self.kv_layout.row_elements)

    def index(self, layer: int) -> torch.Tensor:
        """The layer's index keys: uint8 ``[pages, page_bytes]``."""
        buffer = self.pool.get_index_k_with_scale_buffer(layer)
        if buffer.shape[0] == 0:
            raise ValueError(f"layer_id: expected a layer with index keys, got {layer}, which reuses another's top-k")
        return buffer


class Writer(Protocol):
    """Puts new tokens into a layer's caches. ``plan`` is made once per batch from int32 ``write_slots [T]``; ``kv`` and
    ``index`` look at everything, and give the function that writes.

    A slot beyond the pools is an error on a CPU. On a GPU, where looking would wait for the device, it is not written.
    """

    def plan(self, caches: Caches, write_slots: torch.Tensor) -> Any: ...

    def kv(self, calls: Calls, caches: Caches, layer: int, plan: Any, *new: torch.Tensor) -> Callable[[], object]:
        """`new`: latents ``[T, 512]`` and ropes ``[T, 64]``."""
        ...

    def index(
        self, calls: Calls, caches: Caches, layer: int, plan: Any, keys: tuple[torch.Tensor, ...], **how: Any
    ) -> Callable[[], object]:
        """`keys`: ``index_pack``'s arrays; `how`: its ``interleaved`` and ``eps``."""
        ...


def writer_for(device: torch.device) -> Writer:
    """The writer for a pool on ``device``."""
    writer = TorchWriter() if device.type == "cpu" else InPlaceWriter()
    logger.info("jax_mla: KV and index-K are written by %s", writer)
    return writer


@dataclass(frozen=True)
class InPlaceWriter:
    """jax_mla's own kernels write into the pool's memory."""

    def __str__(self) -> str:
        return "jax_mla, in place"

    def plan(self, caches: Caches, write_slots: torch.Tensor) -> torch.Tensor:
        return write_slots

    def kv(self, calls, caches, layer, plan, *new):
        return calls.bind(ops.KV_WRITE, caches.kv(layer), plan, *new, **caches.kv_static)

    def index(self, calls, caches, layer, plan, keys, **how):
        static = caches.index_static | dict(hadamard=HADAMARD) | how
        return calls.bind(ops.INDEX_WRITE, caches.index(layer), plan, *keys, **static)


@partial(jax.jit, static_argnames=("layout",))
def _kv_pack(k_nope, k_rope, *, layout):
    return kv_pack(k_nope, k_rope, layout=layout)


@partial(jax.jit, static_argnames=("layout", "interleaved", "eps"))
def _index_pack(keys, *, layout, interleaved, eps):
    return index_pack(*keys, layout=layout, interleaved=interleaved, hadamard=HADAMARD, eps=eps)


@partial(jax.jit, static_argnames=("layout",))
def _row_offsets(slots, *, layout):
    return layout.row_offsets(slots)


@dataclass(frozen=True)
class TorchPlan:
    """Where the rows of a batch go on a CPU: int64, for the rows that go anywhere.

    - `rows`: [n], which of the batch's rows. `slots`: [n], rows of the KV cache.
    - `pages`: [n, 1] and `columns`: [n, 132], bytes of the index cache.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    pages: torch.Tensor
    columns: torch.Tensor


@dataclass(frozen=True)
class TorchWriter:
    """jax_mla makes the bytes, torch scatters them: they are ready and nothing else reads the pool (``to_torch``)."""

    def __str__(self) -> str:
        return "torch, from bytes that jax_mla packs: XLA copies donated imports on a CPU"

    def plan(self, caches: Caches, write_slots: torch.Tensor) -> TorchPlan:
        if write_slots.max() >= caches.slots:
            raise ValueError(
                f"out_cache_loc: expected slots below {caches.slots}, the size of SGLang's pools, "
                f"got {int(write_slots.max())}"
            )
        rows = torch.nonzero(write_slots > 0).squeeze(1)
        pages, columns = _row_offsets(to_jax(write_slots, "out_cache_loc"), layout=caches.index_layout)
        return TorchPlan(rows, write_slots[rows].long(), to_torch(pages)[rows].long(), to_torch(columns)[rows].long())

    def kv(self, calls, caches, layer, plan, *new):
        k_nope, k_rope = (to_jax(x, name) for x, name in zip(new, ("k", "k_rope"), strict=True))

        def write():
            packed = to_torch(_kv_pack(k_nope, k_rope, layout=caches.kv_layout))
            caches.kv(layer)[plan.slots] = packed[plan.rows]

        return write

    def index(self, calls, caches, layer, plan, keys, **how):
        lent = tuple(to_jax(x, name) for x, name in zip(keys, ops.INDEX_WRITE.arrays[2:], strict=True))

        def write():
            packed = to_torch(_index_pack(lent, layout=caches.index_layout, **how))
            caches.index(layer)[plan.pages, plan.columns] = packed[plan.rows]

        return write
