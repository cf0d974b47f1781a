"""Pipelines: where to cut a chain, and how each part runs.

Chain ──► runs of stages ──► bounds ──► candidates ──► simulator ──► Partition
          (each planned      (what a    (dynamic      (the step;
          for its device,    run takes  programs       the judge)
          when it matters)   at least)  over cuts)
"""

from lightning_rotor.pipeline.partition.balance import balance_by_size, balance_by_time, check_balance
from lightning_rotor.pipeline.partition.in_flight import InFlightPlanner, StagePlan, boundary_bytes, sub_chain, with_end
from lightning_rotor.pipeline.partition.problem import Link, PipelineDevice, Problem, RecomputeMode
from lightning_rotor.pipeline.partition.result import Partition
from lightning_rotor.pipeline.partition.solve import PartitionError, partition

__all__ = [
    "InFlightPlanner",
    "Link",
    "Partition",
    "PartitionError",
    "PipelineDevice",
    "Problem",
    "RecomputeMode",
    "StagePlan",
    "balance_by_size",
    "balance_by_time",
    "boundary_bytes",
    "check_balance",
    "partition",
    "sub_chain",
    "with_end",
]
