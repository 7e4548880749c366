"""The Walsh-Hadamard rotation that may go before the indexer's quantisation (``rotate_activation`` upstream)."""

import jax.numpy as jnp
from jax import Array, lax


def hadamard_matrix(n: int) -> Array:
    r"""float32 ``[n, n]``, orthogonal, ``n`` a power of two: $n^{-1/2} (-1)^{\mathrm{popcount}(i \wedge j)}$.

    A rotation of queries and keys alike leaves every product as it is and spreads outliers over all columns, so that
    less is lost in FP8. Made of index arithmetic only, so that a kernel can make it too.
    """
    return hadamard_signs(n).astype(jnp.float32) * (n**-0.5)


def hadamard_signs(n: int) -> Array:
    """int32 ``[n, n]`` of 1 and -1, ``n^(1/2)`` times ``hadamard_matrix``."""
    i = lax.broadcasted_iota(jnp.int32, (n, n), 0)
    j = lax.broadcasted_iota(jnp.int32, (n, n), 1)
    odd = lax.population_count(i & j) & 1
    return 1 - 2 * odd
