"""``make release-check``: what a release needs, tried as a user gets it.

::

    checkout ─► source distribution ─► wheel ─► empty environment ─► lightning-rotor --version, README's first example

``--borrow`` takes the dependencies from this environment instead of the registry (torch alone is gigabytes).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

import lightning_rotor
from tests.processes import ROOT

VERSION = lightning_rotor.__version__

# What the example takes for given: a LightningModule and its data.
_READER = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lightning

class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        images, classes = batch
        return nn.functional.cross_entropy(self.net(images), classes)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

model, data = Classifier(), DataLoader(TensorDataset(torch.randn(8, 16), torch.arange(8) % 4), batch_size=4)
"""


def disagreements() -> list[str]:
    """Files that name another version than the package."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"]
    changes = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    found = {"CITATION.cff": str(cited), "CHANGELOG.md": changes[1] if changes else "nothing"}
    return [
        f"{name} names {version}, and the package {VERSION}" for name, version in found.items() if version != VERSION
    ]


def is_dated() -> bool:
    """True if the changelog gives the release a date, which is set with the tag."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return re.search(rf"^## \[{re.escape(VERSION)}\] - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE) is not None


def archives(folder: Path) -> list[Path]:
    """The source distribution, and the wheel that is made from it and not from the checkout."""
    folder = folder.resolve()
    _run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder), cwd=ROOT)
    (source,) = folder.glob("*.tar.gz")
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    _run(sys.executable, "-m", "pip", "wheel", *quiet, "--wheel-dir", str(folder), str(source), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return [source, wheel]


def installed(wheel: Path, folder: Path, *, borrow: bool) -> Path:
    """The folder of programs of a new environment with the wheel."""
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    programs = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--python", str(programs / "python"), "--disable-pip-version-check")
    if borrow:
        asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(_run(str(programs / "python"), "-c", asked).strip())
        # A path alone: links to editable packages, which stand in such files there, are not followed.
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    _run(*pip, "install", "--quiet", *["--no-deps"] * borrow, str(wheel))
    return programs


def first_example() -> str:
    """The first program of the README."""
    shown = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert shown is not None
    return shown[1]


def try_out(programs: Path, folder: Path) -> list[str]:
    """What an installed package says of itself: its version, its place, and what the example prints."""
    folder.mkdir()
    said = _run(str(programs / "lightning-rotor"), "--version", cwd=folder)
    example = f"{_READER}\n{first_example()}\nimport lightning_rotor\nprint(lightning_rotor.__file__)"
    # -I: neither this checkout nor what a user's environment variables name.
    printed = _run(str(programs / "python"), "-I", "-W", "ignore", "-c", example, cwd=folder)
    *_, numbers, place = printed.splitlines()
    return [said.strip(), numbers, place]


def _run(*command: str, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)[:200]} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a release; returns 0 if it may be tagged, apart from its date."""
    parser = argparse.ArgumentParser(prog="make release-check", description=__doc__.splitlines()[0])
    parser.add_argument("--borrow", action="store_true", help="take the dependencies from this environment")
    options = parser.parse_args(arguments)
    if wrong := disagreements():
        sys.stderr.write("\n".join(wrong) + "\n")
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, wheel = archives(folder / "dist")
        programs = installed(wheel, folder / "environment", borrow=options.borrow)
        said, numbers, place = try_out(programs, folder / "elsewhere")
        inside = str((folder / "environment").resolve())
        if said != f"lightning-rotor {VERSION}" or not place.startswith(inside):
            sys.stderr.write(f"{said}, from {place}: expected lightning-rotor {VERSION} from {inside}\n")
            return 1
    sys.stdout.write(f"{said}: {wheel.name} installs into an empty environment, and README's first example prints\n")
    sys.stdout.write(f"{numbers}\n")
    if not is_dated():
        sys.stdout.write(f"before the tag: give CHANGELOG.md's section {VERSION} its date\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
