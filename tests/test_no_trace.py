"""Training under a limit leaves what plain training leaves: in lists, counters, metrics, logs, and whatever else user code can reach."""

from __future__ import annotations

import copy
import itertools
import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_rotor import Checkpointable, RotorCallback, Schedule, is_recomputing
from lightning_rotor.errors import ExecutionError
from tests.grids import few
from tests.training import Run, assert_same_bits, assert_same_training, train

pytestmark = pytest.mark.filterwarnings("ignore:.*mem_limit 1.00 KiB")
# A sequence runs without Lightning as well: test_without_lightning has hooks that collect, features for the loss and state at once.
GRAPH = pytest.mark.parametrize("way", few(["sequential", "graph"], "graph"))
SEQUENTIAL = pytest.mark.parametrize("way", few(["sequential", "graph"], "sequential"))


def in_turn(cases: Sequence[Any]) -> list[Any]:
    """Every second case is of a model that is recorded; the others of both ways are wide."""
    return [
        pytest.param(way, case, marks=[] if (number % 2 == 0) == (way == "sequential") else pytest.mark.wide)
        for number, case in enumerate(cases)
        for way in ("sequential", "graph")
    ]


class Block(nn.Module):
    """Its code runs as it is wherever a trace could not hold what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks in a row, which can be traced on symbols, or only recorded."""

    def __init__(self, blocks: list[nn.Module], *, recorded: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(16, 4)
        self.recorded = recorded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recorded and x.shape[0] > 10_000:
            return x
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net_of(way: str, block: Callable[[], nn.Module] = Block) -> nn.Module:
    blocks = [block() for _ in range(4)]
    if way == "sequential":
        # Blocks that hold layers are also looked into; these do not, for a Tanh comes behind each of them.
        return nn.Sequential(*(layer for each in blocks for layer in (each, nn.Tanh())), nn.Linear(16, 4))
    return Net(blocks, recorded=True)


def layers_of(net: nn.Module) -> list[nn.Module]:
    return [module for module in net.modules() if isinstance(module, Block)]


class Task(L.LightningModule):
    """A classifier; what a test adds to its loss, and notes after each step, are its business."""

    def __init__(
        self, net: nn.Module, loss: Callable[[], Any] = lambda: 0.0, note: Callable[[], Any] = lambda: None
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.net = net
        self.__dict__["extra"], self.__dict__["note"], self.__dict__["notes"] = loss, note, []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(self.stem(batch[0])).mean(1), batch[1]) + self.extra()
        self.notes.append(self.note())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


TENSORS = (torch.randn(24, 64, 16, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 4)


def agree(make: Callable[[], Task], folder: Path, **options: Any) -> Run:
    """Train plainly, under a plan that recomputes nothing, and under the least: three steps, each to the same bits and the same notes."""
    plain = train(make, TENSORS, folder, **options)
    assert len(plain.model.notes) == 3
    for limit in ("10GiB", "1KiB"):
        rotor = RotorCallback(limit, "net", on_infeasible="warn", show_table=False, log_plan=False)
        planned = train(make, TENSORS, folder, callback=rotor, **options)
        assert rotor.plan is not None
        assert bool(rotor.plan.recomputed) == (limit == "1KiB")
        assert_same_training(plain, planned)
        assert_same_bits(plain.model.notes, planned.model.notes)
    return plain


# -------------------------------------------------------------------- hooks


class Collector:
    """A hook that is an object, or a method of one."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.calls += 1
        self.found.append(output.detach().mean())

    def collect(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self(module, args, output)


FOUND: dict[str, Any] = {"all": [], "calls": 0}


def into_global(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    FOUND["calls"] += 1
    FOUND["all"].append(output.detach().mean())


def into(found: list[torch.Tensor], module: nn.Module, args: Any, output: torch.Tensor) -> None:
    found.append(output.detach().mean())


def by_closure(layers: list[nn.Module]) -> Callable[[], list[torch.Tensor]]:
    found: list[torch.Tensor] = []
    for layer in layers:
        layer.register_forward_hook(lambda module, args, output: found.append(output.detach().mean()))
    return lambda: found


def by_partial(layers: list[nn.Module]) -> Callable[[], list[torch.Tensor]]:
    found: list[torch.Tensor] = []
    for layer in layers:
        layer.register_forward_hook(partial(into, found))
    return lambda: found


def by_default(layers: list[nn.Module]) -> Callable[[], list[torch.Tensor]]:
    found: list[torch.Tensor] = []

    def hook(
        module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor, found: list[torch.Tensor] = found
    ) -> None:
        found.append(output.detach().mean())

    for layer in layers:
        layer.register_forward_hook(hook, with_kwargs=True, always_call=True)
    return lambda: found


def by_object(layers: list[nn.Module]) -> Callable[[], list[torch.Tensor]]:
    collector = Collector()
    for layer in layers:
        layer.register_forward_hook(collector)
    return lambda: [*collector.found, torch.tensor(collector.calls)]


def by_method(layers: list[nn.Module]) -> Callable[[], list[torch.Tensor]]:
    collector = Collector()
    for layer in layers:
        layer.register_forward_hook(collector.collect)
    return lambda: [*collector.found, torch.tensor(collector.calls)]


def by_global(layers: list[nn.Module]) -> Callable[[], list[torch.Tensor]]:
    FOUND.update(all=[], calls=0)
    for layer in layers:
        layer.register_forward_hook(into_global)
    return lambda: [*FOUND["all"], torch.tensor(FOUND["calls"])]


def by_pre_hook(layers: list[nn.Module]) -> Callable[[], list[torch.Tensor]]:
    found: dict[str, list[torch.Tensor]] = {"here": []}
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: found["here"].append(args[0].detach().mean()))
    return lambda: found["here"]


def by_backward_hook(layers: list[nn.Module]) -> Callable[[], list[torch.Tensor]]:
    found: list[torch.Tensor] = []
    for layer in layers:
        layer.register_full_backward_hook(lambda module, inputs, outputs: found.append(outputs[0].mean()))
    return lambda: found


def by_parameter_hook(layers: list[nn.Module]) -> Callable[[], list[torch.Tensor]]:
    found: list[torch.Tensor] = []
    for layer in layers:
        layer.linear.weight.register_hook(lambda gradient: found.append(gradient.mean()))
    return lambda: found


HOOKS = [
    by_closure, by_partial, by_default, by_object, by_method, by_global, by_pre_hook, by_backward_hook, by_parameter_hook,
]  # fmt: skip


@GRAPH
def test_hooks_that_collect(way: str, tmp_path: Path) -> None:
    """The loss uses what they have collected before, as regularization by statistics does."""

    def make() -> Task:
        net = net_of(way)
        found = [register(layers_of(net)) for register in HOOKS]

        def penalty() -> torch.Tensor:
            return sum((torch.stack(each()[-3:] or [torch.zeros(())]).mean() for each in found), torch.zeros(()))

        return Task(net, penalty, lambda: [[value.clone() for value in each()] for each in found])

    plain = agree(make, tmp_path)
    assert all(len(found) >= 8 for found in plain.model.notes[-1])


@SEQUENTIAL
def test_features_for_the_loss(way: str, tmp_path: Path) -> None:
    def make() -> Task:
        net = net_of(way)
        features: list[torch.Tensor] = []
        penalties: list[torch.Tensor] = []
        for layer in layers_of(net):
            layer.register_forward_hook(lambda module, args, output: features.append(output))
            layer.register_forward_hook(lambda module, args, output: penalties.append(output.square().mean()))

        def loss() -> torch.Tensor:
            total = torch.stack([each.abs().mean() for each in features] + penalties).sum()
            features.clear()
            penalties.clear()
            return total

        return Task(net, loss, lambda: [len(features)])

    agree(make, tmp_path)


def linears_in(net: nn.Module) -> list[nn.Module]:
    return [module for module in net.modules() if isinstance(module, nn.Linear)]


def on_its_module(net: nn.Module) -> Callable[[], Any]:
    """Notes on attributes of torch's own layers: one hook leaves them there, another reads them."""

    def note(module: Any, args: Any) -> None:
        module.calls, module.given = getattr(module, "calls", 0) + 1, args[0].detach()

    def use(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        module.made = output.detach()
        return output + 0.1 * module.given.mean() * module.calls

    for layer in linears_in(net):
        layer.register_forward_pre_hook(note)
        layer.register_forward_hook(use)
    return lambda: sum(layer.made.mean() * layer.calls for layer in linears_in(net) if hasattr(layer, "made"))


def for_a_while(net: nn.Module) -> Callable[[], Any]:
    """Hooks that remove themselves, at once or later, and one that registers another."""
    seen: list[torch.Tensor] = []

    def once(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        module.once.remove()
        return output * 0.5

    def later(module: Any, args: Any, output: torch.Tensor) -> None:
        seen.append(output.detach().mean())
        if len(seen) > 5:
            module.later.remove()

    def begin(module: Any, args: Any, output: torch.Tensor) -> None:
        if not hasattr(module, "begun"):
            module.begun = module.register_forward_hook(lambda module, args, output: output * 0.7)

    layers: list[Any] = linears_in(net)
    for layer in layers:
        layer.once, layer.later = layer.register_forward_hook(once), layer.register_forward_hook(later)
        layer.register_forward_hook(begin)
    return lambda: sum(seen, torch.zeros(()))


def always(net: nn.Module) -> Callable[[], Any]:
    """In every way that torch can call them."""
    seen: list[torch.Tensor] = []
    for layer in linears_in(net):
        layer.register_forward_hook(
            lambda m, a, k, out: seen.append(out.detach().mean()), with_kwargs=True, always_call=True
        )
        layer.register_forward_hook(lambda m, a, k, out: out * 1.5, with_kwargs=True, always_call=True)
        layer.register_forward_pre_hook(lambda m, a, k: ((a[0] * 0.7,), k), with_kwargs=True)
        layer.register_forward_hook(lambda m, a, out: out + 0.1, prepend=True, always_call=True)
    return lambda: sum(seen[-4:], torch.zeros(()))


def on_all(net: nn.Module) -> Callable[[], Any]:
    """For every module of the process."""
    seen: list[torch.Tensor] = []

    def scale(module: nn.Module, args: Any, output: torch.Tensor) -> Any:
        return output * 1.01 if isinstance(module, nn.Linear) else None

    def note(module: nn.Module, gradients: Any, outputs: Any) -> None:
        if isinstance(module, nn.Linear):
            seen.append(outputs[0].mean())

    def count(module: Any, args: Any) -> None:
        module.calls = getattr(module, "calls", 0) + 1

    of_all = nn.modules.module
    ON_ALL.extend(
        (
            of_all.register_module_forward_hook(scale, always_call=True),
            of_all.register_module_forward_pre_hook(count),
            of_all.register_module_full_backward_hook(note),
        )
    )
    return lambda: sum(seen[-6:], torch.tensor(sum(getattr(layer, "calls", 0) for layer in linears_in(net))))


def normalizing(net: nn.Module) -> Callable[[], Any]:
    """torch's own hooks and parametrizations of weights."""
    kinds: Any = (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm, nn.utils.weight_norm)
    for layer, normalize in zip(linears_in(net), cycle(kinds)):
        normalize(layer)
    return lambda: 0.0


ON_ALL: list[Any] = []


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated", "ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    ("way", "registers"),
    [
        pytest.param("sequential", (on_its_module, for_a_while, always, normalizing), id="sequential-own"),
        pytest.param("graph", (on_all,), id="graph-all", marks=pytest.mark.wide),
        # A model that is recorded meets hooks of each kind in test_ways_bad_input.
        pytest.param(
            "graph", (on_its_module, for_a_while, always, normalizing), id="graph-own", marks=pytest.mark.wide
        ),
        pytest.param("sequential", (on_all,), id="sequential-all", marks=pytest.mark.wide),
    ],
)
def test_hooks_of_every_kind(way: str, registers: Sequence[Callable[[nn.Module], Any]], tmp_path: Path) -> None:
    def make() -> Task:
        forget_on_all()
        net = net_of(way)
        found = [register(net) for register in registers]
        return Task(net, lambda: sum(each() for each in found), lambda: [vars(m).get("calls") for m in linears_in(net)])

    try:
        agree(make, tmp_path)
    finally:
        forget_on_all()


def forget_on_all() -> None:
    while ON_ALL:
        ON_ALL.pop().remove()


# -------------------------------------------------------------------- state that is neither buffer nor parameter


class Meter:
    def __init__(self) -> None:
        self.sum, self.history = 0.0, deque(maxlen=5)

    def update(self, value: float) -> None:
        self.sum += value
        self.history.append(value)


class Stateful(Block):
    """Keeps state in every way that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[torch.Tensor] = []
        self.recent: deque[float] = deque(maxlen=3)
        self.nested: dict[str, Any] = {"counts": [0], "shapes": set()}
        self.meter = Meter()
        self.tables: dict[int, torch.Tensor] = {}
        self.average = torch.zeros(16)
        self.queue = torch.zeros(4, 16)
        self.metric = MeanMetric()
        self.metrics = MetricCollection({"accuracy": MulticlassAccuracy(16, average="micro")})
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        mean = x.detach().mean((0, 1))
        self.seen.append(mean.norm())
        self.recent.append(float(mean.sum()))
        self.nested["counts"][0] += 1
        self.nested["shapes"].add(tuple(x.shape))
        self.meter.update(float(mean.sum()))
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.randn(x.shape[1], 1)
        x = x + self.tables[x.shape[1]] * self.average.mul_(0.9).add_(mean)
        self.queue = torch.cat([self.queue[1:], mean[None]])
        self.metric(mean)
        self.metrics(torch.stack([mean, -mean]), torch.tensor([0, 1]))
        noise = torch.rand((), generator=self.generator)
        return super().forward(x + noise * self.queue.mean() + len(self.seen) * 0.01)

    @property
    def state(self) -> list[Any]:
        return [
            self.calls, [each.clone() for each in self.seen], [*self.recent], str(self.nested), self.meter.sum, [*self.meter.history],
            {size: table.clone() for size, table in self.tables.items()}, self.average.clone(), self.queue.clone(), self.metric.compute(),
            self.metric._update_count, self.metrics.compute(), self.generator.get_state(),
        ]  # fmt: skip


@GRAPH
def test_state_that_is_no_buffer(way: str, tmp_path: Path) -> None:
    def make() -> Task:
        net = net_of(way, Stateful)
        return Task(net, note=lambda: [block.state for block in layers_of(net)])

    plain = agree(make, tmp_path)
    assert plain.model.notes[-1][0][0] == 3


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated", "ignore:Full backward hook is firing")
@SEQUENTIAL
def test_without_lightning(way: str) -> None:
    """Hooks of every kind, features for the loss and state, under Checkpointable."""

    def run(limit: str | None) -> Any:
        torch.manual_seed(0)
        net = net_of(way, Stateful)
        found = [register(layers_of(net)) for register in HOOKS]
        extra = [register(net) for register in (on_its_module, for_a_while, always, normalizing)]
        features: list[torch.Tensor] = []
        layers_of(net)[0].register_forward_hook(lambda module, args, output: features.append(output))
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        forward = net if limit is None else Checkpointable(net, TENSORS[0][:8], "1GiB")
        if limit == "least":
            forward.use(forward.frontier().points[0].schedule)
            assert forward.plan.recomputed
        for batch in TENSORS[0].split(8):
            optimizer.zero_grad()
            loss = forward(batch).square().mean() + torch.stack([each.abs().mean() for each in features]).sum()
            features.clear()
            loss = (
                loss + sum(torch.stack(each()[-3:]).mean() for each in found if each()) + sum(each() for each in extra)
            )
            loss.backward()
            optimizer.step()
        state = [block.state for block in layers_of(net)]
        return dict(net.state_dict()), loss.detach(), state, [[value.clone() for value in each()] for each in found]

    plain = run(None)
    assert_same_bits(plain, run("most"))
    assert_same_bits(plain, run("least"))


@SEQUENTIAL
def test_logs_from_inside(way: str, tmp_path: Path) -> None:
    logged: list[dict[str, Any]] = []

    owner: list[Task] = []

    class Logging(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            owner[0].log("act", x.detach().mean(), on_step=True, on_epoch=True)
            owner[0].log("sum", x.detach().sum(), on_step=False, on_epoch=True, reduce_fx="sum")
            return super().forward(x)

    def make() -> Task:
        net = net_of(way, Logging)
        task = Task(net, note=lambda: {name: value.clone() for name, value in task.trainer.callback_metrics.items()})
        owner[:] = [task]
        net.register_forward_hook(lambda module, args, output: task.log("out", output.mean()))
        layers_of(net)[1].register_forward_hook(
            lambda module, args, output: task.log("middle", output.mean(), on_epoch=True)
        )
        return task

    class Epoch(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, model: L.LightningModule) -> None:
            logged.append({name: value.clone() for name, value in trainer.callback_metrics.items()})

    agree(make, tmp_path, callbacks=[Epoch()], logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert_same_bits(logged[0], logged[1])
    assert_same_bits(logged[0], logged[2])
    assert {"act_step", "act_epoch", "sum", "out", "middle_epoch"} <= set(logged[0])


# -------------------------------------------------------------------- parameters


def in_place(weight: nn.Parameter) -> None:
    weight.data.mul_(0.9)
    weight.detach()[:2].mul_(1.1)
    with torch.no_grad():
        weight.add_(0.01)


def anew(weight: nn.Parameter) -> None:
    weight.data = torch.renorm(weight.data * 0.9, 2, 0, 0.5)


class Rewriting(Block):
    """Changes its own weights in its forward."""

    def __init__(self, change: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self.linear.weight)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:.*gives other bits when it runs again")
@pytest.mark.parametrize(("way", "change"), in_turn([in_place, anew]))
def test_weights_that_the_forward_changes(way: str, change: Callable[[nn.Parameter], None], tmp_path: Path) -> None:
    """Once a step, however often it was measured."""

    def make() -> Task:
        blocks = iter((Rewriting(change), Block(), Rewriting(change), Block()))
        return Task(net_of(way, blocks.__next__))

    agree(make, tmp_path)


# -------------------------------------------------------------------- what the forward has read


class Place(Block):
    """Autograd saves nothing of its input, nor of a bias, so plain training lets both change after the forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear.bias


class Meanwhile(Task):
    """Changes something between forward and backward."""

    what: str

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0].clone()
        loss = nn.functional.cross_entropy(self.net(x).mean(1), batch[1])
        with torch.no_grad():
            if self.what == "input":
                x.normal_()
            else:
                layers_of(self.net)[1].linear.bias.add_(0.1)
        self.notes.append(batch_idx)
        return loss


@pytest.mark.parametrize(("way", "what"), in_turn(["input", "bias"]))
def test_a_change_between_forward_and_backward_is_refused_where_it_matters(way: str, what: str, tmp_path: Path) -> None:
    """No weight has changed by then but what the user changed."""

    def make() -> Task:
        blocks = iter((Place(), Block(), Block(), Block()))
        task = Meanwhile(net_of(way, blocks.__next__))
        task.what = what
        return task

    plain = train(make, TENSORS, tmp_path)
    assert_same_training(
        plain, train(make, TENSORS, tmp_path, callback=RotorCallback("10GiB", "net", show_table=False))
    )
    task, rotor = make(), RotorCallback("1KiB", "net", on_infeasible="warn", show_table=False)
    expected = copy.deepcopy(dict(task.state_dict()))
    if what == "bias":
        name = next(name for name, module in task.named_modules() if module is layers_of(task.net)[1])
        expected[f"{name}.linear.bias"] += 0.1
    with pytest.raises(ExecutionError, match=rf"the .*{what}.* has changed since the forward read it"):
        train(lambda: task, TENSORS, tmp_path, callback=rotor)
    assert_same_bits(dict(task.state_dict()), expected)


class Experts(L.LightningModule):
    """A mixture of experts, whose loss uses what hooks of the hub collect of the routers."""

    def __init__(self, hugging: Any) -> None:
        super().__init__()
        config = hugging.MixtralConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            num_local_experts=3, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1,
        )  # fmt: skip
        self.model = hugging.MixtralForCausalLM(config)
        self.notes: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        output = self.model(input_ids=batch[0], labels=batch[0], use_cache=False)
        self.notes.append(output.aux_loss.detach().clone())
        return output.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_mixture_of_experts(hugging: Any, tmp_path: Path) -> None:
    ids = (torch.randint(3, 40, (12, 12), generator=torch.Generator().manual_seed(0)),)
    plain = train(partial(Experts, hugging), ids, tmp_path, batch_size=4)
    assert all(note > 0 for note in plain.model.notes)
    for limit in ("10GiB", "1KiB"):
        rotor = RotorCallback(limit, "model.model.layers.0", on_infeasible="warn", show_table=False)
        planned = train(partial(Experts, hugging), ids, tmp_path, batch_size=4, callback=rotor)
        assert bool(rotor.plan.recomputed) == (limit == "1KiB")
        assert_same_training(plain, planned)
        assert_same_bits(plain.model.notes, planned.model.notes)


# -------------------------------------------------------------------- the exceptions that the README names


class Beyond(Block):
    """Leaves traces where nobody looks for them, and once where it asks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        next(LEFT["always"])
        if not is_recomputing():
            next(LEFT["asked"])
        self.linear.bias.detach().numpy()[:] *= 0.9
        return super().forward(x)


LEFT = {"always": itertools.count(), "asked": itertools.count()}


@pytest.mark.filterwarnings("ignore:.*gives other bits when it runs again")
def test_what_cannot_be_undone_happens_once_where_code_asks() -> None:
    """Iterators, and what NumPy writes."""
    torch.manual_seed(0)
    net = net_of("sequential", Beyond)
    before = copy.deepcopy(layers_of(net)[0].linear.bias)
    Checkpointable(net, TENSORS[0][:8], "1GiB")(TENSORS[0][:8]).sum().backward()
    assert next(LEFT["always"]) > 4
    assert next(LEFT["asked"]) == 4
    assert not torch.equal(layers_of(net)[0].linear.bias, before * 0.9)


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        self.config = SimpleNamespace(model=SimpleNamespace(scale=1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.config.model.scale + float(os.environ.get("ROTOR_TEST_SHIFT", "0"))


def test_what_lies_deep_in_objects_or_in_the_environment_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    net, batch = Configured(), TENSORS[0][:8]
    run = Checkpointable(net, batch, "1GiB")
    run.use(Schedule.parse(f"(0-{len(run.chain) - 2}) {len(run.chain) - 1}"))
    assert_same_bits(net(batch), run(batch))
    net.config.model.scale = 2.0
    assert_same_bits(net(batch), run(batch))
    monkeypatch.setenv("ROTOR_TEST_SHIFT", "1")
    assert_same_bits(net(batch), run(batch))
    net.config = SimpleNamespace(model=SimpleNamespace(scale=3.0))
    assert_same_bits(net(batch), run(batch))
