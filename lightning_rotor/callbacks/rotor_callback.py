"""Train a LightningModule inside a byte limit."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console

from lightning_rotor.attaching import attach, detach
from lightning_rotor.callbacks.dry_step import compute_of_training_step
from lightning_rotor.callbacks.loggers import log_hyperparameters, log_metrics, log_plan
from lightning_rotor.callbacks.process_plan import ProcessPlan
from lightning_rotor.callbacks.saved_plans import SavedPlans
from lightning_rotor.callbacks.step_watch import StepWatch
from lightning_rotor.errors import BudgetError, ModelError, ProfilerBusyError, ProfilingError, RotorWarning, TrialError
from lightning_rotor.plan_records import model_fingerprint
from lightning_rotor.planned import Allowance, PlannedForward
from lightning_rotor.planning import Plan
from lightning_rotor.profiling import Profile
from lightning_rotor.target import Target, TargetSearch, named_target
from lightning_rotor.tensors import tensors_in
from lightning_rotor.training_memory import ResidentMemory, process_limit_bytes
from lightning_rotor.units import MemoryLimit, format_bytes, parse_limit

_log = logging.getLogger(__name__)
_MAX_CORRECTIONS = 5


class RotorCallback(pl.Callback):
    """Keeps training inside a memory limit by recomputing activations, as few as possible, with bit-equal results.

    At the first training batch the callback measures the stages of one module, plans, and runs the plan from that very forward on. After the
    first steps it compares the allocator's peak with the limit, and plans again with less if something outside the module (the loss, say)
    needed more than was left for it.

    Args:
        mem_limit: What the whole training process may use on the device: parameters, gradients, optimizer state, the batch and activations.
            Bytes, ``"20GiB"``, ``"10GB"``, a fraction of the device such as ``0.8`` or ``"80%"``, or None for what is free.
        module: Dotted name of the submodule to plan, such as ``"model.layers"``; ``""`` is the LightningModule itself. By default the
            submodule with most of the compute of a training step, among those that can be a chain: the FLOPs of the first batch's step are
            counted in a dry run without values, or failing that (the log says why) trainable parameters. It is the LightningModule itself
            if its forward reaches much more than any submodule.
        slots: Resolution of the planner: more finds better schedules in long chains, and takes longer.
        show_table: Print a table of the plan after the first steps.
        progress_bar: Show overhead and measured peak in the progress bar.
        log_plan: Give the plan to loggers that take pictures and text (TensorBoard, W&B, MLflow): memory over a step as a figure, if
            matplotlib is installed, and the table of stages as text.
    Raises:
        UnitError: ``mem_limit`` is not positive, or cannot be read.
        ModelError: In ``setup``: no such module, or none that is supported. In the first training batch: it cannot be cut into stages, or
            ``training_step`` calls none that can.
        BudgetError: In the first training batch: no schedule fits; says the least limit that would.
    Example:
        >>> trainer = L.Trainer(callbacks=[RotorCallback(mem_limit="2GiB")])  # doctest: +SKIP

    Logs to every logger, each key after ``RotorCallback/`` (or the logger's own separator): ``overhead_percent``, ``budget_bytes``,
    ``predicted_peak_bytes``, ``measured_peak_bytes``, ``planning_seconds``, ``recomputed_stages``.
    """

    def __init__(
        self,
        mem_limit: int | float | str | None = None,
        module: str | None = None,
        *,
        slots: int = 500,
        show_table: bool = True,
        progress_bar: bool = False,
        log_plan: bool = True,
    ) -> None:
        super().__init__()
        self._limit = parse_limit(mem_limit)
        self._module_name = module
        self._slots = slots
        self._show_table = show_table
        self._progress_bar = progress_bar
        self._log_plan = log_plan
        self._search: TargetSearch | None = None
        self._target: Target | None = None
        self._planned: PlannedForward | None = None
        self._trainer: pl.Trainer | None = None
        self._model: pl.LightningModule | None = None
        self._saved: SavedPlans | None = None
        self._reset()

    def _reset(self) -> None:
        self._choice_due = self._left_out_due = self._was_put_off = False
        self._plan: Plan | None = None
        self._batch: list[torch.Tensor] = []
        self._in_step = False
        self._resident: ResidentMemory | None = None
        self._limit_bytes = 0
        self._correction_bytes = 0
        self._corrections = 0
        self._watch = StepWatch()
        self._report_due = False

    @property
    def mem_limit(self) -> MemoryLimit | None:
        """The limit as it was given; None is what is free."""
        return self._limit

    @property
    def plan(self) -> Plan | None:
        """The plan that training runs, or ran last."""
        return self._plan

    @property
    def budget_bytes(self) -> int:
        """The limit of the whole process in bytes, known once there is a plan."""
        return self._limit_bytes

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Predicted peak of the whole process, or None before the first plan."""
        return None if self._plan is None else self._process_plan().predicted_peak_bytes

    @property
    def measured_peak_bytes(self) -> int | None:
        """The allocator's peak in the step measured last, what was allocated before it included, or None."""
        return self._watch.peak_bytes

    # ---------------------------------------------------------------- hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Attach, unless the layers are only made in ``configure_model``, which runs later."""
        if stage == "fit":
            self._reset()
            log_hyperparameters(trainer, self._prefix, self._hyperparameters())
            if not is_overridden("configure_model", pl_module):
                self._attach(trainer, pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach now if ``setup`` could not."""
        if self._planned is None:
            self._attach(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Choose what to plan at the first batch, and measure the step if a plan is new."""
        if self._choice_due:
            self._choose(batch, batch_idx)
        self._batch = tensors_in(batch)
        self._in_step = True
        if self._watch.due:
            self._watch.start(trainer, pl_module, self._batch)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """The backward is over: what the optimizer allocates from here on is nothing that a plan could change."""
        self._watch.lap()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the meter, log, and plan again if the limit was exceeded."""
        self._in_step = False
        if self._plan is None:
            return
        if self._watch.stop():
            self._correct()
        self._batch = []
        if self._report_due and not self._watch.due:
            self._report(trainer)
        self._log_metrics(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the plan of a short training, and say so if nothing was planned."""
        if self._report_due:
            self._report(trainer)
        if self._plan is None and self._planned is not None and not self._was_put_off:
            rank_zero_warn(
                "RotorCallback planned nothing: the module it works on never ran forward in training mode with gradients. Name another one "
                "with RotorCallback(module=...)",
                category=RotorWarning,
            )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the module its own forward back."""
        if stage == "fit":
            self._detach()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the module its own forward back; Lightning calls no ``teardown`` after an exception."""
        self._detach()

    # ---------------------------------------------------------------- checkpoints

    @property
    def state_key(self) -> str:
        """Tells callbacks for several modules of one model apart."""
        return self._generate_state_key(module=self._module_name)

    def state_dict(self) -> dict[str, Any]:
        """What was measured and planned so far, in plain types."""
        self._save()
        return {} if self._saved is None else self._saved.to_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on without measuring again, if the model is the one that was measured."""
        saved = SavedPlans.from_state(state_dict)
        target = None if saved is None or self._model is None else saved.target_in(self._model)
        if self._model is not None and target is None:
            rank_zero_warn(
                f"the checkpoint's plan is not for this {type(self._model).__name__}: expected one for the same layers, made with this version "
                "of lightning-rotor. It is left aside, and the model is measured anew",
                category=RotorWarning,
            )
            return
        self._saved = saved
        if target is not None:
            self._attach_to_known(target)

    def _save(self) -> None:
        if self._planned is not None and self._target is not None and self._plan is not None:
            self._saved = SavedPlans(
                self._target.name,
                model_fingerprint(self._target.module),
                self._correction_bytes,
                self._corrections,
                self._planned.records(),
            )

    def _attach_to_known(self, target: Target) -> None:
        """The saved plans' module is the choice, unless the user names another one now."""
        if self._search is not None:
            self._choice_due = self._left_out_due = False
            self._attach_to(target)
        self._recall()

    def _recall(self) -> None:
        if (
            self._saved is None
            or self._target is None
            or self._planned is None
            or self._target.name != self._saved.module
        ):
            return
        if self._saved.speak_of(self._target.module):
            self._planned.recall(self._saved.records)
            self._correction_bytes, self._corrections = self._saved.correction_bytes, self._saved.corrections

    # ---------------------------------------------------------------- attaching

    def _attach(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        """What has most of the compute shows in the first batch. That a tuner may never bring here, so there is a first guess."""
        self._trainer, self._model = trainer, model
        if self._module_name is not None:
            self._attach_to(named_target(model, self._module_name))
            self._recall()
            return
        compiled = model._compiler_ctx is not None  # as a whole, which leaves its forward to torch.compile
        self._search = TargetSearch(model, may_be_whole=is_overridden("forward", model) and not compiled)
        known = None if self._saved is None else self._saved.target_in(model)
        if known is not None:
            self._attach_to_known(known)
            return
        self._choice_due = self._left_out_due = True
        self._attach_to(self._search.best())

    def _choose(self, batch: Any, batch_idx: int) -> None:
        assert self._search is not None
        assert self._trainer is not None
        assert self._model is not None
        self._choice_due = False
        try:
            self._search.use(compute_of_training_step(self._trainer, self._model, batch, batch_idx))
        except ProfilingError as error:
            self._search.do_without(str(error))
        self._attach_to(self._search.best())

    def _descend(self, error: ModelError) -> None:
        """From inside the first forward: the target turned out to be no chain, so try the next."""
        assert self._search is not None
        assert self._target is not None
        self._search.refuse(self._target)
        found = self._search.best()
        if found is None:
            raise error
        _log.info("RotorCallback cannot plan %s: %s", self._target.place, error)
        self._attach_to(found)

    def _put_off(self, error: ProfilerBusyError) -> None:
        if not self._was_put_off:
            self._was_put_off = True
            rank_zero_warn(
                f"RotorCallback runs the module plainly, whatever mem_limit says, for as long as torch's profiler records: {error}",
                category=RotorWarning,
            )

    def _attach_to(self, target: Target | None) -> None:
        if target is None:
            raise ModelError(
                f"{type(self._model).__name__} holds no submodule with several layers and trainable parameters that its training_step calls: "
                "expected one. Put the layers that take most of the memory into an nn.Sequential or a module of their own, and call that"
            )
        if self._target is None or self._target.module is not target.module:
            if self._target is not None:
                detach(self._target.module)
            self._target, self._plan = None, None
            self._planned = PlannedForward(
                target.module,
                self._allowance,
                slots=self._slots,
                on_measure=self._watch.drop,
                on_plan=self._on_plan,
                on_unsupported=self._descend if self._search is not None else None,
                on_busy=self._put_off,
            )
            attach(target.module, self._planned)
        self._target = target
        if not (self._trainer is None or self._trainer.global_rank):
            level = logging.DEBUG if self._choice_due else logging.INFO
            _log.log(level, "RotorCallback plans %s. RotorCallback(module=...) names another", target)

    def _detach(self) -> None:
        self._watch.drop()
        self._save()
        if self._target is not None:
            detach(self._target.module)
        self._target = self._search = self._planned = self._trainer = self._model = None
        self._batch = []

    # ---------------------------------------------------------------- planning

    def _allowance(self, profile: Profile) -> Allowance:
        assert self._model is not None
        assert self._target is not None
        assert self._trainer is not None
        device = torch.device(profile.chain.device)
        optimizers = self._trainer.optimizers
        self._resident = ResidentMemory.of(self._model, self._target.module, optimizers, self._batch, device)
        if not self._batch:  # a tuner's trial, which is known from its forward alone
            self._resident = replace(self._resident, batch_bytes=profile.chain.input_bytes)
        self._limit_bytes = process_limit_bytes(self._limit, self._model, optimizers, self._batch, device)
        return self._current_allowance()

    def _current_allowance(self) -> Allowance:
        assert self._resident is not None
        assert self._model is not None
        assert self._trainer is not None
        # zero_grad runs between forward and backward, so gradients of the step before linger through the forward. Not so when
        # several backwards add up, or when the user decides.
        linger = self._model.automatic_optimization and self._trainer.accumulate_grad_batches == 1
        allowed = self._resident.allowance(
            self._limit_bytes, gradients_linger=linger, correction_bytes=self._correction_bytes
        )
        # Tuners take all callbacks out of the Trainer; one of them tries another batch when memory does not suffice.
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        return allowed if self in callbacks else replace(allowed, error=TrialError)

    def _process_plan(self) -> ProcessPlan:
        assert self._plan is not None
        return ProcessPlan(self._plan, self._limit_bytes, self._watch.peak_bytes, str(self._target))

    def _on_plan(self, plan: Plan) -> None:
        self._plan = plan
        self._watch.renew()
        self._report_due = True
        if self._left_out_due and not self._choice_due:
            self._tell_what_is_left_out()
        if self._in_step and not self._watch.running:
            assert self._trainer is not None
            assert self._model is not None
            self._watch.start(
                self._trainer, self._model, self._batch
            )  # from inside the first forward: what comes is the first step under the plan

    def _correct(self) -> None:
        """Closed loop: what the plan could not know shows in the measured peak."""
        excess = self._watch.backward_peak_bytes - self._limit_bytes
        if excess <= 0 or self._planned is None:
            return
        reason = f"{_MAX_CORRECTIONS} better plans did not help"
        if self._corrections < _MAX_CORRECTIONS:
            # Another plan peaks elsewhere, where what is outside of it may take more again: the steps grow.
            excess *= 2**self._corrections
            self._corrections += 1
            self._correction_bytes += excess
            try:
                self._planned.replan()
            except BudgetError as error:
                self._correction_bytes -= excess
                self._corrections = _MAX_CORRECTIONS
                reason = f"no plan saves that much: {error}"
            else:
                return
        self._watch.give_up()
        rank_zero_warn(
            f"the step took {format_bytes(self._watch.backward_peak_bytes)}, more than mem_limit {format_bytes(self._limit_bytes)}. The current plan "
            f"stays, since {reason}",
            category=RotorWarning,
        )

    # ---------------------------------------------------------------- telling

    def _tell_what_is_left_out(self) -> None:
        assert self._search is not None
        assert self._target is not None
        self._left_out_due = False
        message = self._search.what_is_left_out(self._target)
        if message is not None:
            rank_zero_warn(f"RotorCallback {message}", category=RotorWarning)

    def _log_metrics(self, trainer: pl.Trainer) -> None:
        process = self._process_plan()
        log_metrics(trainer, self._prefix, process.metrics())
        if self._progress_bar and self._model is not None:
            shown = {"rotor_overhead_%": 100 * process.plan.overhead}
            if process.measured_peak_bytes is not None:
                shown["rotor_peak_MiB"] = process.measured_peak_bytes / 2**20
            self._model.log_dict(shown, prog_bar=True, logger=False)

    def _report(self, trainer: pl.Trainer) -> None:
        """Show and log the plan that has settled."""
        self._report_due = False
        if self._plan is None or not trainer.is_global_zero:
            return
        process = self._process_plan()
        if self._log_plan:
            log_plan(trainer, self._prefix, process)
        if self._show_table:
            Console().print(process.table())

    def _hyperparameters(self) -> dict[str, Any]:
        limit = "what is free" if self._limit is None else str(self._limit)
        return {"mem_limit": limit, "module": self._module_name or "", "slots": self._slots}

    @property
    def _prefix(self) -> str:
        return type(self).__qualname__
