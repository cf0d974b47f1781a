"""Matrix products take their workspaces before anything is measured: in the forward's thread and in autograd's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_device import environment, missing
from tests.grids import few

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import torch
import torch.nn.functional as F
from lightning_rotor.profiling.cuda_recording import await_autograd
from lightning_rotor.profiling.workspaces import take_workspaces


class Recomputed(torch.autograd.Function):
    # A layer that runs again in autograd's thread.
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, bias = ctx.saved_tensors
        F.gelu(F.linear(x, weight, bias))
        return gradient @ weight, gradient.t() @ x, gradient.sum(0)


device = torch.device("cuda", 0)
take_workspaces(device)
await_autograd(device)
taken = torch.cuda.memory_allocated()
x, weight, bias = torch.ones(64, 32, device=device), torch.ones(48, 32, device=device), torch.ones(48, device=device)
weight.requires_grad_()
Recomputed.apply(x, weight, bias).sum().backward()
del x, weight, bias
await_autograd(device)
print(taken, torch.cuda.memory_allocated())
"""


@pytest.mark.skipif(bool(missing()), reason="no simulated device here")
@pytest.mark.parametrize("shared", few(["0", "1"], "1"))  # as torch 2.11 does, and as later ones do
def test_a_layer_that_runs_again_takes_no_further_workspace(shared: str) -> None:
    environ = environment() | {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": shared}
    command = [sys.executable, "-c", PROGRAM]
    said = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout
    taken, after = map(int, said.split())
    assert taken >= 2 * 4 * 2**20
    assert after == taken


def test_nothing_happens_on_a_cpu() -> None:
    import torch

    from lightning_rotor.profiling.workspaces import take_workspaces

    take_workspaces(torch.device("cpu"))
