"""Running a schedule with exact gradients."""

from lightning_rotor.execution.executor import Executor

__all__ = ["Executor"]
