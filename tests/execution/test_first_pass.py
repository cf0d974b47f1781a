"""A repetition sees what the first pass saw, and changes nothing: rule by rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_rotor.errors import ExecutionError
from lightning_rotor.execution.first_pass import FirstPass, passing_first
from lightning_rotor.execution.lent_tensors import buffers_of, copies_of, standing_in
from lightning_rotor.execution.observers import Observers
from lightning_rotor.execution.passes import is_checkpointing
from lightning_rotor.execution.pending import Pending, await_backward
from lightning_rotor.execution.recomputation import Recomputation
from lightning_rotor.execution.segment_state import SegmentState, state_of
from lightning_rotor.execution.tensors_read import TensorsRead, first_changed, slots_read
from lightning_rotor.private.torch_names import stamps
from lightning_rotor.stages.sequential import Stage
from lightning_rotor.stages.snapshot import Snapshot


class Average(nn.Module):
    """Code of the user's with a buffer and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input, less the average from before."""
        self.calls += 1
        result = x - self.mean
        self.mean += x.mean()
        return result


def passed(module: nn.Module, x: Any) -> tuple[FirstPass, Any]:
    """A first pass of a module, and its output."""
    first_pass = FirstPass(state_of(Stage("stage", (module,)), [module], {}), torch.device("cpu"))
    with passing_first(first_pass):
        assert is_checkpointing()
        output = module(x)
    assert not is_checkpointing()
    return first_pass, output


X = torch.ones(4)


def test_rule_2_parameters_are_the_first_passs_own_and_unchanged() -> None:
    layer = nn.Linear(4, 1)
    first_pass, output = passed(layer, X)
    weight = layer.weight
    layer.weight = nn.Parameter(torch.zeros(1, 4))
    layer.bias.requires_grad_(False)
    with first_pass.replayed():
        assert layer.weight is weight
        assert layer.bias.requires_grad
        assert torch.equal(layer(X), output)
    assert layer.weight is not weight
    assert not layer.bias.requires_grad
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(ExecutionError, match="parameter 'weight' of Linear has changed since"), first_pass.replayed():
        pass


def test_rule_3_statistics_go_to_scratch() -> None:
    norm, x = nn.BatchNorm1d(2), torch.randn(8, 2)
    first_pass, output = passed(norm, x)
    before = norm.running_mean.clone()  # type: ignore[union-attr]
    with first_pass.replayed():
        assert torch.equal(norm(x), output)
    assert torch.equal(norm.running_mean, before)  # type: ignore[arg-type]
    assert norm.num_batches_tracked == 1


def test_rules_4_and_6_buffers_and_attributes_are_those_from_before() -> None:
    module = Average()
    module.mean += 3
    first_pass, output = passed(module, X)
    for _ in range(2):
        with first_pass.replayed():
            assert module.calls == 0
            assert torch.equal(module(X), output)
    assert (module.calls, module.mean.item()) == (1, 4.0)


def test_rule_7_numbers_are_drawn_again() -> None:
    dropout = nn.Dropout()
    torch.manual_seed(0)
    first_pass, output = passed(dropout, X)
    with first_pass.replayed():
        assert torch.equal(dropout(X), output)
    following = torch.rand(1)
    torch.manual_seed(0)
    dropout(X)
    assert torch.equal(following, torch.rand(1))


def test_rule_8_hooks_that_only_look_are_left_out() -> None:
    module = Average()
    module.register_forward_hook(lambda *_: print(end=""))  # noqa: T201
    module.register_forward_hook(lambda module, args, output: output * 2)
    first_pass, output = passed(module, X)
    with first_pass.replayed():
        assert len(module._forward_hooks) == 1
        assert torch.equal(module(X), output)
    assert len(module._forward_hooks) == 2


def _by_data(module: Any, inputs: Any) -> None:
    module.mean.data.copy_(inputs[0].mean())


def _by_numpy(module: Any, inputs: Any) -> None:
    module.mean.numpy()[:] = float(inputs[0].mean())


def _into_the_input(_module: Any, inputs: Any) -> None:
    inputs[0].data.neg_()


class Writer:
    """A hook that writes in another method."""

    def __call__(self, module: Any, inputs: Any) -> None:
        """Write to a buffer of the module."""
        self.write(module.mean, float(inputs[0].mean()))

    def write(self, buffer: torch.Tensor, value: float) -> None:
        """Write to a buffer."""
        buffer.data.fill_(value)


WRITER = Writer()


def _by_another_function(module: Any, inputs: Any) -> None:
    _by_data(module, inputs)


