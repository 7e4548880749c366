"""One folder per op, the same files in each.

- ``__init__.py``: the public function: its formula, its arguments, its checks.
- ``reference.py``: what it means, slow and obvious.
- ``kernel.py``: the Pallas kernel, and the XLA version.
- ``config.py``: the kernel's tile sizes, and why.
"""
