"""One inverted stage: it drops its input when it has run, and rebuilds it from its output in the backward.

There are two ways, with these evaluations of the stage, where a plain step takes a forward and a backward::

    Inversion         any module with an        forward ┄┄┄┄ inverse, forward, backward: the second forward is that of
                      inverse                   a recomputed segment of one stage, which starts from ``inverse(y)``
    FusedInversion    one that also has a       forward ┄┄┄┄ reversible_backward(y, dy): one node of autograd's graph,
                      ``reversible_backward``   whose inputs are the stage's input and parameters. So accumulation and
                                                hooks (DistributedDataParallel's) are those of plain training

In both, generators, autocast and buffers are those of the first run. A few noted elements of the input say whether the
inverse has drifted (:mod:`.reverse`). Inside a segment this happens only when the segment is recomputed: its first pass
drops what is saved through its hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.recomputation import is_checkpointing, is_last_backward_through, recomputed
from lightning_rotor.execution.reverse import Guard, Moment, first_derivatives_only, stand_ins
from lightning_rotor.execution.segment_state import FirstPass, Replay, SegmentState
from lightning_rotor.private.torch_names import backward_keeps_graph, hooks_for_saved_tensors, identity_of, version_of
from lightning_rotor.private.values import TreeSpec, tree_flatten, tree_unflatten
from lightning_rotor.stages.sequential import require_like
from lightning_rotor.stages.state import GeneratorStates

# ----------------------------------------------------------------------------------------------------
# Boundaries that are dropped in the forward, and what those who saved them refer to until they are rebuilt.


class Boundary:
    """Tensors that a stage dropped, for those who refer to them until it rebuilds them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tensors: dict[int, torch.Tensor] = {}
        self._referred_to: set[int] = set()

    def refer(self, *numbers: int) -> None:
        """Note that the tensors with these numbers will be asked for."""
        self._referred_to.update(numbers)

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Keep those rebuilt tensors that will be asked for."""
        self._tensors = {number: tensors[number] for number in self._referred_to}

    def get(self, number: int) -> torch.Tensor:
        """One of the tensors; raises ExecutionError if the backward has not rebuilt them."""
        if number not in self._tensors:
            raise ExecutionError(
                f"a backward asks for the input of {self._name!r}, which was dropped and is not rebuilt: expected a "
                "backward that passes through all of that stage. Do not invert it, or differentiate with respect to "
                "what comes before it as well"
            )
        return self._tensors[number]

    def take(self) -> list[torch.Tensor]:
        """All tensors, for the one who refers to them all."""
        tensors = [self.get(number) for number in sorted(self._referred_to)]
        self._tensors.clear()
        return tensors


class _Kept:
    """A tensor saved through whatever hooks are set, so that a surrounding segment drops it and brings it back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: with its graph it would hold the node that holds it. Its output stays, too: before torch 2.13 the
        # node alone does not hold what it has saved.
        self._held = _Save.apply(_root(), tensor.detach())

    def get(self) -> torch.Tensor:
        """The tensor. A surrounding recomputation hands it out once for each backward."""
        (tensor,) = self._held.grad_fn.saved_tensors
        return tensor  # type: ignore[no-any-return]


class _Save(torch.autograd.Function):
    """Saves a tensor and computes nothing."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("nobody differentiates it")


def _root() -> torch.Tensor:
    return torch.empty(0, requires_grad=True)


# -------------------------------------------------------------------- a stage before that saves its own output


@dataclass(slots=True, eq=False)
class _Saved:
    """One saved tensor of a stage: itself, kept for a surrounding segment, or shown by a boundary at an index."""

    storage: StorageWeakRef
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    tensor: torch.Tensor | None
    kept: _Kept | None = None
    shown: tuple[Boundary, int] | None = None

    def shows(self, tensor: torch.Tensor) -> bool:
        """True if it is the same memory, read as the same numbers."""
        return (
            self.storage.cdata == identity_of(tensor.untyped_storage())
            and self.dtype == tensor.dtype
            and is_whole(tensor)
        )

    def stand_in(self) -> torch.Tensor:
        """A tensor of one element that looks like it to a segment, which compares what its two passes save."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)

    def get(self) -> torch.Tensor:
        if self.shown is not None:
            boundary, index = self.shown
            return boundary.get(index).as_strided(self.shape, self.stride, self.offset)
        if self.kept is not None:
            return self.kept.get()
        assert self.tensor is not None
        return self.tensor


