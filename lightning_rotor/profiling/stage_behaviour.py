"""A look at one stage before it is measured: what it makes, what it changes, and whether it can run again.

A stage gives the same bits again if it is made of torch's own layers and changes nothing but running statistics. Of
others nobody knows, so they run twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lightning_rotor.capture.sequentialize import NO_CHECKPOINTS
from lightning_rotor.errors import ModelError
from lightning_rotor.execution.isolated import draws_seen, kept_attributes, kept_parameters, lent_buffers
from lightning_rotor.execution.nested_backward import graph_behind
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.private.functional_collectives import NOT_ARRIVED, is_on_its_way
from lightning_rotor.private.sharding import gathered, units_in
from lightning_rotor.private.torch_names import is_compiled, name_of_node, noticed_checkpoints, version_of
from lightning_rotor.private.values import (
    address_of,
    is_fake,
    other_layout,
    same_bits,
    tensors_in,
    tree_leaves,
    watch_containers,
)
from lightning_rotor.profiling.ranks import Ranks
from lightning_rotor.profiling.stage_input import Boundary
from lightning_rotor.profiling.storages import Storage, storages_of
from lightning_rotor.stages.draws import drawn_since
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.known_layers import DRAWING, is_plain_stock
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.snapshot import Snapshot
from lightning_rotor.stages.wiring import unpacked


class Behaviour(NamedTuple):
    """Findings of the runs of a stage, or of several in a row.

    Attributes:
        draws_random: Random numbers were drawn, or could be in some step.
        repeatable: A recomputation gives the same bits.
        leaves_traces: Something that user code can reach was changed.
        calls_checkpoint: It calls torch's checkpoint.
        updating: Modules that changed buffers.
        written: Parameters that were changed.
        drawn: Kinds of generators that it draws from.
        starts: Where these stood before each stage that draws, if threads may draw, too.
    """

    draws_random: bool
    repeatable: bool
    leaves_traces: bool
    calls_checkpoint: bool
    updating: tuple[nn.Module, ...]
    written: tuple[nn.Parameter, ...]
    drawn: tuple[str, ...] = ()
    starts: tuple[GeneratorStates, ...] = ()

    @classmethod
    def of_all(cls, behaviours: Sequence[Behaviour]) -> Behaviour:
        """That of stages in a row."""
        updating: tuple[nn.Module, ...] = ()
        written: tuple[nn.Parameter, ...] = ()
        drawn: tuple[str, ...] = ()
        starts: tuple[GeneratorStates, ...] = ()
        for behaviour in behaviours:
            updating += behaviour.updating
            written += behaviour.written
            drawn += behaviour.drawn
            # The first is where the row starts.
            starts += behaviour.starts
        return cls(
            draws_random=any(behaviour.draws_random for behaviour in behaviours),
            # One stage that gives other bits makes a row give other bits.
            repeatable=all(behaviour.repeatable for behaviour in behaviours),
            leaves_traces=any(behaviour.leaves_traces for behaviour in behaviours),
            calls_checkpoint=any(behaviour.calls_checkpoint for behaviour in behaviours),
            updating=updating,
            written=written,
            drawn=drawn,
            starts=starts,
        )


class Look(NamedTuple):
    """Findings of one look at a stage.

    Attributes:
        outputs: Its result, value by value.
        storages: Of each leaf of these values.
        changed: Storages of its input that it changes in place.
        behaviour: All else.
    """

    outputs: tuple[Boundary, ...]
    storages: list[tuple[Storage | None, ...]]
    changed: list[Storage]
    behaviour: Behaviour


class _FirstRun(NamedTuple):
    """Findings of the first run of a stage, while what it has changed is still there to be seen."""

    outputs: tuple[Boundary, ...]
    storages: list[tuple[Storage | None, ...]]
    changed: list[Storage]
    updating: tuple[nn.Module, ...]
    leaves_traces: bool
    repeatable: bool


def look_at(
    stage: Stage,
    index: int,
    boundary: Boundary,
    taken: Sequence[Storage | None],
    device: torch.device,
    block_bytes: int,
    *,
    is_first: bool,
    ranks: Ranks,
) -> Look:
    """Run a stage, twice if it may give other bits, and see what it does. Everything is put back.

    Args:
        stage: The stage.
        index: Its number.
        boundary: Its input.
        taken: Storages of the leaves of its input.
        device: Of the chain.
        block_bytes: Sizes of storages are multiples of it.
        is_first: It reads the chain's input, which is the user's.
        ranks: Processes that look at the same stage now.
    """
    # Before anything runs, for a second run must draw the same numbers.
    states = GeneratorStates(device)
    with (
        gathered(units_in(stage.modules)),
        noticed_checkpoints() as checkpoints,
        kept_attributes(stage, keep_parameters=False) as before,
        lent_buffers(stage) as originals,
        kept_parameters(stage) as written,
        draws_seen(stage) as certain,
    ):
        first = _first_run(stage, index, boundary, taken, block_bytes, before, originals, is_first, ranks)
    # The reentrant kind runs a backward of its own, which torch.autograd.grad refuses.
    if True in checkpoints:
        raise ModelError(f"stage {stage.name!r} cannot be measured. {NO_CHECKPOINTS}")
    # TorchScript changes the exceptions that pass through it, and a recomputation ends in one.
    is_scripted = any(isinstance(module, torch.jit.ScriptModule) for _, module in stage.submodules())
    changes_chains_input = any(storage.born < 0 for storage in first.changed)
    repeatable = first.repeatable and not (written or is_scripted or changes_chains_input)
    # A second run tells a stage's own draws from those of other threads.
    drawn = drawn_since(states, partial(outputs_of, stage, boundary), certain=certain)
    behaviour = Behaviour(
        draws_random=bool(drawn) or _may_draw(stage),
        repeatable=_repeats_itself(stage, boundary, first.outputs, repeatable, states, drawn, ranks),
        leaves_traces=first.leaves_traces,
        calls_checkpoint=bool(checkpoints),
        updating=first.updating,
        written=tuple(written),
        drawn=tuple(drawn),
        starts=(states,) if drawn and states.shared else (),
    )
    return Look(first.outputs, first.storages, first.changed, behaviour)


def _first_run(
    stage: Stage,
    index: int,
    boundary: Boundary,
    taken: Sequence[Storage | None],
    block_bytes: int,
    before: Snapshot,
    originals: Sequence[tuple[nn.Module, str, torch.Tensor]],
    is_first: bool,
    ranks: Ranks,
) -> _FirstRun:
    """Run a stage, and compare all that it can reach with what was there ``before``."""
    value = boundary.fresh()
    leaves = tree_leaves(value)
    containers_changed = watch_containers(value)
    # By versions and not by values: writing equal ones is a change as well.
    versions = [version_of(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]
    with _watching(stage, ranks):
        output = run_stage(stage, value)
    tensors = tensors_in(output)
    if not tensors:
        raise ModelError(
            f"stage {stage.name!r} returns {type(output).__name__}, which holds no tensor: expected a tensor, or "
            "tensors in tuples, lists or dicts"
        )
    # A container between stages is the chain's own, and made anew for each run.
    if is_first and containers_changed():
        raise ModelError(
            f"stage {stage.name!r} changes a container that the module is called with: let it return a new one"
        )
    outputs = _boundaries(stage, output)
    by_address = {}
    changed = []
    for leaf, storage, version in zip(leaves, taken, versions, strict=True):
        if storage is not None:
            # What the stage hands on of its input keeps its storage: a view, or the input itself.
            by_address[address_of(leaf)] = storage
            if version_of(leaf) != version:
                changed.append(storage)
    loses_values = bool(before.gone()) or any(isinstance(large, np.ndarray) for large in before.changed_large())
    return _FirstRun(
        outputs,
        [storages_of(part.leaves, index, by_address, block_bytes) for part in outputs],
        changed,
        updating=_updating(originals),
        leaves_traces=bool(before.changed()),
        repeatable=not (loses_values or _cannot_fill_a_graph(tensors)),
    )


def _watching(stage: Stage, ranks: Ranks) -> AbstractContextManager[None]:
    """Context in which messages between processes are seen."""
    # Compiled code changes nothing in place by a message, and would not be compiled when it is watched.
    if any(map(is_compiled, stage.called_modules())):
        return nullcontext()
    return ranks.watching()


def _repeats_itself(
    stage: Stage,
    boundary: Boundary,
    outputs: Sequence[Boundary],
    is_likely: bool,
    states: GeneratorStates,
    drawn: Collection[str],
    ranks: Ranks,
) -> bool:
    """True if a stage gives the same bits again, in this process and in all that run together with it."""
    # If one process will not run the stage again, no other must: its messages would find no partner.
    if ranks.any(not is_likely):
        return False
    if _is_stock(stage):
        # Torch's own layers change nothing but running statistics, which are lent.
        return is_likely
    states.restore(drawn)
    # One process that sees other bits is enough for all to keep the stage.
    return not ranks.any(not _same(outputs, outputs_of(stage, boundary)))


def outputs_of(stage: Stage, boundary: Boundary) -> tuple[Boundary, ...]:
    """The result of a stage for its input, value by value, in a run that leaves everything else as it was."""
    with gathered(units_in(stage.modules)), kept_attributes(stage), lent_buffers(stage):
        return _boundaries(stage, run_stage(stage, boundary.fresh()))


def _boundaries(stage: Stage, output: Any) -> tuple[Boundary, ...]:
    """The boundaries that a stage's result makes; raises ModelError if its memory cannot be followed."""
    tensors = tensors_in(output)
    if any(map(is_on_its_way, tensors)):
        raise ModelError(f"stage {stage.name!r} cannot be planned: {NOT_ARRIVED}")
    layout = other_layout(tensors)
    if layout:
        raise ModelError(
            f"stage {stage.name!r} returns a tensor of layout {layout}: expected dense ones between stages, as the "
            "memory of others cannot be followed. Make it and use it within one module"
        )
    # A slice of a stage's result keeps alive all that it is cut from.
    return tuple(Boundary.of(part, whole_storages=True) for part in unpacked(output, len(stage.writes)))


