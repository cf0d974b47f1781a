"""The peaks of the first steps under each plan, as the allocator saw them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_rotor.errors import ProfilingError
from lightning_rotor.memory.held import replaceable
from lightning_rotor.memory.optimizer_prediction import is_torchs_own
from lightning_rotor.planned.agreement import is_spread
from lightning_rotor.planned.loop import TrainingLoop
from lightning_rotor.planning.step_phases import Mark, PhaseKind, StepPhase
from lightning_rotor.private.torch_names import backward_number
from lightning_rotor.private.values import plain_parts, sizes_by_address
from lightning_rotor.profiling import StepMeter
from lightning_rotor.profiling.memory_recording import Recording

# Steps that are measured under each plan. Not all: a step of many small operators takes three times as long under
# torch's profiler, which alone shows what the CPU's allocator gives out.
_STEPS = 3
# And of an optimizer that is not torch's own: some take more in every fifth or tenth step.
_STEPS_OF_OTHERS = 12


class StepWatch:
    """Measures a few steps of training after each plan, then leaves training alone.

    Attributes:
        peak_bytes: Peak of the process in the step measured last, with what was there before it; None before the first.
        reserved_bytes: The most that a GPU's caching allocator had reserved in that step; None on the CPU.
        phases: Of that step, in order.
        sees_all: False if the step was measured from the end of its backward on only.
        is_exact: False if an optimizer has given back state that the allocator did not report, so that the peak of its
            step is an upper bound. The next step is exact: its state was made under the meter's eyes.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self.reserved_bytes: int | None = None
        self.phases: list[StepPhase] = []
        self.sees_all = True
        self.is_exact = True
        self._steps_left = 0
        self._meter: StepMeter | None = None
        self._on_cpu = False
        self._marks: list[Mark] = []
        self._base_bytes = 0
        # Gradients and optimizer state when the step began, with their addresses. The CPU's allocator reports a block
        # that goes only if it was watched when one was taken at that address, perhaps of another size (torch 2.14).
        # So their own sizes count, and those that go unreported are looked for at every mark.
        self._held = WeakTensorKeyDictionary()
        self._held_bytes: dict[int, int] = {}  # by address
        self._gone: list[set[int]] = []  # addresses of those that were gone when each phase began
        self._is_paused = False
        # The phase in which torch.compile has begun to compile.
        self._interrupted = Mark(PhaseKind.START)

    @property
    def due(self) -> bool:
        """True if the next step is to be measured."""
        return self._steps_left > 0

    @property
    def running(self) -> bool:
        """True while a step is being measured."""
        return self._meter is not None

    def renew(self, optimizers: Iterable[Optimizer]) -> None:
        """Measure the steps of some optimizers that follow, as there is a new plan."""
        self._steps_left = _STEPS if all(map(is_torchs_own, optimizers)) else _STEPS_OF_OTHERS

    def repeat(self) -> None:
        """Measure the next step, too."""
        # Steps that are still to be measured show it as well.
        self._steps_left = max(self._steps_left, 1)

    def give_up(self) -> None:
        """Measure no more steps under this plan."""
        self._steps_left = 0

    def start(
        self, loop: TrainingLoop, batch: Sequence[torch.Tensor], *, is_due: bool = True, sees_all: bool = True
    ) -> bool:
        """Begin with a step, at its very start or, when a plan is new, in its first forward.

        Not inside of a backward, see :meth:`drop`.

        Args:
            loop: The training.
            batch: Tensors of the step's batch.
            is_due: False for a sample step, which is left alone without a word if the profiler is busy.
            sees_all: False if the step is past its backward.
        Returns:
            True if the meter runs now. A profiler that is taken, or a device that cannot be measured, ends watching
            until the next plan; the other refusals are for this step.
        """
        on_cpu = loop.device().type == "cpu"
        # torch's profiler, which does not begin or end inside of a backward (``drop``). A GPU's allocator counts
        # without it.
        if on_cpu and backward_number() is not None:
            return False
        if on_cpu and loop.profiler_is_taken:
            self.give_up()  # torch has one profiler, and the user wants it
            return False
        if on_cpu and loop.may_take_new_buckets():
            return False  # the old ones, never measured, would not show as freed
        meter = StepMeter(loop.device())
        self._note_held(replaceable(loop.model, loop.optimizers()) if on_cpu else [])
        # FSDP gives parameters back that it has gathered, which are views of memory that nobody shows. So there,
        # whatever the allocator reports counts as well.
        unknown_too = is_spread(loop.model)
        try:
            meter.start(self._held_bytes, unknown_too=unknown_too)
        except ProfilingError as error:
            if is_due:
                self.give_up()
                loop.warn(f"RotorCallback cannot measure the peak of this step: {error}")
            return False
        self._meter = meter
        self._on_cpu = on_cpu
        self.sees_all = sees_all
        self._marks = [Mark(PhaseKind.START)]
        self._gone = [set()]
        self._base_bytes = loop.allocated_bytes(batch)
        return True

    def mark(self, kind: PhaseKind, *, call: int | None = None, optimizer: str = "") -> None:
        """Begin a phase of the step, if it is measured."""
        self.resume()
        if self._meter is None:
            return
        self._marks.append(Mark(kind, call, optimizer))
        alive: set[int] = set()
        for addresses in self._held.values():
            alive.update(addresses)
        self._gone.append(self._held_bytes.keys() - alive)
        self._meter.lap(kind.value)

    def begin_compiling(self) -> None:
        """``torch.compile`` begins to compile."""
        if self._meter is not None:
            self._interrupted = self._marks[-1]
            self.mark(PhaseKind.COMPILING)

    def end_compiling(self) -> None:
        """The phase that compiling has interrupted goes on."""
        if self._meter is not None and self._marks[-1].kind is PhaseKind.COMPILING:
            before = self._interrupted
            self.mark(before.kind, call=before.call, optimizer=before.optimizer)

    def stop(self) -> bool:
        """End with a step. True if there are new peaks."""
        self.resume()
        recording = self._end()
        if recording is None:
            return False
        self._steps_left -= 1
        self.phases = []
        self.is_exact = True
        unreported_bytes = 0
        for mark, gone, phase in zip(self._marks, self._gone, recording.phases, strict=True):
            before_bytes = unreported_bytes
            # What the allocator reported is in the recording's numbers already.
            unreported_bytes = sum(self._held_bytes[address] for address in gone - recording.given_back)
            if self.phases and self.phases[-1].is_optimizer_step and unreported_bytes > before_bytes:
                self.is_exact = False
            measured = StepPhase(mark, phase.start_bytes, phase.peak_bytes, phase.end_bytes)
            self.phases.append(measured.raised(self._base_bytes - unreported_bytes))
        # What compiling takes besides is no later step's.
        self.phases = [phase for phase in self.phases if phase.kind is not PhaseKind.COMPILING]
        self.peak_bytes = max(phase.peak_bytes for phase in self.phases)
        self.reserved_bytes = recording.reserved_bytes
        return True

    def pause(self) -> None:
        """Give torch's one profiler away, as a new input shape is about to be measured. Not inside of a backward."""
        if self._meter is None or self._is_paused or self._is_inside_of_backward():
            return
        self._meter.pause()
        self._is_paused = True

    def resume(self) -> None:
        """Go on after a pause, with what the process held when it began."""
        if self._meter is None or not self._is_paused:
            return
        self._is_paused = False
        try:
            self._meter.resume()
        except ProfilingError:
            # Somebody else's profiler has begun in between.
            self._meter = None
            self._held.clear()

    def drop(self) -> None:
        """Give torch's one profiler back, as training is over.

        Not inside of a backward, as where torch's checkpoint runs a module again: at its end torch sets back which
        profiler recorded when it began, and one that is over would seem to record for ever.
        """
        if not self._is_inside_of_backward():
            self._end()

    def _is_inside_of_backward(self) -> bool:
        """True if the CPU is measured, and a backward runs."""
        return self._on_cpu and backward_number() is not None

    def _end(self) -> Recording | None:
        """The recording of the meter; None if none runs."""
        if self._meter is None:
            return None
        recording = self._meter.stop()
        self._meter = None
        self._is_paused = False
        # Torch moves no parameter of a tensor subclass to which there is a weak reference, nor its gradient.
        self._held.clear()
        return recording

    def _note_held(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note the tensors that the step may give back."""
        self._held.clear()
        self._held_bytes = {}
        for tensor in tensors:
            sizes = sizes_by_address(plain_parts(tensor))
            self._held[tensor] = tuple(sizes)
            self._held_bytes |= sizes
