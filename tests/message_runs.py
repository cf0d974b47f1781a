"""Modules that exchange messages, trained on two processes.

Nothing in their forwards says so: a helper, an autograd function, or a library sends. The second process is slower.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.autograd.profiler import profile
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from lightning_rotor import Checkpointable, RotorCallback, Schedule, simulate
from lightning_rotor.errors import MessageError, ProfilerBusyError, ProfilingError
from lightning_rotor.planning import minimum_budget
from lightning_rotor.private import process_groups
from lightning_rotor.profiling.step_compute import measure_compute
from tests import grids

WIDTH, BATCH, STEPS = 16, 48, 3
TIMEOUT = timedelta(seconds=60)
GROUPS: dict[str, Any] = {}


def other() -> int:
    return 1 - dist.get_rank()


def nap() -> None:
    """The second process takes so long that it would be timed less often."""
    if dist.get_rank() == 1:
        time.sleep(0.0025)


# ---------------------------------------------------------------- what sends


def sum_over_processes(x: torch.Tensor) -> torch.Tensor:
    nap()
    return differentiable.all_reduce(x)


class Sum(torch.autograd.Function):
    """Megatron's g, with a sum in its backward, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        nap()
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        g = g.clone()
        dist.all_reduce(g)
        return g


class SumInPlace(torch.autograd.Function):
    """Megatron's g as it is: it receives the sum in its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


class SumOfGradients(torch.autograd.Function):
    """Megatron's f: nothing is sent in a forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        nap()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        g = g.clone()
        dist.all_reduce(g)
        return g


def exchanged(x: torch.Tensor, dim: int, back: int) -> torch.Tensor:
    """Ulysses: split along one dimension, joined along another."""
    nap()
    parts = torch.stack(x.chunk(2, dim)).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return torch.cat(list(received), back)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, back: int) -> torch.Tensor:
        ctx.dims = dim, back
        return exchanged(x, dim, back)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        dim, back = ctx.dims
        return exchanged(g, back, dim), None, None


class Dispatch(torch.autograd.Function):
    """Rows to the processes that ``given`` says, as many as ``taken`` says from each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, given: list[int], taken: list[int]) -> torch.Tensor:
        ctx.splits = given, taken
        nap()
        received = x.new_empty(sum(taken), *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), taken, given)
        return received

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        given, taken = ctx.splits
        received = g.new_empty(sum(given), *g.shape[1:])
        dist.all_to_all_single(received, g.contiguous(), given, taken)
        return received, None, None


def passed_on(x: torch.Tensor) -> torch.Tensor:
    nap()
    received = torch.empty_like(x)
    sends = [dist.P2POp(dist.isend, x.contiguous(), other()), dist.P2POp(dist.irecv, received, other())]
    for work in dist.batch_isend_irecv(sends):
        work.wait()
    return received


class Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return passed_on(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return passed_on(g)


class SendAndReceive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        if dist.get_rank():
            dist.send(x, 0)
            dist.recv(received, 0)
        else:
            dist.recv(received, 1)
            dist.send(x, 1)
        return received

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


class GroupSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        nap()
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


# ---------------------------------------------------------------- layers


class Layer(nn.Module):
    """A linear layer around a message."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(nn.functional.gelu(self.a(self.message(x))))

    def message(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Normalized(Layer):
    """A SyncBatchNorm of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(WIDTH))

    def message(self, x: torch.Tensor) -> torch.Tensor:
        sums = self.sums(torch.cat([x.sum(0), x.new_tensor([len(x)])]))
        mean = sums[:-1] / sums[-1]
        if self.training:
            self.running.lerp_(mean.detach(), 0.1)
        return x - mean

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        return sum_over_processes(x)


class NormalizedByFunction(Normalized):
    def sums(self, x: torch.Tensor) -> torch.Tensor:
        return Sum.apply(x)


class Megatron(Layer):
    """f and g around a block whose weights are spread by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = SumOfGradients.apply(nn.functional.layer_norm(x, (WIDTH,)))
        return x + SumInPlace.apply(self.b(nn.functional.gelu(self.a(h))))


class BackwardAlone(Layer):
    def message(self, x: torch.Tensor) -> torch.Tensor:
        return SumOfGradients.apply(x)


class Ulysses(Layer):
    def message(self, x: torch.Tensor) -> torch.Tensor:
        heads = Exchange.apply(x, 1, 0)  # half of the width for the rows of both
        return Exchange.apply(heads.tanh(), 0, 1)


class Handles(Normalized):
    """It computes while the message is on its way, and keeps the group as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.group = dist.group.WORLD

    def message(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = x.mean(0)
            work = dist.all_reduce(mean, group=self.group, async_op=True)
            nap()
            shifted = x.tanh()
            work.wait()
            self.running.lerp_(mean / 2, 0.1)
        return x - mean / 2 + shifted


class Experts(Layer):
    """Rows go to the process whose expert is chosen for them, as many as that may be, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)

    def message(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        order = scores.argmax(-1).argsort(stable=True)
        given = scores.argmax(-1).bincount(minlength=2)
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given)
        rows = Dispatch.apply(x[order], given.tolist(), taken.tolist())
        back = Dispatch.apply(rows.tanh(), taken.tolist(), given.tolist())
        return torch.zeros_like(x).index_copy(0, order, back) * scores.amax(-1, keepdim=True)


