"""JAX's kernels on torch's own stream, without JAX in the way.

- ``lane``: ``Function``, what is run, and the two lanes, ``Jit`` and ``Stream``.
- ``program``: what a compiled function is without its compiler; ``build`` makes one, with XLA, ``triton`` with Triton;
  ``cache`` keeps them.
- ``custom``: functions as torch's operators.
- ``driver``: CUDA's and HIP's module interfaces; ``launch``: a program on torch's tensors.
"""

from bridge.stream.lane import Function as Function
from bridge.stream.lane import Jit as Jit
from bridge.stream.lane import Lane as Lane
from bridge.stream.lane import Stream as Stream
from bridge.stream.lane import lane_for as lane_for
