"""What a compiled function is without its compiler: machine code, launches, and what their pointers point to.

Plain data, and a file of it: nothing here needs JAX, torch or a GPU.
"""

import io
import json
import math
import zipfile
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Literal

FORMAT = 1

Role = Literal["parameter", "output", "constant", "temporary"]

BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
}
"""Bytes of an element, by JAX's name of its dtype: what may cross (``bridge.dtypes``)."""


DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, KeyError, TypeError, ValueError)
"""What reading a damaged file raises."""


@dataclass(frozen=True)
class Array:
    """Shape and dtype, by JAX's name, of a row-major array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def array_of(name: str, x: Any) -> Array:
    """What ``x``, with a shape and a dtype of JAX's, is; raises ``ValueError`` for a dtype that may not cross."""
    if x.dtype.name not in BYTES:
        raise ValueError(f"{name}: expected results of {sorted(BYTES)}, got {x.dtype.name}")
    return Array(tuple(x.shape), x.dtype.name)


@dataclass(frozen=True)
class Result:
    """- `array`: what it is. - `parameter`: the number of the parameter in whose memory it is written, None for memory
    of its own."""

    array: Array
    parameter: int | None = None


@dataclass(frozen=True)
class Pointer:
    """One argument of a kernel: `size` bytes from byte `offset` of a buffer on.

    - `role`, `number`: "parameter" n or "output" n of the function, flat and in order; "constant" or "temporary" n.
    """

    role: Role
    number: int
    offset: int
    size: int


@dataclass(frozen=True)
class Launch:
    """- `kernel`: its symbol. - `code`: number of the code object that it is in. - `grid`, `threads`: x, y, z.
    - `shared_bytes`: dynamic shared memory. - `pointers`: its arguments, each 8 bytes, and nothing behind them.
    """

    kernel: str
    code: int
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared_bytes: int
    pointers: tuple[Pointer, ...]


@dataclass(frozen=True)
class Program:
    """A function as a list of launches, one after the other on one stream.

    - `name`: for errors. - `arch`: "sm_90", "gfx942", "gfx950". - `versions`: of what compiled it.
    - `parameters`: its arrays. - `results`: what it gives.
    - `codes`: ELF files: cubins or HSA code objects. - `constants`: what they hold. - `temporaries`: their bytes.

    Raises ``ValueError`` for a pointer to a buffer that there is none of, or past its end, and for a result that no
    launch has a pointer to, and so nothing writes.
    """

    name: str
    arch: str
    versions: dict[str, str]
    parameters: tuple[Array, ...]
    results: tuple[Result, ...]
    launches: tuple[Launch, ...]
    codes: tuple[bytes, ...]
    constants: tuple[bytes, ...]
    temporaries: tuple[int, ...]

    def __post_init__(self):
        sizes = {
            "parameter": [x.nbytes for x in self.parameters],
            "output": [x.array.nbytes for x in self.results],
            "constant": [len(x) for x in self.constants],
            "temporary": list(self.temporaries),
        }
        reached = set()
        for launch in self.launches:
            if not 0 <= launch.code < len(self.codes):
                raise ValueError(f"{self.name}: kernel {launch.kernel!r} is in code {launch.code} of {len(self.codes)}")
            for i, p in enumerate(launch.pointers):
                there = sizes.get(p.role, [])
                if not (0 <= p.number < len(there) and 0 <= p.offset <= p.offset + p.size <= there[p.number]):
                    raise ValueError(f"{self.name}: kernel {launch.kernel!r}, argument {i}: there is no {p}")
                reached.add((p.role, p.number))
        for i, result in enumerate(self.results):
            at = ("output", i) if result.parameter is None else ("parameter", result.parameter)
            if at not in reached:
                raise ValueError(f"{self.name}: expected a launch with a pointer to result {i}, found none")
            if result.parameter is not None and self.parameters[result.parameter] != result.array:
                raise ValueError(
                    f"{self.name}: result {i} is {result.array}, written over a {self.parameters[result.parameter]}"
                )

    def to_bytes(self) -> bytes:
        """A zip file: ``program.json``, and each code object and constant."""
        head = asdict(self)
        del head["codes"], head["constants"]
        head |= dict(format=FORMAT, codes=len(self.codes), constants=len(self.constants))
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("program.json", json.dumps(head, indent=1))
            for i, code in enumerate(self.codes):
                archive.writestr(f"code{i}.elf", code)
            for i, constant in enumerate(self.constants):
                archive.writestr(f"constant{i}", constant)
        return file.getvalue()

    @staticmethod
    def from_bytes(data: bytes) -> "Program":
        """Raises ``ValueError`` for what ``to_bytes`` of this version did not write."""
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                head = json.loads(archive.read("program.json"))
                if head.pop("format") != FORMAT:
                    raise ValueError("another format")
                codes = tuple(archive.read(f"code{i}.elf") for i in range(head.pop("codes")))
                constants = tuple(archive.read(f"constant{i}") for i in range(head.pop("constants")))
            return Program(
                name=head["name"],
                arch=head["arch"],
                versions=head["versions"],
                parameters=tuple(map(_array, head["parameters"])),
                results=tuple(Result(_array(r["array"]), r["parameter"]) for r in head["results"]),
                launches=tuple(map(_launch, head["launches"])),
                codes=codes,
                constants=constants,
                temporaries=tuple(head["temporaries"]),
            )
        except DAMAGE as e:
            raise ValueError(f"program: expected a file of format {FORMAT}, got {len(data)} bytes: {e}") from e


def _array(x: dict) -> Array:
    return Array(tuple(x["shape"]), x["dtype"])


def _launch(x: dict) -> Launch:
    pointers = tuple(Pointer(p["role"], p["number"], p["offset"], p["size"]) for p in x["pointers"])
    (gx, gy, gz), (tx, ty, tz) = x["grid"], x["threads"]
    return Launch(x["kernel"], x["code"], (gx, gy, gz), (tx, ty, tz), x["shared_bytes"], pointers)
