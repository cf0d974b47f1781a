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

Where there are many boxes they continue in a column to the right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from torch import nn

from lightning_rotor.capture.graph_stage import GraphSlice
from lightning_rotor.chain import Chain, Option
from lightning_rotor.errors import ScheduleError
from lightning_rotor.report import layout as svg
from lightning_rotor.report.layout import (
    BOX,
    FRAME,
    GAP,
    GUTTER,
    LANE,
    LINE,
    MARGIN,
    NAME,
    PADDING,
    SMALL,
    Box,
    Column,
    Layout,
    Run,
    Strand,
    folded,
    stage_keys,
)
from lightning_rotor.report.style import INVERSION_COLOURS, PHASE_COLOURS
from lightning_rotor.schedule import Item, Leaf, Schedule, leaves
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.units import format_bytes

# ----------------------------------------------------------------------------------------------------
# What the operators of a stage are called in a drawing.


# They compute nothing. Shown only if a stage does nothing else.
_QUIET = frozenset(
    name
    for line in (
        "size dim numel getattr getitem _assert view reshape transpose permute unsqueeze squeeze expand expand_as contiguous",
        "view_as reshape_as t movedim swapaxes unflatten chunk split unbind detach to type_as is_floating_point tree_unflatten",
        "eq ne lt le gt ge floordiv mod",
    )
    for name in line.split()
)

_PLAIN = {name: name for name in _QUIET} | {f"i{name}": name for name in ("add", "sub", "mul")} | {"truediv": "div"}


def operator_labels(stage: Stage) -> tuple[str, ...]:
    """What a stage runs, in order and for people; an operator that comes several times in a row once.

    Args:
        stage: With modules of the user's, or slices of a graph that call them.
    """
    labels = [label for module in stage.modules for label in _of_module(module)]
    loud = [label for label in labels if label not in _QUIET] or labels
    counted = ((label, len(list(group))) for label, group in groupby(loud))
    return tuple(label if count == 1 else f"{label} (×{count})" for label, count in counted)


def _of_module(module: nn.Module) -> Iterable[str]:
    if isinstance(module, GraphSlice):
        return [label for operator in module.operators for label in _of_operator(operator)]
    if isinstance(module, nn.Sequential):
        return [label for member in module for label in _of_module(member)]
    return [_described(module)]


def _of_operator(operator: Any) -> Iterable[str]:
    if isinstance(operator, nn.Module):
        return _of_module(operator)
    name = operator if isinstance(operator, str) else getattr(operator, "__name__", str(operator))
    return [_PLAIN.get(name, name.strip("_"))]


def _described(module: nn.Module) -> str:
    for kind, describe in _DESCRIBED.items():
        if isinstance(module, kind):
            return describe(module)
    name = type(module).__name__
    return name.removesuffix("1d").removesuffix("2d").removesuffix("3d") if name.startswith("BatchNorm") else name


def _convolution(module: Any) -> str:
    size = "×".join(map(str, module.kernel_size))
    stride = f" /{module.stride[0]}" if module.stride[0] > 1 else ""
    if module.groups == module.in_channels > 1:
        channels = f"depthwise {module.out_channels}"
    else:
        groups = f", {module.groups} groups" if module.groups > 1 else ""
        channels = f"{module.in_channels}→{module.out_channels}{groups}"
    transposed = "ConvTranspose" if module.transposed else "Conv"
    return f"{transposed} {size} {channels}{stride}"


_DESCRIBED: dict[type[nn.Module], Callable[[Any], str]] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _convolution),
    nn.Linear: lambda module: f"Linear {module.in_features}→{module.out_features}",
    nn.Embedding: lambda module: f"Embedding {module.num_embeddings}×{module.embedding_dim}",
    nn.MultiheadAttention: lambda module: f"MultiheadAttention {module.embed_dim}, {module.num_heads} heads",
}


# ----------------------------------------------------------------------------------------------------


# Paul Tol's scheme for filling cells: apart for colour-blind readers, and light behind black text; then the same, paler.
_COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")
_INK, _GREY, _SKIP = "#222222", "#666666", "#AA3377"
_SEGMENT = PHASE_COLOURS["recompute"][0]
_INVERTED = INVERSION_COLOURS[0]

