"""Every kernel, lowered for cards that this machine does not have; and what stands guard over that lowering."""

import math
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

import jax_mla
from jax_mla import (
    E4M3FN,
    E4M3FNUZ,
    KV_BF16,
    KV_FP8_576,
    KV_FP8_656,
    IndexLayout,
    index_logits_paged,
    index_logits_ragged,
    index_query,
    index_write,
    kv_layout,
    kv_write,
    quantize,
    select,
    sparse_mla,
    topk_decode,
    topk_prefill,
)
from jax_mla.ops.index_logits_paged.config import Config as PagedConfig
from jax_mla.ops.index_logits_ragged.config import Config as RaggedConfig
from jax_mla.ops.sparse_mla.config import Config as SparseConfig
from jax_mla.pallas_triton import GFX942, GFX950, H200, KERNEL_TARGET, MoreThanKernels, kernels_of, lower, triton_ir

FN_TARGETS = [GFX950, H200]
TARGETS = {E4M3FN: FN_TARGETS, E4M3FNUZ: [GFX942], None: [GFX942, *FN_TARGETS]}
"""Each format on the cards that have it; what has no FP8 in it on all."""

CASES = {}


def case(name, fp8, f, /, *args, kernels, alias=None, **static):
    """``f(*args)`` on every target of ``fp8``: its ``kernels`` by name, and the input that is its output, if any."""
    for target in TARGETS[fp8]:
        CASES[f"{name}-{fp8 or ''}-{target.kind}"] = (f, args, static, kernels, alias, target)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def u8(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.uint8)


def f8(fp8, *shape):
    return jax.ShapeDtypeStruct(shape, fp8.dtype)


def select_in_prefill(logits, lengths, starts, table, **static):
    return select(logits, lengths, starts=starts, table=table, **static)


def select_in_decode(logits, lengths, table, table_rows, **static):
    return select(logits, lengths, table=table, table_rows=table_rows, **static)


def sparse_mla_with_scale(q_nope, q_rope, pool, slots, kv_scale, **static):
    return sparse_mla(q_nope, q_rope, pool, slots, kv_scale=kv_scale, **static)


INDEX_LAYOUTS = [
    (fp8, IndexLayout(page_size, fp8, preshuffle))
    for fp8 in (E4M3FN, E4M3FNUZ)
    for page_size, preshuffle in ((1, False), (16, False), (64, False), (16, True), (64, True))
]
KV_LAYOUTS = [(None, KV_BF16), (E4M3FN, KV_FP8_656), (E4M3FN, KV_FP8_576), (E4M3FNUZ, kv_layout("fp8_576", "e4m3fnuz"))]
ANGLES = f32(163840, 64), i32(64)

for fp8 in (E4M3FN, E4M3FNUZ):
    for dtype in (bf16, f32):
        for scale in ("fp32", "ue8m0"):
            for block, kernel in ((128, "quantize"), (None, "quantize_tensor")):
                static = dict(fp8=fp8, block=block, scale=scale)
                name = f"quantize-{dtype.__name__}-{scale}-{block}"
                case(name, fp8, quantize, dtype(100, 512), kernels=[kernel], **static)
    for heads in (8, 16, 64, 128):
        for hadamard in (False, True):
            static = dict(fp8=fp8, interleaved=hadamard, hadamard=hadamard)
            args = bf16(64, heads, 128), f32(64, heads), *ANGLES
            case(f"index_query-{heads}-{hadamard}", fp8, index_query, *args, kernels=["index_query"], **static)
        args = f8(fp8, 100, heads, 128), f32(100, heads), f8(fp8, 5000, 128), f32(5000), i32(100), i32(100)
        case(f"index_logits_ragged-{heads}", fp8, index_logits_ragged, *args, kernels=["index_logits_ragged"])

