"""A plan is data: a schedule for one chain and one budget, with its simulated cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from lightning_rotor.chain import Chain
from lightning_rotor.errors import PlanError
from lightning_rotor.link import Link
from lightning_rotor.planning import plan_file
from lightning_rotor.planning.bounds import lower_bound_seconds
from lightning_rotor.planning.effort import DEFAULT_SLOTS
from lightning_rotor.planning.frontier import Frontier, frontier_of
from lightning_rotor.planning.moving_search import MovingSearch
from lightning_rotor.planning.schedule_search import fine_slots
from lightning_rotor.schedule import Schedule, leaves, schedule_line
from lightning_rotor.shown import Shown, table_of
from lightning_rotor.simulator import Conditions, Simulation, simulate
from lightning_rotor.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Plan(Shown):
    """A schedule for one chain and one budget. Printed, it is a table.

    Attributes:
        budget_bytes: Memory that was allowed.
        simulation: Peak and duration, step by step.
        solve_seconds: Time spent on finding it. Plans from one solver share the table; the first one pays for it.
        gradients_exist: See :func:`lightning_rotor.simulator.simulate`.
        lingering_bytes: See :func:`lightning_rotor.simulator.simulate`.
        slots: Memory levels that the program told apart.
        link: Over which it may move what stages hold; None if it moves nothing.
    """

    chain: Chain
    schedule: Schedule
    budget_bytes: int
    simulation: Simulation
    solve_seconds: float
    gradients_exist: bool = False
    lingering_bytes: int = 0
    slots: int = DEFAULT_SLOTS
    link: Link | None = None

    @property
    def conditions(self) -> Conditions:
        """The step around the chain, for whatever simulates or plans it."""
        conditions: Conditions = {"gradients_exist": self.gradients_exist, "lingering_bytes": self.lingering_bytes}
        return conditions if self.link is None else {**conditions, "link": self.link}

    @property
    def peak_bytes(self) -> int:
        """Simulated peak, at most ``budget_bytes``."""
        return self.simulation.peak_bytes

    @property
    def seconds(self) -> float:
        """Simulated duration of forward, recomputation and backward."""
        return self.simulation.seconds

    @property
    def overhead(self) -> float:
        """Time beyond plain training as a fraction of it: 0.25 is 25 % slower."""
        return self.simulation.overhead

    @property
    def lower_bound_seconds(self) -> float:
        """Least duration of any execution within the budget, as far as is proven: see :mod:`.bounds`."""
        return lower_bound_seconds(self.chain, self.budget_bytes, **self.conditions)

    @property
    def gap(self) -> float:
        """Part of the duration that another execution might save: at 0.01 none is more than 1 % faster."""
        if self.seconds <= 0:
            return 0.0
        return 1 - self.lower_bound_seconds / self.seconds

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Numbers of the stages whose forward runs more than once."""
        return self.schedule.recomputed

    @property
    def moved(self) -> tuple[int, ...]:
        """Numbers of the stages whose saved tensors, or whose segment's input, are elsewhere meanwhile."""
        return self.schedule.moved

    @property
    def host_bytes(self) -> int:
        """Most that is in the other memory at a time."""
        return self.simulation.host_bytes

    @property
    def stall_seconds(self) -> float:
        """Simulated waits for copies, a part of ``seconds``."""
        return self.simulation.stall_seconds

    @property
    def carried_share(self) -> float | None:
        """Share of the peak without recomputation that the link carries out during a forward; None without link.

        It says how much moving can gain before anything is planned: with a tenth little, with a third much.
        """
        if self.link is None:
            return None
        forward_seconds = sum(stage.keep.forward_seconds for stage in self.chain)
        return self.link.out * forward_seconds / max(plain_simulation(self).peak_bytes, 1)

    @property
    def inverted(self) -> tuple[int, ...]:
        """Numbers of the stages that drop their input and rebuild it from their output."""
        stages = self.chain.stages
        every_leaf = (leaf for item in self.schedule.items for leaf in leaves(item))
        return tuple(leaf.stage for leaf in every_leaf if stages[leaf.stage].options[leaf.option].inverts)

    @property
    def calls(self) -> tuple[Plan, ...]:
        """The plans of the calls that it is for: a plan for a step may be for several."""
        return (self,)

    def frontier(self) -> Frontier:
        """The curve of memory against time for the plan's chain, which is solved once more: a plan holds no tables."""
        search = MovingSearch(self.chain, slots=fine_slots(len(self.chain), self.slots), **self.conditions)
        return frontier_of(search, budget_bytes=self.budget_bytes)

    def to_plain(self) -> dict[str, Any]:
        """All but the chain and seconds as strings, numbers and flags by name, for files and checkpoints."""
        return {
            "schedule": str(self.schedule),
            "budget_bytes": self.budget_bytes,
            "gradients_exist": self.gradients_exist,
            "lingering_bytes": self.lingering_bytes,
            "slots": self.slots,
            **({} if self.link is None else {"link": asdict(self.link)}),
        }

    def save(self, path: Path | str) -> None:
        """Write the plan to a file, which is replaced if it exists, for the same model and input."""
        plan_file.write(path, plan_file.content_of(self.chain, self.to_plain()))

    @classmethod
    def load(cls, path: Path | str, chain: Chain) -> Plan:
        """Read a plan for the chain that it was made for.

        Args:
            path: What :meth:`save` has written.
            chain: Of the model that is to run under the plan, as measured now: it gives the costs on this machine.
        Returns:
            The plan, simulated anew.
        Raises:
            PlanError: The file holds no plan; the plan was made for another model, shape, dtype or device (says what
                differs first); or it takes more than its budget on this machine.
        """
        with plan_file.damage_as_plan_errors(path):
            return _moved(path, plan_file.read(path), chain)

    def summary(self) -> str:
        """The plan on one line."""
        moved = f", {len(self.moved)} moved" if self.moved else ""
        return (
            f"{len(self.chain)} stages within {format_bytes(self.budget_bytes)}: peak {format_bytes(self.peak_bytes)}, "
            f"{format_seconds(self.seconds)} per step (+{self.overhead:.1%}), "
            f"{len(self.recomputed)} stages recomputed{moved}: {schedule_line(self.schedule)}"
        )

    def table(self) -> Any:
        """Tables of the plan's costs and of its stages, for ``rich.print``; printed, a plan shows them."""
        return table_of(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.summary()}>"


