"""What the pictures have in common: colours, units, and matplotlib itself, which is imported when something is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
DURATIONS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
SIZES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


class PlotError(RotorError, RuntimeError):
    """A picture cannot be drawn: matplotlib is missing, or there is nothing to draw."""


def require_matplotlib() -> None:
    """Go on only where pictures can be drawn.

    Raises:
        PlotError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401  # slow, and not a dependency
    except ImportError as error:
        raise PlotError(
            'drawing needs matplotlib, which is not installed: pip install "lightning-rotor[plot]"'
        ) from error


def new_figure(width: float, height: float) -> Figure:
    """A figure that belongs to no window, in inches.

    Raises:
        PlotError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def size_unit(size_bytes: float) -> tuple[int, str]:
    """The binary unit in which a size reads best, and its name."""
    return next((unit for unit in SIZES if size_bytes >= unit[0]), SIZES[-1])


def duration_unit(seconds: float) -> tuple[float, str]:
    """The unit in which a duration reads best, and its name."""
    return next((unit for unit in DURATIONS if seconds >= unit[0]), DURATIONS[-1])


def clear_frame(axes: Axes, *, grid: str = "y") -> None:
    """No box around the data, a pale grid behind it."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.9", linewidth=0.6)  # type: ignore[arg-type]
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
