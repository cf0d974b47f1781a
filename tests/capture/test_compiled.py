"""Stages that the user compiled: leaves of every cut, and options under other activation memory budgets."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_rotor import (
    BudgetError,
    Checkpointable,
    OptionError,
    RotorCallback,
    RotorWarning,
    plan,
    sequentialize,
)
from lightning_rotor.capture.compiled import CompiledModules, Variants, objection_to_planning_inside
from lightning_rotor.chain import Chain
from lightning_rotor.execution.executor import Executor
from lightning_rotor.execution.passes import run_stage
from lightning_rotor.private.compiler import compiler_settings
from lightning_rotor.profiling import Profile, profile_chain, variant_costs
from lightning_rotor.profiling.stage_profiler import StageProfiler
from lightning_rotor.profiling.stage_seconds import StageSeconds
from lightning_rotor.schedule import Schedule, leaves
from lightning_rotor.simulator import simulate
from tests.grids import examples, few
from tests.models import Case, assert_same_bits, training_step
from tests.strategies import random_schedule

# The compiler looks at the gradient of what it is given, and hides the warning, unless warnings are errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Inductor of torch 2.11 is written with it.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

LOSS_BYTES = 16
WIDTH = 32


BUDGETS = (0.3, 0.0)


@pytest.fixture
def _one_budget(_nothing_compiled_before: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one variant shows what several do."""
    monkeypatch.setattr("lightning_rotor.capture.compiled.BUDGETS", BUDGETS[-1:])


@pytest.fixture(autouse=True)
def _nothing_compiled_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr("lightning_rotor.capture.compiled.BUDGETS", BUDGETS)  # compiling takes time
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(input)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        input = input + self.dropout(self.out(mixed))
        return input + self.dropout(self.mlp(input))


