"""The real server on a tiny DeepSeek-V3.2: whatever way a prompt is cut, cached or batched, the same tokens come back.

Two servers for each KV format: one takes prompts whole, the other in chunks of 128 tokens. The model selects 64 tokens
of prompts that are mostly longer, so the indexer has something to leave out.
"""

import base64
import concurrent.futures
import contextlib
import random
from dataclasses import dataclass

import numpy as np
import pytest

from bridge.demo.server import Server, serve
from bridge.demo.tiny import CACHE, Tiny, checkpoint
from bridge.sglang import contract

pytestmark = pytest.mark.timeout(900)

TINY = Tiny(index_topk=64)
NEW = 8
"""Tokens to generate."""
NEAR_TIE = 0.1
"""Difference of the two best log-probabilities below which rounding decides between two tokens.

SGLang computes in bf16, whose steps are 0.016 to 0.03 for these logits, and torch's matrix products round differently
for another number of rows. So two runs may part at such a place, and only there."""

LIMITS = ("--max-total-tokens", "8192", "--max-running-requests", "8", "--context-length", "1024")
ARGUMENTS = (*LIMITS, "--sleep-on-idle")  # two idle servers would otherwise keep two cores busy
KV = ("bfloat16", "fp8_e4m3")
COMPILED = {
    "JAX_COMPILATION_CACHE_DIR": str(CACHE.parent / "xla"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}
"""The servers compile the same programs: the first to need one keeps it for the others, and for the next run."""


@dataclass(frozen=True)
class Answer:
    """Generated ids, how many tokens of the prompt were cached, and the lead of each id over the next best."""

    ids: list[int]
    cached: int
    lead: list[float]


@dataclass(frozen=True)
class Pair:
    """Servers of one KV format."""

    whole: Server
    chunked: Server


def prompt(tokens: int) -> list[int]:
    return random.Random(tokens).choices(range(3, TINY.vocab_size), k=tokens)


def ask(server: Server, ids: list[int], **options) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    return server.post("/generate", {"input_ids": ids, "sampling_params": sampling} | options)


def generate(server: Server, ids: list[int]) -> Answer:
    said = ask(server, ids, return_logprob=True, top_logprobs_num=2)
    tops = said["meta_info"]["output_top_logprobs"]
    lead = [best[0] - second[0] for best, second in tops]
    return Answer(said["output_ids"], said["meta_info"]["cached_tokens"], lead)


def alone(server: Server, ids: list[int]) -> Answer:
    """With nothing cached."""
    import httpx

    httpx.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
    answer = generate(server, ids)
    assert answer.cached == 0
    return answer


def same(reference: Answer, ids: list[int]) -> int:
    """How many tokens ``ids`` shares with the reference; all of them, unless they part where rounding decides."""
    for i, (a, b) in enumerate(zip(reference.ids, ids, strict=True)):
        if a != b:
            assert reference.lead[i] < NEAR_TIE, (i, reference, ids)
            return i
    return len(reference.ids)


def mostly(shared: list[int]) -> None:
    """Most tokens were compared: what comes behind a near-tie is not."""
    assert sum(shared) >= 0.75 * NEW * len(shared), shared


@pytest.fixture(scope="module", params=KV)
def servers(request):
    """Both servers of one format, started at the same time: each spends most of its start waiting for imports."""
    model = checkpoint(TINY)
    kinds = {
        "whole": ("--enable-return-indexer-topk",),
        "chunked": ("--chunked-prefill-size", "128", "--enable-mixed-chunk"),
    }
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(2) as pool:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in COMPILED.items():
            environment.setenv(name, value)

        def start(kind: str) -> Server:
            options = (*ARGUMENTS, "--kv-cache-dtype", request.param, *kinds[kind])
            return stack.enter_context(serve(model, *options, name=f"test-{request.param}-{kind}", seconds=600))

        started = {kind: pool.submit(start, kind) for kind in kinds}
        yield Pair(**{kind: future.result() for kind, future in started.items()})


@pytest.fixture(scope="module")
def expected(servers) -> dict[int, Answer]:
    """By length: the answer to the prompt of that many tokens, taken whole, alone, uncached."""
    return {n: alone(servers.whole, prompt(n)) for n in (40, 63, 64, 65, 200, 300)}


def test_again_with_its_prefix_cached(servers, expected):
    """All but the last page of a prompt is found in the radix cache; 64 and 65 differ by one page in that."""
    shared = []
    for n, cached in {63: 0, 64: 0, 65: 64, 300: 256}.items():
        alone(servers.whole, prompt(n))
        again = generate(servers.whole, prompt(n))
        assert again.cached == cached
        shared.append(same(expected[n], again.ids))
    mostly(shared)


def test_a_longer_prompt_behind_a_cached_one(servers, expected):
    """The cached prefix belongs to another request, and ends inside of the second one's prompt."""
    ids = prompt(300)
    alone(servers.whole, ids[:130])
    answer = generate(servers.whole, ids)
    assert answer.cached == 128
    mostly([same(expected[300], answer.ids)])


def test_in_chunks_of_128(servers, expected):
    mostly([same(answer, alone(servers.chunked, prompt(n)).ids) for n, answer in expected.items()])


@pytest.mark.parametrize("which", ["whole", "chunked"])
def test_six_at_a_time(servers, expected, which):
    """Chunked, the first to decode do so in one batch with chunks of the others: SGLang mixes requests that want no
    log-probabilities."""
    server = getattr(servers, which)
    alone(server, prompt(33))
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = pool.map(lambda n: ask(server, prompt(n))["output_ids"], expected)
        mostly([same(expected[n], ids) for n, ids in zip(expected, answers, strict=True)])


def test_the_selection_comes_back_as_positions(servers):
    """``--enable-return-indexer-topk``: each row's own positions in ascending order, its first ``index_topk`` all."""
    ids = prompt(129)
    for _ in range(2):  # uncached, then behind 128 cached tokens
        meta = ask(servers.whole, ids, return_indexer_topk=True)["meta_info"]
        shape = (len(ids) + NEW - 1, TINY.num_hidden_layers, TINY.index_topk)
        selected = np.frombuffer(base64.b64decode(meta["indexer_topk"]), np.int32).reshape(shape)
        for t, rows in enumerate(selected):
            for row in rows:
                chosen = row[row >= 0]
                assert len(chosen) == min(t + 1, TINY.index_topk) and (row[len(chosen) :] == -1).all()
                assert (np.diff(chosen) > 0).all() and chosen[-1] <= t


def test_the_log_says_what_serves(servers):
    log = servers.whole.log.read_text(errors="replace")
    assert f"serves as --attention-backend jax_mla of SGLang {contract.VERSION}" in log
