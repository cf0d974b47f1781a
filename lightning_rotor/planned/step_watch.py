"""The peaks of the first steps under each plan, as the allocator saw them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_rotor.errors import ProfilingError
from lightning_rotor.memory.held import existing_gradient_bytes
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.profiling import StepMeter

_STEPS = 3
_PATIENCE = 8


class StepWatch:
    """Measures a few steps of training after each plan, then leaves training alone.

    Attributes:
        peak_bytes: The allocator's peak in the step measured last, with what was there before it; None before the
            first.
        reserved_bytes: What a GPU's caching allocator had reserved at most in that step; None on the CPU.
        backward_peak_bytes: The allocator's peak until the optimizer's step, the only part that a plan can change.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self.backward_peak_bytes = 0
        self._left = 0
        self._meter: StepMeter | None = None
        self._base_bytes = 0
        self._consecutive = False  # the step before this one was measured as well
        self._exact = True
        self._is_uneven = False  # more is taken in this step than is seen to be given back
        self._patience = _PATIENCE
        self._was_interrupted = False

    @property
    def due(self) -> bool:
        """True if the next step is to be measured."""
        return self._left > 0

    @property
    def running(self) -> bool:
        """True while a step is being measured."""
        return self._meter is not None

    def renew(self) -> None:
        """There is a new plan: measure the steps that follow."""
        self._left = _STEPS

    def give_up(self) -> None:
        """Measure no more steps under this plan."""
        self._left = 0

    def start(self, loop: TrainingLoop, batch: Sequence[torch.Tensor]) -> None:
        """Begin with a step, at its very start or, when a plan is new, in its first forward.

        Not after an interruption in the same step: what torch's profiler saw begin in one recording (the optimizer's
        step, around its closure) and end in another, it notes in memory that is gone, and the process crashes (torch
        2.14).
        """
        if self._was_interrupted:
            return
        on_cpu = loop.device.type == "cpu"
        if on_cpu and loop.profiler_is_taken:
            self.give_up()  # torch has one profiler, and the user wants it
            return
        meter = StepMeter(loop.device)
        try:
            meter.start()
        except ProfilingError as error:
            self.give_up()
            loop.warn(f"RotorCallback cannot measure the peak of this step: {error}")
            return
        self._meter = meter
        # The CPU's allocator knows only gradients that were made under its eyes; without that, their release goes
        # unseen.
        self._exact = self._consecutive or not on_cpu or not existing_gradient_bytes(loop.model)
        self._base_bytes = loop.allocated_bytes(batch)
        self._is_uneven = on_cpu and loop.may_take_new_buckets()

    def lap(self) -> None:
        """The backward is over: what the optimizer allocates from here on is nothing that a plan could change."""
        if self._meter is not None:
            self._meter.lap()

    def stop(self) -> bool:
        """End with a step. True if there are new peaks."""
        self._was_interrupted = False
        if self._meter is None:
            return False
        trace, self._meter = self._meter.stop(), None
        if self._is_uneven and self._patience > 0:
            # New buckets were seen to come, but the old ones, which nobody measured, not to go: another step shows the
            # peak.
            self._consecutive = True
            self._patience -= 1
            return False
        self._left -= 1
        self._consecutive = self._left > 0
        if self._exact:
            self.peak_bytes = self._base_bytes + trace.peak_bytes
            self.reserved_bytes = trace.reserved_bytes
            self.backward_peak_bytes = self._base_bytes + trace.lap_peak_bytes
        return self._exact

    def drop(self) -> None:
        """Give torch's one profiler back: a new input shape is about to be measured, or training is over."""
        if self._meter is not None:
            self._meter.stop()
            self._meter = None
            self._consecutive = False
            self._was_interrupted = True
