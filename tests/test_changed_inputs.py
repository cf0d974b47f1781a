"""What a forward has read and somebody has changed before the backward: a recomputation refuses it by name, plain running does not mind."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrizations import weight_norm

from lightning_rotor import Checkpointable, is_recomputing
from lightning_rotor.errors import ExecutionError, RotorWarning
from lightning_rotor.execution.tensors_read import first_changed
from lightning_rotor.invertible import AdditiveCoupling, invertible_checkpoint
from lightning_rotor.private.torch_names import stamps
from lightning_rotor.schedule import Schedule
from tests.grids import few
from tests.invertible import Unfused
from tests.training import assert_same_bits

WIDTH = 16


class Shift(nn.Module):
    """Autograd saves nothing of what it reads, so plain training lets all of it change after the forward."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(width))
        self.register_buffer("mean", torch.randn(width, 4096))  # too large to be remembered

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image + self.place - self.mean[:, 0]


class Blocks(nn.Module):
    """Code that symbols can trace."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.offset = nn.Parameter(torch.randn(WIDTH))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        value = self.shift(image)
        for layer in self.layers:
            value = torch.tanh(layer(value) + self.offset)
        return value


class Looking(Blocks):
    """Code that must be recorded."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image) if bool((image < 1e9).all()) else image


def in_a_row() -> nn.Sequential:
    return nn.Sequential(Shift(), *(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


MAKERS: dict[str, Callable[[], nn.Module]] = {"sequential": in_a_row, "graph": Looking}
# Of each way one in `make test`.
SEGMENTS = [
    pytest.param("sequential", "(0-{0}) {1}", id="sequential-one segment", marks=pytest.mark.wide),
    pytest.param("sequential", "((0-1) 2-{0}) {1}", id="sequential-nested"),
    pytest.param("graph", "(0-{0}) {1}", id="graph-one segment"),
    pytest.param("graph", "((0-1) 2-{0}) {1}", id="graph-nested", marks=pytest.mark.wide),
]


def planned(net: nn.Module, batch: torch.Tensor, schedule: str | None) -> Checkpointable:
    """Under a schedule, or recomputing nothing."""
    result = Checkpointable(net, batch, "1GiB")
    if schedule is not None:
        last = len(result.chain) - 1
        result.use(Schedule.parse(schedule.format(last - 1, last)))
    return result


def gradients(net: nn.Module, batch: torch.Tensor, change: Callable[[], Any]) -> list[torch.Tensor]:
    """Of one step in which something changes between forward and backward."""
    net.zero_grad()
    loss = net(batch).square().sum()
    change()
    loss.backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def add_in_place(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1.0)


def step_optimizer(parameter: nn.Parameter) -> None:
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], lr=0.1).step()


def changes(net: nn.Module, batch: torch.Tensor) -> dict[str, tuple[Callable[[], Any], str]]:
    """What may happen, and how the error calls it. Plain training minds none of it."""
    shift: Any = net[0] if isinstance(net, nn.Sequential) else net.shift
    path = "0" if isinstance(net, nn.Sequential) else "shift"
    layer: Any = net[3] if isinstance(net, nn.Sequential) else net.layers[1]
    layer_path = "3" if isinstance(net, nn.Sequential) else r"layers\.1"
    return {
        "input": (lambda: add_in_place(batch), "input 'image'" if path == "shift" else "the module's input"),
        "parameter": (lambda: add_in_place(shift.place), rf"parameter '{path}\.place'"),
        "bias": (lambda: add_in_place(layer.bias), rf"parameter '{layer_path}\.bias'"),
        "data": (lambda: setattr(layer.bias, "data", torch.randn(WIDTH)), rf"parameter '{layer_path}\.bias'"),
        "optimizer": (lambda: step_optimizer(layer.bias), rf"parameter '{layer_path}\.bias'"),
        "buffer": (lambda: add_in_place(shift.mean), rf"buffer '{path}\.mean'"),
    }


@pytest.mark.parametrize("way", few(MAKERS, "sequential"))
def test_nothing_is_checked_where_nothing_is_recomputed(way: str) -> None:
    found = []
    for schedule in ("plain", None, "0-{1}"):
        torch.manual_seed(0)
        net, batch = MAKERS[way](), torch.randn(8, WIDTH)
        run = net if schedule == "plain" else planned(net, batch, schedule)
        found.append([tensor for change, _ in changes(net, batch).values() for tensor in gradients(run, batch, change)])
    assert all(len(each) == len(found[0]) and all(map(torch.equal, each, found[0])) for each in found[1:])


