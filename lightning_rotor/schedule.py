"""A schedule is data: a tree that says which stages are kept and which are recomputed, and from where.

A :class:`Leaf` runs one stage and keeps what its backward needs. A :class:`Segment` runs its stages, holds nothing but
its input, and runs them again when the backward arrives, under its own items, which may hold further segments::

    0 1 (2-4) 5          forward    0 1 2 3 4 5
                         backward   5, recompute 2 3 4, backward 4 3 2, backward 1 0

    0 ((1 2) 3 4) 5      recomputation of the outer segment keeps 3 and 4 and only the input of 1;
                         stages 1 and 2 run a third time when 4 and 3 are done

A stage under an option that inverts it is a leaf, too: it keeps its output, from which it rebuilds its input.

The text form is one line: stage numbers, ``a-b`` for a run of kept stages, ``3:1`` for stage 3 under its option 1,
``3-7:1`` for a run of such stages, and parentheses around a segment. ``Schedule.parse(str(schedule)) == schedule``.

Segments may be nested as deeply as the chain is long, so nothing here calls itself for what is inside: a segment knows
its ends, depth and text from when it was made, what must visit all of it keeps a stack, and pickles hold the text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import TypeAlias

from lightning_rotor.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Leaf:
    """Run one stage and keep what its backward needs.

    Attributes:
        stage: Number of the stage in the chain, from 0.
        option: Which of the stage's options.
    """

    stage: int
    option: int = 0

    @property
    def first(self) -> int:
        """Number of the first stage."""
        return self.stage

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return self.stage

    def __str__(self) -> str:
        return f"{self.stage}:{self.option}" if self.option else str(self.stage)


@dataclass(frozen=True, slots=True, repr=False)
class Segment:
    """Run consecutive stages holding only their input; recompute them in the backward under ``items``.

    Attributes:
        items: What the recomputation keeps and what it checkpoints again. The last one is a leaf: a segment at the end
            would be recomputed for nothing, since the backward needs it at once.
        first: Number of the first stage.
        last: Number of the last stage.
        depth: How deeply segments are nested, this one included.
    """

    items: tuple[Item, ...] = field(compare=False)
    first: int = field(init=False, compare=False)
    last: int = field(init=False, compare=False)
    depth: int = field(init=False, compare=False)
    _text: str = field(init=False)  # says everything

    def __post_init__(self) -> None:
        _check_items(self.items)
        object.__setattr__(self, "first", self.items[0].first)
        object.__setattr__(self, "last", self.items[-1].last)
        object.__setattr__(self, "depth", 1 + _depth(self.items))
        object.__setattr__(self, "_text", f"({text_of(self.items)})")
        if isinstance(self.items[-1], Segment):
            raise ScheduleError(f"segment {self} ends in another segment: the last item of a segment is a stage")

    def __reduce__(self) -> tuple[Callable[[str], Segment], tuple[str]]:
        return _parse_segment, (str(self),)

    def __repr__(self) -> str:
        return f"Segment{self}"

    def __str__(self) -> str:
        return self._text


Item: TypeAlias = Leaf | Segment


@dataclass(frozen=True, slots=True, repr=False)
class Schedule:
    """The way in which one training step runs a whole chain.

    Attributes:
        items: Cover the stages ``0 .. n-1``, each once, in order. The last one is a segment only where other chains run
            before its backward comes.
    Raises:
        ScheduleError: Stages are missing, repeated or out of order, or a segment ends in a segment.
    """

    items: tuple[Item, ...]

    def __post_init__(self) -> None:
        _check_items(self.items)
        if self.items[0].first != 0:
            raise ScheduleError(f"schedule {self} starts at stage {self.items[0].first}: expected stage 0")

    def __len__(self) -> int:
        """Number of stages."""
        return self.items[-1].last + 1

    def __reduce__(self) -> tuple[Callable[[str], Schedule], tuple[str]]:
        return Schedule.parse, (str(self),)

    def __repr__(self) -> str:
        return f"Schedule.parse({str(self)!r})"

    def __str__(self) -> str:
        return text_of(self.items)

    @classmethod
    def keep_all(cls, stages: int) -> Schedule:
        """Plain training: every stage kept, nothing recomputed."""
        return cls(tuple(Leaf(stage) for stage in range(stages)))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read the text form.

        Raises:
            ScheduleError: The text is malformed or no schedule.
        Example:
            >>> Schedule.parse("0 (1-3) 4").recomputed
            (1, 2, 3)
        """
        return cls(_parse(text))

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Numbers of the stages whose forward runs more than once in a step."""
        return tuple(leaf.stage for item in self.items if isinstance(item, Segment) for leaf in leaves(item))

    @property
    def is_plain(self) -> bool:
        """True if every stage is kept, and runs as it is."""
        return not any(isinstance(item, Segment) or item.option for item in self.items)

    @property
    def segments(self) -> int:
        """Number of segments, nested ones included."""
        return sum(1 for _ in segments_in(self.items))

    @property
    def depth(self) -> int:
        """Levels of segments within segments; 0 if there is none."""
        return _depth(self.items)

    def operations(self) -> tuple[str, ...]:
        """The step as rotor's list of operations.

        ``Fall i``: forward that keeps everything (rotor's ``Fe``). ``Fck i``: forward without saving that keeps its
        input. ``Fn i``: forward that saves nothing. ``B i``: backward.
        """
        operations = [*_forward(self.items)]
        pending = [*self.items]
        while pending:
            match pending.pop():
                case Leaf(stage):
                    operations.append(f"B {stage}")
                case Segment(items):
                    operations.extend(_forward(items))
                    pending.extend(items)
        return tuple(operations)


def leaves(item: Item) -> Iterator[Leaf]:
    """The leaves of an item from left to right, however deeply nested."""
    return (each for each in _walk((item,)) if isinstance(each, Leaf))


def segments_in(items: Iterable[Item]) -> Iterator[Segment]:
    """All segments among some items, nested ones included, each before what is in it."""
    return (each for each in _walk(items) if isinstance(each, Segment))


def _walk(items: Iterable[Item]) -> Iterator[Item]:
    pending = [*items][::-1]
    while pending:
        item = pending.pop()
        yield item
        if isinstance(item, Segment):
            pending.extend(reversed(item.items))


def _depth(items: Iterable[Item]) -> int:
    return max((item.depth for item in items if isinstance(item, Segment)), default=0)


def _forward(items: Iterable[Item]) -> Iterator[str]:
    for item in items:
        yield f"{'Fck' if isinstance(item, Segment) else 'Fall'} {item.first}"
        yield from (f"Fn {stage}" for stage in range(item.first + 1, item.last + 1))


def _check_items(items: tuple[Item, ...]) -> None:
    if not items:
        raise ScheduleError("a schedule or segment without items: expected at least one stage")
    for left, right in pairwise(items):
        if right.first != left.last + 1:
            raise ScheduleError(f"stage {right.first} follows stage {left.last}: expected every stage once, in order")


def text_of(items: tuple[Item, ...]) -> str:
    """Text of items; a run of leaves under one option is ``a-b``."""
    words: list[str] = []
    for _, group in groupby(items, lambda item: item if isinstance(item, Segment) else item.option):
        first, *others = group
        words.append(f"{first.first}-{others[-1]}" if others else str(first))
    return " ".join(words)


_LINE_CHARACTERS = 100


def schedule_line(schedule: Schedule, *, most_characters: int = _LINE_CHARACTERS) -> str:
    """The text of a schedule on one line of ``most_characters``: a longer one loses segments' insides, then more.

    Stages are consecutive, so neighbours of ``…`` tell what is missing.

    Example:
        >>> schedule_line(Schedule.parse("0 ((1 2) 3 4) 5"), most_characters=12)
        '0 (…) 5'
    """
    text = str(schedule)
    if len(text) <= most_characters:
        return text
    words: list[str] = []
    for is_segment, run in groupby(schedule.items, lambda item: isinstance(item, Segment)):
        items = tuple(run)
        words += ["(…)"] * len(items) if is_segment else text_of(items).split()
    text = " ".join(words)
    shown = len(words)
    while len(text) > most_characters and shown:
        shown -= 1
        head = words[: shown // 2]
        tail = words[len(words) - (shown + 1) // 2 :]
        text = " ".join([*head, "…", *tail])
    return text


def _parse_segment(text: str) -> Segment:
    (segment,) = _parse(text)
    assert isinstance(segment, Segment)
    return segment


_MOST_STAGES = 100_000
_MOST_SHOWN = 200


def shorten(text: str) -> str:
    """A text as messages show it: the beginning of a long one."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


_LEAVES = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?(?::([0-9]{1,9}))?")


def _parse_leaves(token: str, shown: str) -> list[Leaf]:
    """The leaves of a token such as ``3-7:1``; ``shown`` is the schedule for messages."""
    match = _LEAVES.fullmatch(token)
    stages = range(0)
    if match is not None:
        first, last, option = match.groups()
        stages = range(int(first), int(last or first) + 1)
    if match is None or not stages:
        raise ScheduleError(
            f"schedule {shown} holds {shorten(token)!r}: expected stage numbers such as 3, 3-7, 3:1 or 3-7:1, "
            "and parentheses"
        )
    if stages[-1] >= _MOST_STAGES:  # before it is spelled out: the text may be of a damaged file
        raise ScheduleError(f"schedule {shown} names stage {stages[-1]}: expected less than {_MOST_STAGES}")
    return [Leaf(stage, int(option or 0)) for stage in stages]


def _parse(text: str) -> tuple[Item, ...]:
    shown = repr(shorten(text))
    open_items: list[list[Item]] = [[]]  # of the segments that are not closed yet, outermost first
    for token in re.findall(r"[()]|[^\s()]+", text):
        if token == "(":
            open_items.append([])
        elif token == ")":
            inside = open_items.pop()
            if not open_items:
                raise ScheduleError(f"schedule {shown} has a closing parenthesis too many")
            open_items[-1].append(Segment(tuple(inside)))
        else:
            open_items[-1].extend(_parse_leaves(token, shown))
    if len(open_items) > 1:
        raise ScheduleError(f"schedule {shown} lacks a closing parenthesis")
    return tuple(open_items[0])


# Functions follow segments into one another, as deeply as those are nested; Python allows a thousand nested calls.
def make_room_for(calls: int) -> None:
    """Allow so many more nested calls: in all threads, and for good, as others may need it."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + calls))