class Statistics(nn.Module):
    """A block that updates buffers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.norm, self.wide = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(16), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + self.dropout(self.wide(torch.tanh(self.norm(self.linear(input)))))


class Net(nn.Module):
    """Blocks in a list; it asks for a size, so that it must be recorded, if there is a longest one."""

    def __init__(self, blocks: Sequence[nn.Module], longest: int | None = None) -> None:
        super().__init__()
        self.longest = longest
        self.embed, self.blocks, self.head = nn.Linear(8, WIDTH), nn.ModuleList(blocks), nn.Linear(WIDTH, 8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.longest is not None and input.shape[1] > self.longest:
            raise ValueError("too long")
        input = self.embed(input)
        for block in self.blocks:
            input = block(input)
        return self.head(input)


def compiled(block: nn.Module, style: str = "method", **settings: Any) -> nn.Module:
    settings = {"backend": "aot_eager", **settings}
    if style == "wrapper":
        return torch.compile(block, **settings)
    block.compile(**settings)
    return block


def profile_of(net: nn.Module, batch: torch.Tensor, variants: Variants = "exact") -> Profile:
    cut = sequentialize(net, (batch,))
    return profile_chain(cut.stages, cut.bind((batch,), {}), repeats=1, compiled=CompiledModules(variants))


def names_of_options(chain: Chain) -> list[list[str]]:
    return [[option.name for option in stage.options] for stage in chain]


def state_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in net.state_dict().items()}


# -------------------------------------------------------------------- in every way to a chain


@pytest.mark.parametrize(
    ("way", "style"),
    [
        # Buffers are updated by compiled blocks in a sequence, by the other style.
        ("graph", "wrapper"),
        pytest.param("sequential", "wrapper", marks=pytest.mark.wide),
        pytest.param("graph", "method", marks=pytest.mark.wide),
        pytest.param("sequential", "method", marks=pytest.mark.wide),
    ],
)
def test_compiled_blocks_are_stages_with_the_bits_and_peaks_of_the_compiled_model(way: str, style: str) -> None:
    blocks = [compiled(Block(), style) for _ in range(3)]
    if way == "sequential":
        net: nn.Module = nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.Linear(WIDTH, 8))
    else:
        net = Net(blocks, longest=99)
    case = Case(net, torch.randn(4, 16, 8))
    assert sequentialize(net, (case.batch,)).way == way
    profile, state = profile_of(net, case.batch), state_of(net)
    assert len(profile.chain) == 5
    assert set(names_of_options(profile.chain)[2]) > {"keep", "budget 0"}
    plain = training_step(case, net, state)
    for seed in range(examples(3, 8)):
        schedule = random_schedule(random.Random(seed), profile.chain)
        ran = training_step(case, Executor(profile.stages, profile.chain, schedule, profile.states), state)
        assert_same_bits(plain.tensors, ran.tensors)
        peak = simulate(profile.chain, schedule).peak_bytes
        # A segment that nobody draws in may let its generator's state go before the peak.
        assert peak - 2 * profile.chain.rng_state_bytes <= ran.peak_bytes <= peak + LOSS_BYTES
    for option in range(len(profile.chain.stages[2].options)):
        schedule = Schedule.parse(f"0 1:{option} 2:{option} 3:{option} 4")
        ran = training_step(case, Executor(profile.stages, profile.chain, schedule, profile.states), state)
        assert 0 <= ran.peak_bytes - simulate(profile.chain, schedule).peak_bytes <= LOSS_BYTES


def test_buffers_are_updated_once_under_every_option() -> None:
    net = nn.Sequential(nn.Linear(8, WIDTH), *(compiled(Statistics()) for _ in range(3)), nn.Linear(WIDTH, 8))
    case = Case(net, torch.randn(4, 16, 8))
    profile, state = profile_of(net, case.batch), state_of(net)
    assert len(profile.chain.stages[1].options) > 1
    plain = training_step(case, net, state)
    for seed in range(examples(3, 8)):
        schedule = random_schedule(random.Random(seed), profile.chain)
        ran = training_step(case, Executor(profile.stages, profile.chain, schedule, profile.states), state)
        assert_same_bits(plain.tensors, ran.tensors)


def test_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rotor.capture.compiled.BUDGETS", (0.0,))
    net = Net([compiled(Statistics(), backend="inductor") for _ in range(2)])
    case = Case(net, torch.randn(4, 16, 8))
    profile, state = profile_of(net, case.batch), state_of(net)
    assert len(profile.chain.stages[1].options) > 1
    plain = training_step(case, net, state)
    for schedule in ("0-3", "0 1:1 2:1 3", "0 (1:1) 2 3", "(0-1 2:1) 3"):
        run = Executor(profile.stages, profile.chain, Schedule.parse(schedule), profile.states)
        ran = training_step(case, run, state)
        assert_same_bits(plain.tensors, ran.tensors)
        assert ran.peak_bytes <= simulate(profile.chain, Schedule.parse(schedule)).peak_bytes + LOSS_BYTES


# -------------------------------------------------------------------- what is compiled


class Backend:
    """``aot_eager``, and what it was asked for."""

    def __init__(self, change: Callable[[float], None] = lambda _: None) -> None:
        self.budgets: list[float] = []
        self.symbolic: list[bool] = []
        self._change = change

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        self.budgets.append(functorch_config.activation_memory_budget)
        self.symbolic.append(any(isinstance(value, torch.SymInt) for value in inputs))
        self._change(self.budgets[-1])
        return lookup_backend("aot_eager")(graph, inputs)


@pytest.mark.parametrize("style", few(["method", "wrapper"], "wrapper"))
@pytest.mark.usefixtures("_one_budget")
def test_equal_blocks_share_what_is_compiled(style: str) -> None:
    backend = Backend()
    profile_of(Net([compiled(Statistics(), style, backend=backend) for _ in range(2)]), torch.randn(4, 16, 8))
    assert backend.budgets == [1.0, BUDGETS[-1]]


@pytest.mark.usefixtures("_one_budget")
def test_other_shapes_share_what_is_compiled_as_they_do_without_this_package() -> None:
    backend = Backend()
    planned = Checkpointable(Net([compiled(Statistics(), backend=backend)]))
    for batch in (4, 6, 5):  # at the second one, the compiler notices that it varies
        planned.measure(torch.randn(batch, 16, 8))
    assert backend.budgets == [1.0, BUDGETS[-1]] * 2
    assert backend.symbolic == [False] * 2 + [True] * 2


class Plain(nn.Module):
    """A block for any number of places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + self.second(torch.tanh(self.first(input)) * 2)


