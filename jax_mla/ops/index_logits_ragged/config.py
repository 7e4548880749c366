"""Tile sizes of ``index_logits_ragged``."""

from dataclasses import dataclass

from jax_mla.pallas_triton import block


@dataclass(frozen=True)
class Config:
    """- `rows`: query rows a program goes through with one tile of keys. - `keys`: keys in the tile, a power of two.
    - `num_warps`: warps a program runs on. - `num_stages`: depth of the loop's software pipeline."""

    rows: int = 8
    keys: int = 128
    num_warps: int = 4
    num_stages: int = 2

    @staticmethod
    def of(rows: int) -> "Config":
        """128 keys by 64 heads is one full matrix tile; 8 rows reuse each key 8 times out of registers."""
        return Config(rows=min(8, block(rows)))
