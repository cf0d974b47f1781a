"""What was measured of one module, and what that says about shapes that were not.

The ladder for a call of a new shape, from cheap to dear:

1. its plan is in the cache;
2. its costs follow from measured shapes (:mod:`lightning_rotor.planned.new_shapes`), and one of the schedules at hand fits them: milliseconds;
3. it is measured and planned, as the first shape was: seconds.

The third rung is for shapes that are half as large again as anything measured, and for those that no schedule at hand fits. While little was
measured, it is also for every fourth one that is far from all others and would be recomputed for want of better knowledge. So a training with
any number of shapes measures a handful of times, and one whose shapes grow without end once for each growth by half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.chain import Chain, UnlikeChainsError, combined
from lightning_rotor.memory.budget import Allowance
from lightning_rotor.planned.known_cuts import Signature
from lightning_rotor.planning import Plan, fastest_of
from lightning_rotor.private.values import spelled
from lightning_rotor.profiling import Profile
from lightning_rotor.profiling.chain import group_sizes, profile_over, remembered_places
from lightning_rotor.schedule import Leaf, Schedule
from lightning_rotor.stages.sequential import Stage, wiring_of

# ----------------------------------------------------------------------------------------------------
# What a chain costs for shapes that were never measured, from measurements of others: an upper bound, and a close one
# in between.


Shapes: TypeAlias = tuple[tuple[int, ...], ...]
_Matrix: TypeAlias = npt.NDArray[np.float64]

_MOST_VARIABLES = 3
_MOST_KNOWN = 4
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Bound:
    """How the costs for some shapes follow from measured ones.

    Attributes:
        weights: One for each measurement.
        smaller: Numbers of the measurements at shapes nowhere larger than the wanted ones.
        larger: Numbers of those at shapes nowhere smaller.
    """

    weights: tuple[float, ...]
    smaller: tuple[int, ...]
    larger: tuple[int, ...]

    def __call__(self, values: Sequence[float]) -> float:
        """The bound on a number whose values at the measured shapes are these."""
        value = sum(weight * each for weight, each in zip(self.weights, values, strict=True))
        value = min([value, *(values[number] for number in self.larger)])
        return max([0, value, *(values[number] for number in self.smaller)])


def chain_at(wanted: Shapes, known: Sequence[tuple[Shapes, Chain]]) -> Chain:
    """A chain that costs at least what the chain of the wanted shapes would, if it were measured.

    Args:
        wanted: Shapes of the tensors that the chain takes.
        known: Measured chains of the same model, at least one, with their shapes.
    Raises:
        UnlikeChainsError: They have other stages, options or skips, or too many dimensions vary.
    """
    # No row costs no more than one row, and nothing is a multiple of nothing.
    wanted = tuple(tuple(max(size, 1) for size in shape) for shape in wanted)
    chosen = sorted(known, key=lambda each: distance(each[0], wanted))[:_MOST_KNOWN]
    points = _points([shapes for shapes, _ in chosen], wanted)
    totals = np.array([_total_bytes(chain) for _, chain in chosen], dtype=float)
    bound = Bound(
        tuple(_weights(points[:-1], points[-1], totals)),
        tuple(number for number, (shapes, _) in enumerate(chosen) if _nowhere_larger(shapes, wanted)),
        tuple(number for number, (shapes, _) in enumerate(chosen) if _nowhere_larger(wanted, shapes)),
    )
    return combined(
        [chain for _, chain in chosen],
        of_bytes=lambda values: math.ceil(bound(values) - _TOLERANCE),
        of_seconds=bound,
    )


def distance(shapes: Shapes, wanted: Shapes) -> float:
    """By what factor some dimension differs most, as a logarithm."""
    return max(
        (
            abs(math.log(max(one, 1) / max(other, 1)))
            for left, right in zip(shapes, wanted, strict=True)
            for one, other in zip(left, right, strict=True)
        ),
        default=0.0,
    )


def growth(shapes: Sequence[Shapes], wanted: Shapes) -> float:
    """By what factor some dimension is larger than in all of the shapes; at most 1 if none is."""
    largest = [max(column) for column in zip(*(_flat(each) for each in shapes), strict=True)]
    return max((one / max(most, 1) for one, most in zip(_flat(wanted), largest, strict=True)), default=1.0)


def _flat(shapes: Shapes) -> list[int]:
    return [size for shape in shapes for size in shape]


def _nowhere_larger(shapes: Shapes, other: Shapes) -> bool:
    return all(one <= two for one, two in zip(_flat(shapes), _flat(other), strict=True))


def _total_bytes(chain: Chain) -> int:
    return sum(stage.output_bytes + stage.keep.saved_bytes + stage.keep.backward_peak_bytes for stage in chain)


# -------------------------------------------------------------------- weights


def _points(known: Sequence[Shapes], wanted: Shapes) -> _Matrix:
    """One row for each shape, the wanted one last; one column for each dimension that varies by itself."""
    columns = dict.fromkeys(zip(*(_flat(each) for each in (*known, wanted)), strict=True))
    varying = [column for column in columns if len(set(column)) > 1]
    if len(varying) > _MOST_VARIABLES:
        raise UnlikeChainsError(f"{len(varying)} dimensions vary")
    return np.array(varying, dtype=float).reshape(len(varying), len(known) + 1).T


def _weights(known: _Matrix, wanted: _Matrix, totals: _Matrix) -> _Matrix:
    """The weights of the least bound: a vertex of the dual program, found among all of them, for there are few."""
    powers = list(product(range(3), repeat=len(wanted)))
    # Divided by the wanted shape's monomials, so that every row asks for at least 1.
    rows = np.array([[np.prod((point / wanted) ** power) for point in known] for power in powers])
    best, least = None, math.inf
    for count in range(1, min(len(known), len(rows)) + 1):
        for columns in map(list, combinations(range(len(known)), count)):
            tight = np.array(list(combinations(range(len(rows)), count)))
            systems = rows[tight[:, :, None], np.array(columns)[None, None, :]]
            solvable = np.abs(np.linalg.det(systems)) > _TOLERANCE
            if not solvable.any():
                continue
            solutions = np.linalg.solve(systems[solvable], np.ones((int(solvable.sum()), count, 1)))[..., 0]
            fits = (solutions @ rows[:, columns].T >= 1 - _TOLERANCE).all(axis=1)
            bounds = np.where(fits, solutions @ totals[columns], math.inf)
            index = int(bounds.argmin())
            if bounds[index] < least:
                least, best = float(bounds[index]), np.zeros(len(known))
                best[columns] = solutions[index]
    assert best is not None  # one measurement alone always gives one
    return best


# ----------------------------------------------------------------------------------------------------


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
