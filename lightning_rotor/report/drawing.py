r"""The stages of a model as a drawing: what each of them runs, what it hands on, and what repeats.

::

    ┌──────────────────────┐
    │ layer1.0    keeps 3 G│  one box a stage, equal ones in one colour, white if there is no other like it
    │ Conv 3×3 64→64 · ... │
    └──────────┬───────────┘
               ▼ 784 MiB       the boundary
    ╔══════════════════════╗
    ║ ┌──────────────────┐ ║
    ║ │ layer1.1         │─╫─┐
    ║ └──────────────────┘ ║ │ skips
    ╚══════════════ × 2 ═══╝ │

Boxes lie on one strip, skips in lanes beside it. Letters are all of one width, so that text fits wherever it is shown.
"""

from __future__ import annotations

import re
import textwrap
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import cycle, groupby, zip_longest
from typing import Any, NamedTuple

from torch import nn

from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.chain import Chain, Option, Skip
from lightning_rotor.errors import ScheduleError
from lightning_rotor.planning.tables import from_to, shortened
from lightning_rotor.report.timeline import INVERSION_COLOURS, PHASE_COLOURS
from lightning_rotor.schedule import Schedule, leaves, segments_in
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.units import format_bytes

_MARGIN, _BOX, _NAME, _SMALL, _TINY = 16.0, 250.0, 10.0, 8.5, 7.5
_LINE, _PADDING, _GAP, _FRAME, _LANE, _BAR = 11.0, 5.0, 17.0, 7.0, 13.0, 5.0
_FONT, _WIDE = "'DejaVu Sans Mono', Menlo, Consolas, monospace", 0.61  # width of a letter over its size
_MOST_LETTERS, _MOST_LINES = int((_BOX - 12) / (_WIDE * _SMALL)), 4
# Paul Tol's scheme for filling cells: apart for colour-blind readers, light behind black text. Then the same, paler.
_COLOURS = (
    *("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00"),
    *("#B4D0EC", "#F6BEAB", "#F6ECBE", "#FFD0DA", "#C7ECFF", "#98DAC7", "#DAE38F", "#D0D073"),
)
_INK, _GREY, _SKIP = "#222222", "#666666", "#AA3377"
_SEGMENT, _INVERTED = PHASE_COLOURS["recompute"][0], INVERSION_COLOURS[0]


def draw_chain(
    chain: Chain,
    stages: Sequence[Stage] | None = None,
    *,
    schedule: Schedule | None = None,
    title: str | None = None,
    fold: bool = True,
) -> str:
    """Draw a chain.

    Args:
        chain: Its sizes and skips.
        stages: What :func:`~lightning_rotor.profiling.profile_chain` returns along with the chain, for the operators
            in the boxes.
        schedule: Marks recomputed stages, with a bar for each segment around them, and inverted ones; says what stages
            keep under it.
        title: Above the picture.
        fold: Draw what repeats once.
    Returns:
        SVG, to write to a file.
    Raises:
        ScheduleError: The stages or the schedule are not those of the chain.
    """
    if stages is not None and len(stages) != len(chain):
        raise ScheduleError(
            f"{len(stages)} stages for a chain of {len(chain)}: expected those that were measured with it"
        )
    if schedule is not None and len(schedule) != len(chain):
        raise ScheduleError(f"a schedule of {len(schedule)} stages for a chain of {len(chain)}: expected as many")
    items = (schedule or Schedule.keep_all(len(chain))).items
    depths = Counter(stage for segment in segments_in(items) for stage in range(segment.first, segment.last + 1))
    options = [chain.stages[leaf.stage].options[leaf.option] for item in items for leaf in leaves(item)]
    labels: list[tuple[str, ...]] = [()] * len(chain) if stages is None else [operator_labels(each) for each in stages]
    keys = stage_keys(chain, [(labels[n], depths[n], options[n].name) for n in range(len(chain))])
    runs = folded(keys) if fold else [Run(number, 1, 1) for number in range(len(chain))]
    prefix, colours = _common_prefix(chain.names), _colours(keys)
    boxes = [
        _Box(number, run, _name(chain.names, run, number, prefix), _lines(labels[number]), options[number],
             colours[number], depths[number], chain.stages[number].output_bytes)
        for run in runs
        for number in range(run.first, run.first + run.length)
    ]  # fmt: skip
    sizes = [f"{len(chain)} stages", f"input {format_bytes(chain.input_bytes)}"]
    sizes += [f"{len(chain.skips)} skips"] if chain.skips else []
    facts = [
        (True, " · ".join(sizes)),
        (prefix, f"names without “{prefix}”"),
        (len(set(keys)) < len(keys), "equal stages share a colour"),
        (depths, "orange: recomputed, a bar for each level of nesting"),
        (any(each.inverts for each in options), "dark blue: inverted, drops its input and rebuilds it from its output"),
    ]
    _place(boxes)
    return _svg(boxes, _lanes(_strands(chain.skips, boxes)), title, [fact for applies, fact in facts if applies])


