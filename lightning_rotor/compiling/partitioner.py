"""The fastest schedule of a joint graph whose pair of graphs keeps a budget."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_rotor.compiling.backward_writer import graphs_for, torch_pair
from lightning_rotor.compiling.graph_chain import chain_of
from lightning_rotor.compiling.joint_graph import reads_of_sizes, stages_of_joint_graph
from lightning_rotor.compiling.kernel_workspaces import Workspaces
from lightning_rotor.compiling.peak_count import CountedPeak, count_peak
from lightning_rotor.compiling.stage_options import options_of
from lightning_rotor.errors import BudgetError, ModelError
from lightning_rotor.planning import frontier
from lightning_rotor.private.operators import OpOverload
from lightning_rotor.private.partitioning import is_mutable, outside_of_fakes, parts_of
from lightning_rotor.schedule import Schedule
from lightning_rotor.units import format_bytes

_log = logging.getLogger(__name__)
# Points of the chain's curve that are written and counted: bytes of the chain are rough, those of finished graphs not.
_MOST_POINTS = 24
# To be raised with each change of how graphs are split: the compiler's cache outlives this version.
_EDITION = 3


@dataclass(frozen=True, slots=True)
class Saving:
    """By how much the peaks of a pair of graphs are to be lower than those of the pair that torch would make.

    A negative number is room: the peak may be higher by so much. With ``or_least``, the pair that takes least does if
    none saves so much.
    """

    forward_bytes: int
    backward_bytes: int
    or_least: bool = False

    @property
    def is_needed(self) -> bool:
        """True if one of them must be lower."""
        return max(self.forward_bytes, self.backward_bytes) > 0


@dataclass(frozen=True)
class Split:
    """A joint graph in two.

    Attributes:
        forward: Returns the outputs and what it saves.
        backward: Recomputes the rest.
        schedule: Of the stages of the forward.
        overhead: Recomputed seconds, as a share of a step without recomputation, by the cost model.
        peak: As counted.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    schedule: Schedule
    overhead: float
    peak: CountedPeak


