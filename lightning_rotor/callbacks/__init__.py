"""Lightning callbacks. The only part of the package, with the strategies, that needs Lightning.

``rotor_callback`` translates hooks into calls of :mod:`lightning_rotor.planned`, and logs the metrics. ``trainer_loop``
is a Trainer as plans see it. ``batch_size_advice`` is a callback that runs before training.
"""

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
