"""Invertible modules, and training them without their inputs with no planner around.

Couplings: one half of the channels changes by what a network makes of the other half, which passes unchanged. The
networks may be anything that keeps the shape of a half; they are never inverted.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_rotor.errors import InverseError, ModelError
from lightning_rotor.execution.inversion import Way, can_be_fused, run_inverted
from lightning_rotor.execution.nested_backward import Roots, gradients_for, learning, roots_of
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.execution.segment import recomputed
from lightning_rotor.private.torch_names import has_forward_hooks, no_dispatch, outside_of_graphs
from lightning_rotor.private.values import attribute_of
from lightning_rotor.stages.generators import seeded
from lightning_rotor.stages.inverses import Invertible, require_invertible
from lightning_rotor.stages.known_layers import DRAWING, does_more_than_forward
from lightning_rotor.stages.sequential import Stage


class _Step(NamedTuple):
    """One network of a coupling, in one call.

    Attributes:
        half: Which half it changes: 0 or 1.
        network: The network.
        run: The network as this call runs it, with random numbers of its own.
    """

    half: int
    network: nn.Module
    run: Callable[[Tensor], Tensor]


class _Coupling(nn.Module):
    """Two halves along a dimension. Each network changes one of them, by what it makes of the other one."""

    draws_by_parts = True
    """Random numbers are those of its parts alone."""
    # A half, changed by what a network made of the other one, and as it was before.
    _changed: Callable[[Tensor, Tensor], Tensor]
    _restored: Callable[[Tensor, Tensor], Tensor]

    def __init__(self, dim: int, **networks: nn.Module) -> None:
        super().__init__()
        self.dim = dim
        for name, network in networks.items():
            self.add_module(name, network)

    def forward(self, x: Tensor) -> Tensor:
        """The output, of the shape and dtype of the input."""
        halves = self._halves(x)
        for mine, _, run in self._steps(x.device):
            # No name for what the network made: it would live on while the next one runs.
            halves[mine] = self._changed(halves[mine], run(halves[1 - mine]))
        # A copy of both, also where one passed unchanged: a view of the input would keep all of it alive.
        return torch.cat(halves, self.dim)

    def inverse(self, output: Tensor) -> Tensor:
        """The input that made an output."""
        halves = self._halves(output)
        for mine, _, run in reversed(self._steps(output.device)):
            halves[mine] = self._restored(halves[mine], run(halves[1 - mine]))
        return torch.cat(halves, self.dim)

    def reversible_backward(self, output: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The input that made an output, and the gradient for it; parameters accumulate theirs."""
        steps = self._steps(output.device)
        halves, gradients = self._halves(output), self._halves(gradient)
        # As each half is rebuilt, what it was rebuilt from can go.
        del output, gradient
        # The other half is as it was when this network ran, since networks behind it are undone already.
        for mine, network, run in reversed(steps):
            leaf = learning(halves[1 - mine])
            with torch.enable_grad():
                made = run(leaf)
            halves[mine] = self._restored(halves[mine], made.detach())
            pair = halves[mine], made.detach()
            # By autograd, through the change alone, so that no subclass needs a formula of its own. The first of its
            # results is the half as it was changed, which nobody needs and a name would keep.
            gradients[mine], for_made = torch.autograd.functional.vjp(self._changed, pair, gradients[mine])[1]
            roots = roots_of([made], [for_made])
            del made, pair, for_made
            gradients[1 - mine] = _backward_through(network, roots, leaf, gradients[1 - mine])
            del roots, leaf
        return torch.cat(halves, self.dim), torch.cat(gradients, self.dim)

    def _halves(self, tensor: Tensor) -> list[Tensor]:
        shape = tuple(tensor.shape)
        has_dimension = -tensor.ndim <= self.dim < tensor.ndim
        if not has_dimension or shape[self.dim] % 2 or not shape[self.dim]:
            raise InverseError(
                f"{type(self).__name__} cannot split a tensor of shape {shape} in two along dimension {self.dim}: "
                "expected an even size there. Change dim, or the number of channels",
                stage=type(self).__name__,
            )
        return list(tensor.chunk(2, self.dim))

    def _steps(self, device: torch.device) -> list[_Step]:
        """The networks in the order of a forward. The last one changes the second half.

        Random numbers must not depend on which network runs first. If one may draw, each has generators of its own,
        seeded by one number from torch's host generator.
        """
        networks = list(self.children())
        seed: int | None = None
        if any(_may_draw(module) for network in networks for module in network.modules()):
            # An inverse draws the same seed again, as it runs with the generators set back to where the forward began.
            # On the host, since reading a number of a GPU would wait for it; and small enough to count on from.
            # A mode that watches the forward, of a recording for one, must not see this draw as the user's.
            with no_dispatch():
                seed = int(torch.randint(2**62, (), device="cpu"))

        def run(network: nn.Module, number: int, half: Tensor) -> Tensor:
            with nullcontext() if seed is None else seeded(seed + number, device):
                made: Tensor = network(half)
                # Under autocast it may be coarser, and the output must have the input's type.
                return made.to(half.dtype)

        # With a single network the first half passes unchanged.
        first = 2 - len(networks)
        steps = []
        for number, network in enumerate(networks):
            steps.append(_Step(first + number, network, partial(run, network, number)))
        return steps


