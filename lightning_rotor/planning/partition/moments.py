"""What a pipeline stage holds at most, for many plans of it in turn.

At every moment of a device's step the bytes are a sum, and how often each size counts depends on the order of the actions alone::

    static + own peak of the action + a · held + b · held by the last micro-batch + c · output + d · gradient of the input + e · gradients

So the moments are listed once, those that are alike once, and a plan's peak is the largest of a few sums. It is what
:func:`lightning_rotor.pipeline_simulator.device_peak_bytes` finds by running all actions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_rotor.pipeline_schedule import Action
from lightning_rotor.pipeline_simulator import PipelineStageLoad

_OWN = ("forward", "backward", "first_backward")
_NOTHING = 2 * len(_OWN)  # a moment between two actions


class Moments:
    """All moments of a stage that is alone on its device.

    Args:
        order: The stage's actions.
        lingering: See :func:`lightning_rotor.pipeline_lingering.lingering`; empty if nothing does.
        micro_batches: How many there are.
        gradients_exist: Gradients of parameters are there before the step.
    """

    def __init__(
        self, order: Sequence[Action], lingering: Sequence[int], *, micro_batches: int, gradients_exist: bool
    ) -> None:
        until = lingering or range(len(order))
        leaves = [[0, 0] for _ in order]
        output_until: dict[int, int] = {}
        held, there, gradients = [0, 0], [0, 0], int(gradients_exist)
        rows: set[tuple[int, ...]] = set()
        for place, action in enumerate(order):
            last = action.micro_batch == micro_batches - 1
            if action.work == "forward":
                rows.add((last, *held, *there, gradients))
                held[last] += 1
                output_until[action.micro_batch] = until[place]
            else:
                held[last] -= 1
                own = 1 if gradients else 2
                rows.add((2 * own + last, *held, *there, gradients))
                gradients = 1
                for kind, end in enumerate((output_until[action.micro_batch], until[place])):
                    if end > place:
                        there[kind] += 1
                        leaves[end][kind] += 1
            there = [now - gone for now, gone in zip(there, leaves[place], strict=True)]
            rows.add((_NOTHING, *held, *there, gradients))
        table = np.array(sorted(rows), np.int64)
        self._own, self._counts = table[:, 0], table[:, 1:]

    def peak_bytes(self, load: PipelineStageLoad) -> int:
        """Most that the stage holds."""
        both = (load.micro_batch, load.last or load.micro_batch)
        own = np.array([getattr(each, f"{name}_peak_bytes") for name in _OWN for each in both] + [0])
        sizes = [each.held_bytes for each in both]
        sizes += [load.output_bytes, load.input_gradient_bytes, load.gradient_bytes]
        return load.static_bytes + int((own[self._own] + self._counts @ np.array(sizes, np.int64)).max())