# ----------------------------------------------------------------------------------------------------
# Which stages are equal, and where runs of them repeat.


# A skip that is read within so many stages belongs to where it is; a longer one belongs to the whole chain.
_NEAR = 64


class Run(NamedTuple):
    """Stages that are drawn once: ``length`` of them from ``first`` on stand for ``repeats`` times as many."""

    first: int
    length: int
    repeats: int


def stage_keys(chain: Chain, details: Sequence[Hashable]) -> list[Hashable]:
    """By stage, a value that is equal for stages of the same operators, sizes, skips and ``details``."""
    skips: list[list[Hashable]] = [[] for _ in chain]
    for number, skip in enumerate(chain.skips):
        near = skip.born >= 0 and skip.last_use - skip.born <= _NEAR
        if skip.born >= 0:
            readers = tuple(use - skip.born for use in skip.uses) if near else number
            skips[skip.born].append(("makes", skip.size_bytes, readers))
        for use in skip.uses:
            skips[use].append(("reads", skip.size_bytes, use - skip.born if near else number))
    sizes = [tuple(map(_sizes, stage.options)) for stage in chain]
    return [
        (stage.output_bytes, stage.recomputable, detail, size, tuple(sorted(map(repr, own))))
        for stage, detail, size, own in zip(chain, details, sizes, skips, strict=True)
    ]


def _sizes(option: Option) -> tuple[int, ...]:
    return tuple(getattr(option, field.name) for field in fields(Option) if field.name.endswith("_bytes"))


def folded(keys: Sequence[Hashable], *, longest: int = 64) -> list[Run]:
    """Repetitions, greedily from the left: the one that leaves out most, the shortest of those, up to ``longest``."""
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
        runs.append(best)
        start += best.length * best.repeats
    return runs


def _colours(keys: Sequence[Hashable]) -> list[str]:
    """Colours by stage; white for stages without a like."""
    kinds = [key for key, count in Counter(keys).items() if count > 1]
    shades = dict(zip(kinds, cycle(_COLOURS), strict=False))
    return [shades.get(key, "white") for key in keys]


# ----------------------------------------------------------------------------------------------------
# Where boxes and skips are on the strip.


@dataclass(slots=True)
class _Box:
    """A stage as it is drawn: what it says, how it runs when it is recorded, and its upper edge on the strip."""

    stage: int
    run: Run
    name: str
    lines: list[str]
    option: Option
    colour: str
    depth: int
    output_bytes: int
    top: float = 0.0

    @property
    def bottom(self) -> float:
        """Its lower edge."""
        return self.top + 2 * _PADDING + _NAME + 1 + _LINE * len(self.lines)

    @property
    def middle(self) -> float:
        """Halfway down."""
        return (self.top + self.bottom) / 2

    @property
    def frame(self) -> float:
        """Room for the frame around what repeats."""
        return _FRAME if self.run.repeats > 1 else 0.0


@dataclass(frozen=True, slots=True)
class _Strand:
    """A line for a skip, as heights on the strip; ``made`` is None if it comes from another repetition."""

    top: float
    bottom: float
    made: float | None
    reads: tuple[float, ...]
    size_bytes: int


def _place(boxes: Sequence[_Box]) -> None:
    """Put boxes on the strip, one below the other."""
    bottom, frame, run = -_GAP, 0.0, None
    for box in boxes:
        box.top = bottom + _GAP + (frame + box.frame if box.run is not run else 0)
        bottom, frame, run = box.bottom, box.frame, box.run


