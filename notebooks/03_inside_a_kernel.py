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
# # Inside a kernel
#
# From twenty lines of Pallas to the instructions of three cards, none of which is in this machine: XLA's ROCm and CUDA
# compilers run without a card, and what they make can be read. We write a small kernel, see what becomes of it, read
# the one that serves the same way, and end at the roofline, beside what an H200 measured.
#
# Needs the `aot` extra and the two compilers (`make setup` fetches both), and no GPU.

# %%
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter

from jax_mla import KV_BF16, cost, kv_layout, sparse_mla
from jax_mla import pallas_triton as pt
from jax_mla.aot import analysis
from jax_mla.aot.chips import CHIPS
from jax_mla.aot.compiler import inspect
from jax_mla.aot.flow import loops
from jax_mla.ops.sparse_mla.config import Config

jax.config.update("jax_platforms", "cpu")  # compiling for a card needs none
BLUE, ORANGE, PINK, GREEN, SKY, YELLOW = "#0072B2", "#D55E00", "#CC79A7", "#009E73", "#56B4E9", "#E69F00"

for chip in CHIPS.values():
    print(f"{chip.name:7} {chip.model:20} {chip.cores} cores, {chip.bytes_s / 1e12:.1f} TB/s, ", end="")
    print(f"bf16 {chip.flops_s['bf16'] / 1e12:,.0f} TFLOP/s; its FP8 is {chip.fp8}")

# %% [markdown]
# ## A kernel
#
# The indexer's score of one query against many keys: $I_s = \sum_h w_h\,\mathrm{ReLU}(q_h \cdot k_s)$. A **program**
# takes 64 keys. It is written for a whole tile at a time; which of its threads holds which number, what goes through
# shared memory and when is Triton's business, to which Pallas hands it.

# %%
HEADS, KEYS, COLUMNS = 64, 64, 128


def kernel(q_ref, w_ref, k_ref, score_ref):  # [64, 128], [64], [S, 128], [S]
    head, column = jnp.arange(HEADS), jnp.arange(COLUMNS)
    key = pt.program_id(0) * KEYS + jnp.arange(KEYS)
    q = pt.load(q_ref.at[head[:, None], column[None, :]])
    k = pt.load(k_ref.at[key[:, None], column[None, :]])
    s = pt.dot(q, k, trans_b=True)  # [64 heads, 64 keys], float32
    score_ref[key] = jnp.sum(jnp.maximum(s, 0.0) * w_ref[head][:, None], axis=0)


def scores(q, w, k, interpret=False, imprecise_fp8=False):
    out = jax.ShapeDtypeStruct(k.shape[:1], jnp.float32)
    grid = (k.shape[0] // KEYS,)
    how = dict(name="scores", grid=grid, num_warps=4, num_stages=1, interpret=interpret, imprecise_fp8=imprecise_fp8)
    return pt.kernel_call(kernel, (q, w, k), (out,), **how)[0]


# %% [markdown]
# **Interpreted**, it is a Python function that can be tested anywhere. That says the maths is right, and nothing about
# whether it compiles.

# %%
rng = np.random.default_rng(0)
q, w, k = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((64, 128), (64,), (256, 128)))
w = w.astype(jnp.float32)
expected = np.asarray(w) @ np.maximum(np.float64(q) @ np.float64(k).T, 0)
worst = np.abs(scores(q, w, k, interpret=True) - expected).max() / np.abs(expected).max()
print(f"largest difference from float64: {worst:.1e} of the largest score")
assert worst < 1e-6

# %% [markdown]
# **Lowered**, it is Triton IR: loads of tiles through pointers, one `tt.dot`, one reduction. This is what all cards
# get alike.


# %%
def arguments(dtype, keys=1 << 16):
    shapes = ((HEADS, COLUMNS), dtype), ((HEADS,), jnp.float32), ((keys, COLUMNS), dtype)
    return [jax.ShapeDtypeStruct(*x) for x in shapes]


