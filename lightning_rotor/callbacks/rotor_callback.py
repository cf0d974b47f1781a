"""Train a LightningModule inside a byte limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console
from torch import nn

from lightning_rotor.callbacks.attachment import Attachment, SavedPlans, hush, unhush
from lightning_rotor.callbacks.process_limit import ProcessLimit
from lightning_rotor.callbacks.ranks import Ranks
from lightning_rotor.callbacks.shown import ProcessPlan, is_logging_step, log_hyperparameters, log_metrics, log_plan
from lightning_rotor.callbacks.step_watch import StepWatch
from lightning_rotor.capture.compiled import Variants, check_variants
from lightning_rotor.errors import BudgetError, ProfilerBusyError, RotorWarning, ShortageError, TrialError, UnitError
from lightning_rotor.memory.budget import Allowance, take_workspaces
from lightning_rotor.planned.cache import MAX_PLANS, model_fingerprint
from lightning_rotor.planned.forward import PlannedForward
from lightning_rotor.planned.out_of_memory import is_shortage, shortage_message
from lightning_rotor.planning import Plan
from lightning_rotor.private.values import tensors_in
from lightning_rotor.profiling import Profile
from lightning_rotor.units import MemoryLimit, format_bytes, parse_limit


class RotorCallback(pl.Callback):
    """Keeps training inside a memory limit by recomputing activations, as few as possible, with bit-equal results.

    At the first training batch the callback measures the stages of one module, plans, and runs the plan from that very forward on. After the
    first steps it compares the allocator's peak with the limit. If something outside the module (the loss, say) needed more than was left for it,
    it plans again with less; if much was left over while the plan recomputes, with more.

    A new input shape gets a plan within the step. Its costs follow from those that were measured, as a bound that they stay below, and the plan
    is one of those at hand; only shapes much larger than any before, and a handful of others, are measured.

    If the device runs out of memory in the module's forward all the same, that forward runs again under a smaller plan, to the same bits.

    Args:
        mem_limit: What the whole training process may use on the device: parameters, gradients, optimizer state, the batch and activations.
            Bytes, ``"20GiB"``, ``"10GB"``, a fraction of the device such as ``0.8`` or ``"80%"``, or None for what is free. On a GPU it bounds
            what PyTorch allocates (``torch.cuda.max_memory_allocated``). What its caching allocator reserves beyond that comes on top, as does the
            CUDA context: nvidia-smi shows all three. Whatever the limit, a plan leaves room for them on the device, and inside of
            ``torch.cuda.set_per_process_memory_fraction``, which bounds what is reserved.
        module: Dotted name of the submodule to plan, such as ``"model.layers"``; ``""`` is the LightningModule itself. By default the
            submodule with most of the compute of a training step, among those that can be a chain: the FLOPs of the first batch's step are
            counted in a dry run without values, or failing that (the log says why) trainable parameters. It is the LightningModule itself
            if its forward reaches much more than any submodule.
        on_infeasible: Where no plan fits ``mem_limit``: ``"raise"`` ends training with the least limit that would do; ``"warn"`` says so once, and
            trains with the plan that takes least, as close to the limit as it gets. Then tuners of the batch size learn nothing of the limit.
        slots: Resolution of the planner: more finds better schedules in long chains, and takes longer.
        max_plans: Plans that are kept, one for each input shape, those used last. One that was dropped is made again when its shape returns.
        compiled_variants: Under which other activation memory budgets blocks that you compiled may run: ``"exact"``, those that compute the bits
            of your compiled block; ``"close"``, also those that differ from it by rounding; ``"off"``, none, and nothing is compiled again.
        show_table: Print a table of the plan after the first steps.
        progress_bar: Show overhead and measured peak in the progress bar.
        log_plan: Give the plan to loggers that take pictures and text (TensorBoard, W&B, MLflow): memory over a step as a figure, if
            matplotlib is installed, and the table of stages as text.
    Raises:
        UnitError: ``mem_limit`` is not positive, or cannot be read; ``on_infeasible`` or ``compiled_variants`` is none of those above; in
            ``setup``: ``slots`` or ``max_plans`` is not positive.
        ModelError: In ``setup``: no such module, or none that is supported. In the first training batch: it cannot be cut into stages, or
            ``training_step`` calls none that can.
        BudgetError: In the first training batch, or that of a larger shape: no schedule fits; says the least limit that would.
        ShortageError: In a training batch: the device has no memory left, whatever the plan.
    Example:
        >>> trainer = L.Trainer(callbacks=[RotorCallback(mem_limit="2GiB")])  # doctest: +SKIP

    Of several processes each keeps inside the least of their limits, the buckets of DDP included, and those with batches of the same shape run one
    plan; None is shared among those of one machine's CPU. :mod:`lightning_rotor.planned.ranks` says how, and why nobody waits in vain. Under FSDP2
    each unit inside of the planned module is one stage.

    Logs to every logger, each key after ``RotorCallback/`` (or the logger's own separator): ``overhead_percent``, ``budget_bytes``,
    ``predicted_peak_bytes``, ``measured_peak_bytes``, ``measured_reserved_bytes`` (on a GPU), ``planning_seconds``, ``recomputed_stages``.
    """

    def __init__(
        self,
        mem_limit: int | float | str | None = None,
        module: str | None = None,
        *,
        on_infeasible: Literal["raise", "warn"] = "raise",
        slots: int = 500,
        max_plans: int = MAX_PLANS,
        compiled_variants: Variants = "exact",
        show_table: bool = True,
        progress_bar: bool = False,
        log_plan: bool = True,
    ) -> None:
        super().__init__()
        if on_infeasible not in ("raise", "warn"):
            raise UnitError(f'on_infeasible is {on_infeasible!r}: expected "raise" or "warn"')
        self._limit = parse_limit(mem_limit)
        self._on_infeasible = on_infeasible
        self._module_name = module
        self._slots = slots
        self._max_plans = max_plans
        self._compiled_variants = check_variants(compiled_variants)
        self._show_table = show_table
        self._progress_bar = progress_bar
        self._log_plan = log_plan
        self._attachment: Attachment | None = None
        self._trainer: pl.Trainer | None = None
        self._model: pl.LightningModule | None = None
        self._saved: SavedPlans | None = None
        self._reset()

    def _reset(self) -> None:
        self._was_put_off = self._is_beyond = False
        self._plan: Plan | None = None
        self._planned_module = ""
        self._batch: list[torch.Tensor] = []
        self._runs: list[Plan] = []
        self._in_step = self._stepped_before = False
        self._meeting_due = True
        self._ranks = Ranks(beyond=self._on_infeasible == "warn")
        self._process = ProcessLimit(self._limit)
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
        return self._process.limit_bytes

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Predicted peak of the whole process, or None before the first plan."""
        return None if self._plan is None else self._process_plan().predicted_peak_bytes

    @property
    def measured_peak_bytes(self) -> int | None:
        """The allocator's peak in the step measured last, what was allocated before it included, or None."""
        return self._watch.peak_bytes

    @property
    def measured_reserved_bytes(self) -> int | None:
        """What a GPU's caching allocator had reserved at most in that step, blocks that it keeps for reuse included; None on the CPU."""
        return self._watch.reserved_bytes

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
        if self._attachment is None:
            self._attach(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Choose what to plan at the first batch, and measure the step if a plan is new."""
        self._batch = tensors_in(batch)
        if self._meeting_due:
            self._meeting_due = False
            take_workspaces(pl_module.device)
            own_limit_bytes = self._process.own_limit_bytes(trainer, pl_module, self._batch, pl_module.device)
            self._ranks.meet(trainer, pl_module, own_limit_bytes)
        if self._attachment is not None:
            self._attachment.choose(batch, batch_idx)
        self._runs.clear()
        self._in_step, self._stepped_before = True, trainer.global_step > 0
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
        """Read the meter, log, and plan again if the limit was exceeded, or missed by far."""
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
        if self._plan is None and self._attachment is not None and not self._was_put_off:
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
        """Give the module its own forward back; Lightning calls no ``teardown`` after an exception.

        Out of memory in a step, the next training plans with less.
        """
        if self._in_step and is_shortage(exception):
            self._note_shortage(exception)
        self._detach()

    # ---------------------------------------------------------------- checkpoints

    @property
    def state_key(self) -> str:
        """Tells callbacks for several modules of one model apart."""
        return f"{type(self).__qualname__}{ ({'module': self._module_name})!r}"

    def state_dict(self) -> dict[str, Any]:
        """What was measured and planned so far, in plain types."""
        self._save()
        return {} if self._saved is None else self._saved.to_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on without measuring again, if the model is the one that was measured."""
        saved = SavedPlans.from_state(state_dict)
        if self._attachment is None or self._model is None:
            self._saved = saved
            return
        target = None if saved is None else saved.target_in(self._model)
        if target is None:
            rank_zero_warn(
                f"the checkpoint's plan is not for this {type(self._model).__name__}: expected one for the same layers, made with this version "
                "of lightning-rotor. It is left aside, and the model is measured anew",
                category=RotorWarning,
            )
            return
        self._saved = saved
        self._attachment.move_to(target)
        if self._attachment.target.module is target.module:
            self._recall()

    def _save(self) -> None:
        attachment = self._attachment
        if attachment is not None and attachment.planned is not None and self._plan is not None:
            self._saved = SavedPlans(
                attachment.target.name,
                model_fingerprint(attachment.target.module),
                self._process.corrections,
                attachment.planned.ceiling_bytes,
                attachment.planned.records(),
            )

    def _recall(self) -> None:
        assert self._saved is not None
        assert self._attachment is not None
        assert self._attachment.planned is not None
        self._attachment.planned.recall(self._saved.records)
        self._attachment.planned.ceiling_bytes = self._saved.ceiling_bytes
        self._process.recall(self._saved.corrections)

    # ---------------------------------------------------------------- attaching

    def _attach(self, trainer: pl.Trainer, model: pl.LightningModule) -> None:
        self._trainer, self._model = trainer, model
        hush(model)
        attachment = Attachment(trainer, model, self._planned_forward)
        self._attachment = attachment
        if attachment.begin(self._module_name, self._saved):
            self._recall()

    def _planned_forward(self, module: nn.Module, on_unsupported: Any) -> PlannedForward:
        self._plan = None
        return PlannedForward(
            module,
            self._allowance,
            slots=self._slots,
            max_plans=self._max_plans,
            compiled_variants=self._compiled_variants,
            on_measure=self._watch.drop,
            on_plan=self._on_plan,
            on_run=self._runs.append,
            on_unsupported=on_unsupported,
            on_busy=self._put_off,
            on_infeasible=self._go_beyond if self._on_infeasible == "warn" else None,
            agreement=self._ranks,
        )

    def _put_off(self, error: ProfilerBusyError) -> None:
        if not self._was_put_off:
            self._was_put_off = True
            rank_zero_warn(
                f"RotorCallback runs the module plainly, whatever mem_limit says, for as long as torch's profiler records: {error}",
                category=RotorWarning,
            )

    def _go_beyond(self, error: BudgetError) -> None:
        if not self._is_beyond:
            self._is_beyond = True
            rank_zero_warn(
                f"training goes on beyond the limit, with the plan that takes least: {error}", category=RotorWarning
            )

    def _detach(self) -> None:
        self._watch.drop()
        self._save()
        if self._attachment is not None:
            self._attachment.end()
        if self._model is not None:
            unhush(self._model)
        self._attachment = self._trainer = self._model = None
        self._ranks = Ranks()
        self._batch = []

    # ---------------------------------------------------------------- planning

    def _allowance(self, profile: Profile) -> Allowance:
        assert self._attachment is not None
        assert self._model is not None
        assert self._trainer is not None
        allowed = self._process.allowance(
            profile.chain,
            self._trainer,
            self._model,
            target=self._attachment.target.module,
            batch=self._batch,
            agreed_bytes=self._ranks.limit_bytes,
            in_step=self._in_step,
        )
        # Tuners take all callbacks out of the Trainer; one of them tries another batch when memory does not suffice.
        callbacks: list[pl.Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        return allowed if self in callbacks else replace(allowed, error=TrialError)

    def _process_plan(self) -> ProcessPlan:
        assert self._plan is not None
        watch = self._watch
        return ProcessPlan(
            self._plan, self._process.limit_bytes, watch.peak_bytes, watch.reserved_bytes, self._planned_module
        )

    def _on_plan(self, plan: Plan) -> None:
        assert self._attachment is not None
        self._plan = plan
        self._planned_module = str(self._attachment.target)
        self._watch.renew()
        self._report_due = True
        self._attachment.tell_what_is_left_out()
        self._attachment.tell_what_is_taken_apart()
        if self._in_step and not self._watch.running:
            assert self._trainer is not None
            assert self._model is not None
            self._watch.start(
                self._trainer, self._model, self._batch
            )  # from inside the first forward: what comes is the first step under the plan

    def _correct(self) -> None:
        """Closed loop: what the plan could not know shows in the measured peak."""
        assert self._attachment is not None
        if self._attachment.planned is None:
            return
        settled = self._stepped_before and not self._watch.due  # with all that a step finds from those before it
        peak_bytes = self._watch.backward_peak_bytes
        reason = self._process.correct(self._attachment.planned, self._runs, peak_bytes, may_grow=settled)
        if reason is not None:
            self._watch.give_up()
            rank_zero_warn(
                f"the step took {format_bytes(peak_bytes)}, more than mem_limit {format_bytes(self._process.limit_bytes)}. The current plan "
                f"stays, since {reason}",
                category=RotorWarning,
            )

    def _note_shortage(self, exception: BaseException) -> None:
        """Outside of the planned forward nothing can run again: some gradients are added already, and the graph in between is gone."""
        planned = None if self._attachment is None else self._attachment.planned
        if planned is None or self._plan is None:
            return
        process = self._process_plan()
        consequence = "the next training with this callback plans with less" if planned.lower_ceiling() else None
        if not isinstance(exception, ShortageError):
            reason = "A step cannot run again from where it failed"
            message = shortage_message(
                exception,
                reason if consequence is None else f"{reason}, but {consequence}",
                limit_bytes=process.limit_bytes,
                predicted_bytes=process.predicted_peak_bytes,
            )
        elif consequence is not None:  # the error says all the rest
            message = f"the device has less than mem_limit {format_bytes(process.limit_bytes)}: {consequence}"
        else:
            return
        rank_zero_warn(f"RotorCallback: {message}", category=RotorWarning)

    # ---------------------------------------------------------------- telling

    def _log_metrics(self, trainer: pl.Trainer) -> None:
        if not (self._progress_bar or is_logging_step(trainer)):
            return
        process = self._process_plan()
        if is_logging_step(trainer):
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
