"""The loops of a kernel's machine code.

Where code branches backward there need be no loop: compilers put rarely taken blocks at the end, whence they branch
back. So loops are natural loops: a branch to an instruction that all ways to the branch lead through, and what lies on
ways from there to it.

Source: Aho, Lam, Sethi, Ullman, *Compilers: Principles, Techniques, and Tools*, "Natural Loops".
"""

from jax_mla.aot.code import Instruction


def blocks(instructions: tuple[Instruction, ...]) -> tuple[list[range], list[list[int]]]:
    """Basic blocks, as ranges of instructions, and the blocks that can follow each."""
    index = {x.offset: i for i, x in enumerate(instructions)}
    first = {0} | {index[x.target] for x in instructions if x.target is not None}
    first |= {i + 1 for i, x in enumerate(instructions) if x.target is not None or not x.falls_through}
    starts = sorted(i for i in first if i < len(instructions))
    made = [range(a, b) for a, b in zip(starts, [*starts[1:], len(instructions)], strict=True)]
    number = {block.start: i for i, block in enumerate(made)}
    follow = []
    for block in made:
        last = instructions[block[-1]]
        next_ones = set() if last.target is None else {number[index[last.target]]}
        if last.falls_through and block.stop < len(instructions):
            next_ones.add(number[block.stop])
        follow.append(sorted(next_ones))
    return made, follow


def dominators(follow: list[list[int]]) -> list[int]:
    """Of each block, those that every way from block 0 to it goes through, itself included: bit i for block i.

    0 for a block to which no way leads.
    """
    reached, stack = {0}, [0]
    while stack:
        new = set(follow[stack.pop()]) - reached
        reached |= new
        stack += new
    before: dict[int, list[int]] = {b: [] for b in reached}
    for block in reached:
        for after in follow[block]:
            before[after].append(block)
    everything = (1 << len(follow)) - 1
    found = {block: everything for block in reached}
    found[0] = 1
    changed = True
    while changed:
        changed = False
        for block in sorted(reached - {0}):
            common = everything
            for b in before[block]:
                common &= found[b]
            if (common := common | 1 << block) != found[block]:
                found[block], changed = common, True
    return [found.get(block, 0) for block in range(len(follow))]


def loops(instructions: tuple[Instruction, ...]) -> list[set[int]]:
    """The instructions of each loop, by number; loops that begin at the same instruction are one."""
    made, follow = blocks(instructions)
    through = dominators(follow)
    before: list[set[int]] = [set() for _ in made]
    for block, next_ones in enumerate(follow):
        for after in next_ones:
            before[after].add(block)
    found: dict[int, set[int]] = {}
    for block, next_ones in enumerate(follow):
        for header in next_ones:
            if not through[block] >> header & 1:
                continue
            body, stack = {header}, [block]
            while stack:
                if (b := stack.pop()) not in body:
                    body.add(b)
                    stack += [x for x in before[b] if through[x]]
            found.setdefault(header, set()).update(body)
    return [{i for b in body for i in made[b]} for body in found.values()]
