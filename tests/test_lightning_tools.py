"""What else a Trainer does: loops, profilers, monitors, tuners, and what users do with a live module."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    LearningRateFinder,
    ModelSummary,
    ThroughputMonitor,
)  # fmt: skip
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_rotor import BudgetError, ModelError, RotorCallback, RotorWarning
from lightning_rotor.callbacks.trainer_loop import told_of_errors
from tests.training import assert_same_bits

WIDTH, BATCH = 16, 64
LIMIT = 65 * 1024  # plain training takes 85 KiB


def blocks() -> nn.Sequential:
    layers = [[nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Dropout(0.1)] for _ in range(3)]
    return nn.Sequential(*(layer for block in layers for layer in block))


class Net(L.LightningModule):
    def __init__(self, batch_size: int = BATCH, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = blocks()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self(batch[0]).square().mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self(batch[0]).square().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(batch=self.hparams["batch_size"])

    def val_dataloader(self) -> DataLoader[Any]:
        return loader(2)

    @property
    def flops_per_batch(self) -> int:  # what ThroughputMonitor wants to know
        return 1000


def loader(batches: int = 4, batch: int = BATCH) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(torch.randn(batches * BATCH, WIDTH, generator=generator)), batch)


def fit(
    folder: Path, callbacks: list[L.Callback], make: Callable[[], Any] | None = None, **options: Any
) -> tuple[L.Trainer, L.LightningModule]:
    L.seed_everything(3, verbose=False)
    model = (make or Net)()
    quiet = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "max_epochs": 1, "default_root_dir": folder,
    }  # fmt: skip
    trainer = L.Trainer(**quiet | options, callbacks=callbacks)
    trainer.fit(model)
    return trainer, trainer.lightning_module


def assert_same(folder: Path, **options: Any) -> tuple[L.Trainer, L.Trainer, RotorCallback]:
    """Train with and without the callback, under the same options."""
    rotor = RotorCallback(LIMIT, "body", show_table=False)

    def made() -> dict[str, Any]:
        return {key: value() if callable(value) else value for key, value in options.items()}

    plain, planned = fit(folder, [], **made()), fit(folder, [rotor], **made())
    assert rotor.plan is not None
    assert rotor.plan.recomputed
    assert_same_bits(dict(plain[1].state_dict()), dict(planned[1].state_dict()))
    assert_same_bits(plain[0].callback_metrics, planned[0].callback_metrics)
    return plain[0], planned[0], rotor


# -------------------------------------------------------------------- loops


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.feature("Trainer", "sanity check and validation"), id="validation"),
        pytest.param({"fast_dev_run": 3}, marks=pytest.mark.feature("Trainer", "`fast_dev_run`"), id="fast_dev_run"),
        pytest.param(
            {"limit_train_batches": 3, "limit_val_batches": 1}, marks=pytest.mark.feature("Trainer", "`limit_*_batches`"), id="limits"
        ),
        pytest.param({"max_epochs": -1, "max_steps": 5}, marks=pytest.mark.feature("Trainer", "`max_steps`"), id="steps"),
        pytest.param({"overfit_batches": 1}, marks=pytest.mark.feature("Trainer", "`overfit_batches`"), id="overfit"),
        pytest.param(
            {"val_check_interval": 2}, marks=pytest.mark.feature("Trainer", "validation in the middle of an epoch"), id="interval"
        ),
        pytest.param({"detect_anomaly": True}, marks=pytest.mark.feature("Trainer", "`detect_anomaly`"), id="anomaly"),
        pytest.param({"deterministic": True}, marks=pytest.mark.feature("Trainer", "`deterministic=True`"), id="deterministic"),
        pytest.param({"inference_mode": False}, marks=pytest.mark.feature("Trainer", "`inference_mode=False`"), id="no_grad"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:You requested to overfit", "ignore:Anomaly Detection has been enabled")
def test_loops(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_same(tmp_path, **options)


@pytest.mark.feature("Trainer", "`validate`, `test` and `predict` run the plain module")
def test_evaluation_is_left_alone(tmp_path: Path) -> None:
    def looked_at(trainer: L.Trainer, model: L.LightningModule) -> list[Any]:
        data = loader(2)
        return [
            trainer.validate(model, data, verbose=False),
            trainer.test(model, data, verbose=False),
            trainer.predict(model, data),
        ]

    rotor = RotorCallback(LIMIT, "body", show_table=False)
    torch.manual_seed(0)
    model = Net()
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "default_root_dir": tmp_path,
    }
    plain = looked_at(L.Trainer(**quiet), model)
    assert_same_bits(plain, looked_at(L.Trainer(**quiet, callbacks=[rotor]), model))
    assert rotor.plan is None
    assert "forward" not in model.body.__dict__


@pytest.mark.feature("Trainer", "two Trainers in one process, one inside the other")
def test_two_trainers(tmp_path: Path) -> None:
    inner: list[Any] = []

    class TrainsAnother(L.Callback):
        """A student's training inside of a teacher's."""

        def __init__(self, callbacks: Callable[[], list[L.Callback]]) -> None:
            self._callbacks = callbacks

        def on_train_epoch_end(self, *_: Any) -> None:
            state = torch.get_rng_state()
            inner.append(fit(tmp_path, self._callbacks())[1])
            torch.set_rng_state(state)

    def rotor() -> RotorCallback:
        return RotorCallback(LIMIT, "body", show_table=False)

    plain = fit(tmp_path, [TrainsAnother(list)], max_epochs=2)[1]
    planned = fit(tmp_path, [rotor(), TrainsAnother(lambda: [rotor()])], max_epochs=2)[1]
    assert_same_bits(dict(plain.state_dict()), dict(planned.state_dict()))
    assert len(inner) == 4
    assert_same_bits(dict(inner[0].state_dict()), dict(inner[2].state_dict()))


# -------------------------------------------------------------------- profilers and monitors


@pytest.mark.parametrize(
    "profiler",
    [
        pytest.param(SimpleProfiler, marks=pytest.mark.feature("Profilers", "SimpleProfiler")),
        pytest.param(AdvancedProfiler, marks=pytest.mark.feature("Profilers", "AdvancedProfiler")),
    ],
)  # fmt: skip
def test_profilers(tmp_path: Path, profiler: type[Any]) -> None:
    _, _, rotor = assert_same(tmp_path, profiler=lambda: profiler(dirpath=tmp_path, filename="profile"))
    assert rotor.measured_peak_bytes is not None
    (report,) = tmp_path.glob("fit-profile*.txt")
    assert "training_step" in report.read_text()


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule will be overridden")
@pytest.mark.feature(
    "Profilers", "a profiler that records all steps", note="on the CPU nothing is planned meanwhile; a warning says so"
)
def test_a_profiler_that_never_pauses(tmp_path: Path) -> None:
    rotor = RotorCallback(LIMIT, "body", show_table=False)
    with pytest.warns(RotorWarning) as caught:
        planned = fit(tmp_path, [rotor], profiler=PyTorchProfiler(), limit_train_batches=2)[1]
    told = [str(warning.message) for warning in caught if warning.category is RotorWarning]
    assert [message.split(",")[0] for message in told] == ["RotorCallback runs the module plainly"]
    plain = fit(tmp_path, [], limit_train_batches=2)[1]
    assert_same_bits(dict(plain.state_dict()), dict(planned.state_dict()))


@pytest.mark.parametrize(
    "monitor",
    [
        pytest.param(DeviceStatsMonitor, marks=pytest.mark.feature("Callbacks", "DeviceStatsMonitor")),
        pytest.param(
            lambda: ThroughputMonitor(lambda batch: len(batch[0]), window_size=2),
            marks=pytest.mark.feature("Callbacks", "ThroughputMonitor"),
        ),
    ],
)
def test_monitors(tmp_path: Path, monitor: Callable[[], L.Callback]) -> None:
    def run(callbacks: list[L.Callback], name: str) -> tuple[set[str], L.LightningModule]:
        logger = CSVLogger(tmp_path, name=name)
        _, model = fit(tmp_path, callbacks, logger=logger, log_every_n_steps=1)
        header = Path(logger.log_dir, "metrics.csv").read_text().splitlines()[0]
        return set(header.split(",")), model

    rotor = RotorCallback(LIMIT, "body", show_table=False)
    (seen, plain), (seen_too, planned) = run([monitor()], "plain"), run([rotor, monitor()], "planned")
    assert len(seen) > 3
    assert {name for name in seen_too if not name.startswith("RotorCallback/")} == seen
    assert_same_bits(dict(plain.state_dict()), dict(planned.state_dict()))


@pytest.mark.feature("Callbacks", "ModelSummary")
def test_the_summary_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Seen(ModelSummary):
        def summarize(self, summary_data: Any, *_: Any, **__: Any) -> None:
            seen.append([(name, tuple(column)) for name, column in summary_data])

    class WithExample(Net):
        example_input_array = torch.zeros(2, WIDTH)

    seen: list[Any] = []
    for callbacks in ([], [RotorCallback(show_table=False)]):
        fit(tmp_path, [*callbacks, Seen(max_depth=3)], WithExample)
    assert seen[0] == seen[1]
    assert "body.0" in str(seen[0])


# -------------------------------------------------------------------- tuners


@pytest.mark.feature("Tuners", "LearningRateFinder, as a callback and with Tuner")
@pytest.mark.parametrize("as_callback", [True, False])
def test_learning_rates(tmp_path: Path, as_callback: bool) -> None:
    found = []
    for rotors in ([], [RotorCallback(LIMIT, show_table=False)]):
        L.seed_everything(3, verbose=False)
        model = Net()
        finder = LearningRateFinder(num_training_steps=12, early_stop_threshold=None)
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, callbacks=[*rotors, *([finder] if as_callback else [])],
        )  # fmt: skip
        if as_callback:
            trainer.fit(model)
            result = finder.optimal_lr
        else:
            result = Tuner(trainer).lr_find(model, num_training=12, early_stop_threshold=None)
            trainer.fit(model)
        assert result is not None
        found.append((result.results, dict(model.state_dict())))
        assert all(rotor.plan is not None and rotor.plan.recomputed for rotor in rotors)
    assert_same_bits(found[0][0], found[1][0])
    assert_same_bits(found[0][1], found[1][1])


class Failing(Net):
    """Fails once, in the third step."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error: type[BaseException] | None = error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.error is not None:
            error, self.error = self.error, None
            raise error("once")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("error", "raised"), [(ValueError, ValueError), (KeyboardInterrupt, SystemExit)])
