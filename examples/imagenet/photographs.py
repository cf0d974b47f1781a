"""A small image folder of real photographs, made from what scikit-learn and scikit-image bring along: no download."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import skimage.data
from PIL import Image
from sklearn.datasets import load_sample_image

ROWS, COLUMNS = 4, 6

# One photograph is one class.
PHOTOGRAPHS: dict[str, Callable[[], np.ndarray]] = {
    "astronaut": skimage.data.astronaut,
    "brick": skimage.data.brick,
    "camera": skimage.data.camera,
    "cat": skimage.data.chelsea,
    "coffee": skimage.data.coffee,
    "coins": skimage.data.coins,
    "flower": lambda: load_sample_image("flower.jpg"),
    "galaxies": skimage.data.hubble_deep_field,
    "grass": skimage.data.grass,
    "gravel": skimage.data.gravel,
    "motorcycle": lambda: skimage.data.stereo_motorcycle()[0],
    "page": skimage.data.page,
    "pagoda": lambda: load_sample_image("china.jpg"),
    "retina": skimage.data.retina,
    "rocket": skimage.data.rocket,
    "tissue": skimage.data.immunohistochemistry,
}

Box = tuple[int, int, int, int]  # left, upper, right, lower, as in PIL


def build(folder: Path) -> None:
    """Write ``folder/train/<class>/*.jpg`` and ``folder/val/<class>/*.jpg``, unless the folder is there already.

    A folder that exists is complete: it is written under another name first.
    """
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        for name, photograph in PHOTOGRAPHS.items():
            image = Image.fromarray(photograph()).convert("RGB")
            for number, (split, box) in enumerate(tiles(*image.size)):
                path = Path(scratch, "photographs", split, name, f"{number:02}.jpg")
                path.parent.mkdir(parents=True, exist_ok=True)
                image.crop(box).save(path, quality=95)
        Path(scratch, "photographs").rename(folder)


def tiles(width: int, height: int) -> Iterator[tuple[Literal["train", "val"], Box]]:
    """Cut a photograph into tiles that do not overlap, every fourth of them for validation.

    v . . . v .
    . . . v . .     Diagonals, so that each row and nearly each column has both kinds,
    . . v . . .     and pixels of validation are never trained on.
    . v . . . v
    """
    for row in range(ROWS):
        for column in range(COLUMNS):
            box = (
                column * width // COLUMNS,
                row * height // ROWS,
                (column + 1) * width // COLUMNS,
                (row + 1) * height // ROWS,
            )
            yield ("train" if (row + column) % 4 else "val"), box
