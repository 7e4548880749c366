import pytest

from bridge.stream.driver import CUDA, HIP
from tests.bridge.stream import fake


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory):
    return fake.library(tmp_path_factory.mktemp("driver"))


@pytest.fixture(params=[CUDA, HIP], ids=["cuda", "hip"])
def driver(request, fake_library):
    return fake.FakeDriver(request.param, fake_library)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_MLA_CACHE", str(tmp_path / "programs"))
    return tmp_path / "programs"
