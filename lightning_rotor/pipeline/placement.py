"""Which process has which weights, and checkpoints and norms of gradients over all of them.

Each process keeps the weights of its own stages and of everything outside of the pipeline. Parameters on ``meta`` stand
for the others, so names, shapes and parameter numbers in optimizers are those of the whole model everywhere. A tensor
that stages of several processes use is held by each of them, and owned by the first, whose values count.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lightning_rotor.errors import PipelineError
from lightning_rotor.memory.held import storage_bytes
from lightning_rotor.pipeline.partition.problem import SharedTensors
from lightning_rotor.pipeline.processes import PipelineProcesses, share
from lightning_rotor.pipeline.shared_gradients import PIECE_BYTES, SharedGradients, SharedParameter
from lightning_rotor.private.values import bytes_of, tensors_in, tree_map_only
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.units import in_blocks


def tensors_of(stage: Stage) -> list[torch.Tensor]:
    """Parameters and buffers of a stage."""
    buffers: dict[int, torch.Tensor] = {}
    for _, module in stage.submodules():
        for buffer in module._buffers.values():
            if buffer is not None:
                buffers[id(buffer)] = buffer
    return [*stage.parameters(), *buffers.values()]


class _Slot(NamedTuple):
    """A place in which a module has a tensor, and the processes that hold it. Several places may have the same one."""

    table: dict[str, Any]
    name: str
    original: torch.Tensor
    holders: tuple[int, ...]

    @property
    def owner(self) -> int:
        """The process whose values count."""
        return self.holders[0]


class Placement:
    """Which process of a pipeline has which tensors of a model.

    Raises:
        PipelineError: A module outside of the one that is cut holds a parameter that one inside holds, too.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        stages: Sequence[Sequence[Stage]],
        processes: PipelineProcesses,
    ) -> None:
        self._device, self._group = processes.device, processes.group
        self._rank, self._size = processes.rank, processes.size
        self._stages_of = _stages_of_tensors(stages)
        _require_none_outside(model, module, self._stages_of)
        # In the modules' own tables: names, shapes and order of parameters stay those of the whole model.
        self._slots: list[_Slot] = []
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                self._slots += self._slots_in(table)
        # By key of the state_dict.
        self._owner_by_name: dict[str, int] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            owner = self._owner_of(tensor)
            if owner is not None:
                self._owner_by_name[name] = owner

        shared = []
        for name, parameter in model.named_parameters():
            holders = self._holders_of(parameter)
            if len(holders) > 1:
                shared.append(SharedParameter(name, parameter, holders))
        self.shared_gradients = SharedGradients(shared, processes)

    def _slots_in(self, table: dict[str, Any]) -> list[_Slot]:
        """Slots of a module's table for tensors of the pipeline's stages."""
        slots = []
        for name, tensor in table.items():
            holders = self._holders_of(tensor)
            if tensor is not None and holders:
                slots.append(_Slot(table, name, tensor, holders))
        return slots

    def stages_of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Pipeline stages that use a tensor of the model, in order; none if it is outside."""
        return self._stages_of.get(id(tensor), ())

    def _holders_of(self, tensor: Any) -> tuple[int, ...]:
        """The processes that hold a tensor of the stages, its owner first; none if it is outside, and all hold it."""
        processes = [stage % self._size for stage in self._stages_of.get(id(tensor), ())]
        # Each once, in the order of the pipeline.
        return tuple(dict.fromkeys(processes))

    def _owner_of(self, tensor: Any) -> int | None:
        """The process whose values of a tensor count; None if it is outside."""
        holders = self._holders_of(tensor)
        return holders[0] if holders else None

    def give_up(self) -> None:
        """Replace the parameters and buffers of other processes by ones without memory."""
        stand_ins: dict[int, torch.Tensor] = {}
        for slot in self._slots:
            if self._rank in slot.holders:
                continue
            # Tied parameters stay tied: one stand-in for all places of a tensor.
            original = slot.original
            if id(original) not in stand_ins:
                stand_ins[id(original)] = _stand_in(original)
                # Other holders of the tensor then hold no memory.
                original.data = original.new_empty(0)
            slot.table[slot.name] = stand_ins[id(original)]

    def restore(self, *, values: bool = True) -> None:
        """Put back everything, in the original objects.

        Without ``values``, after an error, other processes are not asked: their parameters become NaN, so that nobody
        takes them for trained ones.
        """
        done: set[int] = set()
        for slot in self._slots:
            original, stand_in = slot.original, slot.table[slot.name]
            if id(original) not in done:
                done.add(id(original))
                if self._rank not in slot.holders:
                    # New memory in the old object, which optimizers and users hold.
                    original.data = torch.empty(stand_in.shape, dtype=stand_in.dtype, device=self._device)
                    if not values and original.is_floating_point():
                        original.data.fill_(math.nan)
                if values:
                    share(original.data, self._group, source=slot.owner)
            if isinstance(original, nn.Parameter) and stand_in is not None:
                # It may have been frozen meanwhile.
                original.requires_grad_(stand_in.requires_grad)
            slot.table[slot.name] = original

    # ---------------------------------------------------------------- checkpoints

    def whole_state_dict(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The whole model's state on the first process, in the order of its keys; elsewhere the local state."""
        owned = {}
        for name, value in own.items():
            if self._owner_by_name.get(name) == self._rank:
                owned[name] = value
        # Stand-ins on meta are in ``own``, too, and give way to the tensors of the processes that have them.
        return {**own, **self._together(owned)}

    def whole_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """State of an optimizer for all parameters, on the pipeline's first process."""
        state = optimizer.state_dict()
        own_entries = state["state"]
        entries = self._together(own_entries) | own_entries
        in_order = {number: entries[number] for number in sorted(entries)}
        return {**state, "state": in_order}

    def own_optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The part of a whole optimizer state that belongs here."""
        numbers: list[int] = []
        for group in state["param_groups"]:
            numbers += group["params"]
        parameters: list[torch.Tensor] = []
        for own_group in optimizer.param_groups:
            parameters += own_group["params"]
        # Numbers count parameters over all groups, in order. Optimizers check by themselves that there are as many.
        here = set()
        for number, parameter in zip(numbers, parameters, strict=False):
            if not parameter.is_meta:
                here.add(number)
        entries = {number: entry for number, entry in state["state"].items() if number in here}
        return {**state, "state": entries}

    def _together(self, part: Mapping[Any, Any]) -> dict[Any, Any]:
        """Entries of all processes on the first one, of several the earlier process's; elsewhere nothing."""
        if self._size == 1:
            return dict(part)
        if self._rank == 0:
            parts: list[Any] | None = [None] * self._size
            sent = part
        else:
            parts = None
            # Pickled tensors of a GPU would be restored on the device of that number, in the other process.
            sent = tree_map_only(torch.Tensor, _on_host, dict(part))
        dist.gather_object(sent, parts, group=self._group, group_dst=0)
        together: dict[Any, Any] = {}
        # Reversed, so that the earliest process writes last.
        for own in reversed(parts or []):
            together.update(own)
        return together

    # ---------------------------------------------------------------- gradients

    def clip_by_norm(self, parameters: Iterable[torch.Tensor], limit: float) -> torch.Tensor:
        """Clip gradients by their norm over all processes, and return the norm before."""
        parameters = list(parameters)
        # By place in the list, the norm and how many have it: what several processes hold counts once.
        told = torch.zeros(2, len(parameters), dtype=torch.float64, device=self._device)
        for place, parameter in enumerate(parameters):
            owner = self._owner_of(parameter) or 0
            counts_here = self._rank == owner
            if parameter.grad is not None and counts_here:
                told[0, place] = torch.linalg.vector_norm(parameter.grad)
                told[1, place] = 1
        if self._size > 1:
            dist.all_reduce(told, group=self._group)
        # In the order and the precision of one process, for the same bits.
        norms = []
        for place in told[1].nonzero().flatten().tolist():
            norms.append(told[0, place].to(parameters[place].dtype))
        norm = torch.zeros((), device=self._device)
        if norms:
            norm = torch.linalg.vector_norm(torch.stack(norms))
        learning = [parameter for parameter in parameters if parameter.grad is not None]
        torch.nn.utils.clip_grads_with_norm_(learning, limit, norm)
        return norm


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _stand_in(original: torch.Tensor) -> torch.Tensor:
    """A tensor without memory, of the same shape and kind."""
    stand_in: torch.Tensor = torch.empty_like(original, device="meta")
    if isinstance(original, nn.Parameter):
        stand_in = nn.Parameter(stand_in, original.requires_grad)
    return stand_in


