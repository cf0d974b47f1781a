"""Strategies for Lightning's Trainer; importing this registers their names.

In: Lightning's hooks. Out: calls of :mod:`lightning_rotor.pipeline`, which does the work. Read in this order:

- ``rotor_pipeline``: the strategy; ``pipeline_settings``: its arguments, and what it refuses.
- ``pipeline_builder``: a Trainer's model becomes a pipeline.
- ``micro_batch_training``, with ``micro_batch_logs``: a batch in parts.
"""

from lightning_rotor.strategies.rotor_pipeline import RotorPipelineStrategy

__all__ = ["RotorPipelineStrategy"]
