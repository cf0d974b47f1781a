"""Small changes of a schedule, for the last bytes that the dynamic program cannot see.

Each edit changes one place::

    merge     (0-1) (2-3) 4   →  (0-3) 4
    extend    (0-1) 2-3       →  (0-2) 3
    shrink    (0-2) 3         →  (0-1) 2-3
    wrap      0 1 2           →  0 (1) 2
    unwrap    0 (1-2) 3       →  0 1 2 3
    switch    0 1 2           →  0 1:1 2
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_rotor.chain import Chain
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment


def edits(schedule: Schedule, chain: Chain) -> Iterator[Schedule]:
    """Every schedule that is one edit away. There are O(n) of them for ``n`` stages."""
    return (Schedule(items) for items in _edited(schedule.items, chain))


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
                    case (Leaf(stage) as leaf, *rest) if rest and chain.stages[stage].recomputable:
                        yield (*before, Segment((*inside, leaf)), *rest)
            case Leaf(stage, option):
                others = (other for other in range(len(chain.stages[stage].options)) if other != option)
                yield from ((*before, Leaf(stage, other), *after) for other in others)
                if after and chain.stages[stage].recomputable:
                    yield (*before, Segment((item,)), *after)
