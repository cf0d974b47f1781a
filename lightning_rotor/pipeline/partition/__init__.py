"""Pipelines: where to cut a chain, and how each part runs.

In: a chain, devices, a schedule (``problem``). Out: a Partition (``solve``), or an error that says what would work. In
between::

    chain ──► runs of stages ──► candidates ────────► simulator ──► local search ──► Partition
              (planned when      (``search``: dynamic  (the judge)   (cuts moved)
              they matter,       program over bounds)
              ``in_flight``)

Read ``problem``, ``cuts``, ``sub_chains`` (runs of stages), ``in_flight`` (plans of runs), ``run_costs``,
``seconds_bounds``, ``search``, ``solve``.
"""

from lightning_rotor.pipeline.partition.problem import Link, PipelineDevice, Problem, RecomputeMode
from lightning_rotor.pipeline.partition.solve import Partition, PartitionError, partition

__all__ = ["Link", "Partition", "PartitionError", "PipelineDevice", "Problem", "RecomputeMode", "partition"]
