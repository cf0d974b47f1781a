"""Where the boxes of a drawing of a chain are, and the lanes of the skips beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from xml.sax.saxutils import escape, quoteattr

from lightning_rotor.chain import Chain, Option, Skip

# ----------------------------------------------------------------------------------------------------
# Which stages of a chain are equal, and where runs of them repeat.


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


# ----------------------------------------------------------------------------------------------------


MARGIN, BOX, NAME, SMALL = 16.0, 250.0, 10.0, 8.5
LINE, PADDING, GAP, FRAME = 11.0, 5.0, 17.0, 7.0
LANE, GUTTER = 13.0, 34.0
_HIGHEST = 980.0


@dataclass(slots=True)
class Box:
    """A stage, where it is drawn.

    Attributes:
        stage: Its number.
        run: Number of the run that it belongs to.
        lines: Text below its name.
        column: From the left.
        top: Its upper edge.
    """

    stage: int
    run: int
    lines: list[str]
    column: int = 0
    top: float = 0.0

    @property
    def height(self) -> float:
        """Of the box, with its lines."""
        return 2 * PADDING + NAME + 1 + LINE * len(self.lines)

    @property
    def bottom(self) -> float:
        """Its lower edge."""
        return self.top + self.height

    @property
    def middle(self) -> float:
        """Halfway down."""
        return self.top + self.height / 2


@dataclass(slots=True)
class Strand:
    """A part of a skip within one column.

    Attributes:
        skip: Its number in the chain.
        top: Upper end.
        bottom: Lower end.
        reads: Heights at which boxes read it.
        made: Height at which a box makes it, or None if it comes from another column or repetition.
        lane: From the boxes outwards.
    """

    skip: int
    top: float
    bottom: float
    reads: list[float]
    made: float | None
    lane: int = 0


@dataclass(slots=True)
class Column:
    """A column of boxes.

    Attributes:
        left: Where it begins.
        strands: Of the skips to its right.
    """

    left: float = 0.0
    strands: list[Strand] = field(default_factory=list)

    @property
    def lanes(self) -> int:
        """How many lanes its skips take."""
        return max((strand.lane + 1 for strand in self.strands), default=0)

    @property
    def width(self) -> float:
        """Frames and lanes included."""
        return FRAME + BOX + FRAME + LANE * self.lanes + (8 if self.lanes else 0)


class Layout:
    """Boxes in columns, skips in lanes.

    Args:
        runs: What is drawn once.
        lines: For each stage, the lines of text below its name.
        skips: Of the chain.
        header: Height of what is above the boxes, for so many columns.
        bars: Room to the left of each column.

    Attributes:
        boxes: In the order of the chain.
        columns: From left to right.
        header: Where they begin.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        lines: Sequence[list[str]],
        skips: Sequence[Skip],
        *,
        header: Callable[[int], float],
        bars: float,
    ) -> None:
        self._runs = runs
        self.boxes = [
            Box(number, index, lines[number])
            for index, run in enumerate(runs)
            for number in range(run.first, run.first + run.length)
        ]
        frames = sum(3 * FRAME for run in runs if run.repeats > 1)
        total = sum(box.height + GAP for box in self.boxes) + frames
        count = max(1, math.ceil(total / _HIGHEST))
        self.header = header(count)
        self.columns = [Column() for _ in range(self._place(total, count))]
        self._add_skips(skips)
        left = MARGIN + bars
        for column in self.columns:
            column.left = left
            left += column.width + GUTTER + bars
        self.width = left - GUTTER - bars + MARGIN
        self.height = max(box.bottom for box in self.boxes) + FRAME + GAP + 20 + MARGIN

    def _place(self, total: float, count: int) -> int:
        """Put boxes into columns of about the same height, as low as that goes; returns how many columns there are."""
        limit = total / count
        while self._fill(limit) > count:
            limit *= 1.03
        return self._fill(limit)

    def _fill(self, limit: float) -> int:
        """Columns for a height. A run that is drawn once stays together if it fits into one."""
        column, y = 0, self.header
        for index, run in enumerate(self._runs):
            boxes = [box for box in self.boxes if box.run == index]
            frame = FRAME if run.repeats > 1 else 0.0
            needed = sum(box.height + GAP for box in boxes) + 2 * frame
            if y > self.header and y + min(needed, limit) - self.header > limit + GAP:
                column, y = column + 1, self.header
            y += frame
            for box in boxes:
                if y > self.header + frame and y + box.height - self.header > limit:
                    column, y = column + 1, self.header + frame
                box.column, box.top = column, y
                y = box.bottom + GAP
            y += frame
        return column + 1

    def _box_of(self, stage: int) -> int:
        """Place of the box that stands for a stage."""
        place = 0
        for run in self._runs:
            if stage < run.end:
                return place + (stage - run.first) % run.length
            place += run.length
        raise AssertionError(stage)

    def _add_skips(self, skips: Sequence[Skip]) -> None:
        ahead: dict[tuple[int, tuple[int, ...], int], int] = {}
        around: dict[tuple[int, tuple[int, ...], int], int] = {}
        for number, skip in enumerate(skips):
            if skip.born < 0:
                continue  # the caller's, wherever it is read
            made, reads = self._box_of(skip.born), tuple(sorted({self._box_of(use) for use in skip.uses}))
            # One that goes on into the next repetition is read above where it is made.
            (ahead if reads[0] > made else around).setdefault((made, reads, skip.size_bytes), number)
        for (made, reads, _), number in ahead.items():
            self._add_strands(number, made, reads)
        makers = {(made, size) for made, _, size in ahead}
        readers = {(read, size) for _, reads, size in ahead for read in reads}
        for (made, reads, size), number in around.items():
            # Out at the end of the run and in again at its beginning, unless the first or last repetition shows it.
            run = [place for place, box in enumerate(self.boxes) if box.run == self.boxes[made].run]
            behind = [read for read in reads if read <= made and (read, size) not in readers]
            later = [read for read in reads if read > made]
            if later or (made, size) not in makers:
                self._add_strands(number, made, later, end=run[-1])
            if behind:
                self._add_strands(number, None, behind, start=run[0])
        for column in self.columns:
            _assign_lanes(column.strands)

    def _add_strands(
        self, skip: int, made: int | None, reads: Sequence[int], *, start: int | None = None, end: int | None = None
    ) -> None:
        first = made if made is not None else start
        assert first is not None
        last = max([*reads, *([end] if end is not None else [])])
        for column in range(self.boxes[first].column, self.boxes[last].column + 1):
            inside = [box for box in self.boxes[first : last + 1] if box.column == column]
            if not inside:
                continue
            here = [self.boxes[read].middle + 3 for read in reads if self.boxes[read].column == column]
            made_here = self.boxes[made].middle - 3 if made is not None and self.boxes[made].column == column else None
            top = made_here if made_here is not None else inside[0].top - 6
            is_last = column == self.boxes[last].column
            bottom = max(here) if is_last and end is None and here else inside[-1].bottom + 6
            self.columns[column].strands.append(Strand(skip, top, max(bottom, top), here, made_here))


