"""Hypothesis generators of small real models, and how to run one training step of them in a way that can be compared bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from lightning_rotor.profiling import StepMeter
from lightning_rotor.schedule import Item, Leaf, Schedule, Segment

CPU = torch.device("cpu")


@st.composite
def schedules(draw: st.DrawFn, stages: int) -> Schedule:
    """Any schedule of a chain, segments nested up to three deep."""
    return Schedule(_items(draw, 0, stages - 1, 0))


def _items(draw: st.DrawFn, first: int, last: int, depth: int) -> tuple[Item, ...]:
    items: list[Item] = []
    while first <= last:
        if depth < 3 and first < last and draw(st.booleans()):
            end = draw(st.integers(first, last - 1))
            items.append(Segment(_items(draw, first, end, depth + 1)))
            first = end + 1
        else:
            items.append(Leaf(first))
            first += 1
    return tuple(items)


@dataclass(frozen=True)
class Case:
    """A model and its input."""

    net: nn.Sequential
    batch: torch.Tensor


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Models of up to 12 layers: dense, convolutional or transformer, with dropout, normalization, views and operations in place."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    kind = draw(st.sampled_from(["dense", "convolutional", "transformer"]))
    net, batch = {"dense": _dense, "convolutional": _convolutional, "transformer": _transformer}[kind](draw)
    return Case(net, batch.requires_grad_(draw(st.booleans())))


def _dense(draw: st.DrawFn) -> tuple[nn.Sequential, torch.Tensor]:
    layers: list[nn.Module] = [nn.Flatten()] if draw(st.booleans()) else []
    width = 32
    for _ in range(draw(st.integers(1, 5))):
        new_width = draw(st.sampled_from([16, 32, 64]))
        layers.append(nn.Linear(width, new_width))
        width = new_width
        layers.append(
            draw(
                st.sampled_from(
                    [
                        nn.ReLU(),
                        nn.ReLU(inplace=True),
                        nn.Tanh(),
                        nn.GELU(),
                        nn.Dropout(0.3),
                        nn.LayerNorm(width),
                        nn.BatchNorm1d(width),
                        nn.Identity(),
                        nn.Sequential(nn.Sigmoid(), nn.Dropout(0.1)),
                    ]
                )
            )
        )
    return nn.Sequential(*layers), torch.randn(64, 32)


def _convolutional(draw: st.DrawFn) -> tuple[nn.Sequential, torch.Tensor]:
    channels = 3
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 3))):
        new_channels = draw(st.sampled_from([4, 8]))
        layers += [
            nn.Conv2d(channels, new_channels, 3, padding=1),
            nn.BatchNorm2d(new_channels),
            nn.ReLU(draw(st.booleans())),
        ]
        if draw(st.booleans()):
            layers.append(draw(st.sampled_from([nn.MaxPool2d(2, 1, 1), nn.Dropout2d(0.2), nn.AvgPool2d(3, 1, 1)])))
        channels = new_channels
    if len(layers) <= 9 and draw(st.booleans()):
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10)]
    return nn.Sequential(*layers), torch.randn(4, 3, 12, 12)


def _transformer(draw: st.DrawFn) -> tuple[nn.Sequential, torch.Tensor]:
    dropout = draw(st.sampled_from([0.0, 0.1]))
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True) for _ in range(draw(st.integers(2, 5)))]
    return nn.Sequential(*layers), torch.randn(4, 8, 16)


@dataclass(frozen=True)
class StepResult:
    """Everything that a training step leaves behind."""

    tensors: dict[str, torch.Tensor]
    peak_bytes: int


def training_step(
    case: Case,
    forward: Callable[[Any], Any],
    state: dict[str, torch.Tensor],
    *,
    gradients_exist: bool = False,
    weights: torch.Tensor | None = None,
) -> StepResult:
    """One forward and backward from a given state of the model and a fixed seed; gradients start at zero, or are made.

    The loss is the sum of the output times the weights: one number by default, for outputs of any shape.
    """
    with torch.no_grad():
        for key, value in case.net.state_dict().items():
            value.copy_(state[key])
    for parameter in case.net.parameters():
        parameter.grad = torch.zeros_like(parameter) if gradients_exist and parameter.requires_grad else None
    case.batch.grad = None
    torch.manual_seed(7)
    weights = torch.rand(1) if weights is None else weights
    gc.disable()  # garbage from the step before, freed in the middle of this one, would hide part of its peak
    meter = StepMeter(CPU)
    meter.start()
    try:
        output = forward(case.batch)
        (output * weights).sum().backward()
    finally:
        trace = meter.stop()  # torch has one profiler: the next test wants it
        gc.enable()
    tensors = {"output": output.detach(), "generator": torch.get_rng_state()}
    tensors |= {f"state {key}": value.clone() for key, value in case.net.state_dict().items()}
    tensors |= {f"gradient {key}": p.grad for key, p in case.net.named_parameters() if p.grad is not None}
    if case.batch.grad is not None:
        tensors["gradient of the batch"] = case.batch.grad
    return StepResult(tensors, trace.peak_bytes)


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Same names, and under each name the same bits."""
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"these differ: {different}"


def finite(values: torch.Tensor) -> torch.Tensor:
    """The values, if they are finite. (In a test's own file pytest would write other code for ``assert``.)"""
    assert values.isfinite().all(), f"{values.shape} is refused"
    if not values.isfinite().all():
        raise ValueError(str(values.sum().item()))
    if values.isnan().any() or values.isinf().any():
        raise ValueError("refused")
    return values
