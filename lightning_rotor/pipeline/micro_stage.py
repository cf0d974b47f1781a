"""A pipeline stage that torch's schedules drive: what it receives, runs and sends for each micro-batch, which need not be alike.

``PipelineStage`` of torch runs and sends by itself, under names that differ from release to release. Here only what its schedules call is used,
and all of that is overridden, so one stage serves all releases: see :class:`MicroBatchStage`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from lightning_rotor.pipeline.parts import Layout, PartModule

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Gradients: TypeAlias = tuple[torch.Tensor | None, ...]


class MicroBatchStage(PipelineStage):
    """A pipeline stage whose buffers fit each micro-batch.

    For micro-batch ``k`` a schedule calls, in this order::

        get_fwd_recv_ops(k) → forward_one_chunk(k) → get_fwd_send_ops(k)
        get_bwd_recv_ops(k) → backward_one_chunk(k) → get_bwd_send_ops(k)

    and ``set_local_…`` and ``get_local_…`` in the place of sending where the next stage is on the same device.

    Args:
        module: What it runs.
        number: Of the pipeline stage.
        stages: How many there are.
        device: Where it runs.
        group: Processes of the pipeline.
        takes: By micro-batch, what it receives.
        gives: By micro-batch, what it sends.
        trains: Gradients come back.

    Attributes:
        inputs: By micro-batch, what the first stage takes; others receive it.
        in_flight: By micro-batch whose forward is done and whose backward is not, what it took and what it made.
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
        trains: bool,
    ) -> None:
        # Torch makes buffers of what it is told here: of nothing. Without being told it would run the user's modules on garbage.
        nothing = torch.empty(0, device="meta")
        super().__init__(module, number, stages, device, input_args=(nothing,), output_args=(nothing,), group=group)
        self._takes = tuple(takes)
        received = () if self.is_first else takes
        self.inputs: list[Tensors] = [tuple(meta.buffer(device) for meta in layout.metas) for layout in received]
        returned = gives if trains and not self.is_last else ()
        self._output_gradients: dict[int, Gradients] = {
            number: tuple(meta.buffer(device) if meta.requires_grad else None for meta in layout.metas)
            for number, layout in enumerate(returned)
        }
        self.in_flight: dict[int, tuple[Tensors, Tensors]] = {}
        self._input_gradients: dict[int, Gradients] = {}
        self._launched: list[dist.P2POp] = []
        self.before_backwards: Callable[[], None] | None = None

    @property
    def buffers(self) -> list[torch.Tensor]:
        """What is received lies in these."""
        inputs = [] if self.is_first else self.inputs
        received = (*inputs, *self._output_gradients.values())
        return [buffer for each in received for buffer in each if buffer is not None]

    def clear_runtime_states(self) -> None:
        """Forget what an interrupted step has left."""
        super().clear_runtime_states()
        self.in_flight.clear()
        self._input_gradients.clear()
        if self.is_last:
            self._output_gradients.clear()

    # ---------------------------------------------------------------- forward

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that receive what a forward takes."""
        return [] if self.is_first else self._operations(dist.irecv, self.inputs[fwd_chunk_id], self.stage_index - 1)

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Tensors:
        """Run the forward of a micro-batch."""
        self._let_go()
        trains = self.has_backward and torch.is_grad_enabled()
        given = self.inputs[fwd_chunk_id]
        for tensor, meta in zip(given, self._takes[fwd_chunk_id].metas, strict=True):
            tensor.requires_grad_(meta.requires_grad and trains)
        made: Tensors = self.submod(*given, micro_batch=fwd_chunk_id)
        self.in_flight[fwd_chunk_id] = given, made
        return made

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that send what a forward made."""
        if self.is_last:
            return []
        made = tuple(tensor.detach() for tensor in self.in_flight[fwd_chunk_id][1])
        return self._sending(made, self.stage_index + 1)

    # ---------------------------------------------------------------- backward

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that receive the gradients of what a forward made."""
        if self.before_backwards is not None:
            turn, self.before_backwards = self.before_backwards, None
            turn()
        if self.is_last or not self.has_backward:
            return []
        return self._operations(dist.irecv, self._output_gradients[bwd_chunk_id], self.stage_index + 1)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, *_: Any, **__: Any) -> None:
        """Run the backward of a micro-batch; nothing in it may ask for gradients: a stage that is frozen, behind others that are."""
        if not self.has_backward:  # torch's loops ask all the same
            return
        self._let_go()
        given, made = self.in_flight.pop(bwd_chunk_id)
        gradients = self._output_gradients.get(bwd_chunk_id)
        if gradients is None:
            torch.autograd.backward(loss)
        else:
            pairs = [(t, g) for t, g in zip(made, gradients, strict=True) if t.requires_grad and g is not None]
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        self._input_gradients[bwd_chunk_id] = tuple(tensor.grad for tensor in given)
        for tensor in given:
            tensor.grad = None

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that send the gradients of what a forward was given."""
        if self.is_first or not self.has_backward:
            return []
        return self._sending(self.input_gradients(bwd_chunk_id), self.stage_index - 1)

    def input_gradients(self, micro_batch: int) -> Gradients:
        """Gradients of what a forward took, once its backward is done; None for what asks for none."""
        found = self._input_gradients.pop(micro_batch)
        metas = self._takes[micro_batch].metas
        return tuple(
            meta.buffer(self.device).zero_() if meta.requires_grad and gradient is None else gradient
            for meta, gradient in zip(metas, found, strict=True)
        )

    # ---------------------------------------------------------------- between stages

    def set_local_fwd_input(self, prev_stage_outputs: Tensors, mb_index: int) -> None:
        """Take what the stage before made, on the same device."""
        self.inputs[mb_index] = tuple(tensor.detach() for tensor in prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> Gradients:
        """Gradients for the stage before, on the same device."""
        return self.input_gradients(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Gradients, mb_index: int) -> None:
        """Take the gradients of what a forward made, from the stage behind or, for the last one, from user code."""
        self._output_gradients[mb_index] = next_stage_bwd_outputs

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Called from torch 2.15 on, when what a forward made has been sent: it stays for the backward."""

    def _sending(self, tensors: Gradients, to: int) -> list[dist.P2POp]:
        # The loop of torch's 1F1B holds on to operations that are long done, and with them to a gradient or an output.
        operations = self._operations(dist.isend, tensors, to)
        self._launched += operations
        return operations

    def _let_go(self) -> None:
        """Of what was sent: an operation that runs is held by its work alone."""
        for operation in self._launched:
            operation.tensor = torch.empty(0)
        self._launched.clear()

    def _operations(self, what: Any, tensors: Gradients, stage: int) -> list[dist.P2POp]:
        rank = stage % dist.get_world_size(self.group)
        return [dist.P2POp(what, tensor, group=self.group, group_peer=rank) for tensor in tensors if tensor is not None]
