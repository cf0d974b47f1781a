"""Calls that will come behind one that begins, as far as the steps before tell.

A plan for a call has to leave room for those behind it, and nobody knows them yet. Steps are mostly like an earlier
one, with other sizes::

    planned before    image 64 ──► text 64 ──► head 64
    this step         image 80 ──► text 80 ·····► head 80     expected, when the text's call begins
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_rotor.planned.joint_paths import Path
from lightning_rotor.planned.prepared import Prepared, Turn
from lightning_rotor.planned.running_step import CallKey
from lightning_rotor.planned.size_classes import moved
from lightning_rotor.planning.joint_chain import StepPlan


class CallOrder:
    """The modules that steps have called together, and those that steps with others have left out."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        # Pairs of modules: some step has called the second without the first.
        self._left_out: set[tuple[str, str]] = set()
        # Pairs of modules: some step has called the first behind the second.
        self._behind: set[tuple[str, str]] = set()

    def note(self, names: Sequence[str]) -> None:
        """Calls of these modules have waited together, in this order."""
        self._seen.update(names)
        absent = self._seen.difference(names)
        for place, name in enumerate(names):
            self._left_out.update((other, name) for other in absent)
            self._behind.update((other, name) for other in names[place + 1 :])

    def is_left_out(self, name: str, other: str) -> bool:
        """True if a step that has called another module may be expected not to call this one behind it."""
        return (name, other) in self._left_out and (name, other) not in self._behind

    def may_still_come(self, name: str, turn: Turn, before: Sequence[str]) -> list[int]:
        """Places of calls that come before one in other steps, did not in this one, and may come behind it instead.

        Args:
            name: The module that is called.
            turn: Modules whose calls wait in this step.
            before: Modules that were called before it in another step.
        """
        here = list(turn)
        missing = []
        for place, other in enumerate(before):
            if other in here:
                # Each call of this step stands for one of the other: a module may be called several times.
                here.remove(other)
            elif not self.is_left_out(other, name):
                missing.append(place)
        return missing


class _LikeStep(NamedTuple):
    """A path that was planned before, and the place in it of the call that begins; -1 if that is before all of it."""

    path: Path
    place: int


def later_calls(key: CallKey, planned: Mapping[Path, StepPlan], order: CallOrder) -> list[CallKey]:
    """Calls that will come behind one that begins, as in the path before that is most like this step.

    Each of them has costs in its module's cache. The list ends before a call whose costs nobody knows.
    """
    like = _most_like(key, planned)
    if like is None:
        return []
    path, place = like
    sizes_before = key.signature
    if place >= 0 and path[place].plans is key.plans:
        sizes_before = path[place].signature
    names_before = [other.name for other in path[: max(place, 0)]]
    missing = [path[number] for number in order.may_still_come(key.name, key.turn, names_before)]
    turn = (*key.turn, key.name)
    later: list[CallKey] = []
    for other in (*path[place + 1 :], *missing):
        # Sizes that the calls have in common change alike, so the call that begins tells those of later ones.
        sizes = moved(other.signature, sizes_before, key.signature)
        signature = other.plans.classes.of(sizes)
        costs = other.plans.class_costs(signature, turn)
        # Measuring takes the call's input, which does not exist yet. The rest is planned when that call begins.
        if costs is None:
            break
        follower = CallKey(other.plans, signature, turn)
        if not isinstance(follower.entry(), Prepared):
            other.plans.cache.put(signature, costs)
        later.append(follower)
        turn = (*turn, other.name)
    return later


def _most_like(key: CallKey, planned: Mapping[Path, StepPlan]) -> _LikeStep | None:
    """The path that is most like a step from a call on; None if nothing was planned.

    Of equally good ones it is the one that needs most. A module that no path has called comes behind the calls that
    wait already.
    """
    best: _LikeStep | None = None
    best_rank = (False, False, 0)
    for path, plan in planned.items():
        place, is_there, is_same_turn = _place_in(path, key)
        rank = is_same_turn, is_there, plan.chain.kept_bytes
        if best is None or rank > best_rank:
            best = _LikeStep(path, place)
            best_rank = rank
    return best


def _place_in(path: Path, key: CallKey) -> tuple[int, bool, bool]:
    """The place of a call in a path, or that of the call before it, if it is there itself, and behind the same ones."""
    family = key.signature.family
    number = key.turn.count(key.name)
    place = -1
    for other_place, other in enumerate(path):
        if key.turn and other.name == key.turn[-1]:
            place = other_place
        # The second call of a module stands for the second: it finds other gradients than the first.
        if other.plans is not key.plans or other.turn.count(key.name) != number:
            continue
        if other.signature.family == family:
            return other_place, True, other.turn == key.turn
    return place, False, False
