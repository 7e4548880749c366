"""What all tests share: a CPU, strict dtypes, no network, and random examples that are the same on every run."""

import os
import socket

# Before anything imports JAX. Processes that a test starts inherit them. `make test-gpu` is for a machine with a GPU.
if os.environ.get("JAX_MLA_TEST_GPU") != "1":
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_numpy_dtype_promotion", "strict")

settings.register_profile("fixed", derandomize=True, database=None, deadline=None, max_examples=25)
settings.load_profile("fixed")


@pytest.fixture(scope="session", autouse=True)
def no_network():
    """Only this machine can be connected to."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _local_only(getattr(socket.socket, name)))
        yield


def _local_only(connect):
    def checked(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise RuntimeError(f"tests expected connections to this machine only, got {address}")
        return connect(self, address)

    return checked