for fp8, layout in INDEX_LAYOUTS:
    at = f"{layout.page_size}-{layout.preshuffle}"
    pages = u8(8192 // layout.page_size, layout.page_bytes)
    for hadamard in (False, True):
        args = pages, i32(64), bf16(64, 128), f32(128), f32(128), *ANGLES
        static = dict(layout=layout, interleaved=hadamard, hadamard=hadamard)
        case(f"index_write-{at}-{hadamard}", fp8, index_write, *args, kernels=["index_write"], alias=6, **static)
    for heads, next_n in ((8, 1), (16, 2), (64, 1), (64, 4), (128, 3)):
        args = f8(fp8, 4 * next_n, heads, 128), f32(4 * next_n, heads), pages, i32(6, 4096), i32(4), i32(4)
        static = dict(layout=layout, max_len=4000, next_n=next_n)
        name = f"index_logits_paged-{at}-{heads}-{next_n}"
        case(name, fp8, index_logits_paged, *args, kernels=["index_logits_paged"], **static)

for k in (64, 512, 2048):
    for columns, kernels in ((40, ["select"]), (4096, ["select"]), (100_000, ["select_some", "select"])):
        case(f"select-{k}-{columns}", None, select, f32(9, columns), i32(9), kernels=kernels, k=k)
    logits, lengths = f32(9, 4096), i32(9)
    case(f"select-{k}-prefill", None, select_in_prefill, logits, lengths, i32(9), i32(4096), kernels=["select"], k=k)
    case(f"select-{k}-decode", None, select_in_decode, logits, lengths, i32(5, 8192), i32(9), kernels=["select"], k=k)

for fp8, layout in KV_LAYOUTS:
    pool = jax.ShapeDtypeStruct((4096, layout.row_elements), layout.dtype)
    kernel = f"kv_write_{layout.name}"
    for dtype in (bf16, f32):
        args = pool, i32(65), dtype(65, 512), dtype(65, 64)
        case(f"{kernel}-{dtype.__name__}", fp8, kv_write, *args, kernels=[kernel], alias=4, layout=layout)
    kernel = f"sparse_mla_{layout.name}"
    for heads in (8, 16, 64, 128):
        for k in (512, 2048):
            args = bf16(3, heads, 512), bf16(3, heads, 64), pool, i32(3, k)
            for splits in (1, 8):
                static = dict(layout=layout, softmax_scale=0.1352, config=SparseConfig(splits=splits))
                kernels = [kernel] if splits == 1 else [kernel, "sparse_mla_merge"]
                case(f"{kernel}-{heads}-{k}-{splits}", fp8, sparse_mla, *args, kernels=kernels, **static)
    static = dict(layout=layout, softmax_scale=0.1352)
    args = bf16(3, 128, 512), bf16(3, 128, 64), pool, i32(3, 64)
    wide = SparseConfig(heads=64, keys=64)
    case(f"{kernel}-wide-tiles", fp8, sparse_mla, *args, kernels=[kernel], **static, config=wide)
    if layout.scaled:
        one = SparseConfig()
        case(f"{kernel}-scale", fp8, sparse_mla_with_scale, *args, f32(), kernels=[kernel], **static, config=one)


@pytest.mark.parametrize("f, args, static, kernels, alias, target", CASES.values(), ids=CASES)
def test_lowers(f, args, static, kernels, alias, target):
    stablehlo = lower(lambda *x: f(*x, **static, implementation="pallas"), *args, for_target=target)
    calls = [line for line in stablehlo.splitlines() if KERNEL_TARGET in line]
    assert [re.findall(r'\bname = "(\w+)"', call)[-1] for call in calls] == kernels
    aliases = re.findall(r"output_operand_alias<output_tuple_indices = \[\], operand_index = (\d+)", stablehlo)
    assert aliases == ([] if alias is None else [str(alias)])


@pytest.mark.parametrize("target", [GFX942, GFX950, H200], ids=lambda t: t.kind)
def test_kernels_are_what_runs_on_a_card_if_nothing_is_asked_for(target):
    fp8 = E4M3FNUZ if target == GFX942 else E4M3FN
    layout = IndexLayout(64, fp8)
    pages, q8 = u8(128, layout.page_bytes), f8(fp8, 12, 64, 128)
    decode = lambda *x: topk_decode(*x, k=2048, layout=layout, max_len=4096, next_n=2)  # noqa: E731
    text = lower(decode, q8, f32(12, 64), pages, i32(8, 8192), i32(6), i32(6), for_target=target)
    assert re.findall(r'\bname = "(\w+)", num_stages', text) == ["index_logits_paged", "select"]
    prefill = lambda *x: topk_prefill(*x, k=2048, layout=layout, logits_bytes=4 * 5000 * 5)  # noqa: E731
    text = lower(prefill, q8, f32(12, 64), pages, i32(5000), i32(12), i32(12), for_target=target)
    assert re.findall(r'\bname = "(\w+)", num_stages', text) == ["index_logits_ragged", "select"]


@pytest.mark.parametrize("named", ["xla", "reference"])
def test_what_is_named_stays_what_it_is_on_a_card(named):
    text = lower(lambda x: quantize(x, fp8=E4M3FN, implementation=named), bf16(8, 128), for_target=H200)
    assert KERNEL_TARGET not in text


def large(row_elements: int, dtype, size: int):
    """A pool of ``size`` bytes and a row more."""
    return jax.ShapeDtypeStruct((size // (row_elements * jnp.dtype(dtype).itemsize) + 1, row_elements), dtype)


def large_pool_calls(size: int):
    """``(name, f, arguments)`` of every op with a pool, of ``size`` bytes."""
    for layout in (KV_BF16, KV_FP8_656, KV_FP8_576):
        pool, static = large(layout.row_elements, layout.dtype, size), dict(layout=layout)
        yield f"kv_write_{layout.name}", partial(kv_write, **static), (pool, i32(9), bf16(9, 512), bf16(9, 64))
        args = bf16(9, 16, 512), bf16(9, 16, 64), pool, i32(9, 512)
        yield f"sparse_mla_{layout.name}", partial(sparse_mla, softmax_scale=0.1, **static), args
    for page_size in (1, 64):
        layout = IndexLayout(page_size)
        pages = large(layout.page_bytes, jnp.uint8, size)
        args = pages, i32(9), bf16(9, 128), f32(128), f32(128), *ANGLES9
        yield "index_write", partial(index_write, layout=layout), args
        args = f8(E4M3FN, 3, 64, 128), f32(3, 64), pages, i32(4, 4096), i32(3), i32(3)
        yield "index_logits_paged", partial(index_logits_paged, layout=layout, max_len=4096), args
    yield "quantize", partial(quantize, fp8=E4M3FN), (bf16(size // 7168 + 1, 7168),)
    yield "select", partial(select, k=2048), (f32(size // 4 // 32768 + 1, 32768), i32(size // 4 // 32768 + 1))
    args = f8(E4M3FN, 4096, 64, 128), f32(4096, 64), f8(E4M3FN, size // 16384, 128), f32(size // 16384)
    yield "index_logits_ragged", partial(index_logits_ragged, max_logits_bytes=2**40), (*args, i32(4096), i32(4096))


ANGLES9 = f32(163840, 64), i32(9)


@pytest.mark.parametrize("gib", [1.9, 2.5, 3.9, 4.1, 8.5])
@pytest.mark.parametrize("target", [GFX950, H200], ids=lambda t: t.kind)
def test_offsets_are_wide_enough_for_every_array(target, gib):
    """In the Triton IR of every kernel: what is added to a pointer has 64 bits where an array has 2^31 elements."""
    wide = 0
    for name, f, args in large_pool_calls(int(gib * 2**30)):
        kernels = triton_ir(lambda *x, f=f: f(*x, implementation="pallas"), *args, for_target=target)
        assert name in kernels
        for shapes, text in kernels.values():
            arrays, added = {}, 0  # a name means what it was last given to
            for line in text.splitlines():
                if splat := re.search(r"(%\w+) = tt\.splat (%arg\d+) : !tt\.ptr", line):
                    arrays[splat[1]] = splat[2]
                if add := re.search(r"tt\.addptr (%\w+), %\w+ : [^,]+, (?:tensor<[\dx]*)?(i\d+)", line):
                    size = math.prod(shapes[int(arrays.get(add[1], add[1]).removeprefix("%arg"))])
                    assert add[2] == "i64" or size <= 2**31, (name, line, size)
                    wide += add[2] == "i64"
                    added += 1
            assert added > 1
    assert (wide > 0) == (gib > 2)


def test_offsets_of_others_kernels_are_left_alone():
    """That Pallas' own lowering still does what ours mends; and that ours is not switched on for it."""

    def copy(x_ref, out_ref):
        out_ref[0, 0] = x_ref[1, 1]

    call = pl.pallas_call(copy, out_shape=u8(3 << 20, 1 << 10), compiler_params=plgpu.CompilerParams(num_warps=1))
    with pytest.warns(DeprecationWarning, match="Pallas Triton backend is deprecated"):
        (_, text), *_ = triton_ir(call, u8(3 << 20, 1 << 10), for_target=H200).values()
    assert set(re.findall(r"tt\.addptr .*, (i\d+)", text)) == {"i32"}


@pytest.mark.parametrize("imprecise", [True, False])
def test_fp8_products_are_added_up_as_asked_for(imprecise):
    q8, k8 = f8(E4M3FN, 4, 64, 128), f8(E4M3FN, 500, 128)
    ragged = partial(index_logits_ragged, config=RaggedConfig(imprecise=imprecise), implementation="pallas")
    pages = u8(128, IndexLayout(64).page_bytes)
    config = PagedConfig(imprecise=imprecise)
    paged = partial(index_logits_paged, layout=IndexLayout(64), max_len=500, config=config, implementation="pallas")
    for f, args in (
        (ragged, (q8, f32(4, 64), k8, f32(500), i32(4), i32(4))),
        (paged, (q8, f32(4, 64), pages, i32(4, 512), i32(4), i32(4))),
    ):
        [(_, text)] = triton_ir(f, *args, for_target=H200).values()
        [dot] = re.findall(r"tt\.dot .*f8E4M3FN.*", text)
        assert ("maxNumImpreciseAcc = 1073741824" in dot) == imprecise


def test_a_function_as_its_kernels():
    """Buffers by number: parameters, the constant that is one scale, what lies between two kernels, results."""
    f = partial(sparse_mla, layout=KV_BF16, softmax_scale=0.1, implementation="pallas")
    args = bf16(4, 16, 512), bf16(4, 16, 64), bf16(256, 576), i32(4, 2048)
    found = kernels_of(f, *args, for_target=H200)
    first, merge = found.kernels
    assert (first.name, merge.name) == ("sparse_mla_bf16", "sparse_mla_merge")
    assert set(range(4)) <= set(first.inputs) and merge.inputs == first.outputs and merge.outputs == found.results
    assert found.sizes[:4] == tuple(math.prod(x.shape) * x.dtype.itemsize for x in args)
    assert [len(x) for x in found.constants.values()] == [4] and first.ir.startswith("module") and first.grid[0] == 4
    with pytest.raises(MoreThanKernels, match="got stablehlo.sine, stablehlo.add$"):
        kernels_of(lambda x: jnp.sin(x) + x, f32(8), for_target=GFX942)


def test_one_module_owns_pallas_and_what_is_private():
    package = Path(jax_mla.__file__).parent
    imports = {
        path.relative_to(package).as_posix(): re.findall(r"^\s*(?:import|from)\s.+$", path.read_text(), re.MULTILINE)
        for path in package.rglob("*.py")
    }
    assert len(imports) > 30

    def importers(pattern: str) -> set[str]:
        return {path for path, lines in imports.items() if any(re.search(pattern, line) for line in lines)}

    assert importers(r"jax\.experimental") == {"pallas_triton.py"}
    assert importers(r"jax\._src|jaxlib") == {"pallas_triton.py"}
    uses = {path for path in imports if re.search(r"jax\.(_src|experimental)\b", (package / path).read_text())}
    assert uses == {"pallas_triton.py"}
