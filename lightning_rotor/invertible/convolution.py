"""The invertible 1x1 convolution of Glow, by an LU decomposition."""

from __future__ import annotations

import torch
from torch import nn

from lightning_rotor.errors import InverseError, ModelError


class InvertibleConvolution(nn.Module):
    """Mixes channels by a matrix ``P L U``: a fixed permutation, a unit lower and an upper triangle with a diagonal that is never zero.

    Any number of spatial dimensions, none included: ``(batch, channels)``, ``(batch, channels, height, width)``, ... It begins as a random
    rotation. The diagonal's signs are fixed; its logarithms are clamped, since the inverse divides by it. The matrix is in float32
    or float64, under autocast as well: a coarser one would not be inverted.

    Args:
        channels: Number of channels.
        clamp: Bound of the logarithms of the diagonal, positive.
    Raises:
        ModelError: ``channels`` or ``clamp`` is not positive.
        InverseError: When called: the input has another number of channels.
    Source:
        Kingma and Dhariwal, "Glow", NeurIPS 2018, arXiv:1807.03039, section 3.2.
    """

    permutation: torch.Tensor
    signs: torch.Tensor

    def __init__(self, channels: int, *, clamp: float = 4.0) -> None:
        super().__init__()
        if channels < 1 or not clamp > 0:
            raise ModelError(f"channels is {channels} and clamp {clamp}: expected both positive, such as 16 and 4.0")
        rotation, _ = torch.linalg.qr(torch.randn(channels, channels))
        permutation, lower, upper = torch.linalg.lu(rotation)
        diagonal = upper.diagonal()
        self.channels = channels
        self.clamp = float(clamp)
        self.lower = nn.Parameter(lower.tril(-1))
        self.upper = nn.Parameter(upper.triu(1))
        # Where the clamp lets it through, the matrix begins as the rotation itself.
        bounded = (diagonal.abs().log() / clamp).clamp(-0.999, 0.999)
        self.raw_logarithms = nn.Parameter(clamp * bounded.atanh())
        self.register_buffer("permutation", permutation.argmax(dim=1))
        self.register_buffer("signs", diagonal.sign())

    def extra_repr(self) -> str:
        """What is not a parameter."""
        return f"channels={self.channels}, clamp={self.clamp}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output, of the shape and dtype of the input."""
        with torch.autocast(x.device.type, enabled=False):
            lower, upper = self._triangles()
            matrix = (lower @ upper)[self.permutation]
            columns = self._columns(x)
            # Not "@", which takes another way, to other last bits, where no gradient is wanted.
            mixed = torch.bmm(matrix.expand(len(columns), -1, -1), columns)
            return mixed.reshape(x.shape).to(x.dtype)

    def inverse(self, output: torch.Tensor) -> torch.Tensor:
        """The input that made an output; two triangular systems are solved."""
        with torch.autocast(output.device.type, enabled=False):
            lower, upper = self._triangles()
            columns = self._columns(output)[:, self.permutation.argsort()]
            halfway = torch.linalg.solve_triangular(lower, columns, upper=False, unitriangular=True)
            solved: torch.Tensor = torch.linalg.solve_triangular(upper, halfway, upper=True)
            return solved.reshape(output.shape).to(output.dtype)

    def _triangles(self) -> tuple[torch.Tensor, torch.Tensor]:
        lower, upper, raw_logarithms, signs = (
            tensor.to(self._dtype) for tensor in (self.lower, self.upper, self.raw_logarithms, self.signs)
        )
        identity = torch.eye(self.channels, dtype=lower.dtype, device=lower.device)
        logarithms = self.clamp * (raw_logarithms / self.clamp).tanh()
        return lower.tril(-1) + identity, upper.triu(1) + (signs * logarithms.exp()).diag()

    @property
    def _dtype(self) -> torch.dtype:
        """What systems are solved in: float32 at least."""
        return torch.promote_types(self.lower.dtype, torch.float32)

    def _columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as ``(batch, channels, places)``."""
        if tensor.ndim < 2 or tensor.shape[1] != self.channels:
            raise InverseError(
                f"{type(self).__name__} takes {self.channels} channels, and got a tensor of shape {tuple(tensor.shape)}: expected "
                f"(batch, {self.channels}, ...). Give that shape, or construct it for another number of channels",
                stage=type(self).__name__,
            )
        return tensor.reshape(tensor.shape[0], self.channels, -1).to(self._dtype)
