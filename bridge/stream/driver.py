"""CUDA's and HIP's module interfaces, which are twins: load machine code, and launch it on a stream.

The driver is the one that torch has loaded, found by its file in this process: a second HIP or CUDA runtime beside it
would know nothing of torch's memory and streams.
"""

import ctypes
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from bridge.stream.program import Launch

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
ARCHS = ("gfx942", "gfx950", "sm_90")
"""What programs are built for: ``jax_mla.aot.chips.CHIPS``, which needs JAX."""

DEFAULT_SHARED_BYTES = 48 << 10  # more must be asked for, on CUDA


@dataclass(frozen=True)
class Interface:
    """- `library`: how the file's name begins. - The names of its functions: `load` (module ← code), `function`
    (function ← module, name), `attribute` (sets one of a function; None where there is nothing to set), `launch`, and
    `error`, the text of a status: CUDA gives it through a pointer (`text_by_pointer`), HIP returns it."""

    library: str
    load: str
    function: str
    attribute: str | None
    launch: str
    error: str
    text_by_pointer: bool


CUDA = Interface(
    library="libcuda.so",
    load="cuModuleLoadData",
    function="cuModuleGetFunction",
    attribute="cuFuncSetAttribute",
    launch="cuLaunchKernel",
    error="cuGetErrorString",
    text_by_pointer=True,
)
HIP = Interface(
    library="libamdhip64.so",
    load="hipModuleLoadData",
    function="hipModuleGetFunction",
    attribute=None,
    launch="hipModuleLaunchKernel",
    error="hipGetErrorString",
    text_by_pointer=False,
)


class DriverError(RuntimeError):
    """What the driver refused; says what was asked of it."""


def loaded(prefix: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """The files in this process whose names begin with ``prefix``, each once."""
    found = re.findall(
        rf"^(?:\S+\s+){{5}}(/.*/{re.escape(prefix)}.*?)(?: \(deleted\))?$", maps.read_text(), re.MULTILINE
    )
    return sorted({str(Path(path).resolve()) for path in found})


class Driver:
    """One GPU's driver, as torch uses it.

    - `interface`: ``CUDA`` or ``HIP``. - `device`: torch's.

    Raises ``DriverError`` unless exactly one library of that name is loaded.
    """

    alignment = 256
    """Bytes that XLA takes the address of what isn't a parameter to be a multiple of; torch allocates in 512."""

    def __init__(self, interface: Interface, device: torch.device, library: str | None = None):
        if library is None:
            found = loaded(interface.library)
            if len(found) != 1:
                raise DriverError(
                    f"{interface.library}: expected one in this process, torch's, got {found or 'none'}; "
                    "kernels of one can't use the memory of another"
                )
            (library,) = found
        self.interface, self.device, self.library = interface, device, library
        self._seen = threading.local()
        handle = ctypes.CDLL(library)
        pointer = ctypes.c_void_p
        self._load = self._function(handle, interface.load, ctypes.POINTER(pointer), ctypes.c_char_p)
        self._find = self._function(handle, interface.function, ctypes.POINTER(pointer), pointer, ctypes.c_char_p)
        self._set = None
        if interface.attribute is not None:
            self._set = self._function(handle, interface.attribute, pointer, ctypes.c_int, ctypes.c_int)
        # Without argtypes: its arguments are of ctypes' own types already, and aren't looked at again on each call.
        self.launch_function = getattr(handle, interface.launch)
        self._text = getattr(handle, interface.error)
        self._text.restype = ctypes.c_int if interface.text_by_pointer else ctypes.c_char_p

    @staticmethod
    def _function(handle, name: str, *arguments):
        function = getattr(handle, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
        return function

    def error(self, status: int) -> str:
        """What ``status`` means, in the driver's words."""
        if not self.interface.text_by_pointer:
            text = self._text(status)
        else:
            out = ctypes.c_char_p()
            self._text(status, ctypes.byref(out))
            text = out.value
        return f"{status} ({text.decode() if text else 'unknown'})"

    def load(self, code: bytes, what: str) -> int:
        """A module of ``code``, an ELF file for this device. `what`: for the error."""
        module = ctypes.c_void_p()
        status = self._load(ctypes.byref(module), code)
        if status or not module.value:
            raise DriverError(f"{what}: {self.interface.load} of {len(code)} bytes failed: {self.error(status)}")
        return module.value

    def kernel(self, module: int, launch: Launch, what: str) -> "Kernel":
        """The kernel of ``launch`` in ``module``, ready to be launched as that says."""
        function = ctypes.c_void_p()
        status = self._find(ctypes.byref(function), module, launch.kernel.encode())
        if status or not function.value:
            raise DriverError(f"{what}: no kernel {launch.kernel!r} in its code: {self.error(status)}")
        if self._set is not None and launch.shared_bytes > DEFAULT_SHARED_BYTES:
            status = self._set(function, MAX_DYNAMIC_SHARED, launch.shared_bytes)
            if status:
                raise DriverError(
                    f"{what}: {launch.kernel!r} wants {launch.shared_bytes} bytes of shared memory: "
                    f"{self.error(status)}"
                )
        return Kernel(self, function, launch, what)

    def stream(self) -> int:
        """torch's current stream on this device."""
        return torch._C._cuda_getCurrentRawStream(self.device.index)

    def capturing(self) -> bool:
        """Whether that stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()

    def check_current(self, what: str) -> None:
        """Raises ``ValueError`` unless torch's current device is this one: launches go to the current one's context."""
        if not getattr(self._seen, "current", False):  # a thread that has done nothing on the card has no context yet
            torch.cuda.set_device(torch.cuda.current_device())
            self._seen.current = True
        current = torch._C._cuda_getDevice()  # what torch.cuda.current_device() asks, once it is initialised
        if current != self.device.index:
            raise ValueError(f"{what}: expected torch's current device to be {self.device}, got cuda:{current}")


class Kernel:
    """A kernel with everything that a launch of it takes but the addresses, which stand in ``addresses`` and may be
    changed between launches: a launch copies them."""

    def __init__(self, driver: Driver, function: ctypes.c_void_p, launch: Launch, what: str):
        count = len(launch.pointers)
        self.addresses = (ctypes.c_uint64 * count)()
        first = ctypes.addressof(self.addresses)
        sizes = [ctypes.c_uint(n) for n in (*launch.grid, *launch.threads, launch.shared_bytes)]
        self._before = (function, *sizes)
        self._after = (ctypes.c_void_p * count)(*[first + 8 * i for i in range(count)]), ctypes.c_void_p(None)
        self.launch_on(0)
        self._call, self._error = driver.launch_function, driver.error
        self._what = f"{what}: {launch.kernel!r} on a grid of {launch.grid}"

    def launch_on(self, stream: int) -> None:
        """Says on which stream, from now on."""
        self._arguments = (*self._before, ctypes.c_void_p(stream), *self._after)

    def launch(self) -> None:
        status = self._call(*self._arguments)
        if status:
            raise DriverError(f"{self._what}: the launch failed: {self._error(status)}")


def for_device(device: torch.device) -> Driver:
    """The driver of a GPU of torch's."""
    if device.type != "cuda" or device.index is None:
        raise ValueError(f"device: expected a GPU with its number, as cuda:0, got {str(device)!r}")
    torch.cuda.init()  # which loads the driver
    return Driver(HIP if torch.version.hip else CUDA, device)


def arch_of(device: torch.device) -> str:
    """What machine code runs on ``device``: "sm_90", "gfx942"."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
