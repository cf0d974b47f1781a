"""A pipeline in a plain loop, without Lightning."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_rotor.errors import PipelineError
from lightning_rotor.memory.device_memory import resolve_limit
from lightning_rotor.pipeline.micro_batches import largest_part
from lightning_rotor.pipeline.pipeline_options import PipelineOptions, check_names
from lightning_rotor.pipeline.pipelined import pipelined
from lightning_rotor.pipeline.placement import bytes_around, kept_bytes
from lightning_rotor.pipeline.processes import PipelineProcesses, first, share_start
from lightning_rotor.private.values import call_with
from lightning_rotor.units import parse_limit


class Pipeline:
    """Trains a module as a pipeline in a plain loop: the same script in every process, as ``torchrun`` starts it.

    The module is cut in its place. Every process keeps the weights of its own stages, and computes what is outside.

    Args:
        module: To cut, with all its weights in every process, on the process's device. The first one's values count.
        sample: Its input for a batch; a tuple for several arguments, a dict for keywords.
        model: What the module is a part of, if more of it learns.
        mem_limit: What training may take of each device, as for :class:`~lightning_rotor.RotorCallback`; but None does
            not limit it, and then ``recompute="rotor"`` recomputes nothing.
        optimizer_scale: Bytes of optimizer state for each byte of trained weights, within ``mem_limit``: 2 for Adam.
        options: Fields of :class:`.PipelineOptions`, such as ``micro_batches=8`` or ``balance=[3, 4, 2]``.
    Attributes:
        partition: How the module is cut.
    Raises:
        PipelineError: There is no process group or no such option, or something speaks against a pipeline; on every
            process.
        PartitionError: No partition fits ``mem_limit``; says the least memory per device that would.
    Example:
        >>> torch.distributed.init_process_group("gloo")  # doctest: +SKIP
        >>> pipeline = Pipeline(net, images, micro_batches=8)  # doctest: +SKIP
        >>> optimizer = torch.optim.SGD(pipeline.parameters(), 0.1)  # doctest: +SKIP
        >>> loss = pipeline.step(lambda x, y: F.cross_entropy(net(x), y), images, labels)  # doctest: +SKIP
    """

    def __init__(
        self,
        module: nn.Module,
        sample: Any,
        *,
        model: nn.Module | None = None,
        mem_limit: int | float | str | None = None,
        optimizer_scale: float = 2.0,
        **options: Any,
    ) -> None:
        check_names(options, [field.name for field in fields(PipelineOptions)])
        if not dist.is_initialized():
            raise PipelineError(
                "there is no process group: expected torch.distributed.init_process_group() before, in a script that "
                "torchrun --nproc-per-node=N starts"
            )
        self._model = model or module
        self._steps = 0
        device = torch.device("cpu")
        for parameter in module.parameters():
            device = parameter.device
            break
        processes = PipelineProcesses(device)
        pipeline_options = PipelineOptions(**options)
        # Refused before anything is sent, where it is no limit.
        limit = parse_limit(mem_limit)
        share_start(self._model, processes)
        call = call_with(sample)
        memory_bytes = None
        if limit is not None:
            around = bytes_around(self._model, module, call, optimizer_scale)
            memory_bytes = resolve_limit(limit, device) - around

        self._cut = pipelined(
            self._model,
            module,
            # Measured on the largest, so that all others fit.
            largest_part(call, pipeline_options.micro_batches),
            options=pipeline_options,
            memory_bytes=memory_bytes,
            kept=partial(kept_bytes, optimizer_scale=optimizer_scale),
            processes=processes,
        )
        self.partition = self._cut.partition
        self._cut.caller = "the function given to Pipeline.step"
        self._cut.start()

    def parameters(self) -> list[nn.Parameter]:
        """Parameters that this process trains, for its optimizer."""
        # Those of other processes are on meta, without values.
        return [parameter for parameter in self._model.parameters() if not parameter.is_meta]

    def step(self, run: Callable[..., torch.Tensor], *batch: Any) -> torch.Tensor:
        """Forward and backward of a batch; gradients are added to existing ones.

        Args:
            run: Takes a part of the batch, calls the module once, and returns the part's loss, a mean over its rows. It
                runs once for each micro-batch, in every process.
            batch: What ``run`` takes. The first process's counts.
        Returns:
            The loss of the batch, in every process, detached.
        Raises:
            PipelineError: ``run`` does not return a loss, or does not call the module once.
        """
        # Its number is a part of the step's seeds, so that no two steps draw the same numbers.
        number = self._steps
        self._steps += 1
        # Each process may have another batch, from a loader of its own.
        batch = first(batch)
        _, loss = self._cut.train(lambda part: run(*part), batch, number=number)
        return loss

    def clip_by_norm(self, limit: float) -> torch.Tensor:
        """Clip gradients by the norm that they have over all processes, and return that norm."""
        return self._cut.placement.clip_by_norm(self._model.parameters(), limit)

    def state_dict(self) -> dict[str, Any]:
        """The whole model's state in the first process; all processes must ask. Elsewhere the local part."""
        return self._cut.placement.whole_state_dict(self._model.state_dict())

    def close(self) -> None:
        """Give every process all weights again, and the module its own forward."""
        self._cut.stop()