def _same(outputs: Sequence[Boundary], others: Sequence[Boundary]) -> bool:
    """True if the tensors are the same in each bit."""
    mine = _tensors_of(outputs)
    theirs = _tensors_of(others)
    return len(mine) == len(theirs) and all(map(same_bits, mine, theirs))


def _tensors_of(boundaries: Sequence[Boundary]) -> list[torch.Tensor]:
    return [tensor for boundary in boundaries for tensor in tensors_in(boundary.leaves)]


def _cannot_fill_a_graph(outputs: Iterable[torch.Tensor]) -> bool:
    """True if what a second run saves does not fit into the graph of the first, which made these outputs."""
    # An RReLU saves its noise, where a recomputation may end, before it draws it. A node of a jagged tensor takes
    # gradients of that tensor's own symbol alone, and the symbol is another one in each run.
    nodes = graph_behind(output.grad_fn for output in outputs if output.grad_fn is not None)
    return any(name_of_node(node).startswith(("Rrelu", "NestedView", "NestedGet")) for node in nodes)


def _updating(originals: Sequence[tuple[nn.Module, str, torch.Tensor]]) -> tuple[nn.Module, ...]:
    """Modules whose lent buffers differ from the originals, once for each such buffer."""
    return tuple(module for module, name, original in originals if _differs(module._buffers[name], original))


def _differs(lent: torch.Tensor | None, original: torch.Tensor) -> bool:
    # By values, since kernels (BatchNorm's) may write without a new version.
    if lent is None or not same_bits(lent, original):
        return True
    # A fake tensor has no values. A copy that was lent begins at version 0.
    return is_fake(lent) and version_of(lent) > 0


def _may_draw(stage: Stage) -> bool:
    """True if a stage could draw random numbers in some step."""
    # User code may do anything.
    if not _is_stock(stage):
        return True
    # A layer that draws nothing now may do so once its probability is raised.
    return any(isinstance(module, DRAWING) for _, module in stage.submodules())


def _is_stock(stage: Stage) -> bool:
    """True if a stage is made of torch's own layers alone."""
    return all(is_plain_stock(module) for _, module in stage.submodules())
