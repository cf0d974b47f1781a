"""Which module of a LightningModule is planned, and its forward under the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_rotor.attaching import attach, detach, is_attached
from lightning_rotor.callbacks.dry_step import best_by_compute
from lightning_rotor.callbacks.ranks import same_target
from lightning_rotor.callbacks.saved_plans import SavedPlans
from lightning_rotor.compiled import is_compiled, taken_apart
from lightning_rotor.errors import ModelError, RotorWarning
from lightning_rotor.planned import PlannedForward
from lightning_rotor.private.lightning_names import is_compiled as is_compiled_whole
from lightning_rotor.private.torch_names import INNER
from lightning_rotor.target import Target, TargetSearch, named_target

_log = logging.getLogger(__name__)


class Attachment:
    """Attached to one module of a model at a time, from the start of a training to its end.

    What has most of the compute shows in the first batch. That a tuner may never bring here, so there is a first guess.

    Args:
        trainer: Whose training it is.
        model: What it trains.
        make: Makes the planned forward of a module; the second argument is what to do if that turns out to be no chain.
    Attributes:
        target: What is attached to.
        planned: Its forward.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        model: pl.LightningModule,
        make: Callable[[nn.Module, Callable[[ModelError], None] | None], PlannedForward],
    ) -> None:
        self._trainer = trainer
        self._model = model
        self._make = make
        self._search: TargetSearch | None = None
        self._choice_due = self._left_out_due = self._taken_apart_due = False
        self._is_compiled = is_compiled_whole(model)
        self.target: Target
        self.planned: PlannedForward | None = None

    def begin(self, module_name: str | None, saved: SavedPlans | None) -> bool:
        """Attach to the module that the user named, the one that plans were saved for, or a first guess. Whether the plans are for it."""
        if module_name is not None:
            self._attach_to(named_target(self._model, module_name))
            return saved is not None and saved.are_for(self.target)
        # Compiled as a whole, it leaves its forward to torch.compile.
        may_be_whole = is_overridden("forward", self._model) and not self._is_compiled
        self._search = TargetSearch(self._model, may_be_whole=may_be_whole)
        known = None if saved is None else saved.target_in(self._model)
        if known is None:
            self._choice_due = self._left_out_due = True
        self._attach_to(known or self._search.best())
        return known is not None

    def move_to(self, target: Target) -> None:
        """The module of saved plans is the choice, unless the user names one."""
        if self._search is not None:
            self._choice_due = self._left_out_due = False
            self._attach_to(target)

    def choose(self, batch: Any, batch_idx: int) -> None:
        """Decide by the first batch, if that is not done."""
        if not self._choice_due:
            return
        assert self._search is not None
        self._choice_due = False
        found = best_by_compute(self._search, self._trainer, self._model, batch, batch_idx)
        self._attach_to(same_target(self._trainer, self._model, found))

    def tell_what_is_taken_apart(self) -> None:
        """Warn, once, if the target was compiled and does not stay so."""
        if self._taken_apart_due and not self._choice_due:
            self._taken_apart_due = False
            compiled = "the LightningModule" if self._is_compiled else self.target.place
            rank_zero_warn(f"RotorCallback: {taken_apart(compiled)}", category=RotorWarning)

    def tell_what_is_left_out(self) -> None:
        """Warn, once, of other modules with a notable share of the compute."""
        if not self._left_out_due or self._choice_due:
            return
        assert self._search is not None
        self._left_out_due = False
        message = self._search.what_is_left_out(self.target)
        if message is not None:
            rank_zero_warn(f"RotorCallback {message}", category=RotorWarning)

    def end(self) -> None:
        """Give the module its own forward back."""
        if self.planned is not None:
            detach(self.target.module)

    def _check_apart(self, target: Target) -> None:
        """No module is planned inside of another one."""
        inside = set(target.module.modules())
        for name, module in self._model.named_modules():
            if (
                module is not target.module
                and is_attached(module)
                and (module in inside or target.module in module.modules())
            ):
                raise ModelError(
                    f"two plans would work on the same layers: one on {target.place}, the other on {name!r}. Expected modules apart from each "
                    "other, or one RotorCallback on the larger one, which plans what is inside of it, too"
                )

    def _descend(self, error: ModelError) -> None:
        """From inside the first forward: the target turned out to be no chain, so try the next."""
        assert self._search is not None
        self._search.refuse(self.target)
        found = self._search.best()
        if found is None:
            raise error
        _log.info("RotorCallback cannot plan %s: %s", self.target.place, error)
        self._attach_to(found)

    def _attach_to(self, target: Target | None) -> None:
        if target is None:
            raise ModelError(
                f"{type(self._model).__name__} holds no submodule with several layers and trainable parameters that its training_step calls: "
                "expected one. Put the layers that take most of the memory into an nn.Sequential or a module of their own, and call that"
            )
        if self.planned is None or self.target.module is not target.module:
            self.end()
            self.planned = None
            self._check_apart(target)
            planned = self._make(target.module, self._descend if self._search is not None else None)
            attach(target.module, planned)
            self.planned = planned
            self._taken_apart_due = is_compiled(target.module) or target.name.endswith(INNER) or self._is_compiled
        self.target = target
        if not self._trainer.global_rank:
            level = logging.DEBUG if self._choice_due else logging.INFO
            _log.log(level, "RotorCallback plans %s. RotorCallback(module=...) names another", target)
