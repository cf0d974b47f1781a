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

import math
import random
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_rotor.errors import ExecutionError, InverseError, RotorWarning
from lightning_rotor.execution.passes import (
    FirstPass,
    Recomputation,
    TensorsRead,
    buffers_of,
    forget_casts,
    passing_first,
    repeating,
    run_stage,
    slots_read,
)
from lightning_rotor.execution.segment_state import SegmentState, state_of
from lightning_rotor.private import torch_names as private
from lightning_rotor.private.values import TreeSpec, same_bits, tree_flatten, tree_unflatten
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.inverses import DRAWS, has_fused_backward, require_like, require_own_output, require_tensors
from lightning_rotor.stages.sequential import Stage

# ----------------------------- A backward inside of a backward: it touches no ``grad`` and fires no hook of the user's.


def learning(tensor: torch.Tensor, *, wanted: bool = True) -> torch.Tensor:
    """A leaf with the tensor's memory, which receives a gradient if it can have one and that is wanted."""
    return tensor.detach().requires_grad_(wanted and (tensor.is_floating_point() or tensor.is_complex()))


Tensors: TypeAlias = Sequence[torch.Tensor]
Roots: TypeAlias = list[tuple[GradientEdge, torch.Tensor]]
"""Where a backward begins: outputs of a forward, of which only the graph is kept, and their gradients."""


def roots_of(outputs: Tensors, gradients: Tensors) -> Roots:
    """The roots of a backward from some outputs."""
    pairs = zip(outputs, gradients, strict=True)
    return [(get_gradient_edge(output), gradient) for output, gradient in pairs if output.requires_grad]


