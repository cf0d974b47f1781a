"""Costs of one call of a module. Compiled stages are profiled with other code only where a budget asks for it.

Stages that the user compiled run as they are, first::

    measured as they are ──► room for all of them ─────────────────────────────► these costs
                         └─► too little ──► several stages: with other budgets for compiled memory
                                        └─► one graph, compiled as a whole: planned inside, a few times
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_rotor.capture.compiled import CompiledModules, compiled_in
from lightning_rotor.compiling.partitioner import Saving
from lightning_rotor.errors import ModelError
from lightning_rotor.memory.budget import Budget
from lightning_rotor.planned.budget_source import BudgetSource, MeasuringBegins
from lightning_rotor.planned.plan_settings import PlanSettings
from lightning_rotor.planned.prepared import Costs, Prepared, costs_of
from lightning_rotor.planned.signature import Signature
from lightning_rotor.profiling import Profile, profile_chain
from lightning_rotor.profiling.progress_bar import measuring_progress
from lightning_rotor.schedule import Leaf, Schedule
from lightning_rotor.simulator import simulate

# Compilations of a graph that is planned inside. Mostly there is one: the second corrects what counting has missed or
# a measured step has shown, and the last takes the least if nothing else keeps the budget.
_MOST_INSIDE = 3


class CallProfiler:
    """Measures calls of one module.

    Args:
        source: Hears of each measurement, and knows the processes that measure together.
        settings: Of the module's plans.
        budget: Of a plan for a call with these costs.

    Attributes:
        compiled: Code of compiled stages under other memory budgets.
        unused_outputs: Numbers of the tensors, among those that the module returns, that its caller makes nothing of.
    """

    def __init__(self, source: BudgetSource, settings: PlanSettings, budget: Callable[[Profile], Budget]) -> None:
        self.compiled = CompiledModules(settings.compiled_variants)
        self.unused_outputs: frozenset[int] = frozenset()
        self._source = source
        self._settings = settings
        self._budget = budget

    def measure(self, signature: Signature, value: Any) -> Costs:
        """Measure a call with all options of its stages."""
        return self._measured(signature, value, self.compiled)

    def measure_as_needed(self, signature: Signature, value: Any, before: Costs | None = None) -> Costs:
        """Measure a call with the options that its budget asks for.

        Stages that the user compiled get other code only if something must be recomputed. Where there is room, noise
        must not choose such code, and compiling it would cost more than it could save. ``before`` are costs of the
        call as it was measured last, if its plans have less room since; they are returned where that does no harm.
        """
        is_compiled = any(compiled_in(stage) for stage in signature.cut.stages)
        if not is_compiled or self._source.ranks.together or self._settings.compiled_variants == "off":
            return self.measure(signature, value)
        costs = before or self._measured(signature, value, CompiledModules("off"))
        if not self._excess_of(costs, option=0).is_needed:
            return costs
        if len(signature.cut.stages) == 1:
            return self._planned_inside(signature, value, costs)
        return replace(self.measure(signature, value), compiled_anew=1)

    def wants_other_code(self, signature: Signature, entry: Costs | Prepared) -> bool:
        """True if stages that the user compiled run as they are, or save too little, and their plans have no room."""
        costs = costs_of(entry)
        stages = signature.cut.stages
        if costs.estimated or self._source.ranks.together or self._settings.compiled_variants == "off":
            return False
        if not any(compiled_in(stage) for stage in stages):
            return False
        if signature.cut.way == "compiled" and self._source.takes_apart:
            # The last resort is to take it apart. A provisional budget is no reason for that.
            if costs.compiled_anew and self._budget(costs.profile).is_provisional:
                return False
        elif costs.compiled_anew >= (_MOST_INSIDE if len(stages) == 1 else 1):
            return False
        last = len(costs.profile.chain.stages[0].options) - 1 if len(stages) == 1 else 0
        return self._excess_of(costs, option=last).is_needed

    def _planned_inside(self, signature: Signature, value: Any, costs: Costs) -> Costs:
        """Costs of a graph that was compiled as a whole, with the same graph planned inside as an option.

        Raises ``ModelError`` if it cannot be, and may be planned uncompiled.
        """
        objection = "no plan inside of its graph keeps the limit"
        # Other calls share such a budget, and how much is theirs is not known yet.
        is_provisional = self._budget(costs.profile).is_provisional
        for times in range(costs.compiled_anew, _MOST_INSIDE):
            # What counting has missed shows once.
            saving = self._excess_of(costs, option=0)
            if costs.saving is not None:
                saving = _saving_more(costs.saving, self._excess_of(costs, option=1), saving)
            is_last = times + 1 == _MOST_INSIDE
            saving = replace(saving, or_least=is_last or is_provisional)
            inside = CompiledModules(self._settings.compiled_variants, saving=saving)
            planned = self._measured(signature, value, inside)
            if len(planned.profile.chain.stages[0].options) == 1:
                objection = next(iter(inside.objections.values()), "its graph cannot be planned inside")
                break
            costs = replace(planned, compiled_anew=times + 1, saving=saving)
            if is_provisional or not self._excess_of(costs, option=1).is_needed:
                return costs
        if self._source.takes_apart and signature.cut.way == "compiled":
            raise ModelError(objection)
        return replace(self.measure(signature, value), compiled_anew=_MOST_INSIDE)

    def _excess_of(self, costs: Costs, *, option: int) -> Saving:
        """Bytes that a chain takes more than its budget if each of its stages is kept under one option."""
        chain = costs.profile.chain
        budget = self._budget(costs.profile)
        schedule = Schedule(tuple(Leaf(number, option) for number in range(len(chain))))
        peaks = {"forward": 0, "backward": 0}
        for event in simulate(chain, schedule, **budget.conditions).events:
            if event.phase in peaks:
                peaks[event.phase] = max(peaks[event.phase], event.peak_bytes)
        return Saving(peaks["forward"] - budget.available_bytes, peaks["backward"] - budget.available_bytes)

    def _measured(self, signature: Signature, value: Any, compiled: CompiledModules) -> Costs:
        """Measure a call, with the variants of compiled stages that are to be tried."""
        self._source.hear(MeasuringBegins())
        with measuring_progress(enabled=self._settings.show_progress) as progress:
            try:
                profile = profile_chain(
                    signature.cut.stages,
                    value,
                    progress=progress,
                    compiled=compiled,
                    ranks=self._source.ranks,
                    accumulating=self._source.accumulates,
                    unused_outputs=self.unused_outputs,
                )
            except (TypeError, AttributeError, KeyError) as error:
                # Where the code itself is at fault, its real run says so next, or that of its parts.
                name = type(signature.cut.module).__name__
                raise ModelError(f"{name} cannot be measured stage by stage: {error}") from error
        return Costs(profile)


def _saving_more(before: Saving, excess: Saving, least: Saving) -> Saving:
    """Saving to ask for where a pair of graphs that was to save so much, and was measured, is above the budget.

    It is at least what counting asks for with the budget of now.
    """
    forward_bytes = before.forward_bytes + max(excess.forward_bytes, 0)
    backward_bytes = before.backward_bytes + max(excess.backward_bytes, 0)
    return Saving(max(forward_bytes, least.forward_bytes), max(backward_bytes, least.backward_bytes))
