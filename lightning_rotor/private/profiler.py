"""torch's profiler, as far as it tells of the CPU's allocator."""

import os
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch.autograd.profiler import profile

_KINETO = "KINETO_LOG_LEVEL"
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

    def __enter__(self) -> Any:
        # The profiler's library reads the variable once, when it is first prepared, and else writes lines to stderr
        # about every start.
        is_set = _KINETO in os.environ
        os.environ.setdefault(_KINETO, "99")
        try:
            return super().__enter__()
        finally:
            if not is_set:
                del os.environ[_KINETO]

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


def blocks_in(log: AllocationLog) -> list[tuple[int, Any]]:
    """Nanoseconds and blocks of the CPU that were taken or (negative sizes) given back, in order."""
    results = log.kineto_results
    assert results is not None
    blocks = []
    for event in results.experimental_event_tree():
        block = allocation_of(event)
        if block is not None and block.device.type == "cpu":
            blocks.append((event.start_time_ns, block))
    blocks.sort(key=itemgetter(0))
    return blocks
