"""A recording holds for tensors of other sizes once two sizes were recorded, unless a size decides what the code does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

from lightning_rotor import Checkpointable, ModelError
from lightning_rotor.capture.graph_cut import GraphCut, cut_graph
from lightning_rotor.capture.recorder import Recorder
from lightning_rotor.planned.known_cuts import KnownCuts
from lightning_rotor.profiling.same_results import require_same
from lightning_rotor.schedule import Schedule
from tests.grids import few
from tests.training import assert_same_bits

SCALE = torch.ones(16)
SIX, EIGHT, NINE = (torch.randn(4, length, 16) for length in (6, 8, 9))


class Net(nn.Module):
    """Layers in a row, with something of the test's between them."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 100:
            raise ValueError("too long")
        for layer in self.layers:
            x = F.dropout(layer(x), 0.1)
        return self.act(nn.Identity()(x)).add_(1)


def holds_after(net: nn.Module, *recorded: torch.Tensor) -> GraphCut | None:
    """The cut that holds for length 9 after others were recorded, if one does; it computes what the module does."""
    first = cut_graph(net, (recorded[0],))
    same = [cut_graph(net, (x,), known=[first]) is first for x in recorded[1:]]
    if first.bind((NINE,), {}) is None:
        return None
    assert all(same)
    require_same(net, first, (NINE,), {})
    return first


def halves(x: torch.Tensor) -> torch.Tensor:
    batch, length, width = x.size()
    x = x.view(batch * length, 2, -1).transpose(0, 1).reshape(2, batch, length, width // 2)
    x = x.permute(1, 2, 0, 3).reshape(batch, length, width) + torch.arange(length).view(1, -1, 1)
    return F.pad(x, (0, 0, 0, -length % 4))[:, : x.shape[1]] / x.numel()


def masked(x: torch.Tensor) -> torch.Tensor:
    scores = x @ x.transpose(1, 2) / math.sqrt(x.size(-1))
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    assert scores.shape[1:] == hidden.shape
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ x


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        weights = torch.arange(x.shape[1], device="cpu").float().softmax(0)
    if x.shape[1] != weights.shape[0]:
        raise ValueError("one for each place")
    return x * weights[:, None]


def turned_in_place(x: torch.Tensor) -> torch.Tensor:
    turned, like = x * 1, x * 1
    turned.transpose_(1, 2)
    return like * torch.arange(turned.shape[2])[:, None] + torch.arange(like.shape[2])


@pytest.mark.parametrize("act", few([torch.tanh, halves, masked, without_gradients, turned_in_place], halves, masked))
def test_two_recorded_lengths_are_enough_for_a_third(act: Callable[[torch.Tensor], torch.Tensor]) -> None:
    net = Net(act)
    assert holds_after(net, SIX, EIGHT) is not None
    assert holds_after(net, SIX) is None
    assert holds_after(net, SIX, SIX[:2]) is None  # the batch may differ, nobody knows of the length


def test_dimensions_that_were_the_same_in_all_recordings_must_be_the_same() -> None:
    cut = holds_after(Net(), SIX, EIGHT)
    assert cut is not None
    assert cut.bind((NINE[:3],), {}) is None
    assert cut_graph(cut.module, (EIGHT[:2],), known=[cut]) is cut
    assert cut.bind((NINE[:3],), {}) is not None
    assert cut.bind((NINE.transpose(0, 1),), {}) is None
    assert cut.bind((NINE.double(),), {}) is None


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x * 2 if x.shape[1] > 8 else x,
        lambda x: x * {6: 1, 8: 2}.get(x.shape[1], 3),
        lambda x: torch.stack([row * 1 for row in x.unbind(1)], 1),
        *(
            pytest.param(act, marks=pytest.mark.wide)
            for act in (
                lambda x: x * math.sqrt(x.shape[1]),
                lambda x: x * (x.shape[1] / 2),
                lambda x: x * sum(2 for _ in range(x.shape[1])),
                lambda x: x * len(x.transpose(0, 1)),
                lambda x: x * float(f"{x.shape[1]}"),
            )
        ),
    ],
)
def test_where_a_length_decides_it_is_recorded_anew_and_the_line_named(act: Any) -> None:
    net = Net(act)
    assert holds_after(net, SIX, EIGHT) is None
    known = [cut_graph(net, (SIX,))]
    for x in (EIGHT, NINE):
        assert known[-1].bind((x,), {}) is None
        known.append(cut_graph(net, (x,), known=known))
    assert known[-1].anew.endswith(f"at {__file__}:{act.__code__.co_firstlineno}")


