"""Loops, of code whose loops can be seen."""

import pytest

from jax_mla.aot.code import Instruction
from jax_mla.aot.flow import blocks, dominators, loops


def code(text: str) -> tuple[Instruction, ...]:
    """One word an instruction: "x" goes on, "?3" may branch to number 3, "!3" does, "." ends."""
    return tuple(
        Instruction(8 * i, word, 8 * int(word[1:]) if word[0] in "?!" else None, word[0] not in "!.")
        for i, word in enumerate(text.split())
    )


@pytest.mark.parametrize(
    "text, found",
    [
        ("x x .", []),
        ("x ?3 x .", []),
        ("x x x ?1 .", [{1, 2, 3}]),
        ("?0 .", [{0}]),
        ("x x x ?2 ?1 .", [{1, 2, 3, 4}, {2, 3}]),
        ("x x ?1 x ?1 .", [{1, 2, 3, 4}]),  # two branches to one place
        ("x ?5 x x . x !2", []),  # a block put at the end, which branches back
        ("x x ?7 x x ?1 . x !3", [{1, 2, 3, 4, 5, 7, 8}]),  # the same in a loop
        ("x . !2", []),  # padding that nothing leads to
        ("?3 x ?1 . !4", [{1, 2}]),
        ("?2 x x ?1 .", []),  # two ways into it: no natural loop
    ],
)
def test_loops(text, found):
    assert sorted(map(sorted, loops(code(text)))) == sorted(map(sorted, found))


def test_blocks_and_dominators():
    made, follow = blocks(code("x ?4 x !5 x x ."))
    assert made == [range(0, 2), range(2, 4), range(4, 5), range(5, 7)]
    assert follow == [[1, 2], [3], [3], []]
    assert dominators(follow) == [0b1, 0b11, 0b101, 0b1001]
    assert dominators([[1], [], [1]]) == [0b1, 0b11, 0]
