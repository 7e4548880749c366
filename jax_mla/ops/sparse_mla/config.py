"""Tile sizes of ``sparse_mla``."""

from dataclasses import dataclass, replace

from jax_mla.layouts import KVLayout
from jax_mla.pallas_triton import Target, are_powers_of_two, block, cdiv

DECODE_ROWS = 512  # up to as many rows the selection may be split


@dataclass(frozen=True)
class Config:
    """- `heads`: query heads a program handles, a power of two from 16 on (a matrix tile has 16 rows).
    - `keys`: selected rows it reads at a time, a power of two from 16 on.
    - `splits`: parts the selection is cut into, each a program; merged by log-sum-exp where more than 1.
    - `num_warps`, `num_stages`: warps a program runs on, depth of the loop's software pipeline.
    - `loads`: 2 where FP8 codes are to be read once for each of the two products. These want them in two layouts, and
      Triton copies to shared memory ahead of time, as Hopper can, only what is wanted in one.
    """

    heads: int = 16
    keys: int = 32
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 1
    loads: int = 1

    def check(self) -> None:
        """Raises ``ValueError`` for what is no tile."""
        powers = are_powers_of_two(self.heads, self.keys, self.num_warps)
        if not (powers and min(self.heads, self.keys) >= 16 and min(self.splits, self.num_stages) >= 1):
            expected = "heads and keys powers of two from 16 on, num_warps one too, splits and num_stages from 1 on"
            raise ValueError(f"sparse_mla: config expected {expected}, got {self}")
        if self.loads not in (1, 2):
            raise ValueError(f"sparse_mla: config expected loads of 1 or 2, got {self}")

    @staticmethod
    def of(rows: int, heads: int, selected: int, layout: KVLayout, target: Target) -> "Config":
        """Swept on an H200; on AMD by what a kernel takes of the registers.

        - CUDA: 16 heads by 64 keys on 4 warps are two programs on each of 132 cores: rows are split until about as
          many run, into parts of 128 keys or more; into single tiles, which need no pipeline, where all of these are no
          more than the cores. Prefill has rows enough, and runs best as 4 programs of 2 warps a core. Many heads of a
          bf16 pool share what they read in tiles of 64, on warpgroup instructions; of an fp8_576 pool in tiles of 32,
          the most that codes converted in registers leave room for; of fp8_656 not even that. Three stages read slots
          ahead too; with an fp8_656 row's four scales that is no gain.
        - ROCm: 16 heads by 32 keys fit the registers of gfx942 and gfx950 without a spill; of 4 warps half would repeat
          what the others multiply. 256 or 304 cores are filled twice, in parts of 128 keys at least.
        """
        if target.platform != "cuda":
            programs = rows * cdiv(heads, 16)
            splits = min(cdiv(512, programs), cdiv(selected, 128), 16) if rows <= DECODE_ROWS else 1
            return Config(splits=_filled(_power_of_two_below(splits), cdiv(selected, 32)), num_warps=2)
        if layout.name == "bf16" and heads > 32:
            tile = Config(64, 64, num_warps=8, num_stages=3)
        elif layout.name == "bf16":
            tile = Config(keys=64, num_stages=3) if rows <= DECODE_ROWS else Config(num_warps=2, num_stages=3)
        elif layout.name == "fp8_576":
            tile = Config(heads=32, num_stages=3, loads=2) if heads > 16 else Config(keys=64, num_stages=3, loads=2)
        else:
            tile = Config(keys=64, num_stages=2, loads=2)
        if rows > DECODE_ROWS:
            return tile
        programs, blocks = rows * cdiv(heads, tile.heads), cdiv(selected, tile.keys)
        if programs * blocks <= 132:
            return replace(tile, splits=blocks, num_stages=1, loads=1)
        splits = _power_of_two_below(max(1, min(264 // programs, cdiv(selected, 128))))
        return replace(tile, splits=_filled(splits, blocks))


def _filled(splits: int, blocks: int) -> int:
    """As many of ``splits`` as get any of ``blocks``, each as many as the first."""
    return cdiv(blocks, cdiv(blocks, splits))


def _power_of_two_below(n: int) -> int:
    return block(n) if block(n) == n else block(n) // 2
