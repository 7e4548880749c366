"""What a peer is, and what all adapters need: imports that say what is missing, and torch's own kind of array."""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

Check = Callable[[Any, Any, Any, np.ndarray], float]


class Missing(Exception):
    """Why a peer can't run here, in words."""


@dataclass(frozen=True)
class JaxPeer:
    """A function of JAX: ``(shared, varied) → outputs``, run as our own ops are.

    - `error`, `metric`: a check of its own, as ``Case``'s; None for the case's.
    - `packages`: distributions whose versions are kept with a measurement.
    - `part`: it does only a part of the op's work, so ours isn't held against it.
    """

    call: Callable[[tuple, tuple], Any]
    error: Check | None = None
    metric: tuple[str, float] | None = None
    packages: Sequence[str] = ("jax",)
    part: bool = False


@dataclass(frozen=True)
class TorchPeer:
    """A function of torch tensors, in three steps of which only the last is timed.

    - `make`: ``(torch, shared) → bind``, once. Imports the library, and raises ``Missing`` where that can't be. A pool
      that the op writes is the peer's own copy.
    - ``bind``: ``varied → call``, once for each set of inputs: turns them into the library's own layout.
    - ``call``: ``() → raw``, what is timed.
    - `result`: ``raw → outputs`` in the layout of the case, as torch tensors.
    - `error`, `metric`, `packages`, `part`: as ``JaxPeer``'s.
    """

    make: Callable[[Any, tuple], Callable[[tuple], Callable[[], Any]]]
    result: Callable[[Any], Any] = lambda raw: raw
    error: Check | None = None
    metric: tuple[str, float] | None = None
    packages: Sequence[str] = ("torch",)
    part: bool = False


Peer = JaxPeer | TorchPeer


def torch_for(platform: str):
    """torch and its device for ``platform``; raises ``Missing``."""
    torch = library("torch")
    if platform == "gpu" and not torch.cuda.is_available():
        raise Missing(f"torch {torch.__version__} sees no GPU")
    return torch, torch.device("cuda" if platform == "gpu" else "cpu")


def library(module: str, package: str | None = None):
    """The module called ``module``, of distribution ``package``. Raises ``Missing`` where it is not installed, or where
    something that it imports isn't; anything else that goes wrong in it is raised as it is."""
    package = package or module.split(".")[0]
    if importlib.util.find_spec(module.split(".")[0]) is None:
        raise Missing(f"{package} is not installed")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise Missing(f"{module} of {package} needs {e.name}, which is not installed") from e


def needs_gpu(tensor, name: str) -> None:
    """Raises ``Missing`` for a tensor in the host's memory."""
    if not tensor.is_cuda:
        raise Missing(f"{name} runs on a GPU only")


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those of ``packages`` that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def to_torch(torch, x: jax.Array):
    """``x`` as a torch tensor in the same memory: what writes to it must have a copy."""
    if x.dtype == jnp.float8_e4m3fn:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint8)
        return torch.from_dlpack(bits).view(torch.float8_e4m3fn)
    return torch.from_dlpack(x)


def to_numpy(torch, x) -> np.ndarray:
    """``x`` in the host's memory, with the dtype that JAX would give it."""
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if x.dtype == torch.float8_e4m3fn:
        return x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return x.numpy()
