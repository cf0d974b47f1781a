"""What training keeps on a device of a pipeline besides activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_rotor.generators import GeneratorStates
from lightning_rotor.optimizer_prediction import predict_optimizer_state_bytes
from lightning_rotor.sequential import Stage
from lightning_rotor.training_state import block_bytes, storage_bytes


def outside(model: nn.Module, module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers that are not the module's."""
    inside = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in inside]


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """How many bytes weights, gradients and optimizer state take.

    Attributes:
        factor: Bytes of optimizer state for each byte of trained parameters.
        device: Where.
    """

    factor: float
    device: torch.device

    @classmethod
    def in_evaluation(cls, device: torch.device) -> KeptMemory:
        """Without an optimizer."""
        return cls(0.0, device)

    @classmethod
    def under(cls, optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, device: torch.device) -> KeptMemory:
        """With some optimizers, which are asked in a dry step."""
        trained = _trained_bytes(list(model.parameters()))
        states = GeneratorStates()
        state_bytes = sum(predict_optimizer_state_bytes(each, device).bytes for each in optimizers)
        states.restore()
        return cls(state_bytes / max(trained, 1), device)

    def outside_bytes(self, model: nn.Module, module: nn.Module) -> int:
        """Of what is not in the module, gradients included: it is on every device."""
        tensors = outside(model, module)
        return storage_bytes(tensors) + round((1 + self.factor) * _trained_bytes(tensors))

    def of_stages(self, stages: Sequence[Stage]) -> list[int]:
        """By stage of a chain, weights, buffers and optimizer state."""
        return [self._of_stage(stage) for stage in stages]

    def _of_stage(self, stage: Stage) -> int:
        parameters = list(stage.parameters())
        buffers = {id(b): b for _, m in stage.submodules() for b in m._buffers.values() if b is not None}
        weights = sum(block_bytes(t.numel() * t.element_size(), self.device) for t in (*parameters, *buffers.values()))
        return weights + round(self.factor * _trained_bytes(parameters))


def _trained_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad
    )
