"""The trained model of ``jax_mla.recall``, served: does it find the one record among hundreds that a question is about?

A text of `LENGTH` tokens is records and, at its end, `QUESTIONS` questions; each row reads `index_topk` tokens of it.
"""

import json
from typing import NamedTuple

import jax
import numpy as np
import openai

from bridge.demo.compare import Case, Figure, Row
from bridge.demo.server import Server
from jax_mla.recall import MODEL, tasks
from jax_mla.recall.tokenizer import decode

LENGTH, QUESTIONS, SHOWN = 2048, 64, 3
ANSWERED = 0.95
"""Bound of the share that is answered: 3 of the 64 may be wrong."""
CASE = Case(json.loads((MODEL / "config.json").read_text())["index_topk"], "fp8_e4m3")


class Text(NamedTuple):
    """A text: its tokens ``[T]``, and the positions of the answers, each predicted by the token before it."""

    tokens: np.ndarray
    answers: np.ndarray

    def right(self, likeliest: np.ndarray) -> int:
        """How many are answered, given the likeliest token after each position of ``tokens``."""
        return int((likeliest[self.answers - 1] == self.tokens[self.answers]).sum())


def text(length: int, questions: int, seed: int) -> Text:
    """A text of ``length`` tokens whose last slots are ``questions`` questions."""
    made = tasks.recall(jax.random.key(seed), length, last=questions)
    return Text(np.asarray(made.tokens), np.flatnonzero(made.answers))


def likeliest(server: Server, text: Text) -> np.ndarray:
    """The likeliest token after each position; 0 before those that questions ask for."""
    start = int(text.answers[0]) - 1
    body = {
        "input_ids": text.tokens.tolist(),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 1,
    }
    meta = server.post("/generate", body, seconds=1200.0)["meta_info"]
    best = [entry[0][1] if entry else 0 for entry in meta["input_top_logprobs"]]  # of the token at each position
    found = np.zeros(len(text.tokens), np.int64)
    found[start:-1] = best[start + 1 - len(text.tokens) :]
    return found


def converse(server: Server, text: Text) -> list[tuple[str, str, str]]:
    """The first `SHOWN` questions over the OpenAI-compatible API: each question, the answer, and what is right."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120.0, max_retries=0) as client:
        model = client.models.list().data[0].id
        replies = []
        for at in text.answers[:SHOWN]:
            prompt = decode(text.tokens[:at].tolist())
            reply = client.completions.create(model=model, prompt=prompt, max_tokens=1, temperature=0)
            replies.append((prompt[-3:], reply.choices[0].text, decode(text.tokens[at : at + 1].tolist())))
    return replies


def row(server: Server, text: Text) -> Row:
    """The table's line: the share of the text's questions that the served model answers."""
    share = text.right(likeliest(server, text)) / len(text.answers)
    return Row(CASE, f"the records of a text of {LENGTH} tokens", (Figure("answered", share, ">=", ANSWERED),))
