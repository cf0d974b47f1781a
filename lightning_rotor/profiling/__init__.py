"""Measuring: what each stage of a chain costs, and what a whole step allocates.

In: stages and a sample. Out: a chain of costs. Read in this order:

- ``chain_profiler``: all stages, one after the other; ``chain_profile`` is its result, ``complaints`` its warnings,
  ``progress_bar`` its bar.
- ``scan`` looks at a chain before it is measured, ``stage_behaviour`` at one stage; ``same_results`` proves that
  recorded stages compute what their module computes. ``undrawn_generators`` need not be set back, ``ranks`` asks other
  processes.
- ``stage_profiler``: bytes of one stage, with ``stage_input``, ``stage_backward``, ``stage_ends``, ``storages``,
  ``gradient_layouts`` and ``shared_parameters``. ``stage_identity`` tells which stages cost the same.
- ``stage_seconds`` and ``segment_seconds``: how long; ``interruptions`` by others are left out.
- Further options of a stage: ``variant_costs`` if the user has compiled it, ``inverse_costs`` if it is invertible.
  ``unit_costs`` are those of FSDP2's units.

The means of measuring:

- ``meters``: ``meter_for`` chooses one for a device. ``memory_recording`` is a recording of any device,
  ``cpu_recording`` and ``cuda_recording`` the two kinds. ``workspaces`` are taken before anything is measured.
- ``step_meter``: a whole training step.

Without running the user's model on its device:

- ``estimates``: the profiler on fake tensors, with ``estimating_meter`` and the speeds of ``accelerators``.
  ``models_without_memory`` and ``input_spec`` make model and input.
- ``dry_run``: the user's step on ``fake_copies``; ``assumed_values`` answers it where it asks for values, ``remains``
  takes away what it has left in caches.
  ``step_compute`` counts FLOPs in it, ``returned_tensors`` sees which outputs the step uses.
"""

from lightning_rotor.profiling.chain_profile import Profile
from lightning_rotor.profiling.chain_profiler import profile_chain
from lightning_rotor.profiling.memory_recording import Recording
from lightning_rotor.profiling.meters import AllocatorMeter, CpuMeter, Meter, meter_for
from lightning_rotor.profiling.step_meter import StepMeter

__all__ = ["AllocatorMeter", "CpuMeter", "Meter", "Profile", "Recording", "StepMeter", "meter_for", "profile_chain"]
