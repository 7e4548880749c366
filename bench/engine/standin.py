"""In the place of ``sgl_kernel``, where it isn't installed: every name is there, and raises when it is called.

SGLang imports names of it on a machine with a card, whether it will call them or not.
"""


class Absent:
    def __init__(self, name: str):
        self.name = name

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.name}: expected the package sglang-kernel, got a stand-in")

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.name}.{name}")


def __getattr__(name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"sgl_kernel.{name}")
