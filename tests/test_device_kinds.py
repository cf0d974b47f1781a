"""Kinds of devices: an entry is enough for one more kind, and whatever a kind lacks is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_rotor import devices
from lightning_rotor.devices import CUDA, HOST, KINDS, DeviceKind, block_bytes_of, device_in_use, kind_of
from lightning_rotor.errors import ProfilingError
from lightning_rotor.execution.segment import _device_of
from lightning_rotor.stages.draws import DrawsSeen
from lightning_rotor.stages.generators import HOST as HOST_GENERATOR
from lightning_rotor.stages.generators import GeneratorStates, seeded

MPS, XPU = torch.device("mps:0"), torch.device("xpu:0")

QUESTIONS: dict[str, Callable[[DeviceKind], Any]] = {
    "question for whether it is available": lambda kind: kind.is_available(),
    "current device": lambda kind: kind.current_device(),
    "name of its hardware": lambda kind: kind.model_name(XPU),
    "random generator": lambda kind: kind.own_generator,
    "state of its random generator": lambda kind: kind.generator_state(XPU),
    "seed of its random generator": lambda kind: kind.seed(XPU, 1),
    "backend whose precision can be set": lambda kind: kind.precision_backend,
    "statement about its memory": lambda kind: kind.has_own_memory,
    "count of allocated bytes": lambda kind: kind.allocated_bytes(XPU),
    "highest count of allocated bytes": lambda kind: kind.levels(XPU),
    "count of reserved bytes": lambda kind: kind.reserved_bytes(XPU),
    "count of free bytes": lambda kind: kind.driver_memory(XPU),
    "limit for a process": lambda kind: kind.process_share(XPU),
    "cache that can be emptied": lambda kind: kind.empty_cache(),
    "clock": lambda kind: kind.time_point(XPU),
}


@pytest.mark.parametrize("feature", QUESTIONS)
def test_a_kind_that_is_not_known_refuses_each_question_by_name(feature: str) -> None:
    with pytest.raises(ProfilingError, match=f"'xpu' has no {feature} that .* expected the model, .*'cpu' or 'cuda'"):
        QUESTIONS[feature](kind_of(XPU))


def test_what_sets_something_is_refused_as_well() -> None:
    kind = kind_of(XPU)
    with pytest.raises(ProfilingError, match="'xpu' has no current device"):
        kind.make_current(XPU)
    with pytest.raises(ProfilingError, match="'xpu' has no state of its random generator"):
        kind.set_generator_state(XPU, torch.zeros(1))
    with pytest.raises(ProfilingError, match="'xpu' has no highest count"):
        kind.reset_peaks(XPU)
    with pytest.raises(ProfilingError, match="'xpu' has no clock"):
        kind.seconds_between(0, 1)
    with pytest.raises(ProfilingError, match="'xpu' has no count of allocated bytes"):
        _ = kind.tells_allocated


@pytest.mark.parametrize("type_", ["mps", "xpu", "hpu"])
def test_random_states_of_a_kind_that_is_not_known_are_refused_instead_of_left_out(type_: str) -> None:
    device = torch.device(type_, 0)
    with pytest.raises(ProfilingError, match=f"'{type_}' has no random generator"):
        GeneratorStates(device)
    with pytest.raises(ProfilingError, match=f"'{type_}' has no random generator"), seeded(1, device):
        pass


@pytest.mark.parametrize("type_", ["mps", "xpu"])
def test_dropout_on_a_kind_that_is_not_known_is_refused_where_draws_are_noted(type_: str) -> None:
    with FakeTensorMode():
        values = torch.empty(4, device=type_)
        assert _device_of([torch.empty(1), values]) == values.device
        with DrawsSeen() as seen:
            values * 2
            with pytest.raises(ProfilingError, match=f"'{type_}' has no random generator"):
                torch.dropout(values, 0.5, True)
        assert not seen.kinds


def test_draws_on_known_kinds_are_noted_under_the_name_of_their_generator() -> None:
    with FakeTensorMode():
        for type_, name in (("cpu", HOST_GENERATOR), ("meta", HOST_GENERATOR), ("cuda", "torch's CUDA generator")):
            with DrawsSeen() as seen:
                torch.dropout(torch.empty(4, device=type_), 0.5, True)
            assert seen.kinds == {name}


class _OwnGenerator(DeviceKind):
    """A kind of device of which no more than the random numbers is known."""

    name = "mps"
    own_generator = "torch's MPS generator"

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def current_device(self) -> torch.device:
        return MPS

    def generator_state(self, device: torch.device) -> torch.Tensor:
        return self.generator.get_state()

    def set_generator_state(self, device: torch.device, state: torch.Tensor) -> None:
        self.generator.set_state(state)

    def seed(self, device: torch.device, seed: int) -> None:
        self.generator.manual_seed(seed)

    def draw(self) -> list[float]:
        return torch.rand(3, generator=self.generator).tolist()


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> _OwnGenerator:
    kind = _OwnGenerator()
    monkeypatch.setitem(KINDS, kind.name, kind)
    return kind


def test_an_entry_is_enough_for_random_numbers_of_one_more_kind(added: _OwnGenerator) -> None:
    before = GeneratorStates(MPS)
    assert "torch's MPS generator" in before.kinds
    drawn = added.draw()
    assert before.changed() == {"torch's MPS generator"}
    before.restore()
    assert added.draw() == drawn

    with seeded(3, MPS):
        under_seed = added.draw()
    with seeded(3, MPS):
        assert added.draw() == under_seed
    with FakeTensorMode(), DrawsSeen() as seen:
        torch.dropout(torch.empty(4, device="mps"), 0.5, True)
    assert seen.kinds == {"torch's MPS generator"}


def test_the_device_in_use_is_found_among_all_kinds(added: _OwnGenerator) -> None:
    assert added.current_device() == MPS
    assert device_in_use() == MPS
    assert GeneratorStates().device == MPS


def test_what_an_added_kind_does_not_override_is_still_refused(added: _OwnGenerator) -> None:
    with pytest.raises(
        ProfilingError, match=r"'mps' has no count of allocated bytes .* in lightning_rotor/devices\.py"
    ):
        kind_of(MPS).allocated_bytes(MPS)


def test_the_host_and_shapes_have_no_generator_besides_the_hosts() -> None:
    random.seed(1)
    for device in (torch.device("cpu"), torch.device("meta")):
        states = GeneratorStates(device)
        assert states.device is None
        assert len(states.kinds) == 3
        assert kind_of(device).model_name(device) == device.type


def test_tables_follow_the_entries() -> None:
    assert devices.TRAINING == ("cpu", "cuda")
    assert devices.AUTOCASTING == ("cpu", "cuda")
    assert set(devices.PRECISION_BACKENDS) == {"cuda", "mkldnn"}
    assert (block_bytes_of("cpu"), block_bytes_of("cuda"), block_bytes_of("meta")) == (1, 512, 1)
    assert (HOST.tells_allocated, CUDA.tells_allocated) == (False, True)
    # Both do nothing on the host.
    HOST.empty_cache()
    HOST.make_current(torch.device("cpu"))


@pytest.mark.gpu
def test_a_gpu_tells_of_its_memory_time_and_random_numbers() -> None:
    device = torch.device("cuda", 0)
    CUDA.make_current(device)
    assert CUDA.is_available()
    assert CUDA.current_device() == device_in_use() == device
    CUDA.empty_cache()
    CUDA.reset_peaks(device)
    level = CUDA.allocated_bytes(device)
    start = CUDA.time_point(device)
    block = torch.ones(2**20, device=device)
    assert CUDA.seconds_between(start, CUDA.time_point(device)) >= 0
    assert CUDA.allocated_bytes(device) - level == block.nbytes
    del block
    levels = CUDA.levels(device)
    assert levels.allocated_bytes == level
    assert levels.peak_bytes - level == 4 * 2**20
    assert levels.peak_reserved_bytes >= CUDA.reserved_bytes(device) >= level
    free_bytes, total_bytes = CUDA.driver_memory(device)
    assert 0 < free_bytes <= total_bytes
    assert 0 < CUDA.process_share(device) <= 1
    assert CUDA.model_name(device)

    state = CUDA.generator_state(device)
    drawn = torch.rand(3, device=device)
    CUDA.set_generator_state(device, state)
    assert torch.equal(torch.rand(3, device=device), drawn)
    CUDA.seed(device, 5)
    drawn = torch.rand(3, device=device)
    CUDA.seed(device, 5)
    assert torch.equal(torch.rand(3, device=device), drawn)
    CUDA.set_generator_state(device, state)
