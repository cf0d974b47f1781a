"""From a chain and devices to a partition, or to an error that says what would work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from rich import box
from rich.table import Table

from lightning_rotor.chain import Chain
from lightning_rotor.errors import PipelineError
from lightning_rotor.pipeline.partition.cuts import Cuts, cuts_of, even_balance, least_bottleneck, runs_of
from lightning_rotor.pipeline.partition.in_flight import END, StagePlan, sub_chain
from lightning_rotor.pipeline.partition.problem import PipelineDevice, Problem
from lightning_rotor.pipeline.partition.run_costs import Costs, StageChoice
from lightning_rotor.pipeline.partition.search import Search
from lightning_rotor.pipeline.partition.seconds_bounds import impossible
from lightning_rotor.pipeline.pipeline_simulator import PipelineSimulation, simulate_pipeline
from lightning_rotor.shown import cell, rendered
from lightning_rotor.units import format_bytes, format_seconds, formatted_apart, is_positive_integer

# Most runs of stages whose least memory is computed for an error.
_MOST_ASKED = 400
_MOST_NAMED = 12  # stages in a message


@dataclass(frozen=True)
class Partition:
    """A chain cut for a pipeline, by pipeline stage. Printed, it is a table."""

    problem: Problem
    choices: tuple[StageChoice, ...]
    bound_seconds: float  # no other cuts are faster, each stage planned as well as the planner can

    @property
    def balance(self) -> tuple[int, ...]:
        """Number of chain stages in each pipeline stage."""
        return tuple(choice.last + 1 - choice.first for choice in self.choices)

    @cached_property
    def simulation(self) -> PipelineSimulation:
        """Simulated step: who works when, and what each device holds."""
        return simulate_pipeline(
            self.problem.order,
            [choice.load for choice in self.choices],
            micro_batches=self.problem.micro_batches,
            lingering=list(map(self.problem.lingering, range(len(self.problem.devices)))),
            results_bytes=self.problem.results_bytes,
        )

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.problem.simulator.step_seconds([choice.load for choice in self.choices])

    @property
    def gap(self) -> float:
        """Part of the step that other cuts might save; 0 if these are optimal."""
        return max(1 - self.bound_seconds / self.seconds, 0.0) if self.seconds else 0.0

    @property
    def is_optimal(self) -> bool:
        """True if no other cuts are faster."""
        return self.gap < 1e-9

    def chain(self, stage: int) -> Chain:
        """Chain of a pipeline stage."""
        return sub_chain(self.problem.chain, self.choices[stage].first, self.choices[stage].last)

    def plan(self, stage: int, *, last_micro_batch: bool = False) -> StagePlan:
        """The plan of a pipeline stage for a micro-batch; ``recompute="except_last"`` runs the last one otherwise."""
        choice = self.choices[stage]
        plan = choice.last_plan if last_micro_batch and choice.last_plan is not None else choice.plan
        # Alike runs share a plan, but not their stages' names.
        names = [*self.chain(stage).names, END]
        stages = tuple(replace(each, name=name) for each, name in zip(plan.chain, names, strict=False))
        return replace(plan, chain=replace(plan.chain, stages=stages))

    def __repr__(self) -> str:
        return f"<Partition of {self.summary()}>"

    def summary(self) -> str:
        """The partition on one line."""
        proof = "optimal" if self.is_optimal else f"within {self.gap:.1%} of the best"
        problem, step = self.problem, self.simulation
        return (
            f"balance {list(self.balance)} on {len(problem.devices)} devices, {problem.schedule} with "
            f"{problem.micro_batches} micro-batches: {format_seconds(self.seconds)} per step, {step.bubble:.1%} "
            f"bubble, peak {format_bytes(max(step.peak_bytes))}; {proof}"
        )

    def __rich__(self) -> Table:
        table = Table(title=self.summary(), box=box.SIMPLE_HEAD, title_justify="left", title_style="")
        columns = "stage, device, model, in flight, forward, backward, recomputed, held each, device peak"
        for name in columns.split(", "):
            table.add_column(name, justify="left" if name == "model" else "right")
        peaks, devices = self.simulation.peak_bytes, len(self.problem.devices)
        for stage, choice in enumerate(self.choices):
            load, names = choice.load.micro_batch, self.problem.chain.names
            ends = [names[choice.first], names[choice.last]]
            table.add_row(
                str(stage),
                str(stage % devices),
                cell(f"{len(self.chain(stage))}: {' … '.join(dict.fromkeys(ends))}"),
                str(self.problem.in_flight[stage]),
                format_seconds(load.forward_seconds),
                format_seconds(load.backward_seconds),
                format_seconds(load.recompute_seconds),
                format_bytes(load.held_bytes),
                format_bytes(peaks[stage % devices]) if stage < devices else "",
            )
        return table

    def __str__(self) -> str:
        return rendered(self, width=120)


class PartitionError(PipelineError):
    """The devices have too little memory for every partition.

    Attributes:
        minimum_bytes: The least memory per device that would do; for the interleaved schedule some memory that does.
        device: The first device that has less.
    """

    def __init__(self, message: str, minimum_bytes: int = 0, device: int = 0) -> None:
        super().__init__(message)
        self.minimum_bytes, self.device = minimum_bytes, device


def partition(
    chain: Chain,
    devices: int | Sequence[PipelineDevice],
    *,
    micro_batches: int,
    memory_bytes: int | None = None,
    balance: Literal["auto"] | Sequence[int] = "auto",
    state_bytes: Sequence[int] = (),
    **options: Any,
) -> Partition:
    """Cut a chain into pipeline stages so that a step takes the least time and every device has enough memory.

    Exact where cuts are few, given the planner's plan of each run; else a local optimum with a bound
    (:attr:`Partition.gap`) that is never slower than equal cuts and :func:`.balance_by_time` and ``_by_size``.
    ``memory_bytes`` is of each of a number of devices (None: no limit), ``options`` are :class:`.Problem`'s attributes.
    Raises a PipelineError for wrong arguments, a PartitionError that says the least memory per device that would do.

    Example:
        >>> partition(chain, 4, micro_batches=8, memory_bytes=parse_bytes("16GiB")).balance  # doctest: +SKIP
        (12, 9, 8, 8)
    """
    if not isinstance(devices, int) and memory_bytes is not None:
        raise PipelineError("memory_bytes goes with a number of devices: expected memory_bytes in each PipelineDevice")
    all_devices = (PipelineDevice(memory_bytes),) * devices if isinstance(devices, int) else tuple(devices)
    problem = Problem(chain, all_devices, micro_batches, state_bytes=tuple(state_bytes), **options)
    costs = Costs(problem)
    search = Search(costs)
    by_hand: Cuts = () if balance == "auto" else cuts_of(check_balance(balance, chain.names, problem.stages))
    choices, bound_seconds = (None, 0.0) if by_hand else search.run()
    if choices is None:
        cuts = by_hand or _least_memory_cuts(costs)
        choices = search.only(cuts)
        if choices is None:
            raise _refusal(costs, cuts, f"balance={list(balance)} does not fit" if by_hand else "no partition fits")
    return Partition(problem, tuple(choices), bound_seconds)


def _refusal(costs: Costs, cuts: Cuts, what: str) -> PartitionError:
    """Error with the least memory per device, and who has less, as if its stages' peaks coincided."""
    problem, runs = costs.problem, runs_of(cuts, len(costs.problem.chain))
    stages = [costs.least_bytes(stage, *run) for stage, run in enumerate(runs)]
    needs = [sum(stages[device :: len(problem.devices)]) for device in range(len(problem.devices))]
    memories = [device.memory_bytes for device in problem.devices]
    short = [place for place, has in enumerate(memories) if has is not None and has < needs[place]]
    device = short[0] if short else needs.index(max(needs))
    has, needed = formatted_apart(memories[device] or 0, max(needs))
    static = sum(problem.state_bytes) + sum(int(costs.gradient_bytes(*run)) for run in runs)
    least = "at least" if problem.stages_per_device == 1 else "about"
    remedies = "use more devices or smaller micro-batches"
    remedies += "" if problem.recompute == "rotor" else ', or recompute="rotor"'
    remedies += "" if what.startswith("no ") else ', or balance="auto"'
    return PartitionError(
        f"{what} {len(problem.devices)} devices: device {device} has {has}, expected {least} {needed} per device for "
        f"{problem.micro_batches} micro-batches under {problem.schedule!r} with recompute={problem.recompute!r} "
        f"(weights, optimizer state and gradients take {format_bytes(static)} in all): {remedies}",
        max(needs),
        device,
    )


