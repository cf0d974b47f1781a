"""Train a torchvision classifier on ImageNet inside a memory limit, with LightningCLI and RotorCallback.

python train.py fit --config resnet50.yaml --data.root /data/imagenet     the recipe of the file
python train.py fit --config resnet50.yaml                                its demo: photographs without a download, 2 CPU cores
python train.py validate --config resnet50.yaml --data.root /data/imagenet --ckpt_path last.ckpt
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

# torch's profiler, which sees memory on the CPU, would warn of blocks that are older than the profile: there always are some.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from data import ImageFolderData
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from model import ImageClassifier

from lightning_rotor.callbacks import RotorCallback
from lightning_rotor.errors import RotorError
from lightning_rotor.units import format_bytes


class ImageNetCLI(LightningCLI):
    """LightningCLI with a section ``demo`` in its configuration, which counts while ``data.root`` is null."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Without ``test`` and ``predict``: ImageNet's test images have no published classes."""
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name in ("fit", "validate")}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:  # noqa: D102
        parser.add_argument(
            "--demo",
            type=dict[str, Any] | None,
            default=None,
            help="Settings that replace those of the files while data.root is null; null for none.",
        )
        parser.link_arguments("data.train_size", "model.image_size")
        parser.link_arguments("data.channels_last", "model.channels_last")
        parser.link_arguments("data.num_classes", "model.num_classes", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Put the section ``demo`` between the files and the rest of the command line, which thereby has the last word."""
        args = sys.argv[1:] if args is None else list(args)
        self.config = parser.parse_args(args)
        chosen = self.config[self.config.subcommand]
        if chosen.data.root is None and chosen.demo:
            print("data.root is null: the demo, with the settings of the section 'demo' in place of the recipe's.")
            after_files = max((index + 1 for index in range(len(args)) if _is_file(args, index)), default=1)
            demo = ["--config", json.dumps(chosen.demo, default=_plain)]
            self.config = parser.parse_args([*args[:after_files], *demo, *args[after_files:], "--demo=null"])

    def instantiate_classes(self) -> None:
        """End with one line if a setting is wrong, such as an unknown ``model.arch``: what is built here says what it expects."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            sys.exit(str(error))

    def after_fit(self) -> None:
        """Say what came out."""
        metrics = self.trainer.callback_metrics
        for name in ("val_top1", "val_top5"):
            if name in metrics:
                print(f"{name.replace('val_top', 'top-')} accuracy   {metrics[name]:.1%}")
        for callback in self.trainer.callbacks:
            if isinstance(callback, RotorCallback) and callback.measured_peak_bytes is not None:
                print(
                    f"measured peak    {format_bytes(callback.measured_peak_bytes)} of {format_bytes(callback.budget_bytes)}"
                )


def _plain(value: Any) -> Any:
    """Sections as dicts, durations and the like as they are written."""
    return vars(value) if hasattr(value, "__dict__") else str(value)


def _is_file(args: list[str], index: int) -> bool:
    return args[index].startswith("--config=") or (index > 0 and args[index - 1] == "--config")


def main(args: list[str] | None = None) -> None:
    """Run the command line."""
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # Lightning 2.6 on torch 2.14
    try:
        ImageNetCLI(ImageClassifier, ImageFolderData, args=args)
    except RotorError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
