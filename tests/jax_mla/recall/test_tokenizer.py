import pytest

from jax_mla.recall import tokenizer

TEXTS = ["", ";Qk7;Zr3?Qk", "  two  spaces\n\ttab ", "déjà vu, 日本, 🙂", "the king's 12 letters. <s"]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_bytes_and_come_back(text):
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode([tokenizer.BOS, *ids, tokenizer.EOS, tokenizer.PAD]) == text


def test_decode_refuses_other_ids():
    with pytest.raises(ValueError, match=r"decode: ids expected in \[0, 259\), got 259"):
        tokenizer.decode([65, 259])


def test_transformers_reads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.write_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == tokenizer.VOCAB_SIZE
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (256, 257, 258)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ids == [tokenizer.BOS, *tokenizer.encode(text)]
        assert theirs.decode(ids, skip_special_tokens=True) == text
    every = [chr(i) for i in range(256)]
    assert theirs("".join(every), add_special_tokens=False)["input_ids"] == tokenizer.encode("".join(every))
    assert theirs("a</s>b", add_special_tokens=False)["input_ids"] == [97, 257, 98]
