"""Tile sizes of ``index_query``."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """- `num_warps`: warps a program, which handles all heads of one token, runs on."""

    num_warps: int = 4

    @staticmethod
    def of(heads: int) -> "Config":
        """64 heads of 128 are 8,192 numbers a token: 8 warps keep that to 32 a thread."""
        return Config(num_warps=8 if heads > 32 else 4)
