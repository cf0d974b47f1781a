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
        count = len(order)
        is_forward = np.array([action.work == "forward" for action in order])
        numbers = np.array([action.micro_batch for action in order])
        last = numbers == micro_batches - 1
        until = np.array(lingering) if lingering else np.arange(count)
        # What each action adds and takes, as changes of levels: held by usual micro-batches and by the last, outputs, gradients of the input.
        changes = np.zeros((count, 4), np.int64)
        changes[np.arange(count), last.astype(int)] = np.where(is_forward, 1, -1)
        backward_at, forward_at = np.zeros(micro_batches, np.int64), np.zeros(micro_batches, np.int64)
        backward_at[numbers[~is_forward]] = np.flatnonzero(~is_forward)
        forward_at[numbers[is_forward]] = np.flatnonzero(is_forward)
        for kind, ends in ((2, until[forward_at]), (3, until[backward_at])):
            stays = ends > backward_at
            np.add.at(changes[:, kind], backward_at[stays], 1)
            np.add.at(changes[:, kind], ends[stays], -1)
        after = np.cumsum(changes, axis=0)
        meanwhile = np.concatenate((np.zeros((1, 4), np.int64), after[:-1]))
        # While a micro-batch goes back, its own peak counts what it held; what lingers of it begins behind that.
        meanwhile[~is_forward, :2] = after[~is_forward, :2]
        first_backward = count if gradients_exist else int(np.flatnonzero(~is_forward)[0])
        own = np.where(is_forward, 0, np.where(np.arange(count) == first_backward, 2, 1)) * 2 + last
        with_gradients = np.arange(count) > first_backward if not gradients_exist else np.ones(count, bool)
        rows = np.column_stack((own, meanwhile, with_gradients))
        levels = np.column_stack(
            (np.full(count, _NOTHING), after, with_gradients | (np.arange(count) == first_backward))
        )
        table = np.concatenate((rows, levels)).astype(np.int64)
        table = table[np.lexsort(table.T)]
        table = table[np.concatenate(([True], (np.diff(table, axis=0) != 0).any(axis=1)))]
        self._own, self._counts = table[:, 0], table[:, 1:]

    def peak_bytes(self, load: PipelineStageLoad) -> int:
        """Most that the stage holds."""
        both = (load.micro_batch, load.last or load.micro_batch)
        own = np.array([getattr(each, f"{name}_peak_bytes") for name in _OWN for each in both] + [0])
        sizes = [each.held_bytes for each in both]
        sizes += [load.output_bytes, load.input_gradient_bytes, load.gradient_bytes]
        return load.static_bytes + int((own[self._own] + self._counts @ np.array(sizes, np.int64)).max())
