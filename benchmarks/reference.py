"""Slow oracles: what the planner must find, found by trying everything.

Nothing here knows of slots, thresholds or recurrences. The number of schedule trees over ``n`` stages with one option each is the
large Schröder number (1, 2, 6, 22, 90, 394, 1806, ...), so six stages are quick and ten are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from lightning_rotor.chain import Chain
from lightning_rotor.planning.schedule_search import segments_around
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment
from lightning_rotor.simulator import simulate


@dataclass(frozen=True, slots=True)
class Judged:
    """A schedule and what the simulator says of it."""

    schedule: Schedule
    peak_bytes: int
    seconds: float


def all_schedules(chain: Chain) -> Iterator[Schedule]:
    """Every schedule of a chain, once."""
    for items in _all_items(chain, 0, len(chain) - 1):
        if not _inverts(chain, items[0]):
            yield Schedule(items)


def judge_all(chain: Chain, *, gradients_exist: bool = False, lingering_bytes: int = 0) -> list[Judged]:
    """Every schedule with its simulated peak and duration, by rising peak."""
    judged = []
    for schedule in all_schedules(chain):
        simulation = simulate(chain, schedule, gradients_exist=gradients_exist, lingering_bytes=lingering_bytes)
        judged.append(Judged(schedule, simulation.peak_bytes, simulation.seconds))
    return sorted(judged, key=lambda each: (each.peak_bytes, each.seconds))


def best_by_budget(judged: list[Judged]) -> dict[int, Judged]:
    """For every distinct budget level the fastest schedule that fits it."""
    best: dict[int, Judged] = {}
    fastest = judged[0]
    for each in judged:
        fastest = min(fastest, each, key=lambda candidate: candidate.seconds)
        best[each.peak_bytes] = fastest
    return best


def _all_items(chain: Chain, first: int, last: int) -> Iterator[tuple[Item, ...]]:
    """Every way to run stages ``first..last`` that ends in a kept stage."""
    options = [Leaf(first, option) for option in range(len(chain.stages[first].options))]
    if first == last:
        yield from ((leaf,) for leaf in options)
        return
    for rest in _all_items(chain, first + 1, last):
        drops = _inverts(chain, rest[0])
        ways = [leaf for leaf in options if not (drops and chain.stages[first].options[leaf.option].needs_exact_output)]
        yield from ((leaf, *rest) for leaf in ways)
    for end in range(first, last):
        if not chain.stages[end].recomputable:
            return
        for body in _all_items(chain, first, end):
            if _inverts(chain, body[0]):
                continue
            for rest in _all_items(chain, end + 1, last):
                yield (Segment(body), *rest)


def _inverts(chain: Chain, item: Item) -> bool:
    """An inverted stage, which may not come first."""
    return isinstance(item, Leaf) and chain.stages[item.stage].options[item.option].inverts


# -------------------------------------------------------------------- schedules that people write by hand


def baselines(chain: Chain) -> dict[str, Schedule]:
    """Schedules by name.

    ``keep_all``: plain training. ``per_stage``: every stage is a segment of its own, but for the last. ``whole``:
    everything but the last stage is one segment. ``halving``: the first half is a segment, which is halved in the same
    way when it is recomputed. ``periodic_k``: ``k`` segments of equal length, the last of which is kept, as
    ``checkpoint_sequential`` makes them.
    """
    n = len(chain)
    named = {
        "keep_all": Schedule.keep_all(n),
        "per_stage": _cut(chain, list(range(n))),
        "whole": _cut(chain, [0, n - 1]),
        "halving": Schedule(tuple(_halved(chain, 0, n - 1))),
    }
    for segments in range(2, n):
        named[f"periodic_{segments}"] = _cut(chain, [index * (n // segments) for index in range(segments)])
    return named


def _cut(chain: Chain, starts: list[int]) -> Schedule:
    """Segments from each start to the next; the stages behind the last start are kept."""
    items: list[Item] = []
    for start, following in pairwise(starts):
        items += segments_around(chain, start, following - 1)
    return Schedule((*items, *(Leaf(stage) for stage in range(starts[-1], len(chain)))))


def _halved(chain: Chain, first: int, last: int) -> list[Item]:
    middle = (first + last + 1) // 2
    rest: list[Item] = [Leaf(stage) for stage in range(middle, last + 1)]
    if middle == first:
        return rest
    if not all(chain.stages[stage].recomputable for stage in range(first, middle)):
        return [*segments_around(chain, first, middle - 1), *rest]
    return [Segment(tuple(_halved(chain, first, middle - 1))), *rest]
