"""Entry point of the group ``sglang.srt.plugins``: makes SGLang accept ``--attention-backend jax_mla``.

SGLang calls ``register`` in every process it starts, before it reads its arguments. Nothing here imports JAX or a
model: that happens in ``_create``, which runs in the scheduler only, and only if this backend was chosen.
"""

import logging
import os
import sys
from importlib.metadata import version

from bridge.sglang import arguments, contract
from bridge.sglang.arguments import NAME

logger = logging.getLogger("jax_mla")


def register() -> None:
    """Registers the backend, or in its place an error that says why it can't serve with the SGLang installed."""
    problem = contract.problem()
    if problem is None:
        _register()
    else:
        _register_refusal(problem)


def _register() -> None:
    import torch
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from bridge.sglang import cpu

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create)
    steps = {"handle_attention_backend_compatibility": arguments.resolve}
    if not torch.accelerator.is_available():
        steps["handle_model_specific_adjustments"] = cpu.resolve
    for step, hook in steps.items():
        register_resolution_hook(step)(hook)
    logger.info(
        "jax_mla %s: registered --attention-backend %s with SGLang %s, and hooks in its argument resolution (%s)",
        version("jax-mla"),
        NAME,
        contract.VERSION,
        ", ".join(steps),
    )


def _create(runner):
    """SGLang's factory of the backend: ``runner`` is the scheduler's ``ModelRunner``, its model loaded."""
    if runner.device != "cpu":
        _settle_jax()
    from bridge.sglang.backend import create

    return create(runner)


def _settle_jax() -> None:
    """Sets what JAX reads when it is imported, which is after this, for a process that serves on a GPU."""
    from bridge.stream import lane

    # Whatever becomes its client, it must not take three quarters of the GPU's memory at once.
    settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if lane.chosen("cuda") == "stream":  # JAX compiles for the GPU, and computes nothing
        settings["JAX_PLATFORMS"] = "cpu"
        if "jax" in sys.modules and not os.environ.get("JAX_PLATFORMS"):
            sys.modules["jax"].config.update("jax_platforms", "cpu")
    for name, value in settings.items():
        given = os.environ.get(name)
        if not given:
            os.environ[name] = value
            logger.info("jax_mla: %s=%s", name, value)
        elif given != value:
            logger.warning("jax_mla: %s=%s is left as it is: JAX may take memory of the GPU", name, given)


def _register_refusal(problem: str) -> None:
    """Lets the name through, and raises ``problem`` when the arguments are resolved.

    SGLang logs and swallows what a plugin raises, and its command line then says "invalid choice", which is not what is
    wrong. Another version of SGLang may lack any of the three places, so each is tried by itself.
    """
    logger.error("jax_mla: --attention-backend %s is not available: %s", NAME, problem)

    def refuse(*_):
        raise RuntimeError(problem)

    def resolve(server_args, previous):
        if arguments.chosen(server_args):
            refuse()
        previous(server_args)

    def name():
        from sglang.srt.arg_groups.choices import add_attention_backend_choices

        add_attention_backend_choices([NAME])

    def hook():
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        register_resolution_hook("handle_missing_default_values")(resolve)  # before anything else can go wrong

    def factory():
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend(NAME)(refuse)

    for place in (name, hook, factory):
        try:
            place()
        except (ImportError, AttributeError, ValueError) as error:
            logger.error(
                "jax_mla: SGLang %s has no place for %s of a plugin: %s", contract.installed(), place.__name__, error
            )
