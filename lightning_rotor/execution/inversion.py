"""Modules that run without their input: it is dropped after the forward, and rebuilt from the output in the backward.

Each run is one node of autograd's graph, whose inputs are the module's input and parameters. So accumulation and hooks
(DistributedDataParallel's) are those of plain training. The node evaluates the module in one of two ways, where a plain
step takes a forward and a backward::

    any module with an inverse           forward ┄┄┄┄ inverse, forward, backward
    with a ``reversible_backward``       forward ┄┄┄┄ reversible_backward(y, dy)

Between two nodes is a boundary. The second one drops it, and fills it again in its backward::

    x ─▶ first ─▶ y ─▶ second ─▶ z       forward: y is dropped, z is held
    x ◀─ first ◀─ y ◀─ second ◀─ z       backward: z is given up, y is there until the first node has it

Generators, autocast and buffers are those of the first run. A few noted elements of the input say whether the inverse
has drifted (:mod:`.reverse`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.passes import Again, FirstPass, repeating, run_stage
from lightning_rotor.execution.reverse import Guard, Moment, Roots, learning, stand_ins
from lightning_rotor.execution.segment_state import SegmentState, state_of
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import TreeSpec, tree_flatten, tree_unflatten
from lightning_rotor.stages.sequential import (
    Stage,
    has_fused_backward,
    require_like,
    require_own_output,
    require_tensors,
)

# ---------------------------------------------------------------- Boundaries: tensors that are held, or can be rebuilt.


class Output:
    """The output of a module, for the modules around it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held: list[Callable[[], Any]] | None = None
        self._versions: list[int] | None = None  # None where hooks bring back what they like
        self._after: Inversion | None = None

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hold the tensors."""
        self._held = list(map(_holding, tensors))
        self._versions = list(map(private.version_of, tensors)) if _hooks() is None else None

    def hand_over(self, after: Inversion, tensors: Sequence[torch.Tensor]) -> None:
        """Drop the tensors, which a run can rebuild from its output; only the first call does so."""
        if self._after is None:
            self._require_untouched(tensors)
            self._held, self._after = None, after

    def refill(self, tensors: Sequence[torch.Tensor], *, for_good: bool) -> None:
        """Take tensors that a run has rebuilt, ``for_good`` if it cannot do so again."""
        if self._after is not None:
            self.hold(tensors)
            if for_good:
                self._after = None

    def lend(self, *, for_good: bool) -> list[torch.Tensor]:
        """The tensors; what can be rebuilt is then dropped, and everything is if they are lent ``for_good``."""
        tensors = self._rebuilt()
        if for_good:
            self._held = self._after = None
        elif self._after is not None:
            self._held = None
        return tensors

    def _rebuilt(self) -> list[torch.Tensor]:
        """The tensors, rebuilt where a backward has not passed through what comes after."""
        runs: list[Inversion] = []
        boundary = self
        while boundary._held is None:
            if boundary._after is None:
                raise second_backward(self._name)
            runs.append(boundary._after)
            boundary = boundary._after.output
        tensors = [get() for get in boundary._held]
        boundary._require_untouched(tensors)
        for run in reversed(runs):
            tensors = run.rebuild(tensors)
        return tensors

    def _require_untouched(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._versions is not None and list(map(private.version_of, tensors)) != self._versions:
            raise ExecutionError(
                f"the output of {self._name!r} was changed in place, so its input cannot be rebuilt: expected it "
                "untouched until the backward. Use an operation that is not in place on it"
            )


def _holding(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that gives a tensor back, which went through whatever hooks are set."""
    hooks, detached = _hooks(), tensor.detach()  # with its graph it would hold the node that holds it
    if hooks is None:
        return lambda: detached
    with torch.no_grad():
        return partial(hooks[1], hooks[0](detached))


