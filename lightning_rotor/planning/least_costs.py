"""What each stage takes at least, in bytes and seconds, whatever the execution: what :mod:`lightning_rotor.planning.bounds` adds up."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from lightning_rotor.chain import BackwardPeaks, Chain, Option


@dataclass(frozen=True, slots=True)
class LeastWay:
    """One option of a stage.

    Attributes:
        saves: Its backward needs a set.
        set_bytes: Set without input and output.
        input_bytes: Part of the input that the set saves.
        output_bytes: Part of the output that the set saves; for the last stage 0, since the caller holds it.
        peak_bytes: Peak of the backward, whoever holds its input.
        held_peak_bytes: The same if the stage before saved it.
        kept_seconds: Set and backward, beyond a run that gives the output.
        last_seconds: Set and backward alone.
        backward_seconds: Backward alone.
        drops_input: While the set is there, the input takes nothing, whoever saved it, unless it is held: the backward rebuilds it.
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
        """What the input takes beside the set if nobody holds it, of which the stage before saves ``saved_before``."""
        return 0 if self.drops_input else min(input_bytes, saved_before + self.input_bytes)

    def moment_bytes(self, input_bytes: int, saved_before: int) -> int:
        """What the stage takes when its backward finishes, the gradients included."""
        peak = self.held_peak_bytes if saved_before else self.peak_bytes
        return self.set_bytes + self.output_bytes + self.saved_input_bytes(input_bytes, saved_before) + peak


@dataclass(frozen=True, slots=True)
class LeastStage:
    """One stage.

    Attributes:
        input_bytes: Its input; 0 for the chain's.
        first_seconds: A run that gives the output.
        recomputable: It may run more than once.
        ways: Its options.
        room_bytes: What its backward and everything that is kept and held by then may take.
        forward_room_bytes: What everything that is kept and held may take during its first run, its own input included.
    """

    input_bytes: int
    first_seconds: float
    recomputable: bool
    ways: tuple[LeastWay, ...]
    room_bytes: int
    forward_room_bytes: int

    @property
    def kept_seconds(self) -> float:
        """The least beyond a run that gives the output."""
        return min(way.kept_seconds for way in self.ways)

    @property
    def output_seconds(self) -> float:
        """What the end of a gap takes more at least if it has to give its output, too."""
        return min(
            way.kept_seconds + self.first_seconds - way.last_seconds if way.saves else self.first_seconds
            for way in self.ways
        )


def least_stages(
    chain: Chain, budget_bytes: int, *, gradients_exist: bool = False, lingering_bytes: int = 0
) -> list[LeastStage]:
    """The stages of a chain; arguments as for :func:`lightning_rotor.planning.plan`."""
    alive = chain.stages[-1].output_bytes + sum(stage.pinned_bytes for stage in chain)
    alive += sum(skip.size_bytes for skip in chain.skips if skip.in_output)
    gradients = [
        0 if gradients_exist else min(option.parameter_gradient_bytes for option in stage.options) for stage in chain
    ]
    shares = _shares_of_skips(chain)
    stages = []
    for index, stage in enumerate(chain):
        room = budget_bytes - alive - sum(gradients[index + 1 :]) - _passing_gradients(chain, index)
        before = lingering_bytes + sum(each.pinned_bytes for each in chain.stages[:index])
        peak = min(min(stage.discard_peak_of(option), option.forward_peak_bytes) for option in stage.options)
        first = min(stage.discard_seconds, *(option.forward_seconds for option in stage.options))
        stages.append(
            LeastStage(
                input_bytes=chain.stages[index - 1].output_bytes if index else 0,
                first_seconds=first,
                recomputable=stage.recomputable,
                ways=tuple(
                    _way(chain, index, option, option.backward_peaks(gradients_exist=gradients_exist), first, shares)
                    for option in stage.options
                ),
                room_bytes=room,
                forward_room_bytes=budget_bytes - before - peak,
            )
        )
    return stages


def _way(
    chain: Chain, index: int, option: Option, peaks: BackwardPeaks, first_seconds: float, shares: list[int]
) -> LeastWay:
    stage = chain.stages[index]
    held = peaks.held_bytes
    least = min(astuple(peaks)) if index else held  # the caller holds the chain's input
    if not option.saved_tensors:
        seconds = option.backward_seconds
        return LeastWay(False, 0, 0, 0, least, held, seconds, seconds, seconds)
    replay = min(option.replay_seconds, option.forward_seconds)
    again = min(option.forward_seconds, first_seconds + replay) if stage.recomputable else option.forward_seconds
    return LeastWay(
        saves=True,
        set_bytes=option.saved_bytes + sum(shares[skip] for skip in option.saved_skips),
        input_bytes=option.saved_input_bytes,
        output_bytes=min(option.saved_output_bytes, stage.output_bytes) if index < len(chain) - 1 else 0,
        peak_bytes=least,
        held_peak_bytes=held,
        kept_seconds=again - first_seconds + option.backward_seconds,
        last_seconds=replay + option.backward_seconds,
        backward_seconds=option.backward_seconds,
        drops_input=option.inverts,
    )


def _shares_of_skips(chain: Chain) -> list[int]:
    """Bytes of each skip that every stage which may save it pays: together no more than the skip has."""
    savers = [0] * len(chain.skips)
    for stage in chain:
        for skip in {skip for option in stage.options for skip in option.saved_skips}:
            savers[skip] += 1
    return [
        0 if skip.in_output or not count else skip.size_bytes // count
        for skip, count in zip(chain.skips, savers, strict=True)
    ]


def _passing_gradients(chain: Chain, index: int) -> int:
    """Gradients of skips that are alive during the backward of a stage that neither makes nor reads them."""
    return sum(
        next(size for use, size in zip(skip.uses, skip.gradient_bytes, strict=True) if use > index)
        for skip in chain.skips
        if skip.born < index < skip.last_use and index not in skip.uses
    )
