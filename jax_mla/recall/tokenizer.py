"""A byte-level tokenizer of 259 ids: a byte's id is its value, then ``BOS``, ``EOS`` and ``PAD``.

Written as Hugging Face's files without transformers or tokenizers, which read them.
"""

import json
from pathlib import Path

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 259
SPECIAL = ("<s>", "</s>", "<pad>")
"""What ids 256, 257 and 258 are called in text."""


def encode(text: str) -> list[int]:
    """UTF-8 bytes of ``text``; special tokens are not looked for."""
    return list(text.encode())


def decode(ids: list[int]) -> str:
    """Text of the ids below 256; special tokens are left out, bytes that are not UTF-8 become U+FFFD.

    Raises ``ValueError`` for an id outside [0, 259).
    """
    for token in ids:
        if not 0 <= token < VOCAB_SIZE:
            raise ValueError(f"decode: ids expected in [0, {VOCAB_SIZE}), got {token}")
    return bytes(token for token in ids if token < BOS).decode(errors="replace")


def byte_letters() -> list[str]:
    """256 printable characters, one a byte, as GPT-2 and Hugging Face's ByteLevel write bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def write_tokenizer(folder: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``, which exists.

    Encoding puts ``BOS`` first, unless told not to add special tokens.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bos = {"SpecialToken": {"id": SPECIAL[0], "type_id": 0}}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": BOS + i, "content": name} | flags for i, name in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {SPECIAL[0]: {"id": SPECIAL[0], "ids": [BOS], "tokens": [SPECIAL[0]]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: i for i, letter in enumerate([*byte_letters(), *SPECIAL])},
            "merges": [],
        },
    }
    names = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    config = names | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1, ensure_ascii=False) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
