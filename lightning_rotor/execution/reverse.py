"""A backward inside of a backward: gradients that touch no ``grad`` and fire no hook of the user's."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_rotor.errors import ExecutionError, InverseError, RotorWarning
from lightning_rotor.execution.passes import FirstPass, buffers_of, forget_casts, passing_first, repeating, tensors_read
from lightning_rotor.execution.segment_state import SegmentState
from lightning_rotor.private.values import same_bits
from lightning_rotor.stages.generators import GeneratorStates
from lightning_rotor.stages.sequential import DRAWS


def stand_ins(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves to compute with in the place of parameters, whose hooks (DistributedDataParallel's) would fire twice."""
    return [
        nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        if isinstance(parameter, nn.Parameter)
        else parameter.detach().requires_grad_(parameter.requires_grad)
        for parameter in parameters
    ]


def learning(tensor: torch.Tensor, *, wanted: bool = True) -> torch.Tensor:
    """A leaf with the tensor's memory, which receives a gradient if it can have one and that is wanted."""
    return tensor.detach().requires_grad_(wanted and (tensor.is_floating_point() or tensor.is_complex()))


class Roots:
    """Where a backward begins: outputs of a forward, of which only the graph is kept, and their gradients."""

    def __init__(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        pairs = [
            (get_gradient_edge(output), gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output.requires_grad
        ]
        self._edges: list[GradientEdge] = [edge for edge, _ in pairs]
        self._gradients = [gradient for _, gradient in pairs]

    def gradients_for(self, inputs: Sequence[torch.Tensor], *, name: str) -> list[torch.Tensor | None]:
        """The gradients for some leaves; None for those that require none or had no part in the outputs.

        Raises ExecutionError if the outputs depend on another tensor, which would silently go without its gradient.
        """
        learning = [tensor for tensor in inputs if tensor.requires_grad]
        if not (self._edges and learning):
            return [None for _ in inputs]
        self._require_no_other_leaves(learning, name)
        found = iter(torch.autograd.grad(self._edges, learning, self._gradients, allow_unused=True))
        return [next(found) if tensor.requires_grad else None for tensor in inputs]

    def _require_no_other_leaves(self, known: Sequence[torch.Tensor], name: str) -> None:
        numbers = {id(tensor) for tensor in known}
        pending: list[Any] = [edge.node for edge in self._edges]
        seen = set(pending)
        while pending:
            node = pending.pop()
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor) and id(leaf) not in numbers:
                raise ExecutionError(
                    f"{name!r} uses a tensor of shape {tuple(leaf.shape)} that requires a gradient and is neither its "
                    "input nor one of its parameters: expected no other, for its gradient would be lost. Give it as "
                    "an input (in a tuple), or register it"
                )
            fresh = [
                following for following, _ in node.next_functions if following is not None and following not in seen
            ]
            seen.update(fresh)
            pending.extend(fresh)


def accumulate(tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Add gradients to those that tensors have, as a backward does."""
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is not None:
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient


# ----------------------- The runtime guard: a few elements of what is dropped, compared with what the inverse rebuilds.


SAMPLES = 8
"""Elements of each tensor that are compared."""

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class Guard:
    """Samples of tensors that are about to be dropped, a few bytes at fixed positions on their device.

    The global random number generators are left alone. A comparison waits for the device.

    Attributes:
        name: Of the module that will rebuild the tensors.
        samples: Of each tensor; None for what holds no floating-point numbers.
        precision: What the module computes in.
    """

    name: str
    samples: tuple[torch.Tensor | None, ...]
    precision: torch.dtype

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], *, name: str) -> Guard:
        """Sample some tensors.

        Args:
            tensors: The input of a module, under the autocast that the module runs in.
            name: Of the module.
        """
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        coarsest = max((precision_of(tensor) for tensor in floating), key=tolerance_of, default=torch.float64)
        return cls(name, tuple(_sample(tensor) if tensor.is_floating_point() else None for tensor in tensors), coarsest)

    def check(self, rebuilt: Sequence[torch.Tensor], *, draws_random: bool = False) -> float:
        """Compare what the inverse rebuilt.

        Args:
            rebuilt: As many tensors as were sampled, with their shapes.
            draws_random: The message names random numbers of the module as a possible reason.
        Returns:
            The largest error in the samples.
        Raises:
            InverseError: It is beyond the tolerance of float32 or float64, or not finite.
        Warns:
            RotorWarning: It is beyond the tolerance of float16 or bfloat16.
        """
        errors = [
            _error_and_scale(sample, _sample(tensor))
            for sample, tensor in zip(self.samples, rebuilt, strict=True)
            if sample is not None and sample.numel()
        ]
        for error, scale in errors:
            tolerance = tolerance_of(self.precision) * max(scale, 1.0)
            if error <= tolerance:
                continue
            message = self._message(error, tolerance, draws_random=draws_random)
            if self.precision not in _LOW_PRECISION or not math.isfinite(error):
                raise InverseError(message, stage=self.name, error=error, tolerance=tolerance)
            warnings.warn(message, RotorWarning, stacklevel=2)
        return max((error for error, _ in errors), default=0.0)

    def _message(self, error: float, tolerance: float, *, draws_random: bool) -> str:
        found = "is not finite" if not math.isfinite(error) else f"is off by {error:.2g}"
        remedy = (
            "Keep activations in float32 (autocast does), or run fewer modules in a row without their inputs"
            if self.precision in _LOW_PRECISION
            else "Bound what the inverse divides by (a smaller clamp), use float64, or run fewer modules "
            "in a row without their inputs"
        )
        return (
            f"the input of {self.name!r} as rebuilt by its inverse {found}: expected at most {tolerance:.2g} in "
            f"{str(self.precision).removeprefix('torch.')}, judged by {SAMPLES} elements that were noted before it was "
            f"dropped. {remedy}{f'. {DRAWS}' * draws_random}"
        )


def precision_of(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which a module computes that takes this tensor: its own, or autocast's if that is coarser."""
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return max(tensor.dtype, torch.get_autocast_dtype(kind), key=tolerance_of)
    return tensor.dtype


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest error of a rebuilt input in some precision, relative to its largest element."""
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.bfloat16])


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A new tensor of the elements at fixed positions."""
    # Not through a flat view, which copies all of a channels-last tensor.
    places = [torch.tensor(place) for place in _places(tensor.shape)]
    detached = tensor.detach()
    return detached[tuple(places)] if places else detached.clone().reshape(min(SAMPLES, tensor.numel()))


@lru_cache(maxsize=256)
def _places(shape: torch.Size) -> tuple[np.ndarray, ...]:
    """The positions to compare, by dimension."""
    # A regular pattern may fall into few columns of a matrix, so into one half of a coupling. The generator is our own.
    size = shape.numel()
    numbers = np.array(random.Random(size).sample(range(size), min(SAMPLES, size)), dtype=np.int64)
    return np.unravel_index(numbers, shape) if shape else ()


def _error_and_scale(sample: torch.Tensor, rebuilt: torch.Tensor) -> tuple[float, float]:
    """The largest difference and the largest element; where the sample itself is not finite, nothing is expected."""
    expected, found = sample.double(), rebuilt.double()
    known = torch.isfinite(expected)
    largest = [torch.where(known, numbers.abs(), 0.0).max() for numbers in (found - expected, expected)]
    error, scale = torch.stack(largest).tolist()  # one wait for the device
    return error, scale


# --------------------------------------------------------------- One call of a module that will be undone and repeated.


class Moment:
    """What one call of a module saw of generators, buffers, attributes and autocast, and how to see that again.

    :meth:`first` wraps the call; :meth:`again` wraps whatever undoes or repeats it. Generators are kept only if the
    call drew, buffers only if it changed them. ``state`` finds what the module may change.
    """

    def __init__(self, device: torch.device, state: Callable[[], SegmentState], *, may_draw: bool = True) -> None:
        self._device = device
        self._state = state
        self._may_draw = may_draw
        # Scratch is made when it is needed.
        self.first_pass = FirstPass(replace(state(), statistics=()))
        self._generators: GeneratorStates | None = None
        self._autocast = tuple(
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(("cpu", "cuda", device.type))
            if torch.amp.is_autocast_available(kind)
        )
        self._cache = torch.is_autocast_cache_enabled()

    @property
    def draws_random(self) -> bool:
        """True if the first call drew random numbers."""
        return self._generators is not None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Context of the first call; raises ExecutionError if it changes parameters or large buffers it reads later."""
        first_pass = self.first_pass
        buffers = list(buffers_of(first_pass.state.remembered))
        with passing_first(first_pass):
            first_pass.generators = None  # they are among ours
            before = GeneratorStates(self._device) if self._may_draw else None
            yield
            if before is not None and not before.equals(GeneratorStates(self._device)):
                self._generators = before
        unchanged = {  # by value: the kernels of normalization write without a new version
            (id(module), name): (module._buffers, name, buffer)
            for (module, name, buffer), (_, _, value) in zip(buffers, first_pass.values, strict=True)
            if module._buffers.get(name) is buffer and same_bits(buffer, value)
        }
        first_pass.read = tensors_read(first_pass.state, unchanged.values())
        first_pass.values = [each for each in first_pass.values if (id(each[0]), each[1]) not in unchanged]

    def require_unchanged(self) -> None:
        """Raise ExecutionError if a parameter or buffer that the call has read has changed."""
        self.first_pass.read.require_unchanged()

    @contextmanager
    def again(self, exchanged: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> Iterator[None]:
        """Context that sees what the first call saw, with parameters ``exchanged`` for others."""
        like = copy(self.first_pass)
        like.state = replace(like.state, statistics=self._state().statistics)
        like.read = like.read.standing_in({id(parameter): other for parameter, other in exchanged})
        with ExitStack() as stack:
            stack.enter_context(repeating())
            if self._generators is not None:
                stack.callback(GeneratorStates(self._device).restore)
                self._generators.restore()
            stack.enter_context(like.replayed())
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self._cache))
            # Weights cast without gradients must not serve a forward with them.
            stack.callback(forget_casts)
            yield
