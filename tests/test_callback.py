"""RotorCallback with real Trainers: the same bits as without it, inside the limit."""

from __future__ import annotations

import copy
import pickle
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.random_chains import random_chain
from lightning_rotor import BudgetError, ModelError, OptionError, Plan, RotorCallback, RotorWarning, Schedule, UnitError
from lightning_rotor.callbacks.rotor_callback import _ProcessPlan
from lightning_rotor.memory.resident_memory import allocated_bytes
from lightning_rotor.private.values import tensors_in
from lightning_rotor.profiling import StepMeter
from lightning_rotor.simulator import simulate
from tests import grids

CPU = torch.device("cpu")
BATCH = 64


class Recorder(L.Callback):
    """Losses, generator states, and the allocator's peak of whole steps, static memory included."""

    def __init__(self, measured: tuple[int, ...] = ()) -> None:
        self.losses: list[torch.Tensor] = []
        self.generator: torch.Tensor | None = None
        self.peaks: dict[int, int] = {}
        self._measured = measured
        self._meter: StepMeter | None = None

    def on_train_batch_start(self, trainer: L.Trainer, model: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx in self._measured:
            self._base = allocated_bytes(model, trainer.optimizers, tensors_in(batch), CPU)
            self._meter = StepMeter(CPU)
            self._meter.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, model: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._meter is not None:
            self.peaks[batch_idx] = self._base + self._meter.stop().peak_bytes
            self._meter = None
        self.losses.append(trainer.callback_metrics["loss"].clone())

    def on_train_end(self, trainer: L.Trainer, model: L.LightningModule) -> None:
        self.generator = torch.get_rng_state()


class Followed(L.Callback):
    """The plan made last, at the end of each batch."""

    def __init__(self, rotor: RotorCallback) -> None:
        self.plans: list[Plan] = []
        self._rotor = rotor

    def on_train_batch_end(self, *_: Any) -> None:
        assert self._rotor.plan is not None
        self.plans.append(self._rotor.plan)


class Net(L.LightningModule):
    """A colleague's module: convolutions with dropout and BatchNorm in a Sequential, a head beside it."""

    def __init__(self, *, manual: bool = False, momentum: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for _ in range(4):
            layers += [
                nn.Conv2d(channels, 12, 3, padding=1),
                nn.BatchNorm2d(12),
                nn.ReLU(inplace=True),
                nn.Dropout2d(0.1),
            ]
            channels = 12
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(12, 10)
        self.automatic_optimization = not manual
        self.momentum = momentum

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images).float(), labels)
        self.log("loss", loss, prog_bar=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]).float(), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.momentum:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader(batches: int = 4, rest: int = 0, *, shuffle: bool = True) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    size = batches * BATCH + rest
    images, labels = torch.randn(size, 3, 16, 16, generator=generator), torch.randint(10, (size,), generator=generator)
    return DataLoader(TensorDataset(images, labels), BATCH, shuffle=shuffle)


def fit(
    callbacks: list[L.Callback],
    tmp_path: Path,
    *,
    model: L.LightningModule | None = None,
    epochs: int = 1,
    data: DataLoader[Any] | None = None,
    validate: bool = False,
    **trainer_options: Any,
) -> tuple[L.Trainer, L.LightningModule]:
    L.seed_everything(3, verbose=False)
    model = model or Net()
    options: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    } | trainer_options
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=callbacks,
        default_root_dir=tmp_path,
        enable_model_summary=False,
        limit_val_batches=1 if validate else 0,
        **options,
    )
    trainer.fit(model, data or loader(), loader(1, shuffle=False))
    return trainer, model


def least_limit(tmp_path: Path, *, module: Any = None, **options: Any) -> int:
    with pytest.raises(BudgetError, match="Raise mem_limit") as caught:
        fit([RotorCallback("10KiB", module, show_table=False)], tmp_path, **options)
    return caught.value.minimum_bytes


