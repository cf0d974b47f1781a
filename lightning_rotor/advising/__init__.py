"""Advice on several devices: ways to train a model that fit them, fastest first, from shapes alone.

In: what makes a model, its inputs and optimizers, devices by name. Out: an Advice, which is data. Read in this order:

- ``advice``: the question, all ways, and what was left out.
- ``cluster``: devices and links; ``model_costs``: the model, with ``blocks`` that FSDP2 spreads; ``task``: the two.
- ``choice``: one way to train. ``whole_models`` has one device and DDP, ``sharded_models`` FSDP2 with ``sharded_step``,
  ``pipelines`` pipelines and their copies; ``python_lines`` runs them.

Bytes come from what plans use: the profiler on fake tensors, ``memory.resident_memory``, the planner and its simulator,
``pipeline.partition``. No Lightning in here.
"""

from lightning_rotor.advising.advice import Advice, advise
from lightning_rotor.advising.choice import Choice, StepSeconds
from lightning_rotor.advising.cluster import Cluster

__all__ = ["Advice", "Choice", "Cluster", "StepSeconds", "advise"]
