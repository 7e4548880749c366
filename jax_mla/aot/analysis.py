"""What follows from a kernel's machine code: how full it makes a core, what it moves and multiplies, and at best when.

**Estimate.** Machine code says what stands in it and not how often it runs, so this assumes:

- Every instruction outside of loops runs once in each warp (wave), both sides of every branch included.
- A loop that has no other in it runs as often as the case says (blocks of keys, for attention), and one around others
  as often as it says of that; where the compiler has unrolled a loop, that is too often.
- A warp's instruction keeps its SIMD for 1 cycle on NVIDIA and 4 on AMD, a wave's 64 lanes going through 16; a matrix
  instruction as long as its multiply-adds take at the chip's peak; scalar and uniform instructions and waits for none.
- The warps are spread evenly, and nothing ever waits: not for memory, not for a barrier, not for a result.

``issue`` is the time of the fullest SIMD under these assumptions, ``memory`` what the op has to move (``jax_mla.cost``)
at the peak bandwidth, and the estimate the larger one. Both are next to floors, since only blocks that are branched
around and unrolled loops count too much: what is measured is more, and by how much says what to look at. ``roofline``
is the op's own, whatever the code: the larger one of its bytes and its FLOPs at the peak.
"""

import re
from collections import Counter
from dataclasses import dataclass
from math import ceil, prod

from jax_mla.aot.chips import Chip
from jax_mla.aot.code import Code
from jax_mla.aot.executable import Kernel
from jax_mla.aot.flow import loops
from jax_mla.cost import Cost

AMD_LANES_AT_ONCE = 16
MATRIX = re.compile(r"v_s?mf(?:ma|mac)|[HIQ]G?MMA")
AMD_SHAPE = re.compile(r"_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?_")
WGMMA_SHAPE = re.compile(r"\.(\d+)x(\d+)x(\d+)\.")
MMA_SHAPES = {"HMMA.16816": (16, 8, 16), "HMMA.1688": (16, 8, 8), "HMMA.1684": (16, 8, 4)}
WGMMA_WARPS = 4
FREE = re.compile(r"s_|U[A-Z]|NOP|S2U?R|R2UR|BAR|BRA|EXIT|BSSY|BSYNC|ACQBULK|LDGDEPBAR")
"""Scalar and uniform instructions, branches and waits, which issue beside the vector instructions."""

AMD_GLOBAL = re.compile(
    r"(?:global|buffer|flat)_(load|store)_(?:lds_)?(ubyte|sbyte|u?short|sshort|byte|dword)(x[234])?"
)
AMD_BYTES = {"byte": 1, "ubyte": 1, "sbyte": 1, "short": 2, "ushort": 2, "sshort": 2, "dword": 4}
NVIDIA_GLOBAL = re.compile(r"(LDG|LDGSTS|STG)\.(\d+)")


def is_matrix(name: str) -> bool:
    return bool(MATRIX.match(name))


def is_fp8_matrix(name: str) -> bool:
    """Whether a matrix instruction multiplies FP8. (CDNA 4's f8f6f4 takes FP8 by a modifier, and no other here.)"""
    return is_matrix(name) and any(kind in name for kind in ("fp8", "f8f6f4", "E4M3"))


def matrix_flops(name: str) -> int:
    """FLOPs of one matrix instruction of one wave or warp, two a multiply-add; 0 for what is none."""
    if not is_matrix(name):
        return 0
    if found := AMD_SHAPE.search(name):
        return 2 * prod(int(x or 1) for x in found.groups())
    if found := WGMMA_SHAPE.search(name):
        return 2 * prod(map(int, found.groups())) // WGMMA_WARPS
    return 2 * prod(MMA_SHAPES.get(name[: name.find(".", 5)], (0,)))


def operand(name: str) -> str:
    """What a matrix instruction multiplies: "fp8", "f32", or "bf16" also for all else of 16 bits."""
    if is_fp8_matrix(name):
        return "fp8"
    return "f32" if name.endswith(("_f32", "xf32", "TF32")) else "bf16"