def plain_peak(tmp_path: Path, **options: Any) -> int:
    recorder = Recorder(measured=(0, 1, 2))
    fit([recorder], tmp_path, **options)
    return recorder.peaks[2]


def assert_equal_runs(
    plain: tuple[L.Trainer, L.LightningModule],
    planned: tuple[L.Trainer, L.LightningModule],
    left: Recorder,
    right: Recorder,
) -> None:
    first, second = plain[1].state_dict(), planned[1].state_dict()
    assert list(first) == list(second)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert len(left.losses) == len(right.losses) > 0
    assert all(map(torch.equal, left.losses, right.losses))
    assert left.generator is not None
    assert right.generator is not None
    assert torch.equal(left.generator, right.generator)
    for mine, theirs in zip(plain[0].optimizers, planned[0].optimizers, strict=True):
        assert_equal_nested(mine.state_dict(), theirs.state_dict())


def assert_equal_nested(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal_nested(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for mine, theirs in zip(left, right, strict=True):
            assert_equal_nested(mine, theirs)
    else:
        assert left == right


@pytest.mark.parametrize(
    ("model_options", "trainer_options"),
    [
        pytest.param({}, {}, marks=pytest.mark.wide),  # as in most other tests of the callback
        pytest.param({"manual": True}, {}, marks=pytest.mark.wide),  # test_lightning_training has it, and precisions
        ({"momentum": True}, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
        pytest.param({}, {"precision": "bf16-mixed"}, marks=pytest.mark.wide),
    ],
    ids=["adamw", "manual optimization", "sgd, clipping and accumulation", "bf16-mixed"],
)
def test_training_equals_training_without_it_bit_for_bit(
    tmp_path: Path, model_options: dict[str, Any], trainer_options: dict[str, Any]
) -> None:
    # 8 steps, each epoch ending in a smaller batch.
    common: dict[str, Any] = {"epochs": 2, "validate": True, **trainer_options}
    limit = least_limit(tmp_path, model=Net(**model_options), **trainer_options)
    left, right = Recorder(), Recorder()
    plain = fit([left], tmp_path, model=seeded(Net, model_options), data=loader(3, rest=20), **common)
    callback = RotorCallback(mem_limit=int(1.02 * limit), show_table=False)
    callbacks = [callback, right, followed := Followed(callback)]
    planned = fit(callbacks, tmp_path, model=seeded(Net, model_options), data=loader(3, rest=20), **common)
    assert len(followed.plans) == 8
    assert all(plan.recomputed for plan in followed.plans[:3])  # the smaller batch after these may fit without
    assert_equal_runs(plain, planned, left, right)


def seeded(kind: Any, options: dict[str, Any]) -> L.LightningModule:
    torch.manual_seed(11)
    return kind(**options)


@pytest.mark.parametrize("momentum", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["adamw", "sgd"])
def test_the_process_stays_inside_the_limit(tmp_path: Path, momentum: bool) -> None:
    peak = plain_peak(tmp_path, model=Net(momentum=momentum))
    least = least_limit(tmp_path, model=Net(momentum=momentum))
    assert least < 0.8 * peak
    for limit in (
        int(least + share * (peak - least)) for share in ((0.02, 0.3, 0.6, 0.9) if grids.is_whole else (0.02, 0.6))
    ):
        callback = RotorCallback(mem_limit=limit, show_table=False)
        fit([callback], tmp_path, model=Net(momentum=momentum), data=loader(6))
        assert callback.plan is not None
        assert callback.measured_peak_bytes is not None
        assert callback.predicted_peak_bytes is not None
        assert callback.measured_peak_bytes <= limit
        assert callback.predicted_peak_bytes <= limit
        # The loss and the head are not in the chain, so what is measured may lie above what was predicted.
        assert callback.measured_peak_bytes == pytest.approx(callback.predicted_peak_bytes, rel=0.02)


@pytest.mark.wide
def test_several_shapes_in_the_first_steps(tmp_path: Path) -> None:
    class Twice(Net):
        """Calls the planned module with two shapes in one step."""

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            larger = torch.cat([batch[0], batch[0]])
            return super().training_step(batch, batch_idx) + self(larger).square().mean()

    left, right = Recorder(), Recorder()
    plain = fit([left], tmp_path, model=seeded(Twice, {}))
    callback = RotorCallback(mem_limit="1GiB", show_table=False)
    planned = fit([callback, right], tmp_path, model=seeded(Twice, {}))
    assert_equal_runs(plain, planned, left, right)


@pytest.mark.feature(
    "Profilers", "PyTorchProfiler", note="on the CPU the plan waits until it pauses, and peaks are not measured"
)
def test_beside_lightnings_profiler(tmp_path: Path) -> None:
    callback = RotorCallback(mem_limit="1GiB", show_table=False)
    fit([callback], tmp_path, profiler="pytorch", data=loader(6))
    assert callback.plan is not None
    assert callback.measured_peak_bytes is None


def test_what_the_plan_could_not_know_is_corrected_after_the_first_steps(tmp_path: Path) -> None:
    class Hungry(Net):
        """Its loss takes memory that nothing in the chain tells of."""

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            extra = self.head.weight.sum() * torch.ones(60_000)
            return super().training_step(batch, batch_idx) + extra.square().sum() * 0

    peak = plain_peak(tmp_path, model=Hungry())
    callback = RotorCallback(mem_limit=int(0.9 * peak), show_table=False)
    fit([callback], tmp_path, model=Hungry(), data=loader(6))
    assert callback.plan is not None
    assert callback.measured_peak_bytes is not None
    assert callback.measured_peak_bytes <= 0.9 * peak
    assert max(size for _, size in callback.state_dict()["corrections"].values()) > 0


@pytest.mark.wide
def test_a_limit_that_needs_nothing_changes_nothing(tmp_path: Path) -> None:
    callback = RotorCallback(show_table=False)
    fit([callback], tmp_path)
    assert callback.plan is not None
    assert callback.plan.recomputed == ()


@pytest.mark.wide
def test_the_module_is_as_before(tmp_path: Path) -> None:
    model = Net()
    printed, keys, parameters = repr(model), list(model.state_dict()), list(model.parameters())

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, model: L.LightningModule, *_: Any) -> None:
            assert "forward" in model.body.__dict__
            assert repr(model) == printed
            assert list(model.state_dict()) == keys
            assert all(mine is theirs for mine, theirs in zip(model.parameters(), parameters, strict=True))
            for duplicate in (copy.deepcopy(model.body), pickle.loads(pickle.dumps(model.body))):
                with torch.no_grad():
                    next(duplicate.parameters()).zero_()
                    duplicate[0].bias.fill_(2.0)
                assert not torch.equal(duplicate(torch.ones(2, 3, 8, 8)), model.body(torch.ones(2, 3, 8, 8)))

    fit([RotorCallback(show_table=False), Look()], tmp_path, model=model, data=loader(1))
    assert "forward" not in model.body.__dict__
    assert all(not key.startswith("_lightning_rotor") for key in model.body.__dict__)


def test_the_module_is_as_before_after_an_exception(tmp_path: Path) -> None:
    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise KeyError("a bug of the user")
            return loss

    model = Broken()
    callback = RotorCallback(show_table=False)
    with pytest.raises(KeyError, match="a bug of the user"):
        fit([callback], tmp_path, model=model)
    assert "forward" not in model.body.__dict__
    fit([callback], tmp_path, model=Net())  # and it can be used again
    assert callback.plan is not None


def test_it_logs_to_every_logger_and_the_progress_bar(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="tensorboard")]
    callback = RotorCallback(show_table=False, progress_bar=True)
    trainer, _ = fit([callback], tmp_path, logger=loggers, log_every_n_steps=1)
    expected = {
        f"RotorCallback/{name}"
        for name in (
            "overhead_percent", "measured_overhead_percent", "budget_bytes", "predicted_peak_bytes", "measured_peak_bytes",
            "measuring_seconds", "planning_seconds", "recomputed_stages",
        )
    }  # fmt: skip
    header = (Path(loggers[0].log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert expected <= set(header)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(loggers[1].log_dir)
    events.Reload()
    assert expected <= set(events.Tags()["scalars"])
    peak = events.Scalars("RotorCallback/measured_peak_bytes")[-1].value
    assert peak == pytest.approx(callback.measured_peak_bytes)
    assert {"rotor_overhead_%", "rotor_peak_MiB"} <= set(trainer.progress_bar_metrics)


def test_it_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit([RotorCallback(mem_limit="1GiB")], tmp_path)
    printed = capsys.readouterr().out
    for row in (
        "Limit",
        "Peak without recomputation",
        "Peak with this plan",
        "Time added to these modules",
        "Measuring, planning took",
        "Schedule",
        "Planned",
        "A better plan could save",
    ):
        assert row in printed
    assert printed.count("Recomputation plan") == 1


class Resized(DataLoader[Any]):
    """Batches whose images have other sizes, in this order."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(5)
        batches = [(torch.randn(8, 3, each, each, generator=generator), torch.randint(10, (8,))) for each in sizes]
        super().__init__(batches, batch_size=None)


@pytest.mark.parametrize(
    ("sizes", "reasons"),
    [((16, 16, 16, 16, 24, 24, 24, 24), ["a larger input came"]), ((24, 24, 24, 24, 16, 16, 16, 16), [])],
    ids=["larger ones", "smaller ones"],
)
def test_the_table_comes_again_for_larger_inputs_alone_and_says_so(
    sizes: tuple[int, ...], reasons: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit([RotorCallback(mem_limit="1GiB")], tmp_path, data=Resized(sizes))
    printed = capsys.readouterr().out
    assert re.findall(r"Recomputation plan, printed again: ([\w ]+?),", printed) == reasons
    assert printed.count("Recomputation plan") == 1 + len(reasons)


def test_a_table_comes_again_for_another_schedule_and_not_for_corrected_seconds() -> None:
    def shown(schedule: str, segment_seconds: float = 0.0) -> _ProcessPlan:
        chain = replace(random_chain(random.Random(0), 3, "heterogeneous"), segment_seconds=segment_seconds)
        made = Schedule.parse(schedule)
        plan = Plan(chain, made, 10**6, simulate(chain, made), 0.0)
        return _ProcessPlan(plan, 10**6, None, None, "net", "", 0, 0, 0.0, None)

    first = shown("(0-1) 2")
    assert first.news_since(None) == ""
    assert shown("(0-1) 2", 2.0).news_since(first) is None
    assert shown("0-2").news_since(first) == "planned anew, by the bytes and seconds that steps have taken"


def test_modules_by_name(tmp_path: Path) -> None:
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 10))

    callback = RotorCallback(module="head", show_table=False)
    fit([callback], tmp_path, model=Two())
    assert callback.plan is not None
    assert len(callback.plan.chain) == 3
    with pytest.raises(ModelError, match=r"no submodule 'neck'.* can be planned: 'body', 'head'"):
        fit([RotorCallback(module="neck")], tmp_path, model=Two())
    whole = RotorCallback(module="", show_table=False)
    fit([whole], tmp_path, model=Two())
    assert whole.plan is not None
    assert whole.plan.chain.names[-1] == "head.2"


@pytest.mark.parametrize("names", [("body", "body.0"), ("body.0", "body"), ("", "body"), ("body", None)])
def test_callbacks_on_overlapping_modules_are_refused(names: tuple[str | None, ...], tmp_path: Path) -> None:
    class Nested(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(12, 12), nn.ReLU()), nn.Linear(12, 10))

    model = Nested()
    with pytest.raises(ModelError, match=r"two plans would work on the same layers|has been replaced already"):
        fit([RotorCallback(module=name, show_table=False) for name in names], tmp_path, model=model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_model_without_anything_to_plan_says_what_is_supported(tmp_path: Path) -> None:
    class Flat(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Flatten()
            self.head = nn.Linear(3 * 16 * 16, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise AssertionError

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.head(self.body(batch[0])).square().mean()

    with pytest.warns(RotorWarning, match="plans nothing.*: Flat holds no submodule with several layers"):
        fit([RotorCallback()], tmp_path, model=Flat())


def test_layers_made_in_configure_model(tmp_path: Path) -> None:
    class Late(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.body

        def configure_model(self) -> None:
            if not hasattr(self, "body"):
                self.body = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 32), nn.ReLU(), nn.Linear(32, 12))

    callback = RotorCallback(show_table=False)
    fit([callback], tmp_path, model=Late())
    assert callback.plan is not None


def test_bad_limits_fail_in_the_constructor() -> None:
    with pytest.raises(UnitError, match="not a positive size"):
        RotorCallback(mem_limit=0)
    with pytest.raises(UnitError, match="cannot be read"):
        RotorCallback(mem_limit="lots")


def test_after_training_the_callback_keeps_what_it_showed_and_lets_the_trainer_go(tmp_path: Path) -> None:
    rotor = RotorCallback("1GiB", "body", show_table=False)
    fit([rotor], tmp_path)
    again = pickle.loads(pickle.dumps(rotor))  # as launchers do that spawn processes
    assert again.plan is not None
    assert again.plan.schedule == rotor.plan.schedule
    assert again.measured_peak_bytes == rotor.measured_peak_bytes
    assert again.budget_bytes == 2**30
    fit([again], tmp_path)
    assert again.plan.schedule == rotor.plan.schedule


def test_an_impossible_limit_says_where_the_memory_goes(tmp_path: Path) -> None:
    model = Net()
    pattern = r"mem_limit 10.0 KiB is below the minimum .* for parameters \(.*\), optimizer state \(.*\), .*the batch \(.*\), and at least"
    with pytest.raises(BudgetError, match=pattern) as caught:
        fit([RotorCallback(mem_limit="10KiB")], tmp_path, model=model)
    assert "forward" not in model.body.__dict__
    callback = RotorCallback(mem_limit=caught.value.minimum_bytes, show_table=False)
    fit([callback], tmp_path)
    assert callback.plan is not None


def test_the_log_says_what_is_planned_and_what_it_costs_on_a_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning_rotor")
    fit([RotorCallback(mem_limit="1GiB", show_table=False)], tmp_path)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("lightning_rotor")]
    expected = (
        r"\w+ becomes \d+ stages .*",
        r"RotorCallback plans .*: \d+ % of the FLOPs .*",
        r"\w+ for \d+(×\d+)*: costs measured in .*, peak of activations .* of .*, 0 of \d+ stages recomputed \(\+0\.0 % .*\)",
        r"RotorCallback: limit 1\.00 GiB, peak .* \(measured .*\), 0\.0 % of time added to .*, measuring took .* and planning .*",
    )
    assert len(lines) == len(expected)
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(expected, lines, strict=True)), lines


def test_an_impossible_limit_can_be_a_warning(tmp_path: Path) -> None:
    least = least_limit(tmp_path)
    left, right = Recorder(), Recorder()
    plain = fit([left], tmp_path)
    callback = RotorCallback(mem_limit="10KiB", on_infeasible="warn", show_table=False)
    with pytest.warns(RotorWarning) as caught:
        planned = fit([callback, right], tmp_path)
    messages = [str(warning.message) for warning in caught if warning.category is RotorWarning]
    assert sum("training goes on beyond the limit" in message for message in messages) == 1
    assert callback.measured_peak_bytes is not None
    assert callback.measured_peak_bytes <= least
    assert callback.budget_bytes == 10 * 1024 < callback.predicted_peak_bytes
    assert callback.predicted_peak_bytes == pytest.approx(callback.measured_peak_bytes, rel=0.05)
    assert_equal_runs(plain, planned, left, right)
    with pytest.raises(OptionError, match='expected "raise" or "warn"'):
        RotorCallback(on_infeasible="ignore")  # type: ignore[arg-type]