_, ir = pt.triton_ir(scores, *arguments(jnp.bfloat16), for_target=CHIPS["gfx942"].target)["scores"]
for line in ir.splitlines():
    if any(word in line for word in ("tt.func", "tt.load", "tt.dot", "tt.reduce", "tt.store")):
        print(line.strip()[:118])

# %% [markdown]
# ## What the cards get
#
# **Compiled**, in a tenth of a second a card. The two kinds of operand take different matrix instructions, and each
# card has its own: MFMA on AMD, of one wave of 64 threads; HMMA of one warp of 32, or HGMMA and QGMMA of four, on
# NVIDIA. The name says the tile: `v_mfma_f32_32x32x16_fp8_fp8` multiplies 32×16 by 16×32.

# %%
compiled = {}
for chip in CHIPS.values():
    for name, dtype, how in (
        ("bf16", jnp.bfloat16, {}),
        ("fp8", chip.fp8.dtype, {}),
        ("fp8, 14-bit sums", chip.fp8.dtype, dict(imprecise_fp8=True)),
    ):
        if how and chip.name != "sm_90":
            continue

        def call(q, w, k, how=how):
            return scores(q, w, k, **how)

        [compiled[chip.name, name]] = inspect(call, *arguments(dtype), chip=chip)

print(f"{'':8}{'operands':22}{'registers':>9}{'shared':>8}{'all':>5}  matrix instructions")
for (chip, name), (launch, code) in compiled.items():
    matrix = {x: n for x, n in code.counts().items() if analysis.is_matrix(x)}
    text = ", ".join(f"{n} × {x}" for x, n in matrix.items())
    print(f"{chip:8}{name:22}{code.vgprs:9}{launch.shared_bytes:8}{len(code.instructions):5}  {text}")

# %% [markdown]
# Three things to read off. FP8 halves the products on AMD, where it has instructions of its own. Its bytes mean
# different numbers on gfx942 (e4m3fnuz) and gfx950 (e4m3fn). On Hopper Triton converts FP8 to float16, exactly, and
# multiplies that, unless it may add up as the FP8 tensor cores do, which keep some 14 bits.
#
# And one to check: the multiply-adds in the instructions must be the ones that the maths asks for. There are four waves
# or warps in a program.


# %%
def matrix_flops(code):
    return sum(analysis.matrix_flops(x.name) for x in code.instructions)


for (chip, name), (launch, code) in compiled.items():
    warps = int(np.prod(launch.threads)) // CHIPS[chip].warp
    assert warps == 4
    assert warps * matrix_flops(code) == 2 * HEADS * KEYS * COLUMNS, (chip, name)
matrix_names = {key: {x for x in code.counts() if analysis.is_matrix(x)} for key, (_, code) in compiled.items()}
assert matrix_names["gfx942", "fp8"] == {"v_mfma_f32_32x32x16_fp8_fp8"}
assert matrix_names["gfx950", "fp8"] == {"v_mfma_f32_32x32x64_f8f6f4"}
assert matrix_names["sm_90", "bf16"] == {"HGMMA.64x64x16.F32.BF16"}
print("multiply-adds of every version: those of the formula, to the last one")

# %% [markdown]
# ## What the other instructions are
#
# Matrix instructions are few. Most of the code gets numbers to them.

# %%
KINDS = {  # in the order of the picture; the first that fits
    "matrix": (analysis.is_matrix, BLUE),
    "global memory": (lambda x: x.startswith(("global_", "buffer_", "flat_", "LDG", "STG")), ORANGE),
    "shared memory": (lambda x: x.startswith(("ds_", "LDS", "STS")), YELLOW),
    "branches, waits": (lambda x: x.startswith(("s_waitcnt", "s_barrier", "s_nop", "s_cbranch", "s_branch")), PINK),
    "scalar": (lambda x: x.startswith(("s_", "U", "R2UR", "S2UR", "S2R")), SKY),
    "vector arithmetic": (lambda x: True, "0.75"),
}
WAITS = ("BAR", "BRA", "NOP", "EXIT", "BSSY", "BSYNC", "DEPBAR", "WARPSYNC", "LDGDEPBAR", "WARPGROUP", "SYNCS")


