"""Where each byte of the two caches lies. No other module knows an offset.

**KV cache**, one row a token and layer (``kv_lora_rank`` 512, ``qk_rope_head_dim`` 64):

===========  =========  =====================================================================================
layout       row bytes  bytes
===========  =========  =====================================================================================
bf16         1152       [0, 1024) 512 bf16 latent · [1024, 1152) 64 bf16 rope
fp8_656      656        [0, 512) 512 fp8 latent · [512, 528) 4 fp32 scales, one per 128 · [528, 656) 64 bf16 rope
fp8_576      576        [0, 512) 512 fp8 latent · [512, 576) 64 fp8 rope; one scale for the whole tensor, outside
===========  =========  =====================================================================================

fp8_656 is FlashMLA's record and SGLang's on CUDA (``quantize_k_cache_separate``); fp8_576 is what SGLang and aiter keep
on ROCm. SGLang holds pools as ``[slots, 1, row_elements]``; here they are ``[slots, row_elements]``.

**Index-K cache**, one page per ``page_size`` tokens and layer (``index_head_dim`` 128), ``page_size * 132`` bytes:
first ``page_size * 128`` key bytes, then ``page_size`` fp32 scales. The key byte of token ``i`` and column ``c`` lies
at ``128 i + c``; *preshuffled* (ROCm; ``page_size`` a multiple of 16) at
``(i // 16) 2048 + (c // 16) 256 + (i % 16) 16 + c % 16``, in tiles of 16 tokens by 16 columns.

A *slot* numbers a token's place in a pool: row of the KV cache, ``page * page_size + token`` of the index cache. Slot 0
is SGLang's dummy, never written; -1 means none.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mla.fp8 import E4M3FN, Fp8Format, decode, fp8_format, from_bits

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
INDEX_HEAD_DIM = 128
BLOCK = 128
"""Elements that share one scale, in the KV cache's fp8_656 rows and in the indexer."""

KVLayoutName = Literal["bf16", "fp8_656", "fp8_576"]


@dataclass(frozen=True)
class KVLayout:
    """One of the three row formats of the KV cache. Take ``KV_BF16``, ``KV_FP8_656`` or ``kv_layout(name, fp8)``."""

    name: KVLayoutName
    fp8: Fp8Format | None

    def __post_init__(self):
        if (self.name == "bf16") != (self.fp8 is None):
            raise ValueError(f"fp8: expected None for bf16 and a format otherwise, got {self.fp8} for {self.name}")
        if self.name == "fp8_656" and self.fp8 != E4M3FN:
            raise ValueError(f"fp8: expected e4m3fn, the only format that fp8_656 rows hold, got {self.fp8}")

    @property
    def dtype(self):
        """Element type of a pool: bfloat16, or uint8 for the fp8 layouts."""
        return jnp.dtype(jnp.bfloat16 if self.name == "bf16" else jnp.uint8)

    @property
    def row_elements(self) -> int:
        """Elements of ``dtype`` in a row: 576, 656 or 576."""
        return 656 if self.name == "fp8_656" else KV_LORA_RANK + QK_ROPE_HEAD_DIM

    @property
    def row_bytes(self) -> int:
        """Bytes in a row: 1152, 656 or 576."""
        return self.row_elements * self.dtype.itemsize

    @property
    def scaled(self) -> bool:
        """Whether one scale for the whole tensor belongs to the pool (``kv_scale``)."""
        return self.name == "fp8_576"

    def check_pool(self, op: str, pool: Array) -> None:
        """Raises ``ValueError`` unless ``pool`` is ``[N, row_elements]`` of ``dtype``."""
        if pool.dtype != self.dtype or pool.shape[1] != self.row_elements:
            expected = f"{self.dtype.name}[N, {self.row_elements}], the {self.name} layout's"
            raise ValueError(f"{op}: pool expected {expected}, got {pool.dtype.name}{list(pool.shape)}")

    def check_scale(self, op: str, kv_scale) -> None:
        """Raises ``ValueError`` for a scale that this layout has no place for."""
        if not (self.scaled or (isinstance(kv_scale, float) and kv_scale == 1.0)):
            raise ValueError(f"{op}: kv_scale expected 1.0 for the {self.name} layout, got {kv_scale}")
        if isinstance(kv_scale, float) and not 0 < kv_scale < float("inf"):
            raise ValueError(f"{op}: kv_scale expected a positive number, got {kv_scale}")

    def unpack(self, rows: Array, kv_scale: Array | float = 1.0) -> Array:
        """Float32 values ``[..., 576]`` (latent, then rope) of ``rows`` ``[..., row_elements]``."""
        if self.name == "bf16":
            return rows.astype(jnp.float32)
        assert self.fp8 is not None
        if self.name == "fp8_576":
            return decode(rows, self.fp8) * kv_scale
        lead = rows.shape[:-1]
        latent = decode(rows[..., :512], self.fp8).reshape(*lead, 4, BLOCK)
        scale = lax.bitcast_convert_type(rows[..., 512:528].reshape(*lead, 4, 4), jnp.float32)[..., None]
        latent = (latent * scale).reshape(*lead, 512)
        rope = lax.bitcast_convert_type(rows[..., 528:].reshape(*lead, 64, 2), jnp.bfloat16)
        return jnp.concatenate([latent, rope.astype(jnp.float32)], axis=-1)


