"""Train a LightningModule inside a byte limit, and show what that takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.table import Table

from lightning_rotor.callbacks.trainer_loop import TrainerLoop, hush, told_of_errors, unhush
from lightning_rotor.capture.compiled import Variants, check_variants
from lightning_rotor.errors import OptionError
from lightning_rotor.offload import Offload, parse_offload
from lightning_rotor.planned.cache import MAX_PLANS
from lightning_rotor.planned.out_of_memory import is_shortage
from lightning_rotor.planned.plan_settings import PlanSettings
from lightning_rotor.planned.step_planner import StepPlanner
from lightning_rotor.planned.step_state import State
from lightning_rotor.planned.target_search import check_names
from lightning_rotor.planning import Plan
from lightning_rotor.planning.joint_chain import StepPlan
from lightning_rotor.private import lightning_names as private
from lightning_rotor.private import lightning_packages as packages
from lightning_rotor.report import PlotError, plan_table, plot_timeline, stage_table
from lightning_rotor.shown import rendered, show
from lightning_rotor.units import MemoryLimit, format_bytes, format_seconds, parse_limit

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger
else:
    Callback = packages.joined("callbacks.Callback")

_log = logging.getLogger(__name__)

_TENSORBOARD = packages.from_each("loggers.TensorBoardLogger")
_WANDB = packages.from_each("loggers.WandbLogger")
_MLFLOW = packages.from_each("loggers.MLFlowLogger")

# A plan, seen from the whole training process: what users are shown.


@dataclass(frozen=True, slots=True)
class _ProcessPlan:
    """A plan and what the process holds besides. Bytes are of the whole process, measured ones None without a step."""

    plan: Plan
    limit_bytes: int
    measured_peak_bytes: int | None
    measured_reserved_bytes: int | None
    target: str
    left_out: str  # what is not planned, with shares of the compute
    reserved_bytes: int  # what the process holds besides what was planned
    final_peak_bytes: int  # behind the backward, when optimizers step
    measuring_seconds: float
    measured_overhead: float | None  # None before the second step under a plan

    @classmethod
    def of(cls, planner: StepPlanner) -> _ProcessPlan | None:
        """The plan that training runs; None before there is one."""
        plan = planner.plan
        watch = planner.watch
        if plan is None:
            return None
        # Numbers and texts alone: it outlives the training, and must hold neither the model nor the Trainer.
        return cls(
            plan=plan,
            limit_bytes=planner.limit.size_bytes,
            measured_peak_bytes=watch.peak_bytes,
            measured_reserved_bytes=watch.reserved_bytes,
            target=str(planner.modules),
            left_out=planner.modules.left_out,
            reserved_bytes=planner.limit.reserved_bytes,
            final_peak_bytes=planner.limit.final_peak_bytes,
            measuring_seconds=planner.modules.measuring_seconds,
            measured_overhead=planner.modules.measured_overhead(plan),
        )

    @property
    def predicted_peak_bytes(self) -> int:
        # The optimizer's step is a moment of its own, in which no activation is left.
        return max(self.reserved_bytes + self.plan.peak_bytes, self.final_peak_bytes)

    def metrics(self) -> dict[str, float]:
        """Numbers to log, by name."""
        overhead = self.measured_overhead
        numbers = {
            "overhead_percent": 100 * self.plan.overhead,
            # By its public name; it is the limit of the process, and no chain's budget.
            "budget_bytes": self.limit_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "measuring_seconds": self.measuring_seconds,
            "planning_seconds": self.plan.solve_seconds,
            "recomputed_stages": len(self.plan.recomputed),
            **self._of_moves(),
            "measured_peak_bytes": self.measured_peak_bytes,
            "measured_reserved_bytes": self.measured_reserved_bytes,
            "measured_overhead_percent": None if overhead is None else 100 * overhead,
        }
        return _known(numbers)

    def _of_moves(self) -> dict[str, float]:
        """Numbers to log of a plan that may move something."""
        plan = self.plan
        # Without offload there would be three curves of zeros in every logger.
        if plan.link is None:
            return {}
        return {
            "moved_stages": len(plan.moved),
            "offloaded_bytes": plan.host_bytes,
            "stall_seconds": plan.stall_seconds,
        }

    def tell(self) -> None:
        """Log the plan, on one line."""
        measured_bytes = self.measured_peak_bytes
        _log.info(
            "RotorCallback: limit %s, peak %s%s, %.1f %% of time added to what is planned%s, "
            "measuring took %s and planning %s",
            format_bytes(self.limit_bytes),
            format_bytes(self.predicted_peak_bytes),
            "" if measured_bytes is None else f" (measured {format_bytes(measured_bytes)})",
            100 * self.plan.overhead,
            f", {format_bytes(self.plan.host_bytes)} moved" if self.plan.moved else "",
            format_seconds(self.measuring_seconds),
            format_seconds(self.plan.solve_seconds),
        )

    def table(self, reason: str = "") -> Table:
        """A table of the costs of the plan, and of each of its calls if it is for several."""
        memory = []
        if self.measured_reserved_bytes is not None:
            # The limit is about what is allocated. What nvidia-smi shows is nearer to this.
            reserved = format_bytes(self.measured_reserved_bytes)
            memory.append(("Reserved by PyTorch", f"{reserved}, with what it keeps for reuse"))
        rows = [("Planned", self.target)]
        if self.left_out:
            # In the table, too: whoever reads that a limit is kept should see what it is kept without.
            rows.append(("Not planned", self.left_out))
        if isinstance(self.plan, StepPlan):
            step_seconds = self.plan.chain.step_seconds
            for name, call in zip(self.plan.names, self.plan.calls, strict=True):
                held = format_bytes(call.simulation.held_bytes)
                part = call.chain.step_seconds / step_seconds
                share = f"{part:.0%} of the time, +{call.overhead:.1%}"
                rows.append((f"Call of {name!r}", f"{share}; keeps {held} until its backward"))
        return plan_table(
            self.plan,
            limit_bytes=self.limit_bytes,
            reserved_bytes=self.reserved_bytes,
            final_peak_bytes=self.final_peak_bytes,
            measured_peak_bytes=self.measured_peak_bytes,
            measured_overhead=self.measured_overhead,
            measuring_seconds=self.measuring_seconds,
            memory_rows=memory,
            extra_rows=rows,
            reason=reason,
        )

    def news_since(self, before: _ProcessPlan | None) -> str | None:
        """The reason to show this plan after another one; empty if there is none before, None if nothing is new."""
        if before is None:
            return ""
        chain = self.plan.chain
        other = before.plan.chain
        # Seconds are no part of it: another measurement of the same stages is no news.
        sizes = [stage.keep.kept_bytes for stage in chain]
        other_sizes = [stage.keep.kept_bytes for stage in other]
        if sizes != other_sizes or chain.names != other.names:
            # Smaller inputs take less, and sizes may change at every step.
            if self.predicted_peak_bytes <= before.predicted_peak_bytes:
                return None
            return "a larger input came, or another module"
        if self.plan.schedule == before.plan.schedule:
            return None
        return "planned anew, by the bytes and seconds that steps have taken"


@dataclass(frozen=True, slots=True)
class _StepsAsCompiled:
    """Steps of a model that was compiled as a whole, in which nothing is planned."""

    limit_bytes: int
    measured_peak_bytes: int | None
    measured_reserved_bytes: int | None

    @classmethod
    def of(cls, planner: StepPlanner) -> _StepsAsCompiled | None:
        """The steps as they were measured last; None if they run under a plan, or are to."""
        if planner.state is not State.AS_COMPILED:
            return None
        return cls(planner.limit.size_bytes, planner.watch.peak_bytes, planner.watch.reserved_bytes)

    def metrics(self) -> dict[str, float]:
        """Numbers to log, by name."""
        numbers = {
            "overhead_percent": 0.0,
            "budget_bytes": self.limit_bytes,
            "recomputed_stages": 0,
            "measured_peak_bytes": self.measured_peak_bytes,
            "measured_reserved_bytes": self.measured_reserved_bytes,
        }
        return _known(numbers)

    def tell(self) -> None:
        """Log the peak, on one line."""
        measured_bytes = self.measured_peak_bytes
        _log.info(
            "RotorCallback: limit %s%s, the model runs as it was compiled, and nothing is recomputed",
            format_bytes(self.limit_bytes),
            "" if measured_bytes is None else f", measured peak {format_bytes(measured_bytes)}",
        )


def _known(numbers: Mapping[str, float | None]) -> dict[str, float]:
    """The numbers that there are: loggers draw a curve of what they get, and take no None."""
    known = {}
    for name, number in numbers.items():
        if number is not None:
            known[name] = number
    return known


def _log_hyperparameters(trainer: pl.Trainer, prefix: str, values: Mapping[str, Any]) -> None:
    """Give settings to every logger, before the Trainer gives those of the model."""
    for logger in trainer.loggers:
        named = _named(logger, prefix, values)
        if isinstance(logger, _TENSORBOARD):
            # It reads the first set that is written, and no other: those that the Trainer is about to log go with it.
            for owner in (trainer.lightning_module, getattr(trainer, "datamodule", None)):
                if owner is not None and private.logs_hyperparameters(owner):
                    named |= owner.hparams_initial
            # The Trainer leaves out what LightningCLI has noted for itself.
            named.pop(private.CLASS_PATH, None)
        logger.log_hyperparams(named)


def _log_plan(trainer: pl.Trainer, prefix: str, shown: _ProcessPlan) -> None:
    """Give memory over one step, as a figure, and the stages, as text, to the loggers that take such things."""
    taking = (*_TENSORBOARD, *_WANDB, *_MLFLOW)
    loggers: list[Any] = [logger for logger in trainer.loggers if isinstance(logger, taking)]
    if not loggers:
        return
    text = rendered(shown.table(), stage_table(shown.plan))
    step = private.logging_step(trainer)
    figure = None
    try:
        figure = plot_timeline(shown.plan, budget_bytes=shown.limit_bytes, reserved_bytes=shown.reserved_bytes)
    except PlotError as error:
        # matplotlib is an extra. Whoever trains without it gets the text.
        _log.info("RotorCallback logs no picture of the plan: %s", error)
    for logger in loggers:
        plan, timeline = _named(logger, prefix, {"plan": text, "timeline": figure})
        if isinstance(logger, _TENSORBOARD):
            # It shows Markdown, in which four blanks keep columns in line.
            indented = "\n".join(f"    {line}" for line in text.splitlines())
            logger.experiment.add_text(plan, indented, step)
            if figure is not None:
                logger.experiment.add_figure(timeline, figure, step)
        elif isinstance(logger, _WANDB):
            logger.log_text(plan, columns=["plan"], data=[[text]], step=step)
            if figure is not None:
                logger.log_image(timeline, [figure], step=step)
        else:
            logger.experiment.log_text(logger.run_id, text, f"{plan}.txt")
            if figure is not None:
                logger.experiment.log_figure(logger.run_id, figure, f"{timeline}.png")


def _named(logger: Logger, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    # As Lightning's own DeviceStatsMonitor names what it logs, so that loggers group it.
    return {f"{prefix}{logger.group_separator}{name}": value for name, value in values.items()}


class RotorCallback(Callback):
    """Keeps training inside a memory limit by recomputing activations, as few as possible, with bit-equal results.

    At the first training batch the callback measures the modules with most of the compute, plans them and runs the
    plans from that very forward on. Calls that wait for their backward together have one plan, after a few steps.
    After the first steps it compares the allocator's peak with the limit, and plans again if something outside the
    modules (the loss, say) needed more than was left for it, or much less. A new input shape gets a plan within the
    step. If the device still runs out of memory in a module's forward, that forward runs again under a smaller plan, to
    the same bits.

    Args:
        mem_limit: What the whole training process may use on the device: parameters, gradients, optimizer state, the
            batch and activations. Bytes, ``"20GiB"``, ``"10GB"``, a fraction of the device such as ``0.8`` or
            ``"80%"``, or None for what is free. On a GPU it bounds what PyTorch allocates
            (``torch.cuda.max_memory_allocated``). What its caching allocator reserves beyond that and the CUDA context
            come on top; a plan always leaves room for both, on the device and inside of
            ``torch.cuda.set_per_process_memory_fraction``.
        module: Dotted name of the submodule to plan, such as ``"model.layers"``, or a list of several; ``""`` is the
            LightningModule itself. By default all that have 5 % or more of the compute of a training step, alone or
            with their equals, as a dry run of the first step counts it. What is behind a line that the dry run cannot
            follow is found in the first step itself.
        on_infeasible: Where no plan fits ``mem_limit``: ``"raise"`` ends training with the least limit that would do;
            ``"warn"`` says so once, and trains with the plan that takes least.
        slots: Resolution of the planner: more finds better schedules in long chains, and takes longer.
        max_plans: Plans that are kept, one for each input shape, those used last; 64 by default.
        compiled_variants: Under which other activation memory budgets blocks that you compiled may run: ``"exact"``,
            those that compute the bits of your compiled block; ``"close"``, also those that differ from it by rounding;
            ``"off"``, none, and nothing is compiled again.
        offload: Where a plan may move what stages hold between their forward and their backward, beside keeping and
            recomputing it: ``"host"`` or ``"host:20GiB"``, pinned memory of the host, for training on a GPU;
            ``"disk:/a/folder"``, a file, for training on the CPU; an :class:`~lightning_rotor.Offload`; or None,
            nowhere. Calls that wait for their backward together move nothing.
        show_table: Print a table of the plan after the first steps.
        progress_bar: Show overhead and measured peak in the progress bar.
        log_plan: Give the plan to loggers that take pictures and text (TensorBoard, W&B, MLflow): memory over a step as
            a figure, if matplotlib is installed, and the table of stages as text.
    Raises:
        UnitError: ``mem_limit`` is not positive, or cannot be read.
        OptionError: ``on_infeasible``, ``compiled_variants`` or ``offload`` is none of those above; ``slots`` or
            ``max_plans`` is no positive integer.
        ModelError: ``module`` is no name. In ``setup``: no such module, or none that is supported. In the first
            training batch: it cannot be cut into stages, and it was named. Nothing is planned, with a warning, where
            ``training_step`` calls no module that can be.
        BudgetError: In the first training batch, before its optimizer step, or that of a larger shape: no schedule
            fits. For several calls, and where measured steps take more: behind a step. Says the least limit that would.
        OffloadError: In the first training batch: there is no such memory for the model's device, or it does not give
            what a plan needs.
        ShortageError: In a training batch: the device has no memory left, whatever the plan.
    Example:
        >>> trainer = L.Trainer(callbacks=[RotorCallback(mem_limit="2GiB")])  # doctest: +SKIP

    Several processes keep inside the least of their limits, DDP's buckets included, and run one plan where the planned
    module communicates. Under FSDP2 each unit inside of the planned module is one stage.

    Logs to every logger, each key after ``RotorCallback/`` (or the logger's own separator): ``overhead_percent``,
    ``measured_overhead_percent`` (from the second step on), ``budget_bytes``, ``predicted_peak_bytes``,
    ``measured_peak_bytes``, ``measured_reserved_bytes`` (on a GPU), ``measuring_seconds``, ``planning_seconds``,
    ``recomputed_stages``; with ``offload``, ``moved_stages``, ``offloaded_bytes`` and ``stall_seconds``.
    """

    def __init__(
        self,
        mem_limit: int | float | str | None = None,
        module: str | Sequence[str] | None = None,
        *,
        on_infeasible: Literal["raise", "warn"] = "raise",
        slots: int = 500,
        max_plans: int = MAX_PLANS,
        compiled_variants: Variants = "exact",
        offload: str | Offload | None = None,
        show_table: bool = True,
        progress_bar: bool = False,
        log_plan: bool = True,
    ) -> None:
        super().__init__()
        # Whatever can be wrong without a model is said here, where the user's line is in the traceback.
        if on_infeasible not in ("raise", "warn"):
            raise OptionError(f'on_infeasible is {on_infeasible!r}: expected "raise" or "warn"')
        self._limit = parse_limit(mem_limit)
        self._on_infeasible = on_infeasible
        self._module_name = check_names(module)
        self._settings = PlanSettings(
            slots,
            max_plans,
            check_variants(compiled_variants),
            offload=parse_offload(offload),
        )
        self._show_table = show_table
        self._progress_bar = progress_bar
        self._log_plan = log_plan
        # While training.
        self._planner: StepPlanner | None = None
        # Of the training before.
        self._last: _ProcessPlan | None = None
        self._last_as_compiled: _StepsAsCompiled | None = None
        # In this training.
        self._printed: _ProcessPlan | None = None
        # Closed, the strategy tells of errors no more.
        self._listening = ExitStack()
        # From one training to the next, and into checkpoints.
        self._saved: Mapping[str, Any] | None = None

    @property
    def mem_limit(self) -> MemoryLimit | None:
        """The limit as it was given; None is what is free."""
        return self._limit

    @property
    def plan(self) -> Plan | None:
        """The plan that training runs, or ran last. None before the first, and where a model runs as compiled."""
        shown = self._shown()
        return None if shown is None else shown.plan

    @property
    def budget_bytes(self) -> int:
        """The limit of the whole process in bytes, known once there is a plan, or a step has run as compiled."""
        shown = self._shown() or self._as_compiled()
        return 0 if shown is None else shown.limit_bytes

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Predicted peak of the whole process, or None before the first plan."""
        shown = self._shown()
        return None if shown is None else shown.predicted_peak_bytes

    @property
    def measured_peak_bytes(self) -> int | None:
        """The allocator's peak in the step measured last, what was allocated before it included, or None."""
        shown = self._shown() or self._as_compiled()
        return None if shown is None else shown.measured_peak_bytes

    @property
    def measured_reserved_bytes(self) -> int | None:
        """Most bytes that a GPU's caching allocator had reserved in that step, reusable ones too; None on the CPU."""
        shown = self._shown() or self._as_compiled()
        return None if shown is None else shown.measured_reserved_bytes

    def __getstate__(self) -> dict[str, Any]:
        """A copy knows what was measured, and begins a training of its own."""
        state = dict(vars(self))
        if self._planner is not None:
            state.update(_saved=self.state_dict(), _last=self._shown(), _last_as_compiled=self._as_compiled())
            state.update(_planner=None, _listening=ExitStack())
        return state

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Attach, unless the layers are only made in ``configure_model``, which runs later."""
        # Validation and testing keep no activations.
        if stage != "fit":
            return
        if self._planner is not None:
            # Of a training whose end nobody told of.
            self._detach(self._planner.loop.model)
        self._last = None
        self._last_as_compiled = None
        self._printed = None
        limit = "what is free" if self._limit is None else str(self._limit)
        module = "chosen by compute" if self._module_name is None else str(self._module_name)
        settings = {"mem_limit": limit, "module": module, "slots": self._settings.slots}
        _log_hyperparameters(trainer, type(self).__qualname__, settings)
        # As early as can be: Lightning's tuners take all callbacks out behind this hook, and their trials are planned
        # as well.
        if not packages.is_overridden("configure_model", pl_module):
            self._attach(trainer, pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach now if ``setup`` could not."""
        # configure_model has run by now, and strategies have put their shards into the layers.
        if self._planner is None:
            self._attach(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Choose what to plan at the first batch, and measure the step if a plan is new."""
        if self._planner is not None:
            self._planner.begin_step(batch, batch_idx)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        """The loss is known."""
        if self._planner is not None:
            self._planner.begin_backward()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A backward is over."""
        if self._planner is not None:
            self._planner.end_backward()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """All backwards before it are over."""
        if self._planner is not None:
            self._planner.begin_optimizer_step(optimizer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the meter, log, and plan again if the limit was exceeded, or missed by far."""
        if self._planner is not None:
            # Lightning raises where one logs before the first step, so what is known by then is logged here, too.
            if self._planner.end_step():
                self._report(trainer)
            self._log_metrics(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the plan of a short training, and say so if nothing was planned."""
        planner = self._planner
        if planner is None:
            return
        if planner.plan is not None and planner.state is not State.STEADY:
            # It has ended before the steps were over that a new plan is watched for.
            self._report(trainer)
        if planner.has_run_as_compiled:
            return
        if planner.plan is None and planner.state in (State.CHOOSING, State.PLANNING):
            planner.loop.warn(
                "RotorCallback planned nothing: the module it works on never ran forward in training mode with "
                "gradients. Name another one with RotorCallback(module=...)"
            )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the module its own forward back."""
        if stage == "fit":
            self._detach(pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the module its own forward back; out of memory in a step, the next training plans with less."""
        if self._planner is not None and is_shortage(exception):
            self._planner.note_shortage(exception)
        # Lightning calls no teardown after an exception.
        self._detach(pl_module)

    def _attach(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        # Before anything is measured, which runs the user's code and would log.
        hush(model)
        self._listening.enter_context(told_of_errors(trainer.strategy, partial(self.on_exception, trainer, model)))
        self._planner = StepPlanner(
            TrainerLoop(trainer, model, self),
            self._limit,
            self._module_name,
            beyond=self._on_infeasible == "warn",
            settings=self._settings,
            saved=self._saved,
        )

    def _detach(self, model: torch.nn.Module) -> None:
        unhush(model)
        self._listening.close()
        if self._planner is None:
            return
        self._last = self._shown()
        self._last_as_compiled = self._as_compiled()
        self._planner.end()
        self._saved = self._planner.saved
        # It holds the Trainer and the model, which the user may want to be gone.
        self._planner = None

    @property
    def state_key(self) -> str:
        """Tells callbacks for several modules of one model apart."""
        # The limit is no part of it: a training that goes on with another one still knows what was measured.
        return f"{type(self).__qualname__}{ ({'module': self._module_name})!r}"

    def state_dict(self) -> dict[str, Any]:
        """Measurements and plans so far, in plain types."""
        # Lightning loads checkpoints with weights_only, which takes no others.
        if self._planner is not None:
            self._planner.save()
            self._saved = self._planner.saved
        return dict(self._saved or {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on without measuring again, if the model is the one that was measured."""
        # Lightning restores callbacks behind ``setup``; others may load a state before they train.
        if self._planner is None:
            self._saved = state_dict
        elif not self._planner.load(state_dict):
            self._planner.loop.warn(
                f"the checkpoint's plan is not for this {type(self._planner.loop.model).__name__}: expected one for "
                "the same layers, made with this version of lightning-rotor. It is left aside, and the model is "
                "measured anew"
            )

    def _shown(self) -> _ProcessPlan | None:
        """The plan that training runs, or ran last."""
        return self._last if self._planner is None else _ProcessPlan.of(self._planner)

    def _as_compiled(self) -> _StepsAsCompiled | None:
        """Steps of a model that runs, or ran last, as it was compiled."""
        return self._last_as_compiled if self._planner is None else _StepsAsCompiled.of(self._planner)

    def _log_metrics(self, trainer: pl.Trainer) -> None:
        is_logged = bool(trainer.loggers) and private.logs_this_step(trainer)
        shown = None
        # Most steps are not logged, and nothing is put together for those.
        if is_logged or self._progress_bar:
            shown = self._shown() or self._as_compiled()
        if shown is None:
            return
        if is_logged:
            # To each logger directly, since each has a separator of its own.
            for logger in trainer.loggers:
                metrics = _named(logger, type(self).__qualname__, shown.metrics())
                logger.log_metrics(metrics, step=private.logging_step(trainer))
        if self._progress_bar:
            values = {"rotor_overhead_%": shown.metrics()["overhead_percent"]}
            if shown.measured_peak_bytes is not None:
                values["rotor_peak_MiB"] = shown.measured_peak_bytes / 2**20
            trainer.lightning_module.log_dict(values, prog_bar=True, logger=False)

    def _report(self, trainer: pl.Trainer) -> None:
        """Show and log the plan that has settled."""
        shown = self._shown()
        as_compiled = self._as_compiled()
        if not trainer.is_global_zero:
            return
        if as_compiled is not None:
            as_compiled.tell()
        if shown is None:
            return
        shown.tell()
        if self._log_plan:
            _log_plan(trainer, type(self).__qualname__, shown)
        # Where sizes change, plans settle again and again. A table each time would be all that one sees.
        reason = shown.news_since(self._printed)
        if self._show_table and reason is not None:
            show(shown.table(reason))
            self._printed = shown
