"""A batch's rows against what they mean, spelled out token by token."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.sglang import metadata

CONTEXT = 512
"""Columns of the request→token table."""


def table(requests: int, seed: int = 0) -> torch.Tensor:
    """A request→token table as SGLang's: every entry another slot, in no order; what is not in use holds slots too."""
    slots = torch.randperm(requests * CONTEXT, generator=torch.Generator().manual_seed(seed)) + 1
    return slots.to(torch.int32).view(requests, CONTEXT)


def batch(mode: str, pairs, requests=None, seed: int = 0):
    """A ForwardBatch of ``pairs`` (cached tokens, new tokens), with the fields that the bridge reads."""
    cached, new = [c for c, _ in pairs], [n for _, n in pairs]
    rows = requests or list(range(len(pairs)))
    tokens = table(max(rows, default=0) + 2, seed)
    order = [(r, p) for r, (c, n) in zip(rows, pairs, strict=True) for p in range(c, c + n)]
    lengths = [c + n for c, n in pairs]
    return tokens, SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode, is_idle=lambda: mode == "IDLE", is_decode=lambda: mode == "DECODE"),
        batch_size=len(pairs),
        req_pool_indices=torch.tensor(rows, dtype=torch.int64),
        seq_lens=torch.tensor(lengths, dtype=torch.int64),
        seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
        extend_seq_lens=torch.tensor(new, dtype=torch.int32),
        extend_prefix_lens=torch.tensor(cached, dtype=torch.int32),
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=cached,
        positions=torch.tensor([p for _, p in order], dtype=torch.int64),
        out_cache_loc=torch.tensor([int(tokens[r, p]) for r, p in order], dtype=torch.int64),
    )


def built(fb, tokens) -> metadata.Prefill | metadata.Decode:
    rows = metadata.build(fb, tokens)
    assert rows is not None
    return rows


def seen(rows, tokens) -> list[list[int]]:
    """The slots that each real row sees, in order, the way the ops read them."""
    if isinstance(rows, metadata.Prefill):
        begin = rows.starts.tolist()
        return [rows.k_slots[b : b + n].tolist() for b, n in zip(begin, rows.lengths.tolist(), strict=True)][
            : rows.count
        ]
    return [tokens[r, :n].tolist() for r, n in zip(rows.requests.tolist(), rows.lengths.tolist(), strict=True)][
        : rows.count
    ]


def expected(tokens, fb, pairs) -> list[list[int]]:
    """The same, from the definition: new token j of a request sees the request up to itself."""
    return [
        tokens[r, : c + j + 1].tolist()
        for r, (c, n) in zip(fb.req_pool_indices.tolist(), pairs, strict=True)
        for j in range(n)
    ]


def check(rows, tokens, fb, pairs):
    assert rows.count == sum(n for _, n in pairs)
    assert seen(rows, tokens) == expected(tokens, fb, pairs)
    assert rows.positions[: rows.count].tolist() == [n - 1 for n in rows.lengths[: rows.count].tolist()]
    assert rows.write_slots[: rows.count].tolist() == fb.out_cache_loc.tolist()
    assert [s[-1] for s in seen(rows, tokens)] == fb.out_cache_loc.tolist()  # each row sees itself last
    for name, value in vars(rows).items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == torch.int32 and value.is_contiguous(), name
    added = slice(rows.count, None)
    assert not rows.lengths[added].any() and (rows.write_slots[added] == -1).all()
    least = metadata.LEAST_ROWS
    assert len(rows.lengths) == metadata.bucket(rows.count, least) >= rows.count


EXTENDS = {
    "one token": [(0, 1)],
    "whole prompt": [(0, 100)],
    "page edges": [(0, 63), (0, 64), (0, 65)],
    "behind a cached page": [(64, 1), (64, 64), (128, 65)],
    "chunks of 128": [(0, 128), (128, 128), (256, 44)],
    "ragged, cached and not": [(0, 7), (192, 3), (64, 130), (0, 1)],
    "nothing new in one": [(64, 0), (0, 5), (128, 0), (10, 2)],
}