def _strands(skips: Sequence[Skip], boxes: Sequence[_Box]) -> Iterator[_Strand]:
    """Skips from box to box. One that goes on into the next repetition leaves its run below and enters it above."""
    place = {box.stage + again * box.run.length: n for n, box in enumerate(boxes) for again in range(box.run.repeats)}
    ends = {box.run: box.bottom + 6 for box in boxes}
    tops = {box.run: box.top - 6 for box in reversed(boxes)}
    found: dict[tuple[int, tuple[int, ...], int], None] = {}
    for skip in skips:
        if skip.born >= 0:  # others are the caller's, wherever they are read
            found[place[skip.born], tuple(sorted({place[use] for use in skip.uses})), skip.size_bytes] = None
    # The first or last repetition may show by itself that a skip enters or leaves.
    shown = [(made, reads, size) for made, reads, size in found if reads[0] > made]
    makers = {(made, size) for made, _, size in shown}
    readers = {(read, size) for _, reads, size in shown for read in reads}
    for made, reads, size in found:
        top, run = boxes[made].middle - 3, boxes[made].run
        later = tuple(boxes[read].middle + 3 for read in reads if read > made)
        behind = tuple(boxes[read].middle + 3 for read in reads if read <= made and (read, size) not in readers)
        if reads[0] > made:
            yield _Strand(top, later[-1], top, later, size)
        elif later or (made, size) not in makers:
            yield _Strand(top, max((ends[run], *later)), top, later, size)
        if behind:
            yield _Strand(tops[run], behind[-1], None, behind, size)


def _lanes(strands: Iterator[_Strand]) -> list[list[_Strand]]:
    """Strands in lanes in which they do not touch; short ones come first."""
    lanes: list[list[_Strand]] = []
    for strand in sorted(strands, key=lambda each: (each.bottom - each.top, each.top)):
        for lane in lanes:
            if all(strand.bottom + 4 < other.top or other.bottom + 4 < strand.top for other in lane):
                lane.append(strand)
                break
        else:
            lanes.append([strand])
    return lanes


# ----------------------------------------------------------------------------------------------------
# The picture.


def _svg(boxes: Sequence[_Box], lanes: Sequence[Sequence[_Strand]], title: str | None, facts: Sequence[str]) -> str:
    """The whole picture: title and facts, and below them the strip."""
    bars = _BAR * max(box.depth for box in boxes)
    top = _MARGIN + (18 if title else 0) + 12 * len(facts) + 10
    height = top + boxes[-1].bottom + _FRAME + _GAP + 20 + _MARGIN
    words = max(_WIDE * 13 * len(title or ""), _WIDE * _SMALL * max(map(len, facts)))
    width = 2 * _MARGIN + max(bars + 2 * _FRAME + _BOX + _LANE * (len(lanes) + 1), words)
    root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:.0f} {height:.0f}")
    root.attrib |= {"width": f"{width:.0f}", "height": f"{height:.0f}", "font-family": _FONT}
    _add(root, "title", title or "chain")
    _add(root, "rect", width="100%", height="100%", fill="white")
    if title:
        _text(root, title, _MARGIN, _MARGIN + 12, 13, font_weight="bold")
    for number, fact in enumerate(reversed(facts)):
        _text(root, fact, _MARGIN, top - 10 - 12 * number, _SMALL, fill=_GREY)
    strip = _add(root, "g", transform=f"translate({_MARGIN + bars:.2f} {top:.2f})")
    for run, repeated in groupby(boxes, lambda box: box.run):
        if run.repeats > 1:
            _draw_frame(strip, list(repeated), run.repeats)
    for lane, strands in enumerate(lanes):
        for strand in strands:
            _draw_strand(strip, strand, 2 * _FRAME + _BOX + _LANE * (lane + 0.7))
    for box, below in zip_longest(boxes, boxes[1:]):
        _draw_box(strip, box)
        _draw_below(strip, box, below)
    ET.indent(root, "")
    return ET.tostring(root, encoding="unicode") + "\n"


