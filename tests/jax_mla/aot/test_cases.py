"""The cases are what the package is served with: every op, head count, top-k, page and layout."""

import re

import pytest

from jax_mla.aot.cases import DECODE, HEADS, OPS, PREFILL, TOP_K, cases
from jax_mla.aot.chips import CHIPS

chips = pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)


@chips
def test_every_op_is_there(chip):
    everything, ci = cases(chip), cases(chip, "ci")
    for made in (everything, ci):
        assert {case.op for case in made} == set(OPS)
        assert {case.phase for case in made} == {DECODE, PREFILL}
        assert len({(case.op, case.label) for case in made}) == len(made)
    assert len(ci) <= 40 < len(everything)
    labels = {(case.op, case.label) for case in everything}
    assert all((case.op, case.label) in labels for case in ci)


@chips
def test_every_shape_is_there(chip):
    made = cases(chip)

    def seen(op: str, pattern: str) -> set[str]:
        return {found[1] for case in made if case.op == op and (found := re.search(pattern, case.label))}

    heads = {str(n) for n in HEADS}
    assert seen("sparse_mla", r" H (\d+)") == heads and seen("index_query", r"Hi (\d+)") == heads
    assert seen("index_logits_ragged", r"Hi (\d+)") == seen("index_logits_paged", r"Hi (\d+)") == heads
    top_k = {str(k) for k in TOP_K}
    assert seen("sparse_mla", r" K (\d+)") == seen("select", r" k (\d+)") == top_k
    assert seen("index_logits_paged", r"page (\d+)") == seen("index_write", r"page (\d+)") == {"1", "64"}
    layouts = {"bf16", "fp8_576"} | ({"fp8_656"} if chip.fp8.name == "e4m3fn" else set())
    assert seen("sparse_mla", r" (\w+)$") == seen("kv_write", r" (\w+)$") == layouts


@chips
def test_trips_are_those_of_the_ops_own_configuration(chip):
    for case in cases(chip):
        inner, outer = case.trips()
        assert inner >= 1 and outer >= 1 and isinstance(inner, int)
        if case.op == "sparse_mla":
            assert inner > 1
    (long,) = [case.trips() for case in cases(chip) if case.op == "select" and case.label == "T 64 S 65536 k 2048"]
    assert long == (10, 1)
