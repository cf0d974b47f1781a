"""Schedules one edit away from another: for the last bytes that no table sees.

A table counts in slots and approximates. A candidate that is just too large in bytes often fits after one of these::

    unwrap a segment         0 (1 2) 3     ->  0 1 2 3
    move its last stage out  0 (1 2 3) 4   ->  0 (1 2) 3 4
    move a stage in          0 (1 2) 3 4   ->  0 (1 2 3) 4
    join two, or nest one    (0 1) (2 3) 4 ->  (0 1 2 3) 4   or   ((0 1) 2 3) 4
    wrap a few stages        0 1 2 3       ->  0 (1 2) 3
    another option           0 1 2         ->  0 1:1 2

and, where inputs of segments may move, so that more of them need take no more memory::

    divide one               (0 1 2) 3     ->  (0) (1 2) 3
    unnest one               ((0 1) 2) 3   ->  (0 1) (2) 3
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_rotor.chain import Chain
from lightning_rotor.planning import effort
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment
from lightning_rotor.simulator import first_inverted


def edits(schedule: Schedule, chain: Chain) -> Iterator[Schedule]:
    """Every schedule that is one edit away: O(n) for ``n`` stages."""
    may_invert = False
    for stage in chain:
        may_invert = may_invert or any(option.inverts for option in stage.options)
    for items in _edited(schedule.items, chain):
        edited = Schedule(items)
        # An inverted stage may have lost an input that somebody needs. Chains that invert nothing are spared the look.
        if may_invert and first_inverted(chain, edited) is not None:
            continue
        yield edited


def neighbours(chain: Chain, schedule: Schedule, *, divide: bool = False) -> list[Schedule]:
    """Schedules one edit away, or two if the chain is short; each once. ``divide``: divisions of segments as well."""
    near = list(edits(schedule, chain))
    if divide:
        near.extend(divisions(schedule))
    if len(chain) <= effort.current.twice_edited_stages:
        for edited in list(near):
            near.extend(edits(edited, chain))
    # In the order in which they were found, so that plans are the same in every run.
    return list(dict.fromkeys(near))


def divisions(schedule: Schedule) -> Iterator[Schedule]:
    """The schedule with one of its own segments in two parts."""
    items = schedule.items
    for index, item in enumerate(items):
        if isinstance(item, Leaf):
            continue
        for end in range(1, len(item.items)):
            part = item.items[:end]
            if len(part) == 1 and isinstance(part[0], Segment):
                first = part[0]
            elif isinstance(part[-1], Leaf):
                first = Segment(part)
            else:
                # A segment must end in a stage.
                continue
            yield Schedule((*items[:index], first, Segment(item.items[end:]), *items[index + 1 :]))


def _edited(items: tuple[Item, ...], chain: Chain) -> Iterator[tuple[Item, ...]]:
    """Items with one edit at any depth."""
    for index, item in enumerate(items):
        before, after = items[:index], items[index + 1 :]
        match item:
            case Segment():
                yield from _edits_of_segment(before, item, after, chain)
            case Leaf():
                yield from _edits_of_leaf(before, item, after, chain)


def _edits_of_segment(
    before: tuple[Item, ...],
    segment: Segment,
    after: tuple[Item, ...],
    chain: Chain,
) -> Iterator[tuple[Item, ...]]:
    inside = segment.items
    yield (*before, *inside, *after)
    for changed in _edited(inside, chain):
        yield (*before, Segment(changed), *after)
    # A segment must end in a stage, so its last one leaves only if a stage comes before it.
    if len(inside) > 1 and isinstance(inside[-2], Leaf):
        yield (*before, Segment(inside[:-1]), inside[-1], *after)
    match after:
        case (Segment(more), *rest):
            yield (*before, Segment(inside + more), *rest)
            yield (*before, Segment((segment, *more)), *rest)
        case (Leaf(stage) as leaf, *rest) if rest and chain.stages[stage].recomputable:
            # Only with something behind it: items must not end in a segment.
            yield (*before, Segment((*inside, leaf)), *rest)


def _edits_of_leaf(
    before: tuple[Item, ...],
    leaf: Leaf,
    after: tuple[Item, ...],
    chain: Chain,
) -> Iterator[tuple[Item, ...]]:
    for option in _next_options(chain, leaf):
        yield (*before, Leaf(leaf.stage, option), *after)
    wrapped: list[Item] = []
    neighbours_behind = after[: effort.current.longest_wrap - 1]
    for number, item in enumerate((leaf, *neighbours_behind)):
        if isinstance(item, Segment) or not chain.stages[item.stage].recomputable:
            return
        wrapped.append(item)
        behind = after[number:]
        if not behind:
            # At the end of items a segment would be recomputed at once, for nothing.
            return
        yield (*before, Segment(tuple(wrapped)), *behind)


def _next_options(chain: Chain, leaf: Leaf) -> list[int]:
    """Numbers of the options that save the next less and the next more bytes."""
    options = chain.stages[leaf.stage].options
    by_size = sorted(range(len(options)), key=lambda number: options[number].kept_bytes)
    rank = by_size.index(leaf.option)
    next_less = by_size[max(rank - 1, 0) : rank]
    next_more = by_size[rank + 1 : rank + 2]
    return next_less + next_more
