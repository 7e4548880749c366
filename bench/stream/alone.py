"""A decode layer in a process of its own: ``python -m bench.stream.alone ROWS RESULT``, for ``bench.stream.measure``.

Prints one line of JSON: seconds until torch was there, until the programs were (built or loaded), and until the first
layer was done; whether JAX was imported, and which files of JAX's GPU plugins are in the process. Saves the results.
"""

import json
import sys
import time
from pathlib import Path

START = time.perf_counter()
BUILD = "--build" in sys.argv
if not BUILD:
    sys.modules["jax"] = sys.modules["jaxlib"] = None  # pyrefly: ignore[unsupported-operation]

import torch  # noqa: E402

from bench.stream.layer import Layer, Shape  # noqa: E402
from bridge.stream import Stream  # noqa: E402
from bridge.stream.driver import loaded  # noqa: E402


def main(rows: int, result: str) -> None:
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    ready = time.perf_counter()
    stream = Stream.of(device)
    layer = Layer(Shape(rows=rows), device)
    bound = layer.bind(stream)
    built = time.perf_counter()
    layer.step(0)
    for call in bound:
        call()
    torch.cuda.synchronize()
    first = time.perf_counter()
    layer.fill(stream)
    layer.step(3)
    for call in bound:
        call()
    torch.save(
        {name: layer.tensors[name].cpu() for name in ("lengths", "topk", "out", "lse", "kv_pool", "index_pool")}, result
    )
    clients = "none"
    if sys.modules.get("jax"):
        import jax

        clients = jax.default_backend()
    plugins = loaded("xla_cuda_plugin") + loaded("xla_rocm_plugin")
    found = dict(torch_s=ready - START, programs_s=built - ready, first_layer_s=first - built)
    print(json.dumps(found | dict(client=clients, plugins=[Path(x).name for x in plugins])))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
