"""Tile sizes of ``sparse_mla``."""

from dataclasses import dataclass

from jax_mla.pallas_triton import block, cdiv


@dataclass(frozen=True)
class Config:
    """- `heads`: query heads a program handles, a power of two from 16 on (a matrix tile has 16 rows).
    - `keys`: selected rows it reads at a time, a power of two from 16 on.
    - `splits`: parts the selection is cut into, each a program; merged by log-sum-exp where more than 1.
    - `num_warps`, `num_stages`: warps a program runs on, depth of the loop's software pipeline.
    """

    heads: int = 16
    keys: int = 32
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 1

    @staticmethod
    def of(rows: int, heads: int, selected: int) -> "Config":
        """16 heads by 32 keys fit the registers of gfx942, gfx950 and sm_90 without a spill, four accumulators of 128
        columns included. Few rows don't fill a card of 100 to 300 cores: they are split until some 512 programs run,
        but never below 128 keys a part, under which merging costs more than it hides."""
        programs = max(1, rows * cdiv(heads, 16))
        splits = min(cdiv(512, programs), cdiv(selected, 128), 16)
        return Config(splits=block(splits) if splits > 1 else 1)
