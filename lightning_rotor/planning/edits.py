"""Small changes of a schedule, for the last bytes that the dynamic program cannot see.

Each edit changes one place::

    merge     (0-1) (2-3) 4   →  (0-3) 4
    swallow   (0-1) (2-3) 4   →  ((0-1) 2-3) 4
    extend    (0-1) 2-3       →  (0-2) 3
    shrink    (0-2) 3         →  (0-1) 2-3
    wrap      0-3             →  0 (1-2) 3
    unwrap    0 (1-2) 3       →  0 1 2 3
    switch    0 1 2           →  0 1:1 2     (to the option that saves the next less or more)
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_rotor.chain import Chain
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment
from lightning_rotor.simulator import first_inverted

_LONGEST_WRAP = 3


def edits(schedule: Schedule, chain: Chain) -> Iterator[Schedule]:
    """Every schedule that is one edit away. There are O(n) of them for ``n`` stages."""
    found = (Schedule(items) for items in _edited(schedule.items, chain))
    if not any(option.inverts for stage in chain for option in stage.options):
        return found
    return (each for each in found if first_inverted(chain, each) is None)


def _edited(items: tuple[Item, ...], chain: Chain) -> Iterator[tuple[Item, ...]]:
    for index, item in enumerate(items):
        before, after = items[:index], items[index + 1 :]
        match item:
            case Segment(inside):
                yield (*before, *inside, *after)
                yield from ((*before, Segment(changed), *after) for changed in _edited(inside, chain))
                if len(inside) > 1 and isinstance(inside[-2], Leaf):
                    yield (*before, Segment(inside[:-1]), inside[-1], *after)
                match after:
                    case (Segment(more), *rest):
                        yield (*before, Segment(inside + more), *rest)
                        yield (*before, Segment((item, *more)), *rest)
                    case (Leaf(stage) as leaf, *rest) if rest and chain.stages[stage].recomputable:
                        yield (*before, Segment((*inside, leaf)), *rest)
            case Leaf(stage, option):
                yield from ((*before, Leaf(stage, other), *after) for other in _next_options(chain, stage, option))
                for length in range(1, _LONGEST_WRAP + 1):
                    wrapped, behind = items[index : index + length], items[index + length :]
                    if behind and all(
                        isinstance(each, Leaf) and chain.stages[each.stage].recomputable for each in wrapped
                    ):
                        yield (*before, Segment(wrapped), *behind)


def _next_options(chain: Chain, stage: int, option: int) -> list[int]:
    """The options that save the next less and the next more."""
    options = chain.stages[stage].options
    saved = [
        (each.saved_bytes + each.saved_input_bytes + each.saved_output_bytes, number)
        for number, each in enumerate(options)
    ]
    ranks = [number for _, number in sorted(saved)]
    at = ranks.index(option)
    return ranks[max(at - 1, 0) : at] + ranks[at + 1 : at + 2]
