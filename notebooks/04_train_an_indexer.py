# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train an indexer
#
# DeepSeek-V3.2 came out of a model with dense attention in two stages. **Warm-up**: everything stands still but the
# indexers, which learn what dense attention looks at,
#
# $$\mathcal{L}_t = D_{KL}\Big(p_t \,\Big\|\, \mathrm{softmax}(I_{t,:})\Big), \qquad
#   p_t = \frac{\sum_h a_{t,h}}{\lVert \sum_h a_{t,h} \rVert_1}$$
#
# with $a_{t,h}$ the attention weights of head $h$. **Sparse**: the model reads only what is selected; the indexers go
# on learning, over the selected tokens alone, and the language model learns to live with them.
#
# Here we throw away the indexers of a trained model and do both again, in a minute or two on a CPU.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from jax_mla.nn import load_hf
from jax_mla.nn.attention import masked_softmax
from jax_mla.nn.indexer import angles
from jax_mla.nn.layers import product
from jax_mla.recall import MODEL, tasks
from jax_mla.recall.evaluate import accuracy
from jax_mla.recall.model import create, with_topk
from jax_mla.recall.train import Stage, steps

jax.config.update("jax_platforms", "cpu")  # everything here runs on any machine
BLUE, ORANGE, PINK, GREEN = "#0072B2", "#D55E00", "#CC79A7", "#009E73"

trained = load_hf(MODEL, dtype=jnp.float32, progress=False)
model = load_hf(MODEL, dtype=jnp.float32, progress=False)
for layer, fresh in zip(model.layers, create(trained.config, seed=7).layers, strict=True):
    layer.self_attn.indexer = fresh.self_attn.indexer  # random again

# %% [markdown]
# ## What it has to learn
#
# Attention of the second layer, summed over heads, for the rows of a text that must answer, beside what the random
# indexer makes of them.

# %%
LENGTH, QUESTIONS, TOPK = 512, 32, 16
text = tasks.recall(jax.random.key(3), LENGTH, last=QUESTIONS)
asking = np.flatnonzero(text.answers) - 1


def looked_at(model, ids):
    """Of the second layer: attention summed over heads and made to sum to 1, and the softmax of index scores."""
    config, mla = model.config, model.layers[1].self_attn
    x = model.layers[0](model.embed_tokens(ids[None]), "dense").out
    x = model.layers[1].input_layernorm(x)
    q_latent, (q_nope, q_rope), (latent, k_rope) = mla.project(x, angles(config, LENGTH))
    k_nope = mla.kv_b_proj(latent).reshape(1, LENGTH, config.num_attention_heads, -1)[..., : config.qk_nope_head_dim]
    s = product("bthd,bshd->bhts", q_nope, k_nope) + product("bthd,bsd->bhts", q_rope, k_rope)
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    attention = masked_softmax(s * config.softmax_scale, causal).mean(1)[0]
    scores = mla.indexer(x, q_latent, jnp.arange(LENGTH, dtype=jnp.int32))(0, LENGTH)[0]
    return attention, masked_softmax(scores, causal)


look = nnx.jit(looked_at)
attention, before = (np.asarray(x) for x in look(model, text.tokens))

# %% [markdown]
# ## Warm-up
#
# `with_indexer_kl=True` gives each layer's divergence beside the logits. Its gradient reaches the indexers and nothing
# else, so one optimiser over all parameters trains only them.

# %%
curves = []


def run(kind, length, batch, count, rate):
    for figures in steps(model, Stage(kind, length, batch, count, rate), jax.random.key(len(curves))):
        curves.append({"kind": kind} | {name: float(x) for name, x in figures.items()})
    print(f"{kind}: after {count} steps, KL {curves[-1]['kl']:.2f}, answers {curves[-1]['answers']:.1%}")


def answered(model, attention="sparse"):
    return accuracy(with_topk(model, TOPK), LENGTH, attention, texts=4, questions=QUESTIONS)


table = {"random indexers": answered(model)}
run("warmup", 256, 4, 90, 3e-3)
table["after the warm-up"] = answered(model)
_, warm = (np.asarray(x) for x in look(model, text.tokens))

# %% [markdown]
# ## Sparse stage
#
# From here on attention reads what the indexers select, 64 of up to 512 tokens.

# %%
run("sparse", 512, 2, 20, 5e-4)
table["after the sparse stage"] = answered(model)
_, sparse = (np.asarray(x) for x in look(model, text.tokens))
table["the model as it came"] = answered(trained)
table["dense attention"] = answered(trained, "dense")
for name, x in table.items():
    print(f"{name:24}{x:7.1%} of questions at {LENGTH} tokens, top {TOPK}")

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained", dpi=100)
kl = np.array([c["kl"] for c in curves])
number = np.arange(len(kl))
for kind, color, label in (
    ("warmup", BLUE, "warm-up, over all tokens"),
    ("sparse", ORANGE, "sparse, over the selected"),
):
    at = np.array([c["kind"] == kind for c in curves])
    left.plot(number[at], kl[at], color=color, label=label)
left.set(xlabel="step", ylabel="KL, both layers together", title="The indexers' loss", ylim=(0, None))
left.legend()
names = list(table)
right.barh(names, [table[n] for n in names], color=["0.7", BLUE, ORANGE, GREEN, "0.3"])
for y, n in enumerate(names):
    right.text(0.01, y, f"{table[n]:.0%}", va="center", color="black", bbox=dict(fc="white", ec="none", pad=1.5))
right.invert_yaxis()
right.set(xlim=(0, 1.02), title=f"Questions answered, {LENGTH} tokens, top {TOPK}")
right.xaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
plt.show()

# %% [markdown]
# ## Recall curves
#
# How much of dense attention's weight falls on the k tokens that the indexer scores highest: mean over the rows that
# answer, second layer. The ceiling takes the k that attention itself weighs most.

# %%
KS = [1, 2, 4, 8, 16, 32, 64, 128]


def kept(scores):
    order = np.argsort(-scores[asking], axis=1, kind="stable")
    weights = np.take_along_axis(attention[asking], order, axis=1)
    return weights.cumsum(1)[:, np.array(KS) - 1].mean(0)


lines = {
    "attention's own (ceiling)": (attention, dict(color="0.4", ls=":", marker="s")),
    "after the sparse stage": (sparse, dict(color=ORANGE, marker="o", lw=2)),
    "after the warm-up": (warm, dict(color=BLUE, marker="^", ls="--")),
    "random indexer": (before, dict(color=PINK, marker="x", ls="-.")),
}
fig, ax = plt.subplots(figsize=(8.5, 3.8), layout="constrained", dpi=100)
for name, (scores, style) in lines.items():
    ax.plot(KS, kept(scores), label=name, ms=5, **style)
ax.set_xscale("log", base=2)
ax.set_xticks(KS, map(str, KS))
ax.set(xlabel="k, tokens read by each row", ylabel="attention kept", ylim=(0, 1.03))
ax.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
ax.grid(axis="y", color="0.92")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

at = KS.index(TOPK)
print(f"top {TOPK}: " + ", ".join(f"{name} keeps {kept(scores)[at]:.0%}" for name, (scores, _) in lines.items()))
assert kept(before)[at] < 0.5 * kept(warm)[at]
assert kept(warm)[at] > 0.5 * kept(attention)[at]
assert table["random indexers"] < 0.3 and table["after the sparse stage"] > 0.8
assert curves[89]["kl"] < 0.5 * curves[0]["kl"]
