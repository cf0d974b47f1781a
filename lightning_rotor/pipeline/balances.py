"""Balances by one measure alone, for torchgpipe's users: by time, or by size."""

from typing import Any

from torch import nn

from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.chain import Chain
from lightning_rotor.errors import SampleError
from lightning_rotor.pipeline.partition.cuts import least_largest, stage_bytes, stage_seconds
from lightning_rotor.profiling import profile_chain


def balance_by_time(module: nn.Module | Chain, sample: Any = None, *, partitions: int) -> list[int]:
    """Balance a module by how long its stages take; :func:`.partition` also knows of memory and recomputation.

    Args:
        module: To be cut, in the mode and on the device of training, or a chain that has been measured.
        sample: Its input, the size of a micro-batch; a tuple for several arguments. None with a chain.
        partitions: How many parts.
    Returns:
        How many stages of :func:`lightning_rotor.sequentialize` are in each part, so that the slowest one is as fast as
        can be.
    Raises:
        ModelError: The module is no chain of stages.
        PipelineError: There are fewer stages than parts.
        SampleError: The sample is missing.
    Example:
        >>> balance_by_time(model, torch.rand(16, 3, 224, 224), partitions=4)  # doctest: +SKIP
        [21, 18, 18, 16]
    """
    chain = _chain_of(module, sample)
    return least_largest(stage_seconds(chain), partitions)


def balance_by_size(
    module: nn.Module | Chain,
    sample: Any = None,
    *,
    partitions: int,
    param_scale: float = 2.0,
) -> list[int]:
    """Balance a module by the memory that its stages take: what plain training saves, and parameters.

    Other arguments, result and errors are those of :func:`balance_by_time`.

    Args:
        module: To be cut.
        sample: Its input.
        partitions: How many parts.
        param_scale: Bytes for each byte of trained parameters: 2 with its gradient (SGD), 3 with momentum, 4 for Adam.
    """
    chain = _chain_of(module, sample)
    return least_largest(stage_bytes(chain, param_scale), partitions)


def _chain_of(module: nn.Module | Chain, sample: Any) -> Chain:
    if isinstance(module, Chain):
        return module
    if sample is None:
        raise SampleError("the sample is missing: expected an input of the module, such as a micro-batch")
    # A Sequential's forward takes one argument, so a tuple is that argument.
    if isinstance(sample, tuple) and not isinstance(module, nn.Sequential):
        args = sample
    else:
        args = (sample,)
    cut = sequentialize(module, args)
    profile = profile_chain(cut.stages, cut.bind(args, {}))
    return profile.chain
