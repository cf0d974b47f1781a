"""What a plan costs, for people: tables for the terminal, pictures, and the command line.

In come plans, frontiers and chains, which know no torch; out go tables, figures of matplotlib (an extra, ``plot``)
and SVG. Read in this order: :mod:`timeline` (memory over a step, budget against overhead, which device of a pipeline
does what), :mod:`drawing` (the stages of a model), :mod:`command_line` (options to a plan, and the answer). The
tables are made in :mod:`lightning_rotor.planning`.
"""

from lightning_rotor.planning.plan import frontier_table, plan_table, schedule_line, stage_table
from lightning_rotor.report.drawing import Drawing, draw_chain
from lightning_rotor.report.timeline import PlotError, plot_frontier, plot_pipeline, plot_timeline

__all__ = [
    "Drawing",
    "PlotError",
    "draw_chain",
    "frontier_table",
    "plan_table",
    "plot_frontier",
    "plot_pipeline",
    "plot_timeline",
    "schedule_line",
    "stage_table",
]
