"""The Hadamard matrix against Sylvester's construction."""

import numpy as np
import pytest

from jax_mla.hadamard import hadamard_matrix
from tests.jax_mla.oracles import hadamard
from tests.numerics import assert_bitwise_equal


@pytest.mark.parametrize("n", [1, 2, 16, 128])
def test_is_sylvesters(n):
    assert_bitwise_equal(hadamard_matrix(n), hadamard(n).astype(np.float32))


def test_is_orthogonal_and_symmetric():
    h = np.asarray(hadamard_matrix(128), np.float64)
    np.testing.assert_allclose(h @ h.T, np.eye(128), atol=1e-6)
    assert (h == h.T).all()
