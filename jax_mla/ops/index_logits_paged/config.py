"""Tile sizes of ``index_logits_paged``."""

from dataclasses import dataclass

from jax_mla.pallas_triton import Target, are_powers_of_two, block, cdiv


@dataclass(frozen=True)
class Config:
    """- `keys`: tokens a program scores at a time, a power of two from 16 on. - `blocks`: how often it does.
    - `num_warps`: warps a program runs on. - `num_stages`: depth of the loop's software pipeline.
    - `imprecise`: as ``index_logits_ragged``'s."""

    keys: int = 64
    blocks: int = 8
    num_warps: int = 4
    num_stages: int = 3
    imprecise: bool = True

    def check(self) -> None:
        """Raises ``ValueError`` for what is no tile."""
        powers = are_powers_of_two(self.blocks, self.keys, self.num_warps)
        if not (powers and self.keys >= 16 and self.num_stages >= 1):
            expected = "blocks, keys and num_warps powers of two, keys from 16 and num_stages from 1 on"
            raise ValueError(f"index_logits_paged: config expected {expected}, got {self}")

    @staticmethod
    def of(requests: int, max_len: int, target: Target) -> "Config":
        """Memory-bound, 132 bytes a token. Swept on an H200: tiles of 64 tokens; up to 8 go through one program, but
        fewer where there would be less than 2,048 programs to share the reading; the next tile is on the way, and the
        slots of the one after it, as far as there are so many. On AMD by estimated times (``jax_mla.aot``)."""
        keys = min(64, block(max_len, 16))
        room = requests * cdiv(max_len, keys) // 2048
        blocks = max(b for b in (1, 2, 4, 8) if b <= max(1, room))
        if target.platform != "cuda":
            return Config(keys=keys, blocks=blocks, num_warps=2, num_stages=1)
        return Config(keys=keys, blocks=blocks, num_stages=min(blocks, 3))
