"""``PipelineStage`` of torch with the shapes of every micro-batch, which need not be alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from lightning_rotor.pipeline.parts import Layout, PartModule


class MicroBatchStage(PipelineStage):
    """A pipeline stage whose buffers fit each micro-batch.

    Shapes are static: torch's own inference would run the user's modules on garbage, which BatchNorm would remember.

    Args:
        module: What it runs.
        number: Of the pipeline stage.
        stages: How many there are.
        device: Where it runs.
        group: Processes of the pipeline.
        takes: By micro-batch, what it receives.
        gives: By micro-batch, what it sends.

    Attributes:
        before_backwards: Called once, when the next backward is about to begin.
    """

    def __init__(
        self,
        module: PartModule,
        number: int,
        *,
        stages: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        takes: Sequence[Layout],
        gives: Sequence[Layout],
    ) -> None:
        self._takes, self._gives = tuple(takes), tuple(gives)
        self._launched: list[dist.P2POp] = []
        self.before_backwards: Callable[[], None] | None = None
        super().__init__(
            module,
            number,
            stages,
            device,
            input_args=tuple(meta.example() for meta in takes[0].metas),
            output_args=tuple(meta.example() for meta in gives[0].metas),
            group=group,
        )

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_forward_infra(*args, **kwargs)
        self._fit(self.args_recv_info, self._takes)
        return made

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        made = super()._prepare_backward_infra(*args, **kwargs)
        self._fit(self.grad_recv_info, self._gives)
        return made

    def _fit(self, infos: dict[int, Any], layouts: Sequence[Layout]) -> None:
        """Give buffers the shapes of their micro-batches; torch makes all of them like the first."""
        for number, info in infos.items():
            for buffer, meta in zip(info, layouts[number].metas, strict=False):
                if buffer.buffer is not None and tuple(buffer.buffer.shape) != meta.shape:
                    buffer.buffer = meta.buffer(self.device)

    # The loop of torch's 1F1B holds on to operations that are long done, and with them to a gradient or an output.
    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that send what a forward made."""
        self._launched += (ops := super().get_fwd_send_ops(fwd_chunk_id))
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that receive the gradients of what a forward made."""
        if self.before_backwards is not None:
            turn, self.before_backwards = self.before_backwards, None
            turn()
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that send the gradients of what a forward was given."""
        self._launched += (ops := super().get_bwd_send_ops(bwd_chunk_id))
        return ops

    def _let_go(self) -> None:
        """Of what was sent: an operation that runs is held by its work alone."""
        for operation in self._launched:
            operation.tensor = torch.empty(0)
        self._launched.clear()

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a micro-batch. What the user's code raises is raised as it is; torch makes a RuntimeError of it."""
        self._let_go()
        try:
            return super().forward_one_chunk(*args, **kwargs)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the backward of a micro-batch, unless nothing in it asks for gradients: a stage that is frozen, behind others that are."""
        self._let_go()
        outputs, inputs = self.fwd_cache.get(bwd_chunk_id, ((), ()))
        if self.has_backward and not self.is_last and not any(output.requires_grad for output in outputs):
            del self.fwd_cache[bwd_chunk_id]
            count = len(self._takes[bwd_chunk_id].metas)
            self.bwd_cache[bwd_chunk_id] = (None,) * min(len(inputs), count)
            return
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def input_gradients(self, micro_batch: int) -> tuple[torch.Tensor | None, ...]:
        """Gradients of what the first stage was given, once its backward is done."""
        return self.bwd_cache.pop(micro_batch)
