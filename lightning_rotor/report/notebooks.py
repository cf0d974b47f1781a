"""HTML of results for notebooks: a chain's drawing; tables of a plan or curve, below a picture if matplotlib is there.

Registered in :mod:`lightning_rotor.shown`.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from html import escape
from typing import TYPE_CHECKING

from lightning_rotor.chain import Chain
from lightning_rotor.planning import Frontier, Plan
from lightning_rotor.report.drawing import draw_chain
from lightning_rotor.report.figures import PlotError
from lightning_rotor.report.frontier_plot import plot_frontier
from lightning_rotor.report.timeline import plot_timeline
from lightning_rotor.shown import html_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@html_of.register
def chain_html(chain: Chain) -> str:
    """The drawing of a chain, in a box that scrolls."""
    return f'<div style="max-height: 40em; overflow: auto">{draw_chain(chain)}</div>'


@html_of.register
def plan_html(plan: Plan) -> str:
    """The timeline and the tables of a plan."""
    return _picture(lambda: plot_timeline(plan)) + _text(plan)


@html_of.register
def frontier_html(frontier: Frontier) -> str:
    """The picture and the table of a curve."""
    return _picture(lambda: plot_frontier(frontier)) + _text(frontier)


def _picture(plot: Callable[[], Figure]) -> str:
    """A figure as SVG; nothing without matplotlib."""
    picture = io.StringIO()
    # Tables say all that pictures show, so who has no matplotlib gets those.
    with suppress(PlotError):
        plot().savefig(picture, format="svg")
    drawn = picture.getvalue()
    # Without the XML header, which HTML does not want.
    start = max(drawn.find("<svg"), 0)
    return drawn[start:]


def _text(shown: Plan | Frontier) -> str:
    return f'<pre style="line-height: 1.2">{escape(str(shown))}</pre>'
