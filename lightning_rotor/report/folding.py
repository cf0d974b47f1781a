"""Which stages of a chain are equal, and where runs of them repeat.

::

a b c d c d c d e   ──►   a b [c d] × 3 e
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields

from lightning_rotor.chain import Chain, Option

# A skip that is read within so many stages belongs to where it is; a longer one belongs to the whole chain.
_NEAR = 64


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive stages that are drawn once.

    Attributes:
        first: Number of the first stage.
        length: How many stages are drawn.
        repeats: How often they come, one after the other.
    """

    first: int
    length: int
    repeats: int

    @property
    def end(self) -> int:
        """Number of the first stage behind it."""
        return self.first + self.length * self.repeats


def stage_keys(chain: Chain, details: Sequence[Hashable]) -> list[Hashable]:
    """By stage, something that is equal for stages of the same operators, sizes and skips; durations are noise and not in it.

    Args:
        chain: The chain.
        details: What else tells stages apart, one entry a stage.
    """
    made: list[list[Hashable]] = [[] for _ in chain]
    for number, skip in enumerate(chain.skips):
        near = skip.born >= 0 and skip.last_use - skip.born <= _NEAR
        if skip.born >= 0:
            made[skip.born].append(
                ("makes", skip.size_bytes, tuple(use - skip.born for use in skip.uses) if near else number)
            )
        for use in skip.uses:
            made[use].append(("reads", skip.size_bytes, use - skip.born if near else number))
    return [
        (
            stage.output_bytes,
            stage.recomputable,
            detail,
            tuple(map(_sizes, stage.options)),
            tuple(sorted(map(repr, skips))),
        )
        for stage, detail, skips in zip(chain, details, made, strict=True)
    ]


def _sizes(option: Option) -> tuple[int, ...]:
    return tuple(getattr(option, field.name) for field in fields(Option) if field.name.endswith("_bytes"))


def folded(keys: Sequence[Hashable], *, longest: int = 64) -> list[Run]:
    """Repetitions, found greedily from the left; where several begin, the one that leaves out most, and the shortest of those.

    Args:
        keys: Equal where stages are.
        longest: Most stages that repeat together.
    """
    runs: list[Run] = []
    start = 0
    while start < len(keys):
        best = Run(start, 1, 1)
        for length in range(1, min(longest, (len(keys) - start) // 2) + 1):
            repeats = 1
            while keys[start + repeats * length : start + (repeats + 1) * length] == keys[start : start + length]:
                repeats += 1
            if length * (repeats - 1) > best.length * (best.repeats - 1):
                best = Run(start, length, repeats)
        # What comes before a repetition may be a part of it: ``c a b c a b c`` is ``c [a b c] × 2`` as well as ``[c a b] × 2 c``.
        runs.append(best)
        start = best.end
    return runs