def test_an_error_in_a_trial_of_a_tuner_leaves_nothing_behind(
    tmp_path: Path, error: type[BaseException], raised: type[BaseException]
) -> None:
    rotor, model = RotorCallback(LIMIT, show_table=False), Failing(error)
    quiet = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "max_epochs": 1, "default_root_dir": tmp_path,
    }  # fmt: skip
    trainer = L.Trainer(**quiet, callbacks=[rotor])
    before = [set(vars(module)) for module in model.modules()]
    with pytest.raises(raised):
        Tuner(trainer).lr_find(model, num_training=12, early_stop_threshold=None, update_attr=False)
    # The tuner has taken the callback out of the trainer, which could not tell it of the error.
    for module, names in zip(model.modules(), before, strict=True):
        assert not {"forward", "log", "_lightning_rotor"} & (set(vars(module)) - names)
    assert "on_exception" not in vars(trainer.strategy)
    for callbacks in ([], [rotor], [RotorCallback(LIMIT, show_table=False)]):
        L.Trainer(**quiet, callbacks=callbacks).fit(model)
    assert rotor.plan is not None


def test_several_callbacks_hear_of_an_error_and_leave_in_any_order() -> None:
    strategy, heard = SingleDeviceStrategy(), []
    first, second = ExitStack(), ExitStack()
    first.enter_context(told_of_errors(strategy, lambda error: heard.append(("first", error))))
    second.enter_context(told_of_errors(strategy, lambda error: heard.append(("second", error))))
    error = ValueError()
    strategy.on_exception(error)
    assert heard == [("first", error), ("second", error)]
    first.close()
    strategy.on_exception(error)
    assert heard[2:] == [("second", error)]
    second.close()
    assert "on_exception" not in vars(strategy)


