"""Plans from the command line, on this machine's devices or for one that is not there.

::

    python -m lightning_rotor plan --model torchvision.models.resnet101 --input 64x3x224x224 --budget 4GiB
    python -m lightning_rotor plan --model gpt.py:large --input 8x1024:int64 --device meta --gpu H100 --optimizer adamw --curve
"""

from lightning_rotor.command_line.main import main

__all__ = ["main"]
