"""A decode layer's attention: its calls, and static tensors whose contents change from step to step.

Nothing here imports JAX: both lanes run this, and so does ``bench.stream.alone``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bridge import ops
from bridge.stream import Function, Stream
from bridge.stream.lane import arrays_of

EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049, 4095, 4096)
"""Lengths at which pages, top-k and blocks of keys begin and end."""

ROW_ELEMENTS = {"bf16": 576, "fp8_656": 656, "fp8_576": 576}

Call = tuple[Function, tuple[str, ...], tuple[str, ...], dict[str, Any]]
"""A function, the names of its tensors and of its results that are not written in place, its static arguments."""


@dataclass(frozen=True)
class Shape:
    """`rows`: the batch, padded rows included. `requests`, `context`: of the request→token table."""

    rows: int = 8
    heads: int = 16
    index_heads: int = 64
    k: int = 2048
    context: int = 8192
    requests: int = 16
    page: int = 64
    layout: str = "fp8_656"
    fp8: str = "e4m3fn"

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.heads} heads, {self.context} tokens, top-k {self.k}, {self.layout}"


class Layer:
    """`tensors`: by name, at addresses that stay. Every number in them comes from `seed`."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0):
        self.shape, self.device = shape, device
        self._random = torch.Generator(device).manual_seed(seed)
        self._host = torch.Generator().manual_seed(seed)
        s, t = shape, shape.rows
        pages = s.requests * s.context // s.page
        bf16, f32, i32 = torch.bfloat16, torch.float32, torch.int32
        kinds = dict(
            slots=(i32, t),
            positions=(i32, t),
            lengths=(i32, t),
            requests=(i32, t),
            table=(i32, s.requests, s.context),
            k=(bf16, t, 128),
            norm_weight=(f32, 128),
            norm_bias=(f32, 128),
            cos_sin=(f32, s.context, 64),
            q=(bf16, t, s.index_heads, 128),
            weights=(f32, t, s.index_heads),
            k_nope=(bf16, t, 512),
            k_rope=(bf16, t, 64),
            q_nope=(bf16, t, s.heads, 512),
            q_rope=(bf16, t, s.heads, 64),
            index_pool=(torch.uint8, pages + 1, s.page * 132),
            kv_pool=(bf16 if s.layout == "bf16" else torch.uint8, (pages + 1) * s.page, ROW_ELEMENTS[s.layout]),
            topk=(i32, t, s.k),
            chosen=(i32, t, s.k),
            out=(bf16, t, s.heads, 512),
            lse=(f32, t, s.heads),
        )
        self.tensors = {n: torch.zeros(shape, dtype=dtype, device=device) for n, (dtype, *shape) in kinds.items()}
        angles = torch.outer(torch.arange(s.context), 1e4 ** (-torch.arange(32) / 32))
        self.tensors["cos_sin"].copy_(torch.cat([angles.cos(), angles.sin()], -1))
        self._normal("norm_weight", "norm_bias")
        self._slots = self._batch = torch.empty(0)

    def calls(self) -> list[Call]:
        s = self.shape
        held = "e4m3fn" if s.layout == "fp8_656" else s.fp8  # which is all that those rows hold
        mla, rope = dict(layout=s.layout, fp8=held), dict(interleaved=False, hadamard=True)
        pages = dict(page_size=s.page, preshuffle=False, fp8=s.fp8)
        keys = ("index_pool", "slots", "k", "norm_weight", "norm_bias", "cos_sin", "positions")
        query = ("q", "weights", "cos_sin", "positions", "index_pool", "table", "requests", "lengths")
        attend = ("q_nope", "q_rope", "kv_pool", "chosen")
        return [
            (ops.INDEX_WRITE, keys, (), pages | rope | dict(eps=1e-6)),
            (ops.TOPK_DECODE, query, ("chosen", "topk"), pages | rope | dict(max_len=s.context, k=s.k)),
            (ops.KV_WRITE, ("kv_pool", "slots", "k_nope", "k_rope"), (), mla),
            (ops.SPARSE_MLA, attend, ("out", "lse"), mla | dict(softmax_scale=192**-0.5)),
        ]

    def fill(self, lane) -> None:
        """Writes a key and a latent into every slot but those of page 0, whose bytes are NaN."""
        t = self.tensors
        writes = [call for call in self.calls() if not call[2]]
        for name in ("index_pool", "kv_pool"):
            t[name].view(torch.uint8)[: 1 if name == "index_pool" else self.shape.page] = 0xFF
        rows = 4096
        first = self.shape.page
        more = dict(k=(rows, 128), k_nope=(rows, 512), k_rope=(rows, 64))
        while first + rows <= len(t["kv_pool"]):
            given = {n: self._draw(torch.empty(x, dtype=torch.bfloat16, device=self.device)) for n, x in more.items()}
            given["slots"] = torch.arange(first, first + rows, dtype=torch.int32, device=self.device)
            given["positions"] = given["slots"] % self.shape.context
            for function, names, _, static in writes:
                lane(function, *[given.get(n, t[n]) for n in names], **static)
            first += rows

    def step(self, number: int, length: int | None = None) -> None:
        """The next batch: every third a new one of any number of rows, with pages of its own; else a token more for
        each request that has room. The rest of the table leads to page 0. `length`: of all rows, in a new batch."""
        s, t = self.shape, self.tensors
        if number % 3 == 0 or length is not None:
            count = int(torch.randint(s.rows + 1, (), generator=self._host)) if number else s.rows
            edges = torch.tensor([*EDGES, s.context - 1, s.context])
            edges = edges[edges <= s.context]
            at_edges = edges[torch.randint(len(edges), (s.rows,), generator=self._host)]
            anywhere = torch.randint(1, s.context + 1, (s.rows,), generator=self._host)
            lengths = torch.where(torch.rand(s.rows, generator=self._host) < 0.5, at_edges, anywhere)
            if length is not None:
                count, lengths = s.rows, torch.full_like(lengths, length)
            requests = torch.randperm(s.requests, generator=self._host)[: s.rows]
            real = torch.arange(s.rows) < count
            self._batch = torch.stack([torch.where(real, lengths, 0), torch.where(real, requests, 0)]).to(self.device)
            pages = 1 + torch.randperm(s.requests * s.context // s.page, generator=self._random, device=self.device)
            within = torch.arange(s.page, device=self.device)
            self._slots = (pages[:, None] * s.page + within).view(s.requests, s.context).to(torch.int32)
        else:
            self._batch[0] += ((self._batch[0] > 0) & (self._batch[0] < s.context)).to(self._batch.dtype)
        lengths, requests = self._batch
        positions = (lengths - 1).clamp(min=0)
        held = torch.zeros(s.requests, dtype=lengths.dtype, device=self.device)
        held.scatter_reduce_(0, requests, lengths, "amax")
        seen = torch.arange(s.context, device=self.device) < held[:, None]
        t["table"].copy_(torch.where(seen, self._slots, 1))
        t["lengths"].copy_(lengths)
        t["requests"].copy_(requests)
        t["positions"].copy_(positions)
        t["slots"].copy_(torch.where(lengths > 0, self._slots[requests, positions], -1))
        self._normal("k", "q", "weights", "k_nope", "k_rope", "q_nope", "q_rope")

    def _normal(self, *names: str) -> None:
        for name in names:
            self._draw(self.tensors[name])

    def _draw(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.normal_(generator=self._random)

    def run(self, lane, tensors: dict[str, torch.Tensor]) -> None:
        """The calls on ``lane``, with ``tensors`` in the place of this layer's; results replace those in it."""
        for function, names, results, static in self.calls():
            given = lane(function, *[tensors[n] for n in names], **static)
            tensors.update(zip(results, given[len(function.written) :], strict=True))

    def bind(self, stream: Stream) -> list[Callable[[], Any]]:
        """The calls, which write their results into this layer's own tensors."""
        bound: list[Callable[[], Any]] = []
        for function, names, results, static in self.calls():
            given = tuple(self.tensors[n] for n in names)
            launcher = stream.launcher(function, arrays_of(function, given), **static)
            bound.append(launcher.bind(*given, out=[self.tensors[n] for n in results]))
        return bound

    def launches(self, stream: Stream) -> int:
        """Kernels of a call of all."""
        return sum(
            len(stream.launcher(f, arrays_of(f, tuple(self.tensors[n] for n in names)), **static).program.launches)
            for f, names, _, static in self.calls()
        )