def kind(name):
    if name.startswith(WAITS):
        return "branches, waits"
    return next(k for k, (fits, _) in KINDS.items() if fits(name))


fig, ax = plt.subplots(figsize=(9.5, 3.6), layout="constrained", dpi=100)
labels = [f"{chip}  {name}" for chip, name in compiled]
left = np.zeros(len(compiled))
for k, (_, color) in KINDS.items():
    count = np.array([sum(kind(x.name) == k for x in code.instructions) for _, code in compiled.values()])
    ax.barh(labels, count, left=left, color=color, label=k, edgecolor="white", lw=0.5)
    left += count
ax.invert_yaxis()
ax.set(xlabel="instructions in the code of one program", title="The small kernel, by what its instructions do")
ax.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.45, -0.2), frameon=False)
plt.show()

# %% [markdown]
# ## The kernel that serves
#
# `sparse_mla` reads the slots of a block of keys, gathers their rows, multiplies, and keeps a running softmax; the loop
# over blocks is where its time goes. Here it is for a decode batch of 64 rows of 16 heads, 2048 selected tokens each,
# every instruction a mark at its place in the code, the loop shaded.

# %%
ROWS, TOPK, POOL = 64, 2048, 1 << 19


def attention(layout, heads=16, config=None):
    def call(*arrays):
        how = dict(layout=layout, softmax_scale=0.1352, implementation="pallas", config=config)
        return sparse_mla(*arrays, **how)

    queries = [jax.ShapeDtypeStruct((ROWS, heads, d), jnp.bfloat16) for d in (512, 64)]
    pool = jax.ShapeDtypeStruct((POOL, layout.row_elements), layout.dtype)
    return call, (*queries, pool, jax.ShapeDtypeStruct((ROWS, TOPK), jnp.int32))


def compile_attention(chip, layout, **how):
    call, shapes = attention(layout, **how)
    return next(x for x in inspect(call, *shapes, chip=chip) if x[0].name.startswith(f"sparse_mla_{layout.name}"))


fig, axes = plt.subplots(3, 1, figsize=(10.5, 7.2), layout="constrained", dpi=100)
order = list(KINDS)
for ax, chip in zip(axes, CHIPS.values(), strict=True):
    launch, code = compile_attention(chip, KV_BF16)
    body = max(loops(code.instructions), key=len)
    ax.axvspan(min(body), max(body) + 1, color="0.93", zorder=0)
    ax.text((min(body) + max(body)) / 2, -0.8, "loop", ha="center", va="bottom", color="0.35")
    for row, k in enumerate(order):
        at = [i for i, x in enumerate(code.instructions) if kind(x.name) == k]
        ax.vlines(at, row - 0.38, row + 0.38, color=KINDS[k][1] if k != "vector arithmetic" else "0.45", lw=0.7)
    ax.set_yticks(range(len(order)), order)
    ax.set(ylim=(len(order) - 0.4, -0.6), xlim=(0, len(code.instructions)))
    ax.set_title(
        f"{chip.name}: {code.vgprs} registers, {(code.shared_bytes + launch.shared_bytes) >> 10} KB shared, "
        f"grid {launch.grid}, spills {code.vector_spills}",
        loc="left",
        fontsize=10,
        pad=14,
    )
    assert code.vector_spills == 0
axes[-1].set_xlabel("instruction, in the order of the code")
plt.show()

# %% [markdown]
# The same count as above, now with the loop: instructions in it run once for each block of keys. The formula asks for
# $2\,(576 + 512)$ FLOPs a row, head and selected token.