@pytest.mark.parametrize(("way", "schedule"), SEGMENTS)
def test_a_change_is_refused_by_name(way: str, schedule: str) -> None:
    net, batch = MAKERS[way](), torch.randn(8, WIDTH)
    run = planned(net, batch, schedule)
    assert len(run.chain) >= 5
    for change, name in changes(net, batch).values():
        with pytest.raises(ExecutionError, match=rf"{name} has changed .* expected it unchanged until the backward"):
            gradients(run, batch, change)
        assert not is_recomputing()
        # The step after is as clean as the first.
        plain = gradients(net, batch, lambda: None)
        assert all(map(torch.equal, plain, gradients(run, batch, lambda: None)))


@pytest.mark.parametrize("schedule", ["(0-{0}) {1}", "0 (1-{0}) {1}"])
def test_what_lies_between_stages_is_checked_too(schedule: str) -> None:
    seen: list[torch.Tensor] = []
    net, batch = in_a_row(), torch.randn(8, WIDTH)
    net[0].register_forward_hook(lambda module, args, output: seen.append(output) if not is_recomputing() else None)
    run = planned(net, batch, schedule)
    seen.clear()
    if schedule.startswith("0"):
        with pytest.raises(ExecutionError, match="output of '0' has changed since the forward"):
            gradients(run, batch, lambda: add_in_place(seen[-1]))
    else:  # nobody recomputes from it
        plain = gradients(net, batch, lambda: None)
        assert all(map(torch.equal, plain, gradients(run, batch, lambda: add_in_place(seen[-1]))))


def test_inputs_are_checked_under_hooks_for_saved_tensors_that_do_not_copy() -> None:
    net, batch = in_a_row(), torch.randn(8, WIDTH)
    run = planned(net, batch, "(0-{0}) {1}")
    plain = gradients(net, batch, lambda: None)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda tensor: tensor):
        assert_same_bits(plain, gradients(run, batch.clone(), lambda: None))
        copied = batch.clone()
        assert_same_bits(plain, gradients(run, copied, lambda: add_in_place(copied)))
    with (
        torch.autograd.graph.save_on_cpu(),  # on the CPU, the very tensor
        pytest.raises(ExecutionError, match="the module's input has changed"),
    ):
        gradients(run, batch, lambda: add_in_place(batch))


def test_a_batch_that_is_part_of_a_larger_buffer_may_be_overwritten_behind_the_backward_only() -> None:
    buffer = torch.randn(2, 8, WIDTH)
    net = in_a_row()
    run = planned(net, buffer[0], "(0-{0}) {1}")
    with pytest.raises(ExecutionError, match=r"the module's input has changed .* \(x\.clone\(\)\)"):
        gradients(run, buffer[0], lambda: buffer.copy_(torch.randn(2, 8, WIDTH)))
    plain = gradients(net, buffer[0], lambda: None)
    assert all(map(torch.equal, plain, gradients(run, buffer[0], lambda: None)))
    gradients(run, buffer[0].clone(), lambda: buffer.copy_(torch.randn(2, 8, WIDTH)))


def test_arguments_are_named_wherever_they_are() -> None:
    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = in_a_row()

        def forward(self, images: dict[str, torch.Tensor], *, mask: torch.Tensor) -> torch.Tensor:
            return self.layers(images["left"] + images["right"]) + mask

    net = Summing()
    call = {"images": {"left": torch.randn(8, WIDTH), "right": torch.randn(8, WIDTH)}, "mask": torch.zeros(8, WIDTH)}
    run = Checkpointable(net, call, "1GiB")
    run.use(Schedule.parse(f"(0-{len(run.chain) - 2}) {len(run.chain) - 1}"))
    for name, tensor in (("'images'['right']", call["images"]["right"]), ("'images'['left']", call["images"]["left"])):
        output = run(**call)
        add_in_place(tensor)
        with pytest.raises(ExecutionError, match=re.escape(f"the input {name} has changed")):
            output.sum().backward()
    output = run(**call)
    add_in_place(call["mask"])  # read by the last stage alone, which is kept
    output.sum().backward()


