"""Calls of each of ``bridge.ops.FUNCTIONS``, on numbers as they meet them."""

from collections.abc import Iterator
from typing import Any

import torch

from bench.stream.layer import Layer, Shape
from bridge import ops
from bridge.stream import Function

Case = tuple[str, Function, tuple[torch.Tensor, ...], dict[str, Any]]
"""What tells it from others of its function, the function, tensors and static arguments."""


def cases(lane, device: torch.device, fp8: str) -> Iterator[Case]:
    """`lane`: fills the pools and quantises what the others take."""
    for layout in ("bf16", "fp8_576", "fp8_656"):
        for heads in (16, 128):
            layer = Layer(Shape(layout=layout, heads=heads, fp8=fp8), device)
            layer.fill(lane)
            layer.step(0)
            layer.run(lane, layer.tensors)
            t = layer.tensors
            label = f"{layout}, {heads} heads"
            for function, names, _, static in layer.calls():
                of_layout = function in (ops.KV_WRITE, ops.SPARSE_MLA)
                first = layer.shape == Shape(layout="bf16", fp8=fp8)
                if (
                    function is ops.SPARSE_MLA
                    or (function is ops.KV_WRITE and heads == 16)
                    or (first and not of_layout)
                ):
                    yield label if of_layout else "", function, tuple(t[n] for n in names), static
    shape, rope = layer.shape, dict(interleaved=False, hadamard=True, fp8=fp8)
    pages = dict(page_size=shape.page, preshuffle=False, fp8=fp8)
    yield "", ops.SLOTS_OF, (t["topk"], t["table"], t["requests"], t["lengths"]), {}
    yield "", ops.INDEX_QUERY, tuple(t[n] for n in ("q", "weights", "cos_sin", "positions")), rope
    q8, folded = lane(ops.INDEX_QUERY, t["q"], t["weights"], t["cos_sin"], t["positions"], **rope)
    paged = (q8, folded, t["index_pool"], t["table"], t["requests"], t["lengths"])
    static = pages | dict(max_len=shape.context, next_n=1)
    yield "", ops.INDEX_LOGITS_PAGED, paged, static
    (logits,) = lane(ops.INDEX_LOGITS_PAGED, *paged, **static)
    yield "", ops.SELECT, (logits, t["lengths"]), dict(k=shape.k)

    rows, keys = 256, 4096
    draw = torch.Generator(device).manual_seed(1)
    q = torch.randn(rows, shape.index_heads, 128, generator=draw, device=device).to(torch.bfloat16)
    weights = torch.randn(rows, shape.index_heads, generator=draw, device=device)
    lengths = torch.arange(keys - rows + 1, keys + 1, dtype=torch.int32, device=device)
    starts = torch.zeros_like(lengths)
    q8, folded = lane(ops.INDEX_QUERY, q, weights, t["cos_sin"], lengths - 1, **rope)
    k8 = q8.view(-1, 128)[:keys]
    scale = torch.rand(keys, generator=draw, device=device)
    yield "", ops.INDEX_LOGITS_RAGGED, (q8, folded, k8, scale, starts, lengths), {}
    slots = torch.arange(shape.page, shape.page + keys, dtype=torch.int32, device=device)
    prefill = (q, weights, t["cos_sin"], lengths - 1, t["index_pool"], slots, starts, lengths)
    yield "", ops.TOPK_PREFILL, prefill, pages | rope | dict(k=shape.k)
