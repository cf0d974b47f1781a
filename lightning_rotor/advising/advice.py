"""All ways to train a model on some devices that fit, fastest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lightning_rotor.advising import pipelines as pipeline_ways
from lightning_rotor.advising.choice import Choice
from lightning_rotor.advising.cluster import Cluster
from lightning_rotor.advising.model_costs import MakeOptimizers, Precision, model_costs
from lightning_rotor.advising.sharded_models import sharded_models
from lightning_rotor.advising.task import Task
from lightning_rotor.advising.whole_models import whole_models
from lightning_rotor.errors import AdviceError
from lightning_rotor.profiling.chain_profiler import Progress
from lightning_rotor.profiling.input_spec import InputSpec
from lightning_rotor.shown import Shown
from lightning_rotor.units import format_bytes, is_positive_integer, parse_limit

# For the CUDA context and libraries, and for what the allocator cannot use.
CONTEXT_BYTES = 2**30
_TENSOR_PARALLEL = "this version does not plan it, and does not estimate it either"


@dataclass(frozen=True, slots=True)
class Advice(Shown):
    """Ways to train that fit. Printed, it is a table.

    Attributes:
        choices: Fastest first.
        left_out: Ways that are not among them, with the reason.
        cluster: The devices.
        batch: Samples of a step, on all devices together.
        limit_bytes: That training may hold on each device.
    """

    choices: tuple[Choice, ...]
    left_out: tuple[tuple[str, str], ...]
    cluster: Cluster
    batch: int
    limit_bytes: int

    @property
    def best(self) -> Choice:
        """The fastest."""
        return self.choices[0]


def advise(
    make_model: Callable[[], nn.Module],
    inputs: Sequence[InputSpec],
    make_optimizers: MakeOptimizers,
    cluster: Cluster,
    *,
    batch: int | None = None,
    precision: str = "32-true",
    mem_limit: int | float | str | None = None,
    like: Literal["cpu", "cuda"] = "cuda",
    progress: Progress | None = None,
) -> Advice:
    """Estimate all ways to train a model on some devices, without running it.

    Args:
        make_model: Makes the model, which returns what is to be trained (mostly its loss). It is called several times.
        inputs: Of a call. Their first dimension is the number of samples.
        make_optimizers: Makes the optimizers of a model.
        cluster: The devices.
        batch: Samples of a step, on all devices together; by default those of ``inputs`` on each.
        precision: As Lightning names it.
        mem_limit: What training may hold on each device, as for :class:`~lightning_rotor.RotorCallback`; by default all
            but 1 GiB of its memory.
        like: Whose operators and allocator to estimate.
        progress: Called with the number of stages done and their total.
    Raises:
        AdviceError: Wrong arguments, or nothing fits.
        ModelError: The model cannot be cut into stages from shapes alone.
    """
    types = Precision.of(precision)
    # A scalar belongs to no sample.
    sizes = {spec.shape[0] for spec in inputs if spec.shape}
    if len(sizes) != 1:
        raise AdviceError(
            f"the inputs have first dimensions {sorted(sizes)}: expected one number of samples, in all of them"
        )
    if batch is None:
        batch = cluster.size * sizes.pop()
    if not is_positive_integer(batch):
        raise AdviceError(f"batch is {batch!r}: expected a positive number of samples, on all devices together")
    memory_bytes = cluster.gpu.memory_bytes
    limit = parse_limit(mem_limit)
    if limit is None:
        limit_bytes = memory_bytes - CONTEXT_BYTES
        limit_text = f"{limit_bytes / 2**30:.1f}GiB"
    else:
        limit_bytes = limit.on_device(memory_bytes)
        # As it was given, for the lines of Python: a share of the memory stays a share on another device.
        limit_text = str(mem_limit)
    costs = model_costs(
        make_model,
        inputs,
        make_optimizers,
        cluster.gpu,
        types,
        # What a device gets where all of them share the batch.
        batch_size=max(1, batch // cluster.size),
        like=like,
        progress=progress,
    )
    task = Task(costs, cluster, batch, limit_bytes, precision, limit_text)
    choices, left_out = _ways(task)
    if not choices:
        reasons = "; ".join(f"{way}: {why}" for way, why in left_out.items())
        raise AdviceError(
            f"nothing fits {cluster.size} devices with {format_bytes(limit_bytes)} each: expected more devices or "
            f"memory, or a smaller batch than {batch}. {reasons}"
        )
    # By all seconds of a step of the whole batch, which is the same for all ways.
    choices.sort(key=lambda choice: choice.seconds.total)
    return Advice(tuple(choices), tuple(left_out.items()), cluster, batch, limit_bytes)


def _ways(task: Task) -> tuple[list[Choice], dict[str, str]]:
    """Ways that fit, and by name the reasons against all others: who misses one must not have to guess."""
    devices = task.cluster.size
    left_out = {"tensor parallelism": _TENSOR_PARALLEL}
    choices = whole_models(task)
    kinds = {choice.kind for choice in choices}
    if "one device" not in kinds:
        left_out["one device"] = _why_not(task, 1)
    if devices == 1:
        return choices, left_out
    if "DDP" not in kinds:
        left_out["DDP"] = _why_not(task, devices)
    sharded = sharded_models(task)
    choices += sharded
    if not sharded:
        left_out["FSDP2"] = _why_not(task, devices)
        if task.costs.sharding is None:
            left_out["FSDP2"] = "the model has no container with most of its parameters, whose members could be units"
    # Asked first: the search for cuts knows nothing of what the strategy refuses, and takes long.
    objection = pipeline_ways.objection(task)
    if objection:
        left_out["pipelines"] = objection
        return choices, left_out
    pipelines = pipeline_ways.pipelines(task)
    choices += pipelines
    if not pipelines:
        left_out["pipelines"] = "no cut fits"
    return choices, left_out


def _why_not(task: Task, copies: int) -> str:
    # Before memory: where the batch cannot be shared out, no plan was asked for.
    if task.divided(copies) is None:
        return f"{task.batch} samples cannot be divided among {copies} devices"
    return f"no plan fits {format_bytes(task.limit_bytes)}"
