"""A plan: a schedule for one chain and one budget, with its simulated cost; and plans as JSON.

A plan holds for one model with one input signature on one kind of device. Its file has nothing measured in seconds: it
names every stage with the tensors that it reads, saves and hands on, and a chain that differs in any of it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Group
from rich.table import Table
from typing_extensions import Unpack

from lightning_rotor.chain import Chain, StageIdentity
from lightning_rotor.errors import PlanError, ScheduleError
from lightning_rotor.planning.bounds import lower_bound_seconds
from lightning_rotor.planning.frontier import Frontier
from lightning_rotor.schedule import Schedule, leaves
from lightning_rotor.simulator import Conditions, Simulation, simulate
from lightning_rotor.units import format_bytes, format_seconds, rendered

DEFAULT_SLOTS = 500
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule for one chain and one budget. Printed, it is a table.

    Attributes:
        budget_bytes: Memory that was allowed.
        simulation: Peak and duration, step by step.
        solve_seconds: Time spent on finding it. Plans from one solver share the table; the first one pays for it.
        gradients_exist: See :func:`lightning_rotor.simulator.simulate`.
        lingering_bytes: See :func:`lightning_rotor.simulator.simulate`.
        slots: Memory levels that the program told apart.
    """

    chain: Chain
    schedule: Schedule
    budget_bytes: int
    simulation: Simulation
    solve_seconds: float
    gradients_exist: bool = False
    lingering_bytes: int = 0
    slots: int = DEFAULT_SLOTS

    # Set by the modules that solve and print plans, since they import this one.
    solved_frontier: ClassVar[Callable[[Plan], Frontier]]
    tables: ClassVar[Callable[[Plan], tuple[Table, ...]]]

    @property
    def conditions(self) -> Conditions:
        """The step around the chain, for whatever simulates or plans it."""
        return {"gradients_exist": self.gradients_exist, "lingering_bytes": self.lingering_bytes}

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
        return 1 - self.lower_bound_seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Numbers of the stages whose forward runs more than once."""
        return self.schedule.recomputed

    @property
    def inverted(self) -> tuple[int, ...]:
        """Numbers of the stages that drop their input and rebuild it from their output."""
        every = (leaf for item in self.schedule.items for leaf in leaves(item))
        return tuple(leaf.stage for leaf in every if self.chain.stages[leaf.stage].options[leaf.option].inverts)

    @property
    def calls(self) -> tuple[Plan, ...]:
        """The plans of the calls that it is for: a plan for a step may be for several."""
        return (self,)

    @property
    def is_of_step(self) -> bool:
        """True if it counts what the step does between its calls."""
        return False

    def frontier(self) -> Frontier:
        """The curve of memory against time for the plan's chain, which is solved once more: a plan holds no tables."""
        return Plan.solved_frontier(self)

    def to_plain(self) -> dict[str, Any]:
        """All but the chain and seconds as strings, numbers and flags by name, for files and checkpoints."""
        plain = {"schedule": str(self.schedule), "budget_bytes": self.budget_bytes}
        return {**plain, **self.conditions, "slots": self.slots}

    def save(self, path: Path | str) -> None:
        """Write the plan to a file, which is replaced if it exists, for the same model and input."""
        content = {
            "format": _FORMAT,
            "fingerprint": self.chain.fingerprint,
            "device": self.chain.device,
            "stages": [asdict(stage) for stage in self.chain.identity],
            **self.to_plain(),
        }
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

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
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise PlanError(f"{path} has format {content['format']!r}: expected {_FORMAT}, written by this version")
            stages = [StageIdentity(**{key: _as_tuple(stage[key]) for key in stage}) for stage in content["stages"]]
            device, fingerprint, arguments = content["device"], content["fingerprint"], _arguments(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, PlanError):
                raise
            reason = error if isinstance(error, ScheduleError) else f"{type(error).__name__}: {error}"
            raise PlanError(f"{path} holds no plan ({reason}): expected a file that Plan.save has written") from error
        if fingerprint != chain.fingerprint:
            raise _made_for_another(path, stages, device, chain)
        return _fitting(path, scheduled(chain, **arguments))

    def summary(self) -> str:
        """The plan on one line."""
        return (
            f"{len(self.chain)} stages within {format_bytes(self.budget_bytes)}: peak {format_bytes(self.peak_bytes)}, "
            f"{format_seconds(self.seconds)} per step (+{self.overhead:.1%}), "
            f"{len(self.recomputed)} stages recomputed: {self.schedule}"
        )

    def __rich__(self) -> Group:
        return Group(*Plan.tables(self))

    def __str__(self) -> str:
        return rendered(*Plan.tables(self))


