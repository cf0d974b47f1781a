r"""The stages of a model as a drawing: what each of them runs, what it hands on, and what repeats.

::

    ╭─ layer1.0 ─────────────────────╮
    │ Conv2d 64×64×3×3 · ReLU ·      │  one box a stage, equal ones in one colour, white if there is no other like it
    │ skip of 98.0 MiB to layer1.2   │
    ╰───────────────── keeps 3 GiB ──╯
                ▼ 784 MiB               the boundary
    ╭──────────────────────── × 2 ───╮
    │ ╭─ layer1.1 ─────────────────╮ │

:mod:`rich` lays the boxes out, in letters of one width, and writes them as SVG.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from lightning_rotor.chain import Chain, Option
from lightning_rotor.errors import ScheduleError
from lightning_rotor.report.figures import INVERSION_COLOURS, PHASE_COLOURS
from lightning_rotor.report.operator_labels import operator_labels
from lightning_rotor.report.repeats import Run, folded, stage_keys
from lightning_rotor.report.stage_names import from_to, times
from lightning_rotor.schedule import Schedule, Segment, leaves, segments_in
from lightning_rotor.shown import printable
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.units import format_bytes, format_seconds

# Of operators in a box.
_MOST_LETTERS = 45
_MOST_LINES = 4
# Of a box in a frame: one width for all, so that every stage is a box in one column.
_WIDTH = _MOST_LETTERS + 8
# Paul Tol's scheme for filling cells: apart for colour-blind readers, light behind black text. Then the same, paler.
_COLOURS = (
    *("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00"),
    *("#B4D0EC", "#F6BEAB", "#F6ECBE", "#FFD0DA", "#C7ECFF", "#98DAC7", "#DAE38F", "#D0D073"),
)
_GREY = "#666666"
_SEGMENT = PHASE_COLOURS["recompute"][0]
_INVERTED = INVERSION_COLOURS[0]
# rich escapes for XML, but leaves control characters and halves of characters, with which no viewer reads the file.
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
SVG_FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve"
 viewBox="0 0 {width} {height}" width="{width}">
<style>
.{unique_id}-matrix {{ font: {char_height}px 'DejaVu Sans Mono', Menlo, Consolas, monospace }}
{styles}
</style>
<defs>{lines}</defs>
<rect width="100%" height="100%" fill="white"/>
<g transform="translate(9 9)">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def draw_chain(
    chain: Chain,
    stages: Sequence[Stage] | None = None,
    *,
    schedule: Schedule | None = None,
    backward: bool = False,
    title: str | None = None,
    fold: bool = True,
) -> Drawing:
    """Draw a chain.

    Args:
        chain: Its sizes and skips.
        stages: What :func:`~lightning_rotor.profiling.profile_chain` returns along with the chain, for the operators
            in the boxes.
        schedule: Marks recomputed stages, with the number of segments around them, and inverted ones; says what stages
            keep under it.
        backward: Draw the backward instead, from the last stage to the first: what each reads, its gradients, and which
            segments run again.
        title: Above the picture.
        fold: Draw what repeats once.
    Returns:
        SVG, which notebooks show.
    Raises:
        ScheduleError: The stages or the schedule are not those of the chain.
    """
    if stages is not None and len(stages) != len(chain):
        raise ScheduleError(
            f"{len(stages)} stages for a chain of {len(chain)}: expected those that were measured with it"
        )
    if schedule is not None and len(schedule) != len(chain):
        raise ScheduleError(f"a schedule of {len(schedule)} stages for a chain of {len(chain)}: expected as many")
    if schedule is None:
        schedule = Schedule.keep_all(len(chain))
    items = schedule.items
    depths = Counter[int]()
    for segment in segments_in(items):
        depths.update(range(segment.first, segment.last + 1))
    options = []
    for item in items:
        for leaf in leaves(item):
            options.append(chain.stages[leaf.stage].options[leaf.option])
    labels: list[tuple[str, ...]] = [()] * len(chain)
    if stages is not None:
        labels = list(map(operator_labels, stages))
    # Stages that a schedule treats otherwise are not equal, whatever they run.
    details = []
    for number, label in enumerate(labels):
        details.append((label, depths[number], options[number].name))
    keys = stage_keys(chain, details)
    runs = [Run(number, 1, 1) for number in range(len(chain))]
    if fold:
        runs = folded(keys)
    again = None
    if backward:
        runs.reverse()
        # A segment runs again before the backward of its last stage.
        again = {item.last: item for item in items if isinstance(item, Segment)}
    # Its file is nowhere: what it has recorded is exported below. In a notebook it would show itself, too.
    console = Console(
        width=_WIDTH,
        record=True,
        file=io.StringIO(),
        force_jupyter=False,
        highlight=False,
    )
    if title:
        console.print(Text(title, "bold"))
    for fact in _facts(chain, keys, options, is_backward=backward, is_recomputed=bool(depths)):
        console.print(Text(fact, _GREY))
    boxes = _Boxes(chain, labels, options, depths, _colours(keys), again)
    for run in runs:
        console.print(boxes.run(run))
    drawn = console.export_svg(title=title or "chain", theme=DEFAULT_TERMINAL_THEME, code_format=SVG_FORMAT)
    return Drawing(_NOT_IN_XML.sub(lambda match: printable(match[0]), drawn))


def _facts(
    chain: Chain,
    keys: Sequence[Hashable],
    options: Sequence[Option],
    *,
    is_backward: bool,
    is_recomputed: bool,
) -> Iterator[str]:
    """Lines above the boxes: sizes, and the colours that appear."""
    sizes = f"{len(chain)} stages · input {format_bytes(chain.input_bytes)}"
    if is_backward:
        sizes += " · backward"
    if chain.skips:
        sizes += f" · {len(chain.skips)} skips"
    yield sizes
    if len(set(keys)) < len(keys):
        yield "equal stages share a colour"
    if is_recomputed:
        yield "orange: recomputed"
    if any(option.inverts for option in options):
        yield "dark blue: inverted, rebuilds its input from its output"


def _colours(keys: Sequence[Hashable]) -> list[str]:
    """By stage, a colour that it shares with equal ones; white if there is no other like it."""
    # In the order of the chain, so that a chain has the same colours in every drawing.
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    colour_of = dict(zip(repeated, cycle(_COLOURS), strict=False))
    return [colour_of.get(key, "#FFFFFF") for key in keys]


class Drawing(str):
    """An SVG picture, which notebooks show."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)

    def save(self, path: Path | str) -> None:
        """Write the picture to a file, which is replaced if it exists."""
        Path(path).write_text(self, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Boxes of a chain, with their texts by stage."""

    chain: Chain
    labels: Sequence[Sequence[str]]
    options: Sequence[Option]
    depths: Counter[int]
    colours: Sequence[str]
    # In a backward, segments by the stage before whose backward they run again.
    again: Mapping[int, Segment] | None

    def run(self, run: Run) -> RenderableType:
        """Boxes of a run, in a frame if they repeat, each above what it hands on."""
        numbers = list(range(run.first, run.first + run.length))
        if self.again is not None:
            numbers.reverse()
        parts: list[RenderableType] = []
        for number in numbers:
            parts += [self._box(number, run), self._boundary(number)]
        # The last boundary leads out of the run, so it stands below a frame.
        *boxes, boundary = parts
        if run.repeats == 1:
            # As far in as boxes in a frame, so that all have one width.
            padded = [Padding(box, (0, 2)) for box in boxes]
            return Group(*padded, boundary)
        frame = Panel(Group(*boxes), title=f"× {run.repeats}", title_align="right", border_style=_GREY)
        # What leads out of the frame is that of the last repeat.
        end = run.first + run.length * run.repeats - 1
        if self.again:
            end = run.first
        return Group(frame, self._boundary(end))

    def _box(self, number: int, run: Run) -> Panel:
        """One stage, or equal neighbours, with names, operators, notes, and what becomes of them."""
        option = self.options[number]
        labels = self.labels[number]
        names = self.chain.names
        last = number
        if run.length == 1:
            last += run.repeats - 1
        if self.again is None:
            treatment = self._treatment(number)
            notes = self._skips(number)
        else:
            # The backward of the last operator comes first.
            labels = labels[::-1]
            treatment = format_seconds(option.backward_seconds)
            notes = self._backward(number, self.again.get(number))
        border = ""
        if option.inverts:
            border = _INVERTED
        elif self.depths[number]:
            border = _SEGMENT
        texts = _lines(labels)
        for note in notes:
            texts.append(Text(note, overflow="ellipsis", no_wrap=True))
        return Panel(
            Group(*texts),
            title=Text(from_to(names[number], names[last], str), "bold"),
            title_align="left",
            subtitle=Text(treatment),
            subtitle_align="right",
            style=f"#222222 on {self.colours[number]}",
            border_style=border,
        )

    def _treatment(self, number: int) -> str:
        """Words for what the forward does with a stage."""
        option = self.options[number]
        depth = self.depths[number]
        treatment = f"keeps {format_bytes(option.kept_bytes)}"
        if option.inverts:
            treatment = "inverted"
        if depth == 1:
            return f"recomputed, {treatment}"
        if depth:
            # Once for each segment that it is in.
            return f"recomputed {times(depth)}, {treatment}"
        return treatment

    def _boundary(self, number: int) -> Text:
        """An arrow to the next stage, and what is handed on; all of it may be skips."""
        size_bytes = self.chain.stages[number].output_bytes
        label = ""
        if self.again is not None:
            label = f"gradient {format_bytes(self.options[number].input_gradient_bytes)}"
        elif number == len(self.chain) - 1:
            label = f"output {format_bytes(size_bytes)}"
        # Nothing where all that is handed on are skips, which are written in the boxes.
        elif size_bytes:
            label = format_bytes(size_bytes)
        return Text(f"▼ {label}", _GREY, justify="center")

    def _backward(self, number: int, segment: Segment | None) -> Iterator[str]:
        """Notes on a backward; the segment runs again before it."""
        option = self.options[number]
        if segment is not None:
            yield f"runs again first: {from_to(self.chain.names[segment.first], self.chain.names[number], str)}"
        verb = "rebuilds its input from" if option.inverts else "reads"
        yield f"{verb} {format_bytes(option.kept_bytes)}"
        if option.parameter_gradient_bytes:
            yield f"new parameter gradients {format_bytes(option.parameter_gradient_bytes)}"

    def _skips(self, number: int) -> Iterator[str]:
        """Notes on the skips that a stage makes and reads."""
        names = self.chain.names
        makers = []
        for skip in self.chain.skips:
            if skip.born == number:
                readers = ", ".join(names[use] for use in skip.uses)
                yield f"skip of {format_bytes(skip.size_bytes)} to {readers}"
            # Other skips are the caller's.
            if number in skip.uses and skip.born >= 0:
                makers.append(names[skip.born])
        if makers:
            yield f"skip from {', '.join(dict.fromkeys(makers))}"


def _lines(labels: Sequence[str]) -> list[Text]:
    """Operators as text below a name, with line breaks between them."""
    # Spaces that do not break, so that lines break between operators alone.
    unbroken = [label.replace(" ", "\u00a0") for label in labels]
    words = "\u00a0· ".join(unbroken)
    lines = textwrap.wrap(
        words,
        _MOST_LETTERS,
        max_lines=_MOST_LINES,
        placeholder=" …",
        break_on_hyphens=False,
    )
    return [Text(line.replace("\u00a0", " ")) for line in lines]
