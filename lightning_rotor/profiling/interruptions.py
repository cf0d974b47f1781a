"""Work of other processes or threads that has interrupted a measured run.

One cost of 25 ms among others of 0.1 ms comes from the machine and not from the model, and leads to another plan.
"""

from __future__ import annotations

import time

from lightning_rotor.profiling.meters import CpuMeter, Meter

# So long, and for such a part of a run, a thread waits without having been interrupted: for others that compute.
_IDLE_SECONDS = 5e-5
_IDLE_SHARE = 0.1


class Interruptions:
    """Tells whether other work has had the processor during a run, by processor time beside the clock.

    Of the CPU's meter: the host of another device waits for it anyway.
    """

    def __init__(self, meter: Meter) -> None:
        self._is_told = isinstance(meter, CpuMeter)
        self._start = time.perf_counter()
        self._processor_start = time.thread_time()

    def any(self) -> bool:
        """True if there was one since this was made."""
        # Processor time of this thread stands still while others run, and the clock does not.
        seconds = time.perf_counter() - self._start
        processor_seconds = time.thread_time() - self._processor_start
        idle_seconds = seconds - processor_seconds
        return self._is_told and idle_seconds > max(_IDLE_SECONDS, _IDLE_SHARE * seconds)
