"""Schedules to choose from without solving anything: for chains that differ from a solved one in sizes alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from lightning_rotor.chain import Chain
from lightning_rotor.planning.plan import DEFAULT_SLOTS, Plan
from lightning_rotor.planning.solver import Solver
from lightning_rotor.schedule import Schedule
from lightning_rotor.simulator import simulate

_DISHES = 24


def menu_of(solver: Solver) -> tuple[Schedule, ...]:
    """Schedules from the least memory to no recomputation, the best ones for budgets that are spread evenly.

    Hardly any work once the solver has its tables.
    """
    least, most = solver.minimum(), solver.plan(sys.maxsize)  # the latter recomputes nothing
    low, high = least.peak_bytes, most.peak_bytes
    budgets = [low + (high - low) * dish // _DISHES for dish in range(1, _DISHES)]
    return tuple(dict.fromkeys(plan.schedule for plan in (least, *map(solver.plan, budgets), most)))


def fastest_of(
    schedules: Iterable[Schedule],
    chain: Chain,
    budget_bytes: int,
    *,
    gradients_exist: bool = False,
    lingering_bytes: int = 0,
    slots: int = DEFAULT_SLOTS,
) -> Plan | None:
    """The fastest of some schedules that fits, or None if none does.

    Args:
        schedules: Made for chains with the same stages.
        chain: What they are to run.
        budget_bytes: As in :func:`lightning_rotor.planning.plan`.
        gradients_exist: Likewise.
        lingering_bytes: Likewise.
        slots: How finely the schedules were planned.
    """
    start = time.perf_counter()
    judged = [
        (simulate(chain, schedule, gradients_exist=gradients_exist, lingering_bytes=lingering_bytes), schedule)
        for schedule in schedules
    ]
    fitting = [each for each in judged if each[0].peak_bytes <= budget_bytes]
    if not fitting:
        return None
    simulation, schedule = min(fitting, key=lambda each: (each[0].seconds, each[0].peak_bytes))
    return Plan(
        chain,
        schedule,
        budget_bytes,
        simulation,
        time.perf_counter() - start,
        gradients_exist=gradients_exist,
        lingering_bytes=lingering_bytes,
        slots=slots,
    )