def scheduled(
    chain: Chain,
    schedule: Schedule,
    budget_bytes: int | None = None,
    *,
    solve_seconds: float = 0.0,
    slots: int = DEFAULT_SLOTS,
    **conditions: Unpack[Conditions],
) -> Plan:
    """A schedule from elsewhere as a plan, by default with its peak as budget; a ScheduleError if it is another's."""
    simulation = simulate(chain, schedule, **conditions)
    # Otherwise a schedule that somebody wrote by hand would seem to exceed a budget that nobody named.
    if budget_bytes is None:
        budget_bytes = simulation.peak_bytes
    return Plan(chain, schedule, budget_bytes, simulation, solve_seconds, slots=slots, **conditions)


def from_plain(record: Mapping[str, Any], chain: Chain) -> Plan:
    """A plan from :meth:`Plan.to_plain` and its seconds, simulated anew; a LookupError, TypeError or ValueError."""
    return scheduled(
        chain,
        Schedule.parse(record["schedule"]),
        plan_file.whole_number(record, "budget_bytes"),
        solve_seconds=record["solve_seconds"],
        # Of a damaged file it may be 0, with which nothing can be solved.
        slots=max(plan_file.whole_number(record, "slots"), 1),
        gradients_exist=bool(record["gradients_exist"]),
        lingering_bytes=plan_file.whole_number(record, "lingering_bytes"),
        link=_link_of(record),
    )


def _link_of(record: Mapping[str, Any]) -> Link | None:
    link = record.get("link")
    if link is None:
        return None
    # Host memory without a bound is None, in a file as in a Link.
    room_bytes = None if link["room_bytes"] is None else plan_file.whole_number(link, "room_bytes")
    return Link(link["out"], link["back"], link["latency"], room_bytes)


def plan_for(plan: Plan, chain: Chain) -> Plan:
    """The plan with the costs of a chain that differs only in timings and in what kernels take, as measured now.

    Raises a PlanError as :meth:`Plan.load` does.
    """
    # Equal costs to the last bit: the simulation would be the same one.
    if plan.chain == chain:
        return plan
    content = plan_file.content_of(plan.chain, plan.to_plain())
    # By way of a file's content, so that plans in memory and in files are refused for the same reasons.
    return replace(_moved("the plan", content, chain), solve_seconds=plan.solve_seconds)


def plain_simulation(plan: Plan) -> Simulation:
    """Simulation of a plan's chain without recomputation, under the same conditions."""
    return simulate(plan.chain, Schedule.keep_all(len(plan.chain)), **plan.conditions)


def _moved(what: object, content: Mapping[str, Any], chain: Chain) -> Plan:
    """The plan that :meth:`Plan.save` writes, on a chain; a PlanError if it is another's, or takes too much there."""
    plan_file.check_chain(what, content, chain)
    plan = from_plain({**content, "solve_seconds": 0.0}, chain)
    # Kernels of another version may take more for themselves, which no fingerprint tells.
    if plan.peak_bytes > plan.budget_bytes:
        raise PlanError(
            f"{what} takes {format_bytes(plan.peak_bytes)} on this machine, which is more than its budget of "
            f"{format_bytes(plan.budget_bytes)}: plan anew"
        )
    return plan