class Halved(Plain):
    """A block of half of the places."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)[:, ::2]


@pytest.mark.usefixtures("_one_budget")
def test_variants_of_blocks_of_other_sizes_are_compiled_for_one_size_each() -> None:
    backend = Backend()
    profile_of(Net([compiled(kind(), backend=backend) for kind in (Halved, Plain)]), torch.randn(4, 16, 8))
    variants = [symbolic for budget, symbolic in zip(backend.budgets, backend.symbolic, strict=True) if budget < 1]
    assert len(variants) == 2
    assert not any(variants)


@pytest.mark.wide
@pytest.mark.usefixtures("_one_budget")
def test_variants_are_compiled_with_the_users_settings() -> None:
    backend = Backend()
    profile_of(Net([compiled(Statistics(), backend=backend, dynamic=True)]), torch.randn(4, 16, 8))
    assert set(backend.budgets) == {1.0, BUDGETS[-1]}
    assert all(backend.symbolic)


def test_a_stage_that_calls_no_compiled_module_has_one_option() -> None:
    assert names_of_options(profile_of(Net([Block()]), torch.randn(4, 16, 8)).chain)[0] == ["keep"]


def test_a_block_that_is_compiled_later_becomes_one_stage() -> None:
    net = Net([Statistics(), Statistics()])
    planned, batch = Checkpointable(net, mem_limit="1GiB"), torch.randn(4, 16, 8)
    planned(batch).sum().backward()
    assert planned.chain is not None
    assert "blocks.0" not in planned.chain.names
    for block in net.blocks:
        compiled(block)
    planned(batch).sum().backward()
    assert planned.chain.names == ("embed", "blocks.0", "blocks.1", "head")


# -------------------------------------------------------------------- variants that are withheld


def withheld(net: nn.Module, caplog: pytest.LogCaptureFixture) -> tuple[list[str], str]:
    """Options of the first block, and what the log says about it."""
    with caplog.at_level(logging.INFO, "lightning_rotor"):
        profile = profile_of(net, torch.randn(4, 16, 8))
    return names_of_options(profile.chain)[1], caplog.text


def test_a_block_that_draws_random_numbers_has_no_variants(caplog: pytest.LogCaptureFixture) -> None:
    net = Net([compiled(Block(dropout=0.1)) for _ in range(2)])
    options, text = withheld(net, caplog)
    assert options == ["keep"]
    assert "'blocks.0' runs under no other activation memory budget: it draws random numbers" in text
    case, state = Case(net, torch.randn(4, 16, 8)), state_of(net)
    profile, plain = profile_of(net, case.batch), training_step(case, net, state)
    run = Executor(profile.stages, profile.chain, Schedule.parse("0 (1-2) 3"), profile.states)
    assert_same_bits(plain.tensors, training_step(case, run, state).tensors)


@pytest.mark.wide
@pytest.mark.usefixtures("_one_budget")
def test_a_dropout_that_is_switched_on_later_is_not_recomputed() -> None:
    block = compiled(Statistics())
    net = Net([block])
    case = Case(net, torch.randn(4, 16, 8))
    profile, state = profile_of(net, case.batch), state_of(net)
    last = len(profile.chain.stages[1].options) - 1
    assert profile.chain.stages[1].options[last].name == "budget 0"
    block.dropout.p = 0.5
    run = Executor(profile.stages, profile.chain, Schedule.parse(f"0 1:{last} 2"), profile.states)
    assert_same_bits(training_step(case, net, state).tensors, training_step(case, run, state).tensors)


@pytest.mark.wide
def test_torch_recomputes_dropout_with_other_random_numbers() -> None:
    """If this fails, torch has mended it, and stages that draw may have variants."""
    block, batch = Block(dropout=0.5), torch.randn(4, 16, WIDTH)

    def gradient(budget: float) -> torch.Tensor:
        torch._dynamo.reset()
        with functorch_config.patch(activation_memory_budget=budget):
            torch.manual_seed(1)
            (found,) = torch.autograd.grad(
                torch.compile(block, backend="aot_eager")(batch).square().sum(), block.out.weight
            )
        return found

    assert not torch.allclose(gradient(1.0), gradient(0.0), rtol=0.1)


def test_a_variant_of_other_bits_is_withheld(caplog: pytest.LogCaptureFixture) -> None:
    def backend(graph: Any, inputs: Sequence[Any]) -> Any:
        run = lookup_backend("aot_eager")(graph, inputs)
        if functorch_config.activation_memory_budget != 0.3:
            return run
        return lambda *values: [output * (1 + 1e-6) for output in run(*values)]

    options, text = withheld(Net([compiled(Statistics(), backend=backend)]), caplog)
    assert options == ["keep", "budget 0"]
    assert "not under budget 0.3: outputs, gradients or buffers differ in bits" in text


@pytest.mark.parametrize(("error", "used"), [(1e-6, True), pytest.param(1e-3, False, marks=pytest.mark.wide)])
@pytest.mark.usefixtures("_one_budget")
def test_variants_that_differ_by_rounding_are_used_on_request(
    error: float, used: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_rotor.profiling.variant_costs._worthwhile", tuple)  # a matter of measured seconds

    def backend(graph: Any, inputs: Sequence[Any]) -> Any:
        if functorch_config.activation_memory_budget == 0:
            (output,) = graph.graph.find_nodes(op="output")
            with graph.graph.inserting_before(output):
                output.args = (
                    tuple(graph.graph.call_function(torch.mul, (node, 1 + error)) for node in output.args[0]),
                )
            graph.recompile()
        return lookup_backend("aot_eager")(graph, inputs)

    net = Net([compiled(Statistics(), backend=backend)])
    with caplog.at_level(logging.INFO, "lightning_rotor"):
        chain = profile_of(net, torch.randn(4, 16, 8), "close").chain
    assert ("budget 0" in names_of_options(chain)[1]) == used
    assert used or "not under budget 0: outputs, gradients or buffers differ by more than rounding" in caplog.text


@pytest.mark.wide
def test_a_block_with_buffers_runs_under_every_budget_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rotor.profiling.variant_costs._worthwhile", tuple)
    net = Net([compiled(Statistics())])
    before = state_of(net)
    assert names_of_options(profile_of(net, torch.randn(4, 16, 8)).chain)[1] == ["keep", "budget 0.3", "budget 0"]
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_variants_can_be_switched_off() -> None:
    net = Net([compiled(Statistics())])
    chain = profile_of(net, torch.randn(4, 16, 8), "off").chain
    assert chain.names == ("embed", "blocks.0", "head")
    assert names_of_options(chain)[1] == ["keep"]
    planned = Checkpointable(net, (torch.randn(4, 16, 8),), compiled_variants="off")
    assert names_of_options(planned.chain)[1] == ["keep"]


class Numbered(Statistics):
    """A block that knows which one it is, as those of Hugging Face do."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        if number == 3:
            self.wide.bias = None


