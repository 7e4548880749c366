"""Torch tensors as JAX arrays and back: the same memory, or an error that says what to do.

Neither ``jax.dlpack`` nor ``torch.from_dlpack`` promises that. JAX copies int64 and float64 to 32 bits, copies what is
not aligned, and reads a tensor with its negative bit set as if it were not. Every such case is refused here by name,
before anything is exchanged, and the pointer of the result is compared with the pointer that came in.

**Who may write when.** The memory has two names afterwards, and no lock.

- On a GPU both libraries enqueue. The exchange itself orders them: JAX waits for torch's current stream as it stood at
  ``to_jax``, torch's current stream waits for the array at ``to_torch``. A later write is ordered only by a later
  exchange, so import what was written anew instead of keeping an array. Memory that torch got from JAX goes back to
  XLA as soon as torch drops it, perhaps before torch's stream has read it; the next computation may write there, and
  waits for torch's stream only if it has an argument that was imported since. Give each one that.
- On a CPU torch runs when called and JAX runs later, on threads of its own. ``to_torch`` therefore waits for the array.
  Memory given to ``to_jax`` may be overwritten once a result of every computation that reads it has been through
  ``to_torch``, and not before.
- JAX thinks that its arrays never change. Write to memory that JAX also holds only if no computation is to read the
  old values.

Memory stays alive as long as either side holds it.
"""

import jax
import torch

from bridge.dtypes import DTYPES

_ADVICE = {
    torch.int64: "JAX would hold an int32 copy; convert it yourself with .to(torch.int32)",
    torch.float64: "JAX would hold a float32 copy; convert it yourself with .to(torch.float32)",
}
_PACKED = "DLPack has no agreed format for types below 8 bits; pass the bytes with .view(torch.uint8)"

ALIGNMENT = {"cpu": 64, "cuda": 16}
"""Bytes that an executable's argument must be aligned to (XLA's ``MinAlign`` on the CPU, ``kEntryParameterAlignBytes``
on GPUs). Torch aligns whatever it allocates; a view may begin anywhere."""


def _refuse(name: str, expected: str, got: str, advice: str):
    raise ValueError(f"{name}: expected {expected}, got {got}; {advice}")


def torch_device_type() -> str:
    """Where torch keeps what JAX computes on by default: "cpu", or "cuda" for NVIDIA and AMD cards alike."""
    return "cpu" if jax.default_backend() == "cpu" else "cuda"


def check(tensor: torch.Tensor, name: str = "tensor") -> None:
    """Raises ``ValueError`` unless JAX can hold ``tensor`` as it is, in the tensor's own memory."""
    if not isinstance(tensor, torch.Tensor):
        _refuse(name, "a torch.Tensor", type(tensor).__name__, "make one with torch.from_numpy or torch.tensor")
    if tensor.dtype not in DTYPES:
        packed = any(part in str(tensor.dtype) for part in ("int4", "float4", "bits4"))
        advice = _ADVICE.get(tensor.dtype, _PACKED if packed else "convert it yourself with .to()")
        _refuse(name, f"one of {sorted(DTYPES.values())}", str(tensor.dtype), advice)
    if tensor.layout != torch.strided:
        _refuse(name, "a dense tensor", str(tensor.layout), "call .to_dense()")
    if tensor.device.type != torch_device_type():
        _refuse(
            name,
            f"a tensor on {torch_device_type()!r}, where JAX computes",
            f"one on {str(tensor.device)!r}",
            "move it with .to(), or set JAX_PLATFORMS before JAX is imported",
        )
    if tensor.device.type == "cuda" and tensor.device.index != torch.cuda.current_device():
        _refuse(
            name,
            f"a tensor on torch's current device, cuda:{torch.cuda.current_device()}",
            f"one on {str(tensor.device)!r}",
            "exchange it under torch.cuda.device(tensor.device)",
        )
    if tensor.requires_grad:
        _refuse(name, "a tensor outside autograd", "one that requires grad", "call .detach()")
    if tensor.is_neg() or tensor.is_conj():
        _refuse(name, "plain values", "a tensor with its negative or conjugate bit set", "call .resolve_neg()")
    # is_contiguous() ignores the strides of dimensions of size 1, which DLPack rewrites anyway (pytorch#83158).
    if not tensor.is_contiguous():
        _refuse(
            name,
            f"contiguous rows, strides {_row_major(tensor.shape)} for shape {tuple(tensor.shape)}",
            f"strides {tensor.stride()}",
            "call .contiguous(), or pass the whole tensor that it is a view of",
        )
    alignment = ALIGNMENT[tensor.device.type]
    if tensor.numel() and tensor.data_ptr() % alignment:
        _refuse(
            name,
            f"memory aligned to {alignment} bytes",
            f"an address {tensor.data_ptr() % alignment} bytes past that",
            "pass the whole tensor that it is a view of, or .clone() it",
        )


def to_jax(tensor: torch.Tensor, name: str = "tensor") -> jax.Array:
    """The JAX array that lies in the memory of ``tensor``; ``ValueError`` where there can be none.

    `name` is what the error calls it. On a GPU the array may be donated to a computation that writes in place.
    """
    check(tensor, name)
    array = jax.dlpack.from_dlpack(tensor, copy=False)
    _same(name, tensor, array)
    return array


def to_torch(array: jax.Array, name: str = "array") -> torch.Tensor:
    """The torch tensor that lies in the memory of ``array``, which has been computed when this returns on a CPU.

    Its strides are row-major, those of dimensions of size 1 included: kernels check them (pytorch#83158).
    """
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        _refuse(name, "a jax.Array with values", type(array).__name__, "exchange arrays outside of jax.jit")
    if array.is_deleted():
        _refuse(name, "an array that JAX still holds", "a deleted one", "use the result of what it was donated to")
    if array.dtype.name not in DTYPES.values():
        packed = any(part in array.dtype.name for part in ("int2", "int4", "float4"))
        advice = "keep it inside JAX, or bitcast it to uint8" if packed else "convert it yourself with .astype()"
        _refuse(name, f"one of {sorted(DTYPES.values())}", array.dtype.name, advice)
    if len(array.devices()) != 1:
        _refuse(name, "an array on one device", f"one on {len(array.devices())}", "exchange its addressable shards")
    if torch_device_type() == "cpu":
        array.block_until_ready()
    tensor = torch.from_dlpack(array)
    _same(name, tensor, array)
    return tensor.as_strided(tensor.shape, _row_major(tensor.shape))


def _row_major(shape) -> tuple[int, ...]:
    """Strides of contiguous rows, as torch counts them: a dimension of size 0 or 1 takes part as 1."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(int(size), 1)
    return tuple(reversed(strides))


def _same(name: str, tensor: torch.Tensor, array: jax.Array) -> None:
    """Raises unless both lie at one address and hold one dtype and shape."""
    same = DTYPES[tensor.dtype] == array.dtype.name and tuple(tensor.shape) == array.shape
    if same and tensor.numel() and tensor.data_ptr() != array.unsafe_buffer_pointer():
        same = False
    if not same:
        raise RuntimeError(
            f"{name}: expected one memory for both libraries, got {tuple(tensor.shape)} {tensor.dtype} at "
            f"{tensor.data_ptr():#x} in torch and {array.shape} {array.dtype.name} at "
            f"{array.unsafe_buffer_pointer():#x} in JAX (torch {torch.__version__}, jax {jax.__version__}); "
            "run `python -m bridge doctor`"
        )
