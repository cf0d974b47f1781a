"""Other threads draw from the generators that code shares (a loader that prefetches): none of their numbers repeats."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_rotor import Checkpointable, RotorCallback, RotorWarning
from lightning_rotor.stages.draws import drawn_since
from lightning_rotor.stages.generators import HOST, NUMPY, PYTHON, GeneratorStates
from tests.grids import few

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002
    "torch": lambda: float(torch.rand(())),
}
BATCHES = 12
BASE = torch.randn(64, 16, generator=torch.Generator().manual_seed(5))


def seed() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


class Prefetching:
    """Makes batches in a thread of its own, a few ahead."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        queue: Queue[torch.Tensor | None] = Queue(2)

        def work() -> None:
            for _ in range(BATCHES):
                queue.put(BASE * (0.5 + self._draw()))
            queue.put(None)

        threading.Thread(target=work, daemon=True).start()
        while (batch := queue.get()) is not None:
            yield batch


class Block(nn.Module):
    """Recorded, and cut inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Own(Block):
    """The user's own code, which no recording holds: it counts how often it runs."""

    runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return super().forward(x) * (1.0 if float(x.detach().sum()) > 1e9 else 0.9)


class Dropping(Block):
    """Draws from torch's generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


class Shaking(Own):
    """Draws from NumPy's generator, in its own code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(1 + 0.1 * np.random.rand())  # noqa: NPY002


class Model(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.sums: list[float] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.sums.append(float(batch.double().sum()))
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(draw: str, limit: int | str | None) -> tuple[Model, Any]:
    torch.manual_seed(1)
    model = Model(nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh()))))
    seed()
    rotor = None if limit is None else RotorCallback(mem_limit=limit, show_table=False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[] if rotor is None else [rotor], **quiet)
    trainer.fit(model, Prefetching(DRAWS[draw]))
    return model, rotor


@pytest.mark.parametrize("draw", few(DRAWS, "torch"))
def test_a_loader_that_prefetches_gives_the_batches_of_plain_training(draw: str) -> None:
    plain, _ = fit(draw, None)
    roomy, rotor = fit(draw, "1GiB")
    points, peak_bytes = rotor.plan.frontier().points, rotor.measured_peak_bytes
    tight, rotor = fit(draw, peak_bytes - (points[-1].peak_bytes - points[0].peak_bytes) // 2)
    assert rotor.plan.recomputed
    for other in (roomy, tight):
        assert other.sums == plain.sums
        assert all(map(torch.equal, plain.parameters(), other.parameters()))


def train(block: Callable[[], nn.Module], draw: str, *, planned: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Sums of the batches, and the weights, under the plan that recomputes most from the second step on."""
    torch.manual_seed(1)
    net = nn.Sequential(*(block() for _ in range(5)))
    run: Any = Checkpointable(net, mem_limit="1GiB", show_progress=False) if planned else net
    optimizer, sums = torch.optim.SGD(net.parameters(), 0.1), []
    seed()
    for batch in Prefetching(DRAWS[draw]):
        sums.append(float(batch.double().sum()))
        optimizer.zero_grad()
        run(batch).square().mean().backward()
        optimizer.step()
        if planned and len(sums) == 1:
            run.use(run.frontier().points[0].schedule)
            assert run.plan.recomputed
    return sums, [parameter.detach() for parameter in net.parameters()]


CASES = [
    *((block, draw) for block in (Block, Own) for draw in DRAWS),
    *((block, draw) for block in (Dropping,) for draw in ("python", "numpy")),
    *((block, draw) for block in (Shaking,) for draw in ("python", "torch")),
]


@pytest.mark.parametrize(
    ("block", "draw"),
    [
        pytest.param(
            block,
            draw,
            id=f"{block.__name__}-{draw}",
            marks=[] if (block, draw) in ((Block, "torch"), (Own, "python"), (Dropping, "numpy")) else pytest.mark.wide,
        )
        for block, draw in CASES
    ],
)
def test_measuring_and_recomputing_leave_the_generator_of_another_thread_alone(
    block: Callable[[], nn.Module], draw: str
) -> None:
    plain, ours = (train(block, draw, planned=planned) for planned in (False, True))
    assert plain[0] == ours[0]
    assert all(map(torch.equal, plain[1], ours[1]))


class Late(Own):
    """Draws from Python's generator from some step on, which no measurement has seen."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * (1 + 0.1 * random.random()) if self.late else x


def test_a_layer_that_begins_to_draw_later_repeats_its_own_numbers_alone() -> None:
    late = type("Beginning", (Late,), {"late": False})
    results = []
    for planned in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(*(late() for _ in range(5)))
        run: Any = Checkpointable(net, mem_limit="1GiB", show_progress=False) if planned else net
        seed()
        for number, batch in enumerate(Prefetching(DRAWS["numpy"])):
            late.late = number > 5  # type: ignore[attr-defined]
            net.zero_grad()
            run(batch).square().mean().backward()
            if planned and number == 0:
                run.use(run.frontier().points[0].schedule)
        results.append([parameter.grad for parameter in net.parameters()])
        late.late = False  # type: ignore[attr-defined]
    assert all(map(torch.equal, *results))


@contextmanager
def drawing_all_the_time() -> Iterator[None]:
    """Context in which another thread draws without rest."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            random.random()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_thread_that_never_rests_is_noticed() -> None:
    with drawing_all_the_time():
        before = GeneratorStates(torch.device("cpu"))
        time.sleep(0.01)
        with pytest.warns(RotorWarning, match="a generator of its own for each thread"):
            assert drawn_since(before, lambda: time.sleep(0.01)) == {PYTHON}


@pytest.mark.parametrize("own", [set(), {NUMPY}])
def test_a_thread_that_only_seemed_to_rest_is_noticed(own: set[str]) -> None:
    orders: Queue[bool] = Queue()
    drawn: Queue[float] = Queue()

    def work() -> None:
        while orders.get():
            drawn.put(random.random())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    runs = []

    def code() -> None:
        runs.append(len(runs))
        if len(runs) <= 2:  # longer than any rest after the first
            orders.put(True)
            drawn.get()
        if own:
            np.random.rand()  # noqa: NPY002

    try:
        random.seed(0)
        before = GeneratorStates(torch.device("cpu"))
        code()
        random.random()  # as the thread has by then
        with pytest.warns(RotorWarning, match="Python's random .* numbers of that thread may repeat"):
            assert drawn_since(before, code) == own
    finally:
        orders.put(False)
        thread.join()


def test_code_that_draws_is_told_from_code_that_does_not() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, daemon=True)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            before = GeneratorStates(torch.device("cpu"))
            assert drawn_since(before, lambda: None) == set()
            torch.rand(1)
            assert drawn_since(before, lambda: None) == set()  # another thread's, for all that can be told
            np.random.rand()  # noqa: NPY002
            assert drawn_since(before, np.random.rand) == {NUMPY}
            assert drawn_since(before, lambda: None, certain={HOST, NUMPY}) == {HOST, NUMPY}
    finally:
        over.set()
        thread.join()
