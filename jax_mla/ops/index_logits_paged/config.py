"""Tile sizes of ``index_logits_paged``."""

from dataclasses import dataclass

from jax_mla.pallas_triton import block


@dataclass(frozen=True)
class Config:
    """- `keys`: tokens a program scores, a power of two. - `num_warps`: warps a program runs on."""

    keys: int = 128
    num_warps: int = 4

    @staticmethod
    def of(requests: int, max_len: int) -> "Config":
        """Memory-bound, 132 bytes a token: small blocks for few requests, so that more programs share the reading."""
        return Config(keys=min(64 if requests < 16 else 128, block(max_len, 16)))