_MOST_LINES, _BOLD = 4, 1.1


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
        stages: What :func:`~lightning_rotor.profiling.profile_chain` returns along with the chain, for the operators in the boxes.
        schedule: Marks recomputed stages, with a bar for each segment around them, and inverted ones; says what stages keep under it.
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
    labels: list[tuple[str, ...]] = (
        [operator_labels(stage) for stage in stages] if stages is not None else [()] * len(chain)
    )
    depths = _depths(schedule) if schedule is not None else [0] * len(chain)
    options = _options(chain, schedule)
    keys = stage_keys(chain, list(zip(labels, depths, (option.name for option in options), strict=True)))
    runs = folded(keys) if fold else [Run(number, 1, 1) for number in range(len(chain))]
    return _Drawing(chain, labels, depths, options, _colours(keys), runs, title).text()


def _options(chain: Chain, schedule: Schedule | None) -> list[Option]:
    """By stage, how it runs when it is recorded."""
    if schedule is None:
        return [stage.keep for stage in chain]
    return [chain.stages[leaf.stage].options[leaf.option] for item in schedule.items for leaf in leaves(item)]


def _depths(schedule: Schedule) -> list[int]:
    """By stage, in how many segments it is."""
    depths: list[int] = []

    def visit(items: Sequence[Item], depth: int) -> None:
        for item in items:
            if isinstance(item, Leaf):
                depths.append(depth)
            else:
                visit(item.items, depth + 1)

    visit(schedule.items, 0)
    return depths


def _colours(keys: Sequence[Hashable]) -> list[str]:
    """By stage; white for those that are alone."""
    counts = Counter(keys)
    kinds = {key: number for number, key in enumerate(key for key in counts if counts[key] > 1)}
    return ["white" if key not in kinds else _shade(kinds[key]) for key in keys]


def _shade(kind: int) -> str:
    colour = _COLOURS[kind % len(_COLOURS)]
    pale = 0.45 if (kind // len(_COLOURS)) % 2 else 0.0
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * pale):02X}" for part in parts)


