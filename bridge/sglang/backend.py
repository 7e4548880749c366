"""``JaxMLABackend``: SGLang's attention backend whose kernels are jax_mla's.

SGLang's model computes projections and RoPE, calls the indexer (``bridge.sglang.indexer``), and hands its selection to
``forward_extend`` or ``forward_decode`` here, which write the new latents and attend. Prefill, chunked prefill, prefix
hits, mixed batches and decode differ only in their ``metadata``.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds

from bridge import ops
from bridge.sglang import indexer, metadata, prepare
from bridge.sglang.arguments import NAME
from bridge.sglang.cache import Caches, Calls, writer_for
from bridge.stream import Lane, Stream, lane_for

logger = logging.getLogger("jax_mla")


def create(runner) -> "JaxMLABackend":
    """What SGLang asks for once per ``ModelRunner``: the backend, and the model code set up to call it."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        handle_attention_dsa,
    )
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    # Both tables decide by the backend's name how the model calls it: absorbed MLA in prefill too, and q and k with
    # their rope parts apart.
    AttentionBackendRegistry.register(NAME, handle_attention_dsa)
    if NAME not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)
    indexer.install()
    backend = JaxMLABackend(runner)
    if isinstance(backend.lane, Stream):
        prepare.at_start(backend, runner)
    return backend


def refuse_unsupported_model(runner) -> None:
    """Raises ``ValueError`` unless the runner's model is one whose attention this backend computes."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    config = runner.model_config.hf_config
    pool = runner.token_to_kv_pool
    if type(pool) is not DSATokenToKVPool:
        raise ValueError(
            f"--attention-backend {NAME}: expected a model with DeepSeek sparse attention (index_topk in its config), "
            f"whose pool is a DSATokenToKVPool, got {config.architectures} with a {type(pool).__name__}"
        )


@dataclass(frozen=True)
class Batch:
    """A batch's metadata, which all layers read.

    - `lookup`: where a row finds the slots of its tokens: (``k_slots`` [S], ``starts`` [T]) in prefill,
      (``req_to_token`` [R, C], ``requests`` [T]) in decode.
    - `write_plan`: the writer's. - `calls`: what has been looked up for it.
    - `latest`: the selection that was made last, as positions and as slots.
    """

    rows: metadata.Prefill | metadata.Decode
    lookup: tuple[torch.Tensor, torch.Tensor]
    write_plan: Any
    calls: Calls
    latest: list[torch.Tensor] = field(default_factory=list)

    def slots_of(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Slots of the selection that was made last, if ``positions`` is that very tensor; layers share selections."""
        return self.latest[1] if self.latest and self.latest[0] is positions else None


