"""Bytes that steps have taken around the calls of paths: the loss, the user's code between calls, what both hold.

They are measured for some paths, and follow for others: from a path of the same calls with other sizes in proportion,
or call by call from a path with other calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lightning_rotor.chain import Chain
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.joint_paths import Path, are_alike, copied_bytes, kept_bytes
from lightning_rotor.planned.running_step import Call, Step
from lightning_rotor.planning import Plan
from lightning_rotor.planning.joint_chain import Outside, concatenated, joined
from lightning_rotor.planning.outside import measured_outside
from lightning_rotor.planning.step_phases import Mark, PhaseKind, StepPhase
from lightning_rotor.simulator import Conditions, simulate

MOST_PATHS = 64
"""Paths whose measurements and plans are kept."""


@dataclass(frozen=True, slots=True)
class Around:
    """Bytes around the calls of a path.

    Attributes:
        outside: One entry a call.
        kept_bytes: That the calls keep if nothing is recomputed.
        is_exact: The costs of all calls were measured. Beside bounds on costs, which are too high, what lies around the
            calls seems less than it is.
    """

    outside: list[Outside]
    kept_bytes: int
    is_exact: bool = True

    def at_least(self, other: Around) -> Around:
        """The larger of each of two measurements."""
        both = zip(self.outside, other.outside, strict=True)
        return replace(self, outside=[one.at_least(another) for one, another in both])

    def scaled_to(self, kept_bytes: int) -> Around:
        """Bytes around larger calls, in proportion; around smaller ones, no less."""
        factor = kept_bytes / max(self.kept_bytes, 1)
        # A part of what is around calls does not depend on their sizes. So nothing shrinks.
        if factor <= 1:
            return self
        outside = [outside_call.scaled(factor) for outside_call in self.outside]
        return replace(self, outside=outside, kept_bytes=kept_bytes)


class AroundCalls:
    """Bytes around the calls of each path that was seen whole, as measured.

    Args:
        budget: Says what a chain may use that copies so many bytes.
    """

    def __init__(self, budget: Callable[[Chain, int], Budget]) -> None:
        self._budget = budget
        self._measured: dict[Path, Around] = {}
        self._seen_in_part: set[Path] = set()

    def forget(self, path: Path) -> None:
        """Drop what is known of a path."""
        self._measured.pop(path, None)
        self._seen_in_part.discard(path)

    def of(self, path: Path, chains: Sequence[Chain], *, is_exact: bool = False) -> Around | None:
        """Bytes around the calls of a path, as measured or as follows from another path; None before any measurement.

        That is the one of most calls in common. What is not measured takes as much as the most around any call.

        Args:
            path: The calls.
            chains: Of the calls.
            is_exact: Their costs were measured, so that what lies around calls with bounds on costs is too little.
        """
        own = self._measured.get(path)
        if own is not None and (own.is_exact or not is_exact):
            return own
        wanted_bytes = kept_bytes(chains)
        other = self._most_like(path, wanted_bytes, is_exact=is_exact)
        if other is None:
            return None
        measured = self._measured[other]
        if are_alike(path, other):
            return measured.scaled_to(wanted_bytes)
        by_name: dict[str, Outside] = {}
        most = Outside()
        # A module that is called several times has the most of its calls: nobody knows which of them this one is.
        for key, outside in zip(other, measured.outside, strict=True):
            by_name[key.name] = outside.at_least(by_name.get(key.name, outside))
            most = most.at_least(outside)
        around = [by_name.get(key.name, most) for key in path]
        # Behind the last call comes the loss, whichever call that is.
        around[-1] = around[-1].at_least(measured.outside[-1])
        return replace(measured, outside=around).scaled_to(wanted_bytes)

    def _most_like(self, path: Path, wanted_bytes: int, *, is_exact: bool) -> Path | None:
        """The measured path with most modules in common, of the nearest size; None if none was measured.

        ``is_exact``: those whose calls had bounds on costs do not count.
        """
        names = {key.name for key in path}
        best: Path | None = None
        best_rank = (0, False, 0)
        for other, measured in self._measured.items():
            if is_exact and not measured.is_exact:
                continue
            in_common = len(names & {key.name for key in other})
            # Of paths with the same modules, the same order goes before a near size: what is behind a call moves with
            # its place.
            rank = in_common, are_alike(path, other), -abs(measured.kept_bytes - wanted_bytes)
            if best is None or rank > best_rank:
                best = other
                best_rank = rank
        return best

    def learn(
        self,
        path: Path,
        calls: Sequence[Call],
        step: Step,
        phases: Sequence[StepPhase],
        *,
        exceeds: bool,
    ) -> bool:
        """Keep what a step has taken around some calls. True if it is the first measurement of their path that serves.

        Args:
            path: Of the calls.
            calls: Of the step.
            step: The step, which is over.
            phases: Peaks of the step; empty if nobody has measured it.
            exceeds: The step has taken more than the limit.
        """
        if not phases:
            return False
        if not _sees_all_backwards(step, calls, phases) and path not in self._seen_in_part:
            # The next step may show all of it. If it does not, this is all there is: a call without a gradient.
            self._seen_in_part.add(path)
            return False
        measured = self._in_step(path, calls, step, phases)
        if measured is None:
            return False
        before = self._measured.get(path)
        if before is not None and exceeds:
            # What was measured before was too little, and may still be the most at another moment of the step.
            measured = measured.at_least(before)
        # Smaller calls say less of the sizes that the path is for.
        is_of_these_sizes = all(call.signature == call.key.signature for call in calls)
        if before is None or exceeds or is_of_these_sizes:
            # Put behind all others, so that the first entries are those that were measured longest ago.
            self._measured.pop(path, None)
            self._measured[path] = measured
            for oldest in list(self._measured)[:-MOST_PATHS]:
                del self._measured[oldest]
        return before is None or (measured.is_exact and not before.is_exact)

    def learn_excess(self, path: Path, others: Iterable[Path]) -> None:
        """Let other paths of the same calls have as much around them as a step beyond the limit has shown of one."""
        exceeded = self._measured.get(path)
        if exceeded is None:
            return
        for other in others:
            measured = self._measured.get(other)
            if measured is not None:
                self._measured[other] = measured.at_least(exceeded.scaled_to(measured.kept_bytes))

    def _in_step(
        self,
        path: Path,
        calls: Sequence[Call],
        step: Step,
        phases: Sequence[StepPhase],
    ) -> Around | None:
        """Bytes that a step has taken around some calls; None if the meter did not see all of them."""
        # Of the sizes that have come, which may be smaller than those that the plans are for.
        chains = [_chain_as_called(call) for call in calls]
        chain = joined([key.name for key in path], chains)
        schedule = concatenated([call.plan.schedule for call in calls])
        budget = self._budget(chain, copied_bytes(call.prepared.profile for call in calls))
        beyond = []
        for phase in phases:
            if not phase.is_final:
                # What is kept free for the rest of the step is in the budget already.
                beyond.append(phase.raised(-budget.reserved_bytes))
        conditions = with_link_of([call.plan for call in calls], budget.conditions)
        outside = measured_outside(
            simulate(chain, schedule, **conditions),
            list(map(len, chains)),
            [step.numbers[call] for call in calls],
            beyond,
            lingering_bytes=budget.lingering_bytes,
        )
        if outside is None:
            return None
        is_exact = not any(call.prepared.costs.estimated for call in calls)
        planned_bytes = kept_bytes(call.plan.chain for call in calls)
        return Around(outside, kept_bytes(chains), is_exact).scaled_to(planned_bytes)


def with_link_of(plans: Iterable[Plan], conditions: Conditions) -> Conditions:
    """The conditions of several calls, with the link of those that move something: plans for several do not."""
    # A call that was planned alone keeps its plan in a step of several, moves included.
    for plan in plans:
        if plan.schedule.moves:
            return {**conditions, "link": plan.link}
    return conditions


def _sees_all_backwards(step: Step, calls: Sequence[Call], phases: Sequence[StepPhase]) -> bool:
    """True if the meter has seen the backward of all of these calls."""
    marks = {phase.mark for phase in phases}
    return all(Mark(PhaseKind.BACKWARD, step.numbers[call]) in marks for call in calls)


def _chain_as_called(call: Call) -> Chain:
    """Costs of a call as it came; of the sizes that its plan is for if nobody knows its own."""
    if call.signature is None or call.signature == call.key.signature:
        return call.plan.chain
    costs = call.key.plans.class_costs(call.signature, call.key.turn)
    return call.plan.chain if costs is None else costs.profile.chain
