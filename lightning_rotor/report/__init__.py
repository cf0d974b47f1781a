"""A plan's costs, for people: tables for the terminal, pictures, and the command line.

In come plans, frontiers and chains, which know no torch; out go tables, figures of matplotlib (an extra, ``[plot]``)
and SVG. What is imported here registers itself in :mod:`lightning_rotor.shown`. Read in this order:

- ``tables``: a plan, its stages, the curve; ``stage_names`` where room is short.
- ``figures``: what all pictures share. ``timeline`` shows memory over a step, ``frontier_plot`` budget against
  overhead, ``pipeline_plot`` which device of a pipeline does what.
- ``drawing``: the stages of a model, with ``operator_labels``, and ``repeats`` drawn once. ``notebooks``: HTML of all.
- ``advice_table``: batch sizes, and ways to train on several devices.
- ``command_line``: ``lightning-rotor plan``, and its other commands. ``command_options`` may be asked, ``named_models``
  by name; ``command_plan`` plans, ``command_answer`` prints.
"""

from lightning_rotor.report.advice_table import advice_table
from lightning_rotor.report.drawing import Drawing, draw_chain
from lightning_rotor.report.figures import PlotError
from lightning_rotor.report.frontier_plot import plot_frontier
from lightning_rotor.report.notebooks import chain_html, frontier_html, plan_html
from lightning_rotor.report.pipeline_plot import plot_pipeline
from lightning_rotor.report.tables import frontier_table, plan_table, stage_table
from lightning_rotor.report.timeline import plot_timeline
from lightning_rotor.schedule import schedule_line

__all__ = [
    "Drawing",
    "PlotError",
    "advice_table",
    "chain_html",
    "draw_chain",
    "frontier_html",
    "frontier_table",
    "plan_html",
    "plan_table",
    "plot_frontier",
    "plot_pipeline",
    "plot_timeline",
    "schedule_line",
    "stage_table",
]
