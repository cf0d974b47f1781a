"""The backward of one stage by itself, with gradients as the stages behind it leave them in training.

A node behind the stage's output makes these gradients on the spot, so that each dies after the first operator that
reads it::

    input ──► stage ──► output ──► _GradientSource ──► root without elements
    input's ◄── stage's  ◄── made here, in their layouts ◄── autograd.grad(root, ...)
    gradient    backward
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from lightning_rotor.private.torch_names import sparse_parts
from lightning_rotor.private.values import bytes_in_blocks, bytes_of, tensors_in, tree_flatten, tree_leaves
from lightning_rotor.profiling.gradient_layouts import Gradients, Layout, Layouts, Memories, layouts_of, memory_bytes
from lightning_rotor.profiling.meters import Meter
from lightning_rotor.profiling.stage_ends import StageEnds
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.units import in_blocks


class StageBackward:
    """The backward of a stage that has just run. It holds no tensor of that run, so none lives longer than in training.

    Args:
        stage: The stage.
        ends: Its ends.
        value: Its input.
        output: Its output.
        meter: For sizes and seconds.
        layouts: Of the gradients that it is given.
        elsewhere: Memory that counts for others.
        shared: Parameters that later stages share, see :func:`~.shared_parameters.shared_later`.
        gradients_exist: New gradients are freed at once, as where autograd adds them to others.
    """

    def __init__(
        self,
        stage: Stage,
        ends: StageEnds,
        value: Any,
        output: Any,
        *,
        meter: Meter,
        layouts: Layouts,
        elsewhere: Memories,
        shared: Mapping[int, bool],
        gradients_exist: bool,
    ) -> None:
        self._meter = meter
        self._elsewhere = elsewhere
        # Points in time when the gradients were there, and when the backward was over.
        self._times = list[Any]()
        leaves = tree_leaves(value)
        outputs = _tensors_with_given_gradients(ends, leaves, output)
        self._layouts = _layouts_for(outputs, dict(layouts))
        of_skips = [layout for (_, key), layout in zip(outputs, self._layouts, strict=True) if key >= 0]
        self._given_bytes = memory_bytes(of_skips, meter.block_bytes)
        # Edges of the graph stand for the inputs, which die as in training.
        inputs = _tensors_that_learn(leaves, ends.inputs)
        self._inputs = [get_gradient_edge(leaf) for leaf, _ in inputs]
        self._keys = [(key, leaf.stride()) for leaf, key in inputs]
        self._parameters = stage.learning()
        # Their gradients are added to others, and freed.
        self._given_up = self._parameters
        if not gradients_exist:
            self._given_up = [self._parameters[number] for number in shared]
        # To the first gradient, which may be a view, autograd adds the second in a new tensor; to that sum in place.
        self._unsummed = [self._parameters[number] for number, is_first_sum in shared.items() if is_first_sum]
        sources = [tensor for tensor, _ in outputs] + self._unsummed
        self._root = _GradientSource.apply(self, *sources) if outputs else None

    def given(self) -> list[torch.Tensor]:
        """The gradients of its outputs, made now. Then its time begins: making them is another stage's in training.

        Gradients of shared parameters that wait for this stage's come first, too, and take no memory here.
        """
        memories = {**self._elsewhere}
        # Gradients that lie in one memory are given in one, so that it dies when all of them are read.
        gradients = [layout.ones(memories) for layout in self._layouts]
        self._times.append(self._meter.now())
        return gradients + [parameter.detach() for parameter in self._unsummed]

    @property
    def seconds(self) -> float:
        """Seconds from the gradients of its outputs to those of its inputs; 0 if nothing learns."""
        if not self._times:
            return 0.0
        return self._meter.seconds_between(self._times[0], self._times[-1])

    def gradients(self) -> Gradients:
        """Run the backward once."""
        # Let go of, so that the graph dies with the backward as in training.
        root, self._root = self._root, None
        if root is None or not (self._inputs or self._parameters):
            return Gradients(given_bytes=self._given_bytes)
        # In this run alone: the parameters are the user's.
        hooks = [_give_up_gradient(parameter) for parameter in self._given_up]
        # Not backward(): .grad and the hooks of gradient accumulation are the user's.
        ends: Any = [*self._inputs, *self._parameters]
        try:
            gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(
                root,
                ends,
                torch.empty_like(root),
                allow_unused=True,
            )
        finally:
            self._times.append(self._meter.now())
            for hook in hooks:
                hook.remove()
        number_of_inputs = len(self._inputs)
        layouts_by_key = self._layouts_by_key(gradients[:number_of_inputs])
        return self._sizes(layouts_by_key, tuple(self._parameter_bytes(gradients[number_of_inputs:])))

    def _layouts_by_key(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, list[Layout]]:
        """Layouts of the gradients of its inputs; several where several tensors show one skip."""
        of_inputs = []
        for (key, stride), gradient in zip(self._keys, gradients, strict=True):
            if gradient is not None:
                of_inputs.append((key, stride, gradient))
        layouts_by_key: dict[int, list[Layout]] = {}
        for (key, *_), layout in zip(of_inputs, layouts_of(of_inputs), strict=True):
            layouts_by_key.setdefault(key, []).append(layout)
        return layouts_by_key

    def _sizes(
        self,
        layouts_by_key: Mapping[int, list[Layout]],
        parameters: tuple[int, ...],
    ) -> Gradients:
        block_bytes = self._meter.block_bytes
        of_link: list[Layout] = []
        skip_bytes = {}
        only_layouts = {}
        for key, layouts in layouts_by_key.items():
            if key < 0:
                of_link += layouts
            else:
                # Several tensors may show a skip, views of it, and each has a gradient.
                skip_bytes[key] = memory_bytes(layouts, block_bytes)
            # Of several tensors that show one skip, nobody knows which part is whose.
            if len(layouts) == 1:
                only_layouts[key] = layouts[0]
        return Gradients(
            link_bytes=memory_bytes(of_link, block_bytes),
            skip_bytes=skip_bytes,
            layouts=only_layouts,
            parameters=parameters,
            given_bytes=self._given_bytes,
        )

    def _parameter_bytes(self, gradients: Sequence[torch.Tensor | None]) -> Iterator[int]:
        block_bytes = self._meter.block_bytes
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None:
                yield 0
            elif gradient.layout == torch.strided:
                # Accumulation copies a gradient that is no dense tensor of its own (an expanded one, say).
                yield in_blocks(bytes_of(parameter), block_bytes)
            else:
                yield bytes_in_blocks(sparse_parts(gradient), block_bytes)


class _GradientSource(torch.autograd.Function):
    """A tensor without elements whose backward gives what later stages' would, for outputs and shared parameters."""

    @staticmethod
    def forward(ctx: Any, run: StageBackward, *outputs: torch.Tensor) -> torch.Tensor:
        # The run and no tensor of it: a context would keep tensors alive as long as the graph.
        ctx.run = run
        # Without elements it takes no memory that would be counted.
        return torch.empty(0, device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.run.given()


def _give_up_gradient(parameter: torch.Tensor) -> Any:
    """Hook a parameter so that its gradient is freed at once; the handle removes the hook."""

    def replacement(gradient: torch.Tensor) -> torch.Tensor | None:
        # autograd.grad returns all gradients at its end. A tensor like the gradient takes its place, and no memory.
        if gradient.layout == torch.strided:
            return parameter.detach()
        return None

    return parameter.register_hook(replacement)


def _tensors_that_learn(leaves: Sequence[Any], places: Sequence[int | None]) -> list[tuple[torch.Tensor, int]]:
    """The tensors that require gradients, with their keys."""
    # Keys of the link are below zero, so that they cannot be a skip's place.
    link_numbers = count()
    tensors = []
    for leaf, place in zip(leaves, places, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            tensors.append((leaf, ~next(link_numbers) if place is None else place))
    return tensors


def _tensors_with_given_gradients(
    ends: StageEnds,
    leaves: Sequence[Any],
    output: Any,
) -> list[tuple[torch.Tensor, int]]:
    """The tensors whose gradients a stage is given, with their keys."""
    leaves_out = tree_flatten(output)[0]
    used = [place for place in range(len(leaves_out)) if place not in ends.unused]
    tensors = _tensors_that_learn([leaves_out[place] for place in used], [ends.outputs[place] for place in used])
    # Later readers of a skip have left its gradient; what the stage hands on itself gets it as an output.
    handed_on = {id(tensor) for tensor in tensors_in(output)}
    for leaf, place, is_read_later in zip(leaves, ends.inputs, ends.passed, strict=True):
        if is_read_later and place is not None and leaf.requires_grad and id(leaf) not in handed_on:
            tensors.append((leaf, place))
    return tensors


def _layouts_for(tensors: Sequence[tuple[torch.Tensor, int]], layouts: Mapping[int, Layout]) -> list[Layout]:
    """The layout of the gradient of each of these tensors: as given, or else like its tensor."""
    uses_of_keys = Counter(key for _, key in tensors)
    layout_of_each = []
    for number, (tensor, key) in enumerate(tensors):
        # Nobody knows how a skip's gradient is spread over several tensors that show it.
        layout = layouts.get(key) if uses_of_keys[key] == 1 else None
        if layout is None or layout.shape != tensor.shape:
            layout = Layout.like(tensor, ~number)
        layout_of_each.append(layout)
    return layout_of_each
