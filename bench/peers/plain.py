"""What PyTorch and JAX themselves offer: top-k, and the plain way to write rows that are quantised already.

A copy does less than any write, and shows what the memory allows at that size.
"""

import jax

from bench.peers.base import Check, JaxPeer, TorchPeer


def lax_top_k(k: int, error: Check) -> JaxPeer:
    return JaxPeer(lambda shared, varied: jax.lax.top_k(varied[0], k)[1], error)


def torch_topk(k: int, error: Check) -> TorchPeer:
    """In no order."""

    def make(torch, shared):
        return lambda varied: lambda: torch.topk(varied[0], k, sorted=False).indices

    return TorchPeer(make, error=error)


def put_rows(pack) -> TorchPeer:
    """``index_put_`` of a KV pool's rows. ``pack``: ``(nope, rope) → rows``, of torch tensors, not timed."""

    def make(torch, shared):
        (pool,) = shared

        def bind(varied):
            at, nope, rope = varied
            at, rows = (at.long(),), pack(nope, rope)
            return lambda: pool.index_put_(at, rows)

        return bind

    return TorchPeer(make)


def put_keys(pack, page_size: int) -> TorchPeer:
    """``index_put_`` of an index pool's keys and of their scales. ``pack``: ``(k, weight, bias, cos_sin, position) →
    keys, scales`` as uint8, not timed."""

    def make(torch, shared):
        pool, weight, bias, cos_sin = shared
        keys = pool[:, : page_size * 128].unflatten(1, (page_size, 128))
        scales = pool[:, page_size * 128 :].unflatten(1, (page_size, 4))

        def bind(varied):
            slots, k, position = varied
            at = slots.long() // page_size, slots.long() % page_size
            key_rows, scale_rows = pack(k, weight, bias, cos_sin, position)

            def call():
                keys.index_put_(at, key_rows)
                scales.index_put_(at, scale_rows)
                return pool

            return call

        return bind

    return TorchPeer(make)


def copy(rows: int, row_bytes: int) -> TorchPeer:
    """``copy_`` of as many bytes as the rows have. Of another thing's bytes, so all it can get wrong is their number:
    its error is that."""

    def make(torch, shared):
        device = shared[0].device

        def bind(varied):
            source = torch.ones(rows * row_bytes, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            return lambda: target.copy_(source)

        return bind

    def error(shared, varied, out, _):
        return float(rows * row_bytes - out.sum(dtype="int64"))

    return TorchPeer(make, error=error, metric=("wrong", 0.0), part=True)
