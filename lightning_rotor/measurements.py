"""What was measured of one module, and what that says about shapes that were not.

The ladder for a call of a new shape, from cheap to dear:

1. its plan is in the cache;
2. its costs follow from measured shapes (:mod:`lightning_rotor.shape_costs`), and one of the schedules at hand fits them: milliseconds;
3. it is measured and planned, as the first shape was: seconds.

The third rung is for shapes that are half as large again as anything measured, and for those that no schedule at hand fits. While little was
measured, it is also for every fourth one that is far from all others and would be recomputed for want of better knowledge. So a training with
any number of shapes measures a handful of times, and one whose shapes grow without end once for each growth by half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from lightning_rotor.allowance import Allowance
from lightning_rotor.combining import UnlikeChainsError
from lightning_rotor.known_cuts import Signature
from lightning_rotor.planning import Plan, fastest_of
from lightning_rotor.profiling import Profile
from lightning_rotor.profiling.moved import group_sizes, profile_over, remembered_places
from lightning_rotor.schedule import Leaf, Schedule
from lightning_rotor.sequential import Stage, wiring_of
from lightning_rotor.shape_costs import chain_at, distance, growth
from lightning_rotor.tensors import spelled

_FAR = 1.5
_HANDFUL = 3
_PATIENCE = 4
_MOST = 32
_NEAREST = 2
# A schedule at hand is as good as any if it recomputes nothing, or uses so much of its budget.
_WELL_USED = 0.9


@dataclass(slots=True, eq=False)
class _Measurement:
    signature: Signature
    profile: Profile
    menu: tuple[Schedule, ...] | None = None
    seen: list[Schedule] = field(default_factory=list)


class Measurements:
    """The measured signatures of one module.

    Args:
        menu: Schedules for a chain under an allowance, :func:`lightning_rotor.planning.menu`.
    """

    def __init__(self, menu: Callable[[Profile, Allowance], tuple[Schedule, ...]]) -> None:
        self._menu = menu
        self._known: list[_Measurement] = []
        self._vague = 0

    def add(self, signature: Signature, profile: Profile) -> None:
        """Remember what was measured; a signature's older measurement is dropped."""
        others = [known for known in self._known if known.signature != signature]
        self._known = [*others[1 - _MOST :], _Measurement(signature, profile)]

    def note(self, signature: Signature, plan: Plan) -> None:
        """A plan was made for a measured signature: its schedule may do for others."""
        for known in self._known:
            if known.signature == signature and plan.schedule not in known.seen:
                known.seen.append(plan.schedule)

    def drop(self, keep: Callable[[Signature], bool]) -> None:
        """Forget signatures of layers that are gone."""
        self._known = [known for known in self._known if keep(known.signature)]

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()

    def estimate(self, signature: Signature) -> Profile | None:
        """Costs for a signature that was not measured, at least as high as they would be, or None if they must be measured."""
        family = self._family(signature)
        if not family or growth([known.signature.shapes for known in family], signature.shapes) > _FAR:
            return None
        nearest = min(family, key=lambda known: distance(known.signature.shapes, signature.shapes))
        chains = [(known.signature.shapes, known.profile.chain) for known in family]
        try:
            chain = chain_at(signature.shapes, chains)
            first = replace(chain.stages[0], takes=_taken_by_first(nearest.profile.stages, signature))
            chain = replace(chain, stages=(first, *chain.stages[1:]))
            if nearest.signature.cut is signature.cut:
                return Profile(chain, nearest.profile.stages, nearest.profile.states)
            return profile_over(
                signature.cut.stages,
                chain,
                group_sizes=group_sizes(nearest.signature.cut.stages, nearest.profile.stages),
                remembered=remembered_places(nearest.profile),
            )
        except (UnlikeChainsError, ValueError, IndexError):
            return None

    def choose(self, signature: Signature, profile: Profile, allowance: Allowance, *, slots: int) -> Plan | None:
        """The fastest schedule at hand for estimated costs, or None if none fits."""
        family = self._family(signature)

        def best(schedules: Iterable[Schedule]) -> Plan | None:
            return fastest_of(
                dict.fromkeys(schedules),
                profile.chain,
                max(allowance.budget_bytes, 1),
                gradients_exist=allowance.gradients_exist,
                lingering_bytes=allowance.lingering_bytes,
                slots=slots,
            )

        plain = Schedule(tuple(Leaf(stage) for stage in range(len(profile.chain))))
        found = best([plain, *(schedule for known in family for schedule in known.seen)])
        # A menu costs a solution of the measured chain once, and for each shape a simulation of every schedule on it. So of many measured
        # shapes only the nearest are asked, the very nearest first.
        for known in sorted(family, key=lambda known: distance(known.signature.shapes, signature.shapes))[:_NEAREST]:
            if found is not None and (not found.recomputed or found.peak_bytes >= _WELL_USED * found.budget_bytes):
                break
            if known.menu is None:
                known.menu = self._menu(known.profile, allowance)
            found = best([*known.menu, *([] if found is None else [found.schedule])])
        return found

    def is_vague(self, signature: Signature) -> bool:
        """Whether too little was measured, too far away, for costs that are not much too high, and that for the fourth time."""
        family = self._family(signature)
        nearest = min(distance(known.signature.shapes, signature.shapes) for known in family)
        if len(family) >= _HANDFUL or nearest <= math.log(_FAR):
            return False
        self._vague += 1
        return self._vague % _PATIENCE == 0

    def _family(self, signature: Signature) -> list[_Measurement]:
        return [known for known in self._known if known.signature.same_but_shapes(signature)]


def _taken_by_first(stages: Sequence[Stage], signature: Signature) -> tuple[str, ...]:
    """Tensors that the first stage reads, for which a plan is made."""
    names = tuple(spelled(kind[0], shape) for kind, shape in zip(signature.kinds, signature.shapes, strict=True))
    reads = wiring_of(stages).wire.reads
    if len(reads) != len(names):  # one value that holds several
        return names
    return tuple(name for read, name in zip(reads, names, strict=True) if read in stages[0].reads)
