"""Names and lengths of AMD's CDNA 3 and CDNA 4 instructions, exactly, or an error.

An instruction is one, two or four 32-bit words. The first says by its highest bits which encoding it has and so where
the opcode stands::

    0....... ........ ........ ........   VOP2   opcode in bits 30-25; 62 is VOPC (24-17) and 63 is VOP1 (16-9)
    10...... ........ ........ ........   SOP2   29-23
    1011....                              SOPK   27-23
    10111110 1                            SOP1   15-8
    10111111 0                            SOPC   22-16
    10111111 1                            SOPP   22-16
    110000..                              SMEM   25-18, two words
    110100..                              VOP3   25-16, two words
    11010011 1                            VOP3P  22-16, two words (matrix instructions among them)
    110110..                              DS     24-17, two words
    110111..                              FLAT   24-18, two words; bits 15-14: flat, scratch, global
    111000..                              MUBUF  24-18, two words
    111010..                              MTBUF  18-15, two words

A second word also follows a source operand that is 255 (a literal), and in VOP1, VOP2 and VOPC one that is 249 (SDWA)
or 250 (DPP); always after ``v_fmamk``, ``v_fmaak``, ``v_madmk``, ``v_madak`` and ``s_setreg_imm32``. On CDNA 4
``v_mfma_ld_scale_b32`` is the first half of a scaled matrix instruction, whose other half follows.

Source: AMD Instinct MI300 (CDNA 3) and CDNA 4 *Instruction Set Architecture*, chapter "Microcode Formats".
"""

import functools
import re
import struct
from importlib import resources

LITERAL, SDWA, DPP = 255, 249, 250
VOP2_WITH_CONSTANT = (23, 24, 36, 37)
SETREG_IMMEDIATE = 20
VOP3_ONLY, VOP3_OF_VOP1, VOP3_OF_VOP2 = 448, 320, 256
SCALED = "v_mfma_ld_scale_b32"
NO_WAY_ON = ("s_endpgm", "s_branch", "s_setpc_b64")
TWO_WORDS = {0b110000: "smem", 0b110110: "ds", 0b111000: "mubuf", 0b111010: "mtbuf"}
OPCODE_AT = {"smem": (18, 8), "ds": (17, 8), "mubuf": (18, 7), "mtbuf": (15, 4)}


class UnknownInstruction(ValueError):
    """A word that is no instruction of the chip."""


@functools.cache
def opcodes(arch: str) -> dict[str, dict[int, str]]:
    """Encoding → opcode → name, of "gfx942" or "gfx950"."""
    text = resources.files("jax_mla.aot").joinpath("cdna_opcodes.txt").read_text(encoding="utf-8")
    _, cdna3, cdna4 = re.split(r"^\[cdna[34]\]$", text, flags=re.MULTILINE)
    tables: dict[str, dict[int, str]] = {}
    for section in {"gfx942": (cdna3,), "gfx950": (cdna3, cdna4)}[arch]:
        for line in re.split(r"\n(?! )", section.strip()):
            encoding, *pairs = line.split()
            for pair in pairs:
                opcode, name = pair.split(":")
                tables.setdefault(encoding, {})[int(opcode)] = name
    return tables


def instructions(code: bytes, arch: str) -> list[tuple[int, str]]:
    """Offset and name of each instruction of ``code``, from its first byte to its last.

    - `arch`: "gfx942" or "gfx950".

    Raises ``UnknownInstruction`` for an opcode that the chip does not have, and for code that ends within an
    instruction.
    """
    if len(code) % 4:
        raise UnknownInstruction(f"{arch}: expected whole words of 4 bytes, got {len(code)} bytes")
    words = struct.unpack(f"<{len(code) // 4}I", code)
    tables = opcodes(arch)
    found, at = [], 0
    while at < len(words):
        encoding, opcode, length = _shape(words[at])
        name = _name(tables, encoding, opcode)
        if name == SCALED:
            if at + 2 < len(words):
                encoding, opcode, _ = _shape(words[at + 2])
                name = _name(tables, encoding, opcode).replace("v_mfma_", "v_mfma_scale_")
            length = 4
        if not name or at + length > len(words):
            last = " ".join(f"{word:08x}" for word in words[at : at + length])
            what = "no instruction" if not name else f"the first words of {name}"
            raise UnknownInstruction(f"{arch}: at byte {4 * at} expected an instruction, got {what}: {last}")
        found.append((4 * at, name))
        at += length
    return found


def _name(tables: dict[str, dict[int, str]], encoding: str, opcode: int) -> str:
    if encoding == "vop3" and opcode < VOP3_ONLY:
        if opcode >= VOP3_OF_VOP1:
            encoding, opcode = "vop1", opcode - VOP3_OF_VOP1
        elif opcode >= VOP3_OF_VOP2:
            encoding, opcode = "vop2", opcode - VOP3_OF_VOP2
        else:
            encoding = "vopc"
    return tables[encoding].get(opcode, "") if encoding else ""


def _shape(word: int) -> tuple[str, int, int]:
    """Encoding, opcode and length in words of the instruction that begins with ``word``; "" where it has none."""
    if not word >> 31:
        follows = (word & 0x1FF) in (LITERAL, SDWA, DPP)
        opcode = word >> 25 & 63
        if opcode == 63:
            return "vop1", word >> 9 & 255, 1 + follows
        if opcode == 62:
            return "vopc", word >> 17 & 255, 1 + follows
        return "vop2", opcode, 1 + (follows or opcode in VOP2_WITH_CONSTANT)
    if word >> 30 == 0b10:
        first, second = word & 255, word >> 8 & 255
        match word >> 23:
            case 0b101111101:
                return "sop1", second, 1 + (first == LITERAL)
            case 0b101111110:
                return "sopc", word >> 16 & 127, 1 + (LITERAL in (first, second))
            case 0b101111111:
                return "sopp", word >> 16 & 127, 1
        if word >> 28 == 0b1011:
            opcode = word >> 23 & 31
            return "sopk", opcode, 1 + (opcode == SETREG_IMMEDIATE)
        return "sop2", word >> 23 & 127, 1 + (LITERAL in (first, second))
    top = word >> 26
    if top == 0b110100:
        return ("vop3p", word >> 16 & 127, 2) if word >> 23 == 0b110100111 else ("vop3", word >> 16 & 1023, 2)
    if top == 0b110111:
        segment = ("flat", "scratch", "global", "")[word >> 14 & 3]
        return segment, word >> 18 & 127, 2
    encoding = TWO_WORDS.get(top, "")
    if not encoding:
        return "", 0, 1
    at, bits = OPCODE_AT[encoding]
    return encoding, word >> at & ((1 << bits) - 1), 2


def branch_target(code: bytes, at: int, name: str) -> int | None:
    """Where the instruction ``name`` at byte ``at`` of ``code`` branches to, or None: it goes on with the next one."""
    if not (name == "s_branch" or name.startswith("s_cbranch_")):
        return None
    (words,) = struct.unpack_from("<h", code, at)
    return at + 4 + 4 * words