# %%
asked = {}
for chip in CHIPS.values():
    launch, code = compile_attention(chip, KV_BF16)
    config = Config.of(ROWS, 16, TOPK, KV_BF16, chip.target)
    trips = pt.cdiv(pt.cdiv(TOPK, config.splits), config.keys)
    times = analysis.weights(code, trips, 1)
    of_warp = sum(n * analysis.matrix_flops(x.name) for n, x in zip(times, code.instructions, strict=True))
    warps = int(np.prod(launch.grid)) * int(np.prod(launch.threads)) // chip.warp
    needed = cost.sparse_mla(ROWS, 16, TOPK, ROWS * TOPK, KV_BF16.row_bytes, 2).flops
    print(f"{chip.name:7} {config.splits} parts of {trips} blocks of {config.keys} keys: ", end="")
    asked[chip.name] = of_warp * warps / needed
    print(f"{asked[chip.name]:.3f} of the FLOPs that the formula needs")
assert asked["sm_90"] == 1
assert asked["gfx942"] == asked["gfx950"] == (2 * 576 + 512) / (576 + 512)

# %% [markdown]
# Hopper multiplies what it has to. On AMD every score is computed twice: a tile of 16 heads by 32 keys is two MFMA
# tiles of 16 by 16, there are four waves, and two of them do what the other two do. (512 columns of output are enough
# for all four.) Such a thing shows in no source and fails no test. It costs nothing where memory is the longer time;
# the last cell says where that is.

# %% [markdown]
# ## Tiles, registers, and what is left of them
#
# A larger tile of heads reads each key for more queries. It also holds its result, heads × 512 numbers of float32, in
# registers, and there are 512 a lane on AMD for all the waves that are to hide each other's waiting. Every choice of
# `Config` can be compiled and looked at before a card is asked:

# %%
chip, tried = CHIPS["gfx942"], {}
for heads in (16, 32, 64):
    for keys in (16, 32, 64):
        launch, code = compile_attention(chip, KV_BF16, heads=64, config=Config(heads=heads, keys=keys))
        tried[heads, keys] = code, launch, analysis.resident_warps(code, launch, chip)

fig, axes = plt.subplots(1, 3, figsize=(10.5, 3.3), sharex=True, layout="constrained", dpi=100)
for keys, color, mark in ((16, BLUE, "o-"), (32, ORANGE, "s--"), (64, PINK, "^:")):
    each = [tried[heads, keys] for heads in (16, 32, 64)]
    axes[0].plot([16, 32, 64], [code.vgprs for code, _, _ in each], mark, color=color, label=f"{keys} keys")
    axes[1].plot([16, 32, 64], [code.vector_spills for code, _, _ in each], mark, color=color)
    axes[2].plot([16, 32, 64], [waves for _, _, waves in each], mark, color=color)
for ax, title in zip(axes, ("registers of a lane", "of them spilled to memory", "waves on a SIMD"), strict=True):
    ax.set(title=title, xlabel="heads of a tile", xticks=[16, 32, 64])
    ax.set_ylim(bottom=0)
    ax.grid(axis="y", color="0.92")
axes[0].set_ylim(0, 580)
axes[0].axhline(512, color="0.5", lw=0.8)
axes[0].text(40, 528, "all there are", ha="center", color="0.4")
axes[0].legend(loc="lower right")
fig.suptitle("gfx942, sparse_mla in bf16, 4 waves a program, by tile")
plt.show()

assert [tried[16, keys][2] for keys in (16, 32, 64)] == [2, 1, 1]
assert all(code.vector_spills == 0 for (_, keys), (code, _, _) in tried.items() if keys == 16)
assert tried[64, 64][0].vector_spills > 100

# %% [markdown]
# With 64 keys a tile does not fit whatever its heads; with 16 it always does, and with 16 heads two waves share a SIMD,
# one multiplying while the other waits. Which of those that fit is fastest, only a card can say.

