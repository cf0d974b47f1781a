"""Training modules without their inputs, with no planner around.

Each module becomes one node of autograd's graph, which holds the module's output; the input and the parameters are its
inputs. So ``torch.autograd.grad``, hooks and DistributedDataParallel work as in a plain call. A fused backward, which
makes all gradients at once, has no other place: non-reentrant checkpoints record the forward's own graph. A module that
takes the output of another such node rebuilds it in the backward, so a run of them holds one output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_rotor.errors import ExecutionError, InverseError
from lightning_rotor.execution.reverse import Guard, Moment, Roots, first_derivatives_only, learning, stand_ins
from lightning_rotor.invertible.layers import members
from lightning_rotor.private.torch_names import (
    backward_keeps_graph,
    hooks_for_saved_tensors,
    outside_of_graphs,
    version_of,
)
from lightning_rotor.private.values import TreeSpec, tree_flatten, tree_unflatten
from lightning_rotor.stages.sequential import (
    has_fused_backward,
    require_invertible,
    require_like,
    require_own_output,
    require_tensors,
)

# ----------------------------------------------------------------------------------------------------
# What lies between two modules without inputs: the output of the first, or how to rebuild it.


class Boundary:
    """The output of one module, by reference, or by the inverse of the module after it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._tensors: list[torch.Tensor] | None = None
        self._versions: list[int] = []
        self._rebuild: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None
        self._after: Boundary | None = None
        self._is_released = False

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hold tensors."""
        self._tensors = [tensor.detach() for tensor in tensors]
        self._versions = [version_of(tensor) for tensor in self._tensors]

    def shows(self, number: int, tensor: torch.Tensor) -> bool:
        """True if a tensor is the same part of the same memory as one that is held."""
        return self._tensors is not None and self._tensors[number].is_set_to(tensor)

    def hand_over(self, rebuild: Callable[[list[torch.Tensor]], list[torch.Tensor]], after: Boundary) -> None:
        """Drop the tensors, which can be rebuilt from those of a later boundary; only the first call does so."""
        if self._tensors is not None and self._after is None:
            self._require_untouched()
            self._tensors, self._rebuild, self._after = None, rebuild, after

    def refill(self, tensors: Sequence[torch.Tensor], *, for_good: bool) -> None:
        """Take tensors that a later inverse rebuilt, ``for_good`` if it cannot do so again."""
        if self._after is None or self._is_released:
            return
        self.hold(tensors)
        if for_good:
            self._rebuild = self._after = None

    def lend(self, *, for_good: bool) -> list[torch.Tensor]:
        """The tensors; what can be rebuilt is then dropped, and everything is if they are lent ``for_good``."""
        waiting: list[Boundary] = []
        boundary = self
        while boundary._tensors is None:
            waiting.append(boundary)
            if boundary._after is None:
                raise second_backward(self.name)
            boundary = boundary._after
        boundary._require_untouched()
        tensors = list(boundary._tensors)
        for before in reversed(waiting):
            assert before._rebuild is not None
            tensors = before._rebuild(tensors)
        if for_good:
            self._is_released = True
            self._tensors = self._rebuild = self._after = None
        elif self._after is not None:
            self._tensors = None
        return tensors

    def _require_untouched(self) -> None:
        if self._tensors is not None and [version_of(tensor) for tensor in self._tensors] != self._versions:
            raise ExecutionError(
                f"the output of {self.name!r} was changed in place, so its input cannot be rebuilt: expected it "
                "untouched until the backward. Use an operation that is not in place on it"
            )


def second_backward(name: str) -> ExecutionError:
    """The error for a backward through what an earlier one has used up."""
    return ExecutionError(
        f"backward ran a second time through {name!r}, whose output is held no more: expected one backward per "
        "forward. Call backward(retain_graph=True) the first time, or run the forward again"
    )


# ----------------------------------------------------------------------------------------------------


def invertible_checkpoint(module: nn.Module | Sequence[nn.Module], x: Any, *, name: str | None = None) -> Any:
    """Call a module so that the backward rebuilds its input from its output instead of holding it.

    A run of modules, in a list, an :class:`~lightning_rotor.invertible.InvertibleSequential` or several calls in a row,
    holds the last output alone. Nothing is freed that others refer to: ``x + invertible_checkpoint(module, x)`` is
    right, and holds ``x``.

    Gradients are those of a plain call up to rounding in the rebuilt inputs. The backward sees autocast, generators and
    buffers of the forward, and leaves them alone. Without gradients it is a plain call. Under others' hooks for saved
    tensors (``torch.utils.checkpoint``, ``save_on_cpu``) each module gives its output to them.

    Args:
        module: With an ``inverse``; or several, to run in a row. A ``reversible_backward`` is used if there is one.
        x: A tensor, or tensors in a tuple, list or dict.
        name: Of the module in error messages; by default its type's.
    Returns:
        The output of the module.
    Raises:
        InverseError: A module has no inverse, changes its input in place, or returns less than it took. In the
            backward: the inverse returns something else than the forward took, or is off by more than :class:`Guard`
            allows.
        ExecutionError: A second backward without ``retain_graph=True`` in the first; a gradient of a gradient; an
            output, a parameter or a buffer changed before the backward; a tensor that requires a gradient and is
            neither input nor parameter.
    Warns:
        RotorWarning: In the backward: an inverse in float16 or bfloat16 is off by more than the guard expects.
    Example:
        >>> block = AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> invertible_checkpoint([block] * 100, torch.randn(2, 8)).sum().backward()
    """
    return _in_a_row(module, x, name)


@outside_of_graphs
def _in_a_row(module: nn.Module | Sequence[nn.Module], x: Any, name: str | None) -> Any:
    for member_name, member in _steps(module, name):
        x = _step(member, x, member_name)
    return x


def _steps(module: nn.Module | Sequence[nn.Module], name: str | None) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, nn.Module):
        yield from members(module, name or "")
        return
    for index, member in enumerate(module):
        yield from members(member, f"{name}.{index}" if name else str(index))


def _step(module: nn.Module, x: Any, name: str) -> Any:
    require_invertible(module, name=name)
    inputs = require_tensors(x, name=name, what="input")
    parameters = tuple(module.parameters())
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (*inputs, *parameters)):
        return module(x)
    call = _Call(module, name, x, parameters)
    outputs = _Node.apply(call, *inputs, *parameters)
    if call.source is not None:
        call.source.hand_over(call.rebuild, call.output)
    return tree_unflatten(outputs, call.made)


def _boundary_of(inputs: Sequence[torch.Tensor]) -> Boundary | None:
    """The boundary of the checkpointed call whose outputs, all of them in order, the inputs are, if there is one."""
    calls = (getattr(tensor.grad_fn, "call", None) for tensor in inputs)
    call = next((found for found in calls if isinstance(found, _Call)), None)
    if call is None or len(inputs) != call.outputs:
        return None
    whole = all(
        (getattr(tensor.grad_fn, "call", None) is call and tensor.output_nr == number)
        or (not call.learning[number] and call.output.shows(number, tensor))
        for number, tensor in enumerate(inputs)
    )
    return call.output if whole else None


class _Call:
    """One call of one module, and its way back."""

    made: TreeSpec
    learning: Sequence[bool]

    def __init__(self, module: nn.Module, name: str, x: Any, parameters: tuple[torch.Tensor, ...]) -> None:
        inputs, self._taken = tree_flatten(x)
        self._module: Any = module
        self._name = name
        self._parameters = parameters
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in inputs]
        self._moment = Moment(module, inputs[0].device, name=name.partition(" (")[0])
        self._guard = Guard.of(inputs, name=name)
        self._finished = False
        self.output = Boundary(name)
        # Under hooks every tensor goes through them, or a surrounding checkpoint would not get rid of it.
        self.hooked = hooks_for_saved_tensors() is not None
        self.source = None if self.hooked else _boundary_of(inputs)

    @property
    def inputs(self) -> int:
        """The number of tensors that it takes."""
        return len(self._shapes)

    @property
    def outputs(self) -> int:
        """The number of tensors that it makes."""
        return len(self.learning)

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs; a second run, with a graph that is dropped, shows which of several require a gradient."""
        versions = [version_of(tensor) for tensor in inputs]
        try:
            with self._moment.first():
                output = self._module(tree_unflatten(inputs, self._taken))
        except InverseError as error:  # modules know their type, not where they are
            raise error.located(self._name) from error
        outputs = require_own_output(inputs, versions, output, name=self._name)
        self.made = tree_flatten(output)[1]
        self.learning = [tensor.is_floating_point() or tensor.is_complex() for tensor in outputs]
        if len(outputs) > 1:
            leaves = [learning(tensor, wanted=tensor.requires_grad) for tensor in inputs]
            hooks = saved_tensors_hooks(torch.Tensor.detach, _same)
            with torch.enable_grad(), hooks, self._moment.again():
                again = require_tensors(
                    self._module(tree_unflatten(leaves, self._taken)), name=self._name, what="output"
                )
            self.learning = [tensor.requires_grad for tensor in again]
        return tuple(tensor.detach() for tensor in outputs)

    def rebuild(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The input, by the inverse. Empties the list, so that the outputs can be freed."""
        with torch.no_grad(), self._moment.again():
            rebuilt = self._module.inverse(tree_unflatten(_drained(outputs), self.made))
        inputs = require_like(rebuilt, self._shapes, name=self._name)
        self._guard.check(inputs, draws_random=self._moment.draws_random)
        return inputs

    def begin_backward(self, *, keep_graph: bool) -> None:
        """Check that no last backward has come before, and that what the module reads is unchanged."""
        if self._finished:
            raise second_backward(self._name)
        self._finished = not keep_graph
        self._moment.require_unchanged()

    def backward(
        self,
        outputs: list[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        wanted: Sequence[bool],
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """The inputs, rebuilt, and the wanted gradients for them and for the parameters. Empties ``outputs``."""
        substitutes = stand_ins(parameters)
        by_id = dict(zip(map(id, self._parameters), substitutes, strict=True))
        if has_fused_backward(self._module):
            with torch.no_grad(), self._moment.again(by_id):
                rebuilt, for_input = self._module.reversible_backward(
                    tree_unflatten(_drained(outputs), self.made), tree_unflatten(gradients, self.made)
                )
            inputs = require_like(rebuilt, self._shapes, name=self._name, what="fused backward")
            self._guard.check(inputs, draws_random=self._moment.draws_random)
            for_inputs = require_like(for_input, self._shapes, name=self._name, what="fused backward")
            needed = [gradient if want else None for gradient, want in zip(for_inputs, wanted, strict=True)]
            return inputs, [*needed, *(substitute.grad for substitute in substitutes)]
        inputs = self.rebuild(outputs)
        leaves = [learning(tensor, wanted=want) for tensor, want in zip(inputs, wanted, strict=True)]
        with torch.enable_grad(), self._moment.again(by_id):
            again = self._module(tree_unflatten(leaves, self._taken))
            roots = Roots(require_tensors(again, name=self._name, what="output"), gradients)
            del again
        return inputs, roots.gradients_for([*leaves, *substitutes], name=self._name)


class _Node(torch.autograd.Function):
    """The node of one call in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs, parameters = tensors[: call.inputs], tensors[call.inputs :]
        outputs = call.forward(inputs)
        ctx.call = call
        ctx.mark_non_differentiable(
            *(tensor for tensor, learns in zip(outputs, call.learning, strict=True) if not learns)
        )
        if call.hooked:
            ctx.save_for_backward(*outputs, *parameters)
        else:
            call.output.hold(outputs)
            ctx.save_for_backward(*parameters)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        keep_graph = backward_keeps_graph()
        call.begin_backward(keep_graph=keep_graph)
        saved = ctx.saved_tensors
        if call.hooked:
            outputs, parameters = list(saved[: call.outputs]), saved[call.outputs :]
            del saved
        else:
            outputs, parameters = call.output.lend(for_good=not keep_graph), saved
        wanted = ctx.needs_input_grad[1 : 1 + call.inputs]
        with torch.no_grad():
            inputs, found = call.backward(outputs, parameters, gradients, wanted)
        if call.source is not None:
            call.source.refill(inputs, for_good=not keep_graph)
        del inputs
        return (None, *first_derivatives_only(call.output.name, found))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _drained(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a list, which is emptied."""
    content = tensors[:]
    tensors.clear()
    return content
