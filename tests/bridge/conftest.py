"""What all tests of the bridge share."""

import os
import warnings
from pathlib import Path

import pytest

from tests.bridge.pools import sglang_pools

# SGLang and torch warn about this machine and about themselves when they are imported and used; these warnings are
# theirs. Whatever else warns is an error, as everywhere.
THEIRS = (
    "ignore:.*(AWQ|GGUF|Triton is not supported|sglang.launch_server|CUDA initialization|SwigPy|swigvarlink).*",
    "ignore::DeprecationWarning:sglang.*",
    "ignore::DeprecationWarning:torch.*",
    "ignore::FutureWarning:torch.*",
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for filter in THEIRS:
                item.add_marker(pytest.mark.filterwarnings(filter))


@pytest.fixture(scope="session")
def sglang():
    """SGLang, imported. What it imports warns in ways that no filter of ours can name in advance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang.srt.mem_cache.memory_pool
        import sglang.srt.model_executor.model_runner
    return sglang


@pytest.fixture(scope="session")
def pools(sglang):
    """``tests.bridge.pools.sglang_pools``."""
    with sglang_pools() as make:
        yield make
