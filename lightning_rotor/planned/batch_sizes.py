"""The batch size with the best predicted samples per second inside a memory limit, from two measurements.

Layers treat samples alike, so bytes and seconds of a stage are affine in the batch size B: a part for the stage
(gradients of its parameters, launching its kernels) and a part for each sample. Two measured sizes give both parts,
and with them the chain of any other size::

    cost(B) = cost(b₁) + (B − b₁) · (cost(b₂) − cost(b₁)) / (b₂ − b₁)

Each candidate is planned under the limit. Larger batches use the device better until recomputation begins; then they
pay for themselves with recomputation, so the best is often not the largest that fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

import torch
from torch import nn

from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.chain import Chain
from lightning_rotor.errors import BudgetError, ModelError, SampleError
from lightning_rotor.link import Link
from lightning_rotor.memory.device_memory import resolve_limit
from lightning_rotor.memory.resident_memory import ResidentMemory
from lightning_rotor.planned.agreement import Agreement
from lightning_rotor.planning import Plan
from lightning_rotor.planning.combined_chain import UnlikeChainsError, combined
from lightning_rotor.planning.effort import DEFAULT_SLOTS
from lightning_rotor.private.values import tensors_in, tree_map_only
from lightning_rotor.profiling import profile_chain
from lightning_rotor.shown import Shown
from lightning_rotor.units import parse_limit


@dataclass(frozen=True, slots=True)
class BatchSizeOption:
    """One batch size under its plan. ``reserved_bytes`` is what the process holds besides the chain."""

    batch_size: int
    plan: Plan
    reserved_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the process, without what only shows in a step (a loss)."""
        return self.reserved_bytes + self.plan.peak_bytes

    @property
    def samples_per_second(self) -> float:
        """Predicted samples per second, for forward and backward of the chain."""
        return self.batch_size / self.plan.seconds


@dataclass(frozen=True, slots=True)
class BatchSizeAdvice(Shown):
    """Batch sizes with their predicted speeds. Printed, it is a table.

    Attributes:
        options: Sizes that fit, rising.
        limit_bytes: For the whole process.
        measured: The sizes that were measured.
    """

    options: tuple[BatchSizeOption, ...]
    limit_bytes: int
    measured: tuple[int, int]

    @property
    def best(self) -> BatchSizeOption:
        """The option with the most samples per second."""
        # Not the largest: all samples of a batch pay for the recomputation that one more of them costs.
        return max(self.options, key=lambda option: option.samples_per_second)


