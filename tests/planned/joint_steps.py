"""Modules, calls and steps for the tests of joint plans: real chains, caches and plans, and nothing that runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.random_chains import random_chain
from lightning_rotor.chain import Chain
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.agreement import Agreement
from lightning_rotor.planned.budget_source import BudgetSource
from lightning_rotor.planned.cache import PlanCache
from lightning_rotor.planned.prepared import Costs, Prepared, costs_of
from lightning_rotor.planned.running_step import Call, CallKey, Step
from lightning_rotor.planned.signature import Signature
from lightning_rotor.planned.size_classes import SizeClasses
from lightning_rotor.planning import Plan
from lightning_rotor.planning.combined_chain import combined
from lightning_rotor.planning.step_phases import Mark, PhaseKind, StepPhase


class Recording:
    """A cut: what a call runs. Two of them may have equal names, and do something else."""

    way = "sequential"

    def __init__(self, stages: int) -> None:
        self.stages = [SimpleNamespace(name=str(number)) for number in range(stages)]


class Module:
    """The plans of one module, whose costs of any size are known: those of ``chain`` times the rows of the input."""

    def __init__(self, name: str, *, seed: int = 1, stages: int = 4) -> None:
        self.name = name
        self.cache = PlanCache(64)
        self.classes = SizeClasses()
        self.recording = Recording(stages)
        self._chain = random_chain(random.Random(seed), stages, "transformer")
        self.measured: list[Signature] = []
        self.knows_costs = True
        # Bounds on costs are three times what the calls take.
        self.has_bounds = False

    def signature(self, rows: int, recording: Recording | None = None) -> Signature:
        kinds = ((torch.float32, torch.device("cpu"), False),)
        cut: Any = recording or self.recording
        return Signature(((rows,),), kinds, cut, (), ((), ()))

    def chain_of(self, signature: Signature) -> Chain:
        return scaled(self._chain, signature.shapes[0][0])

    def key(self, rows: int, turn: tuple[str, ...] = ()) -> CallKey:
        """A call that has costs, and no plan yet."""
        signature = self.signature(rows)
        self.cache.put(signature, self.costs(signature, turn))
        plans: Any = self
        return CallKey(plans, signature, turn)

    def costs(self, signature: Signature, turn: tuple[str, ...] = ()) -> Costs:
        chain = self.chain_of(signature)
        if self.has_bounds:
            return Costs(SimpleNamespace(chain=scaled(chain, 3), copied_bytes=0), turn, "bounds")  # type: ignore[arg-type]
        profile: Any = SimpleNamespace(chain=chain, copied_bytes=0)
        return Costs(profile, turn)

    def costs_beside(self, signature: Signature, value: Any, turn: tuple[str, ...]) -> tuple[Signature, Costs]:
        self.measured.append(signature)
        return signature, self.costs(signature, turn)

    def class_costs(self, signature: Signature, turn: tuple[str, ...]) -> Costs | None:
        entry = self.cache.use(signature, turn)
        if entry is not None:
            return costs_of(entry)
        return self.costs(signature, turn) if self.knows_costs else None

    def use_plan(self, signature: Signature, costs: Costs, plan: Plan) -> Prepared:
        executor: Any = None
        prepared = Prepared(costs, signature, plan, executor, runs_plainly=False)
        self.cache.put(signature, prepared)
        return prepared


def scaled(chain: Chain, factor: int) -> Chain:
    """A chain that takes so many times the bytes and the seconds."""
    return combined((chain,), of_bytes=lambda values: factor * values[0], of_seconds=lambda values: factor * values[0])


def path(*names: str | Module, rows: int = 8) -> tuple[CallKey, ...]:
    """Calls of these modules that wait for each other's backward."""
    turn: tuple[str, ...] = ()
    keys = []
    for name in names:
        module = name if isinstance(name, Module) else Module(name)
        keys.append(module.key(rows, turn))
        turn = (*turn, module.name)
    return tuple(keys)


class Source(BudgetSource):
    def __init__(self) -> None:
        self.ranks = Agreement()


@dataclass
class Limit:
    """The budget of every chain, which a test may change."""

    size_bytes: int

    def __call__(self, chain: Chain, copied_bytes: int) -> Budget:
        return Budget(self.size_bytes)


def run(key: CallKey, signature: Signature | None = None) -> Call:
    """A call as it has run under the plan that its key has now."""
    prepared = key.entry()
    assert isinstance(prepared, Prepared)
    pending: Any = SimpleNamespace(waits=True)
    reference: Any = lambda: pending  # noqa: E731
    return Call(key, prepared, reference, signature or key.signature)


def step_of(calls: Sequence[Call]) -> Step:
    step = Step(None)
    for call in calls:
        step.add(call)
    return step


def phases_of(calls: Sequence[Call], peak_bytes: Callable[[PhaseKind], int]) -> list[StepPhase]:
    """The phases of a step with these calls, in their order."""
    marks = [Mark(PhaseKind.START)]
    for number in range(len(calls)):
        marks += [Mark(PhaseKind.FORWARD, number), Mark(PhaseKind.AFTER, number)]
    marks.append(Mark(PhaseKind.LOSS))
    marks += [Mark(PhaseKind.BACKWARD, number) for number in reversed(range(len(calls)))]
    return [StepPhase(mark, 0, peak_bytes(mark.kind), 0) for mark in marks]
