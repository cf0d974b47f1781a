"""Functions under ``functools.cache`` that compute shapes: one recording holds for other sizes, as without the cache."""

from __future__ import annotations

from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.capture import attempts
from lightning_rotor.capture.memoized import Memoized
from lightning_rotor.capture.sequentialize import sequentialize
from lightning_rotor.checkpointable import Checkpointable
from lightning_rotor.errors import ModelError
from tests.training import assert_same_bits

LENGTHS = (10, 6, 8, 4, 12, 10, 6)


@lru_cache
def split(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    batch, length, width = shape
    return batch, length // 2, 2 * parts, width // parts


@cache
def drawn(parts: int) -> torch.Tensor:
    return torch.randn(parts)


tools = ModuleType("tools")
tools.split = split  # type: ignore[attr-defined]


class Block(nn.Module):
    @staticmethod
    @cache
    def split(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
        return split.__wrapped__(shape, parts)

    @lru_cache(4)  # noqa: B019 - as users write it
    def halves(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return split.__wrapped__(shape, 4)

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        shape = tuple(y.shape)
        if self.way == "global":
            parts = split(shape, 4)
        elif self.way == "of a module":
            parts = tools.split(shape, 4)
        elif self.way == "static":
            parts = self.split(shape, 4)
        else:
            parts = self.halves(shape)
        return x + self.second(y.reshape(parts).softmax(-1).reshape(y.shape))


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All recordings that are begun."""
    begun: list[Any] = []
    kind = attempts.Recorder

    def noted(*args: Any, **kwargs: Any) -> Any:
        begun.append(args)
        return kind(*args, **kwargs)

    monkeypatch.setattr(attempts, "Recorder", noted)
    split.cache_clear()
    return begun


def train(way: str, limit: str | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(way) for _ in range(3)))
    called: Any = net
    if limit:
        called = Checkpointable(net, torch.randn(4, LENGTHS[0], 8), limit, show_progress=False)
    generator = torch.Generator().manual_seed(1)
    for length in LENGTHS:
        called(torch.randn(4, length, 8, generator=generator)).square().mean().backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("way", ["global", "of a module", "static", "method"])
def test_one_recording_holds_for_all_lengths(way: str, recordings: list[Any]) -> None:
    plain = train(way, None)
    planned = train(way, "40KiB")
    assert_same_bits(plain, planned)
    # Two runs of the first size, and of the second, which shows the dimensions that differ.
    assert len(recordings) <= 4
    assert not isinstance(split, Memoized)
    assert type(split) is type(drawn)


def test_the_cache_holds_plain_numbers_alone(recordings: list[Any]) -> None:
    sequentialize(nn.Sequential(Block("global")), (torch.randn(4, 10, 8),))
    assert split.cache_info().currsize == 1
    assert recordings
    assert {type(number) for number in split((4, 10, 16), 4)} == {int}
    assert split.cache_info().hits > 0


class Refusing(nn.Module):
    @staticmethod
    @cache
    def halved(length: int) -> int:
        if type(length) is not int:
            raise TypeError("plain numbers only")
        return length // 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x).narrow(1, 0, self.halved(x.shape[1])).mean(1, keepdim=True)


def test_a_function_that_wants_plain_numbers_gets_them() -> None:
    net = nn.Sequential(Refusing(), Refusing())
    planned = Checkpointable(net, torch.randn(4, 10, 8), "1MiB", show_progress=False)
    for length in (10, 6, 7):
        x = torch.randn(4, length, 8)
        assert torch.equal(planned(x), net(x))


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * drawn(x.shape[-1])


def test_a_cached_tensor_is_drawn_once() -> None:
    x = torch.randn(4, 8)
    results = []
    for limit in ("", "1MiB"):
        drawn.cache_clear()
        torch.manual_seed(3)
        net: Any = nn.Sequential(Drawing(), Drawing())
        drawn(8)
        if limit:
            net = Checkpointable(net, x, limit, show_progress=False)
        results.append([net(x), net(x), torch.get_rng_state()])
        assert torch.equal(results[-1][0], results[-1][1])
    assert_same_bits(*results)


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(split((1, *x.shape), 4)):
            raise ValueError("fails in plain training, too")
        return x


def test_a_forward_that_raises_leaves_the_function_in_its_place() -> None:
    before = split
    with pytest.raises(ModelError, match="fails in plain training, too"):
        sequentialize(Failing(), (torch.randn(4, 8),))
    assert split is before