class RingPassing(Layer):
    def message(self, x: torch.Tensor) -> torch.Tensor:
        return x + Ring.apply(x)


class Blocking(Layer):
    def message(self, x: torch.Tensor) -> torch.Tensor:
        return x + SendAndReceive.apply(x)


class InGroup(Layer):
    """A group of its own, made by the user."""

    name = "both"

    def message(self, x: torch.Tensor) -> torch.Tensor:
        return x + GroupSum.apply(x, GROUPS[self.name]) / 2


class InGroupOfOne(InGroup):
    """Tensor parallelism over one process: nobody else hears of it."""

    name = "mine"


class Functional(Layer):
    def message(self, x: torch.Tensor) -> torch.Tensor:
        nap()
        both = functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        return x + both.mean(0)


class Gathered(Layer):
    """Features of all, as contrastive losses take them; ``all_gather`` under its own name but in another function."""

    def message(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.cat(differentiable.all_gather(x)).mean(0)


class Codebook(Layer):
    """Statistics that are summed in a buffer, which the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(WIDTH))

    def message(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            nap()
            with torch.no_grad():
                self.count.mul_(0.9).add_(x.detach().abs().sum(0), alpha=0.1)
                dist.all_reduce(self.count)
        return x / (1 + self.count)


class ReceivesInInput(nn.Module):
    """Sums in the very tensor that it is given, which autograd does not count as a change."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            dist.all_reduce(x)
        return x / 2


class InPlace(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.sum = ReceivesInInput()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(nn.functional.gelu(self.sum(self.a(x))))


class Row(nn.Sequential):
    """Layers in a row, which are not recorded."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), ReceivesInInput(), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Objects(Layer):
    """Pickled objects, as metrics send them."""

    def message(self, x: torch.Tensor) -> torch.Tensor:
        heard = [None, None]
        dist.all_gather_object(heard, {"rows": len(x)})
        return x / sum(each["rows"] for each in heard)


class Silent(Layer):
    """Nothing is sent."""


@dataclass(frozen=True)
class Kind:
    layer: type[nn.Module]
    ragged: bool = False
    together: bool = True
    ways: tuple[str, ...] = ("lightning", "by_hand")


KINDS = {
    "helper": Kind(Normalized, ragged=True),
    "function": Kind(NormalizedByFunction, ragged=True, ways=("lightning", "by_hand", "ddp")),
    "megatron": Kind(Megatron),
    "backward": Kind(BackwardAlone, ways=("lightning", "by_hand", "ddp")),
    "ulysses": Kind(Ulysses),
    "handles": Kind(Handles, ragged=True),
    "experts": Kind(Experts, ragged=True),
    "ring": Kind(RingPassing),
    "blocking": Kind(Blocking),
    "group": Kind(InGroup),
    "group_of_one": Kind(InGroupOfOne, ragged=True, together=False),
    "functional": Kind(Functional),
    "gathered": Kind(Gathered),
    "codebook": Kind(Codebook, ragged=True),
    "in_place": Kind(InPlace),
    "in_a_row": Kind(Row),
    "objects": Kind(Objects, ragged=True),
    "silent": Kind(Silent, ragged=True, together=False),
}


# ---------------------------------------------------------------- trainings


class Batches(IterableDataset[torch.Tensor]):
    """Of this process; other sizes at each step and on each process if ragged."""

    def __init__(self, *, ragged: bool) -> None:
        self._ragged = ragged

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(rank)
        for step in range(STEPS):
            size = BATCH - 8 * ((step // 2 + rank) % 2) if self._ragged else BATCH
            yield torch.randn(size, WIDTH, generator=generator)


def body(kind: Kind) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [layer for _ in range(2) for layer in (kind.layer() if kind.layer is Row else [kind.layer()])]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


class Model(L.LightningModule):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.body, self.head = body(kind), nn.Linear(WIDTH, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.head(self.body(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Schedules(L.Callback):
    def __init__(self, rotor: RotorCallback) -> None:
        self.rotor, self.seen, self.together = rotor, list[str](), False

    def on_train_batch_end(self, *_: Any) -> None:
        self.together = self.rotor._planner.ranks.together
        self.seen.append("" if self.rotor.plan is None else str(self.rotor.plan.schedule))


def fitted(kind: Kind, folder: Path, callbacks: list[L.Callback]) -> dict[str, torch.Tensor]:
    """Weights after a training under DDP."""
    L.seed_everything(3, verbose=False)
    model = Model(kind)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(timeout=TIMEOUT), max_epochs=1, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, DataLoader(Batches(ragged=kind.ragged), batch_size=None))
    return {name: value.clone() for name, value in model.state_dict().items()}


def under_lightning(kind: Kind, folder: Path) -> dict[str, Any]:
    """DDP with the callback, without a name, so that a dry run chooses the module; and without the callback."""
    rotor = RotorCallback(1024, on_infeasible="warn", show_table=False)
    schedules = Schedules(rotor)
    plain, planned = fitted(kind, folder, []), fitted(kind, folder, [rotor, schedules])
    return {"plain": plain, "planned": planned, "schedules": schedules.seen, "together": schedules.together}


def by_hand(kind: Kind, *, in_ddp: bool) -> dict[str, Any]:
    """A loop around ``Checkpointable``. The first process has room for everything, the second has not.

    Its limit is far from the least: gloo's threads keep what they send a moment longer or not, so that costs differ. Half of
    the way was once 5 % too little.
    """

    def train(net: nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
        optimizer, schedules = torch.optim.SGD(net.parameters(), lr=0.05), []
        learner = DistributedDataParallel(net) if in_ddp else net
        for batch in Batches(ragged=kind.ragged):
            optimizer.zero_grad()
            learner(batch).square().mean().backward()
            optimizer.step()
            schedules.append(str(net.plan.schedule) if isinstance(net, Checkpointable) else "")
        return {name: value.clone() for name, value in net.state_dict().items()}, schedules

    plain, _ = train(body(kind))
    sent = dist.group.WORLD._get_sequence_number_for_group()
    dry = {}
    with suppress(ProfilingError):  # pickled objects are values
        found = measure_compute(body(kind), next(iter(Batches(ragged=kind.ragged))), lambda net, batch: net(batch))
        dry = {name: [sorted(members) for members in seen] for name, seen in found.messages.items()}
    assert dist.group.WORLD._get_sequence_number_for_group() == sent
    sizes = Checkpointable(body(kind), torch.randn(BATCH, WIDTH)).chain
    least = minimum_budget(sizes).peak_bytes
    most = simulate(sizes, Schedule.keep_all(len(sizes))).peak_bytes
    limit = (least + 2 * most) // 3 if dist.get_rank() else 2 * most
    net = Checkpointable(body(kind), mem_limit=limit)
    planned, schedules = train(net)
    together = net._planned.plans.together
    assert not pickle.loads(pickle.dumps(net._limit)).ranks.together  # a copy measures for itself
    return {"plain": plain, "planned": planned, "schedules": schedules, "together": together, "dry": dry}


# ---------------------------------------------------------------- where processes are not alike


class Masked(nn.Module):
    """Takes a mask or none, which are two recordings, and exchanges messages from the third step on if so told."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.sends = not late

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None:
            x = x * mask
        hidden = nn.functional.gelu(self.first(x))
        if self.sends:
            hidden = hidden - Sum.apply(hidden.mean(0)) / 2
        return self.second(hidden.tanh())


def trained(net: nn.Module, calls: Callable[[int], tuple[Any, ...]], steps: int = 6) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        net(*calls(step)).square().mean().backward()
        optimizer.step()
    return {name: value.clone() for name, value in net.state_dict().items()}


def masked_or_not(step: int, *, by_turns: bool = False) -> tuple[Any, ...]:
    """Of sizes that differ; with and without a mask, on both or by turns."""
    rank = dist.get_rank()
    size = BATCH - 8 * (step * (1 + rank) % 3)  # what is known on one process is new on the other
    x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(step))
    return (x, torch.ones(size, 1)) if (step + by_turns * rank) % 2 else (x,)


def other_inputs() -> dict[str, Any]:
    net = Checkpointable(Masked(), mem_limit=48_000)
    found = {"plain": trained(Masked(), masked_or_not), "planned": trained(net, masked_or_not)}
    with pytest.raises(MessageError, match="not the same for this call"):
        trained(Checkpointable(Masked(), mem_limit=48_000), partial(masked_or_not, by_turns=True))
    return {**found, "plan": str(net.plan.schedule)}


def first_message_late() -> dict[str, Any]:
    """Without messages, the processes have plans of their own."""

    def train(net: nn.Module) -> dict[str, torch.Tensor]:
        first = trained(net, masked_or_not, steps=3)
        net.sends = True
        return {**first, **trained(net, masked_or_not)}

    net = Checkpointable(Masked(late=True), mem_limit=48_000 if dist.get_rank() else 10**8)
    return {"plain": train(Masked(late=True)), "planned": train(net), "plan": str(net.plan.schedule)}


def two_groups() -> dict[str, Any]:
    """Two modules, each with messages in a group of its own."""

    def train(wrap: Callable[[nn.Module], nn.Module]) -> dict[str, torch.Tensor]:
        net = nn.Sequential(wrap(body(KINDS["group"])), wrap(body(KINDS["function"])), wrap(body(KINDS["silent"])))
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
        return trained(net, lambda _: (batch,), steps=3)

    return {"plain": train(lambda net: net), "planned": train(lambda net: Checkpointable(net, mem_limit=70_000))}


def profiler_on_one(kind: str) -> dict[str, Any]:
    """torch's profiler records on the first process. Neither measures then; both do later."""
    net = Checkpointable(body(KINDS[kind]), mem_limit=70_000)
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    with profile(use_cpu=True, use_kineto=False) if dist.get_rank() == 0 else nullcontext():
        try:
            net(batch)
        except ProfilerBusyError as error:
            refusal = str(error)
    return {
        "plain": trained(body(KINDS[kind]), lambda _: (batch,)), "planned": trained(net, lambda _: (batch,)), "refusal": refusal,
    }  # fmt: skip


def chosen_schedules() -> dict[str, Any]:
    """``use`` of one schedule everywhere, then on one process alone."""
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    net = Checkpointable(body(KINDS["function"]), batch, mem_limit=10**8)
    planned = trained(net, lambda _: (batch,), steps=1)
    most = Schedule.parse(f"(0-{len(net.chain) - 2}) {len(net.chain) - 1}")
    net.use(most)
    trained(net, lambda _: (batch,), steps=2)
    ran = str(net.plan.schedule)
    if dist.get_rank():
        net.use(Schedule.keep_all(len(net.chain)))
    with pytest.raises(MessageError, match=r"use\(\) of the same schedule"):
        net(batch)
    return {"ran": ran, "chosen": str(most), "plain": planned, "planned": planned}


def callback_again(folder: Path) -> dict[str, Any]:
    """The same callback in a second training, which knows what the first has measured."""
    rotor = RotorCallback(1024, "body", on_infeasible="warn", show_table=False)
    kind = Kind(BackwardAlone, ragged=False)
    first, second = (fitted(kind, folder, [rotor]) for _ in range(2))
    return {"plain": fitted(kind, folder, []), "planned": first, "again": second}


def silence() -> dict[str, Any]:
    """One process calls a module, the other does not: it waits for as long as processes wait for each other."""
    refusal, batch = "", torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_groups, "_patience_of", lambda _: timedelta(seconds=1))
        patch.setattr(process_groups, "_groups", WeakKeyDictionary())
        net = Checkpointable(body(KINDS["function"]), mem_limit=70_000)
        planned = trained(net, lambda _: (batch,), steps=1)
    if dist.get_rank() == 0:
        with pytest.raises(MessageError, match="not all of them answer") as caught:
            net(batch)
        refusal = str(caught.value)
    return {
        "plain": trained(body(KINDS["function"]), lambda _: (batch,), steps=1),
        "planned": planned,
        "refusal": refusal,
    }


