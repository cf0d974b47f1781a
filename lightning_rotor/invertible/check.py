"""Whether a module's inverse undoes its forward, tried on one input."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_rotor.errors import InverseError
from lightning_rotor.execution.drift_guard import LOW_PRECISION, precision_of, tolerance_of
from lightning_rotor.execution.isolated import kept_attributes, lent_buffers, undisturbed
from lightning_rotor.execution.moment import Moment, fused_gradients, plain_gradients
from lightning_rotor.execution.nested_backward import learning
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.execution.segment_state import state_of
from lightning_rotor.private.torch_names import version_of
from lightning_rotor.private.values import is_fake, tensors_in, tree_flatten, tree_leaves, tree_map
from lightning_rotor.stages.inverses import (
    DRAWS,
    has_fused_backward,
    require_invertible,
    require_like,
    require_own_output,
    require_tensors,
    shares_memory,
)
from lightning_rotor.stages.sequential import Stage

_INEXACT = "Correct the inverse; bound what it divides by; keep activations in float32 or float64; or allow more"


@dataclass(frozen=True, slots=True)
class InverseReport:
    """The findings of :func:`check_inverse`.

    Attributes:
        error: Largest difference between the input and what the inverse made of the output.
        tolerance: What was allowed.
        draws_random: The forward draws random numbers.
        fused_error: Largest difference between the fused backward's gradients and autograd's, relative to each
            gradient's largest element, or to 1 % of the largest of all if that is more; infinite where one is not
            finite; None without a fused backward.
        fused_agrees: True if that is within ``rtol``; None without a fused backward.
        shares_memory: The output shows memory of the input, which is then held with it.
    """

    error: float
    tolerance: float
    draws_random: bool
    fused_error: float | None = None
    fused_agrees: bool | None = None
    shares_memory: bool = False


def check_inverse(
    module: nn.Module, x: Any, *, rtol: float = 1e-4, atol: float = 1e-6, name: str | None = None
) -> InverseReport:
    """Check that a module's inverse rebuilds its input, and that its fused backward, if any, is autograd's.

    Runs the forward twice, the inverse, and the backward, and changes nothing. Precision is that of the input: in
    bfloat16 hardly any inverse is within the default tolerance.

    Args:
        module: With ``forward`` and ``inverse``.
        x: An input as in training: a tensor, or tensors in a tuple, list or dict.
        rtol: Allowed error relative to the largest element, of the input for the inverse, of each gradient for the
            fused backward.
        atol: Allowed error besides.
        name: Of the module in error messages; by default its type's.
    Returns:
        What was found.
    Raises:
        InverseError: There is no inverse; it fails, is off by more than the tolerance, or returns another number of
            tensors, other shapes or dtypes than the forward took; something is not finite; the output is smaller than
            the input; the input is modified in place; the forward does not repeat itself.
    Example:
        >>> check_inverse(AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 8)).fused_agrees
        True
    """
    name = name or type(module).__name__
    require_invertible(module, name=name)
    inputs = require_tensors(x, name=name, what="input")
    _require_finite(inputs, name=name, what="input")
    device = inputs[0].device
    stage = Stage(name, (module,))
    with (
        undisturbed(device),
        kept_attributes(stage, keep_parameters=False),
        lent_buffers(stage),
        torch.no_grad(),
    ):
        # All buffers may change: these are copies.
        state = replace(state_of(stage, module.modules(), {}), root=(module, ""))
        moment = Moment(device, lambda: state)
        detached = tree_map(torch.Tensor.detach, x)
        return _Trial(name, module, stage, detached, moment).run(rtol, atol)


@dataclass(frozen=True, slots=True, eq=False)
class _Trial:
    name: str
    module: Any
    stage: Stage
    x: Any
    moment: Moment

    def run(self, rtol: float, atol: float) -> InverseReport:
        """The findings, or an InverseError."""
        output, shares = self._forward(self.moment.first())
        _require_finite(tree_leaves(output), name=self.name, what="output")
        again, _ = self._forward(self.moment.again())
        # Both are finite, so that no NaN is unequal to itself here.
        if not all(map(torch.equal, tree_leaves(output), tree_leaves(again))):
            raise InverseError(
                f"{self.name!r} gives another output when it runs again from the same input, buffers and random "
                "numbers: expected the same bits. Draw random numbers from torch's, NumPy's or Python's own "
                "generators, and keep no state outside of buffers",
                stage=self.name,
            )
        # As large as an activation, and training that plans for a limit has no room for two of them.
        del again
        error, tolerance = self._compare_inverse(output, rtol, atol)
        fused_error = None
        fused_agrees = None
        if has_fused_backward(self.module):
            fused_error = self._compare_gradients(output)
            fused_agrees = fused_error <= rtol
        return InverseReport(
            error,
            tolerance,
            self.moment.draws_random,
            fused_error,
            fused_agrees,
            shares,
        )

    def _forward(self, context: AbstractContextManager[object]) -> tuple[Any, bool]:
        """The output for a copy of the input, which a forward may spoil; and True if it shows memory of that copy."""
        copy = tree_map(torch.clone, self.x)
        inputs = tree_leaves(copy)
        versions = list(map(version_of, inputs))
        # Kernels may give other last bits where no gradient is wanted.
        with context, torch.enable_grad():
            output = run_stage(self.stage, copy)
        outputs = require_own_output(inputs, versions, output, name=self.name)
        return tree_map(torch.Tensor.detach, output), shares_memory(inputs, outputs)

    def _compare_inverse(self, output: Any, rtol: float, atol: float) -> tuple[float, float]:
        """The error of the inverse and what is allowed, of the tensor that is nearest to it or beyond."""
        copy = tree_map(torch.clone, output)
        versions = list(map(version_of, tree_leaves(copy)))
        with self.moment.again(), self._named("inverse(output)"):
            rebuilt = self.module.inverse(copy)
        if versions != list(map(version_of, tree_leaves(copy))):
            raise InverseError(
                f"the inverse of {self.name!r} changes the output in place: expected it untouched, for the loss may "
                "need it. Use an operation that is not in place",
                stage=self.name,
            )
        inputs = tree_leaves(self.x)
        shapes = [(tensor.shape, tensor.dtype) for tensor in inputs]
        leaves = require_like(rebuilt, shapes, name=self.name)
        _require_finite(leaves, name=self.name, what="inverse")
        # In double precision, since a difference of two close numbers loses digits in their own.
        worst = -math.inf
        error = tolerance = 0.0
        for leaf, real in zip(leaves, inputs, strict=True):
            own_error = _largest(leaf.double() - real.double())
            own_tolerance = atol + rtol * _largest(real)
            if own_error - own_tolerance > worst:
                worst = own_error - own_tolerance
                error, tolerance = own_error, own_tolerance
        if error > tolerance:
            why = _INEXACT
            if self.moment.draws_random:
                why = DRAWS
            raise InverseError(
                f"the inverse of {self.name!r} is off by {error:.2g}: expected at most {tolerance:.2g} (rtol "
                f"{rtol:g}, atol {atol:g}). {why}",
                stage=self.name,
                error=error,
                tolerance=tolerance,
            )
        return error, tolerance

    def _compare_gradients(self, output: Any) -> float:
        """The error of the fused backward against autograd's, both with one gradient for the output."""
        made, spec = tree_flatten(output)
        # Slopes that differ from element to element: with ones, errors of opposite sign would cancel out.
        slopes = []
        for leaf in made:
            slope = torch.linspace(-1, 1, leaf.numel(), device=leaf.device)
            slopes.append(slope.view(leaf.shape).to(leaf.dtype))
        parameters = list(self.module.parameters())
        inputs, taken = tree_flatten(tree_map(learning, self.x))
        right = plain_gradients(self.stage, self.moment, inputs, taken, parameters, slopes)
        with self._named("reversible_backward(output, gradient)"):
            # A fused backward may spoil the output that it is given.
            outputs = list(map(torch.clone, made))
            _, for_input, for_parameters = fused_gradients(self.module, self.moment, outputs, spec, parameters, slopes)
        shapes = [(tensor.shape, tensor.dtype) for tensor in inputs]
        for_inputs = require_like(for_input, shapes, name=self.name, what="fused backward")
        left = [*for_inputs, *for_parameters]
        pairs = []
        for mine, autograds in zip(left, right, strict=True):
            # The forward does not read that parameter. A fused backward may well give zeros for it.
            if autograds is not None:
                pairs.append((mine, autograds))
        # Where the gradient is zero but for rounding (a bias before a normalization), two computations share no digit.
        largest = max((_largest(autograds) for _, autograds in pairs), default=0.0)
        least = 0.01 * largest
        errors = []
        for mine, autograds in pairs:
            # A gradient that the fused backward lacks counts whole.
            difference = _largest(autograds)
            if mine is not None:
                difference = _largest(autograds.double() - mine.double())
            if difference:
                difference /= max(_largest(autograds), least)
            # NaN is above nothing and below nothing: the largest of several numbers would lose it.
            errors.append(difference if math.isfinite(difference) else math.inf)
        return max(errors, default=0.0)

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        """Context of a call of the user's method, which may be meant for something else and take other arguments."""
        try:
            yield
        except torch.OutOfMemoryError:
            # The planner's, which tries again with less: no fault of the method.
            raise
        except Exception as error:
            raise InverseError(
                f"{self.name!r} raises {type(error).__name__} in {method}: {error}. Expected a method that takes what "
                "it is given here alone. Correct it, or give it another name if it is no inverse",
                stage=self.name,
            ) from error