def access(name: str) -> tuple[str, int] | None:
    """("load" or "store", bytes of a thread) of an access to global memory, or None."""
    if found := AMD_GLOBAL.match(name):
        return found[1], AMD_BYTES[found[2]] * int((found[3] or "x1")[1:])
    if found := NVIDIA_GLOBAL.match(name):
        return ("store" if found[1] == "STG" else "load"), int(found[2]) // 8
    return None


def accesses(counts: Counter[str], kind: str) -> dict[int, int]:
    """Bytes of a thread → how many "load" or "store" instructions of that width, widest first."""
    widths: Counter[int] = Counter()
    for name, count in counts.items():
        found = access(name)
        if found and found[0] == kind:
            widths[found[1]] += count
    return dict(sorted(widths.items(), reverse=True))


def resident_warps(code: Code, kernel: Kernel, chip: Chip) -> int:
    """Waves on each SIMD (AMD) or warps on each multiprocessor (NVIDIA) that registers and shared memory allow.

    AMD: 512 registers of a lane in units of 8, 800 scalar ones of which a wave takes all of its 112 above 100. NVIDIA:
    65,536 registers, of a warp in units of 256. Programs are resident as a whole or not at all.
    """
    warps = ceil(prod(kernel.threads) / chip.warp)
    shared = code.shared_bytes + kernel.shared_bytes
    if chip.target.platform == "rocm":
        by_registers = 512 // max(8, 8 * ceil(code.vgprs / 8))
        by_scalars = chip.max_warps if code.sgprs <= 100 else 7
        per_core = chip.simds * min(chip.max_warps, by_registers, by_scalars)
    else:
        per_core = chip.simds * min(chip.max_warps, 65536 // 4 // (256 * ceil(code.vgprs / 8)))
        shared += 1024  # the driver's
    programs = per_core // warps
    if code.shared_bytes + kernel.shared_bytes:
        programs = min(programs, chip.shared_bytes // shared)
    resident = programs * warps
    return resident // chip.simds if chip.target.platform == "rocm" else resident


def weights(code: Code, inner: int, outer: int) -> list[int]:
    """How often each instruction runs, if a loop with none in it runs ``inner`` times and one around it ``outer``."""
    found, all_loops = [1] * len(code.instructions), loops(code.instructions)
    for loop in all_loops:
        times = outer if any(other < loop for other in all_loops) else inner
        for i in loop:
            found[i] *= times
    return found


@dataclass(frozen=True)
class Estimate:
    """Microseconds; see the module."""

    issue_us: float
    memory_us: float
    roofline_us: float

    @property
    def us(self) -> float:
        return max(self.issue_us, self.memory_us)


def cycles(name: str, chip: Chip) -> float:
    """How long an instruction of one warp keeps its SIMD."""
    if flops := matrix_flops(name):
        return flops * chip.cores * chip.simds * chip.clock_hz / chip.flops_s[operand(name)]
    if FREE.match(name):
        return 0.0
    return chip.warp / AMD_LANES_AT_ONCE if chip.target.platform == "rocm" else 1.0


def estimate(
    code: Code, kernel: Kernel, chip: Chip, work: Cost, operand_of_op: str, trips: tuple[int, int]
) -> Estimate:
    """The estimate for one launch that has to do ``work``; ``trips`` are ``weights``' inner and outer."""
    of_warp = sum(
        weight * cycles(x.name, chip) for x, weight in zip(code.instructions, weights(code, *trips), strict=True)
    )
    warps = prod(kernel.grid) * ceil(prod(kernel.threads) / chip.warp)
    fullest = ceil(warps / (chip.cores * chip.simds))
    memory = work.bytes / chip.bytes_s
    return Estimate(
        issue_us=1e6 * fullest * of_warp / chip.clock_hz,
        memory_us=1e6 * memory,
        roofline_us=1e6 * max(memory, work.flops / chip.flops_s[operand_of_op]),
    )
