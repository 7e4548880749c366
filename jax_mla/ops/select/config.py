"""Tile sizes of ``select``."""

from dataclasses import dataclass

from jax_mla.pallas_triton import are_powers_of_two, block, cdiv

LINE = 128  # keys of a line, over which a prefix sum goes within a few lanes


@dataclass(frozen=True)
class Config:
    """- `last`: keys that the program which chooses from them holds at most, a power of two. A longer row is cut into
      - `part` keys, a power of two, of each of which a program passes on
      - `kept` at most, a power of two from ``k`` on. The more over ``k``, the sooner it has found a threshold, and the
        more is left to choose from.
    - `num_warps`: warps a program runs on at most, one for each 512 keys.
    """

    last: int
    part: int
    kept: int
    num_warps: int

    def check(self, k: int) -> None:
        """Raises ``ValueError`` unless a row of any width comes down to one program that can choose ``k``."""
        powers = are_powers_of_two(self.last, self.part, self.kept, self.num_warps)
        if not (powers and max(LINE, k) <= self.kept <= self.part // 2 and self.part <= self.last <= 1 << 16):
            expected = f"powers of two, {max(LINE, k)} <= kept <= part / 2 and part <= last <= 65536"
            raise ValueError(f"select: config expected {expected}, got {self}")

    def warps_for(self, columns: int) -> int:
        return max(1, min(self.num_warps, columns // 512))

    @staticmethod
    def of(columns: int, k: int) -> "Config":
        """Swept on an H200: 32,768 keys on 16 warps are 64 registers of each thread, the most that leaves room for the
        prefix sum; longer rows go in parts of 16,384, each of which passes on ``2k`` as long as these add up to 32,768,
        and ``k`` beyond."""
        if k > 1 << 15:
            expected = "k of at most 32768 in the kernel; use implementation='xla'"
            raise NotImplementedError(f"select: expected {expected}, got {k}")
        k = block(k, LINE)
        part = max(16384, 2 * k)
        last = max(32768, part)
        kept = 2 * k if cdiv(columns, part) * 2 * k <= last and 4 * k <= part else k
        return Config(last=last, part=part, kept=kept, num_warps=16)
