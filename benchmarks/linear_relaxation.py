"""The linear relaxation that bounds are usually taken from, to compare ours with: Checkmate's program without integrality.

Between the backward of one stage and that of the next lies a *phase*; the first one holds the whole forward too. By phase and stage, as
fractions between 0 and 1: does it run for its output, for its set of saved tensors, or for both; is its set there afterwards, and its
output. A stage runs only from an input that is there, or whose stage runs in the same phase; what is there afterwards was there
before or was made; everything that is there fits beside the backward which ends the phase. Integral solutions cover every
execution, whatever its order within a phase, so the least duration is a lower bound. Skips are left out.

Checkmate: Jain et al., "Breaking the memory wall with optimal tensor rematerialization", arXiv:1910.02653. Solved by SciPy's HiGHS; the bound
is taken from the dual solution, made feasible, so that tolerances cannot make it too high.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from lightning_rotor.chain import Chain
from lightning_rotor.planning.least_costs import LeastStage, least_stages


@dataclass
class _Program:
    """min costs · x, rows · x <= limits, 0 <= x <= 1."""

    costs: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    entries: list[tuple[float, int, int]] = field(default_factory=list)

    def variable(self, cost: float = 0.0) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def at_most(self, limit: float, positive: dict[int, float], negative: list[int] | None = None) -> None:
        row = len(self.limits)
        self.limits.append(limit)
        self.entries += [(value, row, column) for column, value in positive.items()]
        self.entries += [(-1.0, row, column) for column in negative or []]

    def least(self) -> float:
        costs, limits = np.array(self.costs), np.array(self.limits)
        values, rows, columns = zip(*self.entries, strict=True)
        matrix = csr_matrix((values, (rows, columns)), shape=(len(limits), len(costs)))
        scale = costs.max() or 1.0
        found = linprog(costs / scale, A_ub=matrix, b_ub=limits, bounds=(0, 1), method="highs")
        if found.status == 2:
            return math.inf
        duals = np.minimum(found.ineqlin.marginals, 0.0)
        reduced = costs / scale - matrix.T @ duals
        return float(limits @ duals + np.minimum(reduced, 0.0).sum()) * scale


@dataclass
class _Phase:
    """Variables of one phase. Those of sets by stage and option, those of boundaries by number."""

    outputs: list[int] = field(default_factory=list)  # runs for the output alone
    replays: list[dict[int, int]] = field(default_factory=list)
    records: list[dict[int, int]] = field(default_factory=list)
    sets: list[dict[int, int]] = field(default_factory=list)  # there afterwards
    held: dict[int, int] = field(default_factory=dict)  # boundaries there afterwards

    def producing(self, stage: int) -> list[int]:
        return [self.outputs[stage], *self.records[stage].values()]

    def making(self, stage: int, option: int) -> list[int]:
        return [runs[stage][option] for runs in (self.replays, self.records) if option in runs[stage]]


def relaxation_seconds(chain: Chain, budget_bytes: int) -> float:
    """Lower bound on the seconds of any execution within a budget."""
    if not all(stage.recomputable for stage in chain):
        raise ValueError("expected a chain that can be recomputed everywhere")
    stages = least_stages(chain, budget_bytes)
    program, before = _Program(), _Phase(sets=[{} for _ in stages])
    for last in reversed(range(len(stages))):
        phase = _runs(program, stages, before, last)
        used = _backward(program, stages, before, phase, last)
        _keep(program, stages, before, phase, last)
        _fit(program, stages, phase, used, last, budget_bytes)
        before = phase
    return program.least()


def _runs(program: _Program, stages: list[LeastStage], before: _Phase, last: int) -> _Phase:
    phase = _Phase()
    whole_forward = last == len(stages) - 1
    for index, stage in enumerate(stages[: last + 1]):
        saving = {number: way for number, way in enumerate(stage.ways) if way.saves}
        # Backwards are paid for apart, see _backward.
        replay = {number: way.last_seconds - way.backward_seconds for number, way in saving.items()}
        both = {number: way.kept_seconds - way.backward_seconds for number, way in saving.items()}
        phase.outputs.append(program.variable(stage.first_seconds))
        phase.records.append(
            {number: program.variable(stage.first_seconds + seconds) for number, seconds in both.items()}
        )
        phase.replays.append(
            {} if whole_forward else {number: program.variable(seconds) for number, seconds in replay.items()}
        )
        runs = [*phase.producing(index), *phase.replays[index].values()]
        if whole_forward:
            program.at_most(-1.0, {}, runs)
        if index and not whole_forward:
            held = [before.held[index]] if index in before.held else []
            program.at_most(0.0, dict.fromkeys(runs, 1.0), [*phase.producing(index - 1), *held])
        else:
            program.at_most(1.0, dict.fromkeys(runs, 1.0))
    return phase


def _backward(program: _Program, stages: list[LeastStage], before: _Phase, phase: _Phase, last: int) -> dict[int, int]:
    """One option of the last stage is used; returns the variables."""
    used = {number: program.variable(way.backward_seconds) for number, way in enumerate(stages[last].ways)}
    program.at_most(-1.0, {}, list(used.values()))
    for number, variable in used.items():
        if stages[last].ways[number].saves:
            there = [before.sets[last][number]] if number in before.sets[last] else []
            program.at_most(0.0, {variable: 1.0}, [*phase.making(last, number), *there])
    return used


def _keep(program: _Program, stages: list[LeastStage], before: _Phase, phase: _Phase, last: int) -> None:
    """What is there when the phase is over."""
    for index, stage in enumerate(stages[:last]):
        phase.sets.append({number: program.variable() for number, way in enumerate(stage.ways) if way.saves})
        for number, variable in phase.sets[index].items():
            there = [before.sets[index][number]] if number in before.sets[index] else []
            program.at_most(0.0, {variable: 1.0}, [*phase.making(index, number), *there])
        program.at_most(1.0, dict.fromkeys(phase.sets[index].values(), 1.0))
        if index:
            phase.held[index] = program.variable()
            there = [before.held[index]] if index in before.held else []
            program.at_most(0.0, {phase.held[index]: 1.0}, [*phase.producing(index - 1), *there])


def _fit(
    program: _Program, stages: list[LeastStage], phase: _Phase, used: dict[int, int], last: int, budget_bytes: int
) -> None:
    """Everything that is there fits beside the backward of the last stage."""
    sizes: dict[int, float] = {}
    for number, variable in used.items():
        way = stages[last].ways[number]
        sizes[variable] = way.set_bytes + way.output_bytes + way.peak_bytes
    for index in range(last):
        for number, variable in phase.sets[index].items():
            way = stages[index].ways[number]
            sizes[variable] = way.set_bytes
    for boundary in range(1, last + 1):
        size = stages[boundary].input_bytes
        if not size:
            continue
        live = program.variable()
        sizes[live] = size
        if boundary < last:
            program.at_most(0.0, {phase.held[boundary]: 1.0}, [live])
        before, behind = phase.sets[boundary - 1], phase.sets[boundary] if boundary < last else used
        consumed = {behind[k]: min(stages[boundary].ways[k].input_bytes, size) / size for k in behind}
        produced = {before[k]: min(stages[boundary - 1].ways[k].output_bytes, size) / size for k in before}
        program.at_most(0.0, produced, [live])
        program.at_most(0.0, consumed, [live])
        if max(produced.values(), default=0.0) + max(consumed.values(), default=0.0) <= 1:
            program.at_most(0.0, produced | consumed, [live])
    room = stages[last].room_bytes / budget_bytes
    program.at_most(room, {variable: size / budget_bytes for variable, size in sizes.items()})
