"""A model's costs from shapes alone, for batches of any size, and what training it holds.

Chains are estimated at two batch sizes, the smaller being what a device gets where all share the batch. Other sizes
follow from the two (``planned.batch_sizes.AffineCosts``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from lightning_rotor.advising.blocks import Blocks, blocks_of, by_unit, unit_of_each
from lightning_rotor.chain import Chain
from lightning_rotor.errors import AdviceError
from lightning_rotor.memory.held import storage_bytes
from lightning_rotor.memory.resident_memory import ResidentMemory
from lightning_rotor.pipeline.partition.problem import SharedTensors
from lightning_rotor.pipeline.placement import shared_tensors, tensors_of
from lightning_rotor.planned.batch_sizes import AffineCosts
from lightning_rotor.profiling.accelerators import Accelerator
from lightning_rotor.profiling.chain_profile import Profile
from lightning_rotor.profiling.chain_profiler import Progress
from lightning_rotor.profiling.estimates import estimate_profiles
from lightning_rotor.profiling.input_spec import InputSpec
from lightning_rotor.profiling.models_without_memory import build_on_meta
from lightning_rotor.stages.sequential import Stage

MakeOptimizers = Callable[[nn.Module], Sequence[torch.optim.Optimizer]]
_TYPES = {"bf16": torch.bfloat16, "16": torch.float16}


@dataclass(frozen=True, slots=True)
class Precision:
    """A type for all of the model in the place of float32, or for autocast; both None for 32 bit."""

    floating: torch.dtype | None = None
    mixed: torch.dtype | None = None

    @classmethod
    def of(cls, name: str) -> Precision:
        """A precision as Lightning names it."""
        bits, _, kind = name.partition("-")
        if name == "32-true":
            return cls()
        if bits not in _TYPES or kind not in ("true", "mixed"):
            raise AdviceError(
                f"precision {name!r} is unknown: expected 32-true, bf16-true, 16-true, bf16-mixed or 16-mixed"
            )
        if kind == "true":
            return cls(floating=_TYPES[bits])
        return cls(mixed=_TYPES[bits])


@dataclass(frozen=True, slots=True)
class SpreadParameters:
    """Parameters that ``fully_shard`` spreads together: of each its rows, the bytes of a row, and if it learns."""

    parameters: tuple[tuple[int, int, bool], ...]

    @classmethod
    def of(cls, parameters: Sequence[torch.Tensor]) -> SpreadParameters:
        """Of some tensors."""
        listed = []
        for parameter in parameters:
            rows = parameter.shape[0] if parameter.dim() else 1
            listed.append((rows, parameter.nbytes // max(rows, 1), parameter.requires_grad))
        return cls(tuple(listed))

    def shard_bytes(self, processes: int, *, learning: bool = False) -> int:
        """Bytes of one process's part, of what learns alone if asked."""
        size_bytes = 0
        for rows, row_bytes, learns in self.parameters:
            if learns or not learning:
                # Whole rows: FSDP2 cuts parameters along their first dimension, and pads all parts to the largest.
                own_rows = -(-rows // processes)
                size_bytes += own_rows * row_bytes
        return size_bytes


@dataclass(frozen=True, slots=True)
class StageTensors:
    """Tensors of a chain's stages.

    Attributes:
        held_bytes: By stage, parameters and buffers.
        learning_bytes: By stage, parameters that learn.
        outside_bytes: Parameters and buffers that no stage has.
        shared: Those that several stages use; their ``state_bytes`` are those of parameters and buffers alone.
    """

    held_bytes: tuple[int, ...]
    learning_bytes: tuple[int, ...]
    outside_bytes: int
    shared: tuple[SharedTensors, ...]

    @classmethod
    def of(cls, model: nn.Module, stages: Sequence[Stage]) -> StageTensors:
        """Of a model that was cut into stages."""
        tensors_by_stage = list(map(tensors_of, stages))
        in_stages: set[int] = set()
        for tensors in tensors_by_stage:
            in_stages.update(map(id, tensors))
        around = []
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in in_stages:
                around.append(tensor)
        return cls(
            held_bytes=tuple(map(storage_bytes, tensors_by_stage)),
            learning_bytes=tuple(storage_bytes(stage.learning()) for stage in stages),
            outside_bytes=storage_bytes(around),
            # Sizes in the advised GPU's blocks would differ by less than a block for each parameter.
            shared=shared_tensors(stages, storage_bytes, block_bytes=1),
        )


@dataclass(frozen=True, slots=True)
class Sharding:
    """The model in units of FSDP2.

    Attributes:
        containers: Names of the modules whose members are units.
        units: Parameters of each unit, and last those of the rest of the model.
        costs: Of the chain in which each unit is one stage.
        unit_of_stage: For each stage of that chain, the number of its unit, or None for the rest of the model.
        tensors: Of the stages of that chain.
    """

    containers: tuple[str, ...]
    units: tuple[SpreadParameters, ...]
    costs: AffineCosts
    unit_of_stage: tuple[int | None, ...]
    tensors: StageTensors


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Costs of training a model.

    Attributes:
        costs: Of the chain, its stages as fine as they are cut.
        tensors: Of its stages.
        resident: What training holds beside a chain, with a batch of the larger estimated size.
        sharding: Its units; None where the model has no blocks.
    """

    costs: AffineCosts
    tensors: StageTensors
    resident: ResidentMemory
    sharding: Sharding | None

    @property
    def trained_bytes(self) -> int:
        """Bytes of the gradients of all that learns."""
        return self.resident.chain_gradient_bytes + self.resident.outside_gradient_bytes

    @property
    def state_scale(self) -> float:
        """Bytes of optimizer state for each byte that learns."""
        # A share and not a sum, as each device of a pipeline or of FSDP2 has the state of its own part.
        return self.resident.optimizer_bytes / max(self.trained_bytes, 1)

    @property
    def temporary_scale(self) -> float:
        """Bytes that an optimizer's step takes for each byte that learns."""
        return (self.resident.temporary_bytes or 0) / max(self.trained_bytes, 1)

    def resident_at(self, batch_size: int) -> ResidentMemory:
        """Memory that training holds beside a chain, for a batch size."""
        # The batch was that of the larger estimated size, and nothing else depends on it.
        batch_bytes = -(-self.resident.batch_bytes * batch_size // self.costs.sizes[1])
        return replace(self.resident, batch_bytes=batch_bytes)


def model_costs(
    make_model: Callable[[], nn.Module],
    inputs: Sequence[InputSpec],
    make_optimizers: MakeOptimizers,
    accelerator: Accelerator,
    precision: Precision,
    *,
    batch_size: int,
    like: Literal["cpu", "cuda"] = "cuda",
    progress: Progress | None = None,
) -> ModelCosts:
    """Costs of a model at ``batch_size`` samples and at twice as many, and so at all sizes.

    ``like`` decides on operators and allocator, see :func:`.estimate_profile`.
    """
    # Code may drop a dimension of one sample that others have.
    small = max(2, batch_size)
    sizes = small, 2 * small
    largest = [_of_size(spec, sizes[1]) for spec in inputs]
    resident = _resident(make_model, largest, make_optimizers, precision, like)
    profiles_by_size: list[list[Profile]] = []
    for size in sizes:
        # A model for each size: estimating gives it fake tensors, which belong to one run.
        model = _built(make_model, precision)
        blocks = blocks_of(model)
        ways: list[Callable[[Sequence[Stage]], Sequence[Stage]]] = [tuple]
        if blocks is not None:
            ways.append(by_unit(blocks))
        profiles = estimate_profiles(
            model,
            [_of_size(spec, size) for spec in inputs],
            accelerator,
            ways,
            like=like,
            progress=progress,
            autocast=precision.mixed,
            floating=precision.floating,
        )
        profiles_by_size.append(profiles)
    # The last model's tensors are those of the last profiles.
    last_profiles = profiles_by_size[1]
    sharding = None
    if blocks is not None:
        by_blocks = AffineCosts(sizes, _chains(profiles_by_size, 1))
        sharding = _sharding(model, blocks, last_profiles[1].stages, by_blocks)
    return ModelCosts(
        costs=AffineCosts(sizes, _chains(profiles_by_size, 0)),
        tensors=StageTensors.of(model, last_profiles[0].stages),
        resident=resident,
        sharding=sharding,
    )


def _chains(profiles_by_size: Sequence[Sequence[Profile]], way: int) -> tuple[Chain, Chain]:
    small, large = profiles_by_size
    return small[way].chain, large[way].chain


def _built(make_model: Callable[[], nn.Module], precision: Precision) -> nn.Module:
    model = build_on_meta(make_model)
    if precision.floating is None:
        return model
    return model.to(precision.floating)


def _of_size(spec: InputSpec, batch_size: int) -> InputSpec:
    if not spec.shape:
        # A scalar belongs to no sample.
        return spec
    return replace(spec, shape=(batch_size, *spec.shape[1:]))


def _resident(
    make_model: Callable[[], nn.Module],
    inputs: Sequence[InputSpec],
    make_optimizers: MakeOptimizers,
    precision: Precision,
    like: str,
) -> ResidentMemory:
    """Memory that training holds beside a chain, with the optimizers' way of stepping on the device."""
    model = _built(make_model, precision)
    device = torch.device("meta")
    optimizers = list(make_optimizers(model))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # torch's default on GPUs, which it cannot tell from tensors without a device.
            if like == "cuda" and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
    # On meta: only its bytes count.
    batch = [spec.make(device, floating=precision.floating) for spec in inputs]
    return ResidentMemory.of(model, model, optimizers, batch, device)


def _sharding(model: nn.Module, blocks: Blocks, stages: Sequence[Stage], costs: AffineCosts) -> Sharding:
    units = []
    spread: set[int] = set()
    # The model last: it is the unit of all that no block has spread.
    for module in (*blocks.modules, model):
        parameters = [parameter for parameter in module.parameters() if id(parameter) not in spread]
        spread.update(map(id, parameters))
        units.append(SpreadParameters.of(parameters))
    unit_of_stage = tuple(unit_of_each(stages, blocks))
    return Sharding(blocks.containers, tuple(units), costs, unit_of_stage, StageTensors.of(model, stages))
