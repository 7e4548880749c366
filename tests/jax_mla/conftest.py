"""How an op is called: each test that takes ``how`` runs once with every implementation."""

import pytest


@pytest.fixture(scope="session", params=["reference", "xla", "pallas"])
def how(request) -> dict:
    """Keyword arguments that pick an implementation; the Pallas kernel's Python is interpreted."""
    return dict(implementation=request.param, interpret=request.param == "pallas")
