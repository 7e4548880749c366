"""SGLang's command line, where ``--attention-backend jax_mla`` is in it.

``resolve`` wraps a step of SGLang's argument resolution (``sglang/srt/arg_groups/resolution_hooks.py``), which runs in
the launching process before a model is loaded. Arguments of other backends it leaves alone.
"""

import logging
from importlib.metadata import version

NAME = "jax_mla"
"""What the user writes behind ``--attention-backend``."""

logger = logging.getLogger("jax_mla")

UNSUPPORTED = {
    "speculative_algorithm": (None, "speculative decoding"),
    "enable_two_batch_overlap": (False, "two-batch overlap"),
    "enable_pdmux": (False, "PD multiplexing"),
    "enable_prefill_cp": (False, "context parallelism in prefill"),
    "dcp_size": (1, "context parallelism in decode"),
    "enable_hisparse": (False, "HiSparse"),
    "enable_unified_memory": (False, "the unified memory pool"),
    "dllm_algorithm": (None, "diffusion language models"),
}
"""By argument: the value it must have, and what another value would ask for."""


def chosen(view) -> bool:
    """Whether ``view``, SGLang's resolving view of its arguments, asks for this backend in any phase."""
    return NAME in (view.attention_backend, view.prefill_attention_backend, view.decode_attention_backend)


def refuse_unsupported(view) -> None:
    """Raises ``ValueError`` for everything in ``view`` that this backend does not serve yet, all of it at once."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    errors = []
    prefill, decode = attention_backends_of(view)
    if prefill != decode:
        # The two would share one index cache, and must then agree on its Hadamard rotation and its writer.
        errors.append(f"--attention-backend: expected {NAME} in both phases, got prefill {prefill} and decode {decode}")
    for argument, (expected, what) in UNSUPPORTED.items():
        got = getattr(view, argument)
        if got not in (expected, None):
            option = argument.replace("_", "-")
            errors.append(f"--{option}: expected {expected}, got {got}: {NAME} does not serve {what} yet")
    if errors:
        raise ValueError("; ".join(errors))


def resolve(server_args, previous) -> None:
    """Wraps ``handle_attention_backend_compatibility``: refuses what can't be served, and says which CUDA graphs can.

    Prefill runs without. Decode keeps what is asked for, "full" by default, on the stream lane, and runs without on the
    jit lane, whose launches no graph can capture.
    """
    import torch
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    from bridge.stream import lane

    if not chosen(resolving_view(server_args)):
        return previous(server_args)
    refuse_unsupported(resolving_view(server_args))
    on_gpu = torch.cuda.is_available() and resolving_view(server_args).device != "cpu"
    on = lane.chosen("cuda" if on_gpu else "cpu")
    previous(server_args)
    for phase in (Phase.PREFILL,) if on == "stream" else (Phase.PREFILL, Phase.DECODE):
        config = with_phase(resolving_view(server_args).cuda_graph_config, phase, backend=Backend.DISABLED)
        declare_resolution(server_args, NAME, cuda_graph_config=config)
    logger.info(
        "jax_mla %s: serves as --attention-backend %s of SGLang %s", version("jax-mla"), NAME, version("sglang")
    )
    graphs = resolving_view(server_args).cuda_graph_config
    logger.info(
        "jax_mla: the %s lane; CUDA graphs: prefill %s, decode %s", on, graphs.prefill.backend, graphs.decode.backend
    )
