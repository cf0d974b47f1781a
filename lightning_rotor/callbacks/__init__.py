"""Lightning callbacks. The only part of the package, with the strategies, that needs Lightning."""

from lightning_rotor.private.lightning_packages import installed

if not installed():
    raise ModuleNotFoundError(
        "RotorCallback needs Lightning, which is not installed: expected the package 'lightning' or "
        "'pytorch_lightning', 2.6 or newer. Install it with 'pip install lightning', or use "
        "lightning_rotor.Checkpointable without it",
        name="lightning",
    )

from lightning_rotor.callbacks.batch_size_advice import RotorBatchSizeAdvice
from lightning_rotor.callbacks.rotor_callback import RotorCallback

__all__ = ["RotorBatchSizeAdvice", "RotorCallback"]
