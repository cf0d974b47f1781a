"""What a model costs, stage by stage: the frozen measurements that every planner reads.

A chain is ``n`` stages, stage ``i`` mapping boundary ``i`` to boundary ``i + 1``::

    boundary 0 ──stage 0──► boundary 1 ──stage 1──► boundary 2  ...  ──stage n-1──► boundary n
    (the input, held                                                     (the output, held by
     by the caller)                                                       the caller as well)

Symbols of the papers (Beaumont et al., hal-02352969; their stage numbers start at 1):

    ======================  ===============================================================
    a_i                     ``StageCost.output_bytes``
    ā_i                     ``Option.saved_bytes`` plus the boundaries that the option saves
    δ_i                     ``Option.input_gradient_bytes`` of stage ``i + 1``
    u_f, u_b                ``Option.forward_seconds``, ``Option.backward_seconds``
    o_f, o_b                ``Option.forward_peak_bytes``, ``Option.backward_peak_bytes``
    ======================  ===============================================================

rotor has one number for the memory of a forward and one for a backward. Autograd has more cases, and the difference is
2-11 % of the peak, so they are measured apart:

* A stage runs *recorded* (its saved tensors stay), *discarded* (first pass of a segment: every saved tensor is dropped
  at once) or *replayed* (last stage of a segment in recomputation, which stops at its last saved tensor).
* A backward first runs operators that need no saved tensor, then unpacks the first one. If the stage ends a segment,
  recomputation happens at exactly that moment.
* The stage's input may die during its backward, or someone else holds it.

Every ``*_peak_bytes`` counts from what is allocated just before the operation starts, so a simulator only adds.

What a stage makes for the next one alone is the boundary between the two, its *link*. Whatever lives longer is a
:class:`Skip` and never part of a link: a shortcut, features that are concatenated later, a mask for every block::

    stage 0 ──link──► stage 1 ──link──► stage 2 ──link──► stage 3
        └──────────── skip, read by 1 and 3 ──────────────┘
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from lightning_rotor.errors import ScheduleError
from lightning_rotor.shown import Notebook
from lightning_rotor.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class BackwardPeaks:
    """Peaks of one backward from its first saved tensor on, by who holds the stage's input meanwhile.

    Attributes:
        plain_bytes: Nobody but the stage.
        segment_bytes: The enclosing segment, until the stage's last saved tensor is gone.
        held_bytes: Somebody else throughout.
        replayed_bytes: Nobody but the stage, whose saved tensors come from a recomputation: each is given up once it is
            read, before the engine reduces gradients to the shapes of what they belong to.
    """

    plain_bytes: int
    segment_bytes: int
    held_bytes: int
    replayed_bytes: int

    def __post_init__(self) -> None:
        if min(self.plain_bytes, self.segment_bytes, self.held_bytes, self.replayed_bytes) < 0:
            raise ScheduleError(f"{self}: sizes count bytes and are never negative")


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage so that it can be differentiated: what it holds until its backward, and what that costs.

    ``profiling/stage_profiler`` measures it, ``simulator`` says what a schedule with it takes, ``planning`` chooses
    among several, and ``execution/passes`` (``run_stage``) runs it.

    Attributes:
        name: ``"keep"`` saves what autograd saves; ``"budget 0.3"`` is a compiled stage under another activation memory
            budget; ``"invert"`` and ``"invert, fused"`` save the output alone.
        saved_bytes: Storages alive for the backward: not the stage's input or output, parameters or buffers. For an
            option that inverts, what its first pass remembers (generators, buffers), in a segment or not.
        saved_input_bytes: The part of the input boundary that autograd saves (0 for Dropout, all of it for Linear).
        saved_output_bytes: The part of the output boundary that autograd saves (all of it for Tanh).
        saved_tensors: Number of tensors saved; 0 means that the backward needs no forward at all.
        forward_peak_bytes: Peak of the recorded forward, output included.
        replay_peak_bytes: Peak up to the last saved tensor, where the last stage of a segment stops.
        unpack_peak_bytes: Peak of the backward before it reads a saved tensor, gradient of the output included.
        unpack_bytes: What the backward holds when it reads the first saved tensor, gradient of the output included.
        backward_peak_bytes: Peak of the backward from there on, if nobody but this stage holds its input.
        backward_segment_peak_bytes: That peak if the enclosing segment holds the input, until the stage's last saved
            tensor is gone.
        backward_held_peak_bytes: That peak if somebody holds the input throughout.
        input_gradient_bytes: Gradient of the stage's input, left when the backward is done.
        parameter_gradient_bytes: Gradients of parameters, which appear during the backward and stay.
        forward_seconds: Recorded forward.
        replay_seconds: Recorded forward up to the last saved tensor.
        backward_seconds: Backward, without any recomputation.
        saved_skips: Skips that autograd saves for this stage: numbers in :attr:`Chain.skips`.
        saved_state_bytes: Buffers among ``StageCost.state_bytes`` that autograd saves (the index of a lookup, say). A
            plain forward saves the module's own at no cost; a recomputation works on copies, which stay until the
            backward.
        accumulating: Peaks of the backward where each new gradient is added to an existing one and freed at once. None
            if they are those of a backward whose gradients pile up.
        discard_peak_bytes: Peak of the forward whose saved tensors are dropped, output included. None if it is the
            stage's.
        inverts: The stage drops its input when it has run, whoever saved it, and rebuilds it from the output in the
            backward. The peaks of its backward count the rebuilt input: plain is where it dies with the stage, held
            where the stage before has saved it.
        fused: The backward is the module's own ``reversible_backward``, which rebuilds the input at once.
        backward_replayed_peak_bytes: ``backward_peak_bytes`` where the saved tensors come from a recomputation, which
            gives each up once it is read. None if that makes no difference.
        needs_exact_output: The backward reads the saved output to the bit, as ReLU's asks where it is zero. So the next
            stage must not be inverted. Measured stages say so of every saved output.
    """

    name: str
    saved_bytes: int
    saved_input_bytes: int
    saved_output_bytes: int
    saved_tensors: int
    forward_peak_bytes: int
    replay_peak_bytes: int
    unpack_peak_bytes: int
    unpack_bytes: int
    backward_peak_bytes: int
    backward_segment_peak_bytes: int
    backward_held_peak_bytes: int
    input_gradient_bytes: int
    parameter_gradient_bytes: int
    forward_seconds: float
    replay_seconds: float
    backward_seconds: float
    saved_skips: tuple[int, ...] = ()
    saved_state_bytes: int = 0
    accumulating: BackwardPeaks | None = None
    discard_peak_bytes: int | None = None
    inverts: bool = False
    fused: bool = False
    needs_exact_output: bool = False
    backward_replayed_peak_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_costs(self)
        # It drops the input, and rebuilds it from the output alone.
        if self.inverts and (self.saved_input_bytes or self.saved_skips or not self.saved_tensors):
            raise ScheduleError(
                f"option {self.name!r} inverts its stage: expected it to save the output, and neither input nor skips"
            )
        if self.fused and not self.inverts:
            raise ScheduleError(f"option {self.name!r} has a fused backward: expected it to invert its stage")
        if self.needs_exact_output and not self.saved_output_bytes:
            raise ScheduleError(f"option {self.name!r} needs its exact output: expected it to save some of it")

    @property
    def seconds(self) -> float:
        """Seconds of recorded forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def again_seconds(self) -> float:
        """Least seconds that its backward spends on a forward where it ends a segment."""
        if not self.saved_tensors:
            return 0.0
        # Timed by itself, a part of the forward may seem slower than the whole.
        return min(self.replay_seconds, self.forward_seconds)

    @property
    def kept_bytes(self) -> int:
        """All that it saves, boundaries included."""
        return self.saved_bytes + self.saved_input_bytes + self.saved_output_bytes

    def backward_peaks(self, *, gradients_exist: bool) -> BackwardPeaks:
        """Peaks of the backward, where parameters have gradients already or where they do not."""
        # Where they were not measured, those of a backward whose gradients pile up are as high or higher.
        if gradients_exist and self.accumulating is not None:
            return self.accumulating
        replayed_bytes = self.backward_replayed_peak_bytes
        if replayed_bytes is None:
            replayed_bytes = self.backward_peak_bytes
        return BackwardPeaks(
            self.backward_peak_bytes,
            self.backward_segment_peak_bytes,
            self.backward_held_peak_bytes,
            replayed_bytes,
        )


@dataclass(frozen=True, slots=True)
class Skip:
    """A storage that outlives the stage behind the one that made it.

    Attributes:
        born: Number of the stage that makes it; -1 for a part of the chain's input, which the caller holds.
        uses: Numbers of the stages that read it, rising; all of them are larger than ``born``.
        size_bytes: Its size; 0 for a part of the chain's input.
        gradient_bytes: For each reader, what holds the gradient once the reader's backward is done, until that of
            ``born``; 0 if there is none. Readers that concatenate leave slices of a larger gradient, which stays alive.
        in_output: It is also a part of the chain's output, so the caller holds it to the end of the step.
    """

    born: int
    uses: tuple[int, ...]
    size_bytes: int
    gradient_bytes: tuple[int, ...]
    in_output: bool = False

    def __post_init__(self) -> None:
        if not self.uses or list(self.uses) != sorted(set(self.uses)) or not -1 <= self.born < self.uses[0]:
            raise ScheduleError(
                f"a skip from stage {self.born} to {self.uses}: expected one or more later stages, rising"
            )
        if len(self.gradient_bytes) != len(self.uses):
            raise ScheduleError(
                f"a skip with {len(self.uses)} readers and {len(self.gradient_bytes)} gradients: expected one for each"
            )
        if min(self.size_bytes, *self.gradient_bytes) < 0:
            raise ScheduleError("sizes of a skip count bytes and are never negative")
        if self.born < 0 < self.size_bytes:
            raise ScheduleError("the caller holds the chain's input: expected a skip from stage -1 to take 0 bytes")

    @property
    def last_use(self) -> int:
        """Number of the last stage that reads it."""
        return self.uses[-1]


@dataclass(frozen=True, slots=True)
class StageCost:
    """Costs of one stage.

    Attributes:
        name: Where the stage is in the user's model, such as ``"layer1.0"``.
        output_bytes: Storage of the stage's link: of its output, what the next stage alone reads. For the last stage,
            what it makes anew.
        discard_peak_bytes: Peak of the forward whose saved tensors are dropped, output included; the largest of any
            option.
        discard_seconds: Duration of that forward.
        pinned_bytes: What stays allocated after that forward besides the output, because the stage's graph holds it in
            a way that no checkpoint can drop (a tensor stored on an autograd context).
        draws_random: The stage reads a random number generator, whose state a segment must then restore.
        state_bytes: Buffers whose values a segment remembers, to recompute from what its first pass saw.
        recomputable: Running the stage twice gives the same bits; otherwise it must be kept.
        options: Ways to keep the stage; the first one is ``"keep"``.
        takes: Tensors that it reads, such as ``"float32[4, 64, 8, 8]"``; empty for stages that were not measured.
        not_inverted: Why no option inverts it although its module has an inverse; empty if there is nothing to say.
        waiting_gradient_bytes: Gradients of parameters that it or a later stage shares with an earlier one. Once its
            backward is done they wait in autograd's engine for those of the earlier stage, even where all are added to
            existing gradients.
        skip_gradient_bytes: Gradients of skips, left by later readers, that the peaks of the backward count. None if
            they are as large as the skips.
    """

    name: str
    output_bytes: int
    discard_peak_bytes: int
    discard_seconds: float
    options: tuple[Option, ...]
    pinned_bytes: int = 0
    draws_random: bool = False
    state_bytes: int = 0
    recomputable: bool = True
    takes: tuple[str, ...] = ()
    not_inverted: str = ""
    waiting_gradient_bytes: int = 0
    skip_gradient_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_costs(self)
        if not self.options:
            raise ScheduleError(f"stage {self.name!r} has no option: expected at least one way to keep it")
        # Plain training is the measure of overheads, and what every schedule may fall back to.
        if self.options[0].inverts:
            raise ScheduleError(
                f"the first option of stage {self.name!r} inverts it: expected the one that keeps what autograd saves"
            )
        # The stage's own stands for options without one, so it must not be less than any.
        for option in self.options:
            if self.discard_peak_of(option) > self.discard_peak_bytes:
                raise ScheduleError(
                    f"stage {self.name!r}: discard_peak_bytes of option {option.name!r} is "
                    f"{option.discard_peak_bytes}, expected at most the stage's own {self.discard_peak_bytes}"
                )

    @property
    def keep(self) -> Option:
        """The option that saves what plain autograd saves."""
        return self.options[0]

    def discard_peak_of(self, option: Option) -> int:
        """Peak of the forward whose saved tensors are dropped, under an option."""
        if option.discard_peak_bytes is None:
            return self.discard_peak_bytes
        return option.discard_peak_bytes


class _Fingerprinted:
    """Room for a fingerprint that is no field: neither compared, nor printed, nor written to files."""

    __slots__ = ("_fingerprint",)


@dataclass(frozen=True, slots=True)
class Chain(Notebook, _Fingerprinted):
    """A model as a planner sees it: the costs of its stages for one input signature on one device.

    Attributes:
        stages: In the order of the forward.
        input_bytes: Storage of the chain's input. The caller holds it, so no peak counts it.
        rng_state_bytes: Memory *on the measured device* that a segment takes to remember the state of the random number
            generators.
        segment_seconds: Host time that one run of a segment adds, forward and recomputation together.
        device: Where it was measured, such as ``"cpu"`` or ``"cuda:0"``.
        skips: What outlives a link.
    """

    stages: tuple[StageCost, ...]
    input_bytes: int = 0
    rng_state_bytes: int = 0
    segment_seconds: float = 0.0
    device: str = "cpu"
    skips: tuple[Skip, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages:
            raise ScheduleError("the chain has no stages: expected at least one")
        for skip in self.skips:
            if skip.last_use >= len(self.stages):
                raise ScheduleError(
                    f"a skip is read by stage {skip.last_use}, but the last one of this chain is {len(self.stages) - 1}"
                )
        numbers = range(len(self.skips))
        for stage in self.stages:
            for option in stage.options:
                if any(number not in numbers for number in option.saved_skips):
                    raise ScheduleError(f"stage {stage.name!r} saves a skip that the chain does not have")
        if min(self.input_bytes, self.rng_state_bytes) < 0:
            raise ScheduleError("sizes of a chain count bytes and are never negative")

    def __len__(self) -> int:
        return len(self.stages)

    def __repr__(self) -> str:
        kept = format_bytes(sum(stage.keep.kept_bytes for stage in self))
        span = f"{self.names[0]!r} to {self.names[-1]!r} on {self.device}"
        return f"<Chain of {len(self)} stages, {span}: {format_seconds(self.step_seconds)} a step, saves {kept}>"

    def __iter__(self) -> Iterator[StageCost]:
        return iter(self.stages)

    @property
    def names(self) -> tuple[str, ...]:
        """Where the stages are in the user's model."""
        return tuple(stage.name for stage in self.stages)

    @property
    def parameter_gradient_bytes(self) -> int:
        """Gradients that one backward of the whole chain leaves."""
        return sum(stage.keep.parameter_gradient_bytes for stage in self.stages)

    @property
    def step_seconds(self) -> float:
        """Forward and backward of the chain without any recomputation."""
        return sum(stage.keep.seconds for stage in self.stages)

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay for the backward if nothing is recomputed."""
        return sum(stage.output_bytes + stage.keep.saved_bytes for stage in self.stages)

    @property
    def always_bytes(self) -> int:
        """Bytes alive in every backward, whatever the schedule: the output, and what no checkpoint can free."""
        always_bytes = self.stages[-1].output_bytes
        for stage in self.stages:
            always_bytes += stage.pinned_bytes
        for skip in self.skips:
            if skip.in_output:
                always_bytes += skip.size_bytes
        return always_bytes

    def passing_gradient_bytes(self, stage: int) -> int:
        """Gradients of skips that are alive during the backward of a stage which neither makes nor reads them."""
        passing_bytes = 0
        for skip in self.skips:
            # The peaks of a stage that makes or reads a skip count its gradient themselves.
            if not skip.born < stage < skip.last_use or stage in skip.uses:
                continue
            # Backwards come from behind, so the next reader is the last to have left something.
            for use, size_bytes in zip(skip.uses, skip.gradient_bytes, strict=True):
                if use > stage:
                    passing_bytes += size_bytes
                    break
        return passing_bytes

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits for stages, boundaries, skips and options with their sizes.

        The same in every process: timings and what kernels take for themselves are left out.
        """
        # Each watched step asks three times, and spelling 40 stages out takes 2 ms.
        fingerprint: str | None = getattr(self, "_fingerprint", None)
        if fingerprint is None:
            text = repr((self.device, self.identity))
            fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
            # Chains are frozen, so what follows from the fields stays true.
            object.__setattr__(self, "_fingerprint", fingerprint)
        return fingerprint

    @property
    def identity(self) -> tuple[StageIdentity, ...]:
        """The model's part of each stage: everything that the fingerprint names."""
        stages = []
        for number, stage in enumerate(self.stages):
            options = [(option.name, option.saved_bytes) for option in stage.options]
            # With the stage that makes them, as a file says what differs stage by stage.
            skips = [(skip.uses, skip.size_bytes) for skip in self.skips if skip.born == number]
            identity = StageIdentity(stage.name, stage.takes, stage.output_bytes, tuple(options), tuple(skips))
            stages.append(identity)
        return tuple(stages)


@dataclass(frozen=True, slots=True)
class StageIdentity:
    """A stage as far as plans depend on the model and its input; options and skips with their bytes."""

    name: str
    takes: tuple[str, ...]
    output_bytes: int
    options: tuple[tuple[str, int], ...]
    skips: tuple[tuple[tuple[int, ...], int], ...]


def _check_costs(costs: Option | StageCost) -> None:
    """Check that sizes are whole, non-negative bytes, and durations finite and not negative."""
    # By the names of fields, so that a new cost needs no line here.
    for field in fields(costs):
        value = getattr(costs, field.name)
        # Some figures are only told where they differ from others.
        if value is None and field.default is None:
            continue
        if field.name.endswith(("_bytes", "_tensors")) and (not isinstance(value, int) or value < 0):
            raise ScheduleError(
                f"{type(costs).__name__} {costs.name!r}: {field.name} is {value!r}, "
                "expected a whole number that is not negative"
            )
        if field.name.endswith("_seconds") and not (math.isfinite(value) and value >= 0):
            raise ScheduleError(
                f"{type(costs).__name__} {costs.name!r}: {field.name} is {value!r}, "
                "expected a finite duration that is not negative"
            )
