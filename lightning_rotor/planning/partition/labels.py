r"""What must be known of the stages behind a cut, to bound the step of whatever comes before it: a few numbers, many of them at once.

From the last stage to the first, see :mod:`.search`::

    gpipe   sum of times, largest forward, largest backward
    1f1b    R: once through everything behind, and back; the largest bound of a stage so far, less what comes before

Neither is ever better for being larger, so of the partitions behind a cut only those count that no other one beats in everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_rotor.planning.partition.problem import Integers, Problem, Reals

# Labels kept for one start of a pipeline stage; of more, neighbours become one that bounds both.
_MOST_LABELS = 24


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of stages that one pipeline stage may be, one entry each, by rising first stage of the chain.

    Attributes:
        first: First stages of the chain.
        last: Last ones.
        seconds: Forward and backward of a micro-batch, or less.
        work_seconds: All of them together.
        least_forward: Bounds from below.
        least_backward: The same.
        forward: Bounds from above; infinite where there is none.
        backward: The same.
    """

    first: Integers
    last: Integers
    seconds: Reals
    work_seconds: Reals
    least_forward: Reals
    least_backward: Reals
    forward: Reals
    backward: Reals

    def __len__(self) -> int:
        return len(self.first)

    def beginning_at(self, first: int) -> slice:
        """Those that begin at a stage of the chain."""
        return slice(int(np.searchsorted(self.first, first)), int(np.searchsorted(self.first, first, "right")))

    def __getitem__(self, which: slice | Integers) -> Runs:
        return Runs(*(getattr(self, name)[which] for name in self.__slots__))


class Labels:
    """Labels of one problem.

    Args:
        problem: With one pipeline stage per device.
        travel_seconds: By boundary of the chain, how long what crosses it travels.
    """

    def __init__(self, problem: Problem, travel_seconds: list[float]) -> None:
        self._m, self._in_flight = problem.micro_batches, problem.in_flight
        self._gpipe = problem.schedule == "gpipe"
        self._n, self._travel = len(problem.chain), np.array(travel_seconds)

    def at_the_end(self) -> Reals:
        """By boundary of the chain, the labels of nothing behind its end; padded with infinite ones."""
        labels = np.full((self._n + 1, _MOST_LABELS, 3 if self._gpipe else 2), math.inf)
        labels[self._n, 0] = 0.0
        return labels

    def before(self, stage: int, runs: Runs, behind: Reals, *, below: float) -> Reals:
        """The same for everything from a pipeline stage on, given those behind it.

        Args:
            stage: Number of the pipeline stage.
            runs: What it may be.
            behind: By boundary, labels of what may follow.
            below: Bounds that are not less are of no interest.
        """
        made = np.full_like(behind, math.inf)
        if not len(runs):
            return made
        extended = self.extended(stage, runs, behind[runs.last + 1])
        row, column = np.nonzero(self.values(extended) < below)
        if not len(row):
            return made
        firsts, labels = runs.first[row], extended[row, column]
        order = np.lexsort((*labels.T[::-1], firsts))
        firsts, labels = firsts[order], labels[order]
        if not self._gpipe:
            kept = _stairs(firsts, labels[:, 1])
            firsts, labels = firsts[kept], labels[kept]
        starts = np.flatnonzero(np.diff(firsts, prepend=-1))
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(firsts)], strict=True):
            own = labels[start:end]
            few = _fewer(_unbeaten(own) if self._gpipe else own)
            made[firsts[start], : len(few)] = few
        return made

    def extended(self, stage: int, runs: Runs, labels: Reals) -> Reals:
        """Labels of partitions from ``stage`` on: ``(runs, labels, numbers)``, or with a single run for all."""
        travel = self._travel[runs.last + 1][:, None]
        seconds = runs.seconds[:, None]
        new = np.empty_like(labels)
        if self._gpipe:
            new[..., 0] = labels[..., 0] + seconds + 2 * travel
            new[..., 1] = np.maximum(labels[..., 1], np.maximum(runs.least_forward[:, None], travel))
            new[..., 2] = np.maximum(labels[..., 2], np.maximum(runs.least_backward[:, None], travel))
            return new
        behind = labels[..., 0] + 2 * travel
        ahead = self._in_flight[stage] - 1
        # An infinite bound from above hides everything; one forward in flight hides nothing.
        known = [np.isfinite(each) for each in (runs.forward, runs.backward)]
        bounds = (
            np.where(finite, each, 0.0) for finite, each in zip(known, (runs.forward, runs.backward), strict=True)
        )
        hidden = [np.where(finite, ahead * each, math.inf)[:, None] for finite, each in zip(known, bounds, strict=True)]
        with np.errstate(invalid="ignore"):
            first, second = (np.nan_to_num(np.maximum(behind - each, 0.0), posinf=math.inf) for each in hidden)
        waits = first + second if self._m > ahead + 1 else np.maximum(first, second)
        new[..., 0] = behind + seconds
        new[..., 1] = np.maximum(labels[..., 1] + seconds + 2 * travel, runs.work_seconds[:, None] + waits)
        return new

    def values(self, labels: Reals) -> Reals:
        """What no partition with such labels can beat."""
        if not self._gpipe:
            return labels[..., 1]
        repeated = labels[..., 1] + labels[..., 2]
        value: Reals = labels[..., 0] + (np.where(repeated < math.inf, self._m - 1, 1) * repeated)
        return value


def _stairs(groups: Integers, values: Reals) -> npt.NDArray[np.bool_]:
    """Which values are less than all before them in their group; groups rise."""
    span = float(values.max(initial=0.0)) + 1.0
    number = np.cumsum(np.diff(groups, prepend=groups[:1]) > 0)
    # Later groups lie lower, so a running minimum starts anew with each.
    lowered = values / span - number
    before = np.concatenate(([math.inf], np.minimum.accumulate(lowered)[:-1]))
    new_group = np.diff(number, prepend=-1) > 0
    kept: npt.NDArray[np.bool_] = new_group | (lowered < before)
    return kept


def _unbeaten(labels: Reals) -> Reals:
    """Those that no other one beats in everything, of labels in lexical order."""
    labels = np.unique(labels, axis=0)
    beaten = np.all(labels[:, None] <= labels[None], axis=2) & ~np.eye(len(labels), dtype=bool)
    kept: Reals = labels[~beaten.any(axis=0)]
    return kept


def _fewer(labels: Reals) -> Reals:
    while len(labels) > _MOST_LABELS:
        pairs = np.minimum(labels[0 : len(labels) - 1 : 2], labels[1::2])
        labels = np.concatenate((pairs, labels[-1:])) if len(labels) % 2 else pairs
    return labels
