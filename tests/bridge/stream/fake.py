"""A driver that is none: ``fake_driver.c`` behind ``Driver``'s own calls, and programs for it."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

from bridge.stream.driver import Driver, Interface
from bridge.stream.program import Array, Launch, Pointer, Program, Result

STREAM = 0x5EA
ELF = b"\x7fELF" + bytes(60)
ARCH = "sm_90"


def library(folder: Path) -> Path:
    """The fake driver, compiled."""
    cc = shutil.which("cc") or shutil.which("gcc")
    assert cc, "these tests need a C compiler"
    built = folder / "libfake.so"
    source = Path(__file__).with_name("fake_driver.c")
    subprocess.run([cc, "-shared", "-fPIC", "-O1", "-w", "-o", str(built), str(source)], check=True)
    return built


class FakeDriver(Driver):
    """On CPU tensors. `is_capturing`, `current` and `on` are what a test sets."""

    alignment = 64  # as torch allocates on a CPU
    is_capturing = False
    current = True
    on = STREAM

    def __init__(self, interface: Interface, path: Path):
        super().__init__(interface, torch.device("cpu"), str(path))
        self.fake = ctypes.CDLL(str(path))
        self.fake.fake_log.restype = ctypes.c_char_p
        self.fake.fake_reset()

    def kernel(self, module: int, launch: Launch, what: str):
        self.fake.fake_arity(launch.kernel.encode(), len(launch.pointers))
        return super().kernel(module, launch, what)

    def stream(self) -> int:
        return self.on

    def capturing(self) -> bool:
        return self.is_capturing

    def check_current(self, what: str) -> None:
        if not self.current:
            raise ValueError(f"{what}: expected torch's current device to be this one")

    def log(self) -> list[list[str]]:
        """What was asked since the last time, in words, and forgets it."""
        said = [line.split() for line in self.fake.fake_log().decode().splitlines()]
        self.fake.fake_reset()
        return said

    def launches(self) -> list[tuple[str, list[int], list[int]]]:
        """Of each launch: the kernel, (grid, threads, shared, stream), and the addresses."""
        said = [x for x in self.log() if x[0] not in ("load", "attribute")]
        return [(x[0], list(map(int, x[1:9])), list(map(int, x[9:]))) for x in said]


def pointer(role, number, size, offset=0) -> Pointer:
    return Pointer(role, number, offset, size)


def program(arch: str = ARCH, **changes) -> Program:
    """``copy_4``: an input, a constant and a temporary, into a result of its own; then ``fill_2``: a temporary, into a
    pool that it is given."""
    given: dict = dict(
        name="example",
        arch=arch,
        versions={},
        parameters=(Array((64,), "uint8"), Array((4, 8), "float32")),
        results=(Result(Array((4, 8), "float32"), 1), Result(Array((64,), "uint8"))),
        launches=(
            Launch(
                "copy_4",
                0,
                (48, 2, 3),
                (128, 1, 1),
                100_000,
                (
                    pointer("parameter", 0, 64),
                    pointer("constant", 0, 4),
                    pointer("temporary", 0, 256, 256),
                    pointer("output", 1, 64),
                ),
            ),
            Launch(
                "fill_2", 1, (16, 1, 1), (64, 1, 1), 0, (pointer("temporary", 0, 256), pointer("parameter", 1, 128))
            ),
        ),
        codes=(ELF, ELF + b"2"),
        constants=(b"\1\2\3\4",),
        temporaries=(512,),
    )
    return Program(**given | changes)
