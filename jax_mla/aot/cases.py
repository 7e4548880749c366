"""The cases: which kernel at which shape of DeepSeek-V3.2's serving, what it has to do, and what its loops go over."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

import jax
import jax.numpy as jnp

from jax_mla import cost
from jax_mla.aot.chips import Chip
from jax_mla.cost import Cost
from jax_mla.layouts import IndexLayout, KVLayout, kv_layout
from jax_mla.ops.index_logits_paged import config as paged_config
from jax_mla.ops.index_logits_paged import index_logits_paged
from jax_mla.ops.index_logits_ragged import config as ragged_config
from jax_mla.ops.index_logits_ragged import index_logits_ragged
from jax_mla.ops.index_query import index_query
from jax_mla.ops.index_write import index_write
from jax_mla.ops.kv_write import kv_write
from jax_mla.ops.quantize import quantize
from jax_mla.ops.select import select
from jax_mla.ops.sparse_mla import config as sparse_config
from jax_mla.ops.sparse_mla import sparse_mla
from jax_mla.pallas_triton import Target, cdiv

Phase = Literal["decode", "prefill"]
DECODE: Phase = "decode"
PREFILL: Phase = "prefill"
SETS = ("ci", "all")
OPS = (
    "quantize",
    "kv_write",
    "index_write",
    "index_query",
    "index_logits_ragged",
    "index_logits_paged",
    "select",
    "sparse_mla",
)
HEADS, TOP_K = (8, 16, 32, 64, 128), (512, 1024, 2048)
ROWS: dict[Phase, int] = {DECODE: 64, PREFILL: 4096}
"""Query rows: a decode batch, and a chunk of a prefill."""
CONTEXT: dict[Phase, int] = {DECODE: 65536, PREFILL: 32768}
"""Tokens that the indexer scores."""
SLOTS, POSITIONS, HIDDEN = 1 << 19, 163840, 7168
SOFTMAX_SCALE = 0.1352337788608801  # DeepSeek-V3.2's: 192^-0.5 times mscale²
SELECT_PROBES = 10  # of a threshold, in rows of normal numbers


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    - `label`: what tells it from the op's other cases. - `phase`: "decode" or "prefill".
    - `call`: the op itself, on arrays of the shapes and dtypes in `arguments` (None where it takes none).
    - `cost`: what the op has to move and to multiply. - `operand`: "fp8", "bf16" or "f32", what it multiplies.
    - `trips`: says how often a program goes through its loop, and through a loop around that, by the op's own
      ``Config``; ``analysis`` says what the estimate makes of them.
    - `donate`: numbers of the arguments whose memory the result is.
    - `in_ci`: whether the set "ci" has it.
    """

    op: str
    label: str
    phase: Phase
    call: Callable
    arguments: tuple
    cost: Cost
    operand: Literal["fp8", "bf16", "f32"]
    trips: Callable[[], tuple[int, int]] = lambda: (1, 1)
    donate: tuple[int, ...] = ()
    in_ci: bool = False


def cases(chip: Chip, which: str = "all") -> list[Case]:
    """All cases for ``chip``, in its own FP8 format, or those of the set "ci"."""
    made = [
        *_quantize(chip),
        *_kv_write(chip),
        *_index_write(chip),
        *_index_query(chip),
        *_index_logits_ragged(chip),
        *_index_logits_paged(chip),
        *_select(),
        *_sparse_mla(chip),
    ]
    return [case for case in made if case.in_ci or which == "all"]


def _bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _u8(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.uint8)


def _of(op: Callable, **static) -> Callable:
    return partial(op, implementation="pallas", **static)


def kv_layouts(chip: Chip) -> list[KVLayout]:
    """The KV layouts that ``chip`` serves: all, but fp8_656, whose rows hold e4m3fn, only where that is its format."""
    names = ["bf16", "fp8_656", "fp8_576"] if chip.fp8.name == "e4m3fn" else ["bf16", "fp8_576"]
    return [kv_layout(name, chip.fp8.name) for name in names]


