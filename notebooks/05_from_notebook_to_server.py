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
# # From notebook to server
#
# A model that was changed in a notebook, saved, served by the real SGLang with `--attention-backend jax_mla`, asked,
# and compared token by token with the one in the notebook. Needs the `sglang` extra; runs on a CPU.

# %%
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from bridge.demo.server import serve
from jax_mla import KV_FP8_656
from jax_mla.nn import generate, load_hf, make_cache, save_hf
from jax_mla.recall import MODEL, tasks
from jax_mla.recall.tokenizer import decode, write_tokenizer
from jax_mla.recall.train import Stage, steps

jax.config.update("jax_platforms", "cpu")  # everything here runs on any machine
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"

# %% [markdown]
# ## Change something
#
# Two steps of sparse training on short texts, with a tenth of the usual learning rate: enough that no other
# checkpoint has these weights, so that what answers below can only be them.

# %%
model = load_hf(MODEL, dtype=jnp.float32, progress=False)
taken = list(steps(model, Stage("sparse", 256, 4, 2, 5e-5), jax.random.key(0)))
print(f"after 2 steps: {float(taken[-1]['answers']):.1%} of answers right, KL {float(taken[-1]['kl']):.2f}")

# %% [markdown]
# ## Save
#
# `save_hf` writes what `transformers` and SGLang load: config.json and safetensors under Hugging Face's names. The
# tokenizer is a byte's value.

# %%
folder = Path(tempfile.mkdtemp()) / "recall"
save_hf(model, folder, progress=False)
write_tokenizer(folder)
for file in sorted(folder.iterdir()):
    print(f"{file.name:24}{file.stat().st_size:>10,} bytes")

# %% [markdown]
# ## Serve
#
# `serve` starts `python -m sglang.launch_server --attention-backend jax_mla` on a free port of this machine and stops
# it afterwards. The KV cache is FlashMLA's 656 bytes a token. We ask for one text of 64 questions: SGLang's own API
# also returns the likeliest token, and its log-probability, at every position of the prompt.

# %%
LENGTH, QUESTIONS = 1024, 64
text = tasks.recall(jax.random.key(11), LENGTH, last=QUESTIONS)
tokens = np.asarray(text.tokens)
answers = np.flatnonzero(text.answers)
start = int(answers[0]) - 1

options = ("--kv-cache-dtype", "fp8_e4m3", "--dtype", "bfloat16", "--context-length", "4096")
options += ("--max-total-tokens", "8192", "--max-running-requests", "4", "--sleep-on-idle")
with serve(folder, *options, name="notebook") as server:
    told = server.post(
        "/generate",
        {
            "input_ids": tokens.tolist(),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": start,
            "top_logprobs_num": 1,
        },
    )["meta_info"]
    question = decode(tokens[: answers[0]])
    spoken = server.post("/generate", {"text": question, "sampling_params": {"temperature": 0, "max_new_tokens": 5}})

served_logprob = np.array([x[0] for x in told["input_token_logprobs"][1:]])
served_token = np.array([x[0][1] for x in told["input_top_logprobs"][1:]])
goes_on = decode(tokens[answers[0] : answers[0] + 5])
print(f"prompt ... {question[-12:]}  →  {spoken['text']!r}; the text goes on {goes_on!r}")

# %% [markdown]
# ## Compare
#
# The same weights in this notebook, with what serving rounds: bf16 weights, latents read back from 656-byte rows, FP8
# in the indexer after its Hadamard rotation.

# %%
how = dict(quantize_indexer=True, hadamard=True, kv_layout=KV_FP8_656)
same = load_hf(folder, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, progress=False, **how)
logits = nnx.jit(lambda m, x: m(x[None], attention="sparse"))(same, text.tokens)[0]
logprob = np.asarray(jax.nn.log_softmax(logits))
ours_token = logprob.argmax(-1)[start:-1]
ours_logprob = np.take_along_axis(logprob[start:-1], tokens[start + 1 :, None], 1)[:, 0]

at = answers - 1 - start
right = {"SGLang": served_token, "notebook": ours_token}
share = {name: np.mean(x[at] == tokens[answers]) for name, x in right.items()}
apart = np.abs(served_logprob - ours_logprob)
print(", ".join(f"{name} answers {x:.1%}" for name, x in share.items()))
print(f"|Δ log-probability| of {len(apart)} tokens: mean {apart.mean():.4f}, of the answers {apart[at].mean():.4f}")

fig, ax = plt.subplots(figsize=(5.4, 4.6), layout="constrained", dpi=100)
low = min(served_logprob.min(), ours_logprob.min()) - 0.3
ax.plot([low, 0], [low, 0], color="0.8", lw=1, zorder=0)
other = np.setdiff1d(np.arange(len(apart)), at)
ax.plot(ours_logprob[other], served_logprob[other], ".", color="0.55", ms=5, label="other tokens")
ax.plot(ours_logprob[at], served_logprob[at], "o", mfc="none", color=BLUE, ms=6, label="answers")
ax.set(xlabel="log-probability in the notebook", ylabel="log-probability from SGLang", xlim=(low, 0.2), ylim=(low, 0.2))
ax.set_title("One text, token by token")
ax.legend(loc="lower right")
plt.show()

assert share["SGLang"] >= 0.95 and share["notebook"] >= 0.95
assert apart.mean() < 0.05

# %% [markdown]
# ## Or without a server
#
# The ops that serve are the ones that `generate` runs: a prompt into paged pools, then token by token.

# %%
prompt = jnp.asarray(tokens[None, : answers[0]])
cache = make_cache(same, 1, LENGTH, kv_layout=KV_FP8_656)
new, cache = generate(same, prompt, jnp.array([prompt.shape[1]]), cache, max_new_tokens=5)
print(f"{int(cache.lengths[0])} tokens cached, {KV_FP8_656.row_bytes} bytes each and layer")
print(f"generated {decode(new[0].tolist())!r}")
assert decode(new[0].tolist())[0] == spoken["text"][0]