def test_questions_about_values_are_asked_with_the_sizes_of_the_call() -> None:
    def cut_off(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x, x], 1)[:, : x.shape[1]]
        return y if bool(mask[:, : y.shape[1]].all()) else y * 2

    class Masked(Net):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return cut_off(super().forward(x), mask)

    net, mask = Masked(), torch.ones(4, 20, dtype=torch.bool)
    mask[:, 8:] = False
    cut = cut_graph(net, (SIX, mask))
    assert cut_graph(net, (EIGHT, mask), known=[cut]) is cut
    seven = NINE[:, :7].contiguous()
    assert cut.bind((seven, mask), {}) is not None
    assert cut.bind((NINE, mask), {}) is None
    require_same(net, cut, (seven, mask), {})


def test_nothing_runs_for_a_third_length(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownCuts(Net(), most=4)
    first, _ = known.cut_and_input((SIX,), {})
    second, _ = known.cut_and_input((EIGHT,), {})
    assert second is first

    def records(*_: Any) -> Any:
        raise AssertionError("it records")

    monkeypatch.setattr(Recorder, "record", records)
    third, _ = known.cut_and_input((NINE,), {})
    assert third is first
    with pytest.raises(ModelError, match="it records"):
        known.cut_and_input((NINE.double(),), {})  # which is not a matter of size


@pytest.mark.parametrize(
    "other",
    [lambda x: x.clone().requires_grad_(), lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)],
    ids=["needs a gradient", "another layout"],
)
def test_calls_of_two_kinds_in_turns_are_recorded_once_each(
    other: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in adversarial training, whose first calls ask for the gradient of the input."""
    known = KnownCuts(Net(), most=4)
    cuts = [known.cut_and_input((x,), {})[0] for x in (SIX, other(SIX))]
    monkeypatch.setattr(Recorder, "record", None)
    cuts += [known.cut_and_input((x,), {})[0] for x in (SIX, other(SIX), SIX)]
    assert len(set(map(id, cuts))) == 1


def test_modules_that_had_to_be_one_operation_are_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hidden(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                return x.cos()

    net = Net(Hidden())
    first = cut_graph(net, (SIX,))
    runs: list[Any] = []
    plain = Recorder.record
    monkeypatch.setattr(Recorder, "record", lambda self: (runs.append(1), plain(self))[1])
    assert cut_graph(net, (EIGHT,), known=[first]) is first
    assert list(first.opaque) == ["act"]
    assert len(runs) == 1
    assert first.bind((NINE,), {}) is not None
    require_same(net, first, (NINE,), {})


def test_equal_layers_are_asked_once() -> None:
    def asks(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.erf(x * 2)  # there is no rule for its sizes
            if x.shape[1] > 100:
                raise ValueError("too long")
        return x

    cut = holds_after(Net(asks), SIX, EIGHT)
    assert cut is not None
    runs: list[str] = []

    class Runs(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            runs.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Runs():
        assert cut.bind((NINE[:, :7].contiguous(),), {}) is not None
    assert runs.count("erf") == 1
    assert cut.bind((torch.randn(4, 101, 16),), {}) is None


class Packed(nn.Module):
    """Sentences of several lengths, as long as the input if ``whole``. Otherwise it does something else for long ones."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.before, self.cells, self.after = nn.Linear(16, 16), nn.GRU(16, 8, batch_first=True), nn.Linear(8, 4)
        self.whole = whole

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.before(x), lengths, batch_first=True, enforce_sorted=False)
        size = x.shape[1] if self.whole else None
        y, _ = pad_packed_sequence(self.cells(packed)[0], batch_first=True, total_length=size)
        return self.after(y * 2 if not self.whole and y.shape[1] > 7 else y)