def index_layouts(chip: Chip) -> list[IndexLayout]:
    """Pages of 1 and 64 tokens, and on ROCm those that aiter wants, in tiles."""
    plain = [IndexLayout(1, chip.fp8), IndexLayout(64, chip.fp8)]
    return plain + ([IndexLayout(64, chip.fp8, preshuffle=True)] if chip.target.platform == "rocm" else [])


def _pages(layout: IndexLayout) -> str:
    return f"page {layout.page_size}{' in tiles' if layout.preshuffle else ''}"


def _quantize(chip: Chip) -> Iterator[Case]:
    kinds: list[tuple[Literal[128] | None, Literal["fp32", "ue8m0"]]] = [(128, "ue8m0"), (128, "fp32"), (None, "fp32")]
    for (phase, rows), (block, scale) in product(ROWS.items(), kinds):
        yield Case(
            op="quantize",
            label=f"T {rows} N {HIDDEN} block {block or 'none'} {scale}",
            phase=phase,
            call=_of(quantize, fp8=chip.fp8, block=block, scale=scale),
            arguments=(_bf16(rows, HIDDEN),),
            cost=cost.quantize(rows, HIDDEN, 2),
            operand="bf16",
            in_ci=(block, scale) == (128, "ue8m0") and phase == PREFILL,
        )


def _kv_write(chip: Chip) -> Iterator[Case]:
    for (phase, tokens), layout in product(ROWS.items(), kv_layouts(chip)):
        pool = jax.ShapeDtypeStruct((SLOTS, layout.row_elements), layout.dtype)
        yield Case(
            op="kv_write",
            label=f"T {tokens} {layout.name}",
            phase=phase,
            call=_of(kv_write, layout=layout),
            arguments=(pool, _i32(tokens), _bf16(tokens, 512), _bf16(tokens, 64)),
            cost=cost.kv_write(tokens, layout.row_bytes, 2),
            operand="bf16",
            donate=(0,),
            in_ci=phase == DECODE,
        )


