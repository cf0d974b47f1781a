"""A pipeline stage as torch's schedules call it, whose buffers fit each micro-batch.

torch's own stage allocates buffers for one shape of micro-batch, keeps outputs up to the end of the step, and finds
shapes by running the user's modules on garbage. The last micro-batch of a batch may be smaller, lengths may change, and
memory is what this package plans. So all methods that touch buffers are replaced; the order of calls stays torch's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from lightning_rotor.pipeline.layouts import Gradients, Tensors
from lightning_rotor.pipeline.part import Part
from lightning_rotor.pipeline.processes import PipelineProcesses


def run_backward(tensors: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    """Run the backward from some gradients. Frozen stages ask for none."""
    roots, seeds = [], []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if tensor.requires_grad and gradient is not None:
            roots.append(tensor)
            seeds.append(gradient)
    if roots:
        torch.autograd.backward(roots, seeds)


class MicroBatchStage(PipelineStage):
    """A pipeline stage whose buffers fit each micro-batch.

    For micro-batch ``k`` a schedule calls, in this order::

        get_fwd_recv_ops(k) → forward_one_chunk(k) → get_fwd_send_ops(k)
        get_bwd_recv_ops(k) → backward_one_chunk(k) → get_bwd_send_ops(k)

    and ``set_local_…`` and ``get_local_…`` in the place of sending where the next stage is on the same device.

    Attributes:
        inputs: By micro-batch, buffers into which inputs are received; the inputs themselves of the first stage.
        output_gradients: By micro-batch, buffers for the gradients of outputs. Of the last stage, those that user code
            has given for outputs; it has none where the loss is computed in the schedule.
        in_flight: By micro-batch between its forward and its backward, inputs and outputs.
    """

    def __init__(self, part: Part, stages: int, processes: PipelineProcesses) -> None:
        device = processes.device
        # No metadata, so torch makes no buffers. Without the argument it would run the user's modules on garbage.
        nothing = (torch.empty(0, device="meta"),)
        super().__init__(
            part,
            part.number,
            stages,
            device,
            input_args=nothing,
            output_args=nothing,
            group=processes.group,
        )
        self.has_backward = part.step.trains
        self._takes = [layout[part.number] for layout in part.step.layouts]
        self.inputs: list[Tensors] = []
        # The first stage's inputs come from the runner.
        if not self.is_first:
            self.inputs = [layout.buffers(device) for layout in self._takes]
        self.output_gradients: dict[int, Gradients] = {}
        if self.has_backward and not self.is_last:
            for micro_batch, layouts in enumerate(part.step.layouts):
                given = layouts[part.number + 1]
                self.output_gradients[micro_batch] = given.gradient_buffers(device)
        self.in_flight: dict[int, tuple[Tensors, Tensors]] = {}
        # Of backwards that are done, until they are sent or taken.
        self._input_gradients: dict[int, Gradients] = {}
        # Sends that torch's loops may still hold.
        self._launched: list[dist.P2POp] = []

    def clear_runtime_states(self) -> None:
        """Forget what an interrupted step has left."""
        super().clear_runtime_states()
        self.in_flight.clear()
        self._input_gradients.clear()
        # Those of the last stage come from user code, for one step. Elsewhere they are buffers for the next step, too.
        if self.is_last:
            self.output_gradients.clear()

    # The names of arguments are torch's: its schedules give them by keyword.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that receive a forward's inputs."""
        if self.is_first:
            return []
        return self._operations(dist.irecv, self.inputs[fwd_chunk_id], self.stage_index - 1)

    def forward_one_chunk(self, fwd_chunk_id: int, *_: Any, **__: Any) -> Tensors:
        """Run the forward of a micro-batch."""
        self._let_go()
        trains = self.has_backward and torch.is_grad_enabled()
        inputs = self.inputs[fwd_chunk_id]
        for tensor, meta in zip(inputs, self._takes[fwd_chunk_id].metas, strict=True):
            # A leaf of this process's graph: its ``grad`` is what goes back to the stage before.
            tensor.requires_grad_(meta.requires_grad and trains)
        outputs: Tensors = self.submod(*inputs, micro_batch=fwd_chunk_id)
        self.in_flight[fwd_chunk_id] = inputs, outputs
        return outputs

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that send a forward's outputs."""
        if self.is_last:
            return []
        _, outputs = self.in_flight[fwd_chunk_id]
        # Detached: a message that held the graph would keep all of this stage's activations alive.
        sent = tuple(tensor.detach() for tensor in outputs)
        return self._sending(sent, self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that receive the gradients of a forward's outputs."""
        if self.is_last or not self.has_backward:
            return []
        buffers = self.output_gradients[bwd_chunk_id]
        return self._operations(dist.irecv, buffers, self.stage_index + 1)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, *_: Any, **__: Any) -> None:
        """Run the backward of a micro-batch."""
        # torch's loops ask a stage without a backward all the same.
        if not self.has_backward:
            return
        self._let_go()
        inputs, outputs = self.in_flight.pop(bwd_chunk_id)
        gradients = self.output_gradients.get(bwd_chunk_id)
        if gradients is None:
            torch.autograd.backward(loss)
        else:
            run_backward(outputs, gradients)
        self._input_gradients[bwd_chunk_id] = tuple(tensor.grad for tensor in inputs)
        # Inputs are buffers that the next step uses again, and gradients would add up.
        for tensor in inputs:
            tensor.grad = None

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Operations that send the gradients of a forward's inputs."""
        if self.is_first or not self.has_backward:
            return []
        gradients = self.get_local_bwd_output(bwd_chunk_id)
        return self._sending(gradients, self.stage_index - 1)

    def get_local_bwd_output(self, mb_index: int) -> Gradients:
        """Gradients of a forward's inputs, once its backward is done; None for inputs without one."""
        gradients: list[torch.Tensor | None] = []
        metas = self._takes[mb_index].metas
        own_gradients = self._input_gradients.pop(mb_index)
        for meta, gradient in zip(metas, own_gradients, strict=True):
            if meta.requires_grad and gradient is None:
                # The stage before waits for a message, also where this one has not used its output.
                gradients.append(meta.buffer(self.device).zero_())
            else:
                gradients.append(gradient)
        return tuple(gradients)

    def set_local_fwd_input(self, prev_stage_outputs: Tensors, mb_index: int) -> None:
        """Take the outputs of the stage before, on the same device."""
        # Detached, as what is received is, so that the backward ends here and the gradient goes the schedule's way.
        self.inputs[mb_index] = tuple(tensor.detach() for tensor in prev_stage_outputs)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Gradients, mb_index: int) -> None:
        """Take the gradients of a forward's outputs, from the stage behind or, for the last one, from user code."""
        self.output_gradients[mb_index] = next_stage_bwd_outputs

    def release_fwd_send_outputs(self, fwd_chunk_id: int) -> None:
        """Keep a forward's outputs for the backward; torch calls this from 2.15 on when they have been sent."""

    def _sending(self, tensors: Gradients, to: int) -> list[dist.P2POp]:
        # Torch's 1F1B loop holds on to finished operations, and with them to a gradient or an output.
        operations = self._operations(dist.isend, tensors, to)
        self._launched += operations
        return operations

    def _let_go(self) -> None:
        """Drop what was sent: a running operation is held by its work alone."""
        for operation in self._launched:
            operation.tensor = torch.empty(0)
        self._launched.clear()

    def _operations(self, what: Any, tensors: Gradients, stage: int) -> list[dist.P2POp]:
        rank = stage % dist.get_world_size(self.group)
        operations = []
        for tensor in tensors:
            if tensor is not None:
                operations.append(dist.P2POp(what, tensor, group=self.group, group_peer=rank))
        return operations
