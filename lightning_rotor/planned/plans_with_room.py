"""Plans of other calls under which a call of a step may run at once, without a search.

Steps rarely repeat where sizes change, or where some calls come in some steps only. So a plan knows how much room it
leaves: the bytes that earlier calls may hold when its call begins. A call of a new size, or behind other calls, runs
under the nearest plan for no smaller sizes that has room for what the earlier calls of the step hold by then::

                 planned           ┌── room of 3 ──┐
    path    1 ──► 2 ──► 3          │ held by 1, 2  │  and what of the limit no call of the path uses
    step    1 ───────► 3           │ held by 1  │     so 3 runs under the same plan
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lightning_rotor.planned.later_calls import CallOrder
from lightning_rotor.planned.module_plans import ModulePlans
from lightning_rotor.planned.other_sizes import lost_by, sizes_around
from lightning_rotor.planned.prepared import Prepared, Turn
from lightning_rotor.planned.signature import Signature

# Calls whose plan was found among those for larger sizes, or behind other calls.
_MOST_SHARED = 4096

_Place: TypeAlias = tuple[str, Signature, Turn]
"""Module, signature and turn of a call."""


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """A plan of another call that has room for this one, with the seconds that each call loses by it at most."""

    prepared: Prepared
    lost_seconds: float


class PlansWithRoom:
    """Plans that calls have borrowed from others.

    Args:
        order: The modules that steps have called together.
    """

    def __init__(self, order: CallOrder) -> None:
        self._order = order
        # Sizes return, and each call would pay for looking through all plans of its module again.
        self._borrowed: dict[_Place, SharedPlan] = {}

    def serving(self, plans: ModulePlans, signature: Signature, turn: Turn, held_bytes: int) -> SharedPlan | None:
        """The plan of a call of no smaller sizes that has room for one behind calls which hold so much.

        Args:
            plans: Of the module that is called.
            signature: Of the call.
            turn: Modules whose calls wait.
            held_bytes: That these calls hold.
        """
        place = plans.name, signature, turn
        shared = self._borrowed.pop(place, None)
        if shared is None or not _still_serves(shared.prepared, plans, held_bytes):
            shared = self._nearest(plans, signature, turn, held_bytes)
        if shared is not None:
            # Put behind all others, so that the first entry is the one that was used longest ago.
            self._borrowed[place] = shared
            if len(self._borrowed) > _MOST_SHARED:
                oldest = next(iter(self._borrowed))
                del self._borrowed[oldest]
        return shared

    def _nearest(self, plans: ModulePlans, signature: Signature, turn: Turn, held_bytes: int) -> SharedPlan | None:
        """The plan for the nearest sizes that are no smaller, with room for so much; by choice, of the same turn."""
        lendable = []
        for known, prepared in plans.cache.planned():
            # A schedule that the user has chosen is for the sizes that it was chosen for.
            if prepared.room_bytes is not None and not prepared.is_chosen:
                lendable.append((known, prepared))
        around = sizes_around(signature, lendable)
        nearest: Prepared | None = None
        nearest_rank = (False, 0)
        for prepared in around.larger:
            if not self._has_room(plans.name, prepared, turn, held_bytes):
                continue
            rank = prepared.turn != turn, prepared.signature.size
            if nearest is None or rank < nearest_rank:
                nearest = prepared
                nearest_rank = rank
        if nearest is None:
            return None
        if nearest.turn != turn or not nearest.plan.recomputed:
            # Behind other calls, the plan of a smaller size had another part of the budget, and bounds nothing.
            return SharedPlan(nearest, lost_seconds=0.0)
        least_overhead = 0.0
        for prepared in around.smaller:
            if prepared.turn == turn and not prepared.lost_seconds:
                least_overhead = max(least_overhead, prepared.plan.overhead)
        # Seconds are the larger size's, and fall about as elements do.
        share = signature.size / max(nearest.signature.size, 1)
        return SharedPlan(nearest, lost_by(nearest.plan, least_overhead) * share)

    def _has_room(self, name: str, prepared: Prepared, turn: Turn, held_bytes: int) -> bool:
        """True if a plan leaves what calls hold that wait in a turn, and what will come behind them."""
        assert prepared.room_bytes is not None
        if held_bytes > prepared.room_bytes:
            return False
        if prepared.turn == turn:
            return True
        # A call that is the second of its module finds other gradients than the first.
        if prepared.turn.count(name) != turn.count(name):
            return False
        # What came before the plan's call and may come behind this one would need room that nobody has kept.
        return not self._order.may_still_come(name, turn, prepared.turn)


def _still_serves(prepared: Prepared, plans: ModulePlans, held_bytes: int) -> bool:
    """True if a plan that was borrowed before is still in use, and has room."""
    if prepared.room_bytes is None or held_bytes > prepared.room_bytes:
        return False
    # Its room is told anew with each plan of its path, in another entry of the cache.
    return plans.cache.use(prepared.signature, prepared.turn) is prepared
