"""Predicted optimizer memory against what real steps leave."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_rotor.memory import optimizer_prediction
from lightning_rotor.memory.held import optimizer_state_bytes
from lightning_rotor.memory.optimizer_prediction import predict_optimizer_state_bytes
from lightning_rotor.private.torch_names import FakeTensor, FakeTensorMode
from lightning_rotor.profiling import StepMeter
from lightning_rotor.profiling.meters import CpuMeter

STOCK: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "foreach": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"foreach": True}),
    ("Adam", {"maximize": True, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"fused": True, "amsgrad": True}),
    ("Adagrad", {}),
    ("Adagrad", {"foreach": True}),
    ("Adagrad", {"fused": True}),
    ("Adadelta", {}),
    ("Adadelta", {"foreach": True}),
    ("Adamax", {}),
    ("Adamax", {"foreach": True}),
    ("NAdam", {}),
    ("NAdam", {"decoupled_weight_decay": True, "foreach": True}),
    ("RAdam", {}),
    ("RAdam", {"foreach": True}),
    ("RMSprop", {}),
    ("RMSprop", {"momentum": 0.9}),
    ("RMSprop", {"centered": True, "momentum": 0.9, "foreach": True}),
    ("Rprop", {}),
    ("Rprop", {"foreach": True}),
    ("ASGD", {}),
    ("ASGD", {"foreach": True}),
    ("Adafactor", {}),
    ("Adafactor", {"foreach": True}),
]
IDS = ["-".join([name, *options]) for name, options in STOCK]


def available(name: str) -> Any:
    if not hasattr(optim, name):
        pytest.skip(f"this torch has no {name}")
    return getattr(optim, name)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    shapes = [(8, 3, 3, 3), (8,), (40, 12), (12, 40), (1, 7), ()]
    made = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    frozen = nn.Parameter(torch.randn(30), requires_grad=False)
    strided = nn.Parameter(torch.randn(4, 6, 5, 5).to(dtype, memory_format=torch.channels_last))
    return [*made, frozen, strided]


def give_gradients(optimizer: optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.randn_like(parameter)


def step(optimizer: optim.Optimizer) -> None:
    give_gradients(optimizer)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), STOCK, ids=IDS)
def test_state_is_exact_before_the_first_step_and_after_it(name, options, dtype):
    optimizer = available(name)(parameters(dtype), lr=0.01, **options)
    first = predict_optimizer_state_bytes(optimizer)
    step(optimizer)
    real = optimizer_state_bytes(optimizer)
    assert first == real
    assert predict_optimizer_state_bytes(optimizer) == real
    step(optimizer)
    assert optimizer_state_bytes(optimizer) == real


UNLIKE = {"ASGD": "it averages from step 1,000,000 on", "RAdam": "it takes more from step 6 on"}


@pytest.mark.parametrize(("name", "options"), STOCK, ids=IDS)
def test_what_a_step_allocates_is_predicted(name: str, options: dict[str, Any]) -> None:
    if options.get("fused"):
        assert (
            optimizer_prediction.predict_optimizer_temporary_bytes(available(name)(parameters(), lr=0.01, **options))
            == 0
        )
        return
    optimizer = available(name)(parameters(), lr=0.01, **options)
    predicted = optimizer_prediction.predict_optimizer_temporary_bytes(optimizer)
    for _ in range(3 if name in UNLIKE else 2):
        step(optimizer)
    give_gradients(optimizer)
    with CpuMeter().recording() as recording:
        optimizer.step()
    if predicted is None or name in UNLIKE:
        assert name in UNLIKE
        assert predicted is None or predicted >= recording.peak_bytes - 64
    else:
        assert abs(recording.peak_bytes - predicted) <= 64  # a scalar or two


def test_one_by_one_a_step_allocates_less() -> None:
    optimizer = optim.Adam(parameters(), foreach=True)
    single = optimizer_prediction.temporary_bytes_one_by_one(optimizer)
    assert single == optimizer_prediction.predict_optimizer_temporary_bytes(optim.Adam(parameters(), foreach=False))
    assert single < optimizer_prediction.predict_optimizer_temporary_bytes(optimizer)
    assert optimizer_prediction.temporary_bytes_one_by_one(optim.Adam(parameters(), foreach=False)) is None
    assert optimizer_prediction.temporary_bytes_one_by_one(optim.AdamW(parameters(), fused=True)) is None
    assert optimizer_prediction.temporary_bytes_one_by_one(optim.LBFGS(parameters())) is None


def test_muon_is_exact():
    optimizer = available("Muon")([nn.Parameter(torch.randn(20, 30)), nn.Parameter(torch.randn(40, 7))])
    predicted = predict_optimizer_state_bytes(optimizer)
    step(optimizer)
    assert predicted == optimizer_state_bytes(optimizer)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_adam_is_exact():
    tables = [nn.Embedding(50, 8, sparse=True), nn.Embedding(30, 6, sparse=True)]
    optimizer = optim.SparseAdam([table.weight for table in tables])
    predicted = predict_optimizer_state_bytes(optimizer)
    sum(table(torch.tensor([1, 2])).sum() for table in tables).backward()
    optimizer.step()
    assert predicted == optimizer_state_bytes(optimizer)


@pytest.mark.parametrize("lr", [1.0, 30.0])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_is_bounded_by_its_full_history(line_search, lr):
    torch.manual_seed(0)
    weight, curvature, product = nn.Parameter(torch.randn(10_000)), torch.linspace(0.1, 5, 10_000), torch.empty(10_000)
    weight.grad = torch.zeros(10_000)
    optimizer = optim.LBFGS([weight], lr=lr, history_size=3, max_iter=6, line_search_fn=line_search)
    predicted = predict_optimizer_state_bytes(optimizer)

    @torch.no_grad()
    def closure() -> torch.Tensor:
        """A quadratic."""
        weight.grad.copy_(torch.mul(weight, curvature, out=product))
        return product.mul_(weight).sum() / 2

    sizes = []
    for _ in range(4):
        optimizer.step(closure)
        sizes.append(optimizer_state_bytes(optimizer))
    assert 0.99 * predicted <= max(sizes) <= predicted


def test_a_line_search_of_lbfgs_takes_no_more_than_is_predicted():
    torch.manual_seed(0)
    weight, other = nn.Parameter(torch.randn(10_000) * 3), torch.empty(10_000)
    weight.grad = torch.zeros(10_000)
    optimizer = optim.LBFGS([weight], lr=2.0, history_size=2, max_iter=4, line_search_fn="strong_wolfe")
    predicted = optimizer_prediction.predict_optimizer_temporary_bytes(optimizer)

    @torch.no_grad()
    def closure() -> torch.Tensor:
        """Many valleys, so that the search narrows its interval."""
        torch.mul(weight, 3, out=other)
        torch.cos(other, out=weight.grad)
        weight.grad.mul_(3).add_(weight, alpha=0.02)
        other.sin_().addcmul_(weight, weight, value=0.01)
        return other.sum()

    taken = []
    for number in range(12):
        meter = StepMeter(torch.device("cpu"))
        meter.start()
        optimizer.step(closure)
        peak_bytes = meter.stop().peak_bytes
        # Once the history is full, the state grows no more.
        if number > 1:
            taken.append(peak_bytes)
    assert 0.75 * predicted < max(taken) <= 1.01 * predicted


def test_state_that_shares_memory_with_a_parameter_is_not_counted():
    weight = nn.Parameter(torch.zeros(50))
    optimizer = optim.SGD([weight], lr=0.1, momentum=0.9)
    step(optimizer)
    optimizer.state[weight]["alias"] = weight.detach()
    optimizer.state[weight]["halves"] = torch.zeros(100).split(50)
    predicted = predict_optimizer_state_bytes(optimizer)
    assert predicted == optimizer_state_bytes(optimizer) == 200 + 400


def test_groups_with_different_options_are_exact():
    first, second, third = parameters(), parameters(torch.bfloat16), [nn.Parameter(torch.zeros(9))]
    optimizer = optim.AdamW(
        [
            {"params": first, "amsgrad": True},
            {"params": second, "lr": torch.tensor(0.1)},
            {"params": third, "fused": True},
        ],
        lr=1e-3,
    )
    predicted = predict_optimizer_state_bytes(optimizer)
    step(optimizer)
    assert predicted == optimizer_state_bytes(optimizer)


def test_a_tied_parameter_has_one_state():
    tied = nn.Linear(16, 16, bias=False)
    model = nn.Sequential(tied, nn.ReLU(), tied)
    optimizer = optim.Adam(model.parameters())
    assert predict_optimizer_state_bytes(optimizer) == 2 * 4 * 256 + 4


def test_parameters_added_later_are_predicted_beside_existing_state():
    optimizer = optim.Adam([nn.Parameter(torch.zeros(10))])
    step(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(100))]})
    assert predict_optimizer_state_bytes(optimizer) == 2 * 40 + 4 + 2 * 400 + 4


def test_nothing_about_the_optimizer_changes():
    fired = []
    optimizer = optim.Adam(parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: fired.append("own"))
    everywhere = register_optimizer_step_post_hook(lambda *_: fired.append("global"))
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    try:
        for _ in range(2):
            before = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict(), sorted(vars(optimizer))))
            before[0]["state"] = [value for state in before[0]["state"].values() for value in state.values()]
            values = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
            fired.clear()
            predict_optimizer_state_bytes(optimizer)
            after = (optimizer.state_dict(), scheduler.state_dict(), sorted(vars(optimizer)))
            after[0]["state"] = [value for state in after[0]["state"].values() for value in state.values()]
            torch.testing.assert_close(after[0].pop("state"), before[0].pop("state"), rtol=0, atol=0)
            assert after == before
            now = [p for group in optimizer.param_groups for p in group["params"]]
            assert all(torch.equal(p, value) for p, value in zip(now, values, strict=True))
            assert fired == []
            step(optimizer)
            scheduler.step()
    finally:
        everywhere.remove()


def test_no_gradient_appears():
    optimizer = optim.SGD(parameters(), lr=0.1, momentum=0.9)
    predict_optimizer_state_bytes(optimizer)
    assert all(p.grad is None for p in optimizer.param_groups[0]["params"])


class Custom(optim.Optimizer):
    """A base for the custom optimizers below; its constructor wants an argument that nobody can guess."""

    def __init__(self, params: Any, secret: object) -> None:
        super().__init__(params, {})
        self.shared = [secret]

    def each(self, update: Callable[[nn.Parameter, dict[str, Any]], None]) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        update(parameter, self.state[parameter])


class Noisy(Custom):
    """Draws random numbers from three sources, changes a list in place, and wants a closure."""

    def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:
        def update(parameter: nn.Parameter, state: dict[str, Any]) -> None:
            state["noise"] = torch.rand(3) * random.random() * np.random.rand()  # noqa: NPY002
            state["slow"] = (torch.randn_like(parameter), [torch.zeros(2, *parameter.shape, dtype=torch.float64)])
            self.shared.append(parameter)

        self.each(update)
        return closure()


class ReadsValues(Custom):
    def step(self, closure: object = None) -> None:
        def update(parameter: nn.Parameter, state: dict[str, Any]) -> None:
            if parameter.norm() > 0:
                state["ema"] = torch.zeros_like(parameter)

        self.each(update)


class Refuses(Custom):
    def step(self, closure: object = None) -> None:
        raise RuntimeError("only on the machine where I was born")


def test_a_custom_optimizer_is_exact_and_leaves_no_trace():
    optimizer = Noisy(parameters(), secret=object())
    random_states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    predicted = predict_optimizer_state_bytes(optimizer)
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]
    now = np.random.get_state()  # noqa: NPY002
    assert all(np.array_equal(a, b) for a, b in zip(now, random_states[2], strict=True))
    assert len(optimizer.shared) == 1
    give_gradients(optimizer)
    optimizer.step(lambda: torch.zeros(()))
    assert predicted == optimizer_state_bytes(optimizer)


def test_an_optimizer_that_reads_values_takes_a_step():
    optimizer = ReadsValues(parameters(), secret=1)
    predicted = predict_optimizer_state_bytes(optimizer)
    step(optimizer)
    assert predicted == optimizer_state_bytes(optimizer)


def test_an_optimizer_that_runs_nowhere_is_taken_for_adam():
    optimizer = Refuses([nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(5), requires_grad=False)], secret=1)
    assert predict_optimizer_state_bytes(optimizer) == 80


def test_state_counts_on_its_device():
    optimizer = optim.Adam(parameters())
    everywhere = predict_optimizer_state_bytes(optimizer)
    assert predict_optimizer_state_bytes(optimizer, "cpu") == everywhere
    assert predict_optimizer_state_bytes(optimizer, "cuda") == 0


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"capturable": True}, {"fused": True}])
def test_on_a_gpu_sizes_are_in_blocks_and_scalars_lie_where_the_options_say(options):
    with FakeTensorMode():  # a GPU without memory
        optimizer = optim.Adam([nn.Parameter(torch.zeros(10, device="cuda"))])
    optimizer.param_groups[0].update(options)
    on_gpu = bool({"capturable", "fused"} & options.keys())
    assert predict_optimizer_state_bytes(optimizer, "cuda") == 2 * 512 + (512 if on_gpu else 0)
    assert predict_optimizer_state_bytes(optimizer, "cpu") == (0 if on_gpu else 4)


def test_no_memory_is_taken_and_nothing_of_the_copy_stays():
    others = fake_tensors()
    optimizer = optim.Adam([nn.Parameter(torch.zeros(2**20))])
    with CpuMeter().recording() as recording:
        predict_optimizer_state_bytes(optimizer)
    assert max(phase.peak_bytes for phase in recording.phases) < 2**16
    assert fake_tensors().keys() <= others.keys()


def fake_tensors():
    return {id(thing): thing for thing in gc.get_objects() if FakeTensor in type(thing).__mro__}


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}, {"capturable": True}])
def test_a_gpu_shows_the_predicted_sizes(options):
    made = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in [(1000, 333), (77,), (5, 5)]]
    optimizer = optim.AdamW(made, **options)
    predicted = predict_optimizer_state_bytes(optimizer, "cuda")
    give_gradients(optimizer)
    before = torch.cuda.memory_allocated()
    optimizer.step()
    assert torch.cuda.memory_allocated() - before == predicted == optimizer_state_bytes(optimizer, "cuda")


def test_of_a_parameter_that_is_spread_over_processes_only_the_shard_counts() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        weight = nn.Parameter(distribute_tensor(torch.ones(8, 4), init_device_mesh("cpu", (2,)), [Shard(0)]))
        optimizer = optim.AdamW([weight])
        before = predict_optimizer_state_bytes(optimizer)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        after = predict_optimizer_state_bytes(optimizer)
        assert before == after == optimizer_state_bytes(optimizer) == 2 * (4 * 4 * 4) + 4
    finally:
        dist.destroy_process_group()


def test_a_prediction_that_is_asked_again_follows_what_it_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, other = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(10))
    optimizer = optim.SGD([weight], lr=0.1)
    steps, take = [], optimizer_prediction.take_step
    monkeypatch.setattr(optimizer_prediction, "take_step", lambda clone: steps.append(1) or take(clone))
    assert predict_optimizer_state_bytes(optimizer) == 0
    optimizer.param_groups[0]["lr"] = 0.05
    assert predict_optimizer_state_bytes(optimizer) == 0
    assert len(steps) == 2  # one that makes the state, and one that shows what later ones allocate
    optimizer.param_groups[0]["momentum"] = 0.9
    assert predict_optimizer_state_bytes(optimizer) == 4000
    optimizer.add_param_group({"params": [other], "momentum": 0.9})
    assert predict_optimizer_state_bytes(optimizer) == 4040
    weight.requires_grad = False
    assert predict_optimizer_state_bytes(optimizer) == 40
    assert len(steps) == 8


def test_one_prediction_serves_all_questions_on_the_cpu_and_the_steps_that_make_it_true(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = []
    take = optimizer_prediction._predict_by_dry_steps
    monkeypatch.setattr(
        optimizer_prediction, "_predict_by_dry_steps", lambda *of, **options: taken.append(of) or take(*of, **options)
    )
    weights = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights)
    foretold = predict_optimizer_state_bytes(optimizer)
    assert predict_optimizer_state_bytes(optimizer, "cpu") == foretold
    sum(weight.square().sum() for weight in weights).backward()
    optimizer.step()
    assert predict_optimizer_state_bytes(optimizer, torch.device("cpu")) == foretold
    assert len(taken) == 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.randn(8))]})
    assert predict_optimizer_state_bytes(optimizer) > foretold
    assert len(taken) == 2
