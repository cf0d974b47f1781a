"""What the pictures have in common: colours, and matplotlib itself, which is imported when something is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from lightning_rotor.errors import RotorError
from lightning_rotor.simulator import Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Full and pale; hues of Paul Tol's schemes, which colour-blind readers can tell apart.
PHASE_COLOURS: dict[Phase, tuple[str, str]] = {
    "forward": ("#4477AA", "#B9CCE0"),
    "recompute": ("#EE7733", "#F9CFB3"),
    "backward": ("#66A998", "#C7E0D9"),
}
INVERSION_COLOURS = ("#332288", "#B8B2D6")
INVERSION_LABEL = "inversion"
PHASE_LABELS: dict[Phase, str] = {"forward": "forward", "recompute": "recomputation", "backward": "backward"}
LINE_COLOURS = ("#222222", "#AA3377", "#117733", "#882255")
BUDGET_COLOUR = "#CC3311"
PLAIN_COLOUR = "#555555"


class PlotError(RotorError, RuntimeError):
    """A picture cannot be drawn: matplotlib is missing, or there is nothing to draw."""


def require_matplotlib() -> None:
    """Raise ``PlotError`` if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401  # slow, and not a dependency
    except ImportError as error:
        raise PlotError(
            'drawing needs matplotlib, which is not installed: pip install "lightning-rotor[plot]"'
        ) from error


def new_figure(width: float, height: float) -> Figure:
    """A figure that belongs to no window, in inches; ``PlotError`` without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def clear_frame(axes: Axes, *, which: Literal["major", "minor"] = "major") -> None:
    """No box around the data, pale lines behind it at the ticks of the vertical axis."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", which=which, color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def legend_above(axes: Axes, title: str | None = None, *, columns: int | None = None) -> None:
    """Labels above the figure, in one row unless there are to be so many columns."""
    axes.figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside upper left",
        ncols=columns or len(axes.get_legend_handles_labels()[1]),
        title=title,
        alignment="left",
        frameon=False,
        fontsize="small",
        handlelength=1.3,
        handletextpad=0.5,
        columnspacing=1.2,
    )
