"""The pair of graphs for a schedule: the forward saves little, the backward makes the rest again when it needs it.

A backward runs as the joint graph has it. When it asks for a value that was not saved, the segment of the schedule that
holds the value's stage is run from its boundary, one level deep::

    schedule   0  (1-2  (3-4))  5                 backward of 5, then of 4:
    saved      of 0, boundary 1, of 5             ─► 1, 2 again: keeps boundary 3
                                                  ─► 3 again: keeps what 4's leaf saves, then 4

So a value may be made several times. Each is emitted where it is asked for and no earlier, or all would be alive at
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from lightning_rotor.compiling.joint_graph import Stages
from lightning_rotor.compiling.stage_options import StageOption
from lightning_rotor.private import partitioning
from lightning_rotor.schedule import Leaf, Schedule, Segment


def graphs_for(
    stages: Stages, options: Sequence[Sequence[StageOption]], schedule: Schedule
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph under a schedule."""
    saved = set(stages.always_saved)
    for item in schedule.items:
        if isinstance(item, Leaf):
            saved |= _saved_by(stages, options, item)
        else:
            # A segment runs again from there; the first one does from the graph's inputs.
            boundary = stages.boundaries[item.first]
            if boundary is not None:
                saved.add(boundary)
    # All inputs may be read again, and those that are not are dropped.
    inputs = [node for node in stages.parts.info.inputs if node.op == "placeholder"]
    wanted = saved.union(inputs)
    in_order = [node for node in stages.joint.graph.nodes if node in wanted]
    forward, template = partitioning.split(stages.joint, stages.parts, in_order)
    backward = _Writer(stages, options, schedule, template).write()
    return partitioning.finished(forward, backward)


