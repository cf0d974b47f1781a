"""Least bytes and seconds of each stage of a chain, whatever the execution: the terms that :mod:`.bounds` adds up."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass

from lightning_rotor.chain import Chain, Option, StageCost


@dataclass(frozen=True, slots=True)
class LeastWay:
    """One option of a stage, in the least bytes and seconds that it takes.

    Attributes:
        saves: It saves tensors, so that its backward needs a forward.
        set_bytes: Saved set without input and output.
        input_bytes: Saved part of the input.
        output_bytes: Saved part of the output; 0 for the last stage, since the caller holds it.
        peak_bytes: Peak of the backward, whoever holds its input.
        held_peak_bytes: Peak of the backward if the stage before saved its input.
        kept_seconds: Set and backward, beyond a run that gives the output.
        last_seconds: Set and backward alone.
        backward_seconds: Backward alone.
        drops_input: The backward rebuilds the input, so beside the set only a held input takes memory.
    """

    saves: bool
    set_bytes: int
    input_bytes: int
    output_bytes: int
    peak_bytes: int
    held_peak_bytes: int
    kept_seconds: float
    last_seconds: float
    backward_seconds: float
    drops_input: bool = False

    def saved_input_bytes(self, input_bytes: int, saved_before: int) -> int:
        """Bytes of the input beside the set if nobody holds it; the stage before saves ``saved_before`` of them."""
        if self.drops_input:
            return 0
        return min(input_bytes, saved_before + self.input_bytes)

    def moment_bytes(self, input_bytes: int, saved_before: int) -> int:
        """Bytes of the stage when its backward finishes, gradients included."""
        peak = self.held_peak_bytes if saved_before else self.peak_bytes
        return self.set_bytes + self.output_bytes + self.saved_input_bytes(input_bytes, saved_before) + peak


@dataclass(frozen=True, slots=True)
class LeastStage:
    """One stage.

    Attributes:
        input_bytes: Bytes of its input; 0 for the chain's.
        first_seconds: A run that gives the output.
        recomputable: It may run twice.
        ways: Its options.
        room_bytes: For its backward and everything that is kept and held by then.
        forward_room_bytes: For everything that is kept and held during its first run, its own input included.
    """

    input_bytes: int
    first_seconds: float
    recomputable: bool
    ways: tuple[LeastWay, ...]
    room_bytes: int
    forward_room_bytes: int

    @property
    def kept_seconds(self) -> float:
        """Least seconds of set and backward beyond a run that gives the output."""
        return min(way.kept_seconds for way in self.ways)

    @property
    def output_seconds(self) -> float:
        """Least additional seconds of the end of a gap if it must give its output, too."""
        return min(self._output_seconds(way) for way in self.ways)

    def _output_seconds(self, way: LeastWay) -> float:
        if not way.saves:
            # Its backward runs without a forward, so the output is a run of its own.
            return self.first_seconds
        return way.kept_seconds + self.first_seconds - way.last_seconds


def least_stages(
    chain: Chain, budget_bytes: int, *, gradients_exist: bool = False, lingering_bytes: int = 0
) -> list[LeastStage]:
    """The stages of a chain; arguments as for :func:`lightning_rotor.planning.plan`."""
    shares = _shares_of_skips(chain)
    # Backwards run from the last stage to the first: what is behind a stage has left its gradients by then.
    gradients_behind = [0] * len(chain)
    if not gradients_exist:
        for number in reversed(range(len(chain) - 1)):
            own = min(option.parameter_gradient_bytes for option in chain.stages[number + 1].options)
            gradients_behind[number] = gradients_behind[number + 1] + own
    stages = []
    input_bytes = 0
    forward_bytes = lingering_bytes
    for number, stage in enumerate(chain):
        backward_bytes = chain.always_bytes + gradients_behind[number] + chain.passing_gradient_bytes(number)
        # Bounds must hold under every schedule, so each term is the least of all options, whatever goes together.
        option_peaks = []
        option_seconds = [stage.discard_seconds]
        for option in stage.options:
            option_peaks.append(min(stage.discard_peak_of(option), option.forward_peak_bytes))
            option_seconds.append(option.forward_seconds)
        first_peak = min(option_peaks)
        first_seconds = min(option_seconds)
        ways = []
        for option in stage.options:
            ways.append(_way(chain, number, option, gradients_exist, first_seconds, shares))
        stages.append(
            LeastStage(
                input_bytes=input_bytes,
                first_seconds=first_seconds,
                recomputable=stage.recomputable,
                ways=tuple(ways),
                room_bytes=budget_bytes - backward_bytes,
                forward_room_bytes=budget_bytes - forward_bytes - first_peak,
            )
        )
        input_bytes = stage.output_bytes
        forward_bytes += stage.pinned_bytes
    return stages


def _way(
    chain: Chain, number: int, option: Option, gradients_exist: bool, first_seconds: float, shares: list[int]
) -> LeastWay:
    stage = chain.stages[number]
    peaks = option.backward_peaks(gradients_exist=gradients_exist)
    peak_bytes = min(astuple(peaks))
    if number == 0:
        # The caller holds the chain's input.
        peak_bytes = peaks.held_bytes
    output_bytes = 0
    if number < len(chain) - 1:
        output_bytes = min(option.saved_output_bytes, stage.output_bytes)
    shared_bytes = sum(shares[skip] for skip in option.saved_skips)
    both_seconds = _both_seconds(stage, option, first_seconds)
    return LeastWay(
        saves=option.saved_tensors > 0,
        set_bytes=option.saved_bytes + shared_bytes,
        input_bytes=option.saved_input_bytes,
        output_bytes=output_bytes,
        peak_bytes=peak_bytes,
        held_peak_bytes=peaks.held_bytes,
        kept_seconds=both_seconds - first_seconds + option.backward_seconds,
        last_seconds=option.again_seconds + option.backward_seconds,
        backward_seconds=option.backward_seconds,
        drops_input=option.inverts,
    )


def _both_seconds(stage: StageCost, option: Option, first_seconds: float) -> float:
    """Least seconds for output and set: a recording, or a first run and a replay."""
    if option.saved_tensors and not stage.recomputable:
        # It may not run twice, so its only run records.
        return option.forward_seconds
    return min(option.forward_seconds, first_seconds + option.again_seconds)


def _shares_of_skips(chain: Chain) -> list[int]:
    """Bytes of each skip charged to every stage that may save it; together no more than the skip has."""
    savers: Counter[int] = Counter()
    for stage in chain:
        saved_skips: set[int] = set()
        for option in stage.options:
            saved_skips.update(option.saved_skips)
        # Once for a stage, which runs under one of its options.
        savers.update(saved_skips)
    shares = []
    for number, skip in enumerate(chain.skips):
        # The caller holds what is in the output, and it is counted there.
        shares.append(0 if skip.in_output else skip.size_bytes // max(savers[number], 1))
    return shares
