import re
from functools import partial

import jax
import numpy as np
import pytest

from jax_mla.recall import tasks
from jax_mla.recall.tokenizer import BOS, PAD, decode


def made(make, key, **sizes):
    return jax.tree.map(np.asarray, jax.jit(partial(make, **sizes))(key))


def check(batch, length):
    assert batch.tokens.shape == batch.weights.shape == batch.answers.shape == (length,)
    assert (batch.tokens.dtype, batch.weights.dtype, batch.answers.dtype) == (np.int32, np.float32, bool)
    assert batch.tokens[0] == BOS and batch.weights[0] == 0 and not batch.answers[0]
    padded = batch.tokens == PAD
    assert not batch.weights[padded].any() and not batch.answers[padded].any()


@pytest.mark.parametrize(("length", "last"), [(9, 0), (9, 1), (130, 0), (1024, 32), (8192, 64), (tasks.LONGEST, 0)])
def test_recall_asks_for_what_it_said(length, last):
    batch = jax.tree.map(np.asarray, tasks.recall(jax.random.key(length), length, last=last))
    check(batch, length)
    slots = re.findall(r"([;?])([A-Za-z]{2})([0-9])", decode(batch.tokens.tolist()))
    assert len(slots) == (length - 1) // 4
    said = {}
    for number, (mark, name, value) in enumerate(slots):
        place = 4 + 4 * number
        assert batch.answers[place] == (mark == "?")
        if mark == "?":
            assert said[name] == value and batch.weights[place] == 1
        else:
            assert name not in said
            said[name] = value
    asked = [mark == "?" for mark, _, _ in slots]
    assert batch.answers.sum() == sum(asked)
    if last:
        assert asked == [False] * (len(slots) - last) + [True] * last


def test_recall_asks_about_any_earlier_record():
    batch = jax.vmap(lambda k: tasks.recall(k, 1024, last=16))(jax.random.split(jax.random.key(0), 64))
    places = []
    for tokens in np.asarray(batch.tokens):
        names = [tuple(slot[1:3]) for slot in tokens[1:1021].reshape(-1, 4)]
        places += [names.index(name) for name in names[-16:]]
    histogram = np.histogram(places, bins=4, range=(0, 239))[0]
    assert histogram.min() > 200 and histogram.sum() == 1024  # 256 each, expected


def test_copying_repeats():
    periods = set()
    for seed in range(4):
        batch = made(tasks.copying, jax.random.key(seed), length=130)
        check(batch, 130)
        period = int(batch.answers.argmax()) - 5
        assert 8 <= period <= 64 and batch.answers[period + 5 :].all()
        assert (batch.tokens[1 : 130 - period] == batch.tokens[1 + period :]).all()
        periods.add(period)
    assert len(periods) > 1


def test_sentences_are_of_the_grammar():
    batch = made(tasks.sentences, jax.random.key(2), length=4000)
    check(batch, 4000)
    text = decode(batch.tokens.tolist())
    assert len(text) == 3999 and batch.weights[1:].all()
    one = r"(the|a|this|every) (\w+ )?\w+[^s] \w+s |(the|some|these|all) (\w+ )?\w+s \w+[^s] "
    for sentence in text.split(". ")[:-1]:
        assert re.match(one, sentence), sentence


def test_mixed_has_all_kinds_and_is_a_function_of_the_key():
    first, again = (made(tasks.mixed, jax.random.key(3), batch=64, length=128) for _ in range(2))
    assert first.tokens.shape == (64, 128) and (first.tokens == again.tokens).all()
    texts = [decode(row.tolist()) for row in first.tokens]
    recalls = sum(re.fullmatch(r"([;?][A-Za-z]{2}[0-9])+", text) is not None for text in texts)
    copies = sum(any(text[p:] == text[:-p] for p in range(8, 65)) for text in texts)
    assert 40 <= recalls <= 62 and copies > 0 and recalls + copies < 64


def test_refusals():
    key = jax.random.key(0)
    for length in (8, tasks.LONGEST + 1):
        with pytest.raises(ValueError, match=rf"recall: length expected in \[9, {tasks.LONGEST}\], got {length}"):
            tasks.recall(key, length)
    with pytest.raises(ValueError, match=r"recall: last expected in \[0, 2\), the slots of 9 tokens, got 2"):
        tasks.recall(key, 9, last=2)
    for make, least in ((tasks.copying, 17), (tasks.sentences, 9)):
        with pytest.raises(ValueError, match=f"length expected at least {least}, got 8"):
            make(key, 8)
    with pytest.raises(ValueError, match="mixed: shares expected non-negative with sum 1"):
        tasks.mixed(key, 2, 64, (0.5, 0.1, 0.1))
