"""A ``Program`` on torch's tensors: launched on torch's current stream, by their addresses.

Everything else that a launch needs is made beforehand: a call allocates the results that it isn't given memory for, and
what lies between its kernels. It waits for nothing, and can be captured in a graph, which then holds the addresses.
"""

import threading
from collections.abc import Sequence
from functools import partial

import torch

from bridge.dtypes import DTYPES
from bridge.stream.driver import Driver, Kernel
from bridge.stream.program import Program

ALIGNMENT = 16
"""Bytes that XLA takes a parameter's address to be a multiple of. Of other memory: ``Driver.alignment``."""

REMEMBERED = 4096  # combinations of addresses; a model's layers and the allocator's blocks repeat

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Launcher:
    """``program`` loaded on ``driver``'s device.

    What lies between its kernels is allocated by torch for each call, as results are: on torch's current stream, and in
    a capture from the graph's own memory. A graph holds addresses: keep the launcher as long as graphs that it was
    captured in.

    Raises ``RuntimeError`` while a graph is being captured, when nothing can be loaded, ``ValueError`` for code of
    another chip, and ``driver.DriverError``.
    """

    def __init__(self, program: Program, driver: Driver, arch: str):
        if program.arch != arch:
            raise ValueError(f"{program.name}: expected code for {arch}, which {driver.device} is, got {program.arch}")
        if driver.capturing():
            raise RuntimeError(
                f"{program.name}: it must be loaded before a graph is captured, got a first call during the capture; "
                "call it once, or bridge.stream's Stream.prepare, before"
            )
        driver.check_current(program.name)
        self.program, self._driver = program, driver
        self._dtypes = [TORCH_DTYPES[x.dtype] for x in program.parameters]
        self._shapes = [torch.Size(x.shape) for x in program.parameters]
        self._fresh = [i for i, result in enumerate(program.results) if result.parameter is None]
        fresh = [program.results[i].array for i in self._fresh]
        self._fresh_kinds = [
            (i, torch.Size(x.shape), TORCH_DTYPES[x.dtype]) for i, x in zip(self._fresh, fresh, strict=True)
        ]
        device = driver.device
        self._constants = [torch.frombuffer(bytearray(x), dtype=torch.uint8).to(device) for x in program.constants]
        self._between = [0]  # where temporaries begin in one block, and its size
        for size in program.temporaries:
            self._between.append(self._between[-1] + -(-size // driver.alignment) * driver.alignment)
        modules = [driver.load(code, program.name) for code in program.codes]
        self._kernels: list[Kernel] = []
        self._places: dict[tuple[str, int], list[tuple]] = {}
        for launch in program.launches:
            kernel = driver.kernel(modules[launch.code], launch, program.name)
            self._kernels.append(kernel)
            for i, p in enumerate(launch.pointers):
                self._places.setdefault((p.role, p.number), []).append((kernel.addresses, i, p.offset))
        for number, tensor in enumerate(self._constants):
            self._point(("constant", number), tensor.data_ptr())
        buffers = [("parameter", i) for i in range(len(program.parameters))] + [("output", i) for i in self._fresh]
        buffers += [("temporary", i) for i in range(len(program.temporaries))]
        self._call_places = [self._places.get(buffer, []) for buffer in buffers]
        self._stream: int | None = None  # that kernels are launched on
        self._last: tuple[int, ...] | None = None  # addresses that they point to
        self._lock = threading.Lock()  # from pointing to the last launch: the driver's calls let other threads run
        self._apart: set[tuple[int, ...]] = set()  # addresses that were found not to overlap

    def _point(self, buffer: tuple[str, int], address: int) -> None:
        for addresses, i, offset in self._places.get(buffer, []):
            addresses[i] = address + offset

    def __call__(self, *tensors: torch.Tensor, out: Sequence[torch.Tensor] | None = None) -> tuple[torch.Tensor, ...]:
        """The program's results.

        - `tensors`: its parameters, exactly as they are described, in order.
        - `out`: memory for those results that are not written into a parameter, in order; allocated by torch if None.

        Raises ``ValueError``, before anything is launched, for a tensor of another shape, dtype or device, one that is
        not contiguous, not aligned (``ALIGNMENT``, ``Driver.alignment``), in autograd or of too small a storage, and
        for results that would lie in a parameter or in one another.
        """
        addresses, results, _between = self._look_at(tensors, out)
        self._launch(addresses)
        return results

    def bind(
        self, *tensors: torch.Tensor, out: Sequence[torch.Tensor] | None = None
    ) -> "partial[tuple[torch.Tensor, ...]]":
        """A call with these tensors, which are looked at now and kept, as is what it needs beside them: it only
        launches. Memory is the stream's that is current now."""
        return partial(self._again, *self._look_at(tensors, out), tensors)

    def _again(self, addresses, results, *_) -> tuple[torch.Tensor, ...]:
        self._launch(addresses)
        return results

    def _look_at(self, tensors, out) -> tuple[tuple[int, ...], tuple[torch.Tensor, ...], torch.Tensor | None]:
        """The addresses of parameters, of results of their own and of temporaries; all results; and the temporaries'
        memory. Raises for what does not fit."""
        program = self.program
        if len(tensors) != len(self._shapes):
            raise ValueError(f"{program.name}: expected {len(self._shapes)} tensors, got {len(tensors)}")
        given = [
            self._address(x, shape, dtype, i, "parameter")
            for i, (x, shape, dtype) in enumerate(zip(tensors, self._shapes, self._dtypes, strict=True))
        ]
        if out is None:
            out = [torch.empty(shape, dtype=dtype, device=self._driver.device) for _, shape, dtype in self._fresh_kinds]
        elif len(out) != len(self._fresh):
            raise ValueError(f"{program.name}: expected out to be {len(self._fresh)} tensors, got {len(out)}")
        taken = [
            self._address(x, shape, dtype, i, "result")
            for x, (i, shape, dtype) in zip(out, self._fresh_kinds, strict=True)
        ]
        addresses = (*given, *taken)
        if addresses not in self._apart:
            self._refuse_short(tensors, out)
            self._refuse_overlaps(given, taken)
            if len(self._apart) == REMEMBERED:
                self._apart.clear()
            self._apart.add(addresses)
        fresh = iter(out)
        results = tuple(next(fresh) if r.parameter is None else tensors[r.parameter] for r in program.results)
        if not program.temporaries:
            return addresses, results, None
        between = torch.empty(self._between[-1], dtype=torch.uint8, device=self._driver.device)
        start = between.data_ptr()
        return (*addresses, *[start + offset for offset in self._between[:-1]]), results, between

    def _launch(self, addresses: tuple[int, ...]) -> None:
        driver = self._driver
        driver.check_current(self.program.name)
        stream = driver.stream()
        with self._lock:
            if stream != self._stream:
                self._stream = None
                for kernel in self._kernels:
                    kernel.launch_on(stream)
                self._stream = stream
            if addresses is not self._last and addresses != self._last:
                self._last = None
                for address, places in zip(addresses, self._call_places, strict=True):
                    for array, i, offset in places:
                        array[i] = address + offset
            self._last = addresses
            for kernel in self._kernels:
                kernel.launch()

    def _address(self, tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype, number: int, role: str) -> int:
        if (
            isinstance(tensor, torch.Tensor)
            and tensor.dtype == dtype
            and tensor.shape == shape
            and tensor.device == self._driver.device
            and tensor.is_contiguous()
            and not (tensor.requires_grad or tensor.is_neg())
        ):
            address = tensor.data_ptr()
            if address and address % (ALIGNMENT if role == "parameter" else self._driver.alignment) == 0:
                return address
        self._refuse(tensor, shape, dtype, number, role)
        raise AssertionError

    def _refuse(self, tensor, shape, dtype, number: int, role: str):
        name, device = f"{self.program.name}: {role} {number}", self._driver.device
        alignment = ALIGNMENT if role == "parameter" else self._driver.alignment
        expected = f"{dtype} {tuple(shape)} on {device}, contiguous and aligned to {alignment} bytes, outside autograd"
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: expected {expected}, got a {type(tensor).__name__}")
        got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        if not tensor.is_contiguous():
            got += f" with strides {tensor.stride()}"
        elif tensor.requires_grad:
            got += " that requires grad: call .detach()"
        elif tensor.is_neg():
            got += " with its negative bit set: call .resolve_neg()"
        elif tensor.device == device:
            got += f" at {tensor.data_ptr():#x}"
        raise ValueError(f"{name}: expected {expected}, got {got}")

    def _refuse_short(self, tensors, out) -> None:
        """Raises for a tensor whose storage ends before it does, as after ``resize_``."""
        for role, numbers, given in (("parameter", range(len(tensors)), tensors), ("result", self._fresh, out)):
            for number, x in zip(numbers, given, strict=True):
                needed = x.storage_offset() * x.element_size() + x.nbytes
                if x.untyped_storage().nbytes() < needed:
                    raise ValueError(
                        f"{self.program.name}: {role} {number}: expected a storage of {needed} bytes, "
                        f"got {x.untyped_storage().nbytes()}"
                    )

    def _refuse_overlaps(self, given: list[int], taken: list[int]) -> None:
        """Raises where a result would be written over something that a kernel may still read."""
        program = self.program
        for i, address in zip(self._fresh, taken, strict=True):
            end = address + program.results[i].array.nbytes
            others = [(f"parameter {j}", a, program.parameters[j].nbytes) for j, a in enumerate(given)]
            others += [
                (f"result {j}", a, program.results[j].array.nbytes)
                for j, a in zip(self._fresh, taken, strict=True)
                if j != i
            ]
            for name, start, size in others:
                if start < end and address < start + size:
                    raise ValueError(f"{program.name}: result {i}: expected memory of its own, got some of {name}'s")
        for result in program.results:
            if result.parameter is None:
                continue
            start = given[result.parameter]
            end = start + result.array.nbytes
            for j, a in enumerate(given):
                if j != result.parameter and a < end and start < a + program.parameters[j].nbytes:
                    raise ValueError(
                        f"{program.name}: parameter {result.parameter} is written: expected no other parameter in its "
                        f"memory, got parameter {j}"
                    )
