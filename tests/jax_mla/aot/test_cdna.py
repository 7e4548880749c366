"""The decoder of CDNA 3 and CDNA 4: instructions of every encoding, assembled with LLVM; and what is refused."""

import pytest

from jax_mla.aot.cdna import UnknownInstruction, branch_target, instructions, opcodes

BOTH, CDNA3, CDNA4 = ("gfx942", "gfx950"), ("gfx942",), ("gfx950",)
KNOWN = [  # name, bytes, chips that have it
    ("v_add_f32", "01050002", BOTH),
    ("v_add_f32", "ff040002 0000c03f", BOTH),
    ("v_add_f32", "f9040002 01060406", BOTH),
    ("v_add_f32", "fa040002 011101ff", BOTH),
    ("v_add_f32", "000001d1 01040200", BOTH),
    ("v_fmamk_f32", "0105002e 0000c03f", BOTH),
    ("v_mov_b32", "0202007e", BOTH),
    ("v_mov_b32", "ff02007e 78563412", BOTH),
    ("v_mov_b32", "000041d1 02000000", BOTH),
    ("v_cmp_eq_u32", "0105947d", BOTH),
    ("v_cmp_eq_u32", "ff04947d 67452301", BOTH),
    ("v_cmp_eq_u32", "0000cad0 01050200", BOTH),
    ("v_perm_b32", "0000edd1 01050e04", BOTH),
    ("v_lshl_add_u64", "000008d2 02051104", BOTH),
    ("s_add_u32", "01020080", BOTH),
    ("s_add_u32", "01ff0080 78563412", BOTH),
    ("s_add_u32", "ff010080 78563412", BOTH),
    ("s_movk_i32", "341200b0", BOTH),
    ("s_setreg_imm32_b32", "01f800ba 01000000", BOTH),
    ("s_mov_b64", "020180be", BOTH),
    ("s_mov_b32", "ff0080be 78563412", BOTH),
    ("s_cmp_eq_u32", "000106bf", BOTH),
    ("s_cmp_eq_u32", "00ff06bf 78563412", BOTH),
    ("s_nop", "000080bf", BOTH),
    ("s_load_dwordx4", "01010ac0 10000000", BOTH),
    ("s_memtime", "000090c0 00000000", BOTH),
    ("v_pk_fma_f32", "0040b0d3 02091a1c", BOTH),
    ("v_accvgpr_write_b32", "0040d9d3 01010018", BOTH),
    ("v_mfma_f32_16x16x16_bf16", "0000e1d3 040d0204", BOTH),
    ("v_mfma_f32_16x16x32_fp8_fp8", "0080f3d3 040d0204", BOTH),
    ("v_mfma_f32_32x32x16_fp8_fp8", "0000f7d3 142d0204", BOTH),
    ("v_smfmac_f32_16x16x64_fp8_fp8", "0000fbd3 04110604", BOTH),
    ("v_mfma_f32_16x16x8_xf32", "0000bed3 040d0204", CDNA3),
    ("v_mfma_f32_16x16x128_f8f6f4", "0000add3 04190204", CDNA4),
    ("v_mfma_f32_32x32x64_f8f6f4", "0000aed3 143d0204", CDNA4),
    ("v_mfma_f32_16x16x32_bf16", "0000b5d3 04110204", CDNA4),
    ("v_mfma_scale_f32_16x16x128_f8f6f4", "0000acd3 142b0200 0008add3 04190204", CDNA4),
    ("v_cvt_pk_bf16_f32", "000068d2 01050200", CDNA4),
    ("v_cvt_pk_fp8_f32", "0000a2d2 01050200", BOTH),
    ("v_bitop3_b32", "000234d2 01050e04", CDNA4),
    ("v_prng_b32", "01b1007e", CDNA4),
    ("v_permlane32_swap_b32", "01b5007e", CDNA4),
    ("ds_read_b128", "0000fed9 08000000", BOTH),
    ("ds_write2_b64", "00019cd8 00020400", BOTH),
    ("ds_read_b64_tr_b16", "0000c6d9 08000000", CDNA4),
    ("flat_load_dword", "000050dc 02000000", BOTH),
    ("global_load_dwordx4", "00805cdc 02007f04", BOTH),
    ("global_load_dword", "108050dc 02000004", BOTH),
    ("global_store_short", "008068dc 02047f00", BOTH),
    ("scratch_load_dword", "006050dc 02007f04", BOTH),
    ("scratch_store_dwordx4", "00407cdc 00040000", BOTH),
    ("global_load_lds_dwordx4", "0080f4dd 02007f00", CDNA4),
    ("buffer_load_dwordx4", "00105ce0 04000280", BOTH),
    ("buffer_load_dword", "000051e0 00000203", BOTH),
    ("buffer_atomic_pk_add_bf16", "000048e1 00000203", CDNA4),
    ("tbuffer_load_format_x", "000008e8 00000203", BOTH),
]
END = bytes.fromhex("000081bf")


