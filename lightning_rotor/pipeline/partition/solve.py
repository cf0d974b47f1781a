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
from lightning_rotor.pipeline.partition.in_flight import StagePlan
from lightning_rotor.pipeline.partition.problem import PipelineDevice, Problem
from lightning_rotor.pipeline.partition.run_costs import Costs, StageChoice
from lightning_rotor.pipeline.partition.search import Search
from lightning_rotor.pipeline.partition.seconds_bounds import impossible
from lightning_rotor.pipeline.partition.sub_chains import END, sub_chain
from lightning_rotor.pipeline.pipeline_simulator import PipelineSimulation, simulate_pipeline
from lightning_rotor.pipeline.stage_loads import PipelineStageLoad
from lightning_rotor.shown import cell, rendered
from lightning_rotor.units import format_bytes, format_seconds, formatted_apart, is_positive_integer

# Most runs of stages whose least memory is computed for an error: each is a search over budgets of its own, and
# the user waits for nothing but a message.
_MOST_ASKED = 400
# Most stages that a message names.
_MOST_NAMED = 12


@dataclass(frozen=True)
class Partition:
    """A chain cut for a pipeline, by pipeline stage. Printed, it is a table."""

    problem: Problem
    choices: tuple[StageChoice, ...]
    # No other cuts are faster, each stage planned as well as the planner can.
    bound_seconds: float

    @property
    def balance(self) -> tuple[int, ...]:
        """Number of chain stages in each pipeline stage."""
        return tuple(choice.last + 1 - choice.first for choice in self.choices)

    @cached_property
    def simulation(self) -> PipelineSimulation:
        """Simulated step: who works when, and what each device holds."""
        devices = range(len(self.problem.devices))
        return simulate_pipeline(
            self.problem.order,
            self._loads(),
            micro_batches=self.problem.micro_batches,
            lingering=[self.problem.lingering(device) for device in devices],
            results_bytes=self.problem.results_bytes,
        )

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step."""
        # The simulator of times alone: ``simulation`` counts every device's bytes besides.
        return self.problem.simulator.step_seconds(self._loads())

    def _loads(self) -> list[PipelineStageLoad]:
        return [choice.load for choice in self.choices]

    @property
    def gap(self) -> float:
        """Part of the step that other cuts might save; 0 if these are optimal."""
        if not self.seconds:
            return 0.0
        return max(1 - self.bound_seconds / self.seconds, 0.0)

    @property
    def is_optimal(self) -> bool:
        """True if no other cuts are faster."""
        return self.gap < 1e-9

    def chain(self, stage: int) -> Chain:
        """Chain of a pipeline stage."""
        choice = self.choices[stage]
        return sub_chain(self.problem.chain, choice.first, choice.last, shared=self.problem.shared)

    def plan(self, stage: int, *, last_micro_batch: bool = False) -> StagePlan:
        """The plan of a pipeline stage for a micro-batch; ``recompute="except_last"`` runs the last one otherwise."""
        choice = self.choices[stage]
        plan = choice.plan
        if last_micro_batch and choice.last_plan is not None:
            plan = choice.last_plan
        # Alike runs share a plan, but not their stages' names. A plan without an end has one stage fewer than names.
        names = [*self.chain(stage).names, END]
        stages = []
        for cost, name in zip(plan.chain, names, strict=False):
            stages.append(replace(cost, name=name))
        named_chain = replace(plan.chain, stages=tuple(stages))
        return replace(plan, chain=named_chain)

    def __repr__(self) -> str:
        return f"<Partition of {self.summary()}>"

    def summary(self) -> str:
        """The partition on one line."""
        proof = f"within {self.gap:.1%} of the best"
        if self.is_optimal:
            proof = "optimal"
        problem, step = self.problem, self.simulation
        return (
            f"balance {list(self.balance)} on {len(problem.devices)} devices, {problem.schedule} with "
            f"{problem.micro_batches} micro-batches: {format_seconds(self.seconds)} per step, {step.bubble:.1%} "
            f"bubble, peak {format_bytes(max(step.peak_bytes))}; {proof}"
        )

    def __rich__(self) -> Table:
        table = Table(
            title=self.summary(),
            box=box.SIMPLE_HEAD,
            title_justify="left",
            title_style="",
        )
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "model" else "right")
        devices = len(self.problem.devices)
        for stage, choice in enumerate(self.choices):
            load = choice.load.micro_batch
            # A device has one peak for all its stages: it stands in the row of the first.
            device_peak = ""
            if stage < devices:
                device_peak = format_bytes(self.simulation.peak_bytes[stage])
            table.add_row(
                str(stage),
                str(stage % devices),
                cell(self._ends_shown(choice)),
                str(self.problem.in_flight[stage]),
                format_seconds(load.forward_seconds),
                format_seconds(load.backward_seconds),
                format_seconds(load.recompute_seconds),
                format_bytes(load.held_bytes),
                device_peak,
            )
        return table

    def _ends_shown(self, choice: StageChoice) -> str:
        """Number of stages of a run and the names of its first and last one, or the name of the only one."""
        names = self.problem.chain.names
        ends = dict.fromkeys((names[choice.first], names[choice.last]))
        return f"{choice.last + 1 - choice.first}: {' … '.join(ends)}"

    def __str__(self) -> str:
        return rendered(self, width=120)


_COLUMNS = (
    "stage",
    "device",
    "model",
    "in flight",
    "forward",
    "backward",
    "recomputed",
    "held each",
    "device peak",
)


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
    if isinstance(devices, int):
        all_devices = (PipelineDevice(memory_bytes),) * devices
    else:
        all_devices = tuple(devices)
    problem = Problem(chain, all_devices, micro_batches, state_bytes=tuple(state_bytes), **options)
    costs = Costs(problem)
    search = Search(costs)
    # Cuts given by hand are not compared with others, so nothing is proven of them.
    bound_seconds = 0.0
    if balance != "auto":
        cuts = cuts_of(check_balance(balance, chain.names, problem.stages))
        choices = search.only(cuts)
        if choices is None:
            raise _partition_error(costs, cuts, f"balance={list(balance)} does not fit")
        return Partition(problem, tuple(choices), bound_seconds)

    choices, bound_seconds = search.run()
    if choices is None:
        # The search goes for seconds, and may have missed the few cuts that fit.
        cuts = _least_memory_cuts(costs)
        choices = search.only(cuts)
        if choices is None:
            raise _partition_error(costs, cuts, "no partition fits")
    return Partition(problem, tuple(choices), bound_seconds)


def _partition_error(costs: Costs, cuts: Cuts, what: str) -> PartitionError:
    """Error with the least memory per device, and who has less, as if its stages' peaks coincided."""
    problem = costs.problem
    devices = len(problem.devices)
    runs = runs_of(cuts, len(problem.chain))
    stage_needs = [costs.least_bytes(stage, *run) for stage, run in enumerate(runs)]
    # Stage s is on device s % D. Peaks of stages on one device need not coincide, so their sum is a bound from above.
    device_needs = [sum(stage_needs[device::devices]) for device in range(devices)]
    needed_bytes = max(device_needs)
    device = _first_short_device(problem, device_needs)
    has, needed = formatted_apart(problem.devices[device].memory_bytes or 0, needed_bytes)

    static_bytes = 0
    for run in runs:
        static_bytes += int(costs.state_bytes(*run)) + int(costs.gradient_bytes(*run))
    least = "about"
    if problem.stages_per_device == 1:
        least = "at least"
    remedies = "use more devices or smaller micro-batches"
    if problem.recompute != "rotor":
        remedies += ', or recompute="rotor"'
    if not what.startswith("no "):
        remedies += ', or balance="auto"'
    return PartitionError(
        f"{what} {devices} devices: device {device} has {has}, expected {least} {needed} per device for "
        f"{problem.micro_batches} micro-batches under {problem.schedule!r} with recompute={problem.recompute!r} "
        f"(weights, optimizer state and gradients take {format_bytes(static_bytes)} in all): {remedies}",
        needed_bytes,
        device,
    )


