"""What paged index logits mean, one row after the other."""

import jax
import jax.numpy as jnp


def reference(q8, weights, pool, token_table, requests, lengths, *, layout, max_len, next_n, fill):
    s = jnp.arange(max_len)

    def row(t):
        b, i = t // next_n, t % next_n
        known = (requests[b] >= 0) & (requests[b] < token_table.shape[0])
        slots = jnp.where(known, token_table[requests[b], :max_len], -1)
        slots = jnp.where(slots < pool.shape[0] * layout.page_size, slots, -1)
        k8, k_scale = layout.read(pool, slots)
        products = jnp.einsum("hd,sd->hs", q8[t].astype(jnp.float32), k8.astype(jnp.float32), precision="highest")
        logits = jnp.einsum("hs,h->s", jax.nn.relu(products), weights[t], precision="highest") * k_scale
        visible = (s < lengths[b] - next_n + i + 1) & (slots >= 0)
        return jnp.where(visible, logits, -jnp.inf)

    return jax.lax.map(row, jnp.arange(q8.shape[0]))
