"""How far the served model is from transformers' own, figure by figure, each with its bound.

transformers in fp32 is the measure. What SGLang may differ by is rounding: its bf16 activations, what an fp8 cache
makes of them (latents apart in bf16's last bit can come out a whole fp8 step apart), and near-ties of the index scores,
which rounding decides. So transformers in bf16 is measured by the same figures, and stands beside them.
"""

import base64
import dataclasses
import operator
import random
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from bridge.demo import hf
from bridge.demo.server import Server
from bridge.demo.tiny import Tiny
from jax_mla.layouts import KV_FP8_656, KVLayout

TOKENS = 400
SPARSE = 64
"""The `index_topk` of the sparse cases: below `TOKENS`, so that the indexer has something to leave out."""

MEAN, MAX = 0.012, 0.05
"""Bounds of |Δ log-probability| where transformers rounds its cache as SGLang does: room for bf16 and nothing else."""
MEAN_UNQUANTISED = 0.04
"""Bound of the mean where SGLang's cache is fp8 and transformers' is not."""
SAME = 0.97
"""Least share of selected indices that the reference indexer selects too, in rows with more than `index_topk` keys."""
NEAR_TIE = 4.0
"""The others must be near-ties: the score of an index that only SGLang selects lies under the reference's last selected
by at most this many times what fp8 moves the scores of that row (root mean square of quantised - unquantised)."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured number and the bound it has to keep."""

    name: str
    value: float
    relation: Literal["<=", ">="]
    bound: float | None
    """None where any value will do."""
    own: float | None = None
    """The same figure of transformers in bf16, where there is one: what a correct model in bf16 comes to."""

    @property
    def passed(self) -> bool:
        """False for a NaN that has a bound."""
        return self.bound is None or {"<=": operator.le, ">=": operator.ge}[self.relation](self.value, self.bound)


@dataclasses.dataclass(frozen=True)
class Case:
    """One server: what all of its rows have in common. `kv_cache_dtype` is the value of SGLang's option."""

    index_topk: int
    kv_cache_dtype: Literal["bfloat16", "fp8_e4m3"]

    @property
    def tiny(self) -> Tiny:
        return Tiny(index_topk=self.index_topk)

    @property
    def sparse(self) -> bool:
        return self.index_topk < TOKENS

    def __str__(self) -> str:
        return f"index_topk {self.index_topk}, KV {self.kv_cache_dtype}"


CASES = tuple(Case(k, kv) for k in (Tiny().index_topk, SPARSE) for kv in ("bfloat16", "fp8_e4m3"))


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: Case
    against: str
    figures: tuple[Figure, ...]

    @property
    def passed(self) -> bool:
        return all(figure.passed for figure in self.figures)

    def json(self) -> dict[str, Any]:
        figures = [dataclasses.asdict(figure) | {"passed": figure.passed} for figure in self.figures]
        return dataclasses.asdict(self.case) | {"against": self.against, "figures": figures, "passed": self.passed}


@dataclasses.dataclass(frozen=True)
class Served:
    """SGLang's answer about `ids`: log-probabilities `[T - 1]`, selected indices int32 `[T, layers, index_topk]`."""

    ids: list[int]
    logprobs: np.ndarray
    selected: np.ndarray


def tokens(tiny: Tiny) -> list[int]:
    """`TOKENS` distinct ids: equal ones would give layer 0 equal keys, and ties where a real text has none."""
    return random.Random(tiny.seed).sample(range(3, tiny.vocab_size), TOKENS)


def ask(server: Server, case: Case) -> Served:
    """One request of SGLang's own API. The server must run with `--enable-return-indexer-topk`."""
    ids = tokens(case.tiny)
    body = {
        "input_ids": ids,
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_indexer_topk": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
    }
    meta = server.post("/generate", body)["meta_info"]
    logprobs = np.array([entry[0] for entry in meta["input_token_logprobs"][1:]], np.float32)
    selected = np.frombuffer(base64.b64decode(meta["indexer_topk"]), np.int32)
    return Served(ids, logprobs, selected.reshape(TOKENS, case.tiny.num_hidden_layers, case.index_topk))


def rows(case: Case, served: Served, models: hf.Models) -> Iterator[Row]:
    """The lines of one case; `models` are of the same checkpoint."""
    fp8 = case.kv_cache_dtype == "fp8_e4m3"
    layout = KV_FP8_656 if fp8 else None
    alike = "transformers, fp8 latent" if fp8 else "transformers"
    which = slice(SPARSE if case.sparse else None)
    where = f", first {SPARSE} positions" if case.sparse else ""

    def row(against: str, which: slice, layout: KVLayout | None, mean: float, largest: float | None) -> Row:
        exact, rounded = (hf.logprobs(model, served.ids, layout) for model in models)
        difference, own = (np.abs(other - exact)[which] for other in (served.logprobs, rounded))
        figures = (
            Figure("mean |Δ|", float(difference.mean()), "<=", mean, float(own.mean())),
            Figure("max |Δ|", float(difference.max()), "<=", largest, float(own.max())),
        )
        return Row(case, against, figures)

    yield row(alike + where, which, layout, MEAN, MAX)
    if fp8:
        yield row("transformers" + where, which, None, MEAN_UNQUANTISED, None)
    if case.sparse:
        with hf.Indexers(models.exact, served.selected) as indexers, hf.Indexers(models.rounded, served.selected):
            yield row(f"{alike}, SGLang's selection", slice(None), layout, MEAN, MAX)
        for layer, scores in enumerate(indexers.scores):
            same, gap = selection(served.selected[:, layer], scores)
            figures = Figure("same", same, ">=", SAME), Figure("gap", gap, "<=", NEAR_TIE)
            yield Row(case, f"fp8 reference indexer, layer {layer}", figures)


def selection(selected: np.ndarray, scores: hf.Scores) -> tuple[float, float]:
    """The share of `selected` (int32 `[T, k]`) that the quantised scores select too, and the worst gap of the others.

    Rows that see at most k keys have nothing to choose; in them a selection other than all they see is refused. The gap
    is in units of what fp8 moves that row's scores, 0 if there are no others.
    """
    k = selected.shape[1]
    reference = hf.picks(scores.quantised, k)
    if not np.array_equal(np.sort(selected[:k]), np.sort(reference[:k])):
        raise ValueError("selected: expected all visible positions in rows that see no more than index_topk keys")
    shared, gap = 0, 0.0
    for t in range(k, len(selected)):
        if len(np.unique(selected[t])) != k or selected[t].min() < 0 or selected[t].max() > t:
            raise ValueError(f"selected: expected {k} different positions from 0 to {t} in row {t}, got {selected[t]}")
        quantised, exact = scores.quantised[t, : t + 1], scores.exact[t, : t + 1]
        others = np.setdiff1d(selected[t], reference[t])
        shared += k - len(others)
        if len(others):
            gaps = quantised[reference[t]].min() - quantised[others]
            gap = max(gap, float(gaps.max() / np.sqrt(np.mean((quantised - exact) ** 2))))
    return shared / (k * (len(selected) - k)), gap