KV_BF16 = KVLayout("bf16", None)
KV_FP8_656 = KVLayout("fp8_656", E4M3FN)
KV_FP8_576 = KVLayout("fp8_576", E4M3FN)


def kv_layout(name: str, fp8: str = "e4m3fn") -> KVLayout:
    """The layout called ``name``, its bytes in the format called ``fp8``."""
    if name not in ("bf16", "fp8_656", "fp8_576"):
        raise ValueError(f"layout: expected 'bf16', 'fp8_656' or 'fp8_576', got {name!r}")
    return KVLayout(name, None if name == "bf16" else fp8_format(fp8))


@dataclass(frozen=True)
class IndexLayout:
    """The page format of the index-K cache.

    - `page_size`: tokens in a page: 1, 16 or 64.
    - `fp8`: what its key bytes mean.
    - `preshuffle`: 16 by 16 tiles, as aiter's kernels on ROCm want them.
    """

    page_size: int = 64
    fp8: Fp8Format = E4M3FN
    preshuffle: bool = False

    def __post_init__(self):
        if self.page_size not in (1, 16, 64):
            raise ValueError(f"page_size: expected 1, 16 or 64, got {self.page_size}")
        if self.preshuffle and self.page_size == 1:
            raise ValueError("page_size: expected 16 or 64 for a preshuffled index cache, got 1")

    @property
    def page_bytes(self) -> int:
        """Bytes in a page: 132 a token."""
        return self.page_size * (INDEX_HEAD_DIM + 4)

    @property
    def key_columns(self) -> np.ndarray:
        """int32 [128]: what to add to ``key_base`` for each column."""
        return np.asarray(self.key_column(np.arange(INDEX_HEAD_DIM, dtype=np.int32)))

    def key_column(self, column):
        """What to add to ``key_base`` for ``column``. Arithmetic only: integers or arrays of any library."""
        return (column // 16) * 256 + column % 16 if self.preshuffle else column

    def key_base(self, token):
        """Byte in the page at which the key of ``token`` (its slot modulo ``page_size``) begins."""
        return (token // 16) * 2048 + (token % 16) * 16 if self.preshuffle else token * INDEX_HEAD_DIM

    def scale_base(self, token):
        """Byte in the page at which the fp32 scale of ``token`` begins."""
        return self.page_size * INDEX_HEAD_DIM + token * 4

    def row_offsets(self, slots: Array) -> tuple[Array, Array]:
        """Page ``[..., 1]`` and bytes ``[..., 132]`` of the key, then the scale, of each of ``slots`` (int32)."""
        page, token = slots // self.page_size, slots % self.page_size
        key = self.key_base(token)[..., None] + self.key_columns
        scale = self.scale_base(token)[..., None] + np.arange(4, dtype=np.int32)
        return page[..., None], jnp.concatenate([key, scale], axis=-1)

    def check_pool(self, op: str, pool: Array) -> None:
        """Raises ``ValueError`` unless ``pool`` is uint8 ``[pages, page_bytes]``."""
        if pool.dtype != jnp.uint8 or pool.shape[1] != self.page_bytes:
            expected = f"uint8[pages, {self.page_bytes}], pages of {self.page_size} tokens"
            raise ValueError(f"{op}: pool expected {expected}, got {pool.dtype.name}{list(pool.shape)}")

    def holds(self, pool: Array, slots: Array) -> Array:
        """Which of ``slots`` lie in ``pool``."""
        return (slots >= 0) & (slots < pool.shape[0] * self.page_size)

    def read(self, pool: Array, slots: Array) -> tuple[Array, Array]:
        """Keys ``[..., 128]`` (``fp8.dtype``) and float32 scales ``[...]`` at ``slots``; zeros outside of the pool.

        - `pool`: uint8 ``[pages, page_bytes]``.
        - `slots`: int32 ``[...]``.
        """
        there = self.holds(pool, slots)
        page, byte = self.row_offsets(jnp.where(there, slots, 0))
        rows = jnp.where(there[..., None], pool[page, byte], jnp.uint8(0))
        scale = lax.bitcast_convert_type(rows[..., INDEX_HEAD_DIM:], jnp.float32)
        return from_bits(rows[..., :INDEX_HEAD_DIM], self.fp8), scale
