"""In the place of ``sgl_kernel``, where it isn't installed: every name and every module is there, and a name raises
when it is called.

SGLang imports names of it on a machine with a card, whether it will call them or not.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

ROOT = __name__


class Absent:
    def __init__(self, name: str):
        self.name = name

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.name}: expected the package sglang-kernel, got a stand-in")

    def __getattr__(self, name: str) -> "Absent":
        return absent(self.name, name)


def absent(owner: str, name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(f"{owner}.{name}")


class Submodules(MetaPathFinder, Loader):
    """``import sgl_kernel.flash_attn``, and whatever else there is."""

    def find_spec(self, fullname, path=None, target=None):
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{ROOT}.") else None

    def exec_module(self, module):
        module.__getattr__ = lambda name: absent(module.__name__, name)


def __getattr__(name: str) -> Absent:
    return absent(ROOT, name)


sys.meta_path.append(Submodules())