class SavedOutput:
    """What a stage saves while :meth:`watching`, until it is known which of it is its output."""

    def __init__(self) -> None:
        self._saved: list[_Saved] = []

    def watching(self) -> saved_tensors_hooks:
        """Context in which the stage runs."""
        return saved_tensors_hooks(self._pack, _Saved.get)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(
            StorageWeakRef(tensor.untyped_storage()),
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
            # The first pass of a segment keeps nothing. Detached: an output would hold the node that holds it until a
            # backward.
            None if is_checkpointing() else tensor.detach(),
        )
        self._saved.append(saved)
        return saved

    def refer(self, boundary: Boundary, outputs: Sequence[torch.Tensor]) -> None:
        """Let what shows the output refer to the boundary; the rest goes where it would have gone without the watch."""
        found, self._saved = self._saved, []  # whoever holds the hooks must not hold these
        for saved in found:
            index = next((index for index, output in enumerate(outputs) if saved.shows(output)), None)
            if index is not None:
                saved.tensor, saved.shown = None, (boundary, index)
                boundary.refer(index)
            elif hooks_for_saved_tensors() is not None:
                saved.kept = _Kept(saved.stand_in() if saved.tensor is None else saved.tensor)
                saved.tensor = None


def is_whole(tensor: torch.Tensor) -> bool:
    """True if a tensor is dense and fills its memory, so that a copy of its numbers can stand for it."""
    memory = tensor.untyped_storage().nbytes()
    return tensor.nbytes == memory and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


# -------------------------------------------------------------------- an inverted stage before