@pytest.mark.parametrize("mode", ["EXTEND", "MIXED"])
@pytest.mark.parametrize("pairs", EXTENDS.values(), ids=EXTENDS)
def test_prefill(mode, pairs):
    tokens, fb = batch(mode, pairs)
    rows = metadata.build(fb, tokens)
    assert isinstance(rows, metadata.Prefill)
    check(rows, tokens, fb, pairs)
    keys = sum(c + n for c, n in pairs)
    assert len(rows.k_slots) == metadata.bucket(keys, metadata.LEAST_TOKENS)
    assert (rows.k_slots[keys:] == -1).all()


def test_decode_rows_in_a_mixed_batch_are_prefills_of_one():
    pairs = [(0, 70), (63, 1), (64, 1), (200, 1)]
    tokens, fb = batch("MIXED", pairs)
    rows = built(fb, tokens)
    check(rows, tokens, fb, pairs)
    assert rows.lengths[70:73].tolist() == [64, 65, 201]


@pytest.mark.parametrize("lengths", [[1], [63, 64, 65], [1, 128, 500, 2, 300], [512]])
def test_decode(lengths):
    pairs = [(n - 1, 1) for n in lengths]
    tokens, fb = batch("DECODE", pairs)
    rows = metadata.build(fb, tokens)
    assert isinstance(rows, metadata.Decode)
    check(rows, tokens, fb, pairs)
    assert max(lengths) <= rows.max_len == metadata.bucket(max(lengths), metadata.LEAST_TOKENS, CONTEXT)
    assert rows.requests[: rows.count].tolist() == fb.req_pool_indices.tolist()


def test_a_prefix_that_two_requests_share_is_in_both():
    tokens, fb = batch("EXTEND", [(64, 3), (64, 5)])
    tokens[1, :64] = tokens[0, :64]
    rows = metadata.build(fb, tokens)
    assert seen(rows, tokens)[0][:64] == seen(rows, tokens)[3][:64] == tokens[0, :64].tolist()


def test_requests_may_stand_anywhere_in_the_table():
    pairs = [(3, 2), (0, 4)]
    tokens, fb = batch("EXTEND", pairs, requests=[5, 2])
    check(metadata.build(fb, tokens), tokens, fb, pairs)
    tokens, fb = batch("DECODE", [(3, 1), (9, 1)], requests=[7, 0])
    check(metadata.build(fb, tokens), tokens, fb, [(3, 1), (9, 1)])


@settings(max_examples=60)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 140)), min_size=1, max_size=6).filter(
        lambda pairs: any(n for _, n in pairs)
    ),
    seed=st.integers(0, 9),
)
def test_any_extend(pairs, seed):
    tokens, fb = batch("EXTEND", pairs, seed=seed)
    check(metadata.build(fb, tokens), tokens, fb, pairs)


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, CONTEXT), min_size=1, max_size=9), seed=st.integers(0, 9))
def test_any_decode(lengths, seed):
    pairs = [(n - 1, 1) for n in lengths]
    tokens, fb = batch("DECODE", pairs, seed=seed)
    check(metadata.build(fb, tokens), tokens, fb, pairs)


@pytest.mark.parametrize("mode", ["IDLE", "EXTEND", "DECODE"])
def test_no_requests_is_no_rows(mode):
    tokens, fb = batch(mode, [])
    assert metadata.build(fb, tokens) is None


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2", "PREBUILT", "SPLIT_PREFILL", "DLLM_EXTEND"])
def test_other_modes_are_refused_by_name(mode):
    tokens, fb = batch(mode, [(0, 3)])
    with pytest.raises(
        NotImplementedError, match=f"^forward_mode: expected EXTEND, MIXED, DECODE or IDLE, got {mode}$"
    ):
        metadata.build(fb, tokens)


@given(size=st.integers(0, 10**6), least=st.integers(1, 300), most=st.integers(1, 10**6) | st.none())
def test_bucket(size, least, most):
    got = metadata.bucket(size, least, most)
    if most is not None and size > most:
        return
    assert got >= size
    if got != most:
        assert got & (got - 1) == 0 and got >= least and got < 2 * max(size, least)


@given(rows=st.integers(0, 9), extra=st.integers(0, 5))
def test_pad(rows, extra):
    tensor = torch.arange(rows * 6).view(2, 3, rows).permute(2, 0, 1)
    padded = metadata.pad(tensor, rows + extra, -1)
    assert padded.is_contiguous() and padded.shape == (rows + extra, 2, 3)
    assert torch.equal(padded[:rows], tensor) and (padded[rows:] == -1).all()
