"""A dry step on small tensors, scaled up.

Dimensions become distinct primes, so the size of a state tensor tells which dimensions it has.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_rotor.optimizer_prediction.dry_step import StandIns, copy_optimizer, take_step, use_plain_kernels
from lightning_rotor.optimizer_prediction.state_prediction import StatePrediction
from lightning_rotor.training_state import block_bytes, is_on, walk_tensors

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


@dataclass(frozen=True, slots=True)
class _Small:
    """A parameter with a prime in place of each dimension."""

    tensor: torch.Tensor
    sizes: dict[int, int] = field(default_factory=dict)

    def scaled(self, elements: int) -> int:
        """Number of elements that ``elements`` of the small tensor's state stand for."""
        scaled = 1
        for prime, size in self.sizes.items():
            while elements and elements % prime == 0:
                elements //= prime
                scaled *= size
        return elements * scaled


def _small(parameter: torch.Tensor, *, sparse: bool) -> _Small:
    # A larger dimension gets a larger prime, for steps that transpose wide matrices.
    order = sorted(range(parameter.dim()), key=lambda d: parameter.shape[d])
    primes = dict(zip((d for d in order if parameter.shape[d] != 1), _PRIMES, strict=False))
    shape = [primes.get(d, 1) for d in range(parameter.dim())]
    tensor = nn.Parameter(torch.full(shape, 0.5).to(parameter.dtype), requires_grad=parameter.requires_grad)
    vars(tensor).update(vars(parameter))
    if parameter.requires_grad:
        tensor.grad = torch.full_like(tensor, 0.01)
        if sparse or (parameter.grad is not None and parameter.grad.layout is torch.sparse_coo):
            tensor.grad = tensor.grad.to_sparse(1)
    return _Small(tensor, {prime: parameter.shape[d] for d, prime in primes.items()})


def state_on_small_tensors(
    optimizer: torch.optim.Optimizer, device: torch.device | str | None, stock: bool, *, sparse: bool
) -> StatePrediction:
    """What the state takes after a dry step that starts without any.

    Args:
        optimizer: Stays as it is.
        device: Count only what will lie there.
        stock: Its state is known to scale with its parameters.
        sparse: Give it sparse gradients.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(sum(size != 1 for size in p.shape) > len(_PRIMES) for p in parameters):
        raise ValueError(f"a parameter has more than {len(_PRIMES)} dimensions")
    small = {p: _small(p, sparse=sparse) for p in parameters}
    clone = copy_optimizer(optimizer, {p: small[p].tensor for p in parameters}, StandIns(), state=False)
    use_plain_kernels(clone)
    take_step(clone)
    size_bytes = 0
    for parameter in parameters:
        if is_on(parameter.device, device):
            for tensor in walk_tensors(clone.state.get(small[parameter].tensor, {})):
                elements = small[parameter].scaled(tensor.numel())
                size_bytes += block_bytes(elements * tensor.element_size(), parameter.device)
    # Existing state is not scaled down, so it may have come about in another way.
    return StatePrediction(
        size_bytes, stock and not optimizer.state, "dry step on small tensors, scaled to the parameters' shapes"
    )
