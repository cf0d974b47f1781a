"""Couplings: one half of the channels changes by what a network makes of the other half, which passes unchanged.

The networks may be anything that keeps the shape of a half; they are never inverted.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from lightning_rotor.errors import InverseError, ModelError
from lightning_rotor.invertible.drawing import PartSeeds
from lightning_rotor.invertible.gradients import Roots, accumulate, learning


class _Coupling(nn.Module):
    """Two halves along a dimension."""

    draws_by_parts = True
    """Random numbers come from :class:`~lightning_rotor.invertible.drawing.PartSeeds` alone."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def extra_repr(self) -> str:
        """What is not a submodule."""
        return f"dim={self.dim}"

    def _halves(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = tuple(tensor.shape)
        if not -tensor.ndim <= self.dim < tensor.ndim or shape[self.dim] % 2 or not shape[self.dim]:
            raise InverseError(
                f"{type(self).__name__} cannot split a tensor of shape {shape} in two along dimension {self.dim}: expected an even size there. "
                "Change dim, or the number of channels",
                stage=type(self).__name__,
            )
        first, second = tensor.chunk(2, self.dim)
        return first, second


class AdditiveCoupling(_Coupling):
    """The block of reversible residual networks: ``y1 = x1 + f(x2)``, ``y2 = x2 + g(y1)``.

    Its fused backward runs f and g once each: with the forward, 4 evaluations of each in a step (a backward counts twice) where an inverse and
    another forward make 5. If f or g may draw random numbers, each has generators of its own, seeded from the global one, so that the inverse
    finds the same numbers.

    Args:
        f: Maps a half ``(batch, channels / 2, ...)`` to its own shape.
        g: Likewise.
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

    def __init__(self, f: nn.Module, g: nn.Module, dim: int = 1) -> None:
        super().__init__(dim)
        self.f = f
        self.g = g

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output ``(y1, y2)``, of the shape and dtype of the input."""
        first, second = self._halves(x)
        seeds = self._seeds(x)
        first = first + self._run_f(second, seeds)
        return torch.cat([first, second + self._run_g(first, seeds)], self.dim)

    def inverse(self, output: torch.Tensor) -> torch.Tensor:
        """The input that made an output."""
        first, second = self._halves(output)
        seeds = self._seeds(output)
        second = second - self._run_g(first, seeds)
        return torch.cat([first - self._run_f(second, seeds), second], self.dim)

    def reversible_backward(self, output: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input that made an output, and the gradient for it; parameters accumulate theirs."""
        first, second = self._halves(output)
        first_gradient, second_gradient = self._halves(gradient)
        seeds = self._seeds(output)

        leaf = learning(first)
        with torch.enable_grad():
            made = self._run_g(leaf, seeds)
        old_second = second - made.detach()
        roots = Roots([made], [second_gradient])
        del made, second
        first_gradient = _add(first_gradient, _backward_through(self.g, roots, leaf))
        del roots, leaf

        rebuilt = torch.empty_like(output)
        del output
        old_first, slot = self._halves(rebuilt)
        slot.copy_(old_second)
        del old_second
        leaf = learning(slot.data)  # counts its own versions: the other half of this memory is yet to be written
        with torch.enable_grad():
            made = self._run_f(leaf, seeds)
        torch.sub(first, made.detach(), out=old_first)
        roots = Roots([made], [first_gradient])
        del made, first
        second_gradient = _add(second_gradient, _backward_through(self.f, roots, leaf))
        return rebuilt, torch.cat([first_gradient, second_gradient], self.dim)

    def _seeds(self, tensor: torch.Tensor) -> PartSeeds:
        return PartSeeds((self.f, self.g), tensor.device)

    def _run_f(self, half: torch.Tensor, seeds: PartSeeds) -> torch.Tensor:
        with seeds.part(0):
            return _like(self.f(half), half)

    def _run_g(self, half: torch.Tensor, seeds: PartSeeds) -> torch.Tensor:
        with seeds.part(1):
            return _like(self.g(half), half)


class AffineCoupling(_Coupling):
    """The block of RealNVP and Glow: ``y1 = x1``, ``y2 = x2 * exp(s) + t`` with ``(s, t) = net(x1)``.

    The inverse divides by ``exp(s)``, so s is always clamped: ``s = clamp * tanh(raw / clamp)`` lies within ±clamp. The way from the output back to
    the input then multiplies rounding errors by ``exp(clamp)`` at most. The fused backward runs the network once.

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

    def __init__(self, net: nn.Module, dim: int = 1, *, clamp: float = 2.0) -> None:
        super().__init__(dim)
        if not (math.isfinite(clamp) and clamp > 0):
            raise ModelError(
                f"clamp is {clamp}: expected a positive, finite bound of the logarithm of the scale, such as 2.0, "
                "for the inverse divides by the scale"
            )
        self.net = net
        self.clamp = float(clamp)

    def extra_repr(self) -> str:
        """What is not a submodule."""
        return f"{super().extra_repr()}, clamp={self.clamp}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output, of the shape and dtype of the input."""
        first, second = self._halves(x)
        log_scale, shift = self._log_scale_and_shift(first)
        return torch.cat([first, second * log_scale.exp() + shift], self.dim)

    def inverse(self, output: torch.Tensor) -> torch.Tensor:
        """The input that made an output."""
        first, second = self._halves(output)
        log_scale, shift = self._log_scale_and_shift(first)
        return torch.cat([first, (second - shift) * (-log_scale).exp()], self.dim)

    def reversible_backward(self, output: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input that made an output, and the gradient for it; parameters accumulate theirs."""
        first, second = self._halves(output)
        first_gradient, second_gradient = self._halves(gradient)
        leaf = learning(first)
        with torch.enable_grad():
            log_scale, shift = self._log_scale_and_shift(leaf)
        scale = log_scale.detach().exp()
        old_second = (second - shift.detach()) / scale
        rebuilt = torch.cat([first, old_second], self.dim)
        # y2 = x2 * exp(s) + t, so its derivative for s is x2 * exp(s), for t one and for x2 exp(s).
        for_old_second = second_gradient * scale
        roots = Roots([log_scale, shift], [for_old_second * old_second, second_gradient])
        del output, first, second, log_scale, shift, old_second, scale
        first_gradient = _add(first_gradient, _backward_through(self.net, roots, leaf))
        return rebuilt, torch.cat([first_gradient, for_old_second], self.dim)

    def _log_scale_and_shift(self, half: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.net(half)
        raw, shift = _like(made, half).chunk(2, self.dim)
        return self.clamp * (raw / self.clamp).tanh(), shift


def _like(made: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """What a network made, in the dtype of what it took: under autocast it may be coarser, and the output shall be as the input."""
    return made.to(half.dtype)


def _add(gradient: torch.Tensor, more: torch.Tensor | None) -> torch.Tensor:
    return gradient if more is None else gradient + more


def _backward_through(network: nn.Module, roots: Roots, leaf: torch.Tensor) -> torch.Tensor | None:
    """Run the backward of a network: parameters accumulate their gradients, that of the leaf is returned."""
    parameters = list(network.parameters())
    with torch.autocast(leaf.device.type, enabled=False):  # as a backward outside of the forward's context
        for_leaf, *for_parameters = roots.gradients_for([leaf, *parameters], name=type(network).__name__)
    accumulate(parameters, for_parameters)
    return for_leaf
