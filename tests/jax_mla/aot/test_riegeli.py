"""The container: files written by hand read back, and what is not as XLA writes it is refused."""

import pytest

from jax_mla.aot.riegeli import records, varint
from tests.jax_mla.aot import files

SOME = [b"first", b"", bytes(range(256)) * 40, b"last"]


@pytest.mark.parametrize("codec", [b"s", b"\0"], ids=["snappy", "none"])
def test_records(codec):
    assert records(files.riegeli(files.simple_chunk(SOME, codec))) == SOME
    assert records(files.riegeli(files.simple_chunk(SOME[:1], codec), files.simple_chunk(SOME[1:], codec))) == SOME
    assert records(files.riegeli()) == []


@pytest.mark.parametrize("size", [65000, 65536 - 24 - 40, 65536, 200_000])
def test_block_headers_stand_in_the_middle_of_records(size):
    record = bytes(i * 7 % 251 for i in range(size))
    data = files.riegeli(files.simple_chunk([record, b"more"], b"\0"))
    assert len(data) > size and records(data) == [record, b"more"]


@pytest.mark.parametrize("value", [0, 1, 127, 128, 300, 2**32, 2**63])
def test_varint(value):
    assert varint(b"\xff" + files.varint(value) + b"\xff", 1) == (value, 1 + len(files.varint(value)))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 11])
def test_varint_that_does_not_end(data):
    with pytest.raises(ValueError, match="expected a varint at byte 0"):
        varint(data, 0)


GOOD = files.riegeli(files.simple_chunk(SOME))


@pytest.mark.parametrize(
    "data, why",
    [
        (b"", "signature"),
        (b"x" + GOOD[1:], "signature"),
        (GOOD[:-1], "expected a chunk of .* bytes for 4 records"),
        (GOOD[:90], "header of 40 bytes, 2[0-9] are left"),
        (files.riegeli(files.chunk("t", b"", 0, 0)), "type 's' and 'r', got 't'"),
        (files.riegeli(files.chunk("s", b"x", 0, 0)), "type 's' and 'r', got 's' of 1 bytes"),
        (files.riegeli(files.chunk("r", b"z\x01\x01a", 1, 1)), "Snappy or not at all"),
        (files.riegeli(files.chunk("r", b"s\x02\x05\xff\x00", 1, 1)), "Snappy"),
        (files.riegeli(files.chunk("r", b"\0\x01\x05abc", 1, 5)), "expected 1 records of 5 bytes, got 1 of 3"),
        (files.riegeli(files.chunk("r", b"\0\x01\x03abc", 2, 3)), "expected 2 records of 3 bytes, got 1 of 3"),
        (files.riegeli(files.chunk("r", b"\0\x01\x03abc", 99, 3)), "for 99 records"),
    ],
)
def test_refusals(data, why):
    with pytest.raises(ValueError, match=why):
        records(data)
