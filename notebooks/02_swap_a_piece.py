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
# # Swap a piece
#
# The question that DSA leaves open is who selects. Here is a small model that has learned to (`jax_mla.recall`:
# DeepSeek-V3.2's architecture, two layers, trained on texts in which one record among hundreds answers a question), and
# an indexer of your own in ten lines: through the tests that every selector must pass, through the trained model, and
# past a clock.

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from jax_mla.nn import NotASelector, check_selector, load_hf, with_selectors
from jax_mla.nn.indexer import angles, most_recent, random_tokens
from jax_mla.nn.layers import rope
from jax_mla.recall import MODEL, tasks
from jax_mla.recall.evaluate import accuracy
from jax_mla.recall.model import with_topk
from jax_mla.recall.tokenizer import decode

jax.config.update("jax_platforms", "cpu")  # everything here runs on any machine
BLUE, ORANGE, PINK, GREEN = "#0072B2", "#D55E00", "#CC79A7", "#009E73"

model = load_hf(MODEL, dtype=jnp.float32, progress=False)
config = model.config
parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
print(f"{parameters:,} parameters, {config.num_hidden_layers} layers, {config.index_n_heads} index heads")

# %% [markdown]
# ## What it does
#
# A text is made of records, `;Qk7` (Qk is 7), and questions, `?Qk7`. The model has to write the last character of each
# question; only one record of the text says what it is.

# %%
LENGTH, QUESTIONS = 1024, 64
text = tasks.recall(jax.random.key(1), LENGTH, last=QUESTIONS)
print(decode(text.tokens)[:60], "...", decode(text.tokens)[-24:])

logits = nnx.jit(lambda m, ids: m(ids, attention="sparse"))(model, text.tokens[None])[0]
right = np.asarray((logits[:-1].argmax(-1) == text.tokens[1:]) & text.answers[1:])
print(f"top {config.index_topk} of up to {LENGTH} tokens: {right.sum()} of {text.answers.sum()} questions answered")

# %% [markdown]
# ## What its indexer looks at
#
# The second layer's scores $I_{t,s}$ for the rows that must answer, where a token of a record is selected. One ring for
# each row, around the digit of the record that it asks for.

# %%
layer = model.layers[1]


def scores_of(model, ids):
    """The second layer's index scores ``[T, T]``."""
    x = model.layers[0](model.embed_tokens(ids[None]), "sparse").out
    x = model.layers[1].input_layernorm(x)
    latent = model.layers[1].self_attn.project(x, angles(config, ids.shape[0]))[0]
    positions = jnp.arange(ids.shape[0], dtype=jnp.int32)
    return model.layers[1].self_attn.indexer(x, latent, positions)(0, ids.shape[0])[0]


scores = np.asarray(nnx.jit(scores_of)(model, text.tokens))
ids = np.asarray(text.tokens)
asking = np.flatnonzero(text.answers) - 1  # the row whose next token is the answer
record = {bytes(ids[i + 1 : i + 3].astype(np.uint8)): i + 3 for i in range(1, LENGTH - 3, 4) if ids[i] == ord(";")}
wanted = np.array([record[bytes(ids[t - 1 : t + 1].astype(np.uint8))] for t in asking])

shown = scores[asking]
fig, ax = plt.subplots(figsize=(11, 4.6), layout="constrained", dpi=100)
seen = np.where(np.arange(LENGTH) <= asking[:, None], shown, -np.inf)
least = np.sort(seen, axis=1)[:, -config.index_topk, None]  # what the last selected token scores
slots = np.where(seen >= least, seen, -np.inf)[:, 1 : 1 + (LENGTH - 1) // 4 * 4].reshape(QUESTIONS, -1, 4).max(2)
where = dict(extent=(1, 1 + 4 * slots.shape[1], QUESTIONS - 0.5, -0.5), aspect="auto", interpolation="nearest")
image = ax.imshow(np.where(np.isfinite(slots), slots, np.nan), cmap="cividis_r", **where)
ax.set_facecolor("0.95")
ax.plot(wanted, np.arange(QUESTIONS), "o", mfc="none", mec=ORANGE, mew=1.4, ms=8, label="the digit that answers")
ax.plot(asking, np.arange(QUESTIONS), "-", color="0.3", lw=1, label="the row itself")
ax.set(xlabel="position of the key $s$", ylabel="question", title="What the rows that answer select, second layer")
ax.legend(loc="lower right")
fig.colorbar(image, label="index score of a record's best token; grey: not selected", pad=0.01)
plt.show()

rank = np.array([(row[: t + 1] > row[w]).sum() for row, t, w in zip(shown, asking, wanted, strict=True)])
print(f"rank of the wanted token among all that a row may see: median {np.median(rank):.0f}, worst {rank.max()}")

# %% [markdown]
# ## Another indexer, in ten lines
#
# A *selector* is called with the layer's hidden states, the query latent and the positions, and gives scores of some
# rows. This one shares the trained projections and changes one thing: the best head alone decides, instead of the sum
# over heads.


# %%
class BestHead(nnx.Module):
    def __init__(self, indexer):
        self.of = indexer

    def __call__(self, hidden, q_latent, positions):
        turn = angles(self.of.config, hidden.shape[1])[positions]
        k = rope(self.of.k_norm(self.of.wk(hidden))[:, :, None], turn, False)[:, :, 0]
        q, w = rope(self.of.queries(q_latent), turn, False), self.of.weights_proj(hidden)

        def rows(start, size):
            q_rows, w_rows = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in (q, w))
            return (jax.nn.relu(jnp.einsum("bthd,bsd->bths", q_rows, k)) * w_rows[..., None]).max(2)

        return rows