_FINDER = """
    import resource, sys, logging
    import lightning.pytorch as L, pytest, torch
    from lightning.pytorch.tuner import Tuner
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from lightning_rotor import RotorCallback
    from lightning_rotor.profiling import stage_seconds
    from tests.grids import make_tables_coarse

    stage_seconds._ENOUGH_SECONDS = 0.0  # bytes count here, and not how good plans are
    make_tables_coarse(pytest.MonkeyPatch())
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # its lack of memory has another text, which Lightning does not know
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    ROOM = 200 * 2**20  # planning takes a part of it, before training does

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.batch_size = 256
            layers = [layer for _ in range(24) for layer in (nn.LayerNorm(1024), nn.GELU())]
            self.body = nn.Sequential(*layers)
        def training_step(self, batch, batch_idx):
            return self.body(batch[0]).square().mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)
        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.zeros(1, 1024).expand(1 << 14, 1024)), self.batch_size)

    def find(*callbacks):
        model = Net()
        trainer = L.Trainer(
            accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[*callbacks], default_root_dir=sys.argv[1],
        )
        size = Tuner(trainer).scale_batch_size(model, mode="power", init_val=512, max_trials=3, steps_per_trial=1)
        trainer.fit(model)
        return size

    def rotor():
        return RotorCallback(ROOM * 3 // 4, show_table=False)

    trainer = L.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                        enable_model_summary=False, callbacks=[RotorCallback("1GiB", show_table=False)])
    trainer.fit(Net())  # what is imported and started once is there
    pages = int(open("/proc/self/statm").read().split()[0])
    taken = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, resource.RLIM_INFINITY))
    plain = find()
    callback = rotor()
    planned = find(callback)
    print("FOUND", plain, planned, len(callback.plan.recomputed))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and /proc")
@pytest.mark.feature("Tuners", "BatchSizeFinder finds a larger batch than without the callback, in the same memory")
def test_a_larger_batch_is_found(tmp_path: Path) -> None:
    """The operating system gives the process 200 MiB and no more; the callback is to make do with three quarters of that."""
    script = tmp_path / "find.py"
    script.write_text(textwrap.dedent(_FINDER))
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    # Every tensor in pages of its own, so that what is freed is free.
    root = Path(__file__).parents[1]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=root, env=environment, check=False)
    assert "FOUND" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    plain, planned, recomputed = map(int, done.stdout.split("FOUND")[1].split())
    assert plain >= 256
    assert planned >= 2 * plain
    assert recomputed > 0


@pytest.mark.feature("Tuners", "BatchSizeFinder stays inside `mem_limit`, and plans again for each trial")
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_the_limit_bounds_the_batch_size(tmp_path: Path, mode: str) -> None:
    def largest(limit: int | str) -> tuple[int, RotorCallback]:
        rotor = RotorCallback(limit, show_table=False)
        L.seed_everything(3, verbose=False)
        model = Net()
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, callbacks=[rotor],
        )  # fmt: skip
        found = Tuner(trainer).scale_batch_size(model, mode=mode, init_val=BATCH // 2, steps_per_trial=1, max_trials=5)
        assert found == model.hparams["batch_size"]
        trainer.fit(model)
        assert rotor.plan is not None
        assert rotor.measured_peak_bytes is not None
        return int(found or 0), rotor

    small, rotor = largest(LIMIT)
    assert BATCH <= small < 2 * BATCH
    assert rotor.plan is not None
    assert rotor.plan.recomputed
    assert rotor.measured_peak_bytes is not None
    assert rotor.measured_peak_bytes <= LIMIT
    with pytest.raises(BudgetError, match="Raise mem_limit"):  # twice as much would not do
        fit(tmp_path, [RotorCallback(LIMIT, show_table=False)], lambda: Net(batch_size=2 * small))


# -------------------------------------------------------------------- what users do with a live module


def during_training(tmp_path: Path, look: Callable[[Any], Any]) -> Any:
    """What a look at a live model after its second step gives."""
    seen: list[Any] = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, model: L.LightningModule, *_: Any) -> None:
            if trainer.global_step == 2:
                assert "forward" in model.body.__dict__
                generator = torch.get_rng_state()
                seen.append(look(model))
                torch.set_rng_state(generator)

    rotor = RotorCallback(LIMIT, "body", show_table=False)
    planned = fit(tmp_path, [rotor, Look()])[1]
    assert rotor.plan is not None
    assert rotor.plan.recomputed
    assert_same_bits(dict(fit(tmp_path, [])[1].state_dict()), dict(planned.state_dict()))
    return seen[0]


INPUT = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)


@pytest.mark.parametrize(
    "duplicate",
    [
        pytest.param(copy.deepcopy, marks=pytest.mark.feature("Live modules", "deepcopy")),
        pytest.param(
            lambda module: pickle.loads(pickle.dumps(module)), marks=pytest.mark.feature("Live modules", "pickle")
        ),
    ],
)
def test_duplicates_compute_with_their_own_weights(tmp_path: Path, duplicate: Callable[[Any], Any]) -> None:
    def look(model: Any) -> None:
        double = duplicate(model.body)
        with torch.no_grad():
            double[0].weight.zero_()
            double.eval(), model.body.eval()
            assert not torch.equal(double(INPUT), model.body(INPUT))
            double.load_state_dict(model.body.state_dict())
            assert torch.equal(double(INPUT), model.body(INPUT))
        model.body.train()
        double.train()(INPUT).sum().backward()
        assert double[0].weight.grad is not None

    during_training(tmp_path, look)


@pytest.mark.parametrize(
    "strict",
    [
        pytest.param(False, marks=pytest.mark.feature("Live modules", "`torch.export`")),
        pytest.param(True, marks=pytest.mark.feature("Live modules", "`torch.export` with `strict=True`")),
    ],
)
def test_export(tmp_path: Path, strict: bool) -> None:
    def look(model: Any) -> None:
        program = torch.export.export(model, (INPUT,), strict=strict)  # as it is, in training
        assert {node.target for node in program.graph.nodes} >= {
            torch.ops.aten.linear.default,
            torch.ops.aten.gelu.default,
        }

    during_training(tmp_path, look)


@pytest.mark.feature("Live modules", "`to_onnx`")
@pytest.mark.filterwarnings(
    "ignore:Exporting a model while it is in training mode", "ignore:The export was done in training mode"
)
def test_onnx(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    path = tmp_path / "model.onnx"
    during_training(tmp_path, lambda model: model.to_onnx(path, INPUT, dynamo=True, verbose=False))
    operations = [node.op_type for node in onnx.load(path).graph.node]
    assert operations.count("Gemm") == 4


@pytest.mark.feature("Live modules", "`torch.jit.trace`")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated", "ignore:.*torch.jit.*not supported")
def test_trace(tmp_path: Path) -> None:
    def look(model: Any) -> None:
        model.eval()
        traced = torch.jit.trace(model, INPUT)
        assert torch.equal(traced(INPUT), model(INPUT))
        model.train()

    during_training(tmp_path, look)


# -------------------------------------------------------------------- torch.compile


def compiled(part: str, **options: Any) -> Any:
    """Dynamo does its work; the backend runs what it captures as it is, to the same bits."""
    model = Net()
    if part == "target":
        model.body = torch.compile(model.body, backend="eager", **options)  # type: ignore[assignment]
    elif part == "target in place":
        model.body.compile(backend="eager", **options)
    return torch.compile(model, backend="eager", **options) if part == "whole" else model


@pytest.fixture
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # by dynamo itself, when it goes on after a break
@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(
            "target",
            marks=pytest.mark.feature("torch.compile", "of the planned module", note="as it is with room; under a plan it is not compiled"),
        ),
        pytest.param("target in place", marks=pytest.mark.feature("torch.compile", "of the planned module, `module.compile()`")),
        pytest.param("whole", marks=pytest.mark.feature("torch.compile", "of the whole LightningModule", note="not compiled under a plan")),
    ],
)  # fmt: skip
def test_compiled_models_train_under_a_plan(tmp_path: Path, part: str) -> None:
    rotor = RotorCallback(LIMIT, show_table=False)
    name = "the LightningModule" if part == "whole" else "'body"
    with pytest.warns(RotorWarning, match=f"{name}.* was compiled as a whole, but a plan takes it apart") as caught:
        planned = fit(tmp_path, [rotor], lambda: compiled(part))[1]
    assert [warning.category for warning in caught].count(RotorWarning) == 1
    assert rotor.plan is not None
    assert rotor.plan.recomputed
    plain = fit(tmp_path, [])[1]
    assert_same_bits(list(plain.state_dict().values()), list(planned.state_dict().values()))


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.feature("torch.compile", "`fullgraph=True` is refused with a reason")
@pytest.mark.parametrize("part", ["target"])
def test_one_graph_is_refused(tmp_path: Path, part: str) -> None:
    message = r"fullgraph=True lets this model run under no plan that keeps mem_limit: 'body.*' was compiled as a whole"
    with pytest.raises(ModelError, match=message):
        fit(tmp_path, [RotorCallback(LIMIT, show_table=False)], lambda: compiled(part, fullgraph=True))


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("_fresh_dynamo")
def test_what_the_compiler_returned_is_named_for_the_module_inside(tmp_path: Path) -> None:
    rotor = RotorCallback(LIMIT, "body", show_table=False)
    with pytest.warns(RotorWarning, match=r"'body._orig_mod' was compiled as a whole, but a plan takes it apart"):
        planned = fit(tmp_path, [rotor], lambda: compiled("target"))[1]
    assert rotor.plan is not None
    assert rotor.plan.recomputed
    assert_same_bits(list(fit(tmp_path, [])[1].parameters()), list(planned.parameters()))


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_compiled_model_itself_can_be_the_target(tmp_path: Path) -> None:
    rotor = RotorCallback(LIMIT, "", show_table=False)
    with pytest.warns(RotorWarning, match=r"the LightningModule was compiled as a whole, but a plan takes it apart"):
        planned = fit(tmp_path, [rotor], lambda: compiled("whole"))[1]
    assert rotor.plan is not None
    assert rotor.plan.recomputed
    assert_same_bits(list(fit(tmp_path, [])[1].parameters()), list(planned.parameters()))