def _index_write(chip: Chip) -> Iterator[Case]:
    for (phase, tokens), layout, hadamard in product(ROWS.items(), index_layouts(chip), (False, True)):
        pool = _u8(SLOTS // layout.page_size, layout.page_bytes)
        norm, angles = (_f32(128), _f32(128)), (_f32(POSITIONS, 64), _i32(tokens))
        yield Case(
            op="index_write",
            label=f"T {tokens} {_pages(layout)}{' hadamard' if hadamard else ''}",
            phase=phase,
            call=_of(index_write, layout=layout, hadamard=hadamard),
            arguments=(pool, _i32(tokens), _bf16(tokens, 128), *norm, *angles),
            cost=cost.index_write(tokens, 2),
            operand="f32",
            donate=(0,),
            in_ci=phase == DECODE and (layout.page_size, layout.preshuffle) == (64, False),
        )


def _index_query(chip: Chip) -> Iterator[Case]:
    for (phase, tokens), heads, hadamard in product(ROWS.items(), HEADS, (False, True)):
        yield Case(
            op="index_query",
            label=f"T {tokens} Hi {heads}{' hadamard' if hadamard else ''}",
            phase=phase,
            call=_of(index_query, fp8=chip.fp8, hadamard=hadamard),
            arguments=(_bf16(tokens, heads, 128), _f32(tokens, heads), _f32(POSITIONS, 64), _i32(tokens)),
            cost=cost.index_query(tokens, heads, 2),
            operand="f32",
            in_ci=phase == DECODE and heads == 64,
        )


def _index_logits_ragged(chip: Chip) -> Iterator[Case]:
    rows, keys = ROWS[PREFILL], CONTEXT[PREFILL]
    q8 = partial(jax.ShapeDtypeStruct, dtype=chip.fp8.dtype)
    for heads in HEADS:
        visible = rows * (keys - rows) + rows * (rows + 1) // 2  # the last rows of one request, causal
        yield Case(
            op="index_logits_ragged",
            label=f"T {rows} S {keys} Hi {heads}",
            phase=PREFILL,
            call=_of(index_logits_ragged),
            arguments=(q8((rows, heads, 128)), _f32(rows, heads), q8((keys, 128)), _f32(keys), _i32(rows), _i32(rows)),
            cost=cost.index_logits_ragged(rows, keys, heads, visible),
            operand="fp8",
            trips=lambda: (ragged_config.Config.of(rows, chip.target).rows, 1),
            in_ci=heads in (16, 64),
        )


def _index_logits_paged(chip: Chip) -> Iterator[Case]:
    requests, length = ROWS[DECODE], CONTEXT[DECODE]
    for layout, heads, next_n in product(index_layouts(chip), HEADS, (1, 2, 4)):
        rows = requests * next_n
        pool = _u8(SLOTS // layout.page_size, layout.page_bytes)
        queries = jax.ShapeDtypeStruct((rows, heads, 128), chip.fp8.dtype), _f32(rows, heads)
        yield Case(
            op="index_logits_paged",
            label=f"B {requests} n {next_n} S {length} Hi {heads} {_pages(layout)}",
            phase=DECODE,
            call=_of(index_logits_paged, layout=layout, max_len=length, next_n=next_n),
            arguments=(*queries, pool, _i32(requests, length), _i32(requests), _i32(requests)),
            cost=cost.index_logits_paged(requests, next_n, length, length, heads),
            operand="fp8",
            trips=lambda: (paged_config.Config.of(requests, length, chip.target).blocks, 1),
            in_ci=(heads, next_n) in ((64, 1), (64, 2)) and not layout.preshuffle or (heads, next_n) == (16, 1),
        )


def _select() -> Iterator[Case]:
    def in_prefill(logits, lengths, starts, table, *, k):
        return _of(select)(logits, lengths, k, starts=starts, table=table, with_positions=True)

    def in_decode(logits, lengths, table, table_rows, *, k):
        return _of(select)(logits, lengths, k, table=table, table_rows=table_rows, with_positions=True)

    for phase, k in product((DECODE, PREFILL), TOP_K):
        rows, window = ROWS[phase], CONTEXT[phase]
        table = (_i32(window),) if phase == PREFILL else (_i32(rows, window),)
        rest = (_i32(rows), *table) if phase == PREFILL else (*table, _i32(rows))
        yield Case(
            op="select",
            label=f"T {rows} S {window} k {k}",
            phase=phase,
            call=partial(in_prefill if phase == PREFILL else in_decode, k=k),
            arguments=(_f32(rows, window), _i32(rows), *rest),
            cost=cost.select(rows, window, k),
            operand="f32",
            trips=lambda: (SELECT_PROBES, 1),
            in_ci=k == 2048,
        )


def _sparse_mla_trips(rows: int, heads: int, k: int, layout: KVLayout, target: Target) -> tuple[int, int]:
    config = sparse_config.Config.of(rows, heads, k, layout, target)
    return cdiv(cdiv(k, config.splits), config.keys), 1


def _sparse_mla(chip: Chip) -> Iterator[Case]:
    chosen = {(DECODE, 16, 2048), (DECODE, 128, 2048), (DECODE, 8, 512), (PREFILL, 128, 2048)}
    for (phase, rows), layout, heads, k in product(ROWS.items(), kv_layouts(chip), HEADS, TOP_K):
        pool = jax.ShapeDtypeStruct((SLOTS, layout.row_elements), layout.dtype)
        distinct = min(rows * k, SLOTS if phase == DECODE else CONTEXT[PREFILL])
        yield Case(
            op="sparse_mla",
            label=f"T {rows} H {heads} K {k} {layout.name}",
            phase=phase,
            call=_of(sparse_mla, layout=layout, softmax_scale=SOFTMAX_SCALE),
            arguments=(_bf16(rows, heads, 512), _bf16(rows, heads, 64), pool, _i32(rows, k)),
            cost=cost.sparse_mla(rows, heads, k, distinct, layout.row_bytes, 2),
            operand="bf16",
            trips=partial(_sparse_mla_trips, rows, heads, k, layout, chip.target),
            in_ci=(phase, heads, k) in chosen and (phase == DECODE or layout.name == "bf16"),
        )
