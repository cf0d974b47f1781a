"""Strategies for Lightning's Trainer; importing this registers their names.

In: Lightning's hooks. Out: calls of :mod:`lightning_rotor.pipeline`, which does the work.
"""

from lightning_rotor.strategies.rotor_pipeline import RotorPipelineStrategy

__all__ = ["RotorPipelineStrategy"]
