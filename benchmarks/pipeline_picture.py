"""The scaling of simulated pipelines in one picture: what is left of perfect scaling, and the least memory per device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_rotor.report.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WAYS = {"rotor": ("#4477AA", "o"), "by time": ("#EE7733", "s"), "equal": ("#228833", "^")}
_SCHEDULES = {"1f1b": ("-", "1F1B"), "interleaved": (":", "interleaved")}
_WIDTH, _HEIGHT = 7.2, 4.4
_GIBIBYTE = 2**30


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A column for each model: efficiency above, memory below, over the number of devices.

    Efficiency is the model's plain forward and backward over what all devices together could have done in the step: bubble and recomputation are
    what is missing.
    """
    from matplotlib.ticker import NullLocator, PercentFormatter, ScalarFormatter

    models = list(dict.fromkeys(row["model"] for row in rows))
    devices = sorted({row["devices"] for row in rows})
    figure = new_figure(_WIDTH, _HEIGHT)
    panels = figure.subplots(2, len(models), sharex=True, sharey="row", squeeze=False)
    for column, model in enumerate(models):
        mine = [row for row in rows if row["model"] == model]
        _lines(panels[0][column], mine, lambda row: (1 - row["bubble"]) * (1 - row["recomputed"]))
        _lines(panels[1][column], mine, lambda row: (row["least_bytes"] or math.nan) / _GIBIBYTE)
        _missing(panels[0][column], mine)
        panels[0][column].set_title(model, fontsize="medium")
        panels[1][column].set_xlabel("devices")
    for axes in panels.flat:
        axes.set_xscale("log", base=2)
        axes.set_xticks(devices, [str(each) for each in devices])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(devices[0] / 1.6, devices[-1] * 1.6)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set(ylim=(0, 1), ylabel="of perfect scaling")
    panels[0][0].yaxis.set_major_formatter(PercentFormatter(1.0))
    panels[1][0].set_yscale("log", base=2)
    panels[1][0].yaxis.set_major_formatter(ScalarFormatter())
    panels[1][0].set(ylabel="least memory\nper device (GiB)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize="small")
    return figure


def _lines(axes: Axes, rows: Sequence[Mapping[str, Any]], value: Any) -> None:
    for schedule, (style, name) in _SCHEDULES.items():
        for way, (colour, marker) in _WAYS.items():
            found = [row for row in rows if (row["schedule"], row["way"]) == (schedule, way) and row["seconds"]]
            found.sort(key=lambda row: row["devices"])
            axes.plot(
                [row["devices"] for row in found], [value(row) for row in found], style, color=colour, marker=marker,
                markersize=4.5, linewidth=1.3, zorder=3 if way == "rotor" else 2, markerfacecolor=colour if schedule == "1f1b" else "white",
                label=f"{'cuts ' if way != 'rotor' else ''}{way}, {name}",
            )  # fmt: skip


def _missing(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Where the chain has fewer stages than there are devices."""
    for devices in sorted({row["devices"] for row in rows}):
        if all(row["seconds"] is None for row in rows if row["devices"] == devices):
            stages = next(row["chain_stages"] for row in rows if row["devices"] == devices)
            axes.text(
                devices, 0.06, f"only {stages}\nstages", ha="center", va="bottom", fontsize="x-small", color="#777777"
            )
