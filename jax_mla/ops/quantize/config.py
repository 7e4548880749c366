"""Tile sizes of ``quantize``."""

from dataclasses import dataclass

from jax_mla.pallas_triton import block


@dataclass(frozen=True)
class Config:
    """- `rows`: rows a program handles, a power of two. - `num_warps`: warps a program runs on."""

    rows: int = 8
    num_warps: int = 4

    @staticmethod
    def of(rows: int) -> "Config":
        """Memory-bound: 8 rows of 128 are 8 elements a thread, enough for wide loads."""
        return Config(rows=min(8, block(rows)))
