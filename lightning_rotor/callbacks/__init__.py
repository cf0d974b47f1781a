"""Lightning callbacks. The only part of the package, with the strategies, that needs Lightning."""

try:
    import lightning.pytorch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "RotorCallback needs Lightning, which is not installed: expected the package 'lightning'. Install it with "
        "'pip install lightning', or use lightning_rotor.Checkpointable without it",
        name=error.name,
    ) from error

from lightning_rotor.callbacks.batch_size_advice import RotorBatchSizeAdvice
from lightning_rotor.callbacks.rotor_callback import RotorCallback

__all__ = ["RotorBatchSizeAdvice", "RotorCallback"]
