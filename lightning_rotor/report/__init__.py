"""What a plan costs, for people: tables for the terminal, and pictures.

    ==========================  ================================================================
    :func:`plan_table`          a plan in a few rows; :func:`stage_table` what it does with which stages
    :func:`frontier_table`      what every budget would cost
    :func:`plot_timeline`       memory over a training step, and which stage runs when
    :func:`plot_pipeline`       one step of a pipeline: which device does what, and what it holds
    :func:`plot_frontier`       budget against overhead
    :func:`draw_chain`          the stages of a model: operators, boundaries, skips, repetitions
    ==========================  ================================================================

Plots need matplotlib (``pip install "lightning-rotor[plot]"``), drawings and tables do not.
"""

from lightning_rotor.planning.frontier import frontier_table
from lightning_rotor.planning.tables import plan_table, schedule_line, stage_table
from lightning_rotor.report.curve import plot_frontier
from lightning_rotor.report.drawing import draw_chain
from lightning_rotor.report.pipeline import plot_pipeline
from lightning_rotor.report.style import PlotError
from lightning_rotor.report.timeline import plot_timeline

__all__ = [
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