@pytest.mark.parametrize("name, code, chips", KNOWN, ids=lambda x: x if isinstance(x, str) else "")
def test_known_instructions(name, code, chips):
    code = bytes.fromhex(code)
    for arch in chips:
        assert instructions(code + END, arch) == [(0, name), (len(code), "s_endpgm")]
        assert instructions(END + code, arch) == [(0, "s_endpgm"), (4, name)]
        for cut in range(4, len(code), 4):
            with pytest.raises(UnknownInstruction, match=f"{arch}: at byte 0 expected an instruction"):
                instructions(code[:cut], arch)


@pytest.mark.parametrize("name, code", [(name, code) for name, code, chips in KNOWN if chips == CDNA4])
def test_what_only_cdna4_has_is_unknown_on_cdna3(name, code):
    with pytest.raises(UnknownInstruction, match="gfx942: at byte 0 expected an instruction, got no instruction"):
        instructions(bytes.fromhex(code), "gfx942")


def test_all_in_a_row():
    for arch in BOTH:
        known = [(name, bytes.fromhex(code)) for name, code, chips in KNOWN if arch in chips]
        code = b"".join(code for _, code in known) + END
        assert [name for _, name in instructions(code, arch)] == [*(name for name, _ in known), "s_endpgm"]


@pytest.mark.parametrize(
    "word",
    [
        0xFFFFFFFF,  # no encoding
        0xC4000000,  # VINTRP and EXP, which these chips lack
        0xD4000000,
        0xF0000000,  # MIMG
        0xE4000000,
        0x9E000000,  # SOP2 with an opcode that is none
        0xBE80FF00,  # SOP1
        0xBFFF0000,  # SOPP
        0x7E01FE00,  # VOP1
        0xD37F0000,  # VOP3
        0xDC00C000,  # FLAT of no segment
    ],
    ids=hex,
)
def test_unknown_words(word):
    for arch in BOTH:
        with pytest.raises(UnknownInstruction, match=f"{arch}: at byte 4 expected an instruction, got no instruction"):
            instructions(END + word.to_bytes(4, "little") + bytes(12), arch)


def test_scaled_instruction_needs_its_other_half():
    half = bytes.fromhex("0000acd3 142b0200")
    for rest in (b"", bytes.fromhex("0000add3"), bytes.fromhex("ffffffff ffffffff")):
        with pytest.raises(UnknownInstruction, match="gfx950: at byte 0"):
            instructions(half + rest, "gfx950")


def test_odd_bytes():
    with pytest.raises(UnknownInstruction, match="whole words of 4 bytes, got 5 bytes"):
        instructions(bytes(5), "gfx942")


def test_tables():
    cdna3, cdna4 = opcodes("gfx942"), opcodes("gfx950")
    assert len(cdna3) == 17
    for encoding, names in cdna3.items():
        assert len(set(names.values())) == len(names)
        assert names.items() <= cdna4[encoding].items()
    assert [sum(map(len, tables.values())) for tables in (cdna3, cdna4)] == [1172, 1267]


@pytest.mark.parametrize("words, target", [(0, 8), (1, 12), (-1, 4), (-2, 0), (100, 408)])
def test_branch_targets(words, target):
    code = END + (0xBF820000 | words & 0xFFFF).to_bytes(4, "little")
    assert instructions(code, "gfx942")[1] == (4, "s_branch")
    assert branch_target(code, 4, "s_branch") == target
    assert branch_target(code, 4, "s_cbranch_scc1") == target
    assert branch_target(code, 0, "s_endpgm") is None
