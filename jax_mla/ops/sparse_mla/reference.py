"""What sparse MLA means, in float32 and all at once."""

import jax
import jax.numpy as jnp


def reference(q_nope, q_rope, pool, slots, kv_scale, *, layout, softmax_scale):
    valid = (slots >= 0) & (slots < pool.shape[0])
    kv = layout.unpack(pool[jnp.where(valid, slots, 0)], kv_scale)  # [T, K, 576]
    kv = jnp.where(valid[..., None], kv, 0.0)
    q = jnp.concatenate([q_nope, q_rope], axis=-1).astype(jnp.float32)
    s = jnp.einsum("thd,tkd->thk", q, kv, precision="highest") * softmax_scale
    s = jnp.where(valid[:, None], s, -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.where(valid[:, None], jnp.exp(s - lse[..., None]), 0.0)
    return jnp.einsum("thk,tkd->thd", p, kv[..., :512], precision="highest").astype(q_nope.dtype), lse
