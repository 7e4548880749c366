"""Tile sizes of ``kv_write``."""

from dataclasses import dataclass

from jax_mla.pallas_triton import block


@dataclass(frozen=True)
class Config:
    """- `rows`: tokens a program writes, a power of two. - `num_warps`: warps a program runs on."""

    rows: int = 4
    num_warps: int = 1

    @staticmethod
    def of(tokens: int) -> "Config":
        """Memory-bound, 1 to 2 KB a token: few tokens a program, so that a decode batch spreads over the card."""
        return Config(rows=min(4, block(tokens)))
