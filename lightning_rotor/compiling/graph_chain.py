"""The stages of a joint graph as a chain for the planner."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from lightning_rotor.chain import Chain, Option, StageCost
from lightning_rotor.compiling.graph_costs import is_pointwise, is_view, node_bytes, node_seconds, owner
from lightning_rotor.compiling.joint_graph import Stages
from lightning_rotor.compiling.stage_options import StageOption


def chain_of(stages: Stages, options: list[list[StageOption]]) -> Chain:
    """The stages with their options, as the planner reads them."""
    backward = _backward_costs(stages)
    costs = []
    last = len(stages) - 1
    for number in range(len(stages)):
        boundary = stages.boundaries[number]
        output = stages.output(number)
        input_bytes = 0 if boundary is None else node_bytes(boundary)
        output_bytes = 0 if output is None else node_bytes(output)
        if number == last:
            returned = set(map(owner, stages.parts.outputs))
            own = [node for node in returned if stages.of.get(node) == number]
            output_bytes = sum(map(node_bytes, own))
        nodes = stages.nodes[number]
        forward_seconds = sum(map(node_seconds, nodes))
        largest_bytes = max(map(node_bytes, nodes), default=0)
        seconds, peak_bytes, gradient_bytes = backward[number]
        ways = []
        for option in options[number]:
            saved = set(map(owner, option.saved))
            saved_bytes = sum(map(node_bytes, saved - {boundary, output}))
            again_bytes = _bytes_made(option.again)
            again_seconds = sum(map(node_seconds, option.again))
            highest_bytes = max(peak_bytes, output_bytes + input_bytes) + gradient_bytes + again_bytes
            # Rough where it need not be exact: finished pairs of graphs are counted by ``peak_count``.
            ways.append(
                Option(
                    name=option.name,
                    saved_bytes=saved_bytes,
                    saved_input_bytes=input_bytes if option.needs_input else 0,
                    saved_output_bytes=output_bytes if option.needs_output and number != last else 0,
                    saved_tensors=max(1, len(option.saved)),
                    forward_peak_bytes=saved_bytes + output_bytes + largest_bytes,
                    replay_peak_bytes=saved_bytes + largest_bytes,
                    unpack_peak_bytes=output_bytes,
                    unpack_bytes=output_bytes,
                    backward_peak_bytes=highest_bytes,
                    backward_segment_peak_bytes=highest_bytes,
                    backward_held_peak_bytes=highest_bytes,
                    input_gradient_bytes=input_bytes,
                    parameter_gradient_bytes=gradient_bytes,
                    forward_seconds=forward_seconds,
                    replay_seconds=forward_seconds * 0.999,
                    backward_seconds=seconds + again_seconds,
                    discard_peak_bytes=output_bytes + largest_bytes,
                )
            )
        # They stay in every schedule, a recomputation of the stage included.
        pinned = [node for node in stages.always_saved if stages.of.get(node) == number]
        costs.append(
            StageCost(
                # Of the node that makes its output.
                name=str(nodes[-1]),
                output_bytes=output_bytes,
                discard_peak_bytes=output_bytes + largest_bytes,
                discard_seconds=forward_seconds,
                pinned_bytes=sum(map(node_bytes, pinned)),
                options=tuple(ways),
            )
        )
    return Chain(tuple(costs))


def _bytes_made(nodes: Iterable[fx.Node]) -> int:
    """Bytes of results that take memory: views show another's, and a compiler makes others where they are read."""
    made_bytes = 0
    for node in nodes:
        if not is_view(node) and not is_pointwise(node):
            made_bytes += node_bytes(node)
    return made_bytes


def _backward_costs(stages: Stages) -> list[tuple[float, int, int]]:
    """Seconds, peak without what was saved, and bytes of parameters' gradients of each stage's backward."""
    nodes = []
    for node in stages.joint.graph.nodes:
        if node.op == "call_function" and not stages.is_forward(node):
            nodes.append(node)
    gradients = set(stages.parts.gradients)
    # Of memory, which is read through views as well.
    last_use: dict[fx.Node, int] = {}
    for place, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last_use[owner(source)] = place
    seconds = [0.0] * len(stages)
    peaks = [0] * len(stages)
    gradient_bytes = [0] * len(stages)
    alive: dict[fx.Node, int] = {}
    current = len(stages) - 1
    for place, node in enumerate(nodes):
        read = [stages.of[source] for source in node.all_input_nodes if source in stages.of]
        # Backwards come in the order of stages, last ones first. A node belongs to the latest that was begun.
        if read:
            current = min(current, read[0], max(read))
        seconds[current] += node_seconds(node)
        if node in gradients:
            # They stay to the end of the backward.
            gradient_bytes[current] += node_bytes(node)
        elif not is_view(node) and not (is_pointwise(node) and len(node.users) == 1):
            # A compiler makes others where they are read.
            alive[node] = node_bytes(node)
        peaks[current] = max(peaks[current], sum(alive.values()))
        for other in list(alive):
            if last_use.get(other, place) <= place:
                del alive[other]
    return list(zip(seconds, peaks, gradient_bytes, strict=True))