class Normal(nn.Module):
    """Uses statistics as they are, whatever the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def train(self, mode: bool = True) -> Normal:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.norm(input)


def test_what_is_legal_stays_legal() -> None:
    tied = nn.Linear(WIDTH, WIDTH)
    net = nn.Sequential(
        Shift(), tied, nn.BatchNorm1d(WIDTH), nn.Tanh(), weight_norm(nn.Linear(WIDTH, WIDTH)), Normal(), nn.Tanh(), tied, nn.Tanh()
    )  # fmt: skip
    twin = copy.deepcopy(net.train()).train()
    batch = torch.randn(8, WIDTH)
    run = planned(net, batch, "((0-1) 2-{0}) {1}")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (net, twin)]
    for forward, optimizer in zip((run, twin), optimizers, strict=True):
        optimizer.zero_grad()
        for _ in range(2):  # accumulation, with two forwards before the first backward, and a backward for each
            first, second = forward(batch).square().sum(), forward(batch + 1).square().sum()
            first.backward(retain_graph=True)
            first.backward()
            second.backward()
        optimizer.step()
        forward(batch).sum().backward()
        # As optimizers do that step within the backward.
        handles = [
            parameter.register_post_accumulate_grad_hook(add_in_place)
            for parameter in optimizer.param_groups[0]["params"]
        ]
        forward(batch).sum().backward()
        for handle in handles:
            handle.remove()
    assert_same_bits(net.state_dict(), twin.state_dict())
    gradients(run, batch, lambda: add_in_place(net[2].running_mean))  # written in training, never read
    for change, name in (
        (lambda: add_in_place(net[5].norm.running_mean), r"buffer '5\.norm\.running_mean'"),
        (lambda: add_in_place(tied.bias), r"parameter '1\.bias'"),
        (
            lambda: add_in_place(net[4].parametrizations.weight.original0),
            r"parameter '4\.parametrizations\.weight\.original0'",
        ),
    ):
        with pytest.raises(ExecutionError, match=f"the {name} has changed"):
            gradients(run, batch, change)


def test_tensors_that_functional_call_lends_are_those_of_the_recomputation() -> None:
    net, batch = Blocks(), torch.randn(8, WIDTH)
    run = planned(net, batch, "(0-{0}) {1}")
    lent = {f"module.{name}": torch.randn_like(tensor).requires_grad_() for name, tensor in net.named_parameters()}
    lent["module.shift.mean"] = torch.randn_like(net.shift.mean)
    found = []
    for module in (nn.Sequential(OrderedDict(module=net)), run):
        output = torch.func.functional_call(module, lent, batch)
        found.append(torch.autograd.grad(output.sum(), [tensor for tensor in lent.values() if tensor.requires_grad]))
    assert all(map(torch.equal, *found))
    output = torch.func.functional_call(run, lent, batch)
    add_in_place(lent["module.offset"])
    with pytest.raises(ExecutionError, match="the parameter 'offset' has changed"):
        output.sum().backward()


# -------------------------------------------------------------------- settings of layers: a recomputation runs under those of the forward


class Layered(nn.Module):
    """Code that symbols can trace, or only a recording."""

    def __init__(self, *, recorded: bool) -> None:
        super().__init__()
        self.rows = nn.ModuleList(layers() for _ in range(3))
        self.recorded = recorded

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        if self.recorded and bool((image > 1e9).any()):
            return image
        for row in self.rows:
            image = image + row(image)
        return image


def layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Tanh(), nn.LeakyReLU(0.1), nn.Linear(WIDTH, WIDTH)
    )  # fmt: skip


def every(kind: type[nn.Module], **values: Any) -> Callable[[nn.Module], Any]:
    """Sets attributes of all layers of a kind."""
    return lambda net: [vars(layer).update(values) for layer in net.modules() if isinstance(layer, kind)]


def every_linear(change: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    return lambda net: [change(layer) for layer in net.modules() if isinstance(layer, nn.Linear)]


LAYERED: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(layers(), layers(), layers()),
    "graph": lambda: Layered(recorded=True),
}
MEANWHILE: dict[str, Callable[[nn.Module], Any]] = {
    "eval": nn.Module.eval,
    "dropout": every(nn.Dropout, p=0.9),
    "momentum": every(nn.BatchNorm1d, momentum=0.9, eps=0.1),
    "statistics": every(nn.BatchNorm1d, track_running_stats=False),
    "slope": every(nn.LeakyReLU, negative_slope=0.9),
    "inplace": every(nn.LeakyReLU, inplace=True),
    "frozen": lambda net: net.requires_grad_(False),
    "thawed": lambda net: net.requires_grad_(True),
    "one frozen": lambda net: next(net.parameters()).requires_grad_(False),
    "forward": every(nn.Linear, forward=lambda image: image * 3),
    "hook": every_linear(lambda layer: layer.register_forward_hook(lambda module, args, output: output * 2)),
    "pre-hook": every_linear(lambda layer: layer.register_forward_pre_hook(lambda module, args: args[0] * 2)),
    "hook of all": lambda net: ALL_HOOKED.append(register_module_forward_hook(lambda module, args, output: output * 2)),
}
ALL_HOOKED: list[Any] = []


@contextmanager
def undone(net: nn.Module) -> Iterator[None]:
    attributes = [(vars(module), dict(vars(module))) for module in net.modules()]
    learning = [(parameter, parameter.requires_grad) for parameter in net.parameters()]
    try:
        yield
    finally:
        for now, then in attributes:
            now.clear()
            now.update(then)
            now["_forward_hooks"].clear()
            now["_forward_pre_hooks"].clear()
        for parameter, requires_grad in learning:
            parameter.requires_grad_(requires_grad)
        while ALL_HOOKED:
            ALL_HOOKED.pop().remove()


@pytest.mark.parametrize(("way", "schedule"), SEGMENTS)
def test_layers_are_recomputed_as_they_ran(way: str, schedule: str) -> None:
    """Whatever their settings are when the backward comes; those stay as they are."""
    torch.manual_seed(0)
    net, batch = LAYERED[way](), torch.randn(8, WIDTH)
    every_linear(lambda layer: layer.bias.requires_grad_(False))(net)
    twin = copy.deepcopy(net)
    run = planned(net, batch, schedule)
    for name, change in MEANWHILE.items():
        found = []
        for user, forward in ((twin, twin), (net, run)):
            with undone(user):
                torch.manual_seed(1)
                grown = gradients(forward, batch, partial(change, user))
                settings = [(module.training, sorted(vars(module)), module.extra_repr()) for module in user.modules()]
                hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in user.modules()]
                learning = [parameter.requires_grad for parameter in user.parameters()]
                found.append((grown, [*user.buffers()], settings, hooks, learning, torch.get_rng_state()))
        assert_same_bits(*found, name)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*torch.jit.script:FutureWarning")
def test_scripted_layers_are_kept() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), torch.jit.script(layers()), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    )
    batch, found = torch.randn(8, WIDTH), []
    with pytest.warns(RotorWarning, match="'2' gives other bits .*scripted modules"):
        run = Checkpointable(net, batch)
    assert [stage.name for stage in run.chain if not stage.recomputable] == ["2"]
    run.use(Schedule.parse("(0-1) 2 (3-3) 4"))
    for forward in (net, run):
        torch.manual_seed(1)
        net[2][1].running_mean.zero_()
        found.append((gradients(forward, batch, net.eval), [*net.train().buffers()]))
    assert_same_bits(*(grown for grown, _ in found))


def test_a_stage_that_changes_its_own_parameters_is_kept() -> None:
    net = nn.Sequential(nn.Embedding(20, WIDTH, max_norm=0.5), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    with pytest.warns(RotorWarning, match="'0' gives other bits .*embedding's max_norm"):
        run = Checkpointable(net, torch.arange(8))
    assert [stage.recomputable for stage in run.chain] == [False, True, True, True]


def test_torch_does_not_count_what_the_readme_says_it_does_not() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    before = stamps([parameter])
    parameter.data.add_(1.0)
    parameter.detach().numpy()[:] = 2.0
    torch.optim.SGD([parameter], lr=0.1, fused=True).step()
    assert stamps([parameter]) == before
    add_in_place(parameter.detach()[:1])
    assert first_changed(before, [parameter]) == 0


def coupling() -> AdditiveCoupling:
    return AdditiveCoupling(*(nn.Sequential(Shift(WIDTH // 2), nn.Tanh()) for _ in range(2)))


INVERTED = {
    "inverted": nn.Sequential(nn.Linear(WIDTH, WIDTH), Unfused(coupling()), nn.Tanh()),
    "fused": nn.Sequential(nn.Linear(WIDTH, WIDTH), coupling(), nn.Tanh()),
}


@pytest.mark.parametrize("schedule", ["0 1:1 2", "(0) 1:1 2", "(0-1) 2", "invertible_checkpoint"])
@pytest.mark.parametrize("kind", INVERTED)
def test_inverted_modules_read_what_the_forward_has_read(kind: str, schedule: str) -> None:
    net, batch = INVERTED[kind], torch.randn(8, WIDTH)
    if schedule == "invertible_checkpoint":
        run: Any = lambda x: net[2](invertible_checkpoint(net[1], net[0](x), name="1"))  # noqa: E731
    else:
        run = Checkpointable(net, batch, "1GiB")
        run.use(Schedule.parse(schedule))
    path, block = ("1.module", net[1].module) if kind == "inverted" else ("1", net[1])
    for tensor, name in (
        (block.f[0].place, f"parameter '{path}.f.0.place'"),
        (block.g[0].mean, f"buffer '{path}.g.0.mean'"),
    ):
        net.zero_grad()
        loss = run(batch).square().sum()
        add_in_place(tensor)
        with pytest.raises(ExecutionError, match=f"the {re.escape(name)} has changed since the forward"):
            loss.backward()
        run(batch).sum().backward()
