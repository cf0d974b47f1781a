"""torch's profiler, as far as it tells of the CPU's allocator."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile

is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""True while torch's profiler records in this thread. There is room for one, and no public question."""


class AllocationLog(profile):
    """A profiler of the CPU that notes allocations and nothing else: no operators, and no ``record_function``.

    Noting operators would cost three times as much. A ``record_function`` that one profiler has seen begin and that
    ends under another one writes into freed memory, and the process crashes (torch 2.14): the optimizer's step is one,
    around the closure in which a step's profiler may be replaced. Public switches have nothing for that.
    """

    def __init__(self) -> None:
        super().__init__(use_cpu=True, use_kineto=False, profile_memory=True)

    def _start_trace(self) -> None:
        module: Any = torch.autograd.profiler
        enable = module._enable_profiler
        # Of models for mobile devices, of which none runs in Python. An empty set would be all scopes.
        scopes = {torch._C._profiler.RecordScope.LITE_INTERPRETER}

        def enable_for_no_scopes(config: Any, activities: Any) -> Any:
            return enable(config, activities, scopes)

        # The parent's method takes no scopes to hand on.
        module._enable_profiler = enable_for_no_scopes
        try:
            super()._start_trace()
        finally:
            module._enable_profiler = enable


def allocation_of(event: Any) -> Any | None:
    """``device``, ``alloc_size`` and ``ptr`` if an event of the profiler's tree is an allocation, or None.

    The public events of ``torch.profiler`` have sums by operation, and no single blocks.
    """
    kind, details = event.typed
    if kind == torch._C._profiler._EventType.Allocation:
        return details
    return None
