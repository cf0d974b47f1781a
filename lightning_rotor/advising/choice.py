"""One way to train on some devices, with what it takes and how long a step lasts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["one device", "DDP", "FSDP2", "pipeline"]
Limit: TypeAlias = Literal["compute", "recomputation", "link", "bubble"]


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a step, by what a device does in them.

    Attributes:
        compute: Forward and backward as in plain training, and the optimizer's step.
        recomputation: Forwards that run again.
        link: Waits for messages, as far as nothing is computed meanwhile.
        bubble: Waits for other stages of a pipeline.
    """

    compute: float
    recomputation: float = 0.0
    link: float = 0.0
    bubble: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.recomputation + self.link + self.bubble

    @property
    def limited_by(self) -> Limit:
        """The part of the step that takes most beside compute, if that is a tenth of the step or more; else compute."""
        others: dict[Limit, float] = {
            "recomputation": self.recomputation,
            "link": self.link,
            "bubble": self.bubble,
        }
        largest = max(others, key=others.__getitem__)
        # Compute is most of nearly every step. To say so each time would not tell what to change.
        if others[largest] >= 0.1 * self.total:
            return largest
        return "compute"


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to train that fits.

    Attributes:
        kind: The strategy.
        devices: In use.
        batch_per_device: Samples of a device's batch in a step; of a pipeline, of all its devices together.
        accumulated: Batches of which a step adds up the gradients, ``batch_per_device`` being all of these together.
        copies: Parts of the batch that are computed at once, each by a copy of the model, whole or spread.
        shards: Devices over which FSDP2 spreads parameters; where these are not all, others have copies (HSDP).
        stages: Devices of a pipeline; 1 for others.
        schedule: Of a pipeline, else empty.
        micro_batches: Of a pipeline, else 1.
        reshard: FSDP2 gives up a unit's parameters between its forward and its backward.
        recomputed: Stages of the chain that run again, of ``chain_length``.
        peak_bytes: Most that training holds on any of the devices, by the simulators of plans.
        seconds: Of a step.
        lines: Python to run it.
    """

    kind: Kind
    devices: int
    batch_per_device: int
    peak_bytes: int
    seconds: StepSeconds
    lines: str
    copies: int = 1
    shards: int = 1
    accumulated: int = 1
    stages: int = 1
    schedule: str = ""
    micro_batches: int = 1
    reshard: bool | None = None
    recomputed: int = 0
    chain_length: int = 0

    @property
    def name(self) -> str:
        """A few words: ``"FSDP2, reshard=False"``, ``"FSDP2 of 8, x 4, reshard=True"``, ``"pipeline of 4, 1f1b"``."""
        if self.kind == "FSDP2" and 1 < self.shards < self.devices:
            return f"FSDP2 of {self.shards}, x {self.devices // self.shards}, reshard={self.reshard}"
        if self.kind == "FSDP2":
            return f"FSDP2, reshard={self.reshard}"
        if self.kind != "pipeline":
            return self.kind
        name = f"pipeline of {self.stages}, {self.schedule}"
        if self.copies > 1:
            name += f", x {self.copies} DDP"
        return name
