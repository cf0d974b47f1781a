"""Balances as torchgpipe's users know them: measure a module, and say how many of its stages each partition gets.

For the cuts that make the step of a pipeline fastest within each device's memory, see
:func:`lightning_rotor.pipeline.partition.partition`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_rotor.capture.cuts import sequentialize
from lightning_rotor.chain import Chain
from lightning_rotor.errors import SampleError
from lightning_rotor.pipeline.partition import balance
from lightning_rotor.profiling import profile_chain


def balance_by_time(module: nn.Module | Chain, sample: Any = None, *, partitions: int) -> list[int]:
    """Balance a module by how long its stages take.

    Args:
        module: What is to be cut, in the mode and on the device of training, or a chain that has been measured.
        sample: Its input, the size of a micro-batch; a tuple for several arguments. None with a chain.
        partitions: How many parts.
    Returns:
        How many stages are in each part, so that the slowest one is as fast as can be. The stages are those of
        :func:`lightning_rotor.sequentialize`, and of the chain that :func:`lightning_rotor.profile_chain` measures.
    Raises:
        ModelError: The module is no chain of stages.
        PipelineError: There are fewer stages than parts.
        SampleError: The sample is missing.
    Example:
        >>> balance_by_time(model, torch.rand(16, 3, 224, 224), partitions=4)  # doctest: +SKIP
        [21, 18, 18, 16]
    """
    return balance.balance_by_time(_chain(module, sample), partitions)


def balance_by_size(
    module: nn.Module | Chain, sample: Any = None, *, partitions: int, param_scale: float = 2.0
) -> list[int]:
    """Balance a module by the memory that its stages take: what plain training saves, and parameters.

    Args:
        module: As for :func:`balance_by_time`.
        sample: As for :func:`balance_by_time`.
        partitions: How many parts.
        param_scale: What a byte of trained parameters takes in all: 2 with its gradient alone (plain SGD), 3 with momentum, 4 for Adam.
    Returns:
        How many stages are in each part, so that the largest one is as small as can be.
    Raises:
        ModelError: The module is no chain of stages.
        PipelineError: There are fewer stages than parts, or ``param_scale`` is negative.
        SampleError: The sample is missing.
    """
    return balance.balance_by_size(_chain(module, sample), partitions, param_scale=param_scale)


def _chain(module: nn.Module | Chain, sample: Any) -> Chain:
    if isinstance(module, Chain):
        return module
    if sample is None:
        raise SampleError("the sample is missing: expected an input of the module, such as a micro-batch")
    args = sample if isinstance(sample, tuple) and not isinstance(module, nn.Sequential) else (sample,)
    cut = sequentialize(module, args)
    return profile_chain(cut.stages, cut.bind(args, {})).chain
