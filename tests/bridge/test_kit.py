"""SGLang's own unit tests of a sparse attention backend (``sglang.test.kits``, in its wheel), run against ours.

They hand a backend pools, a batch and a selection, and compare with attention written out in torch. Their pages are
shuffled, their batches ragged, their prefixes up to 2048 tokens long.
"""

import unittest
import warnings

import pytest

CASES = (
    "dsa_sparse_prefill_flashmla_sparse_topk",
    "dsa_sparse_prefill_long_extend",
    "dsa_sparse_prefill_multi_request",
    "dsa_sparse_decode_flashmla_kv_topk",
    "dsa_sparse_decode_short_prefix_padding",
    "dsa_sparse_decode_ragged_prefix",
    "dsa_sparse_decode_long_prefix",
)
"""All that ``make_dsa_sparse_cases`` has; a test below says so."""

PATTERNS = [("dsa_sparse_decode_long_prefix", "strided"), ("dsa_sparse_decode_long_prefix", "head_tail")]


@pytest.fixture(scope="module")
def kit(sglang):
    """The kit, with our backend registered."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.test.kits.attention_unittest.attention_methods import dsa_attention

    from bridge.sglang.backend import JaxMLABackend

    ATTENTION_BACKENDS["jax_mla"] = JaxMLABackend
    return dsa_attention


def run(kit, name: str, **options):
    """The kit's own run, and a bound that can fail.

    The kit allows 0.16, more than its outputs ever reach: attention over the wrong tokens passes it. Relative to the
    size of the output the wrong tokens are off by 1; bf16 is by 0.0005 here, an fp8 cache by 0.03.
    """
    case = {case.name: case for case in kit.make_dsa_sparse_cases("jax_mla")}[name]
    test = unittest.TestCase()
    kit.run_dsa_sparse_attention_case(test, case, device="cpu", **options)
    fixture = kit.build_dsa_sparse_attention_fixture(test, case, device="cpu", **options)
    got = kit.run_dsa_sparse_fixture_eager(fixture, test).float()
    expected = kit.expected_dsa_sparse_fixture_output(fixture).float()
    assert (got - expected).norm() <= (0.05 if options["fp8_kv_cache"] else 0.002) * expected.norm()


def test_these_are_all_cases_of_the_kit(kit):
    assert tuple(case.name for case in kit.make_dsa_sparse_cases("jax_mla")) == CASES


@pytest.mark.parametrize("case", CASES)
def test_bf16(kit, case):
    run(kit, case, fp8_kv_cache=False)


@pytest.mark.parametrize("case, pattern", PATTERNS)
def test_bf16_with_selections_that_jump(kit, case, pattern):
    run(kit, case, fp8_kv_cache=False, index_pattern=pattern)


def test_bf16_with_interleaved_pages(kit):
    run(kit, "dsa_sparse_decode_long_prefix", fp8_kv_cache=False, loc_layout="interleaved_pages")


@pytest.fixture
def fp8_prefixes(kit, monkeypatch):
    """The kit fills a cached prefix through the pool's own writer, a Triton kernel; here jax_mla packs those rows."""
    from bridge.dlpack import to_jax, to_torch
    from jax_mla.layouts import KV_FP8_656
    from jax_mla.ops.kv_write import kv_pack

    def write(pool, layer, slots, k_nope, k_rope):
        latent, rope = (to_jax(t.detach().squeeze(1).contiguous()) for t in (k_nope, k_rope))
        pool.kv_buffer[layer.layer_id][slots] = to_torch(kv_pack(latent, rope, layout=KV_FP8_656))[:, None]

    monkeypatch.setattr(kit.DSATokenToKVPool, "set_mla_kv_buffer", write)


@pytest.mark.parametrize("case", CASES)
def test_fp8(kit, case, fp8_prefixes):
    run(kit, case, fp8_kv_cache=True)