def _hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Hooks through which a tensor goes that is saved now, so that a surrounding segment drops it; None without any."""
    return private.hooks_for_saved_tensors() if torch.is_grad_enabled() else None


def second_backward(name: str) -> ExecutionError:
    """The error for a backward through what an earlier one has used up."""
    return ExecutionError(
        f"backward ran a second time through {name!r}, whose output is held no more: expected one backward per "
        "forward. Call backward(retain_graph=True) the first time, or run the forward again"
    )


def is_whole(tensor: torch.Tensor) -> bool:
    """True if a tensor is dense and fills its memory, so that a copy of its numbers can stand for it."""
    memory = tensor.untyped_storage().nbytes()
    return tensor.nbytes == memory and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


# -------------------------------------------------------------------- One run.


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """How a module with an inverse runs without its input.

    Attributes:
        stage: It runs that module alone.
        fused: The backward is the module's own.
        draws_random: It may draw random numbers.
        known_state: What the forward changes besides; None: look at each call.
    """

    stage: Stage
    fused: bool
    draws_random: bool = True
    known_state: SegmentState | None = None

    @property
    def name(self) -> str:
        """The name of the stage."""
        return self.stage.name

    @property
    def module(self) -> nn.Module:
        """The module."""
        assert self.stage.invertible is not None
        return self.stage.invertible

    def state(self) -> SegmentState:
        """What the forward changes besides."""
        if self.known_state is not None:
            return self.known_state
        return replace(state_of(self.stage, (), {}), root=(self.stage.modules[0], self.name.partition(" (")[0]))


def can_be_fused(module: nn.Module) -> bool:
    """True if a module has a fused backward, and no hooks: around that nobody calls the module, so none would fire."""
    return has_fused_backward(module) and not private.has_backward_hooks(module)


def run_inverted(way: Way, value: Any, before: Output | None = None) -> Any:
    """The output of a module; ``before`` has its input, if that is no output of an inverted one.

    Raises:
        InverseError: The module changes its input in place, or returns less than it takes.
    """
    inputs = require_tensors(value, name=way.name, what="input")
    parameters = tuple(way.module.parameters())
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *parameters))
    if not learns:
        return run_stage(way.stage, value)
    return Inversion(way, inputs, parameters, before or _boundary_of(inputs)).run(value)


def _boundary_of(inputs: Sequence[torch.Tensor]) -> Output | None:
    """The boundary behind the run whose outputs, all of them in order, the inputs are, if there is one."""
    runs = (getattr(tensor.grad_fn, "run", None) for tensor in inputs)
    run = next((found for found in runs if isinstance(found, Inversion)), None)
    return run.output if run is not None and run.has_made(inputs) else None


class Inversion:
    """One run of a module, whose input the caller lets go of. ``source`` is the boundary that has the input."""

    _made: TreeSpec

    def __init__(
        self, way: Way, inputs: Sequence[torch.Tensor], parameters: tuple[torch.Tensor, ...], source: Output | None
    ) -> None:
        self.way = way
        self.output = Output(way.name)
        self._inputs_like = [(tensor.shape, tensor.dtype) for tensor in inputs]
        self._strides = [tensor.stride() for tensor in inputs]
        self.inputs = len(inputs)
        self._parameters = parameters
        # Weakly: nobody who could ask for it is left when it goes.
        self._source: Callable[[], Output | None] = (lambda: None) if source is None else weakref.ref(source)
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        self._hooks = private.hooks_for_saved_tensors()
        self.moment = Moment(inputs[0].device, way.state, may_draw=way.draws_random)
        self._guard = Guard.of(inputs, name=way.name)

    def has_made(self, tensors: Sequence[torch.Tensor]) -> bool:
        """True if these are its outputs, all of them in order, as it made them, and no segment has begun or ended."""
        if len(tensors) != len(self._outputs) or self._hooks != private.hooks_for_saved_tensors():
            return False
        return all(
            made() is tensor and (not tensor.requires_grad or getattr(tensor.grad_fn, "run", None) is self)
            for made, tensor in zip(self._outputs, tensors, strict=True)
        )

    def run(self, value: Any) -> Any:
        """The output of the module, whose graph is the one node."""
        inputs, self._taken = tree_flatten(value)
        versions = [private.version_of(tensor) for tensor in inputs]
        # With gradients: kernels may give other last bits where none is wanted.
        with self.moment.first():
            output = _without_saved_tensors(
                partial(run_stage, self.way.stage), value, self.moment.first_pass, draws_random=self.way.draws_random
            )
        made = require_own_output(inputs, versions, output, name=self.way.name)
        self._made = tree_flatten(output)[1]
        learns = [tensor.requires_grad for tensor in made]
        outputs = _Node.apply(self, [tensor.detach() for tensor in made], learns, *inputs, *self._parameters)
        del output, made
        self._outputs = list(map(weakref.ref, outputs))
        self.output.hold(outputs)
        source = self._source()
        if source is not None:
            source.hand_over(self, inputs)
        return tree_unflatten(outputs, self._made)

    def rebuild(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The input, by the inverse. Empties the list, so that the outputs can be freed."""
        module: Any = self.way.module
        with torch.no_grad(), self.moment.again():
            return self._accepted(module.inverse(tree_unflatten(_drained(outputs), self._made)), what="inverse")

    def _accepted(self, value: Any, *, what: str) -> list[torch.Tensor]:
        """The rebuilt tensors, checked and laid out as they were."""
        leaves = require_like(value, self._inputs_like, name=self.way.name, what=what)
        self._guard.check(leaves, draws_random=self.moment.draws_random)
        return [_placed(leaf, stride).detach() for leaf, stride in zip(leaves, self._strides, strict=True)]

    def backward(
        self, gradients: Sequence[torch.Tensor], wanted: Sequence[bool], *, for_good: bool
    ) -> Sequence[torch.Tensor | None]:
        """The wanted gradients for the input and the parameters; ``for_good`` if no other backward follows."""
        run = self._fused_backward if self.way.fused else self._autograds
        with torch.no_grad():
            inputs, found = run(self.output.lend(for_good=for_good), gradients, wanted)
        source = self._source()
        if source is not None:
            source.refill(inputs, for_good=for_good)
        return found

    def _fused_backward(
        self, outputs: list[torch.Tensor], gradients: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> _Found:
        module: Any = self.way.module
        substitutes = stand_ins(self._parameters)
        with self.moment.again(zip(self._parameters, substitutes, strict=True)):
            rebuilt, for_input = module.reversible_backward(
                tree_unflatten(_drained(outputs), self._made), tree_unflatten(gradients, self._made)
            )
        inputs = self._accepted(rebuilt, what="fused backward")
        needed = require_like(for_input, self._inputs_like, name=self.way.name, what="fused backward")
        found = [gradient if want else None for gradient, want in zip(needed, wanted, strict=True)]
        return inputs, [*found, *(substitute.grad for substitute in substitutes)]

    def _autograds(
        self, outputs: list[torch.Tensor], gradients: Sequence[torch.Tensor], wanted: Sequence[bool]
    ) -> _Found:
        inputs = self.rebuild(outputs)
        leaves = [learning(tensor, wanted=want) for tensor, want in zip(inputs, wanted, strict=True)]
        substitutes = stand_ins(self._parameters)
        with torch.enable_grad(), self.moment.again(zip(self._parameters, substitutes, strict=True)):
            again = run_stage(self.way.stage, tree_unflatten(leaves, self._taken))
            roots = Roots(require_tensors(again, name=self.way.name, what="output"), gradients)
            del again
        return inputs, roots.gradients_for([*leaves, *substitutes], name=self.way.name)


_Found: TypeAlias = tuple[list[torch.Tensor], list[torch.Tensor | None]]
"""A rebuilt input, and the wanted gradients for it and for the parameters."""


class _Node(torch.autograd.Function):
    """The node of one run in autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, run: Inversion, outputs: Sequence[torch.Tensor], learns: Sequence[bool], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.run, ctx.stage = run, run.way.name
        ctx.save_for_backward(*tensors[run.inputs :])  # whoever changes a parameter meanwhile hears of it
        ctx.mark_non_differentiable(*(tensor for tensor, learn in zip(outputs, learns, strict=True) if not learn))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        run, for_good = ctx.run, not private.backward_keeps_graph()
        if torch.is_grad_enabled():
            raise ExecutionError(
                f"gradients of the gradients of {ctx.stage!r} are wanted (create_graph=True), but its backward "
                "rebuilds its input outside of autograd's graph: expected first derivatives alone. Call the module "
                "plainly there, or plan with a budget that inverts nothing"
            )
        if run is None:
            raise second_backward(ctx.stage)
        run.moment.require_unchanged()
        _ = ctx.saved_tensors  # a segment around is recomputed here
        if for_good:
            ctx.run = None  # nodes live as long as their graph, which the loss holds
        found = run.backward(gradients, ctx.needs_input_grad[3 : 3 + run.inputs], for_good=for_good)
        return (None, None, None, *found)


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


def _without_saved_tensors(
    function: Callable[[Any], Any], value: Any, first_pass: FirstPass, *, draws_random: bool
) -> Any:
    """The output of a function whose graph will be dropped; a backward inside of the function runs it again."""
    return checkpoint(
        function,
        value,
        use_reentrant=False,
        preserve_rng_state=draws_random,
        context_fn=lambda: (nullcontext(), Again(first_pass.replayed, repeating)),
    )