def _first_short_device(problem: Problem, needs: Sequence[int]) -> int:
    """The first device with less memory than it needs; if each has enough by itself, the one that needs most."""
    for number, (device, need) in enumerate(zip(problem.devices, needs, strict=True)):
        if device.memory_bytes is not None and device.memory_bytes < need:
            return number
    return needs.index(max(needs))


def _least_memory_cuts(costs: Costs) -> Cuts:
    """Cuts whose largest memory is least, or the best ones seen before patience ended.

    The least memory of a run is a search over its plans, and there are n² runs. So each run has a bound from below
    first, cuts are made by bounds, and only runs of the best cuts are asked. When none is left to ask, these are best.
    """
    problem = costs.problem
    n, stages = len(problem.chain), problem.stages
    first = np.arange(n)[:, None]
    # Runs of several times the even length are hardly those of least memory, and the table grows with the length.
    longest = min(n - stages + 1, 4 * math.ceil(n / stages) + 4)
    last = first + np.arange(longest)
    last_inside = np.minimum(last, n - 1)
    outputs = np.array([stage.output_bytes for stage in problem.chain])[last_inside]
    in_flight = np.array(problem.in_flight)[:, None, None]
    pipeline_stage = np.arange(stages)[:, None, None]
    # Every micro-batch in flight holds its output at least.
    bounds = costs.fixed_bytes(first, last_inside) + (in_flight * outputs).astype(float)
    bounds[impossible(problem, pipeline_stage, first, last)] = math.inf

    asked: set[tuple[int, int, int]] = set()
    best: tuple[float, Cuts] = math.inf, ()
    while True:
        cuts = least_bottleneck(bounds)
        assert cuts is not None, "every run can have the memory that it needs"
        runs = {(stage, *run) for stage, run in enumerate(runs_of(cuts, n))}
        for stage, begin, end in runs - asked:
            bounds[stage, begin, end - begin] = costs.least_bytes(stage, begin, end)
        largest = max(bounds[stage, begin, end - begin] for stage, begin, end in runs)
        best = min(best, (largest, cuts))
        if asked >= runs or len(asked) > _MOST_ASKED:
            return best[1]
        asked |= runs


