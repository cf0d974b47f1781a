r"""What must be known of the stages behind a cut, to bound the step of whatever comes before it: a few numbers, many of them at once.

From the last stage to the first, see :mod:`.search`::

    gpipe   sum of times, largest forward, largest backward
    1f1b    R: once through everything behind, and back; the largest bound of a stage so far, less what comes before

Neither is ever better for being larger, so of the partitions behind a cut only those count that no other one beats in everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_rotor.pipeline.partition.problem import Integers, Problem, Reals

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

    def table(self) -> Reals:
        """One row for each run."""
        return np.column_stack([getattr(self, name) for name in self.__slots__])

    @classmethod
    def of(cls, rows: Sequence[Reals]) -> Runs:
        """Runs from rows of tables; not necessarily by rising first stage."""
        columns = np.array(rows).reshape(-1, len(cls.__slots__)).T
        return cls(columns[0].astype(np.int64), columns[1].astype(np.int64), *columns[2:])


class Labels:
    """Labels of one problem.

    Args:
        problem: With one pipeline stage per device.
        travel_seconds: By boundary of the chain, how long what crosses it travels.
    """

    def __init__(self, problem: Problem, travel_seconds: list[float]) -> None:
        self._m, self._ahead = problem.micro_batches, np.array(problem.in_flight) - 1
        self._gpipe = problem.schedule == "gpipe"
        self._n, self._travel = len(problem.chain), np.array(travel_seconds)
        self._turns = np.ceil(self._m / np.array(problem.in_flight))

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
        waits = self._waits(self._ahead[stage], runs.forward[:, None], runs.backward[:, None], behind)
        new[..., 0] = behind + seconds
        own = np.maximum(runs.work_seconds[:, None] + waits, self.returns(stage, seconds, behind, travel))
        new[..., 1] = np.maximum(labels[..., 1] + seconds + 2 * travel, own)
        return new

    def values_behind(self, decided: Runs, labels: Reals) -> Reals:
        """What no partition can beat that begins with ``decided``, one run for each of the first stages, and goes on with such labels.

        The same as extending the labels by one decided run after the other from the last one on, at once::

            Σ_{v<u} (t_v + c_v)  +  work_u  +  waits_u(R + Σ_{v>u} (t_v + c_v) + c_u)        the largest over all u
        """
        values = np.full(labels.shape[:-1], math.inf)
        finite = np.isfinite(labels[..., -1])
        labels, travel = labels[finite], self._travel[decided.last + 1]
        steps = decided.seconds + 2 * travel
        if self._gpipe:
            slowest = (
                np.max(np.maximum(each, travel), initial=0.0)
                for each in (decided.least_forward, decided.least_backward)
            )
            columns = [labels[:, 0] + steps.sum(), *map(np.maximum, labels.T[1:], slowest)]
            values[finite] = self.values(np.column_stack(columns))
            return values
        before = np.cumsum(steps) - steps
        total = steps.sum()
        behind = labels[:, :1] + (total - before - steps + 2 * travel)
        waits = self._waits(self._ahead[: len(decided)], decided.forward, decided.backward, behind)
        own = np.maximum(
            decided.work_seconds + waits, self.returns(slice(len(decided)), decided.seconds, behind, travel)
        )
        largest = np.max(before + own, axis=1, initial=0.0)
        values[finite] = np.maximum(labels[:, 1] + total, largest)
        return values

    def returns(self, stage: int | slice, seconds: Reals, behind: Reals, travel: Reals) -> Reals:
        """How long 1F1B stages are busy at least because of what is behind them.

        A stage takes in a new micro-batch when the one that came ``in_flight`` before has returned; and the last micro-batch leaves it on the way
        back when all have left it one after the other on the way there.

        Args:
            stage: Number of the pipeline stage, or of several.
            seconds: Forward and backward of a micro-batch there.
            behind: Once through everything behind and back, travel included.
            travel: Of one message to the stage behind.
        """
        longest: Reals = np.maximum(self._turns[stage] * (seconds + behind), seconds + behind + (self._m - 1) * travel)
        return longest

    def _waits(self, ahead: Integers, forward: Reals, backward: Reals, behind: Reals) -> Reals:
        """How long a stage waits for what is behind it, in which ``ahead`` forwards and backwards hide."""
        with np.errstate(invalid="ignore"):
            # An infinite bound from above hides everything, and nothing in flight is no number times infinity: fmin and fmax leave those out.
            first, second = (np.fmax(behind - np.fmin(ahead * each, math.inf), 0.0) for each in (forward, backward))
        waits: Reals = np.where(self._m > ahead + 1, first + second, np.maximum(first, second))
        return waits

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