def _draw_frame(group: ET.Element, boxes: Sequence[_Box], repeats: int) -> None:
    """Around boxes that repeat, with the number of repetitions where they end."""
    top, bottom, width = boxes[0].top - _FRAME, boxes[-1].bottom + _FRAME, _BOX + 2 * _FRAME
    _add(
        group, "rect", x=0, y=top, width=width, height=bottom - top, rx=6, fill="none", stroke=_GREY, stroke_width=1,
        stroke_dasharray="4 2",
    )  # fmt: skip
    label = f"× {repeats}"
    room = _WIDE * _NAME * len(label) + 8
    _add(group, "rect", x=width - room - 8, y=bottom - 7, width=room, height=14, fill="white")
    middle = width - room / 2 - 8
    _text(group, label, middle, bottom + 4, _NAME, text_anchor="middle", font_weight="bold")


def _draw_box(group: ET.Element, box: _Box) -> None:
    ink, stroke = (_INVERTED, 2.5) if box.option.inverts else (_INK, 0.7)
    _add(
        group, "rect", x=_FRAME, y=box.top, width=_BOX, height=box.bottom - box.top, rx=3, fill=box.colour, stroke=ink,
        stroke_width=stroke,
    )  # fmt: skip
    kept = box.option.saved_bytes + box.option.saved_input_bytes + box.option.saved_output_bytes
    keeps, y = "inverted" if box.option.inverts else f"keeps {format_bytes(kept)}", box.top + _PADDING + _NAME - 1
    room = _BOX - 20 - _WIDE * _SMALL * len(keeps)
    _text(group, shortened(box.name, int(room / (_WIDE * _NAME))), _FRAME + 6, y, _NAME, font_weight="bold")
    _text(group, keeps, _FRAME + _BOX - 6, y, _SMALL, text_anchor="end", fill=ink)
    for number, line in enumerate(box.lines, 1):
        _text(group, line, _FRAME + 6, y + 1 + _LINE * number, _SMALL, fill="#333333")


def _draw_below(group: ET.Element, box: _Box, below: _Box | None) -> None:
    """Bars of the segments that a box is in, and the arrow to the next one with what it hands on."""
    for bar in range(box.depth):
        end = below.top if below is not None and below.depth > bar else box.bottom
        _line(group, -3 - _BAR * bar, box.top, -3 - _BAR * bar, end, _SEGMENT, stroke_width=2.5)
    frame = box.frame if below is None or below.run is not box.run else 0
    x, end = _FRAME + _BOX / 2, box.bottom + frame + _GAP if below is None else below.top
    _line(group, x, box.bottom, x, end - 5, _INK)
    _add(group, "path", d=f"M{x:.1f} {end:.1f}l-3 -6h6z", fill=_INK)
    if box.output_bytes or below is None:  # all that it hands on may be skips
        said = ("output " if below is None else "") + format_bytes(box.output_bytes)
        _text(group, said, x + 7, box.bottom + frame + 11.5, _SMALL, fill=_GREY)


def _draw_strand(group: ET.Element, strand: _Strand, x: float) -> None:
    """From the box that makes it to those that read it, with its size where there is room."""
    edge = _FRAME + _BOX
    if strand.made is not None:
        _line(group, edge, strand.made, x, strand.made, _SKIP)
    for y in strand.reads:
        _line(group, edge + 5, y, x, y, _SKIP)
        _add(group, "path", d=f"M{edge:.1f} {y:.1f}l6 -2.6v5.2z", fill=_SKIP)
    _line(group, x, strand.top, x, strand.bottom, _SKIP)
    label, y = format_bytes(strand.size_bytes), (strand.top + strand.bottom) / 2
    length = _WIDE * _TINY * len(label) + 4
    if strand.bottom - strand.top > length + 4:
        _add(group, "rect", x=x - 4, y=y - length / 2, width=8, height=length, fill="white")
        turned = f"rotate(-90 {x + 2.7:.1f} {y:.1f})"
        _text(group, label, x + 2.7, y, _TINY, text_anchor="middle", fill=_SKIP, transform=turned)