def _stages_of_tensors(stages: Sequence[Sequence[Stage]]) -> dict[int, tuple[int, ...]]:
    """Pipeline stages by id of a parameter or buffer of the chain."""
    stages_of: dict[int, tuple[int, ...]] = {}
    for number, parts in enumerate(stages):
        for stage in parts:
            for tensor in tensors_of(stage):
                others = stages_of.get(id(tensor), ())
                if number not in others:
                    stages_of[id(tensor)] = (*others, number)
    return stages_of


def _require_none_outside(model: nn.Module, module: nn.Module, stages_of: Mapping[int, tuple[int, ...]]) -> None:
    """``PipelineError`` if a module outside of the one that is cut holds a parameter that one inside holds, too.

    Inside, modules that no stage calls may hold it as well: T5 ties both embeddings to one that it never calls.
    """
    # A traced forward may read parameters of modules outside: only these hold them.
    inside = set(map(id, module.modules()))
    held_inside: set[int] = set()
    for submodule in module.modules():
        held_inside.update(map(id, submodule._parameters.values()))
    for name, submodule in model.named_modules():
        if id(submodule) in inside:
            continue
        for key, parameter in submodule._parameters.items():
            if id(parameter) not in stages_of or id(parameter) not in held_inside:
                continue
            path = f"{name}.{key}".lstrip(".")
            raise PipelineError(
                f"pipeline stage {stages_of[id(parameter)][0]} shares the parameter {path!r} with what is outside of "
                "the pipeline: expected each parameter in one place. Let module=... name a module that holds both, or "
                "untie the weights"
            )


