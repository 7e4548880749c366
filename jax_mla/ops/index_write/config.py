"""Tile sizes of ``index_write``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """- `rows`: tokens a program writes, a power of two from 16 on. - `num_warps`: warps a program runs on."""

    rows: int = 16
    num_warps: int = 4

    @staticmethod
    def of(tokens: int) -> "Config":
        """16 tokens a program: the Hadamard product is a matrix instruction, which takes 16 rows."""
        return Config()