def _line(group: ET.Element, x1: float, y1: float, x2: float, y2: float, stroke: str, stroke_width: float = 1) -> None:
    _add(group, "line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, stroke_width=stroke_width)


def _text(group: ET.Element, text: str, x: float, y: float, font_size: float, **attributes: object) -> None:
    """A line of text, from ``x`` on the baseline ``y``."""
    _add(group, "text", text, x=x, y=y, font_size=font_size, **{"fill": _INK, **attributes})


def _add(parent: ET.Element, tag: str, text: str | None = None, **attributes: object) -> ET.Element:
    """Add an element; underscores in attributes' names become hyphens, and numbers are rounded."""
    child = ET.SubElement(parent, tag)
    child.text = text
    for name, value in attributes.items():
        child.set(name.replace("_", "-"), f"{round(value, 2):g}" if isinstance(value, float) else str(value))
    return child


# ----------------------------------------------------------------------------------------------------
# Names of stages, and what they run.


def _name(names: Sequence[str], run: Run, stage: int, prefix: str) -> str:
    """The name of a stage, or of all that it stands for alone."""
    last = stage + run.repeats - 1 if run.length == 1 else stage
    return from_to(names[stage], names[last], str).removeprefix(prefix)


def _common_prefix(names: Sequence[str]) -> str:
    """What nearly all names of a chain begin with, so that it says nothing: ``"transformer."``."""
    firsts = Counter(name.partition(".")[0] for name in names if "." in name.partition(" … ")[0])
    first, count = max(firsts.items(), key=lambda entry: entry[1], default=("", 0))
    return f"{first}." if count > 0.7 * len(names) else ""


def _lines(labels: Sequence[str]) -> list[str]:
    """Operators as text below a name, with line breaks between them."""
    words = "\u00a0· ".join(label.replace(" ", "\u00a0") for label in labels)
    lines = textwrap.wrap(words, _MOST_LETTERS, max_lines=_MOST_LINES, placeholder=" …", break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]


# They compute nothing. Shown only if a stage does nothing else.
_QUIET = frozenset(
    name
    for line in (
        "size dim numel getattr getitem _assert view reshape transpose permute unsqueeze squeeze expand expand_as",
        "contiguous view_as reshape_as t movedim swapaxes unflatten chunk split unbind detach to type_as",
        "is_floating_point tree_unflatten eq ne lt le gt ge floordiv mod",
    )
    for name in line.split()
)
_PLAIN = {name: name for name in _QUIET} | {"iadd": "add", "isub": "sub", "imul": "mul", "truediv": "div"}


def operator_labels(stage: Stage) -> tuple[str, ...]:
    """What a stage runs, in order and for people; an operator that comes several times in a row once."""
    labels = [label for module in stage.modules for label in _labels(module)]
    loud = [label for label in labels if label not in _QUIET] or labels
    counted = ((label, len(list(group))) for label, group in groupby(loud))
    return tuple(label if count == 1 else f"{label} (×{count})" for label, count in counted)


def _labels(operator: Any) -> Iterator[str]:
    """Labels of a module, a function, or a tensor's method by its name."""
    match operator:
        case GraphSlice():
            for inner in operator.operators:
                yield from _labels(inner)
        case nn.Sequential():
            for member in operator:
                yield from _labels(member)
        case nn.Module():
            yield _described(operator)
        case _:
            name = operator if isinstance(operator, str) else getattr(operator, "__name__", str(operator))
            yield _PLAIN.get(name, name.strip("_"))


def _described(module: Any) -> str:
    match module:
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            return f"Conv {_convolution(module)}"
        case nn.ConvTranspose1d() | nn.ConvTranspose2d() | nn.ConvTranspose3d():
            return f"ConvTranspose {_convolution(module)}"
        case nn.Linear():
            return f"Linear {module.in_features}→{module.out_features}"
        case nn.Embedding():
            return f"Embedding {module.num_embeddings}×{module.embedding_dim}"
        case nn.MultiheadAttention():
            return f"MultiheadAttention {module.embed_dim}, {module.num_heads} heads"
    return re.sub(r"^(BatchNorm)[123]d$", r"\1", type(module).__name__)


def _convolution(module: Any) -> str:
    """Kernel, channels and stride."""
    size, stride = "×".join(map(str, module.kernel_size)), f" /{module.stride[0]}" if module.stride[0] > 1 else ""
    if module.groups == module.in_channels > 1:
        return f"{size} depthwise {module.out_channels}{stride}"
    groups = f", {module.groups} groups" if module.groups > 1 else ""
    return f"{size} {module.in_channels}→{module.out_channels}{groups}{stride}"
