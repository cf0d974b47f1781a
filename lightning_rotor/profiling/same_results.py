"""Proof that the stages of a recorded module compute what it computes: both run once, and every bit is compared.

A recording cannot see all that a forward asks. C++ code may decide by values, and ``type(x) is torch.Tensor`` is False
for what stands for a tensor while it records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_rotor.capture.call import firsts_of
from lightning_rotor.capture.graph_cut import GraphCut
from lightning_rotor.errors import InverseError, ModelError
from lightning_rotor.execution.isolated import kept_attributes, lent_buffers, undisturbed
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.execution.segment import recomputed
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import same_bits, tensors_in, tree_flatten, tree_leaves, tree_unflatten
from lightning_rotor.profiling.stage_input import Boundary
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.holders import PLAIN
from lightning_rotor.stages.sequential import Stage, wiring_of


def require_same(
    module: nn.Module,
    cut: GraphCut,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Raise ModelError unless stages give a module's outputs, buffers and random numbers on a call, if it repeats."""
    name = type(module).__name__
    call = _Call(module, cut, args, kwargs)
    device = tensors_in((args, kwargs))[0].device
    whole = Stage(name, (module,))
    constants = cut.recording.constants
    versions = list(map(private.version_of, constants))
    with undisturbed(device):
        try:
            received = _outcome(whole, call.run_stages, device)
        except InverseError:
            # It names its stage, which the plain module's error would not.
            raise
        except Exception:
            # What is wrong with the input is said by the module itself.
            _outcome(whole, call.run_module, device)
            raise
        expected = _outcome(whole, call.run_module, device)
        # Comparing outputs does not tell: only later runs of the trace would find it changed.
        if versions != list(map(private.version_of, constants)):
            raise ModelError(
                f"the forward of {name} changes a tensor in place that it has made itself without any "
                "input, so a trace would change it again in every step. Move that part into a submodule"
            )
        # A module that gives other bits each time has no right ones to compare with.
        if not expected.equals(received) and expected.equals(_outcome(whole, call.run_module, device)):
            raise ModelError(
                f"the trace of {name} does not compute what the module does: outputs, buffers or "
                "random numbers differ. Its forward takes decisions that no trace sees (type(x) is torch.Tensor, the "
                "answers of C++ code): move them into a submodule"
            )


class _Call:
    """A call of a module, with copies of its arguments each time, as it is and by its stages."""

    def __init__(
        self,
        module: nn.Module,
        cut: GraphCut,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._module = module
        self._cut = cut
        value = tuple(args), dict(kwargs)
        self._boundary = Boundary.of(value)
        # Places of the arguments that are given first: what is given twice is one object in a copy as well.
        self._firsts = firsts_of(tree_leaves(value))

    def _arguments(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        leaves, spec = tree_flatten(self._boundary.fresh())
        args, kwargs = tree_unflatten([leaves[first] for first in self._firsts], spec)
        return args, kwargs

    def run_module(self) -> Any:
        """The module's output."""
        args, kwargs = self._arguments()
        # The class's own: an attached plan has put a forward of its own on the module.
        return type(self._module).forward(self._module, *args, **kwargs)

    def run_stages(self) -> Any:
        """The stages' output."""
        args, kwargs = self._arguments()
        value = self._cut.guards.take(self._cut.guards.call(args, kwargs))
        runs = [partial(run_stage, stage) for stage in self._cut.stages]
        return wiring_of(self._cut.stages).run(value, runs)


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """Results of a run."""

    output: Boundary
    buffers: Sequence[torch.Tensor | None]
    generators: GeneratorStates

    def equals(self, other: _Outcome) -> bool:
        """True if all bits are the same, and all objects that are no tensors are equal."""
        mine, theirs = self.output, other.output
        return (
            str(mine.spec) == str(theirs.spec)
            and mine.requires_grad == theirs.requires_grad
            and self.generators.equals(other.generators)
            and _all_same(mine.leaves, theirs.leaves)
            and _all_same(self.buffers, other.buffers)
        )


def _outcome(whole: Stage, forward: Callable[[], Any], device: torch.device) -> _Outcome:
    """Output, buffers and generators after a run from the present state, which is set back."""
    states = GeneratorStates(device)
    with kept_attributes(whole), lent_buffers(whole) as slots:
        # As a segment, the run keeps no activations, of which there may be more than memory.
        output = Boundary.of(recomputed(forward, draws_random=False))
        buffers = [module._buffers[name] for module, name, _ in slots]
    after = GeneratorStates(device)
    states.restore()
    return _Outcome(output, buffers, after)


def _all_same(mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(mine) == len(theirs) and all(map(_is_same, mine, theirs))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_bits(one, other)
    if type(one) is not type(other):
        return False
    # Before comparing: an object may be unequal to itself, as NaN is.
    if one is other:
        return True
    # A class of the user's that derives from a number or a text may compare as it likes.
    base = next((base for base in (*PLAIN, tuple) if issubclass(type(one), base)), object)
    return base.__eq__(one, other) is True