def _assign_lanes(strands: list[Strand]) -> None:
    """Lanes in which strands do not touch, short ones next to the boxes."""
    taken: list[list[Strand]] = []
    for strand in sorted(strands, key=lambda each: (each.bottom - each.top, each.top)):
        for number, lane in enumerate(taken):
            if all(strand.bottom + 4 < other.top or other.bottom + 4 < strand.top for other in lane):
                strand.lane = number
                lane.append(strand)
                break
        else:
            strand.lane = len(taken)
            taken.append([strand])


# ----------------------------------------------------------------------------------------------------
# Just enough SVG: shapes and text as strings.


FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
_NARROW = frozenset("iljtfrI.,:;|'!()[] /·")
_WIDE = frozenset("mwMW@%—…→×")


def text_width(text: str, size: float) -> float:
    """Width of a line in the widest of the fonts, in the unit of ``size``; a few percent too much rather than too little."""
    return size * sum(0.37 if character in _NARROW else 0.9 if character in _WIDE else 0.62 for character in text)


def fitted(text: str, width: float, size: float) -> str:
    """A line without its inside if it is too long."""
    if text_width(text, size) <= width:
        return text
    keep = len(text)
    while keep > 2 and text_width(text[:keep], size) + size > width:
        keep -= 1
    head = keep // 3
    return f"{text[:head]}…{text[len(text) - (keep - head) :]}"


def wrapped(words: Sequence[str], width: float, size: float, separator: str = " · ") -> list[str]:
    """Words in lines that are no wider than this, unless a word is."""
    lines: list[str] = []
    for word in words:
        longer = f"{lines[-1]}{separator}{word}" if lines else word
        if lines and text_width(longer, size) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def element(name: str, content: str = "", **attributes: object) -> str:
    """One element; underscores in attributes' names become hyphens, numbers lose what nobody sees."""

    def value(given: object) -> str:
        return f"{given:.2f}".rstrip("0").rstrip(".") if isinstance(given, float) else str(given)

    spelled = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(value(given))}" for key, given in attributes.items()
    )
    return f"<{name}{spelled}>{content}</{name}>" if content else f"<{name}{spelled}/>"


def text(content: str, x: float, y: float, size: float, **attributes: object) -> str:
    """A line of text, from ``x`` on the baseline ``y``."""
    return element("text", escape(content), x=x, y=y, font_size=size, **attributes)


def document(parts: Iterable[str], width: float, height: float, title: str) -> str:
    """The picture as a file."""
    body = "\n".join(
        [element("title", escape(title)), element("rect", width="100%", height="100%", fill="white"), *parts]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'font-family="{FONT}">\n{body}\n</svg>\n'
    )
