"""Other libraries' functions that do the same work, measured in the same run where they are installed.

Each module knows one library: how it is imported, what layouts it takes, and what it does not do. All of them are
checked as our own ops are, before they are timed; where a library rounds more than the op may, its bound says so.

What is measured is what is installed. On an NVIDIA card, beside the extra ``sglang``::

    pip install --no-deps sgl-flash-mla==1.0.0 sgl-deep-gemm==0.1.5.post1 apache-tvm-ffi==0.1.11 tilelang
"""

from bench.peers.base import JaxPeer as JaxPeer
from bench.peers.base import Missing as Missing
from bench.peers.base import Peer as Peer
from bench.peers.base import TorchPeer as TorchPeer
from bench.peers.base import library as library
from bench.peers.base import to_numpy as to_numpy
from bench.peers.base import to_torch as to_torch
from bench.peers.base import torch_for as torch_for
from bench.peers.base import versions as versions
