"""Slow oracles: what the planner must find, found by trying everything.

Nothing here knows of slots, thresholds or recurrences. The number of schedule trees over ``n`` stages with one option each is the
large Schröder number (1, 2, 6, 22, 90, 394, 1806, ...), so six stages are quick and ten are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_rotor.chain import Chain
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