def _may_draw(module: nn.Module) -> bool:
    """True if a module itself may draw random numbers: in training, any that is not torch's may."""
    if isinstance(module, (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
        # They draw in evaluation, too.
        return True
    if not module.training:
        return False
    if isinstance(module, DRAWING):
        probability = attribute_of(module, "p", 0.0) or attribute_of(module, "dropout", 0.0)
        # RReLU draws slopes, and has no probability.
        return bool(probability) or isinstance(module, nn.RReLU)
    if has_forward_hooks(module):
        # Hooks are anybody's code, around any module.
        return True
    is_torchs = type(module).__module__.startswith("torch.")
    return not (is_torchs or attribute_of(module, "draws_by_parts", False))


def _backward_through(network: nn.Module, roots: Roots, leaf: Tensor, gradient: Tensor) -> Tensor:
    """Run the backward of a network: parameters accumulate their gradients; returns the leaf's and ``gradient``."""
    parameters = list(network.parameters())
    # As a backward outside of the forward's context: autocast belongs to forwards.
    with torch.autocast(leaf.device.type, enabled=False):
        wanted = [leaf, *parameters]
        for_leaf, *for_parameters = gradients_for(wanted, roots, name=type(network).__name__)
    accumulate(parameters, for_parameters)
    # Before the sum, which takes new memory.
    del for_parameters
    if for_leaf is None:
        return gradient
    return gradient + for_leaf


def accumulate(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to those that tensors have, as a backward does."""
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if gradient is None:
            continue
        if tensor.grad is None:
            tensor.grad = gradient
        else:
            tensor.grad = tensor.grad + gradient


class AdditiveCoupling(_Coupling):
    """The block of reversible residual networks: ``y1 = x1 + f(x2)``, ``y2 = x2 + g(y1)``.

    Its fused backward runs f and g once each: 4 evaluations of each in a step (a backward counts twice), where an
    inverse and another forward make 5. If f or g may draw random numbers, each has generators of its own, seeded from
    the global one, so that the inverse finds the same numbers.

    Args:
        f: Maps a half ``(batch, channels / 2, ...)`` to its own shape.
        g: Maps the other half to its own shape.
        dim: Dimension along which the input is split; its size is even.
    Raises:
        InverseError: When called: that size is odd.
    Example:
        >>> block = AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> block.inverse(block(torch.randn(2, 8))).shape
        torch.Size([2, 8])
    Source:
        Gomez et al., "The reversible residual network", NeurIPS 2017, arXiv:1707.04585.
    """

    f: nn.Module
    g: nn.Module

    def __init__(self, f: nn.Module, g: nn.Module, dim: int = 1) -> None:
        super().__init__(dim, f=f, g=g)

    def _changed(self, half: Tensor, made: Tensor) -> Tensor:
        return half + made

    def _restored(self, half: Tensor, made: Tensor) -> Tensor:
        return half - made


class AffineCoupling(_Coupling):
    """The block of RealNVP and Glow: ``y1 = x1``, ``y2 = x2 * exp(s) + t`` with ``(s, t) = net(x1)``.

    The inverse divides by ``exp(s)``, so s is clamped: ``s = clamp * tanh(raw / clamp)``. The inverse then multiplies
    rounding errors by ``exp(clamp)`` at most. The fused backward runs the network once.

    Args:
        net: Maps a half ``(batch, channels / 2, ...)`` to twice as many channels: raw scales, then shifts.
        dim: Dimension along which the input is split; its size is even.
        clamp: Bound of the logarithm of the scale, positive and finite.
    Raises:
        ModelError: ``clamp`` is not positive and finite.
        InverseError: When called: the size of ``dim`` is odd.
    Source:
        Dinh et al., "Density estimation using Real NVP", ICLR 2017, arXiv:1605.08803.
    """

    net: nn.Module

    def __init__(self, net: nn.Module, dim: int = 1, *, clamp: float = 2.0) -> None:
        super().__init__(dim, net=net)
        if not (math.isfinite(clamp) and clamp > 0):
            raise ModelError(
                f"clamp is {clamp}: expected a positive, finite bound of the logarithm of the scale, such as 2.0, "
                "for the inverse divides by the scale"
            )
        self.clamp = float(clamp)

    def _changed(self, half: Tensor, made: Tensor) -> Tensor:
        log_scale, shift = self._log_scale_and_shift(made)
        return half * log_scale.exp() + shift

    def _restored(self, half: Tensor, made: Tensor) -> Tensor:
        log_scale, shift = self._log_scale_and_shift(made)
        return (half - shift) * (-log_scale).exp()

    def _log_scale_and_shift(self, made: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = made.chunk(2, self.dim)
        return self.clamp * (raw / self.clamp).tanh(), shift


class InvertibleConvolution(nn.Module):
    """Mixes channels by a matrix ``P L U``: a fixed permutation, a unit lower triangle and an invertible upper one."""

    permutation: Tensor
    signs: Tensor

    def __init__(self, channels: int, *, clamp: float = 4.0) -> None:
        super().__init__()
        if channels < 1 or not clamp > 0:
            raise ModelError(f"channels is {channels} and clamp {clamp}: expected both positive, such as 16 and 4.0")
        # The inverse of a rotation magnifies no rounding error.
        rotation, _ = torch.linalg.qr(torch.randn(channels, channels))
        permutation, lower, upper = torch.linalg.lu(rotation)
        diagonal = upper.diagonal()
        self.channels = channels
        self.clamp = float(clamp)
        self.lower = nn.Parameter(lower.tril(-1))
        self.upper = nn.Parameter(upper.triu(1))
        # Where the clamp lets it through, the matrix begins as the rotation itself.
        # Not up to 1, whose atanh is infinite.
        bounded = (diagonal.abs().log() / clamp).clamp(-0.999, 0.999)
        self.raw_logarithms = nn.Parameter(clamp * bounded.atanh())
        # Neither can be learned by small steps: a permutation is discrete, and a diagonal that passes zero on its way
        # to another sign has no inverse there.
        self.register_buffer("permutation", permutation.argmax(dim=1))
        self.register_buffer("signs", diagonal.sign())

    def extra_repr(self) -> str:
        """The settings, for ``repr``."""
        return f"channels={self.channels}, clamp={self.clamp}"

    def forward(self, x: Tensor) -> Tensor:
        """The output, of the shape and dtype of the input."""
        # Autocast would multiply in half precision, and the inverse would be off by its rounding.
        with torch.autocast(x.device.type, enabled=False):
            lower, upper = self._triangles()
            matrix = (lower @ upper)[self.permutation]
            columns = self._columns(x)
            # Not "@", which gives other last bits where no gradient is wanted.
            mixed = torch.bmm(matrix.expand(len(columns), -1, -1), columns)
            return mixed.reshape(x.shape).to(x.dtype)

    def inverse(self, output: Tensor) -> Tensor:
        """The input that made an output; two triangular systems are solved."""
        with torch.autocast(output.device.type, enabled=False):
            lower, upper = self._triangles()
            # Sorting a permutation's numbers gives the permutation that undoes it.
            columns = self._columns(output)[:, self.permutation.argsort()]
            halfway = torch.linalg.solve_triangular(lower, columns, upper=False, unitriangular=True)
            solved: Tensor = torch.linalg.solve_triangular(upper, halfway, upper=True)
            return solved.reshape(output.shape).to(output.dtype)

    def _triangles(self) -> tuple[Tensor, Tensor]:
        parts = self.lower, self.upper, self.raw_logarithms, self.signs
        lower, upper, raw_logarithms, signs = (part.to(self._dtype) for part in parts)
        identity = torch.eye(self.channels, dtype=lower.dtype, device=lower.device)
        # Bounded, as the diagonal divides when systems are solved.
        logarithms = self.clamp * (raw_logarithms / self.clamp).tanh()
        diagonal = (signs * logarithms.exp()).diag()
        return lower.tril(-1) + identity, upper.triu(1) + diagonal

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype in which systems are solved, float32 at least: torch has no solver for half precision."""
        return torch.promote_types(self.lower.dtype, torch.float32)

    def _columns(self, tensor: Tensor) -> Tensor:
        """The tensor as ``(batch, channels, places)``."""
        if tensor.ndim < 2 or tensor.shape[1] != self.channels:
            raise InverseError(
                f"{type(self).__name__} takes {self.channels} channels, and got a tensor of shape "
                f"{tuple(tensor.shape)}: expected (batch, {self.channels}, ...). Give that shape, or construct it for "
                "another number of channels",
                stage=type(self).__name__,
            )
        return tensor.reshape(tensor.shape[0], self.channels, -1).to(self._dtype)


class InvertibleSequential(nn.Sequential):
    """An ``nn.Sequential`` of invertible modules, with their inverses in reverse order.

    :func:`~lightning_rotor.invertible.invertible_checkpoint` and the planner take it apart, so its members need no more
    memory than one of them. Random numbers of members are undone only there: :meth:`inverse` does not know the
    generators' states.

    Args:
        *modules: As for ``nn.Sequential``.
    Raises:
        InverseError: One of them has no inverse.
    """

    def __init__(self, *modules: Any) -> None:
        super().__init__(*modules)
        for name, module in self._modules.items():
            require_invertible(module, name=labelled(module, name))

    def inverse(self, output: Any) -> Any:
        """The input that made an output."""
        for module in reversed(self._modules.values()):
            output = cast("Invertible", module).inverse(output)
        return output


class Reversed(nn.Module):
    """A module with forward and inverse swapped: what :func:`reverse` makes. It shares the module's parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        require_invertible(module, name=type(module).__name__)
        self.module = module

    def forward(self, x: Any) -> Any:
        """The module's inverse."""
        return cast("Invertible", self.module).inverse(x)

    def inverse(self, output: Any) -> Any:
        """The module's forward."""
        return self.module(output)


def reverse(module: nn.Module) -> nn.Module:
    """Swap forward and inverse of a module: a flow's sampler from its encoder.

    Args:
        module: With ``forward`` and ``inverse``; nothing is copied. Members of an :class:`InvertibleSequential` are
            reversed.
    Returns:
        The reversed module; of a reversed one, the module itself.
    Raises:
        InverseError: It has no inverse.
    """
    if isinstance(module, Reversed):
        return module.module
    # Member by member, so that the reversed row is taken apart into its members as well.
    if type(module) is InvertibleSequential and not does_more_than_forward(module):
        reversed_members = reversed(list(module._modules.values()))
        return InvertibleSequential(*map(reverse, reversed_members))
    return Reversed(module)


def members(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """A module, or the modules that it runs in a row, each with a name for error messages."""
    # A subclass, or hooks and a forward of its own, may do more than run them: then it is one module.
    if type(module) is InvertibleSequential and not does_more_than_forward(module):
        # A module that appears twice counts twice.
        for name, member in module._modules.items():
            if member is not None:
                member_path = f"{path}.{name}" if path else name
                yield from members(member, member_path)
    else:
        yield labelled(module, path), module


def labelled(module: nn.Module, path: str) -> str:
    """The name of a module in error messages: ``2.0 (AdditiveCoupling)``."""
    kind = type(module).__name__
    if path:
        return f"{path} ({kind})"
    return kind


def invertible_checkpoint(
    module: nn.Module | Sequence[nn.Module],
    x: Any,
    *more: Any,
    how: Literal["invert", "checkpoint", "plain"] = "invert",
    num_outputs: int | None = None,
    name: str | None = None,
) -> Any:
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
        *more: Further arguments. The module's forward and its inverse then take what is given, or made, as positional
            arguments, and return as many tensors in a tuple.
        how: ``"invert"``; ``"checkpoint"`` holds each module's input and runs the module again, which needs no inverse;
            ``"plain"`` holds what autograd saves.
        num_outputs: How many outputs of a tuple to return, one as it is; the backward holds all that the inverse needs.
        name: Of the module in error messages; by default its type's.
    Returns:
        The output of the module.
    Raises:
        ModelError: ``how`` is none of the three, or there are fewer outputs than ``num_outputs``.
        InverseError: A module has no inverse, changes its input in place, or returns less than it took. In the
            backward: the inverse returns something else than the forward took, or is off by more than 1e-3 in float32,
            1e-8 in float64, relative to the input's largest element, at eight elements that were noted.
        ExecutionError: A second backward without ``retain_graph=True`` in the first; a gradient of a gradient; an
            output, a parameter or a buffer changed before the backward; a tensor that requires a gradient and is
            neither input nor parameter.
    Warns:
        RotorWarning: In the backward: an inverse in float16 or bfloat16 is off by more than the guard expects.
    Example:
        >>> block = AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> invertible_checkpoint([block] * 100, torch.randn(2, 8)).sum().backward()
    """
    if how not in _RUN:
        raise ModelError(f"how is {how!r}: expected one of {', '.join(map(repr, _RUN))}")
    output = _in_a_row(module, (x, *more), how, name)
    if num_outputs is None:
        return output
    made = 1
    if isinstance(output, tuple):
        made = len(output)
    if not 0 < num_outputs <= made or not isinstance(output, tuple):
        raise ModelError(
            f"num_outputs is {num_outputs}, and the module returned {made} output{'s' * (made > 1)}: expected a tuple "
            "of at least as many tensors"
        )
    # As it is, and no tuple of one: calls in a row then hand it on as a single argument.
    if num_outputs == 1:
        return output[0]
    return output[:num_outputs]


class _TakesSeveral(nn.Module):
    """A module that takes several arguments, with a tuple of them in their place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        # A module may make one tensor of several. The next one in the row is then given one.
        if isinstance(x, tuple):
            return self.module(*x)
        return self.module(x)

    def inverse(self, output: Any) -> Any:
        module = cast("Invertible", self.module)
        if isinstance(output, tuple):
            return module.inverse(*output)
        return module.inverse(output)


def _inverted(stage: Stage, x: Any) -> Any:
    module = stage.modules[0]
    # The user's own, which an error should name.
    asked = module.module if isinstance(module, _TakesSeveral) else module
    require_invertible(asked, name=stage.name)
    return run_inverted(Way(stage, can_be_fused(module)), x)


def _checkpointed(stage: Stage, x: Any) -> Any:
    # No backward comes, so nothing is to be remembered for it.
    if not torch.is_grad_enabled():
        return run_stage(stage, x)
    state = Way(stage, fused=False).state()
    return recomputed(partial(run_stage, stage), x, name=repr(stage.name), state=state)


_RUN: dict[str, Callable[[Stage, Any], Any]] = {
    "invert": _inverted,
    "checkpoint": _checkpointed,
    "plain": run_stage,
}


@outside_of_graphs
def _in_a_row(module: nn.Module | Sequence[nn.Module], inputs: tuple[Any, ...], how: str, name: str | None) -> Any:
    several = len(inputs) > 1
    x = inputs if several else inputs[0]
    named: list[tuple[str, nn.Module]] = []
    if isinstance(module, nn.Module):
        named += members(module, name or "")
    else:
        for index, part in enumerate(module):
            path = f"{name}.{index}" if name else str(index)
            named += members(part, path)
    for member_name, member in named:
        running = _TakesSeveral(member) if several else member
        x = _RUN[how](Stage(member_name, (running,)), x)
    return x
