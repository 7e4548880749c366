"""What a batch is, as int32 tensors on the device: made once per batch, read by every layer.

SGLang describes a batch per request (``srt/model_executor/forward_batch_info.py``), the ops want it per query row. A
*row* is one new token; row ``t`` belongs to one request and sees its first ``lengths[t]`` tokens, itself included.

Everything is computed by torch on the device. Numbers that shapes depend on come from the lists and tensors that SGLang
keeps on the host anyway, so nothing here waits for the device.

XLA compiles one executable for each combination of shapes, so sizes are rounded up (``bucket``): added rows have length
0 and slot -1, added keys slot -1, and the ops skip all of them.
"""

from dataclasses import dataclass

import torch

LEAST_ROWS = 4
LEAST_TOKENS = 256
LEAST_PART = 16


def bucket(size: int, least: int, most: int | None = None) -> int:
    """The smallest power of two that is at least ``size`` and ``least``, cut at ``most``.

    Powers of two: a server that sees every size up to ``n`` compiles ``log2(n)`` executables, and no call works on more
    than twice its size. ``least`` saves the small ones, which cost next to nothing to pad.
    """
    rounded = 1 << max(size - 1, least - 1, 0).bit_length()
    return rounded if most is None else min(rounded, most)


def pad(tensor: torch.Tensor, rows: int, fill: float) -> torch.Tensor:
    """``tensor`` with ``rows`` rows, contiguous; added ones are ``fill``. A new tensor unless it is that already."""
    if tensor.shape[0] == rows:
        return tensor.contiguous()
    padded = tensor.new_full((rows, *tensor.shape[1:]), fill)
    padded[: tensor.shape[0]] = tensor
    return padded


@dataclass(frozen=True)
class Rows:
    """The query rows of a batch. ``T`` is ``len(lengths)``, padded; the first ``count`` are real.

    - `count`: real rows.
    - `lengths`: int32 [T], tokens that a row sees: its own position plus 1, 0 for an added row.
    - `positions`: int32 [T], for RoPE; 0 for an added row.
    - `write_slots`: int32 [T], where a row's own key and latent go; -1 for an added row, and 0 (SGLang's dummy) as is.
    """

    count: int
    lengths: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor


@dataclass(frozen=True)
class Prefill(Rows):
    """Rows of requests with several new tokens each. Their keys stand side by side, request after request.

    - `k_slots`: int32 [S], the slots of every request's visible tokens, cached prefix first; -1 for an added key.
    - `starts`: int32 [T], column of ``k_slots`` at which the keys of a row's request begin.
    """

    k_slots: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True)
class Decode(Rows):
    """One row for each request, which reads its keys through the request→token table.

    - `requests`: int32 [T], a row's row of the table; 0 for an added row, whose length is 0.
    - `max_len`: at least every length, rounded up: columns of the logits.
    """

    requests: torch.Tensor
    max_len: int


def build(forward_batch, req_to_token: torch.Tensor) -> Prefill | Decode | None:
    """The rows of a ``ForwardBatch``; None where it has none (idle). `req_to_token`: int32 [requests, max_context]."""
    mode = forward_batch.forward_mode
    if mode.is_idle() or forward_batch.batch_size == 0:
        return None
    if mode.is_decode():
        return _decode(forward_batch, req_to_token)
    if mode.name in ("EXTEND", "MIXED"):
        return _prefill(forward_batch, req_to_token)
    raise NotImplementedError(f"forward_mode: expected EXTEND, MIXED, DECODE or IDLE, got {mode.name}")


def _decode(forward_batch, req_to_token: torch.Tensor) -> Decode:
    rows = forward_batch.seq_lens.shape[0]
    padded = bucket(rows, LEAST_ROWS)
    longest = int(forward_batch.seq_lens_cpu.max())
    return Decode(
        count=rows,
        lengths=_int32(forward_batch.seq_lens, padded, 0),
        positions=_int32(forward_batch.positions[:rows], padded, 0),
        write_slots=_int32(forward_batch.out_cache_loc[:rows], padded, -1),
        requests=_int32(forward_batch.req_pool_indices, padded, 0),
        max_len=bucket(longest, LEAST_TOKENS, req_to_token.shape[1]),
    )


def static_decode(forward_batch, req_to_token: torch.Tensor) -> Decode:
    """The rows of a decode in a graph: SGLang's static tensors, of a size that it captures, as int32. A replay makes
    them anew from what those hold then; a row whose length is 0 is padded, and writes nothing."""
    lengths = forward_batch.seq_lens.to(torch.int32)
    rows = len(lengths)
    return Decode(
        count=rows,
        lengths=lengths,
        positions=forward_batch.positions[:rows].to(torch.int32),
        write_slots=torch.where(lengths > 0, forward_batch.out_cache_loc[:rows], -1).to(torch.int32),
        requests=forward_batch.req_pool_indices.to(torch.int32),
        max_len=req_to_token.shape[1],
    )


def rows_within(logits_bytes: int, rows: int, keys: int) -> int:
    """As many of ``rows``, a power of two, as float32 logits over ``keys`` in ``logits_bytes`` allow; ``LEAST_PART`` at
    least, whose int32 are as long as memory must be aligned.

    Raises ``ValueError`` where that is still too much.
    """
    part = rows
    while part > LEAST_PART and 4 * part * keys > logits_bytes:
        part //= 2
    if 4 * part * keys > logits_bytes:
        raise ValueError(
            f"extend_seq_lens: expected at most {logits_bytes // (4 * part):,} tokens, cached and new, in one prefill "
            f"batch, got {keys:,}"
        )
    return part


def _prefill(forward_batch, req_to_token: torch.Tensor) -> Prefill:
    new, cached = forward_batch.extend_seq_lens, forward_batch.extend_prefix_lens
    rows = sum(forward_batch.extend_seq_lens_cpu)
    keys = rows + sum(forward_batch.extend_prefix_lens_cpu)
    device = new.device

    # Each row and each key finds its request; exclusive sums say where a request's rows and keys begin.
    requests = torch.arange(new.shape[0], device=device)
    request_of_row = torch.repeat_interleave(requests, new, output_size=rows)
    request_of_key = torch.repeat_interleave(requests, cached + new, output_size=keys)
    first_row = torch.cumsum(new, 0) - new
    first_key = torch.cumsum(cached + new, 0) - (cached + new)

    # A request's last new token sees all of it, the one before one less: causal from right behind the cached prefix.
    row_in_request = torch.arange(rows, device=device) - first_row[request_of_row]
    lengths = cached[request_of_row] + row_in_request + 1
    key_in_request = torch.arange(keys, device=device) - first_key[request_of_key]
    k_slots = req_to_token[forward_batch.req_pool_indices[request_of_key], key_in_request]

    padded = bucket(rows, LEAST_ROWS)
    return Prefill(
        count=rows,
        lengths=_int32(lengths, padded, 0),
        positions=_int32(forward_batch.positions[:rows], padded, 0),
        write_slots=_int32(forward_batch.out_cache_loc[:rows], padded, -1),
        k_slots=_int32(k_slots, bucket(keys, LEAST_TOKENS), -1),
        starts=_int32(first_key[request_of_row], padded, 0),
    )


def _int32(tensor: torch.Tensor, rows: int, fill: int) -> torch.Tensor:
    """SGLang counts in int64; JAX has no such type unless told to (``jax_enable_x64``)."""
    return pad(tensor.to(torch.int32), rows, fill)
