"""Three kinds of text, made on the device from a key: recall, copying and sentences.

Every text starts with ``BOS`` and has a fixed length, so that all of this compiles. What is returned is a ``Batch``:

- ``recall``: slots of four bytes, ``;`` key key digit or ``?`` key key digit. ``;Qk7`` says that Qk is 7, ``?Qk7`` asks
  for it and has the answer as its last byte: one token. Keys are two letters, no two records of a text share one, and a
  question is about any earlier record with equal probability: among 8k tokens, any of 2,000.
- ``copying``: random bytes, then the same again and again.
- ``sentences``: English of a small grammar, whose verbs agree in number with their subjects.

A model with ``index_topk`` 64 answers ``recall`` only if the one record among all of them is selected.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jax_mla.recall.tokenizer import BOS, PAD

LETTERS = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz", np.uint8).astype(np.int32)
KEYS = len(LETTERS) ** 2
SLOT = 4
"""Bytes of a record and of a question."""
LONGEST = 1 + SLOT * KEYS
"""Tokens of the longest ``recall`` text: one that uses every key."""


class Batch(NamedTuple):
    """Texts. ``weights`` and ``answers`` are of the token that is predicted: position 0 of both is 0.

    ``answers`` marks what can be known from the text only by looking it up; accuracy is measured there.
    """

    tokens: Int[Array, "*B T"]
    weights: Float[Array, "*B T"]
    answers: Bool[Array, "*B T"]


def recall(key: Array, length: int, questions: float | Array = 0.5, last: int = 0, other: float = 0.02) -> Batch:
    """One ``recall`` text of ``length`` tokens: ``Batch`` of ``[length]`` each.

    ``last`` > 0: the last ``last`` slots are questions, all others records. Otherwise a slot is a question with
    probability ``questions``, except for the first. Answers weigh 1, all other bytes of the text ``other``.
    What is left of ``length`` when it is no multiple of 4 is ``PAD``, weight 0.

    Raises ``ValueError`` for a ``length`` outside [9, ``LONGEST``] and for ``last`` outside [0, slots).
    """
    slots = _slots(length)
    if not 0 <= last < slots:
        raise ValueError(f"recall: last expected in [0, {slots}), the slots of {length} tokens, got {last}")
    kind, names, values, which = jax.random.split(key, 4)
    number = jnp.arange(slots)
    asks = number >= slots - last if last else jax.random.bernoulli(kind, questions, (slots,)) & (number > 0)
    count = jnp.cumsum(~asks)  # records up to and including this slot
    uniform = jax.random.uniform(which, (slots,))
    earlier = (uniform * count.astype(jnp.float32)).astype(jnp.int32)
    record = jnp.where(asks, jnp.minimum(earlier, count - 1), count - 1)
    name = jax.random.permutation(names, KEYS)[record]
    value = jax.random.randint(values, (slots,), ord("0"), ord("9") + 1)[record]
    letters = jnp.asarray(LETTERS)
    mark = jnp.where(asks, ord("?"), ord(";"))
    text = jnp.stack([mark, letters[name // len(LETTERS)], letters[name % len(LETTERS)], value], 1).reshape(-1)
    answers = (asks[:, None] & (jnp.arange(SLOT) == SLOT - 1)).reshape(-1)
    return _finish(text, jnp.where(answers, 1.0, other), answers, length)


def copying(key: Array, length: int) -> Batch:
    """One ``copying`` text of ``length`` tokens: 8 random printable bytes or more, at most half, again and again.

    How many is drawn too, so that distance does not tell. From the first repetition's fifth byte on they weigh 1 and
    count as answers; the rest weighs 0. Raises ``ValueError`` for a ``length`` below 17.
    """
    if length < 17:
        raise ValueError(f"copying: length expected at least 17, got {length}")
    text, many = jax.random.split(key)
    period = jax.random.randint(many, (), 8, (length - 1) // 2 + 1)
    place = jnp.arange(length - 1)
    once = jax.random.randint(text, (length - 1,), ord("!"), ord("~") + 1)
    answers = place >= period + 4
    return _finish(once[place % period], answers.astype(jnp.float32), answers, length)


_WORDS = {
    "determiner": (("the ", "a ", "this ", "every "), ("the ", "some ", "these ", "all ")),
    "adjective": (("", "", "red ", "old ", "quiet ", "small ", "golden ", "strange "),) * 2,
    "noun": (
        ("fox ", "river ", "teacher ", "garden ", "machine ", "letter ", "king ", "bird "),
        ("foxes ", "rivers ", "teachers ", "gardens ", "machines ", "letters ", "kings ", "birds "),
    ),
    "verb": (
        ("sees ", "follows ", "finds ", "loves ", "carries ", "hides ", "paints ", "leaves "),
        ("see ", "follow ", "find ", "love ", "carry ", "hide ", "paint ", "leave "),
    ),
    "end": (("today. ", "again. ", "in the morning. ", "near the sea. ", "without a word. ", "and sleeps. "),) * 2,
}
_PARTS = ("determiner", "adjective", "noun", "verb", "determiner", "adjective", "noun", "end")
_VOCABULARY = sorted({word for forms in _WORDS.values() for form in forms for word in form})
_WIDTH = max(len(word) for word in _VOCABULARY)
_BYTES = np.array([list(word.encode().ljust(_WIDTH)) for word in _VOCABULARY], np.int32)
_LENGTHS = np.array([len(word) for word in _VOCABULARY], np.int32)


def sentences(key: Array, length: int) -> Batch:
    """One text of ``length`` tokens: sentences such as "the old fox sees some rivers again. ", the last one cut off.

    Every byte weighs 1; none is an answer. Raises ``ValueError`` for a ``length`` below 9.
    """
    if length < 9:
        raise ValueError(f"sentences: length expected at least 9, got {length}")
    shortest = sum(min(len(word) for form in _WORDS[part] for word in form) for part in _PARTS)
    count = (length - 1) // shortest + 1
    words = []
    numbers, choices = jax.random.split(key)
    plural = jax.random.bernoulli(numbers, 0.5, (2, count))
    for i, (part, choice) in enumerate(zip(_PARTS, jax.random.split(choices, len(_PARTS)), strict=True)):
        table = np.array([[_VOCABULARY.index(word) for word in form] for form in _WORDS[part]], np.int32)
        pick = jax.random.randint(choice, (count,), 0, table.shape[1])
        words.append(jnp.asarray(table)[plural[i // 4].astype(jnp.int32), pick])  # the object has its own number
    word = jnp.stack(words, 1).reshape(-1)
    ends = jnp.cumsum(jnp.asarray(_LENGTHS)[word])
    place = jnp.arange(length - 1)
    at = jnp.searchsorted(ends, place, side="right")
    start = ends[at] - jnp.asarray(_LENGTHS)[word[at]]
    text = jnp.asarray(_BYTES)[word[at], place - start]
    return _finish(text, jnp.ones(length - 1), jnp.zeros(length - 1, bool), length)


def mixed(key: Array, batch: int, length: int, shares: tuple[float, float, float] = (0.8, 0.1, 0.1)) -> Batch:
    """``batch`` texts of ``length`` tokens, each of ``recall``, ``copying`` or ``sentences`` with these probabilities.

    Returns ``Batch`` of ``[batch, length]`` each. Raises ``ValueError`` for a ``length`` outside [17, ``LONGEST``] and
    for shares that are negative or do not sum to 1.
    """
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"mixed: shares expected non-negative with sum 1, got {shares}")
    _slots(length)

    def one(key: Array) -> Batch:
        kind, text = jax.random.split(key)
        makers = [lambda k, make=make: make(k, length) for make in (recall, copying, sentences)]
        return lax.switch(jax.random.choice(kind, 3, p=jnp.array(shares)), makers, text)

    return jax.vmap(one)(jax.random.split(key, batch))


def _slots(length: int) -> int:
    if not 1 + 2 * SLOT <= length <= LONGEST:
        raise ValueError(f"recall: length expected in [{1 + 2 * SLOT}, {LONGEST}], got {length}")
    return (length - 1) // SLOT


def _finish(text: Array, weights: Array, answers: Array, length: int) -> Batch:
    """``BOS`` before and ``PAD`` after a text of at most ``length`` - 1 tokens."""
    ends = (1, length - 1 - text.shape[0])
    tokens = jnp.pad(text.astype(jnp.int32), ends, constant_values=PAD).at[0].set(BOS)
    return Batch(tokens, jnp.pad(weights.astype(jnp.float32), ends), jnp.pad(answers, ends))
