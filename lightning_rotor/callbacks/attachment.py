"""Which module of a LightningModule is planned, and its forward under the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_rotor.callbacks.dry_step import best_by_compute
from lightning_rotor.callbacks.ranks import same_target
from lightning_rotor.capture.compiled import is_compiled, taken_apart
from lightning_rotor.capture.modules import require_untraced
from lightning_rotor.errors import ModelError, RotorWarning
from lightning_rotor.execution.recomputation import is_recomputing
from lightning_rotor.planned.cache import model_fingerprint
from lightning_rotor.planned.forward import PlannedForward, attach, detach, is_attached
from lightning_rotor.planned.target import Target, TargetSearch, may_be_planned, named_target
from lightning_rotor.private.lightning_names import is_compiled as is_compiled_whole
from lightning_rotor.private.torch_names import INNER

# ----------------------------------------------------------------------------------------------------
# What a fit leaves for the next one: in a checkpoint, or on the callback itself.


@dataclass(frozen=True, slots=True)
class SavedPlans:
    """Measurements and plans for one module, in plain types alone, so that checkpoints load with ``weights_only=True``.

    Attributes:
        module: Dotted name of the module in its model.
        model: Its fingerprint.
        corrections: What the closed loop had found out, from :attr:`.process_limit.ProcessLimit.corrections`.
        ceiling_bytes: The most that a plan may take since the device ran out of memory, or None.
        records: From :meth:`lightning_rotor.planned.forward.PlannedForward.records`.
    """

    module: str
    model: str
    corrections: dict[str, list[int]]
    ceiling_bytes: int | None
    records: list[dict[str, Any]]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SavedPlans | None:
        """The state of a callback, or None if it is of another version of this package."""
        try:
            return cls(**state)
        except TypeError:
            return None

    def to_state(self) -> dict[str, Any]:
        """The state of a callback."""
        return asdict(self)

    def target_in(self, model: nn.Module) -> Target | None:
        """The module in a model, or None if there is no such module in it."""
        module = dict(model.named_modules()).get(self.module)
        if module is None or not may_be_planned(module):
            return None
        target = Target(self.module, module, "as before")
        return target if self.are_for(target) else None

    def are_for(self, target: Target) -> bool:
        """Whether a module has their name, and is made like the one that they are for."""
        return target.name == self.module and model_fingerprint(target.module) == self.model


# ----------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------
# ``self.log`` inside of a planned module counts once: what is measured or recomputed logs nothing.


def log(self: LightningModule, *args: Any, **kwargs: Any) -> None:
    """Stands in for ``type(self).log``. Bound, and named like it, so that copies and pickles of the module get their own."""
    require_untraced("it logs (self.log), which no trace would do again")
    if not is_recomputing():
        type(self).log(self, *args, **kwargs)


def hush(model: pl.LightningModule) -> None:
    """Let a model, and those inside of it, log nothing while their code runs again."""
    for module in model.modules():
        if isinstance(module, LightningModule) and "log" not in module.__dict__:
            module.__dict__["log"] = MethodType(log, module)


def unhush(model: pl.LightningModule) -> None:
    """Undo :func:`hush`."""
    for module in model.modules():
        if getattr(module.__dict__.get("log"), "__func__", None) is log:
            del module.__dict__["log"]
