"""Skips of a chain by the rule under which the dynamic program counts them.

The program does not follow a schedule, so each skip (:class:`lightning_rotor.chain.Skip`) has one fixed holder:

    from birth    the item that makes it, from then until that item's own backward: if several stages read it, or its
                  maker saves it
    its reader    the item that holds its only reader: a segment, or a leaf that saves it. Before, the running forward
    the caller    from its forward on, if it is a part of the chain's output

Gradients of skips depend on the place in the step alone, so they count like those of parameters.
"""

from __future__ import annotations

import numpy as np

from lightning_rotor.chain import Chain, Option
from lightning_rotor.live_memory import Skips
from lightning_rotor.planning.kernels import Integers


class RetainedSkips:
    """Bytes of skips by stage and by interval.

    Attributes:
        in_forward: By stage, what the running forward holds when the stage begins.
        held: By first and last stage, what a segment holds for its readers.
        handed_on: By first and last stage of a segment, what it makes and the stages behind it must do without.
        from_birth: Numbers of the skips that are counted from birth.
    """

    def __init__(self, chain: Chain, *, readers_pay: bool) -> None:
        stages = len(chain)
        self.learn_in = Skips(chain).learn_in
        self.in_forward = np.zeros(stages, np.int64)
        self.held = np.zeros((stages, stages), np.int64)
        self.handed_on = np.zeros((stages, stages), np.int64)
        self.from_birth: set[int] = set()
        self._births = np.zeros(stages, np.int64)
        # Of those from birth: maker, last reader, size.
        self._spans: list[tuple[int, int, int]] = []
        for number, skip in enumerate(chain.skips):
            born, last, size = skip.born, skip.last_use, skip.size_bytes
            if skip.in_output:
                self.in_forward[born + 1 :] += size
                continue
            if born < 0:
                # A part of the chain's input, which the caller holds.
                continue
            is_saved_by_maker = number in chain.stages[born].keep.saved_skips
            # Which of several readers is the first to need it depends on the schedule. The maker is always there.
            if not readers_pay and (len(skip.uses) > 1 or is_saved_by_maker):
                self.from_birth.add(number)
                self._births[born] += size
                self.handed_on[: born + 1, born:last] += size
                self._spans.append((born, last, size))
            else:
                reader = skip.uses[0]
                self.in_forward[born + 1 : reader + 1] += size
                # A segment around its reader but not its maker holds it, from the first pass to the recomputation.
                self.held[born + 1 : reader + 1, reader:] += size

    def retained(self, index: int, option: Option, chain: Chain) -> int:
        """Bytes of skips retained by a kept stage: those it makes, and those that it alone reads and saves."""
        size_bytes = int(self._births[index])
        for number in option.saved_skips:
            skip = chain.skips[number]
            if number not in self.from_birth and not skip.in_output and skip.uses[0] == index:
                size_bytes += skip.size_bytes
        return size_bytes

    def carried(self, first: int) -> Integers:
        """By stage from ``first`` on, bytes that a discarded pass which starts there has made and still holds."""
        carried = np.zeros(len(self.in_forward), np.int64)
        for born, last, size in self._spans:
            if born >= first:
                carried[born + 1 : last + 1] += size
        return carried[first:]


def retains_from_birth(chain: Chain) -> bool:
    """True if any skip is counted from birth; else ``readers_pay`` changes nothing."""
    return bool(RetainedSkips(chain, readers_pay=False).from_birth)
