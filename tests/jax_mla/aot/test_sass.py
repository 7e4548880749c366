"""Names of sm_90's instructions: words that ptxas 13.1 made, named by nvdisasm."""

import struct

import pytest

from jax_mla.aot.sass import instructions

KNOWN = [  # name, bits 0-63, bits 64-127
    ("HMMA.16816.F32", 0x000000080404723C, 0x004FDE0000001810),
    ("HMMA.16816.F16", 0x000000080404723C, 0x004FDE000000080E),
    ("HMMA.16816.F32.BF16", 0x000000080404723C, 0x004FDE0000041810),
    ("HMMA.1688.F32", 0x000000080404723C, 0x004FDE000000100C),
    ("HMMA.1688.F32.BF16", 0x000000080404723C, 0x004FDE000004100C),
    ("HMMA.1688.F32.TF32", 0x000000080404723C, 0x004FDE0000081010),
    ("HMMA.1684.F32.TF32", 0x000000080404723C, 0x004FDE000008500C),
    ("HGMMA.64x8x16.F32.BF16", 0x00000000041879F0, 0x000FE60008001818),
    ("HGMMA.64x64x16.F32.BF16", 0x00E00000041879F0, 0x000FE60008001818),
    ("HGMMA.64x256x16.F32.BF16", 0x03E00000041879F0, 0x000FE60008001818),
    ("HGMMA.64x64x16.F32.BF16", 0x00E0000438187DF0, 0x000FE60008001818),
    ("HGMMA.64x64x16.F32", 0x00E00000041879F0, 0x000FE60008000818),
    ("HGMMA.64x64x16.F16", 0x00E00000041879F0, 0x000FE60008000018),
    ("HGMMA.64x64x8.F32.TF32", 0x04E00000041879F0, 0x000FE60008002818),
    ("QGMMA.64x64x32.F32.E4M3.E4M3", 0x00E00000041879F3, 0x000FE60008000818),
    ("QGMMA.64x128x32.F32.E4M3.E4M3", 0x01E00000041879F3, 0x000FE60008000818),
    ("QGMMA.64x64x32.F32.E5M2.E5M2", 0x00E00000041879F3, 0x000FE60008003818),
    ("QGMMA.64x64x32.F32.E4M3.E5M2", 0x00E00000041879F3, 0x000FE60008002818),
    ("QGMMA.64x64x32.F16.E4M3.E4M3", 0x00E00000041879F3, 0x000FE60008000018),
    ("IGMMA", 0x01E00000041879F1, 0x000FE60008041018),
    ("IMMA", 0x0000000804047237, 0x004FDE0000405C08),
    ("LDC", 0x00008800FF0C7B82, 0x000E220000000A00),
    ("LDL.32", 0x0000040001027983, 0x000EA80000300800),
    ("LOP3", 0x0000000850027812, 0x000FC800078EC0FF),
    ("IMAD", 0x0000004004057824, 0x101FE200078E0252),
    ("NOP", 0x0000000000007918, 0x000FC00000000000),
    ("0x1ff", 0x00000000000001FF, 0),
]


def words(*pairs) -> bytes:
    return b"".join(struct.pack("<QQ", low, high) for low, high in pairs)


@pytest.mark.parametrize("name, low, high", KNOWN, ids=[k[0] for k in KNOWN])
def test_known_instructions(name, low, high):
    assert list(instructions(words((low, high)))) == [(0, name, None, True)]


@pytest.mark.parametrize("width, name", [(0, "8"), (1, "8"), (2, "16"), (3, "16"), (4, "32"), (5, "64"), (6, "128")])
def test_widths(width, name):
    for opcode, what in (
        (0x981, "LDG"),
        (0x986, "STG"),
        (0x984, "LDS"),
        (0x988, "STS"),
        (0xFAE, "LDGSTS"),
        (0x387, "STL"),
    ):
        assert list(instructions(words((opcode, width << 9)))) == [(0, f"{what}.{name}", None, True)]


@pytest.mark.parametrize(
    "at, low, high, target, falls_through",
    [
        (0x3D0, 0x0000000000A48947, 0x000FEA0003800000, 0x670, True),  # @!P0
        (0x660, 0x0000008000907947, 0x001FEC0003800000, 0x88B0, False),
        (0x88A0, 0xFFFFFF84000C0947, 0x001FDE000383FFFF, 0xCE0, True),  # @P0
        (0x9C50, 0xFFFFFFFC00FC7947, 0x000FC0000383FFFF, 0x9C50, False),
    ],
)
def test_branches(at, low, high, target, falls_through):
    nop = (0x7918, 0)
    found = list(instructions(words(*[nop] * (at // 16), (low, high))))
    assert found[-1] == (at, "BRA", target, falls_through)


def test_exit():
    assert list(instructions(words((0x794D, 0)))) == [(0, "EXIT", None, False)]
    assert list(instructions(words((0x894D, 0)))) == [(0, "EXIT", None, True)]  # @!P0


@pytest.mark.parametrize("size", [0, 8, 24])
def test_code_that_is_not_whole(size):
    with pytest.raises(ValueError, match=f"instructions of 16 bytes, got {size} bytes"):
        list(instructions(bytes(size)))
