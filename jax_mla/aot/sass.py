"""Names of NVIDIA's machine instructions (SASS) for sm_90, as far as a performance table needs them.

Every instruction is 16 bytes. The opcode stands in bits 0 to 8, and bits 9 to 11 say what kind of operands it has. Of
memory instructions bits 73 to 75 say the width; of matrix instructions other bits say shape and types.

NVIDIA doesn't document this encoding. The table and the bits were read off ``nvdisasm`` 13.1, on every kernel of this
project and on each ``mma`` and ``wgmma`` of PTX with FP16, BF16, TF32, FP8 and INT8 operands. Names are nvdisasm's,
shortened to the opcode, the width of memory instructions and the shape and types of matrix instructions. An opcode that
is not in the table is called by its number, which loses a name and no length.
"""

import struct
from collections.abc import Iterable

OPCODES = {
    0x002: "MOV",
    0x003: "P2R",
    0x004: "R2P",
    0x005: "CS2R",
    0x007: "SEL",
    0x008: "FSEL",
    0x009: "FMNMX",
    0x00B: "FSETP",
    0x00C: "ISETP",
    0x00F: "VIMNMX3",
    0x010: "IADD3",
    0x011: "LEA",
    0x012: "LOP3",
    0x016: "PRMT",
    0x017: "IMNMX",
    0x019: "SHF",
    0x01A: "SGXT",
    0x01C: "PLOP3",
    0x020: "FMUL",
    0x021: "FADD",
    0x023: "FFMA",
    0x024: "IMAD",
    0x025: "IMAD",
    0x027: "IMAD",
    0x02E: "ACQBULK",
    0x030: "HADD2",
    0x031: "HFMA2",
    0x032: "HMUL2",
    0x035: "HFMA2",
    0x036: "VIADD",
    0x037: "IMMA",
    0x03B: "LDSM",
    0x03C: "HMMA",
    0x03E: "F2FP",
    0x044: "STSM",
    0x045: "I2FP",
    0x046: "VIADDMNMX",
    0x048: "VIMNMX",
    0x082: "UMOV",
    0x086: "VOTEU",
    0x087: "USEL",
    0x08C: "UISETP",
    0x090: "UIADD3",
    0x091: "ULEA",
    0x092: "ULOP3",
    0x099: "USHF",
    0x09A: "USGXT",
    0x09C: "UPLOP3",
    0x0A4: "UIMAD",
    0x0A5: "UIMAD",
    0x0B9: "ULDC",
    0x0CA: "R2UR",
    0x104: "F2F",
    0x105: "F2I",
    0x106: "I2F",
    0x108: "MUFU",
    0x109: "POPC",
    0x118: "NOP",
    0x119: "S2R",
    0x11A: "DEPBAR",
    0x11B: "ENDCOLLECTIVE",
    0x11D: "BAR",
    0x141: "BSYNC",
    0x145: "BSSY",
    0x147: "BRA",
    0x148: "WARPSYNC",
    0x14D: "EXIT",
    0x181: "LDG",
    0x182: "LDC",
    0x183: "LDL",
    0x184: "LDS",
    0x186: "STG",
    0x187: "STL",
    0x188: "STS",
    0x189: "SHFL",
    0x192: "MEMBAR",
    0x1AE: "LDGSTS",
    0x1AF: "LDGDEPBAR",
    0x1C3: "S2UR",
    0x1C4: "REDUX",
    0x1C5: "WARPGROUP",
    0x1C6: "FENCE",
    0x1F0: "HGMMA",
    0x1F1: "IGMMA",
    0x1F3: "QGMMA",
}
"""Bits 0 to 8 → name."""

WIDTHS = {0: "8", 1: "8", 2: "16", 3: "16", 4: "32", 5: "64", 6: "128"}
MEMORY = ("LDG", "STG", "LDS", "STS", "LDL", "STL", "LDGSTS")
BRANCH, EXIT = "BRA", "EXIT"
ALWAYS = 7  # the predicate in bits 12 to 14 that is always true, not negated by bit 15


def instructions(code: bytes) -> Iterable[tuple[int, str, int | None, bool]]:
    """Of each instruction of ``code``: offset, name, branch target or None, and whether the next one may follow.

    Raises ``ValueError`` for code that isn't made of whole instructions or holds none.
    """
    if not code or len(code) % 16:
        raise ValueError(f"sm_90: expected instructions of 16 bytes, got {len(code)} bytes")
    for at in range(0, len(code), 16):
        low, high = struct.unpack_from("<QQ", code, at)
        name = _name(low, high)
        always = low >> 12 & 0xF == ALWAYS
        target = _branch_target(at, low, high) if name == BRANCH else None
        yield at, name, target, not (always and name in (BRANCH, EXIT))


def _name(low: int, high: int) -> str:
    name = OPCODES.get(low & 0x1FF, f"0x{low & 0x1FF:03x}")
    if name in MEMORY:
        return f"{name}.{WIDTHS.get(high >> 9 & 7, '?')}"
    match name:
        case "HMMA":
            wide, eighth, to_f32, kind = high >> 11 & 1, high >> 14 & 1, high >> 12 & 1, high >> 18 & 3
            shape = "16816" if wide else "1684" if eighth else "1688"
            return f"HMMA.{shape}.{'F32' if to_f32 else 'F16'}{('', '.BF16', '.TF32', '.?')[kind]}"
        case "HGMMA":
            n, kind = 8 * ((low >> 53 & 31) + 1), high >> 12 & 3
            to = "F32" if high >> 11 & 1 else "F16"
            return f"HGMMA.64x{n}x{8 if kind == 2 else 16}.{to}{('', '.BF16', '.TF32', '.?')[kind]}"
        case "QGMMA":
            n, to = 8 * ((low >> 53 & 31) + 1), "F32" if high >> 11 & 1 else "F16"
            a, b = ("E5M2" if high >> bit & 1 else "E4M3" for bit in (12, 13))
            return f"QGMMA.64x{n}x32.{to}.{a}.{b}"
    return name


def _branch_target(at: int, low: int, high: int) -> int:
    """A branch's distance from the next instruction is a signed number of 4 bytes: bits 16-23 are its lowest 8, bits 34
    to 81 all above."""
    distance = (low >> 16 & 0xFF) | ((low >> 34) | (high & 0x3FFFF) << 30) << 8
    if distance >> 55:
        distance -= 1 << 56
    return at + 16 + 4 * distance
