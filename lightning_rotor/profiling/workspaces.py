"""Workspaces of CUDA's matrix products, taken before anything is measured or planned.

cuBLAS and cuBLASLt ask torch's allocator for a workspace at the first product of each thread and stream, and keep it:
32 MiB on Hopper, some 8 MiB before, and 1 MiB of cuBLASLt's own where torch does not share one between the two
(torch 2.11, or ``TORCH_CUBLASLT_UNIFIED_WORKSPACE=0``). Taken inside of a step, it would be counted as a stage's in one
measurement and missing in the next. autograd has a thread of its own for each GPU, where recomputed layers run, too: a
first step whose plan recomputes was 1 MiB above its prediction on an H200, since the forward's products had been run by
the main thread alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lightning_rotor.devices import CUDA, kind_of
from lightning_rotor.errors import BudgetError

_ROWS = 16
"""Of the matrices that are multiplied: torch asks cuBLASLt for a product with a bias if no side has length 1."""


class _InBothThreads(torch.autograd.Function):
    """The products of a layer, in the thread of the forward and in that of the backward."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor) -> torch.Tensor:
        # Not saved: hooks of a user's for saved tensors must not see it.
        ctx.matrix = matrix
        return _products(matrix)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        # A kernel first: cuBLAS warns if the thread that calls it has used the device for nothing yet.
        given = gradient.clone()
        return given + _products(ctx.matrix)


def take_workspaces(device: torch.device) -> None:
    """Let CUDA's matrix products take the workspaces that they keep, in this thread and in autograd's.

    Args:
        device: Where a module is about to be measured. Nothing happens on a CPU, which has no such workspaces.

    Raises:
        BudgetError: The device has no room even for these.
    """
    if kind_of(device) is not CUDA:
        return
    try:
        # Autocast would hold what it casts in its cache.
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            matrix = torch.ones(_ROWS, _ROWS, device=device, requires_grad=True)
            torch.autograd.grad(_InBothThreads.apply(matrix).sum(), matrix)
    except torch.OutOfMemoryError as error:
        held_bytes = CUDA.allocated_bytes(device)
        raise BudgetError(
            f"{device} has no room left for the workspaces of matrix products, before any layer runs: expected some "
            f"80 MiB beside the {held_bytes:,} bytes that this process holds there. Free memory of the device, or use "
            "a smaller model",
            budget_bytes=held_bytes,
            minimum_bytes=held_bytes + 1,
            stage="workspaces",
        ) from error


def _products(matrix: torch.Tensor) -> torch.Tensor:
    """One product by cuBLAS, one with a bias by cuBLASLt."""
    # A bias makes torch choose cuBLASLt.
    return matrix @ matrix + F.linear(matrix, matrix, matrix[0])
