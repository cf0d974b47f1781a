"""Parameters that several stages share: the engine sums their gradients before it hands them on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_rotor.sequential import Stage
from lightning_rotor.units import in_blocks


def waiting_gradient_bytes(stages: Sequence[Stage], block_bytes: int) -> tuple[int, ...]:
    """For each stage, gradients of tied parameters that wait after its backward for what an earlier stage adds to them.

    Autograd gives a parameter the sum of its gradients, once: the first of them stays in the engine until the last is there::

        backward    stage 5 ───► 4 ───► 3 ───► 2 ───► 1          stages 1 and 5 share a weight
                    └──── its gradient waits ────────┘ then is added to the one that exists, and freed

    Where no gradient exists, the sum becomes it, so that nothing waits that would not stay anyway.
    """
    readers: dict[int, list[int]] = {}
    parameters: dict[int, torch.Tensor] = {}
    for number, stage in enumerate(stages):
        for parameter in stage.parameters():
            if parameter.requires_grad:
                parameters[id(parameter)] = parameter
                readers.setdefault(id(parameter), []).append(number)
    waiting = [0] * len(stages)
    for key, numbers in readers.items():
        for number in range(min(numbers) + 1, max(numbers) + 1):
            waiting[number] += in_blocks(parameters[key].nbytes, block_bytes)
    return tuple(waiting)