@dataclass(frozen=True, slots=True)
class AffineCosts:
    """Measured chains of one model at two batch sizes, the smaller first, and so at all."""

    sizes: tuple[int, int]
    chains: tuple[Chain, Chain]

    def at(self, batch_size: int) -> Chain:
        """The chain of a batch size: exact in bytes where they are affine, rounded up where they are not whole.

        Raises ``ModelError`` if the two chains differ in more than sizes and durations.
        """
        (small, large), span = self.sizes, self.sizes[1] - self.sizes[0]

        # The line through the two measured sizes, times its span, so that integers stay exact. A division into floats
        # would lose the last bytes of a large model.
        def line(at_small: Any, at_large: Any) -> Any:
            return at_small * (large - batch_size) + at_large * (batch_size - small)

        def seconds(values: Sequence[float]) -> float:
            # Noise must not let the time of a stage fall, or vanish, as its batch grows.
            return float(max(line(values[0], max(values)) / span, values[0] * min(1.0, batch_size / small)))

        try:
            return combined(self.chains, of_bytes=lambda values: max(0, -(-line(*values) // span)), of_seconds=seconds)
        except UnlikeChainsError as error:
            raise ModelError(
                f"batches of {small} and {large} run differently ({error}), so nothing can be said about others: "
                "expected a model whose layers do not depend on the batch size"
            ) from None


def advise_batch_size(
    model: nn.Module,
    sample: Any,
    *,
    mem_limit: int | float | str | None = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    batch_sizes: Iterable[int] | None = None,
    slots: int = DEFAULT_SLOTS,
) -> BatchSizeAdvice:
    """Predict memory and speed of many batch sizes under a plan, from two measurements.

    Args:
        model: What trains, on its device and in training mode.
        sample: An input of at least two samples: a tensor, or a tuple of positional arguments; every tensor's first
            dimension is the batch. It and its first half are measured, so it should keep the device as busy as training
            will.
        mem_limit: For the whole process, as in :class:`~lightning_rotor.RotorCallback`.
        optimizers: Their state is predicted if it does not exist yet.
        batch_sizes: Candidates. By default 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, up to the first that does not fit.
        slots: Resolution of the planner.
    Returns:
        The candidates that fit, each with its plan.
    Raises:
        SampleError: The sample cannot be halved.
        ModelError: The model can be no chain, or depends on the batch size.
        BudgetError: None of the candidates fits.
    Example:
        >>> layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        >>> advice = advise_batch_size(layers, torch.randn(64, 8), mem_limit="64KiB")
        >>> advice.best.peak_bytes <= 64 * 1024
        True
    """
    costs = measured_costs(model, sample if isinstance(sample, tuple) else (sample,), {})
    device = torch.device(costs.chains[0].device)
    limit_bytes = resolve_limit(parse_limit(mem_limit), device)
    batch_bytes = sum(tensor.nbytes for tensor in tensors_in(sample))
    resident = replace(ResidentMemory.of(model, model, optimizers, (), device), batch_bytes=batch_bytes)
    return advice_from(costs, resident, limit_bytes=limit_bytes, batch_sizes=batch_sizes, slots=slots)


def measured_costs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AffineCosts:
    """Costs measured at the size of a call's batch and at half of it; ``SampleError`` if that cannot be halved."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_in((args, kwargs))}
    # Halving cuts the first dimension of every tensor. One of another length, as a table of positions, would be cut
    # into something that the model was not written for.
    if len(sizes) != 1 or (size := sizes.pop()) < 2:
        raise SampleError(
            f"the sample's tensors have first dimensions {sorted(sizes) or [size]}: expected one number of samples, "
            "at least 2, in all of them"
        )

    # Of no other process: a single one asks, before a training.
    ranks = Agreement()

    def measured(number: int) -> Chain:
        def first(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:number].detach().clone().requires_grad_(tensor.requires_grad)

        call = tree_map_only(torch.Tensor, first, (args, kwargs))
        # Each size is cut for itself, as a recorded graph may hold the number of samples as a constant.
        with ranks.watching():
            cut = sequentialize(model, *call)
        return profile_chain(cut.stages, cut.bind(*call), ranks=ranks).chain

    return AffineCosts((size // 2, size), (measured(size // 2), measured(size)))


def advice_from(
    costs: AffineCosts,
    resident: ResidentMemory,
    *,
    limit_bytes: int,
    batch_sizes: Iterable[int] | None = None,
    slots: int = DEFAULT_SLOTS,
    link: Link | None = None,
) -> BatchSizeAdvice:
    """Plan each candidate; ``BudgetError`` if none fits. ``resident`` is beside the larger of the measured sizes.

    Over a ``link``, plans may move what stages hold.
    """
    options: list[BatchSizeOption] = []
    powers = (2**power for power in count())
    rising = chain((1,), (size for power in powers for size in (2 * power, 3 * power)))
    # Bytes rise with the batch, so behind the first size that does not fit no other does.
    for batch_size in rising if batch_sizes is None else sorted(set(batch_sizes)):
        costs_at = costs.at(batch_size)
        # The batch itself is memory, too: 256 images of 224 x 224 pixels are 147 MiB.
        batch_bytes = -(-resident.batch_bytes * batch_size // costs.sizes[1])
        budget = replace(replace(resident, batch_bytes=batch_bytes).budget(limit_bytes), link=link)
        # Bytes are rounded up, as a plan that is one byte too small breaks the limit. Those of a stage whose memory
        # falls as the batch grows end at 0.
        try:
            solved = budget.plan(costs_at, slots=slots)
        except BudgetError:
            if options:
                break
            raise
        options.append(BatchSizeOption(batch_size, solved, budget.reserved_bytes))
    return BatchSizeAdvice(tuple(options), limit_bytes, costs.sizes)
