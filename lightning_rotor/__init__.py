"""Train inside a byte limit: measure the model, plan the least recomputation that fits, run it with the same bits.

::

    module ──► stages ──► Chain ──► Plan ──► recomputing forward
              cutting    profiling  planning   execution

With Lightning, one line: ``Trainer(callbacks=[RotorCallback(mem_limit="20GiB")])``. Without it, one wrapper:
``Checkpointable(module, mem_limit="700MiB")``. The parts in between are public too: :func:`sequentialize` cuts a model
into stages, :func:`profile_chain` measures, :func:`plan` plans from measurements alone, :func:`frontier` says what each
budget costs, :func:`simulate` judges any :class:`Schedule`.
From a shell: ``python -m lightning_rotor plan --help``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_rotor.capture.recorder import is_recomputing
from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.checkpointable import Checkpointable
from lightning_rotor.errors import (
    BudgetError,
    ExecutionError,
    ModelError,
    OffloadError,
    OptionError,
    PlanError,
    ProfilingError,
    RotorError,
    RotorWarning,
    SampleError,
    ScheduleError,
    ShortageError,
    UnitError,
)
from lightning_rotor.execution.passes import is_checkpointing
from lightning_rotor.offload import Offload
from lightning_rotor.planned.batch_sizes import BatchSizeAdvice, advise_batch_size
from lightning_rotor.planning import Frontier, Plan, frontier, plan
from lightning_rotor.profiling import profile_chain
from lightning_rotor.schedule import Leaf, Schedule, Segment
from lightning_rotor.simulator import Simulation, simulate
from lightning_rotor.skip import skippable
from lightning_rotor.stages.sequential import sequential_stages
from lightning_rotor.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from lightning_rotor.callbacks import RotorBatchSizeAdvice, RotorCallback
    from lightning_rotor.pipeline.balances import balance_by_size, balance_by_time
    from lightning_rotor.pipeline.pipeline import Pipeline
    from lightning_rotor.strategies import RotorPipelineStrategy

__version__ = "1.0.0"

__all__ = [
    "BatchSizeAdvice",
    "BudgetError",
    "Chain",
    "Checkpointable",
    "ExecutionError",
    "Frontier",
    "Leaf",
    "ModelError",
    "Offload",
    "OffloadError",
    "Option",
    "OptionError",
    "Pipeline",
    "Plan",
    "PlanError",
    "ProfilingError",
    "RotorBatchSizeAdvice",
    "RotorCallback",
    "RotorError",
    "RotorPipelineStrategy",
    "RotorWarning",
    "SampleError",
    "Schedule",
    "ScheduleError",
    "Segment",
    "ShortageError",
    "Simulation",
    "StageCost",
    "UnitError",
    "__version__",
    "advise_batch_size",
    "balance_by_size",
    "balance_by_time",
    "format_bytes",
    "frontier",
    "is_checkpointing",
    "is_recomputing",
    "parse_bytes",
    "plan",
    "profile_chain",
    "sequential_stages",
    "sequentialize",
    "simulate",
    "skippable",
]


# Imported when they are asked for: Lightning is needed for the first three alone, and a pipeline is not for everybody.
_LATER = {
    "RotorBatchSizeAdvice": "lightning_rotor.callbacks",
    "RotorCallback": "lightning_rotor.callbacks",
    "RotorPipelineStrategy": "lightning_rotor.strategies",
    "Pipeline": "lightning_rotor.pipeline.pipeline",
    "balance_by_size": "lightning_rotor.pipeline.balances",
    "balance_by_time": "lightning_rotor.pipeline.balances",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
