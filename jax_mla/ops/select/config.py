"""Tile sizes of ``select``."""

from dataclasses import dataclass

from jax_mla.pallas_triton import block


@dataclass(frozen=True)
class Config:
    """- `columns`: logits a program counts at a time, a power of two. - `num_warps`: warps a program, which handles one
    row, runs on."""

    columns: int = 1024
    num_warps: int = 8

    @staticmethod
    def of(columns: int) -> "Config":
        """1,024 keys by 16 digits are 64 comparisons a thread on 8 warps; shorter rows need fewer."""
        columns = min(1024, block(columns, 64))
        return Config(columns=columns, num_warps=max(1, columns // 128))
