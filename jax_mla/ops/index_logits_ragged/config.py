"""Tile sizes of ``index_logits_ragged``."""

from dataclasses import dataclass

from jax_mla.pallas_triton import Target, are_powers_of_two, block


@dataclass(frozen=True)
class Config:
    """- `rows`: query rows a program goes through with one tile of keys, a power of two.
    - `keys`: keys in the tile, a power of two from 16 on.
    - `num_warps`: warps a program runs on. - `num_stages`: depth of the loop's software pipeline.
    - `imprecise`: on Hopper, whether the 128 products of a head and a key are added up as its FP8 instructions do, to
      some 14 bits (``pallas_triton.dot``); False takes 2.6 times as long. No meaning elsewhere."""

    rows: int = 64
    keys: int = 128
    num_warps: int = 4
    num_stages: int = 3
    imprecise: bool = True

    def check(self) -> None:
        """Raises ``ValueError`` for what is no tile."""
        powers = are_powers_of_two(self.rows, self.keys, self.num_warps)
        if not (powers and self.keys >= 16 and self.num_stages >= 1):
            expected = "rows, keys and num_warps powers of two, keys from 16 and num_stages from 1 on"
            raise ValueError(f"index_logits_ragged: config expected {expected}, got {self}")

    @staticmethod
    def of(rows: int, target: Target) -> "Config":
        """Swept on an H200: 128 keys by 64 heads take 114 registers of each thread of 4 warps, so four programs share a
        core, and what one adds up hides behind another's products. A tile of keys serves 64 rows out of shared memory,
        and three of their queries are on the way. On AMD by estimated times (``jax_mla.aot``)."""
        rows = min(64, block(rows))
        return Config(rows) if target.platform == "cuda" else Config(rows, keys=256, num_stages=1)
