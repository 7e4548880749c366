"""The figures of the demo, on selections and scores made by hand, and on transformers itself."""

import numpy as np
import pytest

from bridge.demo import compare, hf
from bridge.demo.compare import Case, Figure, Served
from bridge.demo.tiny import Tiny, checkpoint
from jax_mla.layouts import KV_BF16, KV_FP8_656


def scores(t=6, seed=0, noise=0.0):
    rng = np.random.default_rng(seed)
    exact = np.where(np.tri(t, dtype=bool), rng.normal(size=(t, t)), -np.inf).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return hf.Scores(exact, exact + np.float32(noise) * rng.choice([-1, 1], size=(t, t)).astype(np.float32))


def test_picks_are_the_largest_ties_to_the_lower_position():
    ties = np.array([[1, -np.inf, -np.inf], [0, 0, -np.inf], [0, 2, 2]], np.float32)
    np.testing.assert_array_equal(hf.picks(ties, 2), [[0, -1], [0, 1], [1, 2]])
    np.testing.assert_array_equal(hf.picks(ties, 4)[2], [1, 2, 0, -1])


def test_selection_of_the_reference_itself():
    made = scores(noise=0.1)
    assert compare.selection(hf.picks(made.quantised, 2), made) == (1.0, 0.0)


def test_selection_measures_the_gap_in_units_of_the_noise():
    made = scores(noise=0.1)
    selected = hf.picks(made.quantised, 2)
    row = made.quantised[5]
    worst = np.argmin(row)
    selected[5, 1] = worst
    same, gap = compare.selection(selected, made)
    assert same == 7 / 8
    assert gap == pytest.approx((np.sort(row)[-2] - row[worst]) / 0.1, rel=1e-3)


def test_selection_refuses_short_rows_that_leave_something_out():
    made = scores(noise=0.1)
    selected = hf.picks(made.quantised, 3)
    selected[1] = [0, -1, -1]
    with pytest.raises(ValueError, match="all visible positions"):
        compare.selection(selected, made)


@pytest.mark.parametrize(
    "value, relation, bound, passed",
    [(1, "<=", 1, True), (2, "<=", 1, False), (2, ">=", 1, True), (np.nan, "<=", 1, False), (9, "<=", None, True)],
)
def test_figure(value, relation, bound, passed):
    assert Figure("x", value, relation, bound).passed is passed


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tiny = Tiny(num_attention_heads=2, index_n_heads=4, index_topk=8)
    return hf.load(checkpoint(tiny, tmp_path_factory.mktemp("tiny"))).exact


IDS = compare.tokens(Tiny())[:24]


def test_rows_with_nothing_to_choose_stay_as_they_are(model):
    plain = hf.logprobs(model, IDS)
    with hf.Indexers(model):
        np.testing.assert_allclose(hf.logprobs(model, IDS)[:8], plain[:8], atol=1e-5)
    np.testing.assert_array_equal(hf.logprobs(model, IDS), plain)


def test_forced_to_its_own_selection_transformers_is_itself(model):
    plain = hf.logprobs(model, IDS)
    selected = np.zeros((len(IDS), 2, 8), np.int32)
    for layer in range(2):  # layer 1 sees what layer 0 selected
        with hf.Indexers(model, selected) as indexers:
            hf.logprobs(model, IDS)
        selected[:, layer] = hf.picks(indexers.scores[layer].exact, 8)
    with hf.Indexers(model, selected):
        np.testing.assert_allclose(hf.logprobs(model, IDS), plain, atol=1e-5)


def test_a_rounding_cache_rounds_as_its_layout(model):
    plain = hf.logprobs(model, IDS)
    bf16, fp8 = (np.abs(hf.logprobs(model, IDS, layout) - plain).mean() for layout in (KV_BF16, KV_FP8_656))
    assert 0 < bf16 < fp8 < 0.05


def test_a_case_served_by_transformers_itself_is_within_bounds(tmp_path):
    case = Case(compare.SPARSE, "fp8_e4m3")
    models = hf.load(checkpoint(case.tiny, tmp_path))
    ids = compare.tokens(case.tiny)
    with hf.Indexers(models.exact) as indexers:
        logprobs = hf.logprobs(models.exact, ids, KV_FP8_656)
    selected = np.stack([hf.picks(layer.quantised, compare.SPARSE) for layer in indexers.scores], axis=1)
    rows = list(compare.rows(case, Served(ids, logprobs, selected), models))
    assert len(rows) == 5 and all(row.passed for row in rows)
    assert rows[2].figures[0].value < 1e-5 and rows[3].figures[0].value == rows[4].figures[0].value == 1.0
    wrong = list(compare.rows(case, Served(ids, logprobs - 0.1, np.roll(selected, 1, axis=1)), models))
    assert not any(row.passed for row in wrong)


@pytest.mark.parametrize("row", ([0, 0, 0], [-1, 0, 1], [0, 1, 9]), ids=("duplicates", "none", "the future"))
def test_a_selection_that_is_none_is_refused(row):
    visible = scores(t=6)
    selected = hf.picks(visible.quantised, 3)
    selected[5] = row
    with pytest.raises(ValueError, match="selected: expected 3 different positions from 0 to 5 in row 5"):
        compare.selection(selected, visible)
