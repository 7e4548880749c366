"""What trains the indexer: DeepSeek-V3.2's report, "Dense Warm-up Stage" and "Sparse Training Stage"."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Float32


def indexer_kl(
    scores: Float[Array, "*rows S"], attention: Float[Array, "*rows S"], mask: Bool[Array, "*rows S"]
) -> Float32[Array, "*rows"]:
    r"""$$D_{KL}\Big(\frac{a_t}{\lVert a_t \rVert_1} \,\Big\|\, \mathrm{softmax}(I_t)\Big)$$

    over the tokens in ``mask``: all up to the row's own in the dense warm-up, the selected ones in the sparse stage.

    - `scores`: $I$, the indexer's.
    - `attention`: $a$, the heads' attention summed; not negative. No gradient goes into it.

    A row whose mask is empty, or whose attention is 0, gives 0.
    """
    a = jnp.where(mask, lax.stop_gradient(attention).astype(jnp.float32), 0.0)
    p = a / jnp.maximum(a.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    scores = jnp.where(mask, scores.astype(jnp.float32), -jnp.inf)
    anything = mask.any(-1, keepdims=True)
    log_q = jax.nn.log_softmax(jnp.where(anything, scores, 0.0), axis=-1)
    there = p > 0
    return jnp.where(there, p * (jnp.log(jnp.where(there, p, 1.0)) - jnp.where(there, log_q, 0.0)), 0.0).sum(-1)
