"""Joint graphs of small modules, as AOTAutograd hands them to a partitioner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from lightning_rotor.compiling.joint_graph import Stages, stages_of_joint_graph
from lightning_rotor.private.partitioning import parts_of

Seen = TypeVar("Seen")
WIDTH, ROWS = 16, 64


def perceptron(layers: int = 3) -> nn.Sequential:
    """Layers of equal widths: between two of them one activation is alive."""
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


class Residual(nn.Module):
    """Around each branch a second activation is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for branch in self.branches:
            x = x + nn.functional.gelu(branch(x))
        return x


def looked_at(net: nn.Module, look: Callable[[Stages], Seen]) -> Seen:
    """The answer of a function to the stages of a module's joint graph, while a compiler runs."""
    answers: list[Seen] = []

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        answers.append(look(stages_of_joint_graph(joint, parts_of(joint, num_fwd_outputs, ()))))
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def run_as_it_is(graph: Any, _: Any) -> Any:
        def run(args: list[Any]) -> Any:
            return fx.Interpreter(graph).boxed_run(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=run_as_it_is, bw_compiler=run_as_it_is, partition_fn=partition)
    torch.compile(net, backend=backend, dynamic=False)(torch.ones(ROWS, WIDTH))
    torch._dynamo.reset()
    (answer,) = answers
    return answer