def _require_finite(tensors: Sequence[torch.Tensor], *, name: str, what: str) -> None:
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise InverseError(
            f"the {what} of {name!r} holds values that are not finite (NaN or infinity): expected finite ones. "
            "Check the data and the parameters; bound scales (a clamp)",
            stage=name,
        )


def _largest(tensor: torch.Tensor) -> float:
    # The largest of no elements is an error of torch's.
    if not tensor.numel():
        return 0.0
    return float(tensor.abs().max())


def try_inverse(module: nn.Module, value: Any, *, name: str) -> tuple[str, str]:
    """The objection to a module's inverse as it is now, or else to its fused backward; empty if there is none."""
    if any(map(is_fake, tensors_in(value))):
        return "it is only estimated, and whether its inverse is right shows with values", ""
    precision = precision_of(tensors_in(value))
    # A tenth of what the guard allows in float32, since weights change after this trial and errors may grow.
    rtol = 1e-4
    if precision in LOW_PRECISION:
        # Half the digits are half the inverse's digits, too, so what the guard allows there is allowed here.
        rtol = tolerance_of(precision)
    try:
        report = check_inverse(module, value, rtol=rtol, name=name)
    except InverseError as error:
        return str(error), ""
    if report.shares_memory:
        return "it returns a view of its input, or of a part of it", ""
    if report.fused_agrees is False:
        off = f"{report.fused_error:.2g} of the largest element of a gradient"
        if report.fused_error == math.inf:
            off = "values that are not finite"
        return "", f"its fused backward is not used: it differs from autograd's by {off}"
    return "", ""