@pytest.mark.parametrize("size", [1, 40_000])
@pytest.mark.parametrize(
    "hook",
    [_by_data, _by_numpy, WRITER, WRITER.__call__, _into_the_input, _by_another_function],
    ids=["data", "numpy", "object", "method", "input", "function"],
)
def test_rule_8_a_hook_that_writes_without_a_version_does_not_only_look(hook: Any, size: int) -> None:
    module = Average()
    module.mean = torch.zeros(size)
    looking = module.register_forward_pre_hook(lambda *_: None)
    writing = module.register_forward_pre_hook(hook)
    module_input = torch.arange(float(size)) + 1
    first_pass, _ = passed(module, module_input)
    with first_pass.replayed():
        assert writing.id in module._forward_pre_hooks
        assert looking.id not in module._forward_pre_hooks


def test_a_hook_that_keeps_what_its_module_may_read_is_no_observer() -> None:
    module: Any = nn.Sequential(Average())
    kept: list[torch.Tensor] = []
    module[0].register_forward_hook(lambda module, args, output: kept.append(output))
    observers = Observers([module[0]])
    before = Snapshot([module[0]])
    observers.watch()
    module(X)
    observers.settle(before)
    observers.leave_out()
    assert not module[0]._forward_hooks  # nobody around reads it
    assert len(kept) == 1


def test_rule_9_settings_are_the_first_passs() -> None:
    layer, dropout = nn.Linear(4, 4), nn.Dropout(0.0)
    module = nn.Sequential(layer, dropout)
    with torch.autocast("cpu", torch.bfloat16):
        first_pass, output = passed(module, X)
    dropout.p = 0.5
    with first_pass.replayed():
        assert dropout.p == 0.0
        again = module(X)
    assert again.dtype is output.dtype is torch.bfloat16
    assert torch.equal(again, output)
    assert dropout.p == 0.5


def test_rule_10_a_replay_fills_the_places_and_stops() -> None:
    x, runs = torch.randn(3, requires_grad=True), []

    def run() -> torch.Tensor:
        runs.append(1)
        y = x.exp().sin()
        runs.append(2)
        return y

    with Recomputation("the forward", run).dropping():
        output = run()
    output.sum().backward()
    assert runs == [1, 2, 1]
    assert torch.equal(x.grad, x.exp().cos() * x.exp())  # type: ignore[arg-type]


def test_rule_10_other_tensors_are_refused() -> None:
    x = torch.randn(3, requires_grad=True)
    shapes = iter((3, 2))

    def run() -> torch.Tensor:
        return x[: next(shapes)].exp()

    with Recomputation("the forward", run).dropping():
        output = run()
    with pytest.raises(ExecutionError, match=r"expected torch.float32 of shape \(3,\) on cpu, received .*\(2,\)"):
        output.sum().backward()


def test_loans_are_put_back_in_the_order_that_they_came() -> None:
    module = Average()
    original = module.mean
    first, second = torch.ones(1), torch.ones(2)
    with standing_in([(module._buffers, "mean", first), (module._buffers, "mean", second)]):
        assert module.mean is second
    assert module.mean is original
    module.register_buffer("same", original)
    (_, _, mean), (_, _, same) = copies_of(buffers_of([module]))
    assert mean is same is not original


def test_the_first_tensor_that_changed_is_told() -> None:
    tensors = [torch.zeros(2), torch.zeros(2)]
    before = stamps(tensors)
    assert first_changed(before, tensors) is None
    tensors[1].add_(1)
    assert first_changed(before, tensors) == 1
    copies = [tensor.clone() for tensor in tensors]
    assert first_changed(before, copies) == 0
    assert first_changed(before, copies, or_copies=True) is None


def test_normalization_in_training_reads_no_statistics() -> None:
    norm = nn.BatchNorm1d(2)
    state = SegmentState(buffered=(norm,), direct_reads=((norm, "weight"),))
    assert [name for _, name, _ in slots_read(state)] == ["weight"]
    norm.eval()
    assert {name for _, name, _ in slots_read(state)} == {*norm._buffers, "weight"}
    read = TensorsRead(slots_read(state), state.name_of_tensor)
    norm.running_mean += 1  # type: ignore[operator]
    with pytest.raises(ExecutionError, match="buffer 'running_mean' of BatchNorm1d changed in a segment"):
        read.require_untouched()


def test_a_call_waits_for_its_backward() -> None:
    x = torch.randn(2, requires_grad=True)
    given = x * 1
    output = given.exp()
    heard: list[int] = []
    reference = await_backward((output, given), given, once=True)
    pending = reference()
    assert isinstance(pending, Pending)
    pending.on_backward = lambda: heard.append(1)
    output.sum().backward(retain_graph=True)
    assert pending.waits
    output.sum().backward()
    assert (pending.waits, heard) == (False, [1, 1])
    del pending, output
    assert reference() is None


def test_rule_8_a_hook_that_writes_by_an_object_it_holds_does_not_only_look() -> None:
    module, holder = Average(), Writer()
    writing = module.register_forward_pre_hook(
        lambda module, inputs: holder.write(module.mean, float(inputs[0].mean()))
    )
    first_pass, _ = passed(module, torch.tensor([3.0]))
    with first_pass.replayed():
        assert writing.id in module._forward_pre_hooks
