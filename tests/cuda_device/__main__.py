"""Runs Python on simulated devices: ``python -m tests.cuda_device --devices 2 -m pytest -m gpu -n0``."""

from __future__ import annotations

import argparse
import os
import sys

from lightning_rotor.units import parse_bytes
from tests.cuda_device import environment

parser = argparse.ArgumentParser(prog="python -m tests.cuda_device", description=__doc__, allow_abbrev=False)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--memory", type=parse_bytes, default=80 * 2**30, help="of each, such as 2GiB")
parser.add_argument("--capability", default="8.0")
parser.add_argument("--copies", choices=("now", "late", "early"), default="now", help="of side streams")
options, command = parser.parse_known_args()
os.execve(sys.executable, [sys.executable, *command], environment(**vars(options)))
