"""A pipeline stage's part of a chain: the values that cross its ends, and its run without a plan."""

from __future__ import annotations

import torch
from torch import nn

from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.pipeline.layouts import Layout
from lightning_rotor.pipeline.part import Part, PipelineStep, crossing


def test_parts_in_a_row_are_the_whole() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    stages = sequentialize(net, (x,)).stages
    first, second = Part(0, stages, (0, 0)), Part(1, stages, (1, len(stages) - 1))
    with torch.no_grad():
        (between,) = first.run([x])
        (output,) = second.run([between])
        assert torch.equal(between, net[0](x))
        assert torch.equal(output, net(x))


def test_a_skip_crosses_every_cut_up_to_its_reader() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            early = self.a(x)
            return self.c(torch.tanh(self.b(torch.tanh(early)))) + early

    net, x = Net(), torch.randn(5, 3)
    stages = sequentialize(net, (x,)).stages
    numbers = [len(crossing(stages, boundary)) for boundary in range(len(stages) + 1)]
    assert numbers[0] == numbers[-1] == 1
    assert max(numbers) == 2
    middle = numbers.index(2)
    with torch.no_grad():
        values = Part(0, stages, (0, middle - 1)).run([x])
        (output,) = Part(1, stages, (middle, len(stages) - 1)).run(values)
        assert torch.equal(output, net(x))


def test_outputs_of_a_micro_batch_are_kept_for_whoever_asks() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    part = Part(0, sequentialize(net, (x,)).stages, (0, 0))
    with torch.no_grad():
        part.step = PipelineStep(((Layout.of([x], "input"), Layout.of([net(x)], "output")),))
        part.outputs = {}
        (made,) = part(x, micro_batch=0)
    assert torch.equal(made, net(x))
    assert torch.equal(part.outputs[0][0], made)
