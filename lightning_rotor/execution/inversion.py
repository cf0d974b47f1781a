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
has drifted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.boundary import Output, second_backward
from lightning_rotor.execution.drift_guard import Guard
from lightning_rotor.execution.moment import Moment, drained, fused_gradients, plain_gradients
from lightning_rotor.execution.nested_backward import Tensors, learning
from lightning_rotor.execution.passes import repeating, run_stage
from lightning_rotor.execution.recomputation import Recomputation
from lightning_rotor.execution.segment_state import SegmentState, state_of
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import TreeSpec, tree_flatten, tree_unflatten
from lightning_rotor.stages.inverses import (
    has_fused_backward,
    require_like,
    require_own_output,
    require_tensors,
)
from lightning_rotor.stages.sequential import Stage


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """A module with an inverse, and the way that it runs without its input.

    Attributes:
        stage: Runs that module alone.
        fused: The backward is the module's own.
        draws_random: The module may draw random numbers.
        known_state: The state that the forward changes besides; None: it is looked for at each call.
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
    def module(self) -> Any:
        """The module."""
        return self.stage.invertible

    def state(self) -> SegmentState:
        """The state that the forward changes besides."""
        if self.known_state is not None:
            return self.known_state
        path = self.name.partition(" (")[0]
        return replace(state_of(self.stage, (), {}), root=(self.stage.modules[0], path))


def can_be_fused(module: nn.Module) -> bool:
    """True if a module has a fused backward, and no hooks: around that nobody calls the module, so none would fire."""
    return has_fused_backward(module) and not private.has_backward_hooks(module)


def run_inverted(way: Way, value: Any, before: Output | None = None) -> Any:
    """The output of a module, or InverseError; ``before`` has its input, if that is no output of an inverted one."""
    inputs = require_tensors(value, name=way.name, what="input")
    parameters = tuple(way.module.parameters())
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *parameters))
    # Nothing is saved then, and there is nothing to drop.
    if not learns:
        return run_stage(way.stage, value)
    source = before or _boundary_of(inputs)
    return Inversion(way, inputs, parameters, source).run(value)


def _boundary_of(inputs: Tensors) -> Output | None:
    """The boundary behind the run whose outputs, all of them in order, the inputs are, if there is one."""
    for tensor in inputs:
        # The first tensor decides: outputs of one run have one node.
        run = getattr(tensor.grad_fn, "run", None)
        if isinstance(run, Inversion):
            return run.output if run.has_made(inputs) else None
    return None


class Inversion:
    """One run of a module, whose input the caller lets go of. ``source`` is the boundary that has the input.

    Attributes:
        output: The boundary behind it.
        inputs: Number of tensors in its input.
    """

    # Nesting of the output.
    _made: TreeSpec
    # Nesting of the input.
    _taken: TreeSpec

    def __init__(self, way: Way, inputs: Tensors, parameters: Tensors, source: Output | None) -> None:
        self.way = way
        self.output = Output(way.name)
        self._inputs_like = [(tensor.shape, tensor.dtype) for tensor in inputs]
        # An inverse may give another layout than the input had, such as channels last.
        self._strides = list(map(torch.Tensor.stride, inputs))
        self.inputs = len(inputs)
        self._parameters = parameters
        # Weakly: nobody who could ask for it is left when it goes.
        self._source: Callable[[], Output | None] = _no_source
        if source is not None:
            self._source = weakref.ref(source)
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        self._hooks = private.hooks_for_saved_tensors()
        self.moment = Moment(inputs[0].device, way.state, may_draw=way.draws_random)
        self._guard = Guard(inputs, name=way.name)

    @property
    def name(self) -> str:
        """Name of the module's stage."""
        return self.way.name

    def has_made(self, tensors: Tensors) -> bool:
        """True if these are its outputs, all of them in order, as it made them, and no segment has begun or ended."""
        if len(tensors) != len(self._outputs):
            return False
        # Other hooks tell that a segment has begun or ended since.
        if self._hooks != private.hooks_for_saved_tensors():
            return False
        for made, tensor in zip(self._outputs, tensors, strict=True):
            if made() is not tensor:
                return False
            # An operation in place leaves the object, and gives it another node.
            maker = getattr(tensor.grad_fn, "run", None)
            if tensor.requires_grad and maker is not self:
                return False
        return True

    def run(self, value: Any) -> Any:
        """The output of the module, whose graph is the one node."""
        inputs, self._taken = tree_flatten(value)
        versions = list(map(private.version_of, inputs))
        # With gradients: kernels may give other last bits where none is wanted.
        # Its graph will be dropped; a backward inside of the function runs it again.
        recomputation = Recomputation(self.way.name, partial(self._run_again, value))
        with self.moment.first(), recomputation.dropping():
            output = run_stage(self.way.stage, value)
        # It holds the input.
        del recomputation
        made = require_own_output(inputs, versions, output, name=self.way.name)
        self._made = tree_flatten(output)[1]
        learns = [tensor.requires_grad for tensor in made]
        # Detached, the outputs get the node in the place of the module's own graph.
        detached = list(map(torch.Tensor.detach, made))
        outputs = _Node.apply(self, detached, learns, *inputs, *self._parameters)
        # Their graph would live as long as these names do.
        del output, made, detached
        self._outputs = list(map(weakref.ref, outputs))
        self.output.hold(outputs)
        source = self._source()
        if source is not None:
            source.hand_over(self, inputs)
        return tree_unflatten(outputs, self._made)

    def _run_again(self, value: Any) -> None:
        with self.moment.first_pass.replayed(), repeating():
            run_stage(self.way.stage, value)

    def _accepted(self, value: Any, *, what: str) -> list[torch.Tensor]:
        """The rebuilt tensors, checked and laid out as they were."""
        leaves = require_like(value, self._inputs_like, name=self.way.name, what=what)
        self._guard.check(leaves, draws_random=self.moment.draws_random)
        # Kernels may give other last bits for another layout.
        accepted = []
        for leaf, stride in zip(leaves, self._strides, strict=True):
            accepted.append(_placed(leaf, stride).detach())
        return accepted

    def backward(self, gradients: Tensors, wanted: Sequence[bool], *, for_good: bool) -> list[torch.Tensor | None]:
        """The wanted gradients for the input and the parameters; ``for_good`` if no other backward follows."""
        outputs = self.output.lend(for_good=for_good)
        with torch.no_grad():
            # Without gradients, as both ways ask for them themselves where they need any.
            evaluate = self._fused if self.way.fused else self._by_inverse
            inputs, received = evaluate(outputs, gradients, wanted)
        source = self._source()
        if source is not None:
            source.refill(inputs, for_good=for_good)
        return received

    def _fused(
        self,
        outputs: list[torch.Tensor],
        gradients: Tensors,
        wanted: Sequence[bool],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """The input, and gradients for it and the parameters, by the module's own backward."""
        rebuilt, for_input, for_parameters = fused_gradients(
            self.way.module,
            self.moment,
            outputs,
            self._made,
            self._parameters,
            gradients,
        )
        inputs = self._accepted(rebuilt, what="fused backward")
        for_inputs = require_like(
            for_input,
            self._inputs_like,
            name=self.way.name,
            what="fused backward",
        )
        received: list[torch.Tensor | None] = []
        for gradient, want in zip(for_inputs, wanted, strict=True):
            received.append(gradient if want else None)
        return inputs, [*received, *for_parameters]

    def _by_inverse(
        self,
        outputs: list[torch.Tensor],
        gradients: Tensors,
        wanted: Sequence[bool],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """The input by the inverse, and gradients for it and the parameters by another forward."""
        with self.moment.again():
            rebuilt = self.way.module.inverse(tree_unflatten(drained(outputs), self._made))
        inputs = self._accepted(rebuilt, what="inverse")
        # The forward that comes next needs the memory.
        del rebuilt
        leaves = []
        for tensor, want in zip(inputs, wanted, strict=True):
            leaves.append(learning(tensor, wanted=want))
        received = plain_gradients(
            self.way.stage,
            self.moment,
            leaves,
            self._taken,
            self._parameters,
            gradients,
        )
        return inputs, received


class _Node(torch.autograd.Function):
    """The node of one run in autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Inversion,
        outputs: Tensors,
        learns: Sequence[bool],
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.run = run
        ctx.stage = run.way.name
        # Whoever changes a parameter meanwhile hears of it.
        ctx.save_for_backward(*tensors[run.inputs :])
        fixed = []
        for tensor, learn in zip(outputs, learns, strict=True):
            if not learn:
                fixed.append(tensor)
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        run = ctx.run
        for_good = not private.backward_keeps_graph()
        if torch.is_grad_enabled():
            raise ExecutionError(
                f"gradients of the gradients of {ctx.stage!r} are wanted (create_graph=True), but its backward "
                "rebuilds its input outside of autograd's graph: expected first derivatives alone. Call the module "
                "plainly there, or plan with a budget that inverts nothing"
            )
        if run is None:
            raise second_backward(ctx.stage)
        run.moment.first_pass.read.require_unchanged()
        # Asking for them makes a segment around run again.
        _ = ctx.saved_tensors
        if for_good:
            # Nodes live as long as their graph, which the loss holds.
            ctx.run = None
        wanted = ctx.needs_input_grad[3 : 3 + run.inputs]
        received = run.backward(gradients, wanted, for_good=for_good)
        # None for the run, the outputs and which of them learn: no tensors that the forward took.
        return (None, None, None, *received)


def _placed(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor with this layout."""
    if tensor.stride() == stride:
        return tensor
    placed = torch.empty_strided(
        tensor.shape,
        stride,
        dtype=tensor.dtype,
        device=tensor.device,
    )
    return placed.copy_(tensor)


def _no_source() -> None:
    return None
