"""Strategies for Lightning's Trainer; importing this registers their names."""

from lightning_rotor.strategies.rotor_pipeline import RotorPipelineStrategy

__all__ = ["RotorPipelineStrategy"]