# %% [markdown]
# ## Roofline
#
# An op has to move bytes and to multiply; at a card's peaks it takes the longer of the two times. `jax_mla.cost` counts
# what the contract of each op demands, whatever implements it. Decode reads a row of the cache for 16 heads: some 30
# FLOPs a byte, far left of the ridge. The points are what an H200 measured for our kernels, kept in `bench/results`
# with their commit; the faint lines are the data sheets of the two cards that we have not run on.

# %%
kept = [json.loads(line) for line in Path("../bench/results/nvidia-h200.jsonl").read_text().splitlines()]
shown = {
    "sparse_mla": (BLUE, "o"),
    "index_logits_paged": (ORANGE, "s"),
    "index_logits_ragged": (PINK, "^"),
}
ours = [r for r in kept if r["op"] in shown and r["implementation"] == "pallas" and r["flops"]]
print(f"{len(ours)} rows of {kept[0]['device']}, commits {', '.join(sorted({r['commit'][:7] for r in ours}))}")

fig, ax = plt.subplots(figsize=(9.5, 5), layout="constrained", dpi=100)
intensity = np.logspace(0, 4.5, 200)
for chip, style in zip(CHIPS.values(), ("--", ":", "-"), strict=True):
    for operand, width in (("bf16", 1.0), ("fp8", 2.0)):
        y = np.minimum(intensity * chip.bytes_s, chip.flops_s[operand]) / 1e12
        is_h200 = chip.name == "sm_90"
        color = "0.25" if is_h200 else "0.7"
        label = f"{chip.model}, {operand}, data sheet"
        ax.plot(intensity, y, style, color=color, lw=width, label=label, zorder=2 if is_h200 else 1)
for op, (color, mark) in shown.items():
    rows = [r for r in ours if r["op"] == op]
    x = [r["flops"] / r["bytes"] for r in rows]
    y = [r["flops"] / r["time"]["median_us"] / 1e6 for r in rows]
    ax.plot(x, y, mark, color=color, mec="white", ms=8, label=f"{op}, measured on an H200", zorder=3)
ax.set_xscale("log")
ax.set_yscale("log")
for axis in (ax.xaxis, ax.yaxis):
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
ax.set(xlabel="FLOPs that the op needs for each byte that it needs", ylabel="TFLOP/s", xlim=(1, 3e4), ylim=(0.3, 8e3))
ax.grid(color="0.93")
ax.legend(fontsize=8.5, loc="lower right")
ax.set_title("What the ops ask for, and what they got")
plt.show()

# %% [markdown]
# Points low on the left are single requests: a batch of one fills a fraction of the card, and no roofline knows that.
# What the code itself allows is a floor between the two: `python -m jax_mla.aot` prints for every kernel how long its
# instructions take to issue beside how long its bytes take to come.

# %%
print(f"{'':8}{'layout':9}{'issue':>8}{'memory':>8}   µs for {ROWS} rows of 16 heads, top-k {TOPK}, at best")
longer = {}
for chip in CHIPS.values():
    for name in ("bf16", "fp8_576"):
        layout = kv_layout(name, chip.fp8.name)
        launch, code = compile_attention(chip, layout)
        config = Config.of(ROWS, 16, TOPK, layout, chip.target)
        trips = pt.cdiv(pt.cdiv(TOPK, config.splits), config.keys), 1
        work = cost.sparse_mla(ROWS, 16, TOPK, ROWS * TOPK, layout.row_bytes, 2)
        floor = analysis.estimate(code, launch, chip, work, "bf16", trips)
        print(f"{chip.name:8}{name:9}{floor.issue_us:8.1f}{floor.memory_us:8.1f}")
        longer[chip.name, name] = "issue" if floor.issue_us > floor.memory_us else "memory"
assert {x for x, what in longer.items() if what == "issue"} == {("gfx942", "fp8_576"), ("gfx950", "fp8_576")}

# %% [markdown]
# In bf16 memory is the longer time on every card, the double scores of AMD included. In FP8 half the bytes come, and
# on AMD each code is unpacked to float16 by vector instructions: there the code is what to work on.
