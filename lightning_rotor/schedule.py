"""A schedule is data: a tree that says which stages are kept and which are recomputed, and from where.

A :class:`Leaf` runs one stage and keeps what its backward needs. A :class:`Segment` runs its stages, holds nothing but
its input, and runs them again when the backward arrives, under its own items, which may hold further segments::

    0 1 (2-4) 5          forward    0 1 2 3 4 5
                         backward   5, recompute 2 3 4, backward 4 3 2, backward 1 0

    0 ((1 2) 3 4) 5      recomputation of the outer segment keeps 3 and 4 and only the input of 1;
                         stages 1 and 2 run a third time when 4 and 3 are done

A stage under an option that inverts it is a leaf, too: it keeps its output, from which it rebuilds its input.

What an item of the schedule itself holds until its backward may go to another memory meanwhile (:class:`Move`): the
saved tensors of a leaf, the input of a segment.

The text form is one line: stage numbers, ``a-b`` for a run of kept stages, ``3:1`` for stage 3 under its option 1,
``3-7:1`` for a run of such stages, and parentheses around a segment. A ``>`` behind an item moves it::

    3>          memory is given back before the forward of the next item, and taken again before its own backward
    3>7         ... given back before the forward of stage 7
    3>b9        ... given back before the backward of stage 9
    3>7<5       ... and taken again before the backward of stage 5; (1-2)><5 likewise, given back at once

``Schedule.parse(str(schedule)) == schedule``.

Segments may be nested as deeply as the chain is long, so nothing here calls itself for what is inside: a segment knows
its ends, depth and text from when it was made, what must visit all of it keeps a stack, and pickles hold the text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
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
        if self.option:
            return f"{self.stage}:{self.option}"
        return str(self.stage)


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
    # Says everything, so it alone is compared and hashed: comparing items would call itself for what is inside.
    _text: str = field(init=False)

    def __post_init__(self) -> None:
        _check_items(self.items)
        # Once, from what the items know of themselves: nobody ever has to look into a segment for these.
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


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """A move of what an item of a schedule holds to another memory, and back for the item's backward.

    Memory is given back and taken again at *points*, which are places in the program and no moments in time. So what a
    step takes never depends on how fast copies are. A schedule of ``m`` items has ``2 m`` points::

        point       0   1   ...  m-1     m   ...  2m-2  2m-1
        before      0   1   ...  m-1    m-1  ...   1     0
                    forward of item     backward of item

    The copy out begins when the item's forward is done, and the point ``release`` waits for it. The copy back begins at
    the point ``fetch``, and the item's backward waits for it. What is given back at point ``m`` is so when the forward
    ends, since the gradient of the loss is there before the backward of the last item begins.

    Attributes:
        item: Number of the item in :attr:`Schedule.items`.
        release: Point at which its memory is given back.
        fetch: Point in the backward at which its memory is taken again.
    """

    item: int
    release: int
    fetch: int

    @classmethod
    def whole(cls, item: int, items: int) -> Move:
        """The move that frees memory for longest: given back at once, and taken again just in time."""
        return cls(item, item + 1, 2 * items - 1 - item)


@dataclass(frozen=True, slots=True, repr=False)
class Schedule:
    """The way in which one training step runs a whole chain.

    Attributes:
        items: Cover the stages ``0 .. n-1``, each once, in order. The last one is a segment only where other chains run
            before its backward comes.
        moves: Items whose memory is given back meanwhile, in the order of the items, at most one move for each.
    Raises:
        ScheduleError: Stages are missing, repeated or out of order, a segment ends in a segment, or a move gives back
            no memory.
    """

    items: tuple[Item, ...]
    moves: tuple[Move, ...] = ()

    def __post_init__(self) -> None:
        _check_items(self.items)
        if self.items[0].first != 0:
            raise ScheduleError(f"schedule {self} starts at stage {self.items[0].first}: expected stage 0")
        if self.moves:
            _check_moves(self.moves, len(self.items))

    def __len__(self) -> int:
        """Number of stages."""
        return self.items[-1].last + 1

    def __reduce__(self) -> tuple[Callable[[str], Schedule], tuple[str]]:
        return Schedule.parse, (str(self),)

    def __repr__(self) -> str:
        return f"Schedule.parse({str(self)!r})"

    def __str__(self) -> str:
        words = _words(self.items, self._moves_as_text())
        return " ".join(text for text, _ in words)

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
        items, written = _parse(text)
        shown = repr(shorten(text))
        # Behind all items, since a move names stages that come later in the text.
        moves = []
        for item, words in sorted(written.items()):
            moves.append(_parse_move(items, item, words, shown))
        return cls(items, tuple(moves))

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Numbers of the stages whose forward runs more than once in a step."""
        stages: list[int] = []
        for item in self.items:
            # Stages follow one another, so those inside need not be looked at.
            if isinstance(item, Segment):
                stages += range(item.first, item.last + 1)
        return tuple(stages)

    @property
    def moved(self) -> tuple[int, ...]:
        """Numbers of the stages that belong to items whose memory is given back meanwhile."""
        stages: list[int] = []
        for move in self.moves:
            item = self.items[move.item]
            stages += range(item.first, item.last + 1)
        return tuple(stages)

    @property
    def is_plain(self) -> bool:
        """True if every stage is kept, and runs as it is."""
        if self.moves:
            return False
        for item in self.items:
            # Under another option than the first a stage runs other code, or drops its input.
            if isinstance(item, Segment) or item.option:
                return False
        return True

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
        input. ``Fn i``: forward that saves nothing. ``B i``: backward. ``Out i``: the copy out of the item that begins
        with stage i. ``Free i``: its memory is given back once the copy is done. ``Back i``: its memory is taken again
        for the copy back, for which its backward waits.
        """
        operations: list[str] = []
        # Copies out begin when the item's forward is done, in the order of the items.
        moved = {move.item for move in self.moves}
        for index, item in enumerate(self.items):
            operations += self._at_point(index)
            operations += _forward((item,))
            if index in moved:
                operations.append(f"Out {item.first}")
        for index in reversed(range(len(self.items))):
            operations += self._at_point(2 * len(self.items) - 1 - index)
            operations += _backward(self.items[index])
        return tuple(operations)

    def _at_point(self, point: int) -> Iterator[str]:
        """Operations of moves at a point: what is needed first comes back first."""
        for move in self.moves:
            if move.release == point:
                yield f"Free {self.items[move.item].first}"
        # Backwards come in the reverse order of the items.
        for move in reversed(self.moves):
            if move.fetch == point:
                yield f"Back {self.items[move.item].first}"

    def _moves_as_text(self) -> dict[int, str]:
        """By item, what stands behind it if it moves."""
        texts = {}
        for move in self.moves:
            whole = Move.whole(move.item, len(self.items))
            text = ">"
            if move.release != whole.release:
                text += self._point_as_text(move.release)
            if move.fetch != whole.fetch:
                # Always in the backward, so its ``b`` says nothing.
                text += "<" + self._point_as_text(move.fetch).removeprefix("b")
            texts[move.item] = text
        return texts

    def _point_as_text(self, point: int) -> str:
        """The stage that runs behind a point, with a ``b`` in the backward."""
        if point < len(self.items):
            return str(self.items[point].first)
        return f"b{self.items[2 * len(self.items) - 1 - point].last}"


def leaves(item: Item) -> Iterator[Leaf]:
    """The leaves of an item from left to right, however deeply nested."""
    return (inner for inner in _walk((item,)) if isinstance(inner, Leaf))


def segments_in(items: Iterable[Item]) -> Iterator[Segment]:
    """All segments among some items, nested ones included, each before what is in it."""
    return (item for item in _walk(items) if isinstance(item, Segment))


def _walk(items: Iterable[Item]) -> Iterator[Item]:
    # A stack, whose last item comes next: Python allows a thousand nested calls, and segments may be nested more.
    pending = [*items]
    pending.reverse()
    while pending:
        item = pending.pop()
        yield item
        if isinstance(item, Segment):
            pending.extend(reversed(item.items))


def _depth(items: Iterable[Item]) -> int:
    return max((item.depth for item in items if isinstance(item, Segment)), default=0)


def _backward(item: Item) -> Iterator[str]:
    pending = [item]
    while pending:
        match pending.pop():
            case Leaf(stage):
                yield f"B {stage}"
            case Segment(items):
                yield from _forward(items)
                pending.extend(items)


def _forward(items: Iterable[Item]) -> Iterator[str]:
    for item in items:
        kind = "Fck" if isinstance(item, Segment) else "Fall"
        yield f"{kind} {item.first}"
        # Of the stages behind the first of a segment nothing is kept.
        for stage in range(item.first + 1, item.last + 1):
            yield f"Fn {stage}"


def _check_items(items: tuple[Item, ...]) -> None:
    if not items:
        raise ScheduleError("a schedule or segment without items: expected at least one stage")
    for left, right in pairwise(items):
        if right.first != left.last + 1:
            raise ScheduleError(f"stage {right.first} follows stage {left.last}: expected every stage once, in order")


def _check_moves(moves: tuple[Move, ...], items: int) -> None:
    for left, right in pairwise(moves):
        if left.item >= right.item:
            raise ScheduleError(f"item {right.item} moves behind item {left.item}: expected each once, in order")
    for move in moves:
        if not 0 <= move.item < items:
            raise ScheduleError(f"item {move.item} of {items} moves: expected a number below {items}")
        last = Move.whole(move.item, items).fetch
        # A point is in front of its item: what is given back at the item's own has not been made yet.
        if not (move.item < move.release < move.fetch and items <= move.fetch <= last):
            raise ScheduleError(
                f"item {move.item} of {items} is given back at point {move.release} and fetched at {move.fetch}: "
                f"expected it to be given back behind point {move.item}, and fetched behind that, at {items} to {last}"
            )


def text_of(items: tuple[Item, ...]) -> str:
    """Text of items; a run of leaves under one option is ``a-b``."""
    return " ".join(text for text, _ in _words(items, {}))


def _words(items: tuple[Item, ...], moves: Mapping[int, str]) -> Iterator[tuple[str, bool]]:
    """Words of the text of items, and True for segments; ``moves`` is what stands behind those that move."""

    def alike(numbered: tuple[int, Item]) -> tuple[object, str]:
        number, item = numbered
        move = moves.get(number, "")
        # Segments are never written together, so each has a key of its own: a number is no tuple.
        if isinstance(item, Segment):
            return number, move
        return (item.option,), move

    for (_, move), group in groupby(enumerate(items), alike):
        (_, first), *others = group
        text = str(first)
        if others:
            # The last leaf writes its option, which is that of all.
            _, last = others[-1]
            text = f"{first.first}-{last}"
        yield text + move, isinstance(first, Segment)


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
    for word, is_segment in _words(schedule.items, schedule._moves_as_text()):
        if is_segment:
            _, _, move = word.rpartition(")")
            words.append(f"(…){move}")
        else:
            words.append(word)
    text = " ".join(words)
    shown = len(words)
    # From the middle, so that both ends of the chain are seen.
    while len(text) > most_characters and shown:
        shown -= 1
        head = words[: shown // 2]
        tail = words[len(words) - (shown + 1) // 2 :]
        text = " ".join([*head, "…", *tail])
    return text


def _parse_segment(text: str) -> Segment:
    (segment,), _ = _parse(text)
    assert isinstance(segment, Segment)
    return segment


_MOST_STAGES = 100_000
_MOST_SHOWN = 200


def shorten(text: str) -> str:
    """A text as messages show it: the beginning of a long one."""
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}…"


# At most nine digits: of a damaged file there may be thousands, which Python refuses to read.
_LEAVES = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?(?::([0-9]{1,9}))?")
_MOVE = re.compile(r">(?:(b?)([0-9]{1,9}))?(?:<([0-9]{1,9}))?")


def _parse_move(items: tuple[Item, ...], number: int, words: str, shown: str) -> Move:
    """The move of an item from words such as ``>7<5``; ``shown`` is the schedule for messages."""
    match = _MOVE.fullmatch(words)
    if match is None:
        raise ScheduleError(
            f"schedule {shown} moves by {shorten(words)!r}: expected > behind an item, perhaps with the stages before "
            "which its memory is given back and taken again, as in 3>, 3>7, 3>b9 or 3>7<5"
        )
    in_backward, release, fetch = match.groups()
    move = Move.whole(number, len(items))
    if release is not None:
        point_of = _backward_point if in_backward else _forward_point
        move = replace(move, release=point_of(items, int(release), shown))
    if fetch is not None:
        move = replace(move, fetch=_backward_point(items, int(fetch), shown))
    return move


def _forward_point(items: tuple[Item, ...], stage: int, shown: str) -> int:
    """The point before the forward of the item that begins it with a stage."""
    for number, item in enumerate(items):
        if item.first == stage:
            return number
    raise ScheduleError(
        f"schedule {shown} names stage {stage} for a move: expected the first stage of an item, with which its forward "
        "begins"
    )


def _backward_point(items: tuple[Item, ...], stage: int, shown: str) -> int:
    """The point before the backward of the item that begins it with a stage."""
    for number, item in enumerate(items):
        if item.last == stage:
            return 2 * len(items) - 1 - number
    raise ScheduleError(
        f"schedule {shown} names stage {stage} for a move: expected the last stage of an item, with which its backward "
        "begins"
    )


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
    # Before it is spelled out: the text may be of a damaged file.
    if stages[-1] >= _MOST_STAGES:
        raise ScheduleError(f"schedule {shown} names stage {stages[-1]}: expected less than {_MOST_STAGES}")
    return [Leaf(stage, int(option or 0)) for stage in stages]


def _parse(text: str) -> tuple[tuple[Item, ...], dict[int, str]]:
    """The items of a text, and by item what stands behind those that move."""
    shown = repr(shorten(text))
    # Of the segments that are not closed yet, outermost first.
    open_items: list[list[Item]] = [[]]
    moves: dict[int, str] = {}
    for token in re.findall(r"[()]|[^\s()]+", text):
        if token == "(":
            open_items.append([])
            continue
        before = len(open_items[-1])
        stages, moved, points = token.partition(">")
        if token == ")":
            inside = open_items.pop()
            if not open_items:
                raise ScheduleError(f"schedule {shown} has a closing parenthesis too many")
            open_items[-1].append(Segment(tuple(inside)))
        elif not stages and before and isinstance(open_items[-1][-1], Segment):
            # The segment that was closed moves: a parenthesis is a word of its own.
            before -= 1
        else:
            open_items[-1].extend(_parse_leaves(stages or token, shown))
        if moved and len(open_items) > 1:
            raise ScheduleError(f"schedule {shown} moves {shorten(token)!r} in a segment: expected it outside of one")
        if moved:
            # A run of leaves moves as one: what stands behind it is said of each.
            for item in range(before, len(open_items[-1])):
                moves[item] = moved + points
    if len(open_items) > 1:
        raise ScheduleError(f"schedule {shown} lacks a closing parenthesis")
    return tuple(open_items[0]), moves


def make_room_for(calls: int) -> None:
    """Allow so many more nested calls: in all threads, and for good, as others may need it."""
    # Functions that follow segments into one another are nested as deeply as those; Python allows a thousand calls.
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + calls))