class Output:
    """How an inverted stage gets its output back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._source: list[_Kept] | Boundary | None = None
        self._is_given_up = False

    def refer(self, boundary: Boundary, outputs: Sequence[torch.Tensor]) -> None:
        """Take the output from the boundary, which the next stage rebuilds."""
        self._source = boundary
        boundary.refer(*range(len(outputs)))

    def keep(self, outputs: Sequence[torch.Tensor]) -> None:
        """Hold the output until the backward."""
        self._source = [_Kept(output) for output in outputs]

    def get(self, *, for_good: bool) -> list[torch.Tensor]:
        """The output, ``for_good`` if no other backward needs it; raises ExecutionError if it is gone."""
        match self._source:
            case Boundary() as boundary:
                return boundary.take()
            case None:
                raise second_backward(self.name)
            case kept:
                if for_good:
                    self._source, self._is_given_up = None, True
                return [each.get() for each in kept]

    def require_there(self, *_: Any) -> None:
        """Raise ExecutionError if a backward has given it up."""
        if self._is_given_up:
            raise second_backward(self.name)


def second_backward(name: str) -> ExecutionError:
    """The error for a backward through an inverted stage whose output an earlier one has given up."""
    return ExecutionError(
        f"{name!r} is rebuilt again after a backward that did not keep the graph: pass retain_graph=True to all but "
        "the last backward"
    )


# ----------------------------------------------------------------------------------------------------

_NO_STATE = SegmentState()


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """How a stage runs and how it is inverted; ``state`` is what the forward changes besides."""

    name: str
    module: nn.Module
    forward: Callable[[Any], Any]
    inverse: Callable[[Any], Any]
    draws_random: bool = True
    state: SegmentState = _NO_STATE


class Inversion:
    """One run of an inverted stage, whose input the caller lets go of; ``boundary`` is that input once rebuilt."""

    def __init__(self, way: Way, value: Any) -> None:
        leaves, self._taken = tree_flatten(value)
        self.boundary = Boundary(way.name)
        self.output = Output(way.name)
        self._way = way
        self._value: Any = value
        self._nodes = [leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None]
        self._requires_grad = [leaf.requires_grad for leaf in leaves]
        self._like = torch.empty_strided((0,), (1,), dtype=leaves[0].dtype, device=leaves[0].device)
        self._shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        self._strides = [leaf.stride() for leaf in leaves]
        self._guard = Guard.of(leaves, name=way.name)
        self._made: TreeSpec

    def run(self) -> Any:
        """Run the stage, whose output belongs to the caller; raises ExecutionError if it changes its input in place."""
        leaves = tree_flatten(self._value)[0]
        versions = [version_of(leaf) for leaf in leaves]
        output = self._first_run(leaves)
        self._made = tree_flatten(output)[1]
        if [version_of(leaf) for leaf in leaves] != versions:
            raise ExecutionError(
                f"{self._way.name!r} changes its input in place, so it cannot be inverted: expected an untouched "
                "input. Use an operation that is not in place there, or measure again if the model has changed since"
            )
        return output

    def _first_run(self, leaves: Sequence[torch.Tensor]) -> Any:
        way = self._way
        output = recomputed(self._run, self._like, name=repr(way.name), draws_random=way.draws_random, state=way.state)
        # Before autograd, which does not know the stage, finds its own tensors gone.
        for node in {leaf.grad_fn for leaf in tree_flatten(output)[0] if leaf.grad_fn is not None}:
            node.register_prehook(self.output.require_there)
        return output

    def _run(self, _: torch.Tensor) -> Any:
        """Run in the forward, and again in the backward. The argument says on which device."""
        if self._value is not None:
            value, self._value = self._value, None
            return self._way.forward(value)
        leaves = [
            leaf.requires_grad_(wanted) for leaf, wanted in zip(self._rebuilt(), self._requires_grad, strict=True)
        ]
        return self._way.forward(tree_unflatten(leaves, self._taken))

    def _rebuilt(self) -> list[torch.Tensor]:
        with torch.no_grad():
            states = GeneratorStates(self._like.device) if self._way.draws_random else None
            before = FirstPass(self._way.state)
            with before:
                pass
            before.generators = None  # they are among the states
            with Replay(before):
                outputs = self.output.get(for_good=is_last_backward_through(self._nodes))
                value = self._way.inverse(tree_unflatten(_drained(outputs), self._made))
            if states is not None:
                states.restore()
            return self._accepted(value, what="inverse")

    def _accepted(self, value: Any, *, what: str) -> list[torch.Tensor]:
        """The rebuilt tensors, checked, laid out as they were, and given to those who refer to them."""
        leaves = require_like(value, self._shapes, name=self._way.name, what=what)
        self._guard.check(leaves, draws_random=self._way.draws_random)
        placed = [_placed(leaf, stride) for leaf, stride in zip(leaves, self._strides, strict=True)]
        self.boundary.fill(placed)
        return [leaf.detach() for leaf in placed]


class FusedInversion(Inversion):
    """One run of an inverted stage whose module has a ``reversible_backward``."""

    def __init__(self, way: Way, value: Any) -> None:
        super().__init__(way, value)
        self._parameters = tuple(way.module.parameters())
        self._moment = Moment(way.module, self._like.device, state=way.state, may_draw=way.draws_random)

    @property
    def inputs(self) -> int:
        """The number of tensors that the stage takes."""
        return len(self._shapes)

    def _first_run(self, leaves: Sequence[torch.Tensor]) -> Any:
        self._value = None
        return tree_unflatten(_Fused.apply(self, *leaves, *self._parameters), self._made)

    def require_unchanged(self) -> None:
        """Check that the parameters and buffers that the module reads are unchanged."""
        self._moment.require_unchanged()

    def forward(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of the module's output."""
        with self._moment.first():
            outputs, self._made = tree_flatten(self._way.forward(tree_unflatten(leaves, self._taken)))
        return outputs

    def backward(self, gradients: Sequence[torch.Tensor], *, for_good: bool) -> Sequence[torch.Tensor | None]:
        """Rebuild the input; the gradients for it and the parameters, ``for_good`` if no other backward follows."""
        way: Any = self._way
        substitutes = stand_ins(self._parameters)
        outputs = self.output.get(for_good=for_good)
        with torch.no_grad(), self._moment.again(dict(zip(map(id, self._parameters), substitutes, strict=True))):
            rebuilt, for_input = way.module.reversible_backward(
                tree_unflatten(_drained(outputs), self._made), tree_unflatten(gradients, self._made)
            )
        self._accepted(rebuilt, what="fused backward")
        needed = require_like(for_input, self._shapes, name=way.name, what="fused backward")
        found = [gradient if wanted else None for gradient, wanted in zip(needed, self._requires_grad, strict=True)]
        return first_derivatives_only(way.name, [*found, *(substitute.grad for substitute in substitutes)])


class _Fused(torch.autograd.Function):
    """The node of one fused run; parameters are among its inputs and get their gradients from it."""

    @staticmethod
    def forward(ctx: Any, run: FusedInversion, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = run.forward(tensors[: run.inputs])
        ctx.run, ctx.name = run, run.output.name
        ctx.save_for_backward(*tensors[run.inputs :])  # whoever changes one of them meanwhile hears of it
        ctx.mark_non_differentiable(*(each for each in outputs if not (each.is_floating_point() or each.is_complex())))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        run, for_good = ctx.run, not backward_keeps_graph()
        if run is None:
            raise second_backward(ctx.name)
        run.require_unchanged()
        _ = ctx.saved_tensors  # a segment around is recomputed here
        if for_good:
            ctx.run = None  # nodes live as long as their graph, which the loss holds
        return (None, *run.backward(gradients, for_good=for_good))


def _placed(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor with this layout."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _drained(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a list, which is emptied."""
    content = tensors[:]
    tensors.clear()
    return content