class _Drawing:
    def __init__(
        self,
        chain: Chain,
        labels: Sequence[tuple[str, ...]],
        depths: Sequence[int],
        options: Sequence[Option],
        colours: Sequence[str],
        runs: Sequence[Run],
        title: str | None,
    ) -> None:
        self._chain = chain
        self._depths = depths
        self._options = options
        self._colours = colours
        self._runs = runs
        self._title = title or ""
        self._prefix = _common_prefix(chain.names)
        self._bars = 5.0 * max(depths, default=0)
        self._subtitle: list[str] = []
        self._layout = Layout(
            runs,
            [self._lines(each) for each in labels],
            chain.skips,
            header=self._header_height,
            bars=self._bars,
        )

    def _header_height(self, columns: int) -> float:
        self._subtitle = svg.wrapped(list(self._facts()), columns * (BOX + GUTTER) - 2 * FRAME, SMALL)
        # An arrow into the second column passes below it.
        return MARGIN + (18 if self._title else 0) + 12 * len(self._subtitle) + (18 if columns > 1 else 10)

    @staticmethod
    def _lines(labels: Sequence[str]) -> list[str]:
        lines = svg.wrapped(labels, BOX - 12, SMALL)
        if len(lines) > _MOST_LINES:
            lines = [*lines[: _MOST_LINES - 1], f"{svg.fitted(lines[_MOST_LINES - 1], BOX - 24, SMALL)} …"]
        return [svg.fitted(line, BOX - 12, SMALL) for line in lines]

    def _facts(self) -> Iterator[str]:
        chain = self._chain
        yield f"{len(chain)} stages"
        yield f"input {format_bytes(chain.input_bytes)}"
        if chain.skips:
            yield f"{len(chain.skips)} skips"
        if self._prefix:
            yield f"names without “{self._prefix}”"
        if any(colour != "white" for colour in self._colours):
            yield "equal stages share a colour"
        if any(self._depths):
            yield "orange: recomputed, a bar for each level of nesting"
        if any(option.inverts for option in self._options):
            yield "dark blue: inverted, drops its input and rebuilds it from its output"

    # ---------------------------------------------------------------- layout

    # ---------------------------------------------------------------- drawing

    def text(self) -> str:
        """The picture."""
        return svg.document(self._parts(), self._layout.width, self._layout.height, self._title or "chain")

    def _parts(self) -> Iterator[str]:
        y = MARGIN + 12
        if self._title:
            yield svg.text(self._title, MARGIN, y, 13, font_weight="bold", fill=_INK)
            y += 18
        for number, line in enumerate(self._subtitle):
            yield svg.text(line, MARGIN, y + 12 * number, SMALL, fill=_GREY)
        for index, run in enumerate(self._runs):
            if run.repeats > 1:
                yield from self._frames(index, run)
        for column in self._layout.columns:
            for strand in column.strands:
                yield from self._strand(column, strand)
        for place, box in enumerate(self._layout.boxes):
            yield from self._box(box)
            yield from self._arrow(place, box)

    def _frames(self, index: int, run: Run) -> Iterator[str]:
        boxes = [box for box in self._layout.boxes if box.run == index]
        for number, column in enumerate(self._layout.columns):
            inside = [box for box in boxes if box.column == number]
            if not inside:
                continue
            top, bottom = inside[0].top - FRAME, inside[-1].bottom + FRAME
            yield svg.element(
                "rect", x=column.left, y=top, width=BOX + 2 * FRAME, height=bottom - top, rx=6, fill="none",
                stroke=_GREY, stroke_width=1, stroke_dasharray="4 2",
            )  # fmt: skip
            if inside[-1] is boxes[-1]:
                label = f"× {run.repeats}"
                width = svg.text_width(label, NAME) + 8
                x = column.left + BOX + 2 * FRAME - width - 8
                yield svg.element("rect", x=x, y=bottom - 7, width=width, height=14, fill="white")
                yield svg.text(
                    label, x + width / 2, bottom + 4, NAME, text_anchor="middle", font_weight="bold", fill=_INK
                )

    def _box(self, box: Box) -> Iterator[str]:
        option = self._options[box.stage]
        left = self._layout.columns[box.column].left + FRAME
        ink, frame = (_INVERTED, 2.5) if option.inverts else (_INK, 0.7)
        yield svg.element(
            "rect", x=left, y=box.top, width=BOX, height=box.height, rx=3, fill=self._colours[box.stage], stroke=ink,
            stroke_width=frame,
        )  # fmt: skip
        following = next(
            (other for other in self._layout.boxes if other.stage > box.stage and other.column == box.column), None
        )
        for bar in range(self._depths[box.stage]):
            x = left - FRAME - 3 - 5 * bar
            goes_on = following is not None and self._depths[following.stage] > bar
            end = following.top if following is not None and goes_on else box.bottom
            yield svg.element("line", x1=x, y1=box.top, x2=x, y2=end, stroke=_SEGMENT, stroke_width=2.5)
        kept = option.saved_bytes + option.saved_input_bytes + option.saved_output_bytes
        keeps = "inverted" if option.inverts else f"keeps {format_bytes(kept)}"
        room = BOX - 20 - svg.text_width(keeps, SMALL)
        y = box.top + PADDING + NAME - 1
        yield svg.text(self._name(box, room), left + 6, y, NAME, font_weight="bold", fill=_INK)
        yield svg.text(keeps, left + BOX - 6, y, SMALL, text_anchor="end", fill=_INVERTED if option.inverts else _INK)
        for number, line in enumerate(box.lines, 1):
            yield svg.text(line, left + 6, y + 1 + LINE * number, SMALL, fill="#333333")

    def _name(self, box: Box, room: float) -> str:
        """The stage's name; for one that stands for several, those of the first and last. As much of it as has room."""
        run, names = self._runs[box.run], self._chain.names
        name = _shorter(" … ".join(part.removeprefix(self._prefix) for part in names[box.stage].split(" … ")))
        if run.repeats > 1 and run.length == 1:
            last = names[box.stage + run.repeats - 1].rpartition(" … ")[2]
            name = f"{name.partition(' … ')[0]} … {last.rpartition('.')[2]}"
        elif svg.text_width(name, _BOLD * NAME) > room:
            name = name.partition(" … ")[0]
        return svg.fitted(name, room, _BOLD * NAME)

    def _arrow(self, place: int, box: Box) -> Iterator[str]:
        size = self._chain.stages[box.stage].output_bytes
        x = self._layout.columns[box.column].left + FRAME + BOX / 2
        following = self._layout.boxes[place + 1] if place + 1 < len(self._layout.boxes) else None
        # All that goes on may be skips.
        label = (format_bytes(size) if size else "") if following is not None else f"output {format_bytes(size)}"
        if following is not None and following.column != box.column:
            gutter = self._layout.columns[following.column].left - self._bars - GUTTER / 2
            target = self._layout.columns[following.column].left + FRAME + BOX / 2
            low, high = box.bottom + GAP / 2 + FRAME, self._layout.header - 9
            path = f"M{x:.1f} {box.bottom:.1f}V{low:.1f}H{gutter:.1f}V{high:.1f}H{target:.1f}V{following.top - 5:.1f}"
            yield svg.element("path", d=path, fill="none", stroke=_INK, stroke_width=1)
            yield _head(target, following.top)
            if label:
                yield svg.text(label, x + 5, low + 10, SMALL, fill=_GREY)
            return
        is_last_of_run = following is None or following.run != box.run
        frame = FRAME if self._runs[box.run].repeats > 1 and is_last_of_run else 0
        end = following.top if following is not None else box.bottom + frame + GAP
        yield svg.element("line", x1=x, y1=box.bottom, x2=x, y2=end - 5, stroke=_INK, stroke_width=1)
        yield _head(x, end)
        if label:
            yield svg.text(label, x + 7, box.bottom + frame + 11.5, SMALL, fill=_GREY)

    def _strand(self, column: Column, strand: Strand) -> Iterator[str]:
        edge = column.left + FRAME + BOX
        x = edge + FRAME + LANE * (strand.lane + 0.7)
        style: dict[str, Any] = {"fill": "none", "stroke": _SKIP, "stroke_width": 1}
        if strand.made is not None:
            yield svg.element("line", x1=edge, y1=strand.made, x2=x, y2=strand.made, **style)
        for y in strand.reads:
            yield svg.element("line", x1=edge + 5, y1=y, x2=x, y2=y, **style)
            yield svg.element("path", d=f"M{edge:.1f} {y:.1f}l6 -2.6v5.2z", fill=_SKIP)
        yield svg.element("line", x1=x, y1=strand.top, x2=x, y2=strand.bottom, **style)
        label = format_bytes(self._chain.skips[strand.skip].size_bytes)
        length = svg.text_width(label, 7.5) + 4
        if strand.bottom - strand.top > length + 4:
            y = (strand.top + strand.bottom) / 2
            yield svg.element("rect", x=x - 4, y=y - length / 2, width=8, height=length, fill="white")
            yield svg.text(
                label, x + 2.7, y, 7.5, text_anchor="middle", fill=_SKIP, transform=f"rotate(-90 {x + 2.7:.1f} {y:.1f})"
            )


def _head(x: float, y: float) -> str:
    return svg.element("path", d=f"M{x:.1f} {y:.1f}l-3 -6h6z", fill=_INK)


def _shorter(name: str) -> str:
    """``a.b.c … a.b.d`` as ``a.b.c … d``."""
    start, dots, end = name.partition(" … ")
    if not dots:
        return name
    common = 0
    for left, right in zip(start.split(".")[:-1], end.split(".")[:-1], strict=False):
        if left != right:
            break
        common += 1
    return f"{start} … {'.'.join(end.split('.')[common:])}"


def _common_prefix(names: Sequence[str]) -> str:
    """What nearly all names of a chain begin with, so that it says nothing: ``"transformer."``."""
    firsts = Counter(name.partition(".")[0] for name in names if "." in name.partition(" … ")[0])
    first, count = max(firsts.items(), key=lambda entry: entry[1], default=("", 0))
    return f"{first}." if count > 0.7 * len(names) else ""