def _least_memory_cuts(costs: Costs) -> Cuts:
    """Cuts whose largest memory is least, or the best found before patience ended; bounds save most plans of runs."""
    problem, n, stages = costs.problem, len(costs.problem.chain), costs.problem.stages
    first = np.arange(n)[:, None]
    last = first + np.arange(min(n - stages + 1, 4 * math.ceil(n / stages) + 4))
    ends = np.minimum(last, n - 1)
    outputs = np.array([stage.output_bytes for stage in problem.chain])[ends]
    every, in_flight = (np.array(each)[:, None, None] for each in (range(stages), problem.in_flight))
    bounds = costs.fixed_bytes(first, ends) + (in_flight * outputs).astype(float)
    bounds[impossible(problem, every, first, last)] = math.inf
    asked: set[tuple[int, int, int]] = set()
    best: tuple[float, Cuts] = math.inf, ()
    while True:
        cuts = least_bottleneck(bounds)
        assert cuts is not None, "every run can have the memory that it needs"
        runs = [(stage, *run) for stage, run in enumerate(runs_of(cuts, n))]
        for stage, begin, end in set(runs) - asked:
            bounds[stage, begin, end - begin] = costs.least_bytes(stage, begin, end)
        best = min(best, (max(bounds[stage, begin, end - begin] for stage, begin, end in runs), cuts))
        if asked >= set(runs) or len(asked) > _MOST_ASKED:
            return best[1]
        asked |= set(runs)


