"""Strategies for Lightning's Trainer; importing this registers their names.

In: Lightning's hooks. Out: calls of :mod:`lightning_rotor.pipeline`, which does the work. Read ``steps``
(training_step, logs, metrics), ``building`` (from a Trainer to a pipeline, and refusals), ``rotor_pipeline`` (hooks).
"""

from lightning_rotor.strategies.rotor_pipeline import RotorPipelineStrategy

__all__ = ["RotorPipelineStrategy"]