def torch_pair(stages: Stages) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph as torch splits it by default."""
    chosen = partitioning.chosen_by_torch(stages.joint, stages.parts, 1.0)
    in_order = [node for node in stages.joint.graph.nodes if node in chosen]
    return partitioning.finished(*partitioning.split(stages.joint, stages.parts, in_order))


def _saved_by(stages: Stages, options: Sequence[Sequence[StageOption]], leaf: Leaf) -> set[fx.Node]:
    """Nodes that a kept stage saves."""
    option = options[leaf.stage][leaf.option]
    saved = set(option.saved)
    boundary = stages.boundaries[leaf.stage]
    output = stages.output(leaf.stage)
    # Both neighbours may save one boundary: as a node of the graph it is saved once.
    if option.needs_input and boundary is not None:
        saved.add(boundary)
    if option.needs_output and output is not None:
        saved.add(output)
    return saved


@dataclass
class _Writer:
    """Writes one backward.

    Attributes:
        template: A backward with the placeholders and outputs that this one must have.
        made: By node of the joint graph, the node of the backward that has its value.
        pending: By stage, the segment that must run before anything of the stage is there.
        unneeded: Inputs of the forward that the template does not take. What is made of them nobody reads in the end: a
            segment keeps values that its leaves save by default, even if this very backward reads none of them.
    """

    stages: Stages
    options: Sequence[Sequence[StageOption]]
    schedule: Schedule
    template: fx.GraphModule
    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    pending: dict[int, Segment] = field(default_factory=dict)
    unneeded: list[fx.Node] = field(default_factory=list)

    def write(self) -> fx.GraphModule:
        """The backward."""
        stages = self.stages
        # The template is torch's own split, in which nodes have the names that they have in the joint graph.
        by_name = {node.name: node for node in stages.joint.graph.nodes}
        for placeholder in self.template.graph.find_nodes(op="placeholder"):
            self.made[by_name[placeholder.name]] = self.graph.node_copy(placeholder)
        self._register(self.schedule.items)
        output = next(iter(reversed(self.template.graph.nodes)))
        # None in the place of an input that wants no gradient.
        results = [by_name[each.name] if isinstance(each, fx.Node) else each for each in output.args[0]]
        needed = self._needed_behind_tangents([each for each in results if isinstance(each, fx.Node)])
        # In the order of the joint graph, in which each gradient goes as soon as it has been used.
        for node in stages.joint.graph.nodes:
            if node in needed and node not in self.made:
                self._make(node, self.made)
        for each in results:
            if isinstance(each, fx.Node):
                self._make(each, self.made)
        end = self.graph.output(tuple(self.made[each] if isinstance(each, fx.Node) else each for each in results))
        end.meta.update(output.meta)
        self.graph.eliminate_dead_code()
        # The backward is called with the template's inputs, and no others can be given to it.
        for node in self.unneeded:
            if node.users:
                raise RuntimeError(f"{node} is no input of the backward")
            self.graph.erase_node(node)
        self.graph.lint()
        return partitioning.with_graph(stages.joint, self.graph)

    def _needed_behind_tangents(self, results: Iterable[fx.Node]) -> set[fx.Node]:
        """Nodes of the backward that depend on gradients of outputs, and that results need."""
        depends: set[fx.Node] = set()
        for node in self.stages.joint.graph.nodes:
            if partitioning.is_tangent(node) or not depends.isdisjoint(node.all_input_nodes):
                depends.add(node)
        # Without those that depend on no gradient: views of what the forward made, say. All emitted first, they would
        # be alive at once (6.55 for 3.67 MB in the prototype), so each is made when it is asked for.
        needed: set[fx.Node] = set()
        waiting = list(results)
        while waiting:
            node = waiting.pop()
            if node in needed or node not in depends or node.op in ("placeholder", "output"):
                continue
            needed.add(node)
            waiting += node.all_input_nodes
        return needed

    def _register(self, items: Iterable[Leaf | Segment]) -> None:
        """Let the stages of segments wait for these."""
        for item in items:
            # A leaf has what it saves as soon as the items around it run.
            if isinstance(item, Segment):
                for number in range(item.first, item.last + 1):
                    self.pending[number] = item

    # ---------------------------------------------------------------- values

    def _make(self, node: fx.Node, made: dict[fx.Node, fx.Node]) -> None:
        """Have the value of a node in the backward, from what is there, by what the schedule says.

        Without recursion: a value may be thousands of operations away from what is there.
        """
        stack = [node]
        while stack:
            current = stack[-1]
            if current in made:
                stack.pop()
                continue
            # Inside of a segment that runs again, its own items are what is run, and no other segment begins.
            if made is self.made and self._expanded_for(current):
                continue
            missing = [source for source in current.all_input_nodes if source not in made]
            if missing:
                # The first argument is made first, so it is pushed last.
                stack += reversed(missing)
                continue
            self._emit(stack.pop(), made)

    def _expanded_for(self, node: fx.Node) -> bool:
        """Run the segment that a node's stage waits for, one level deep. False if it waits for none."""
        number = self.stages.of.get(node)
        # What is free is made from inputs, whatever segment reads it.
        if number is None or node in self.stages.always_saved:
            return False
        # A boundary is kept by the segment that begins with it, and made by the stage before.
        segment = self.pending.get(number)
        following = self.pending.get(number + 1)
        if node is self.stages.output(number) and following is not None and following.first <= number:
            segment = following
        if segment is None:
            return False
        self._expand(segment)
        return True

    def _expand(self, segment: Segment) -> None:
        """Run a segment, and keep what its schedule keeps."""
        stages = self.stages
        for number in range(segment.first, segment.last + 1):
            self.pending.pop(number, None)
        # One level deep: what is inside of its own segments is made when the backward comes to them.
        self._register(segment.items)
        # What the recomputation makes besides is for nobody else.
        local = dict(self.made)
        items = list(segment.items)
        for place, item in enumerate(items):
            is_last = place + 1 == len(items)
            if isinstance(item, Leaf):
                output = stages.output(item.stage)
                # In the order of the graph, or its text would differ from run to run, and be compiled again.
                for node in sorted(_saved_by(stages, self.options, item), key=stages.order.__getitem__):
                    if node is output and is_last and node not in self.made:
                        # The backward of what comes behind has read it already, or it is made when it is asked for.
                        continue
                    self._make(node, local)
                    self.made[node] = local[node]
                last_stage = item.stage
            else:
                last_stage = item.last
                boundary = stages.boundaries[item.first]
                if boundary is not None:
                    self._make(boundary, local)
                    self.made[boundary] = local[boundary]
            output = stages.output(last_stage)
            if not is_last and output is not None:
                self._make(output, local)
                # Whoever comes next begins there.
                local = {**self.made, output: local[output]}

    def _emit(self, node: fx.Node, made: dict[fx.Node, fx.Node]) -> None:
        if node.op == "placeholder":
            first = next(iter(self.graph.nodes))
            with self.graph.inserting_before(first):
                made[node] = self.graph.node_copy(node)
            self.unneeded.append(made[node])
            return
        copied = self.graph.node_copy(node, made.__getitem__)
        partitioning.copy_attributes(node, copied)
        made[node] = copied