class JaxMLABackend(AttentionBackend):
    """Sparse MLA over SGLang's own pools.

    The indexer finds what it needs in ``batch``. ``get_indexer_metadata`` stays None, which tells SGLang's own indexer
    that it has nothing to do here.

    - `use_mha`: False; SGLang's dense prefill for short prompts is another backend's, ours selects all tokens instead.
    - `token_to_kv_pool`, `req_to_token_pool`: SGLang's models find the pools here.
    """

    use_mha = False

    def __init__(self, runner):
        super().__init__()
        refuse_unsupported_model(runner)
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.kv_cache_dtype = self.data_type = runner.kv_cache_dtype
        self.caches = Caches.of(runner.token_to_kv_pool)
        device = torch.device(runner.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.lane = lane_for(device)
        self.writer = writer_for(device)
        logger.info("jax_mla: serving %s, on the %s lane", self.caches, self.lane.name)

    @property
    def batch(self) -> Batch | None:
        """The batch under way; None where it has no rows. It lies where SGLang looks for it, and puts None."""
        batch = self.forward_metadata
        assert batch is None or isinstance(batch, Batch)
        return batch

    @property
    def req_to_token(self) -> torch.Tensor:
        """The request→token table: int32 [requests, max_context], slots."""
        return self.req_to_token_pool.req_to_token

    def init_forward_metadata(self, forward_batch) -> None:
        """SGLang's call before each forward that isn't a graph's."""
        self.take(metadata.build(forward_batch, self.req_to_token))

    def take(self, rows: metadata.Prefill | metadata.Decode | None, lane: Lane | None = None) -> None:
        """Makes ``rows`` the batch under way, on this backend's lane or another."""
        self.forward_metadata = None
        if rows is None:
            return
        lookup = (
            (rows.k_slots, rows.starts) if isinstance(rows, metadata.Prefill) else (self.req_to_token, rows.requests)
        )
        self.forward_metadata = Batch(
            rows, lookup, self.writer.plan(self.caches, rows.write_slots), Calls(lane or self.lane)
        )

    # Decode in a graph: the metadata is made in it, from SGLang's static tensors, and so needs nothing at a replay.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """SGLang's call before it captures; what a graph needs is made in it, so there is nothing to keep."""
        if self.lane.name != "stream":
            raise NotImplementedError(
                f"cuda_graph_config: expected disabled graphs on the {self.lane.name} lane of --attention-backend "
                f"{NAME}, got a capture of {max_bs} requests; XLA launches on streams that a graph cannot capture"
            )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Tokens of a padded row: 0, so it reads and writes nothing."""
        return 0

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        """SGLang's call before a capture, and before each replay."""
        if not forward_batch.forward_mode.is_decode():
            raise NotImplementedError(
                f"forward_mode: expected DECODE in a graph of --attention-backend {NAME}, got "
                f"{forward_batch.forward_mode.name}"
            )

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        """SGLang's call inside a capture, and in the warm-up before it."""
        self.take(metadata.static_decode(forward_batch, self.req_to_token))

    def shared_read_ends(self, fm):
        """Every layer reads the request→token table itself, up to the end of the forward."""
        return SharedReadEnds.POST_REPLAY if fm.is_decode() else SharedReadEnds.UNKNOWN

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer,
        forward_batch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        topk_indices: torch.Tensor | None = None,
        **others,
    ) -> torch.Tensor:
        """Attention of one layer, its new latents written first.

        - `q`: bf16 [T, H, 512], absorbed. `q_rope`: [T, H, 64]. RoPE is in already.
        - `k`: bf16 [T, 1, 512], normalised latents. `k_rope`: [T, 1, 64]. `v` is `k`.
        - `topk_indices`: int32 [T, index_topk], request-local positions, -1 for none (``bridge.sglang.indexer``).

        Returns [T, H * 512] in q's dtype; rows beyond the batch's, which SGLang pads under data parallelism, are 0.
        """
        heads, latent = layer.tp_q_head_num, layer.v_head_dim
        q = q.view(-1, heads, latent)
        if others := {name for name, value in others.items() if value is not None and value is not False}:
            raise NotImplementedError(f"forward: expected plain arguments, got {sorted(others)}: not served yet")
        if q_rope is None or topk_indices is None:
            raise ValueError(
                f"layer {layer.layer_id}: expected q_rope and topk_indices, got {type(q_rope).__name__} and "
                f"{type(topk_indices).__name__}; {NAME} serves models with an indexer"
            )
        if self.batch is None:
            return q.new_zeros(q.shape[0], heads * latent)
        rows, padded = self.batch.rows.count, len(self.batch.rows.lengths)
        if q.shape[0] < rows or topk_indices.shape[0] < rows:
            raise ValueError(f"q: expected {rows} rows or more, got {q.shape[0]}, topk_indices {topk_indices.shape[0]}")

        def rows_of(tensor: torch.Tensor, fill: float = 0):
            return metadata.pad(tensor[:rows].detach(), padded, fill)  # serving takes no gradients

        # All arguments are looked at before anything is written.
        batch, pool = self.batch, self.caches.kv(layer.layer_id)
        slots = batch.slots_of(topk_indices)
        if slots is None:
            seen = rows_of(topk_indices, -1), *batch.lookup, batch.rows.lengths
            (slots,) = batch.calls.bind(ops.SLOTS_OF, *seen)()
        query = rows_of(q), rows_of(q_rope.view(q_rope.shape[0], heads, -1))
        static = self.caches.kv_static | dict(softmax_scale=float(layer.scaling))
        attend = batch.calls.bind(ops.SPARSE_MLA, *query, pool, slots, **static)
        if save_kv_cache and k is not None:
            if k_rope is None:
                raise ValueError(f"layer {layer.layer_id}: expected k_rope [T, 1, 64], got None")
            new = rows_of(k.view(-1, latent)), rows_of(k_rope.view(-1, k_rope.shape[-1]))
            self.writer.kv(batch.calls, self.caches, layer.layer_id, batch.write_plan, *new)()
        out, _ = attend()
        return metadata.pad(out[:rows].view(rows, heads * latent), q.shape[0], 0)

    forward_decode = forward_extend