@pytest.mark.usefixtures("_one_budget")
def test_blocks_that_look_alike_whatever_their_numbers_take_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def by_turns(profilers: Sequence[StageProfiler]) -> tuple[StageSeconds, ...]:
        if len(profilers) > 1:  # a variant beside what was compiled
            timed.append(profilers[0].stage.name)
        return own(profilers)

    own = variant_costs.seconds_by_turns
    monkeypatch.setattr(variant_costs, "seconds_by_turns", by_turns)
    profile = profile_of(Net([compiled(Numbered(number)) for number in (0, 1, 3)]), torch.randn(2, 16, 8))
    assert timed == ["blocks.0", "blocks.2"]
    seconds = [[option.seconds for option in stage.options] for stage in profile.chain if len(stage.options) > 1]
    assert len(seconds) == 3
    assert seconds[0] == seconds[1] != seconds[2]


@pytest.mark.parametrize(
    "make", [lambda: Checkpointable(Net([]), compiled_variants="fast"), lambda: RotorCallback(compiled_variants="fast")]
)
def test_unknown_variants_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(OptionError, match="compiled_variants is 'fast': expected 'exact', 'close', 'off'"):
        make()


@pytest.mark.wide
def test_a_variant_that_cannot_be_compiled_is_withheld(caplog: pytest.LogCaptureFixture) -> None:
    def fail(budget: float) -> None:
        if budget == 0.3:
            raise RuntimeError("no such code")

    options, text = withheld(Net([compiled(Statistics(), backend=Backend(fail))]), caplog)
    assert options == ["keep", "budget 0"]
    assert "not under budget 0.3: no such code" in text


