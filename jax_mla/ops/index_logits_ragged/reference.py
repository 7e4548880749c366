"""What ragged index logits mean."""

import jax
import jax.numpy as jnp


def reference(q8, weights, k8, k_scale, starts, ends, *, fp8):
    q, k = q8.astype(jnp.float32), k8.astype(jnp.float32)
    products = jnp.einsum("thd,sd->ths", q, k, precision="highest")
    logits = jnp.einsum("ths,th->ts", jax.nn.relu(products), weights, precision="highest") * k_scale
    s = jnp.arange(k8.shape[0])
    return jnp.where((s >= starts[:, None]) & (s < ends[:, None]), logits, -jnp.inf)
