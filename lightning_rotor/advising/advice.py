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
    sizes = {spec.shape[0] for spec in inputs if spec.shape}
    if len(sizes) != 1:
        raise AdviceError(
            f"the inputs have first dimensions {sorted(sizes)}: expected one number of samples, in all of them"
        )
    batch = cluster.size * sizes.pop() if batch is None else batch
    if not is_positive_integer(batch):
        raise AdviceError(f"batch is {batch!r}: expected a positive number of samples, on all devices together")
    limit, memory_bytes = parse_limit(mem_limit), cluster.gpu.memory_bytes
    limit_bytes = memory_bytes - CONTEXT_BYTES if limit is None else limit.on_device(memory_bytes)
    each = max(1, batch // cluster.size)
    costs = model_costs(
        make_model, inputs, make_optimizers, cluster.gpu, types, batch_size=each, like=like, progress=progress
    )
    limit_text = f"{limit_bytes / 2**30:.1f}GiB" if mem_limit is None else str(mem_limit)
    task = Task(costs, cluster, batch, limit_bytes, precision, limit_text)

    left_out = {"tensor parallelism": _TENSOR_PARALLEL}
    choices = whole_models(task)
    for name in {"one device": 1, "DDP": cluster.size}:
        if not any(choice.kind == name for choice in choices) and (name != "DDP" or cluster.size > 1):
            left_out[name] = _why_not(task, 1 if name == "one device" else cluster.size)
    choices += sharded_models(task)
    if cluster.size > 1 and not any(choice.kind == "FSDP2" for choice in choices):
        no_blocks = "the model has no container with most of its parameters, whose members could be units"
        left_out["FSDP2"] = no_blocks if costs.sharding is None else _why_not(task, cluster.size)
    objection = pipeline_ways.objection(task)
    found = [] if objection else pipeline_ways.pipelines(task)
    choices += found
    if not found and cluster.size > 1:
        is_tied = any(len(stages) > 1 for stages in costs.tensors.tied)
        tied = "no cut fits, or each has weights on both sides that the model ties" if is_tied else "no cut fits"
        left_out["pipelines"] = objection or tied
    if not choices:
        reasons = "; ".join(f"{way}: {why}" for way, why in left_out.items())
        raise AdviceError(
            f"nothing fits {cluster.size} devices with {format_bytes(limit_bytes)} each: expected more devices or "
            f"memory, or a smaller batch than {batch}. {reasons}"
        )
    choices.sort(key=lambda choice: choice.seconds.total)
    return Advice(tuple(choices), tuple(left_out.items()), cluster, batch, limit_bytes)


def _why_not(task: Task, copies: int) -> str:
    if task.divided(copies) is None:
        return f"{task.batch} samples cannot be divided among {copies} devices"
    return f"no plan fits {format_bytes(task.limit_bytes)}"
