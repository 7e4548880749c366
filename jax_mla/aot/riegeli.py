"""Reads Riegeli/records files, the container in which XLA serialises its executables.

A file is a sequence of chunks, interrupted at each multiple of 64 KiB by a block header of 24 bytes. A chunk has a
header of 40 bytes (all little-endian: hash 8, size of its data 8, hash of that 8, type 1, number of records 7, size of
the records decoded 8) and its data. XLA writes two types only: "s", the file's signature, empty; and "r", simple
records, whose data are a letter for the compression, the size of the compressed list of sizes (varint), that list and
the compressed records. Compressed means: the size before (varint), then the codec's bytes.

What else the format knows (metadata, padding, transposed records, Brotli, Zstandard) is refused by name. The hashes are
not checked: the codec and the sizes fail on what is damaged.

Source: google/riegeli, ``doc/riegeli_records_file_format.md``.
"""

import struct
from collections.abc import Iterator

import cramjam

BLOCK_SIZE, BLOCK_HEADER, CHUNK_HEADER = 1 << 16, 24, 40
SIGNATURE = bytes.fromhex("83af70d10d884a3f") + bytes(8) + (64).to_bytes(8, "little")
"""How a file begins: the first block's header, whose chunk ends at byte 64. (Its first 8 bytes are the hash.)"""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The variable-length integer at ``data[at:]`` (7 bits a byte, lowest first), and where it ends."""
    value = 0
    for i in range(10):
        if at + i >= len(data):
            break
        value |= (data[at + i] & 0x7F) << (7 * i)
        if data[at + i] < 0x80:
            return value, at + i + 1
    raise ValueError(f"executable: expected a varint at byte {at}, found none that ends")


def records(data: bytes) -> list[bytes]:
    """The records of a Riegeli file.

    Raises ``ValueError`` for what is none, is cut short, or has chunks or compression of another kind.
    """
    if not data.startswith(SIGNATURE):
        raise ValueError(f"executable: expected a Riegeli file's signature, got {data[:8].hex()}")
    chunks = b"".join(data[i + BLOCK_HEADER : i + BLOCK_SIZE] for i in range(0, len(data), BLOCK_SIZE))
    found, at = [], 0
    while at < len(chunks):
        if len(chunks) - at < CHUNK_HEADER:
            raise ValueError(f"executable: expected a chunk's header of 40 bytes, {len(chunks) - at} are left")
        _, size, _, kind_and_count, decoded_size = struct.unpack_from("<5Q", chunks, at)
        kind, count = chr(kind_and_count & 0xFF), kind_and_count >> 8
        body = chunks[at + CHUNK_HEADER : at + CHUNK_HEADER + size]
        if len(body) != size or count > CHUNK_HEADER + size:
            raise ValueError(f"executable: expected a chunk of {size} bytes for {count} records, got {len(body)} bytes")
        at += CHUNK_HEADER + size
        if kind == "r":
            found += _simple(body, count, decoded_size)
        elif not (kind == "s" and size == count == 0):
            raise ValueError(f"executable: expected chunks of type 's' and 'r', got {kind!r} of {size} bytes")
    return found


def _simple(body: bytes, count: int, decoded_size: int) -> Iterator[bytes]:
    codec = body[:1]
    size, at = varint(body, 1)
    sizes, values = _decompress(codec, body[at : at + size]), _decompress(codec, body[at + size :])
    lengths, at = [], 0
    while at < len(sizes):
        length, at = varint(sizes, at)
        lengths.append(length)
    if len(lengths) != count or not sum(lengths) == len(values) == decoded_size:
        raise ValueError(
            f"executable: expected {count} records of {decoded_size} bytes, got {len(lengths)} of {len(values)}"
        )
    at = 0
    for length in lengths:
        yield values[at : at + length]
        at += length


def _decompress(codec: bytes, data: bytes) -> bytes:
    if codec == b"\0":
        return data
    if codec != b"s":
        raise ValueError(f"executable: expected records compressed by Snappy or not at all, got codec {codec!r}")
    size, at = varint(data, 0)
    try:
        plain = bytes(cramjam.snappy.decompress_raw(data[at:]))
    except cramjam.DecompressionError as e:
        raise ValueError(f"executable: expected Snappy data, got {e}") from e
    if len(plain) != size:
        raise ValueError(f"executable: expected {size} bytes out of Snappy, got {len(plain)}")
    return plain