def outside(model: nn.Module, module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of the model that are not the module's."""
    # By identity, as tied parameters have several names.
    inside = {id(tensor) for tensor in _tensors(module)}
    return [tensor for tensor in _tensors(model) if id(tensor) not in inside]


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def shared_tensors(
    stages: Sequence[Stage],
    kept: Callable[[Sequence[torch.Tensor]], int],
    block_bytes: int,
) -> tuple[SharedTensors, ...]:
    """Parameters and buffers that several stages use; ``kept`` says what training keeps of some besides gradients."""
    readers: dict[int, list[int]] = {}
    tensor_by_id: dict[int, torch.Tensor] = {}
    for number, stage in enumerate(stages):
        for tensor in tensors_of(stage):
            tensor_by_id[id(tensor)] = tensor
            readers.setdefault(id(tensor), []).append(number)
    together: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for identity, numbers in readers.items():
        if len(numbers) > 1:
            together.setdefault(tuple(numbers), []).append(tensor_by_id[identity])
    shared = []
    for stage_numbers, tensors in together.items():
        gradient_sizes = [in_blocks(bytes_of(tensor), block_bytes) for tensor in tensors if tensor.requires_grad]
        shared.append(
            SharedTensors(
                stages=stage_numbers,
                state_bytes=kept(tensors),
                gradient_bytes=sum(gradient_sizes),
                message_bytes=min(max(gradient_sizes, default=0), PIECE_BYTES),
            )
        )
    return tuple(shared)


def kept_bytes(tensors: Sequence[torch.Tensor], optimizer_scale: float) -> int:
    """Bytes of parameters and buffers, and of optimizer state, so many for each byte that learns."""
    learning_bytes = _learning_bytes(tensors)
    return storage_bytes(tensors) + round(optimizer_scale * learning_bytes)


def bytes_around(model: nn.Module, module: nn.Module, batch: Any, optimizer_scale: float) -> int:
    """Bytes that a process holds besides the stages of a module: what is outside, its gradients, and the batch."""
    around = outside(model, module)
    # Stages of the pipeline count their gradients themselves.
    bytes_outside = kept_bytes(around, optimizer_scale) + _learning_bytes(around)
    return bytes_outside + storage_bytes(tensors_in(batch))


def _learning_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return storage_bytes(tensor for tensor in tensors if tensor.requires_grad)
