"""The same training through LightningCLI, with the callback configured in YAML: ``python cli.py fit --config config.yaml``."""

from __future__ import annotations

from data import DigitData
from lightning.pytorch.cli import LightningCLI
from model import DigitClassifier

if __name__ == "__main__":
    LightningCLI(DigitClassifier, DigitData)