def test_packed_sequences_hold_for_other_lengths_and_their_entries_count() -> None:
    net = Packed(whole=True)
    cut = cut_graph(net, (SIX, torch.tensor([6, 2, 3, 4])))
    assert cut_graph(net, (EIGHT, torch.tensor([5, 8, 3, 4])), known=[cut]) is cut
    known = KnownCuts(net, most=4)
    seven = NINE[:, :7].contiguous()
    for lengths in ([7, 2, 3, 4], [1, 1, 5, 1]):
        call = seven, torch.tensor(lengths)
        value = cut.bind(call, {})
        assert value is not None
        require_same(net, cut, call, {})
        assert known.signature(cut, value).shapes[-1] == (sum(lengths),)


def test_a_size_that_depends_on_values_is_asked_at_every_call() -> None:
    net = Packed(whole=False)
    cut = cut_graph(net, (NINE, torch.tensor([9, 2, 3, 4])))
    for lengths, same in (([2, 9, 4, 3], True), ([9, 2, 3, 5], False), ([6, 2, 3, 4], False)):
        assert (cut.bind((NINE, torch.tensor(lengths)), {}) is not None) == same


class ChangesATensor(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 6:
            SCALE.add_(1)
        return super().forward(x)


def test_a_tensor_that_only_longer_inputs_change_is_refused_as_ever() -> None:
    net = ChangesATensor()
    cut = cut_graph(net, (SIX,))
    for known in ([], [cut]):
        with pytest.raises(
            ModelError, match=r"changes a parameter, or another tensor .* was there before, .* in place"
        ):
            cut_graph(net, (EIGHT,), known=known)
        assert torch.equal(SCALE, torch.ones(16))


def scaled_by(scale: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    def act(x: torch.Tensor) -> torch.Tensor:
        return x * scale if x.shape[0] else x

    def change(to: float) -> None:
        nonlocal scale
        scale = to

    return act, change


def test_a_variable_of_a_function_is_watched_for_every_length() -> None:
    act, change = scaled_by(2.0)
    net = Net(act)
    cut = holds_after(net, SIX, EIGHT)
    assert cut is not None
    change(3.0)
    assert cut.bind((NINE,), {}) is None
    assert act(NINE).equal(NINE * 3)


# -------------------------------------------------------------------- attributes that are others at each call


class Annealed(Net):
    """Its numbers and tensors change from step to step."""

    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(lambda x: x * 1.0)
        self.heat, self.step, self.scale = 1.0, 1, torch.ones(16)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self, super().forward(x)) * 2


def recordings(net: Annealed, settings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each of some settings was recorded; the planned module computes what it does by itself."""
    runs: list[Any] = []
    plain = Recorder.record
    monkeypatch.setattr(Recorder, "record", lambda self: (runs.append(1), plain(self))[1])
    planned = Checkpointable(net, mem_limit="1GiB")
    found = []
    for each in settings:
        vars(net).update(each)
        runs.clear()
        left, right = planned, net
        results = []
        for module in (left, right):
            torch.manual_seed(1)
            net.zero_grad()
            output = module(SIX)
            output.sum().backward()
            results.append([output, *(parameter.grad.clone() for parameter in net.parameters())])
        assert all(map(torch.equal, *results))
        found.append(bool(runs))
    return found


HEATS: list[dict[str, Any]] = [{"heat": heat} for heat in (1.0, 1.1, 1.2, 2.5, 0.3)]
STEPS: list[dict[str, Any]] = [{"step": step} for step in (1, 2, 3, 5, 4)]


@pytest.mark.parametrize(
    ("use", "settings"),
    [
        (lambda net, x: torch.add(x, x, alpha=1 - net.heat**2), HEATS),
        (lambda net, x: x * (x.shape[1] / net.step), STEPS),
        (lambda net, x: x * net.scale[: x.shape[1]].mean(), [{"scale": torch.rand(16)} for _ in range(5)]),
        *(
            pytest.param(use, settings, marks=pytest.mark.wide)
            for use, settings in (
                (lambda net, x: x / net.heat, HEATS),
                (lambda net, x: F.gumbel_softmax(x, tau=net.heat), HEATS),
                (lambda net, x: x * 2 if net.heat > 0 else x, HEATS),
                (lambda net, x: x * net.scale, [{"scale": torch.rand(16)} for _ in range(5)]),
            )
        ),
    ],
)
def test_numbers_and_tensors_of_a_module_that_change_at_each_step(
    use: Callable[[Any, torch.Tensor], torch.Tensor], settings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recordings(Annealed(use), settings, monkeypatch)[2:] == [False, False, False]


@pytest.mark.parametrize(
    ("use", "settings"),
    [
        (lambda net, x: x * max(0.4, math.exp(-net.heat)), HEATS),
        (lambda net, x: x * [1, 2, 3, 4, 5, 6][net.step], STEPS),
        *(
            pytest.param(use, settings, marks=pytest.mark.wide)
            for use, settings in (
                (lambda net, x: x * float(f"{net.heat:.1f}"), HEATS),
                (lambda net, x: x * net.heat if type(net.heat) is float else x, HEATS),
                (lambda net, x: x * float(np.exp(net.heat)), HEATS),
                (lambda net, x: x * sum(1 for _ in range(net.step)), STEPS),
            )
        ),
    ],
)
def test_a_number_with_which_python_computes_is_recorded_anew(
    use: Callable[[Any, torch.Tensor], torch.Tensor], settings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(recordings(Annealed(use), settings, monkeypatch))


def test_a_branch_on_a_number_is_taken_again_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Annealed(lambda net, x: x * 2 if net.heat > 1.15 else x)
    assert recordings(net, [*HEATS, *HEATS], monkeypatch) == [True, True, True, *7 * [False]]


def test_a_tensor_attribute_replaced_before_the_backward_is_the_one_that_the_forward_read() -> None:
    net = Annealed(lambda net, x: (x / net.scale).tanh())
    planned, found = Checkpointable(net, SIX), []
    assert planned.chain is not None
    last = len(planned.chain) - 1
    planned.use(Schedule.parse(f"(0-{last - 1}) {last}"))
    for module in (planned, net):
        net.zero_grad()
        net.scale = torch.full((16,), 2.0)
        torch.manual_seed(1)
        loss = module(SIX).sum()
        net.scale = torch.full((16,), 5.0)
        loss.backward()
        found.append([parameter.grad for parameter in net.parameters()])
    assert all(map(torch.equal, *found))


def test_a_smaller_call_than_one_with_much_room_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_rotor.capture.size_guards import SizeGuards

    torch.manual_seed(0)
    asked: list[Any] = []
    hold = SizeGuards.hold
    monkeypatch.setattr(SizeGuards, "hold", lambda guards, *call: asked.append(call) or hold(guards, *call))
    body = Net(lambda x: x * x.shape[1] if x.shape[1] % 2 else x + 1)
    net = Checkpointable(body, mem_limit="1GiB", show_progress=False)

    def train(length: int) -> int:
        before = len(asked)
        found = []
        x = torch.randn(4, length, 16)
        for module in (net, body):
            body.zero_grad()
            torch.manual_seed(1)
            module(x).square().mean().backward()
            found.append({name: parameter.grad for name, parameter in body.named_parameters()})
        assert_same_bits(*found)
        assert net.plan is not None
        return len(asked) - before

    train(40)
    train(38)
    assert train(36) == 0  # smaller than 40
    assert train(35) == 0  # although it does something else
    assert train(41) > 0
    net.compute_sequence(net.plan.peak_bytes)  # type: ignore[union-attr]
    assert train(34) > 0  # without much room, it is asked