def check_balance(balance: Sequence[int] | str, names: Sequence[str], parts: int) -> tuple[int, ...]:
    """A balance given by hand, checked for stages of these names and so many parts."""
    stages = len(names)
    even = even_balance(stages, parts)
    # A text is a sequence, too, of letters.
    if isinstance(balance, str):
        raise PipelineError(f'balance is {balance!r}: expected "auto" or numbers such as {even}')
    are_numbers = all(map(is_positive_integer, balance))
    if not are_numbers or len(balance) != parts or sum(balance) != stages:
        raise PipelineError(
            f"balance={list(balance)} does not share out the model's {stages} stages: expected {parts} positive "
            f"integers that add up to {stages}, such as balance={even}. Its stages are {_listed(names)}"
        )
    return tuple(balance)


def _listed(names: Sequence[str]) -> str:
    """Names for a message: the first of them, and the last one if there are more."""
    shown = list(names[:_MOST_NAMED])
    if len(names) > _MOST_NAMED:
        shown += ["…", names[-1]]
    return ", ".join(shown)


def counted_in_stages(
    balance: Sequence[int],
    names: Sequence[str],
    children: Sequence[str],
    parts: int,
) -> list[int]:
    """A balance that counts a model's children, in stages, whose names begin with theirs; any other as it is.

    Raises ``PipelineError`` if it counts children, and not for so many parts.
    """
    if not all(map(is_positive_integer, balance)) or sum(balance) != len(children):
        return list(balance)
    # Where stages are children the numbers mean the same, and the check of stages has the better message.
    if len(balance) != parts and len(names) != len(children):
        example = ""
        if parts <= len(children):
            example = f", such as balance={even_balance(len(children), parts)}"
        raise PipelineError(
            f"balance={list(balance)} is for {len(balance)} pipeline stages, and there are {parts}: expected {parts} "
            f"positive integers that add up to the model's {len(children)} children{example}. They are "
            f"{_listed(children)}"
        )
    place_of = {child: place for place, child in enumerate(children)}
    # A stage that was fused is named "2 … 4", and one inside of a nested container "2.0.1".
    firsts = []
    lasts = []
    for name in names:
        first_name = name.partition(" … ")[0]
        last_name = name.rpartition(" … ")[2]
        firsts.append(place_of[first_name.partition(".")[0]])
        lasts.append(place_of[last_name.partition(".")[0]])

    # By part, the number of stages that end before its cut.
    ends = []
    for cut in accumulate(balance):
        ends.append(sum(last < cut for last in lasts))
        for name, first, last in zip(names, firsts, lasts, strict=True):
            if first < cut <= last:
                raise PipelineError(
                    f"balance={list(balance)} cuts between the children {children[cut - 1]!r} and {children[cut]!r}, "
                    f"which run as one stage, {name!r}: expected a cut elsewhere"
                )
    starts = [0, *ends[:-1]]
    return [end - start for start, end in zip(starts, ends, strict=True)]
