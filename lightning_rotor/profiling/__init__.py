"""Measuring: what each stage of a chain costs, and what a whole step allocates.

In: stages and a sample. Out: a chain of costs. Read ``chain_profiler``, then ``scan``, ``stage`` and ``options``;
``estimates`` does the same without a device.
"""

from lightning_rotor.profiling.chain_profile import Profile
from lightning_rotor.profiling.chain_profiler import profile_chain
from lightning_rotor.profiling.memory_recording import Recording
from lightning_rotor.profiling.meters import CpuMeter, CudaMeter, Meter, meter_for
from lightning_rotor.profiling.step_meter import StepMeter

__all__ = ["CpuMeter", "CudaMeter", "Meter", "Profile", "Recording", "StepMeter", "meter_for", "profile_chain"]
