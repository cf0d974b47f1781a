"""What FSDP units in a stage cost beyond the stage.

A stage is measured with its units gathered all the time: by itself it must not communicate, for that would tell FSDP of forwards and
backwards that are none. What happens around its forward and backward is known from the sizes of the messages
(:mod:`lightning_rotor.sharding` has a picture of it) and added here. What overlaps with the stages before and after it is not a stage's own.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_rotor.chain import Option, StageCost
from lightning_rotor.profiling.stages import StageMeasurement
from lightning_rotor.sharding import UnitSizes


def with_units(measurement: StageMeasurement, sizes: UnitSizes, gathering_seconds: float) -> StageMeasurement:
    """Add what units take and leave.

    Args:
        measurement: Of the stage with its units gathered.
        sizes: Of its units together: those inside of one unit count as if all were there at once.
        gathering_seconds: How long their parameters take to arrive.
    """
    if not sizes.gathered_bytes:
        return measurement
    return replace(
        measurement,
        cost=_with_units(measurement.cost, sizes, gathering_seconds),
    )


def _with_units(cost: StageCost, sizes: UnitSizes, seconds: float) -> StageCost:
    return replace(
        cost,
        discard_peak_bytes=cost.discard_peak_bytes + 2 * sizes.gathered_bytes,
        discard_seconds=cost.discard_seconds + seconds,
        options=tuple(_option(option, sizes, seconds) for option in cost.options),
    )


def _option(option: Option, sizes: UnitSizes, seconds: float) -> Option:
    gathered = sizes.gathered_bytes
    left_bytes = option.parameter_gradient_bytes - min(option.parameter_gradient_bytes, sizes.gradient_bytes)
    # Parameters and what was saved go when the gradients are complete, then these are copied into a message, whose shard comes back.
    sent_bytes = option.input_gradient_bytes + option.parameter_gradient_bytes + sizes.reduced_bytes
    sent_bytes += max(0, sizes.shard_bytes - sizes.gradient_bytes) - option.saved_bytes

    def backward(peak_bytes: int) -> int:
        return max(peak_bytes + gathered, sent_bytes)

    return replace(
        option,
        forward_peak_bytes=option.forward_peak_bytes + 2 * gathered,
        # The last stage of a segment is recomputed in its backward, which has gathered it already: there its replay takes no more.
        unpack_peak_bytes=option.unpack_peak_bytes + 2 * gathered,
        unpack_bytes=option.unpack_bytes + gathered,
        backward_peak_bytes=backward(option.backward_peak_bytes),
        backward_segment_peak_bytes=backward(option.backward_segment_peak_bytes),
        backward_held_peak_bytes=backward(option.backward_held_peak_bytes),
        backward_replayed_peak_bytes=None,
        accumulating=None,  # gradients pile up until they are sent, whatever is there from before
        parameter_gradient_bytes=left_bytes + sizes.shard_bytes,
        forward_seconds=option.forward_seconds + seconds,
        backward_seconds=option.backward_seconds + seconds,
    )