# %% [markdown]
# And one that keeps 4 bits of each number of a key instead of FP8's 8, by a function instead of a module. It wraps the
# indexer's own `wk`, so that everything after it sees rounded keys.


# %%
def four_bits(indexer):
    class Rounded(nnx.Module):
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, x):
            y = self.inner(x)
            step = jnp.abs(y).max(-1, keepdims=True) / 7
            return jnp.round(y / step) * step

    indexer.wk = Rounded(indexer.wk)
    return indexer


# %% [markdown]
# ## The same tests
#
# `check_selector` tries what every selector must do: choose each position once, from no row's future, whatever the
# block of rows, and without a look at the other request. A selector that cheats does not get far:

# %%
own = lambda indexer: indexer  # noqa: E731
for make in (own, BestHead, four_bits):
    check_selector(make(with_selectors(model, own).layers[1].self_attn.indexer), config)
print("the indexer, BestHead and four_bits pass")


def cheats(hidden, q_latent, positions):
    """Knows how the text ends."""
    return jnp.einsum("btd,bsd->bts", hidden + hidden[:, -1:], hidden)


try:
    check_selector(cheats, config)
except NotASelector as error:
    print(f"cheats: {error}")
else:
    raise AssertionError("expected NotASelector")

# %% [markdown]
# ## The trained model
#
# The share of questions that the model answers at 1,024 tokens, by how many tokens each row may read, with every
# layer's indexer replaced.

# %%
KS = (8, 16, 64)
rows = {
    "its own indexer": (own, dict(color=BLUE, marker="o", lw=2)),
    "4-bit keys": (four_bits, dict(color=GREEN, marker="s", ls="--")),
    "best head alone": (BestHead, dict(color=ORANGE, marker="^", ls="-.")),
    "most recent": (lambda _: most_recent, dict(color=PINK, marker="v", ls=":")),
    "random": (lambda _: random_tokens(0), dict(color="0.5", marker="x", ls=":")),
}
answered = {}
for name, (make, _) in rows.items():
    swapped = with_selectors(model, make)
    answered[name] = [accuracy(with_topk(swapped, k), LENGTH, texts=2, questions=QUESTIONS) for k in KS]
    print(f"{name:16}" + "".join(f"{100 * x:7.1f}" for x in answered[name]) + f"  % at top {', '.join(map(str, KS))}")
dense = accuracy(model, LENGTH, "dense", texts=2, questions=QUESTIONS)
print(f"{'dense':16}{100 * dense:7.1f}")

fig, ax = plt.subplots(figsize=(7.5, 3.8), layout="constrained", dpi=100)
for name, (_, style) in rows.items():
    ax.plot(KS, answered[name], label=name, ms=6, **style)
ax.axhline(dense, color="0.3", lw=0.8, label="dense attention")
ax.axhline(0.1, color="0.8", lw=0.8)
ax.text(KS[0], 0.115, "a guess", color="0.5")
ax.set_xscale("log", base=2)
ax.set_xticks(KS, map(str, KS))
ax.set(xlabel=f"tokens that each row reads, of up to {LENGTH}", ylabel="questions answered", ylim=(0, 1.04))
ax.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

assert dense >= 0.97 and answered["its own indexer"][-1] >= dense - 0.02
assert answered["best head alone"][-1] < answered["its own indexer"][-1]
assert answered["most recent"][-1] < 0.2 and answered["random"][-1] < 0.2

# %% [markdown]
# ## The clock
#
# Scores of 64 rows against 8,192 keys on this machine, compiled; and what a cached token costs. Ratios, since machines
# differ; `python -m bench kernels` times the ops that serve on a GPU.

# %%
keys = jax.random.split(jax.random.key(0), 2)
hidden = jax.random.normal(keys[0], (1, 8192, config.hidden_size))
latent = jax.random.normal(keys[1], (1, 8192, config.q_lora_rank))
positions = jnp.arange(8192, dtype=jnp.int32)


def seconds(make):
    selector = make(with_selectors(model, own).layers[1].self_attn.indexer)
    graph, state = nnx.split(selector)
    run = jax.jit(lambda state, *x: nnx.merge(graph, state)(*x)(8128, 64))
    jax.block_until_ready(run(state, hidden, latent, positions))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(run(state, hidden, latent, positions))
        times.append(time.perf_counter() - start)
    return np.median(times)


base = seconds(own)
timed = ("its own indexer", own, 132), ("4-bit keys", four_bits, 68), ("best head alone", BestHead, 132)
for name, make, size in timed:
    print(f"{name:16} {seconds(make) / base:5.2f} times the indexer's time, {size} bytes a cached token")
