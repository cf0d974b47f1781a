"""What the programs of this folder share: the peak of each step, and the comparison of two trainings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_rotor import parse_bytes
from lightning_rotor.profiling import StepMeter


@dataclass
class Training:
    """Weights at the end of a training, and the most that each of its steps but the first allocated, in bytes."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    peaks: list[int] = field(default_factory=list)
    recomputes: bool = False
    begun: bool = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measures a forward with its backward: activations and new gradients, as the limit of ``Checkpointable`` does."""
        if not self.begun:  # the first call measures the model itself, which no other meter may do at once
            self.begun = True
            yield
            return
        meter = StepMeter(torch.device("cpu"))
        meter.start()
        yield
        self.peaks.append(meter.stop().peak_bytes)

    def ends(self, model: nn.Module) -> Training:
        """The training itself, with the weights of its model."""
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.recomputes = bool(getattr(model, "plan", None) and model.plan.recomputed)
        return self


def compare(before: Callable[[], Training], after: Callable[[], Training], limit: str) -> None:
    """Print what both trainings took, and whether they ended with the same bits."""
    one, other = before(), after()
    same = one.weights.keys() == other.weights.keys() and all(
        torch.equal(value, other.weights[name]) for name, value in one.weights.items()
    )
    kept = max(other.peaks) <= parse_bytes(limit)
    print(f"peak before: {max(one.peaks) / 2**20:.2f} MiB")
    print(f"peak after:  {max(other.peaks) / 2**20:.2f} MiB, limit {limit}: {'kept' if kept else 'EXCEEDED'}")
    print(f"same weights, bit for bit: {'yes' if same else 'NO'}")