def gradients_for(inputs: Tensors, roots: Roots, *, name: str) -> list[torch.Tensor | None]:
    """The gradients for some leaves, None without any; ExecutionError if another tensor would go without its own."""
    learning = [tensor for tensor in inputs if tensor.requires_grad]
    if not (roots and learning):
        return [None for _ in inputs]
    edges, gradients = zip(*roots, strict=True)
    known = set(map(id, learning))
    leaves = map(private.leaf_of_node, graph_behind(edge.node for edge in edges))
    other = next((leaf for leaf in leaves if leaf is not None and id(leaf) not in known), None)
    if other is not None:
        raise ExecutionError(
            f"{name!r} uses a tensor of shape {tuple(other.shape)} that requires a gradient and is neither its "
            "input nor one of its parameters: expected no other, for its gradient would be lost. Give it as "
            "an input (in a tuple), or register it"
        )
    found = iter(torch.autograd.grad(edges, learning, gradients, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


def graph_behind(nodes: Iterable[Node]) -> Iterator[Node]:
    """Some nodes of autograd's graph, and all that a backward from there goes on to, each once."""
    pending = [*dict.fromkeys(nodes)]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        pending.extend(fresh)


# ----------------------- The runtime guard: a few elements of what is dropped, compared with what the inverse rebuilds.


_SAMPLES = 8  # of each tensor
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
LOW_PRECISION = (torch.float16, torch.bfloat16)


class Guard:
    """Samples of tensors that are about to be dropped, taken under the autocast that ``name``, the module, runs in.

    The global random number generators are left alone. A comparison waits for the device.
    """

    def __init__(self, tensors: Tensors, *, name: str) -> None:
        self._name, self._precision = name, precision_of(tensors)
        self._samples = [_sample(each) if each.is_floating_point() and each.numel() else None for each in tensors]

    def check(self, rebuilt: Tensors, *, draws_random: bool) -> None:
        """Raise InverseError where an error is beyond the tolerance, or warn if that is of a low precision."""
        for sample, tensor in zip(self._samples, rebuilt, strict=True):
            if sample is None:
                continue
            error, scale = _error_and_scale(sample, _sample(tensor))
            tolerance = tolerance_of(self._precision) * max(scale, 1.0)
            if error <= tolerance:
                continue
            found = "is not finite" if not math.isfinite(error) else f"is off by {error:.2g}"
            message = (
                f"the input of {self._name!r} as rebuilt by its inverse {found}: expected at most {tolerance:.2g} in "
                f"{str(self._precision).removeprefix('torch.')}, judged by {_SAMPLES} elements that were noted before "
                "it was dropped. Bound what the inverse divides by (a smaller clamp), keep activations in float32 "
                "(autocast does) or float64, or run fewer modules in a row without their inputs"
                f"{f'. {DRAWS}' * draws_random}"
            )
            if self._precision not in LOW_PRECISION or not math.isfinite(error):
                raise InverseError(message, stage=self._name, error=error, tolerance=tolerance)
            warnings.warn(message, RotorWarning, stacklevel=2)


def precision_of(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The coarsest dtype in which a module computes that takes these tensors, autocast's among them."""
    dtypes = [torch.float64]
    for tensor in filter(torch.is_floating_point, tensors):
        kind = tensor.device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        dtypes += [tensor.dtype, torch.get_autocast_dtype(kind)] if casts else [tensor.dtype]
    return max(dtypes, key=tolerance_of)


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest error of a rebuilt input in some precision, relative to its largest element."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.bfloat16])


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor of the elements at fixed positions."""
    # A regular pattern may fall into few columns of a matrix, so into one half of a coupling. The generator is our own.
    size = tensor.numel()
    numbers = torch.tensor(random.Random(size).sample(range(size), min(_SAMPLES, size)))
    # Not through a flat view, which copies all of a channels-last tensor.
    at_least_1d = tensor.detach().reshape(tensor.shape or (1,))
    return at_least_1d[torch.unravel_index(numbers, at_least_1d.shape)]


def _error_and_scale(sample: torch.Tensor, rebuilt: torch.Tensor) -> tuple[float, float]:
    """The largest difference and the largest element; where the sample itself is not finite, nothing is expected."""
    expected, found = sample.double(), rebuilt.double()
    known = torch.isfinite(expected)
    largest = [torch.where(known, numbers.abs(), 0.0).max() for numbers in (found - expected, expected)]
    error, scale = torch.stack(largest).tolist()  # one wait for the device
    return error, scale


# --------------------------------------------------------------- One call of a module that will be undone and repeated.


class Moment:
    """What one call of a module saw of generators (if it drew), buffers that it changed, attributes and settings."""

    def __init__(self, device: torch.device, state: Callable[[], SegmentState], *, may_draw: bool = True) -> None:
        self._device, self._state, self._may_draw = device, state, may_draw
        # Scratch is made when it is needed.
        self.first_pass = FirstPass(replace(state(), statistics=()))

    @property
    def draws_random(self) -> bool:
        """True if the first call drew random numbers."""
        return self.first_pass.generators is not None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Context of the first call; raises ExecutionError if it changes parameters or large buffers it reads later."""
        first_pass = self.first_pass
        buffers = list(buffers_of(first_pass.state.remembered))
        with passing_first(first_pass):
            first_pass.generators = before = GeneratorStates(self._device) if self._may_draw else None
            yield
            if before is not None and before.equals(GeneratorStates(self._device)):
                first_pass.generators = None
        unchanged = {  # by value: the kernels of normalization write without a new version
            (id(module), name): (module._buffers, name, buffer)
            for (module, name, buffer), (_, _, value) in zip(buffers, first_pass.values, strict=True)
            if module._buffers.get(name) is buffer and same_bits(buffer, value)
        }
        first_pass.read = TensorsRead((*slots_read(first_pass.state), *unchanged.values()), first_pass.state.spell)
        first_pass.values = [each for each in first_pass.values if (id(each[0]), each[1]) not in unchanged]

    @contextmanager
    def again(self, parameters: Tensors = ()) -> Iterator[list[torch.Tensor]]:
        """Context that sees what the first call saw; yields leaves that stand in the place of parameters meanwhile.

        The hooks of parameters (DistributedDataParallel's) would fire twice.
        """
        leaves = [
            nn.Parameter(each.detach(), requires_grad=each.requires_grad)
            if isinstance(each, nn.Parameter)
            else each.detach().requires_grad_(each.requires_grad)
            for each in parameters
        ]
        like = copy(self.first_pass)
        like.state = replace(like.state, statistics=self._state().statistics)
        like.read = like.read.standing_in(dict(zip(map(id, parameters), leaves, strict=True)))
        with repeating(), like.replayed():
            try:
                yield leaves
            finally:
                forget_casts()  # weights cast without gradients must not serve a forward with them


def plain_gradients(
    stage: Stage, moment: Moment, inputs: Tensors, taken: TreeSpec, parameters: Tensors, gradients: Tensors
) -> list[torch.Tensor | None]:
    """Autograd's gradients for leaves of the input and for parameters, by another forward."""
    with torch.enable_grad(), moment.again(parameters) as substitutes:
        again = run_stage(stage, tree_unflatten(inputs, taken))
        roots = roots_of(require_tensors(again, name=stage.name, what="output"), gradients)
        del again
    return gradients_for([*inputs, *substitutes], roots, name=stage.name)


def fused_gradients(
    module: Any, moment: Moment, outputs: list[torch.Tensor], made: TreeSpec, parameters: Tensors, gradients: Tensors
) -> tuple[Any, Any, list[torch.Tensor | None]]:
    """The input, and gradients for it and for parameters, by a fused backward. Empties the list of outputs."""
    with moment.again(parameters) as substitutes:
        rebuilt, for_input = module.reversible_backward(
            tree_unflatten(_drained(outputs), made), tree_unflatten(gradients, made)
        )
    return rebuilt, for_input, [substitute.grad for substitute in substitutes]


def _drained(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a list, which is emptied."""
    content = tensors[:]
    tensors.clear()
    return content


# ---------------------------------------------------------------- Boundaries: tensors that are held, or can be rebuilt.


class Output:
    """The output of a module, for the modules around it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held: list[Callable[[], Any]] | None = None
        self._versions: list[int] | None = None  # None where hooks bring back what they like
        self._after: Inversion | None = None

    def hold(self, tensors: Tensors) -> None:
        """Hold the tensors."""
        self._held = list(map(_holding, tensors))
        self._versions = list(map(private.version_of, tensors)) if _hooks() is None else None

    def hand_over(self, after: Inversion, tensors: Tensors) -> None:
        """Drop the tensors, which a run can rebuild from its output; only the first call does so."""
        if self._after is None:
            self._require_untouched(tensors)
            self._held, self._after = None, after

    def refill(self, tensors: Tensors, *, for_good: bool) -> None:
        """Take tensors that a run has rebuilt, ``for_good`` if it cannot do so again."""
        if self._after is not None:
            self.hold(tensors)
            if for_good:
                self._after = None

    def lend(self, *, for_good: bool) -> list[torch.Tensor]:
        """The tensors; what can be rebuilt is then dropped, and everything is if they are lent ``for_good``."""
        if self._held is None and self._after is not None:
            raise ExecutionError(
                f"a backward reaches {self._name!r} and has not passed {self._after.way.name!r}, which took its output "
                "and rebuilds it: expected one backward through both, such as that of the sum of the losses. Or call "
                "the second one plainly"
            )
        if self._held is None:
            raise second_backward(self._name)
        tensors = [get() for get in self._held]
        self._require_untouched(tensors)
        if for_good:
            self._held = self._after = None
        elif self._after is not None:
            self._held = None
        return tensors

    def _require_untouched(self, tensors: Tensors) -> None:
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
    """How a module with an inverse runs without its input."""

    stage: Stage  # runs that module alone
    fused: bool  # the backward is the module's own
    draws_random: bool = True  # it may draw random numbers
    known_state: SegmentState | None = None  # what the forward changes besides; None: look at each call

    @property
    def name(self) -> str:
        """The name of the stage."""
        return self.stage.name

    @property
    def module(self) -> Any:
        """The module."""
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
    """The output of a module, or InverseError; ``before`` has its input, if that is no output of an inverted one."""
    inputs = require_tensors(value, name=way.name, what="input")
    parameters = tuple(way.module.parameters())
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *parameters))
    if not learns:
        return run_stage(way.stage, value)
    return Inversion(way, inputs, parameters, before or _boundary_of(inputs)).run(value)


def _boundary_of(inputs: Tensors) -> Output | None:
    """The boundary behind the run whose outputs, all of them in order, the inputs are, if there is one."""
    runs = (getattr(tensor.grad_fn, "run", None) for tensor in inputs)
    run = next((found for found in runs if isinstance(found, Inversion)), None)
    return run.output if run is not None and run.has_made(inputs) else None


class Inversion:
    """One run of a module, whose input the caller lets go of. ``source`` is the boundary that has the input."""

    _made: TreeSpec

    def __init__(self, way: Way, inputs: Tensors, parameters: Tensors, source: Output | None) -> None:
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
        self._guard = Guard(inputs, name=way.name)

    def has_made(self, tensors: Tensors) -> bool:
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
        # Its graph will be dropped; a backward inside of the function runs it again.
        with self.moment.first(), Recomputation(self.way.name, partial(self._run_again, value)).dropping():
            output = run_stage(self.way.stage, value)
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

    def _run_again(self, value: Any) -> None:
        with self.moment.first_pass.replayed(), repeating():
            run_stage(self.way.stage, value)

    def _accepted(self, value: Any, *, what: str) -> list[torch.Tensor]:
        """The rebuilt tensors, checked and laid out as they were."""
        leaves = require_like(value, self._inputs_like, name=self.way.name, what=what)
        self._guard.check(leaves, draws_random=self.moment.draws_random)
        return [_placed(leaf, stride).detach() for leaf, stride in zip(leaves, self._strides, strict=True)]

    def backward(self, gradients: Tensors, wanted: Sequence[bool], *, for_good: bool) -> list[torch.Tensor | None]:
        """The wanted gradients for the input and the parameters; ``for_good`` if no other backward follows."""
        outputs, module, found = self.output.lend(for_good=for_good), self.way.module, list[torch.Tensor | None]()
        with torch.no_grad():
            if self.way.fused:
                rebuilt, for_input, for_parameters = fused_gradients(
                    module, self.moment, outputs, self._made, self._parameters, gradients
                )
                inputs = self._accepted(rebuilt, what="fused backward")
                for_inputs = require_like(for_input, self._inputs_like, name=self.way.name, what="fused backward")
                found += [gradient if want else None for gradient, want in zip(for_inputs, wanted, strict=True)]
                found += for_parameters
            else:
                with self.moment.again():
                    rebuilt = module.inverse(tree_unflatten(_drained(outputs), self._made))
                inputs = self._accepted(rebuilt, what="inverse")
                del rebuilt
                leaves = [learning(tensor, wanted=want) for tensor, want in zip(inputs, wanted, strict=True)]
                found += plain_gradients(self.way.stage, self.moment, leaves, self._taken, self._parameters, gradients)
        source = self._source()
        if source is not None:
            source.refill(inputs, for_good=for_good)
        return found


class _Node(torch.autograd.Function):
    """The node of one run in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, run: Inversion, outputs: Tensors, learns: Sequence[bool], *tensors: torch.Tensor) -> Any:
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
        run.moment.first_pass.read.require_unchanged()
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