def check_balance(balance: Sequence[int] | str, names: Sequence[str], parts: int) -> tuple[int, ...]:
    """A balance given by hand, checked for stages of these names and so many parts."""
    stages, even = len(names), even_balance(len(names), parts)
    if isinstance(balance, str):
        raise PipelineError(f'balance is {balance!r}: expected "auto" or numbers such as {even}')
    if not all(map(is_positive_integer, balance)) or len(balance) != parts or sum(balance) != stages:
        listed = ", ".join([*names[:_MOST_NAMED], *(("…", names[-1]) if stages > _MOST_NAMED else ())])
        raise PipelineError(
            f"balance={list(balance)} does not share out the model's {stages} stages: expected {parts} positive "
            f"integers that add up to {stages}, such as balance={even}. Its stages are {listed}"
        )
    return tuple(balance)


def counted_in_stages(balance: Sequence[int], names: Sequence[str], children: Sequence[str], parts: int) -> list[int]:
    """A balance that counts a model's children, in stages, whose names begin with theirs; any other as it is.

    Raises ``PipelineError`` if it counts children, and not for so many parts.
    """
    if not all(map(is_positive_integer, balance)) or sum(balance) != len(children):
        return list(balance)
    if len(balance) != parts and len(names) != len(children):
        listed = ", ".join([*children[:_MOST_NAMED], *(("…", children[-1]) if len(children) > _MOST_NAMED else ())])
        example = f", such as balance={even_balance(len(children), parts)}" if parts <= len(children) else ""
        raise PipelineError(
            f"balance={list(balance)} is for {len(balance)} pipeline stages, and there are {parts}: expected {parts} "
            f"positive integers that add up to the model's {len(children)} children{example}. They are {listed}"
        )
    place = {child: number for number, child in enumerate(children)}
    firsts = [place[name.partition(" … ")[0].partition(".")[0]] for name in names]
    lasts = [place[name.rpartition(" … ")[2].partition(".")[0]] for name in names]
    ends = []
    for cut in accumulate(balance):
        ends.append(sum(last < cut for last in lasts))
        straddling = [name for name, first, last in zip(names, firsts, lasts, strict=True) if first < cut <= last]
        if straddling:
            raise PipelineError(
                f"balance={list(balance)} cuts between the children {children[cut - 1]!r} and {children[cut]!r}, which "
                f"run as one stage, {straddling[0]!r}: expected a cut elsewhere"
            )
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
