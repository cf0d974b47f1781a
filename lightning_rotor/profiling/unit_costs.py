"""Costs of a stage that holds FSDP2 units, beyond those of the stage itself.

A stage is measured with its parameters gathered all the time: a message in the middle of a measured run would wait for
other processes. In training, units gather and spread them around each forward and backward
(:mod:`lightning_rotor.private.sharding`). The bytes of that are computed here from the sizes of parameters. The seconds
of messages are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_rotor.chain import StageCost
from lightning_rotor.private.sharding import Unit, UnitSizes


def cost_with_units(cost: StageCost, units: Sequence[Unit]) -> StageCost:
    """Costs with what FSDP units take and leave. Those inside of one another count as if all were there at once."""
    sizes = sum((unit.sizes for unit in units), UnitSizes())
    gathered_bytes = sizes.gathered_bytes
    if not gathered_bytes:
        return cost
    keep = cost.keep
    # When the gradients are complete, parameters and saved tensors go. Then the gradients are copied into a message,
    # whose shard comes back.
    sent_bytes = keep.input_gradient_bytes + keep.parameter_gradient_bytes + sizes.reduced_bytes
    sent_bytes += max(0, sizes.shard_bytes - sizes.gradient_bytes) - keep.saved_bytes

    def backward_peak(peak_bytes: int) -> int:
        return max(peak_bytes + gathered_bytes, sent_bytes)

    # Gradients of gathered parameters become gradients of shards. Those of other parameters stay as they are.
    other_gradient_bytes = keep.parameter_gradient_bytes - min(keep.parameter_gradient_bytes, sizes.gradient_bytes)
    keep = replace(
        keep,
        # Twice: the message with all parameters, and the parameters that are copied out of it.
        forward_peak_bytes=keep.forward_peak_bytes + 2 * gathered_bytes,
        # The last stage of a segment is recomputed in its backward, which has gathered it already, so its replay takes
        # no more.
        unpack_peak_bytes=keep.unpack_peak_bytes + 2 * gathered_bytes,
        unpack_bytes=keep.unpack_bytes + gathered_bytes,
        backward_peak_bytes=backward_peak(keep.backward_peak_bytes),
        backward_segment_peak_bytes=backward_peak(keep.backward_segment_peak_bytes),
        backward_held_peak_bytes=backward_peak(keep.backward_held_peak_bytes),
        backward_replayed_peak_bytes=None,
        # Gradients pile up until they are sent, whatever is there from before.
        accumulating=None,
        parameter_gradient_bytes=other_gradient_bytes + sizes.shard_bytes,
    )
    return replace(cost, discard_peak_bytes=cost.discard_peak_bytes + 2 * gathered_bytes, options=(keep,))
