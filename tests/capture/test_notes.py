"""Values outside of modules are noted at their places, followed as far as code names them, and put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.capture.attempts import Attempts
from lightning_rotor.capture.call import Call
from lightning_rotor.capture.notes import Notes, Place
from lightning_rotor.capture.operations import UntraceableError
from lightning_rotor.capture.reach import Reach
from lightning_rotor.capture.recording import Recording
from lightning_rotor.capture.value_memory import LASTING
from lightning_rotor.errors import ModelError
from lightning_rotor.stages.holders import ENTRIES


class Config:
    """Settings of the user's."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)


def reached(value: Any, *names: str, wholly: bool = False) -> Notes:
    """Notes of what code can read that gets this value and mentions these names."""
    notes = Notes()
    reach = Reach(nn.ReLU(), notes)
    reach.learn(frozenset(names), wholly=wholly)
    reach.read(Place(ENTRIES, {"value": value}, "value"), "path")
    notes.settle()
    assert notes.holds()
    return notes


def test_the_place_that_changed_is_told_and_put_back() -> None:
    names = {"rate": 1, "table": [1]}
    notes = Notes()
    notes.take(Place(ENTRIES, names, "rate"), "layers.0")
    notes.take(Place(ENTRIES, names, "table"), "layers.1")
    notes.settle()
    assert notes.changed() is None
    names["rate"] = 2
    names["table"].append(2)  # type: ignore[attr-defined]
    assert not notes.holds()
    assert notes.changed() == ("layers.0", "rate")
    notes.restore()
    assert names == {"rate": 1, "table": [1]}
    assert notes.holds()
    del names["rate"]
    assert not notes.holds()


def test_a_name_that_was_not_there_may_come() -> None:
    names: dict[str, Any] = {}
    notes = Notes()
    notes.look_up(names, ["open"])
    notes.settle()
    assert notes.holds()
    names["other"] = 1
    assert notes.holds()
    names["open"] = print
    assert not notes.holds()


def test_attributes_are_followed_by_the_names_that_code_mentions() -> None:
    config = Config(rate=0.5, inner=Config(width=3), other=1)
    notes = reached(config, "inner", "width")
    config.other = 2
    config.rate = 1.0
    assert notes.holds()
    config.inner.width = 4
    assert not notes.holds()


def test_a_computed_name_could_be_any() -> None:
    config = Config(rate=0.5)
    notes = reached(config, wholly=True)
    config.rate = 1.0
    assert not notes.holds()


def test_an_attribute_of_a_name_may_come_later() -> None:
    config = Config()
    notes = reached(config, "rate")
    config.unread = 1
    assert notes.holds()
    config.rate = 1.0
    assert not notes.holds()


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(UntraceableError, match="can read value, more than 20000 entries, which cannot be compared"):
        reached([0] * 20_001)


class Doubtful(nn.Module):
    """A forward that counts its calls, in itself or outside."""

    def __init__(self, code: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.code, self.config = code, Config()

    def forward(self, x: Any) -> Any:
        """A layer, and whatever the code does."""
        self.code(self)
        return self.layer(x)


def recorded(code: Any) -> tuple[Recording, dict[str, str]]:
    net = Doubtful(code)
    return Attempts(net, Call.of(net, (torch.ones(1, 2),), {})).record()


def test_a_recording_that_holds_is_returned_with_what_is_one_operation() -> None:
    recording, opaque = recorded(lambda net: None)
    assert opaque == {}
    assert [node.target for node in recording.graph.nodes if node.op not in LASTING] == ["layer", "output"]
    assert recording.run_as_they_are == {recording.root.layer}


def test_a_cache_that_is_filled_once_is_no_change() -> None:
    recording, _ = recorded(lambda net: net.config.__dict__.setdefault("cache", 1))
    assert recording.root.config.cache == 1


def count(net: Any) -> None:
    net.__dict__["calls"] = net.__dict__.get("calls", 0) + 1


def test_a_forward_that_changes_its_module_each_time_is_refused_and_leaves_it() -> None:
    net = Doubtful(count)
    with pytest.raises(ModelError, match="its forward changes attributes of the module"):
        Attempts(net, Call.of(net, (torch.ones(1, 2),), {})).record()
    assert "calls" not in net.__dict__
