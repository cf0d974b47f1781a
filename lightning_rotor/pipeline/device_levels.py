"""Levels of memory on a device of a pipeline, during each of its actions.

Memory is a product: how many of each thing there are (a matrix, from the order alone), times the bytes of each thing
(a vector, from the loads). The things of a stage, in the matrix's columns: usual micro-batches in flight, the last
micro-batch, outputs and gradients of inputs that linger, gradients of parameters.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_rotor.pipeline.pipeline_schedule import WORKS, Integers
from lightning_rotor.pipeline.stage_loads import Loads

# Columns of a stage. The first two are micro-batches in flight: usual ones, and the last.
_IN_FLIGHT, _OUTPUTS, _INPUT_GRADIENTS, _GRADIENTS, _COLUMNS = slice(0, 2), 2, 3, 4, 5
# Peaks of actions.
_FORWARD, _BACKWARD, _FIRST_BACKWARD = range(3)
_PEAKS = ("forward_peak_bytes", "backward_peak_bytes", "first_backward_peak_bytes")


class DeviceLevels:
    """Memory of one device during its actions, for many loads in turn; it does not depend on when they run.

    Args:
        order: The device's rows of :func:`.orders`.
        lingering: See :func:`.lingering`; by default nothing lingers.
        micro_batches: Their number.
    """

    def __init__(
        self,
        order: Integers,
        lingering: Integers | None = None,
        *,
        micro_batches: int,
    ) -> None:
        stages, stage = np.unique(order[:, 0], return_inverse=True)
        self.stages: list[int] = stages.tolist()
        count, rows = len(order), np.arange(len(order))
        number = order[:, 2]
        is_forward = order[:, 1] == WORKS.index("forward")
        is_last = (number == micro_batches - 1).astype(np.int64)
        until = rows if lingering is None else lingering
        backward = np.flatnonzero(~is_forward)
        # The row of a micro-batch's forward in a stage.
        forward_of = np.zeros((len(stages), micro_batches), np.int64)
        forward_of[stage[is_forward], number[is_forward]] = rows[is_forward]
        own_forward = forward_of[stage[backward], number[backward]]

        # What each action brings and takes away.
        changes = np.zeros((count, len(stages), _COLUMNS), np.int64)
        changes[rows, stage, is_last] = np.where(is_forward, 1, -1)
        # Both begin to linger with the backward, but an output ends where its forward's message is let go.
        lingering_ends = (_OUTPUTS, until[own_forward]), (_INPUT_GRADIENTS, until[backward])
        for column, end in lingering_ends:
            # What lingers of a micro-batch begins when its backward is done: before, it is in flight.
            lingers = end > backward
            owners = stage[backward[lingers]]
            changes[backward[lingers], owners, column] += 1
            # Several may end at once, and ``-=`` would count one of them.
            np.add.at(changes[..., column], (end[lingers], owners), -1)
        _, firsts = np.unique(stage[backward], return_index=True)
        first_backward = backward[firsts]
        changes[first_backward, stage[first_backward], _GRADIENTS] = 1

        after = np.cumsum(changes, axis=0)
        meanwhile = np.concatenate((np.zeros_like(after[:1]), after[:-1]))
        # While a micro-batch goes back, its own peak counts what it held.
        meanwhile[backward, :, _IN_FLIGHT] = after[backward, :, _IN_FLIGHT]
        self._after = after.reshape(count, -1).astype(np.int32)
        self._meanwhile = meanwhile.reshape(count, -1).astype(np.int32)
        # By action, the place of its own peak in the list that ``levels`` makes.
        peak = np.where(is_forward, _FORWARD, _BACKWARD)
        peak[first_backward] = _FIRST_BACKWARD
        self._own = (stage * len(_PEAKS) + peak) * 2 + is_last

    def peak_bytes(self, loads: Loads, results_bytes: int = 0) -> int:
        """Most bytes that the device holds."""
        # Behind the step, gradients wait for the optimizer, beside results for everybody.
        behind_bytes = results_bytes
        for stage in self.stages:
            load = loads[stage]
            behind_bytes += load.static_bytes + load.gradient_bytes
        most_bytes, _ = self.levels(loads)
        return max(behind_bytes, int(most_bytes.max(initial=0)))

    def levels(self, loads: Loads) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """By action, the most that the device holds during it, and what it holds afterwards."""
        # In the order of the matrix's columns, and of the places in ``_own``.
        own: list[int] = []
        sizes: list[int] = []
        static_bytes = 0
        for stage in self.stages:
            load = loads[stage]
            static_bytes += load.static_bytes
            for name in _PEAKS:
                own += [getattr(micro_batch, name) for micro_batch in load.both]
            sizes += [micro_batch.held_bytes for micro_batch in load.both]
            sizes += [load.output_bytes, load.input_gradient_bytes, load.gradient_bytes]
        column = np.array(sizes, np.int64)
        own_peaks = np.array(own, np.int64)[self._own]
        after = static_bytes + self._after @ column
        peaks = static_bytes + own_peaks + self._meanwhile @ column
        return np.maximum(peaks, after), after
