"""Least bytes and seconds of each stage of a chain, whatever the execution: what :mod:`.bounds` adds up."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import astuple, dataclass

from lightning_rotor.chain import BackwardPeaks, Chain, Option


@dataclass(frozen=True, slots=True)
class LeastWay:
    """One option of a stage, in the least bytes and seconds that it takes."""

    saves: bool
    set_bytes: int  # saved set without input and output
    input_bytes: int
    output_bytes: int  # saved part of the output; 0 for the last stage, since the caller holds it
    peak_bytes: int  # of the backward, whoever holds its input
    held_peak_bytes: int  # of the backward if the stage before saved its input
    kept_seconds: float  # set and backward, beyond a run that gives the output
    last_seconds: float  # set and backward alone
    backward_seconds: float
    drops_input: bool = False  # the backward rebuilds it, so beside the set only a held input takes memory

    def saved_input_bytes(self, input_bytes: int, saved_before: int) -> int:
        """Bytes of the input beside the set if nobody holds it; the stage before saves ``saved_before`` of them."""
        return 0 if self.drops_input else min(input_bytes, saved_before + self.input_bytes)

    def moment_bytes(self, input_bytes: int, saved_before: int) -> int:
        """Bytes of the stage when its backward finishes, gradients included."""
        peak = self.held_peak_bytes if saved_before else self.peak_bytes
        return self.set_bytes + self.output_bytes + self.saved_input_bytes(input_bytes, saved_before) + peak


@dataclass(frozen=True, slots=True)
class LeastStage:
    """One stage."""

    input_bytes: int  # 0 for the chain's
    first_seconds: float  # a run that gives the output
    recomputable: bool
    ways: tuple[LeastWay, ...]
    room_bytes: int  # for its backward and everything that is kept and held by then
    forward_room_bytes: int  # for everything that is kept and held during its first run, its own input included

    @property
    def kept_seconds(self) -> float:
        """Least seconds of set and backward beyond a run that gives the output."""
        return min(way.kept_seconds for way in self.ways)

    @property
    def output_seconds(self) -> float:
        """Least additional seconds of the end of a gap if it must give its output, too."""
        return min(
            way.kept_seconds + self.first_seconds - way.last_seconds if way.saves else self.first_seconds
            for way in self.ways
        )


def least_stages(
    chain: Chain, budget_bytes: int, *, gradients_exist: bool = False, lingering_bytes: int = 0
) -> list[LeastStage]:
    """The stages of a chain; arguments as for :func:`lightning_rotor.planning.plan`."""
    gradients = [
        0 if gradients_exist else min(option.parameter_gradient_bytes for option in stage.options) for stage in chain
    ]
    shares = _shares_of_skips(chain)
    stages = []
    for index, stage in enumerate(chain):
        room = budget_bytes - chain.always_bytes - sum(gradients[index + 1 :]) - chain.passing_gradient_bytes(index)
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
    saves, replay = option.saved_tensors > 0, option.again_seconds
    again = first_seconds + replay if stage.recomputable or not saves else math.inf
    again = min(option.forward_seconds, again)
    return LeastWay(
        saves=saves,
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
    """Bytes of each skip charged to every stage that may save it; together no more than the skip has."""
    savers = Counter(skip for stage in chain for skip in {skip for each in stage.options for skip in each.saved_skips})
    return [0 if skip.in_output else skip.size_bytes // max(savers[n], 1) for n, skip in enumerate(chain.skips)]
