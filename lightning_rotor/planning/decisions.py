"""What each decision of the dynamic program needs, for many intervals at once.

:mod:`lightning_rotor.planning.thresholds` describes stages one by one; here the same numbers stand in arrays, so that the least
memories of a decision for a whole diagonal of intervals are a few array operations. Axes, in this order:

    ====  =====================================================================================
    i, l  first and last stage of an interval
    e     ending: group of options of ``l`` that find the same alive when they start a recomputation
    c     class of the boundary before ``i``, see :attr:`StageNeeds.saved_before`
    v     variant: bodies are stored once for all contexts that never differ, see :attr:`Decisions.contexts`
    o     option of stage ``i``
    ====  =====================================================================================
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rotor.planning.thresholds import NEVER, BackwardNeed, Ending, Thresholds

Context: TypeAlias = Literal["any", "nested", "segment", "held"]
"""Who holds the input of an interval during the backward of its first stage, see :class:`BackwardNeed`; "any" is the least of all."""
Integers: TypeAlias = npt.NDArray[np.int64]
Reals: TypeAlias = npt.NDArray[np.float64]

_APART: tuple[Context, ...] = ("nested", "segment", "held")
COLUMN_OF = {"plain": 0, "any": 1, "nested": 1, "segment": 2, "held": 3, "saved": 4}
"""Where the need of a context, or of nobody else holding the input, stands among five, in the order of :class:`BackwardNeed`."""


def by_context(need: BackwardNeed, context: Context) -> int:
    """The need that counts in a context."""
    return in_columns(need)[COLUMN_OF[context]]


def in_columns(need: BackwardNeed) -> tuple[int, int, int, int, int]:
    """In the order of :data:`COLUMN_OF`."""
    return need.plain, need.nested, need.segment, need.held, need.saved


class Decisions:
    """Every threshold of a chain in arrays.

    Args:
        thresholds: The chain, in slots.
        refined: See :class:`lightning_rotor.planning.dynamic_program.Table`.

    Attributes:
        top: Number of the last stage.
        endings: By stage. The step's own forward ends at the last stage under any of its options, with thresholds of its own.
        outermost: By stage, first stage of the longest segment that may end there; one more than the stage if there is none.
        contexts: By stage and variant, the context whose thresholds the variant has.
        variant: ``(n, 4)``, in which variant the bodies of a context are, by :class:`BackwardNeed`'s order.
        alike_from: ``(n, variants)`` slots: from there on the bodies of a variant are those of variant ``alike``; never if there is none.
        alike: ``(n, variants)``.
    """

    def __init__(self, thresholds: Thresholds, *, refined: bool) -> None:
        self.thresholds = thresholds
        self._refined = refined
        stages = thresholds.stages
        self.stages = stages
        n = len(stages)
        self.top = n - 1
        # Ends nothing else, so its base and trigger are none; what its stages need is in `forward_base`.
        self.endings = [*(stage.endings for stage in stages[:-1]), (Ending(self.top, stages[-1].leaves, 0, 0),)]
        self.outermost = np.array([self._first_of_longest_segment(last) for last in range(n - 1)] + [0], np.int64)
        self._read_stages()
        self._read_endings()
        self.contexts = [self._contexts_of(first) for first in range(n)]
        self._find_variants()
        discard = np.array([stage.discard_seconds for stage in stages])
        self.discard_before = np.concatenate(([0.0], np.cumsum(discard)))
        self.peak = {False: thresholds.discard, True: thresholds.first_discard}
        self.recording = [self._recording_needs(ending) for ending in range(self.ending_base.shape[1])]

    def take_over(self, thresholds: Thresholds) -> None:
        """Take over thresholds in which needs of the last stage's backward are others: loops and extraction read them there."""
        self.thresholds, self.stages = thresholds, thresholds.stages
        self.endings[self.top] = (replace(self.endings[self.top][0], leaves=self.stages[-1].leaves),)

    # ---------------------------------------------------------------- arrays

    def _read_stages(self) -> None:
        stages = self.stages
        n, options = len(stages), max(len(stage.leaves) for stage in stages)
        classes = max(len(stage.saved_before) for stage in stages)
        self.input_slots = np.array([stage.input_slots for stage in stages], np.int64)
        self.gives_up_input = np.array([stage.gives_up_input for stage in stages])
        self.class_count = np.array([len(stage.saved_before) for stage in stages], np.int64)
        self.class_held = np.zeros((n, classes), bool)
        self.needs_as_segment = np.array([in_columns(stage.needs_as_segment)[:4] for stage in stages], np.int64)
        self.forward, self.replay, self.bare = (np.full((n, options), NEVER, np.int64) for _ in range(3))
        self.retained, self.output_class = (np.zeros((n, options), np.int64) for _ in range(2))
        self.backward, self.last_backward = (np.full((n, options, 5), NEVER, np.int64) for _ in range(2))
        self.input_retained = np.zeros((n, classes, options), np.int64)
        self.seconds, self.last_seconds = (np.zeros((n, options)) for _ in range(2))
        self.bare_seconds = np.zeros((n, options))
        for index, stage in enumerate(stages):
            self.class_held[index, : len(stage.saved_before)] = [saved > 0 for saved in stage.saved_before]
            for option, leaf in enumerate(stage.leaves):
                at = index, option
                self.forward[at], self.replay[at], self.retained[at] = leaf.forward, leaf.replay, leaf.retained
                self.output_class[at] = leaf.output_class
                self.backward[at], self.last_backward[at] = in_columns(leaf.backward), in_columns(leaf.last_backward)
                self.input_retained[index, : len(stage.saved_before), option] = leaf.input_retained
                self.seconds[at], self.last_seconds[at] = leaf.seconds, leaf.last_seconds
                if not leaf.saves:
                    self.bare[at], self.bare_seconds[at] = leaf.bare, leaf.backward_seconds + stage.discard_seconds
        self.last_seconds[-1] = self.seconds[-1]
        self.freed = self.input_slots[:, None] - self.input_retained[:, 0]
        for index, stage in enumerate(stages):  # what an inverted stage frees is never paid for
            self.freed[index, [option for option, leaf in enumerate(stage.leaves) if leaf.inverts]] = 0

    def _read_endings(self) -> None:
        n, most = len(self.endings), max(len(endings) for endings in self.endings)
        self.ending_count = np.array([len(endings) for endings in self.endings], np.int64)
        self.ending_base, self.ending_trigger = (np.full((n, most), NEVER, np.int64) for _ in range(2))
        self.ends = np.zeros((n, most, self.forward.shape[1]), bool)
        for last, endings in enumerate(self.endings):
            for number, ending in enumerate(endings):
                self.ending_base[last, number], self.ending_trigger[last, number] = ending.base, ending.trigger
                self.ends[last, number, [self.stages[last].leaves.index(leaf) for leaf in ending.leaves]] = True

    def _recording_needs(self, ending: int) -> Integers:
        """``(n, n)``: least memory to run ``i`` and what follows in a recomputation, up to ``l``, that keeps everything."""
        n = len(self.stages)
        needs = np.full((n + 1, n), NEVER, np.int64)
        if not self.freed.any():
            return needs
        taken = self.input_retained[:, 0, 0] + self.retained[:, 0]
        for first in reversed(range(n)):
            base = self.ending_base[first:, ending] + self.thresholds.remembered[first, first:]
            forward = self.input_slots[first] + self.forward[first, 0] + base
            needs[first, first:] = np.maximum(forward, taken[first] + needs[first + 1, first:])
            if ending < self.ending_count[first]:
                option = int(np.argmax(self.ends[first, ending]))
                needs[first, first] = self.input_slots[first] + self.replay[first, option] + base[0]
        return needs

    # ---------------------------------------------------------------- contexts

    def _first_of_longest_segment(self, last: int) -> int:
        first = last + 1
        while first > 0 and self.stages[first - 1].recomputable:
            first -= 1
        return first

    def _contexts_of(self, first: int) -> tuple[Context, ...]:
        """Contexts that may differ.

        With one option the context only sets a least memory, the same for every decision, so one body serves all. Unless segments
        differ in the states that they take from that memory.
        """
        if first == 0:
            return ("held",)
        stage = self.stages[first]
        remembering = bool(self.thresholds.held[first, first:].any())
        apart = sum(not leaf.inverts for leaf in stage.leaves) > 1 or (
            self._refined and (remembering or bool(self.freed[first].any()))
        )
        return _APART if apart else ("any",)

    def _find_variants(self) -> None:
        """Contexts with the same thresholds share a variant; others are alike where memory is no longer short for the first backward."""
        n = len(self.stages)
        self.variant = np.zeros((n, 4), np.int64)
        self.alike_from, self.alike = np.full((n, 3), NEVER, np.int64), np.zeros((n, 3), np.int64)
        for first, contexts in enumerate(self.contexts):
            if contexts != _APART:
                continue
            needs = np.stack([self.backward[first], self.last_backward[first]])[:, : len(self.stages[first].leaves)]
            kept: list[Context] = []
            for context in self._distinct(first):
                # A nested segment has given up what its first stage does not save: that is more than a threshold.
                comparable = [other for other in kept if other != "nested" or not self.freed[first].any()]
                column = COLUMN_OF[context]
                same = [each for each in comparable if (needs[..., COLUMN_OF[each]] == needs[..., column]).all()]
                if same:
                    self.variant[first, column] = kept.index(same[0])
                    continue
                self.variant[first, column] = len(kept)
                if comparable:
                    self.alike[first, len(kept)] = kept.index(comparable[0])
                    both = needs[..., [column, COLUMN_OF[comparable[0]]]]
                    self.alike_from[first, len(kept)] = both[both < NEVER].max()
                kept.append(context)
            self.contexts[first] = tuple(kept)
        self.variant_count = np.array([len(contexts) for contexts in self.contexts], np.int64)
        most = int(self.variant_count.max())
        # What a stage has too few variants for is computed with the others of its group, and not stored.
        padded = [(*contexts, *contexts[-1:] * (most - len(contexts))) for contexts in self.contexts]
        self.columns = np.array([[COLUMN_OF[context] for context in contexts] for contexts in padded])
        # Without a recomputation segments hold their input to the end.
        self.bare_columns = np.maximum(self.columns, COLUMN_OF["segment"])
        self.is_apart = np.array([contexts[0] == "nested" for contexts in self.contexts])

    def _distinct(self, first: int) -> tuple[Context, ...]:
        """What a segment that starts there may be in, once it matters."""
        return tuple(context for context in _APART if context != "segment" or not self.stages[first].gives_up_input)

    def segment_context(self, first: int, number: int, *, top: bool) -> Context:
        """The context of a segment that starts at ``first`` after class ``number`` of the boundary."""
        stage = self.stages[first]
        if stage.saved_before[number]:
            return "held"
        return "segment" if top and not stage.gives_up_input else "nested"

    def variant_of(self, first: int, context: Context) -> int:
        """Where the bodies of a context are."""
        return int(self.variant[first, COLUMN_OF[context]])

    def discarded_seconds(self, first: int, last: int) -> float:
        """The first pass over a segment."""
        seconds = self.discard_before[last + 1] - self.discard_before[first] + self.thresholds.segment_seconds
        return float(seconds)