save_plan, load_plan = Plan.save, Plan.load


def scheduled(
    chain: Chain,
    schedule: Schedule,
    budget_bytes: int | None = None,
    *,
    solve_seconds: float = 0.0,
    slots: int = DEFAULT_SLOTS,
    **step: Unpack[Conditions],
) -> Plan:
    """A schedule from elsewhere as a plan, whose budget is its peak if none is given.

    Arguments as for :func:`lightning_rotor.planning.plan`. A ScheduleError if it does not belong to the chain.
    """
    simulation = simulate(chain, schedule, **step)
    budget_bytes = simulation.peak_bytes if budget_bytes is None else budget_bytes
    return Plan(chain, schedule, budget_bytes, simulation, solve_seconds, slots=slots, **step)


def from_plain(record: Mapping[str, Any], chain: Chain) -> Plan:
    """A plan from what :meth:`Plan.to_plain` wrote and its seconds, simulated anew on its chain as measured now.

    Raises a ScheduleError if it does not belong to the chain; a KeyError, TypeError or ValueError if it is damaged.
    """
    return scheduled(chain, solve_seconds=record["solve_seconds"], **_arguments(record))


def plan_for(plan: Plan, chain: Chain) -> Plan:
    """The plan with the costs of a chain that differs only in timings and in what kernels take.

    Args:
        plan: For the same model and input.
        chain: Of the model that is to run under it, as measured now.
    Raises:
        PlanError: As for :meth:`Plan.load`.
    """
    if plan.chain == chain:
        return plan
    if plan.chain.fingerprint != chain.fingerprint:
        raise _made_for_another("the plan", plan.chain.identity, plan.chain.device, chain)
    return _fitting("the plan", from_plain({**plan.to_plain(), "solve_seconds": plan.solve_seconds}, chain))


def _fitting(what: object, plan: Plan) -> Plan:
    """The plan; a PlanError if it takes more than its budget."""
    if plan.peak_bytes > plan.budget_bytes:
        raise PlanError(
            f"{what} takes {format_bytes(plan.peak_bytes)} on this machine, which is more than its budget of "
            f"{format_bytes(plan.budget_bytes)}: plan anew"
        )
    return plan


def _arguments(record: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of :func:`scheduled` from plain types."""
    return {
        "schedule": Schedule.parse(record["schedule"]),
        "budget_bytes": int(record["budget_bytes"]),
        "gradients_exist": bool(record["gradients_exist"]),
        "lingering_bytes": int(record["lingering_bytes"]),
        "slots": int(record["slots"]),
    }


def _as_tuple(value: Any) -> Any:
    """JSON's lists as tuples, at any depth."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _made_for_another(what: object, saved: Sequence[StageIdentity], device: str, chain: Chain) -> PlanError:
    """PlanError for a plan that was made for other stages, or another device, than a chain's."""
    difference = _difference(saved, device, chain)
    return PlanError(f"{what} was made for something else: {difference}. Plan for this model and input anew")


def _difference(saved: Sequence[StageIdentity], device: str, chain: Chain) -> str:
    """The first difference between a chain and what a plan was made for: what the plan says, and what there is."""
    if device != chain.device:
        return f"device {device!r}, and this chain was measured on {chain.device!r}"
    alike = [(stage.name, stage.takes) for stage in (saved[0], chain.identity[0])]
    estimated = [not any(stage.takes for stage in stages[1:]) for stages in (saved, chain.identity)]
    if alike[0] == alike[1] and len(saved) == len(chain) and estimated[0] != estimated[1]:
        then_so, now_so = ("estimated from other shapes" if guess else "measured" for guess in estimated)
        shapes = ", ".join(saved[0].takes)
        return f"what stages cost at {shapes} was {then_so}, and is {now_so} (measure(sample) measures a shape)"
    for number, (then, now) in enumerate(zip_longest(saved, chain.identity)):
        if then is None or now is None or then.name != now.name:
            there, here = ("no such stage" if each is None else repr(each.name) for each in (then, now))
            return f"stage {number} was {there} of {len(saved)}, and is {here} of {len(chain)}"
        if then.takes != now.takes:
            return f"stage {now.name!r} took {', '.join(then.takes)}, and takes {', '.join(now.takes)}"
        for what in ("output_bytes", "options", "skips"):
            if getattr(then, what) != getattr(now, what):
                return f"{what} of stage {now.name!r} was {getattr(then, what)}, and is {getattr(now, what)}"
    return "the file was changed after it was written"
