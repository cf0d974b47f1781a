"""What a model will cost on a device that is not there: from shapes alone, without memory and without arithmetic.

model on "meta" ──► fake tensors ──► the profiler, with an estimating meter ──► Chain
                                     bytes: life of every storage
                                     seconds: roofline of a device
"""

from lightning_rotor.estimation.building import InputSpec, build_on_meta
from lightning_rotor.estimation.estimate import estimate_profile
from lightning_rotor.estimation.meter import EstimatingMeter
from lightning_rotor.estimation.roofline import GPUS, Accelerator

__all__ = ["GPUS", "Accelerator", "EstimatingMeter", "InputSpec", "build_on_meta", "estimate_profile"]