class Broken(Statistics):
    """Its code is two graphs."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = super().forward(input)
        torch._dynamo.graph_break()
        return torch.tanh(input)


def test_code_that_is_several_graphs_has_no_variants(caplog: pytest.LogCaptureFixture) -> None:
    backend = Backend()
    options, text = withheld(Net([compiled(Broken(), backend=backend)]), caplog)
    assert options == ["keep"]
    assert "not under budget 0: " in text
    assert backend.budgets == [1.0, 1.0]


@pytest.mark.wide
def test_a_variant_of_which_there_are_too_many_runs_without_the_compiler() -> None:
    net = Net([compiled(Statistics())])
    profile = profile_of(net, torch.randn(4, 16, 8))
    last = len(profile.chain.stages[1].options) - 1
    run = Executor(profile.stages, profile.chain, Schedule.parse(f"0 (1:{last}) 2"), profile.states)
    case, state = Case(net, torch.randn(3, 16, 8)), state_of(net)
    with torch._dynamo.config.patch(recompile_limit=1):
        assert_same_bits(training_step(case, net, state).tensors, training_step(case, run, state).tensors)


@pytest.mark.wide
def test_variants_that_take_no_less_memory_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with functorch_config.patch(activation_memory_budget=0.3):
        options, text = withheld(Net([compiled(Block())]), caplog)
    assert options == ["keep", "budget 0"]
    assert "'blocks.0' can run under budget 0\n" in text


def hooked() -> nn.Module:
    wrapper = compiled(Statistics(), "wrapper")
    wrapper.register_forward_hook(lambda *_: None)
    return wrapper


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (hooked, "there are hooks on what torch.compile returned"),
        (lambda: compiled(Statistics(), disable=True), "this version of torch does not tell how it was compiled"),
    ],
)
def test_what_cannot_be_compiled_in_the_same_way_has_no_variants(
    make: Callable[[], nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    options, text = withheld(Net([make()]), caplog)
    assert options == ["keep"]
    assert f"runs under no other activation memory budget: {reason}" in text


def test_cuda_graphs_are_an_objection_where_they_are_made() -> None:
    # The mode makes none on the CPU.
    settings = compiler_settings(compiled(Statistics(), backend="inductor", mode="reduce-overhead"))
    assert objection_to_planning_inside(settings, nn.Linear(2, 2)) == ""
    with FakeTensorMode():
        on_gpu = nn.Linear(2, 2, device="cuda")
    assert objection_to_planning_inside(settings, on_gpu) == "CUDA graphs hold on to their memory"


# -------------------------------------------------------------------- plans


def without_variants(chain: Chain) -> Chain:
    return replace(chain, stages=tuple(replace(stage, options=(stage.keep,)) for stage in chain))


def minimum_bytes(chain: Chain) -> int:
    with pytest.raises(BudgetError, match="below this chain's minimum") as caught:
        plan(chain, 1)
    return caught.value.minimum_bytes


@pytest.mark.wide
def test_plans_choose_among_variants() -> None:
    profile = profile_of(Net([compiled(Block()) for _ in range(4)]), torch.randn(8, 16, 8))
    # Busy machines measure odd times; these are in proportion to what is computed.
    seconds = {"keep": 2.0, **{f"budget {budget:g}": 2.8 - 0.8 * budget for budget in BUDGETS}}
    stages = [
        replace(
            stage,
            discard_seconds=1.0,
            options=tuple(
                replace(option, forward_seconds=1.0, replay_seconds=1.0, backward_seconds=seconds[option.name])
                for option in stage.options
            ),
        )
        for stage in profile.chain
    ]
    chain = replace(profile.chain, stages=tuple(stages))
    budget = simulate(chain, Schedule.keep_all(len(chain))).peak_bytes * 6 // 10
    chosen, coarse = plan(chain, budget), plan(without_variants(chain), budget)
    assert chosen.peak_bytes <= budget
    assert chosen.overhead < coarse.overhead
    assert any(leaf.option for item in chosen.schedule.items for leaf in leaves(item))
    assert "keep, budget" in str(chosen)
    assert minimum_bytes(chain) < minimum_bytes(without_variants(chain))


@pytest.mark.usefixtures("_one_budget")
def test_a_planned_model_trains_as_the_compiled_one_within_its_limit() -> None:
    def make() -> nn.Module:
        torch._dynamo.reset()
        torch.manual_seed(0)
        return Net([compiled(Statistics()) for _ in range(2)])

    batches = [torch.randn(size, 16, 8) for size in (16, 16, 9, 16)]  # a smaller last batch, then the next epoch

    def train(net: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for batch in batches:
            optimizer.zero_grad()
            run(batch).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in net.parameters()]

    plain = make()
    expected = train(plain, plain)
    net = make()
    whole = Checkpointable(net, batches[0]).chain
    assert whole is not None
    least, least_without = minimum_bytes(whole), minimum_bytes(without_variants(whole))
    assert least < least_without
    limit = (least + least_without) // 2  # out of reach without another variant, however long each of them takes
    planned = Checkpointable(make(), mem_limit=limit)
    received = train(planned.module, planned)
    assert planned.plan is not None
    assert any(leaf.option for item in planned.plan.schedule.items for leaf in leaves(item))
    assert all(map(torch.equal, expected, received))
    for batch in (batches[0], batches[2]):
        case = Case(planned.module, batch)
        assert training_step(case, planned, state_of(planned.module)).peak_bytes <= limit + LOSS_BYTES


@pytest.mark.wide
def test_what_torch_compile_returns_stays_compiled_as_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rotor.capture.compiled.BUDGETS", (0.3,))
    batch, backend = torch.randn(4, 16, 8), Backend()
    wrapper = compiled(Net([Block()]), "wrapper", backend=backend)
    planned = Checkpointable(wrapper, (batch,))
    assert planned.chain is not None
    assert planned.chain.names == ("Net",)
    assert backend.budgets == [1.0, 0.3]
    assert list(planned.state_dict()) == list(wrapper.state_dict())
    case, state = Case(wrapper, batch), state_of(wrapper)
    expected = training_step(case, wrapper, state)
    sizes = [simulate(planned.chain, Schedule.parse(f"0:{option}")).peak_bytes for option in range(2)]
    assert planned.compute_sequence(min(sizes)).peak_bytes == min(sizes) < sizes[0]
    for option, size in enumerate(sizes):
        planned.use(Schedule.parse(f"0:{option}"))
        received = training_step(case, planned, state)
        assert_same_bits(expected.tensors, received.tensors)
        assert 0 <= received.peak_bytes - size <= LOSS_BYTES
    with pytest.raises(BudgetError, match=r"minimum .* \(set by 'Net'\)"):
        planned.compute_sequence(min(sizes) // 2)
    assert torch.equal(planned.eval()(input=batch), wrapper(batch))
    planned.train()
    # Its arguments may be keywords, which makes it another call.
    assert torch.equal(planned(input=batch), planned(batch))


def test_a_module_that_another_backend_compiles_is_taken_apart_with_a_warning() -> None:
    net = compiled(Net([Statistics()]), backend="eager")
    with pytest.warns(
        RotorWarning, match=r"this Net was compiled as a whole, .* or Checkpointable\(torch\.compile\(net\)\)"
    ):
        planned = Checkpointable(net, (torch.randn(4, 16, 8),))
    assert planned.chain is not None
    assert len(planned.chain) > 3


@pytest.mark.wide
def test_an_option_runs_its_variant() -> None:
    profile = profile_of(Net([compiled(Block())]), torch.randn(4, 16, 8))
    stage, cost = profile.stages[1], profile.chain.stages[1]
    for option, costs in enumerate(cost.options):
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        value = torch.randn(4, 16, WIDTH, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = run_stage(stage, value, option)
        for known in (value, *stage.parameters()):
            saved.pop(known.untyped_storage().data_ptr(), None)
        assert sum(saved.values()) == costs.saved_bytes
        del output