def partition(
    joint: fx.GraphModule,
    budget_bytes: int | None = None,
    *,
    saving: Saving | None = None,
    outputs: int,
    static_inputs: tuple[int, ...] = (),
    fused: bool = True,
) -> Split:
    """Split a joint graph of forward and backward so that its peak keeps a budget.

    Args:
        joint: As AOTAutograd hands it to a partitioner. It is changed.
        budget_bytes: For all that both graphs allocate; None is what they take where torch chooses what is saved.
        saving: In the place of a budget, how much less than that each of the two peaks may be.
        outputs: Number of the forward's outputs.
        static_inputs: Numbers of inputs that stay where they are, such as parameters.
        fused: The compiler makes pointwise results where they are read, as Inductor does.
    Raises:
        ModelError: The graph has numbers that depend on the sizes of inputs, or nothing to cut.
        BudgetError: No schedule keeps the budget; says the least that one keeps.
    """
    parts = parts_of(joint, outputs, static_inputs)
    stages = stages_of_joint_graph(joint, parts)
    _refuse_effects(joint, parts.changed_inputs)
    if reads_of_sizes(stages):
        raise ModelError(
            "a graph that was compiled for several sizes cannot be planned: expected "
            "torch.compile(..., dynamic=False), or the blocks compiled instead of the whole (for block in net.blocks: "
            "block.compile())"
        )
    if not len(stages):
        raise ModelError("a compiled graph computes nothing that could be recomputed: expected one with layers in it")
    options = options_of(stages)
    chain = chain_of(stages, options)
    workspaces = Workspaces(fused=fused)

    def split(schedule: Schedule, overhead: float) -> Split:
        forward, backward = graphs_for(stages, options, schedule)
        peak = count_peak(forward, backward, outputs=outputs, fused=fused, workspaces=workspaces)
        return Split(forward, backward, schedule, overhead, peak)

    kept = split(Schedule.keep_all(len(chain)), 0.0)
    if saving is not None:
        # Of the pair that the user's code is: one that keeps all boundaries may take more.
        plain = count_peak(*torch_pair(stages), outputs=outputs, fused=fused, workspaces=workspaces)
        forward_bytes = plain.forward_bytes - saving.forward_bytes
        backward_bytes = plain.backward_bytes - saving.backward_bytes
    else:
        forward_bytes = backward_bytes = kept.peak.peak_bytes if budget_bytes is None else budget_bytes

    def excess(peak: CountedPeak) -> int:
        return max(peak.forward_bytes - forward_bytes, peak.backward_bytes - backward_bytes)

    if excess(kept.peak) <= 0:
        return kept
    least_excess_bytes = excess(kept.peak)
    least: Split | None = None
    with outside_of_fakes():
        # From the largest budget to the least: the first one that keeps the budget is the fastest.
        # Without those that recompute nothing: that was tried above.
        points = [point for point in reversed(list(frontier(chain))) if point.overhead > 0]
    step = max(1, len(points) // _MOST_POINTS)
    for point in points[::step]:
        with outside_of_fakes():
            schedule = point.schedule
        candidate = split(schedule, point.overhead)
        if excess(candidate.peak) <= 0:
            _log.info(
                "a compiled graph of %d stages runs under %s: counted peaks %s of %s in the forward, %s of %s in the "
                "backward",
                len(chain),
                schedule,
                format_bytes(candidate.peak.forward_bytes),
                format_bytes(forward_bytes),
                format_bytes(candidate.peak.backward_bytes),
                format_bytes(backward_bytes),
            )
            return candidate
        if excess(candidate.peak) < least_excess_bytes:
            least_excess_bytes = excess(candidate.peak)
            least = candidate
    if saving is not None and saving.or_least and least is not None:
        _log.info("a compiled graph of %d stages runs under %s, which takes least", len(chain), least.schedule)
        return least
    available_bytes = min(forward_bytes, backward_bytes)
    raise BudgetError(
        f"the compiled graph takes at least {format_bytes(available_bytes + least_excess_bytes)}, but has "
        f"{format_bytes(available_bytes)}: raise mem_limit or lower the batch size",
        minimum_bytes=available_bytes + least_excess_bytes,
        budget_bytes=available_bytes,
        stage="",
    )


def _refuse_effects(joint: fx.GraphModule, changed: frozenset[fx.Node]) -> None:
    """Raise ``ModelError`` if a graph does more than compute, so that no part of it may run twice or be left out."""
    for node in joint.graph.nodes:
        target = node.target
        # What takes a part of several results, and arithmetic of Python, has no effect.
        if not isinstance(target, OpOverload):
            continue
        if target.namespace in ("_c10d_functional", "c10d"):
            what = "exchanges messages with other processes"
        # Inputs that change, such as running statistics, are written to once, when the forward is over.
        elif is_mutable(target) and node.args[0] not in changed:
            what = f"changes a tensor in place ({target})"
        else:
            continue
        raise ModelError(
            f"a compiled graph {what}, so it cannot be planned inside: expected the blocks compiled instead of the "
            "whole (for block in net.blocks: block.compile())"
        )


class Partitioner:
    """A ``partition_fn`` of AOTAutograd, and of Inductor with ``under_partitioner``.

    Attributes:
        splits: One for each graph that was compiled.
    """

    def __init__(self, budget_bytes: int | None = None, *, saving: Saving | None = None, fused: bool = True) -> None:
        self.splits: list[Split] = []
        self._budget_bytes = budget_bytes
        self._saving = saving
        self._fused = fused

    @property
    def key(self) -> str:
        """Equal for partitioners that split equal graphs alike."""
        # Inductor's cache finds compiled code by it, in later processes too.
        return f"lightning-rotor {_EDITION} {self._budget_bytes} {self._saving} {self._fused}"

    def __call__(
        self,
        joint: fx.GraphModule,
        inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward of a joint graph."""
        split = partition(
            joint,
            self._budget_bytes,
            saving=self._saving,
            outputs=num_fwd_outputs,
            static_inputs=tuple(static_lifetime_input_indices or ()),
            fused=self._fused,
        )
        self.splits.append(split)
        return split.forward, split.backward