WAYS: dict[str, Callable[[Kind, Path], dict[str, Any]]] = {
    "lightning": under_lightning,
    "by_hand": lambda kind, _: by_hand(kind, in_ddp=False),
    "ddp": lambda kind, _: by_hand(kind, in_ddp=True),
}
SPECIAL: dict[str, Callable[[Path], dict[str, Any]]] = {
    "other_inputs": lambda _: other_inputs(),
    "first_message_late": lambda _: first_message_late(),
    "two_groups": lambda _: two_groups(),
    "profiler_on_one function": lambda _: profiler_on_one("function"),
    "profiler_on_one backward": lambda _: profiler_on_one("backward"),
    "chosen_schedules": lambda _: chosen_schedules(),
    "callback_again": callback_again,
    "silence": lambda _: silence(),
}


def training(rank: int, case: str, folder: Path) -> dict[str, Any]:
    """What this process sees of a case: a kind and a way, or a special one."""
    grids.make_tables_coarse(pytest.MonkeyPatch())
    GROUPS["both"] = dist.new_group([0, 1])
    GROUPS["mine"] = [dist.new_group([member]) for member in range(2)][rank]
    if case in SPECIAL:
        return SPECIAL[case](folder)
    name, way = case.split()
    return WAYS[way](KINDS[name], folder)
