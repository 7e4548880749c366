"""Whether this machine can serve, check by check, each with what to do about it.

``python -m bridge doctor`` prints the whole report whatever fails on the way, and ends with exit code 1 if anything
would keep SGLang from serving with jax_mla. It loads no model and starts no server.
"""

import importlib.metadata
import json as json_module
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]

JAX_AT_LEAST, JAX_BELOW = (0, 11, 2), (0, 13)
TORCH = "2.14.1"
"""What SGLang 0.5.23 pins."""
PLUGINS = ("jax-rocm7-plugin", "jax-rocm7-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
ENTRY_POINTS = {"sglang.srt.plugins": "jax_mla", "sglang.srt.platforms": "jax_mla_cpu"}


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, whether it will do, what was found, and what to do if it won't."""

    name: str
    status: Status
    found: str
    advice: str = ""


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.12.0.dev1" is (0, 12, 0)."""
    numbers = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def python() -> Iterator[Finding]:
    found = platform.python_version()
    if sys.version_info[:2] == (3, 12):
        yield Finding("python", "ok", found)
    elif sys.version_info[:2] > (3, 12):
        yield Finding("python", "warn", found, "jax_mla runs; SGLang 0.5.23 has wheels for 3.11 and 3.12: take 3.12")
    else:
        yield Finding("python", "fail", found, "JAX 0.11.2 and later need Python 3.12")


def jax_versions() -> Iterator[Finding]:
    """JAX's parts must be one version: nothing upstream holds a GPU plugin to it, and a mismatch fails late."""
    versions = {name: version for name in ("jax", "jaxlib", *PLUGINS) if (version := installed(name))}
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if not {"jax", "jaxlib"} <= set(versions):
        yield Finding("jax", "fail", found or "not installed", "pip install jax-mla")
    elif not JAX_AT_LEAST <= _numbers(versions["jax"]) < JAX_BELOW:
        yield Finding(
            "jax", "fail", found, "install a jax from 0.11.2 to below 0.13: newer ones may lack Pallas/Triton"
        )
    # 0.12.0.1 is a fix of 0.12.0 and goes with its plugins: three numbers count.
    elif len({_numbers(version)[:3] for version in versions.values()}) > 1:
        advice = f"install one version of all: pip install {' '.join(f'{n}=={versions["jax"]}' for n in versions)}"
        yield Finding("jax", "fail", found, advice)
    else:
        yield Finding("jax", "ok", found)


def serving_versions() -> Iterator[Finding]:
    from bridge.sglang import contract

    problem = contract.problem()
    version = f"sglang {contract.installed()}"
    if problem is None:
        yield Finding("sglang", "ok", f"{version}, all names that jax_mla uses are there")
    else:
        yield Finding("sglang", "fail", version, problem)
    torch = installed("torch")
    if torch is None:
        yield Finding("torch", "fail", "not installed", "pip install '.[sglang]'")
    elif torch.split("+")[0] == TORCH:
        yield Finding("torch", "ok", f"torch {torch}")
    else:
        yield Finding("torch", "warn", f"torch {torch}", f"SGLang 0.5.23 is built for torch {TORCH}")


def plugin() -> Iterator[Finding]:
    """Whether SGLang will find and run the plugin."""
    for group, name in ENTRY_POINTS.items():
        values = [e.value for e in importlib.metadata.entry_points(group=group) if e.name == name]
        if not values:
            advice = "install the project (pip install -e '.[sglang]'); a folder on PYTHONPATH has no entry points"
            yield Finding("plugin", "fail", f"no entry point {name} in {group}", advice)
        else:
            yield Finding("plugin", "ok", f"{group}: {name} = {values[0]}")
    import torch

    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    needed = ["jax_mla"] if torch.accelerator.is_available() else list(ENTRY_POINTS.values())
    if allowed and not set(needed) <= set(allowed):
        advice = f"SGLang loads only what is listed: add {','.join(needed)}, or unset it"
        yield Finding("plugin", "fail", f"SGLANG_PLUGINS={','.join(allowed)}", advice)
    selected = os.environ.get("SGLANG_PLATFORM")
    if selected and selected != ENTRY_POINTS["sglang.srt.platforms"]:
        advice = "SGLang then skips all plugins of other packages that have a platform, this one too: unset it"
        yield Finding("plugin", "fail", f"SGLANG_PLATFORM={selected}", advice)


def device() -> Iterator[Finding]:
    """What JAX computes on, that torch sees the same, and the FP8 format of its matrix units."""
    import jax
    import torch

    from bridge.dlpack import torch_device_type
    from bridge.stream.lane import chosen
    from jax_mla.pallas_triton import target

    chip = target()
    on_gpu = torch.cuda.is_available()
    found = f"JAX {chip.platform} ({chip.kind}, {len(jax.devices())}), torch {'cuda' if on_gpu else 'cpu'}"
    if on_gpu and not chip.is_gpu and chosen("cuda") == "stream":
        yield Finding("device", "ok", f"{found}; the stream lane needs no JAX on the GPU")
    elif on_gpu and not chip.is_gpu:
        extra = "rocm" if torch.version.hip else "cuda"
        yield Finding("device", "fail", found, f"JAX sees no GPU: pip install '.[{extra}]', unset JAX_PLATFORMS")
    elif not on_gpu and torch_device_type() == "cuda":
        yield Finding("device", "fail", found, "torch sees no GPU: install a torch for this card")
    else:
        yield Finding("device", "ok", found)
    fp8 = "e4m3fnuz" if chip.kind.startswith("gfx94") else "e4m3fn"
    yield Finding("fp8", "ok", fp8 if chip.is_gpu else f"{fp8}, in software")


def exchange() -> Iterator[Finding]:
    """Memory between torch and JAX, both ways, and on a GPU a write in place."""
    import jax
    import torch

    from bridge.dlpack import to_jax, to_torch, torch_device_type
    from bridge.dtypes import DTYPES

    where = torch_device_type()
    for dtype in DTYPES:
        back = to_torch(to_jax(torch.zeros(128, 128, device=where).to(dtype), str(dtype)))
        if back.dtype != dtype:
            yield Finding("dlpack", "fail", f"{dtype} came back as {back.dtype}", f"install torch {TORCH}")
            return
    yield Finding("dlpack", "ok", f"one memory both ways for {', '.join(DTYPES.values())}")
    if where == "cpu":
        yield Finding("write in place", "ok", "by torch: on a CPU XLA copies memory that is not its own")
        return
    pool = torch.zeros(128, 656, dtype=torch.uint8, device=where)
    written = jax.jit(lambda pool: pool.at[5].set(7), donate_argnums=0)(to_jax(pool, "pool"))
    if to_torch(written).data_ptr() == pool.data_ptr() and int(pool[5, 0]) == 7:
        yield Finding("write in place", "ok", "by XLA, into a donated import")
    else:
        advice = f"jax {jax.__version__} copies donated imports; install one from 0.11.2 to below 0.13"
        yield Finding("write in place", "fail", "XLA made a copy", advice)


def memory() -> Iterator[Finding]:
    """Comes before every check that uses JAX, which reads its settings once, and must not take the GPU for itself."""
    preallocate = os.environ.get(PREALLOCATE)
    os.environ.setdefault(PREALLOCATE, "false")
    import psutil

    from bridge.dlpack import torch_device_type
    from bridge.stream import lane

    gib = 1 << 30
    free = psutil.virtual_memory().available / gib
    advice = "" if free >= 4 else "SGLang's processes alone take about 4 GiB"
    yield Finding("host memory", "ok" if free >= 4 else "warn", f"{free:.1f} GiB free", advice)
    if torch_device_type() == "cpu":
        yield Finding("XLA memory", "ok", f"{PREALLOCATE} matters on GPUs only")
        return
    import torch

    free, total = (n / gib for n in torch.cuda.mem_get_info())
    yield Finding("GPU memory", "ok", f"{free:.1f} of {total:.1f} GiB free")
    if lane.chosen("cuda") == "stream":
        yield Finding("XLA memory", "ok", "none of the GPU's: serving on the stream lane keeps JAX on the CPU")
    elif preallocate is None:
        yield Finding("XLA memory", "ok", f"{PREALLOCATE} is unset: the plugin sets it to false")
    elif preallocate.lower() in ("false", "0"):
        yield Finding("XLA memory", "ok", f"{PREALLOCATE}={preallocate}")
    else:
        advice = "JAX would take three quarters of the GPU beside SGLang's pools: set it to false or unset it"
        yield Finding("XLA memory", "fail", f"{PREALLOCATE}={preallocate}", advice)


def kernel() -> Iterator[Finding]:
    """A tiny sparse attention by the implementation that serving would use, against the op's reference."""
    import jax
    import jax.numpy as jnp

    from jax_mla.layouts import KV_FP8_656
    from jax_mla.ops.base import choose
    from jax_mla.ops.kv_write import kv_pack
    from jax_mla.ops.sparse_mla import sparse_mla

    draw = [
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(
            jax.random.split(jax.random.key(0), 4), [(64, 512), (64, 64), (2, 16, 512), (2, 16, 64)], strict=True
        )
    ]
    pool = kv_pack(draw[0], draw[1], layout=KV_FP8_656)
    slots = jnp.stack([jnp.arange(1, 33), jnp.where(jnp.arange(32) % 3 == 0, -1, 63 - jnp.arange(32))]).astype(
        jnp.int32
    )
    how = dict(layout=KV_FP8_656, softmax_scale=192**-0.5)
    served, _ = sparse_mla(draw[2], draw[3], pool, slots, **how)
    reference, _ = sparse_mla(draw[2], draw[3], pool, slots, implementation="reference", **how)
    served, reference = served.astype(jnp.float32), reference.astype(jnp.float32)
    error = float(jnp.linalg.norm(served - reference) / jnp.linalg.norm(reference))
    found = f"sparse_mla by {choose('sparse_mla', None, False)}: {error:.1e} from its reference"
    if error <= 1e-2:
        yield Finding("kernel", "ok", found)
    else:
        advice = "this device computes something else: do not serve; pytest tests/jax_mla says which op is off"
        yield Finding("kernel", "fail", found, advice)


def runtimes() -> Iterator[Finding]:
    """Whether this process has one driver of CUDA, or one HIP: of two, neither knows the other's memory and streams."""
    from bridge.stream import driver

    for name, interface in (("CUDA", driver.CUDA), ("HIP", driver.HIP)):
        found = driver.loaded(interface.library)
        if len(found) > 1:
            advice = "start with the environment of one; LD_LIBRARY_PATH and what it names first decide"
            yield Finding("runtimes", "fail", f"two of {name}: {', '.join(found)}", advice)
        elif found:
            yield Finding("runtimes", "ok", found[0])
    if not driver.loaded(driver.CUDA.library) and not driver.loaded(driver.HIP.library):
        yield Finding("runtimes", "ok", "none: this process uses no GPU")


def programs() -> Iterator[Finding]:
    """What the stream lane has compiled for this device, or for which without one."""
    import torch

    from bridge.stream import cache, driver

    arch = driver.arch_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None
    counts = Counter(f"{program.arch} {program.name}" for program in cache.kept(arch))
    held = ", ".join(f"{name} ({n})" for name, n in counts.items()) or f"none{f' for {arch}' if arch else ''}"
    yield Finding("programs", "ok", f"{held}, in {cache.folder()}")


def lanes() -> Iterator[Finding]:
    """On a GPU, one kernel through each lane, bitwise, and through a captured graph."""
    import torch

    from bridge.dlpack import torch_device_type
    from bridge.ops import SELECT
    from bridge.stream import Jit, Stream
    from bridge.stream.lane import VARIABLE, chosen

    if not torch.cuda.is_available():
        yield Finding("lanes", "ok", "jit: a CPU has no other")
        return
    if chosen("cuda") == "jit":
        yield Finding("lanes", "ok", f"jit, as {VARIABLE} asks; without graphs")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    stream, draw = Stream.of(device), torch.Generator(device).manual_seed(0)
    logits = torch.randn(4, 8192, generator=draw, device=device)
    lengths = torch.tensor([8192, 0, 77, 5000], dtype=torch.int32, device=device)
    launched = stream(SELECT, logits, lengths, k=512)
    stream_advice = "don't serve on the stream lane: JAX_MLA_LANE=jit chooses the other"
    if torch_device_type() == "cuda":
        if torch.equal(launched[0], Jit()(SELECT, logits, lengths, k=512)[0]):
            yield Finding("lanes", "ok", "select by the jit and the stream lane: the same bytes")
        else:
            yield Finding("lanes", "fail", "select by the jit and the stream lane: not the same bytes", stream_advice)
    else:
        yield Finding("lanes", "ok", "stream; JAX sees no GPU here, so there is no jit lane to compare with")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = stream(SELECT, logits, lengths, k=512)
    logits.copy_(-logits)
    graph.replay()
    if torch.equal(captured[0], stream(SELECT, logits, lengths, k=512)[0]):
        yield Finding("graph", "ok", "captured once, replayed on other logits")
    else:
        yield Finding("graph", "fail", "a replay on other logits gives something else than a call", stream_advice)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    python,
    jax_versions,
    serving_versions,
    plugin,
    memory,
    device,
    exchange,
    kernel,
    runtimes,
    lanes,
    programs,
)


def report() -> list[Finding]:
    """All findings. A check that breaks is a finding too, and keeps no other from running."""
    findings = []
    for check in CHECKS:
        try:
            findings += check()
        except Exception as error:  # whatever a half-installed machine throws belongs into the report
            name = check.__name__.replace("_", " ")
            first = str(error).strip().split("\n")[0]
            findings.append(Finding(name, "fail", f"{type(error).__name__}: {first}", "see the lines above, then this"))
    return findings


def main(json: bool) -> int:
    """Prints the report, as a table or as JSON, and returns the exit code: 1 if anything failed."""
    findings = report()
    able = all(finding.status != "fail" for finding in findings)
    if json:
        print(json_module.dumps({"able": able, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return 0 if able else 1
    for finding in findings:
        print(f"{finding.status:<5} {finding.name:<15} {finding.found}")
        if finding.advice:
            print(f"{'':<21} → {finding.advice}")
    print("This machine can serve." if able else "This machine can't serve yet: see what failed.")
    return 0 if able else 1
