"""Other libraries' functions that do the same work, measured in the same run where they are installed."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Missing(Exception):
    """Why a peer can't run here, in words."""


@dataclass(frozen=True)
class Peer:
    """- `library`: "jax" or "torch", whose arrays `call` gets.
    - `call`: ``(library's module, shared, varied) → output``."""

    library: str
    call: Callable[[Any, tuple, tuple], Any]


def torch_for(platform: str):
    """torch and its device for ``platform``; raises ``Missing``."""
    if importlib.util.find_spec("torch") is None:
        raise Missing("torch is not installed")
    import torch

    if platform == "gpu" and not torch.cuda.is_available():
        raise Missing(f"torch {torch.__version__} sees no GPU")
    return torch, torch.device("cuda" if platform == "gpu" else "cpu")
