"""The import graph: one direction, a core without Lightning, planning without torch, matplotlib only when something is drawn."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, run_python

PACKAGE = ROOT / "lightning_rotor"

# A part is a module or a folder. Each may import those that stand before it.
ORDER = (
    *(
        "errors",
        "units",
        "shown",
        "chain",
        "schedule",
        "link",
        "offload",
        "live_memory",
        "simulator",
        "planning",
    ),  # numbers alone, without torch
    *("devices", "private", "compiling", "skip", "stages", "execution", "invertible", "capture", "profiling"),
    *("memory", "planned", "pipeline", "advising", "report", "checkpointable", "callbacks", "strategies", "__main__"),
)
WITH_LIGHTNING = {"callbacks", "strategies"}
# Modules and folders.
WITHOUT_TORCH = {
    *ORDER[: ORDER.index("devices")],
    "pipeline/partition",
    "pipeline/pipeline_schedule",
    "pipeline/pipeline_simulator",
    "pipeline/stage_loads",
    "pipeline/step_times",
    "pipeline/device_levels",
    "pipeline/device_speeds",
    "planned/step_state",
}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "torchmetrics"}

MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """``planning`` for planning/plan.py, ``chain`` for chain.py, ``__init__`` for the package itself."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Absolute names of all imported modules with their lines, inside functions and under TYPE_CHECKING as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            assert node.module is not None
            # `from lightning_rotor import chain` imports a module, `from lightning_rotor.chain import Chain` a name.
            names = [alias.name for alias in node.names] if node.module == PACKAGE.name else [""]
            yield from ((f"{node.module}.{name}".rstrip("."), node.lineno) for name in names)


def imports_at_import_time(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The same for what runs when the module is imported: not the bodies of functions, not ``if TYPE_CHECKING``."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports(node)
        else:
            pending.extend(ast.iter_child_nodes(node))


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_the_order_names_every_part():
    assert {part_of(path) for path in MODULES} == {"__init__", *ORDER}


PACKAGES = sorted(path.parent for path in MODULES if path.name == "__init__.py" and path.parent != PACKAGE)
# In backticks, or in front of what a table of a literal block says.
NAMED = re.compile(r"`([a-z][a-z0-9_]*)`|^ {4,}([a-z0-9_]+(?:, [a-z0-9_]+)*) {2,}\S", re.MULTILINE)
# Functions that docstrings of packages name as well.
NO_FILES = {"invertible_checkpoint", "isinstance", "limit_error", "meter_for"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_docstring_of_a_package_names_its_files_and_no_others(package: Path) -> None:
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    named = set()
    for quoted, in_table in NAMED.findall(docstring):
        named.update((quoted or in_table).split(", "))
    files = {path.stem for path in package.glob("*.py")} - {"__init__"}
    files |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert named - NO_FILES == files


def tables_of_contributing() -> str:
    """The tables of CONTRIBUTING.md that say where things are."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text[text.index("## Where does it happen") : text.index("## How measurements are made")]


def test_contributing_names_files_that_exist() -> None:
    paths = re.findall(r"`([a-z_]+(?:/[a-z_]*)*(?:\.py|\.md|/))`", tables_of_contributing())
    assert len(paths) > 50
    missing = [path for path in paths if not any((folder / path).exists() for folder in (PACKAGE, ROOT))]
    assert not missing, missing


def test_contributing_names_functions_of_the_files_before_them() -> None:
    found = re.findall(r"`([a-z_/]+\.py)`: ((?:`\w+`(?:, )?)+)", tables_of_contributing())
    assert len(found) > 25
    wrong = []
    for path, quoted in found:
        tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
        names = set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
        wrong += [f"{path}: {name}" for name in re.findall(r"\w+", quoted) if name not in names]
    assert not wrong, wrong


def test_imports_run_one_way():
    wrong = []
    for path in MODULES:
        part = part_of(path)
        if part == "__init__":  # the package itself, which gathers the public names
            continue
        for name, line in imports(ast.parse(path.read_text())):
            package, _, rest = name.partition(".")
            imported = rest.partition(".")[0]
            if package == PACKAGE.name and imported not in {"__version__", part, *ORDER[: ORDER.index(part)]}:
                wrong.append(f"{where(path, line)} imports {name}, which stands behind {part} in ORDER")
    assert not wrong, "\n".join(wrong)


def test_only_callbacks_and_strategies_import_lightning():
    wrong = [
        f"{where(path, line)} imports {name}"
        for path in MODULES
        if part_of(path) not in WITH_LIGHTNING
        and path.name != "lightning_packages.py"  # imports it where a callback asks
        for name, line in imports(ast.parse(path.read_text()))
        if name.partition(".")[0] in LIGHTNING
    ]
    assert not wrong, "\n".join(wrong)


def is_without_torch(module: str) -> bool:
    """True if a module of the package, with slashes, is listed or in a folder that is."""
    return any(module == part or module.startswith(part + "/") for part in WITHOUT_TORCH)


def test_planning_and_its_data_import_no_torch():
    for path in MODULES:
        if not is_without_torch(str(path.relative_to(PACKAGE).with_suffix(""))):
            continue
        for name, line in imports(ast.parse(path.read_text())):
            package, _, rest = name.partition(".")
            assert package not in {"torch", "torchvision"}, f"{where(path, line)} imports {name}"
            if package == PACKAGE.name:
                assert is_without_torch(rest.replace(".", "/")), (
                    f"{where(path, line)} imports {name}, which needs torch"
                )


def test_matplotlib_is_imported_only_by_functions_that_draw():
    wrong = [
        f"{where(path, line)} imports {name} when it is imported"
        for path in MODULES
        for name, line in imports_at_import_time(ast.parse(path.read_text()))
        if name.partition(".")[0] in {"matplotlib", "mpl_toolkits"}
    ]
    assert not wrong, "\n".join(wrong)


TIMED_IMPORT = """
import sys, time
begin = time.process_time()
import torch
middle, known = time.process_time(), set(sys.modules)
import lightning_rotor
print(middle - begin, time.process_time() - middle, *sorted({name.partition(".")[0] for name in set(sys.modules) - known}))
"""


def test_to_import_the_package_takes_little_beside_torch():
    """0.15 seconds of processor time; where all is slow now, less than an eighth of what torch takes."""
    # Nearly half of it is spent in making data classes.
    heavy = {
        "lightning",
        "matplotlib",
        "numba",
        "pandas",
        "rich",
        "scipy",
        "sympy",
        "timm",
        "torchvision",
        "transformers",
    }
    for _ in range(6):
        torch_seconds, seconds, *gained = run_python("-c", TIMED_IMPORT)[0].split()
        assert not heavy & set(gained)
        if float(seconds) <= max(0.15, float(torch_seconds) / 8):
            return
    pytest.fail(f"import lightning_rotor takes {seconds} s, and torch {torch_seconds} s")


# Makes an environment without Lightning out of one that has it.
BLOCK_LIGHTNING = """
import sys

class NoLightning:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoLightning())
"""


CORE = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in MODULES
    if part_of(path) not in WITH_LIGHTNING
]
USE_THE_CORE = f"""
import importlib, json
for name in {CORE!r}:
    importlib.import_module(name)
found = {{"imported": [name for name in ("matplotlib", "numba") if name in sys.modules]}}

import torch
from torch import nn
import lightning_rotor
from lightning_rotor import Checkpointable

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
sample = torch.randn(256, 64)
model(sample).sum().backward()
plain = [parameter.grad.clone() for parameter in model.parameters()]
model.zero_grad()
Checkpointable(model, sample, mem_limit=2**20)(sample).sum().backward()
found["same"] = [torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), plain, strict=True)]
for code in ("lightning_rotor.RotorCallback", "from lightning_rotor.callbacks import RotorCallback"):
    try:
        exec(code)
    except ImportError as error:
        found[code] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def without_lightning() -> dict[str, Any]:
    """What came of the core and of the callback in a process that has no Lightning."""
    return json.loads(run_python("-W", "error::UserWarning", "-c", BLOCK_LIGHTNING + USE_THE_CORE)[0])


def test_the_core_imports_without_lightning(without_lightning):
    assert without_lightning["imported"] == []  # nothing was drawn, and no long chain planned


def test_the_core_trains_without_lightning(without_lightning):
    assert len(without_lightning["same"]) == 8
    assert all(without_lightning["same"])


@pytest.mark.parametrize(
    "code", ["lightning_rotor.RotorCallback", "from lightning_rotor.callbacks import RotorCallback"]
)
def test_the_callback_without_lightning_says_what_to_install(without_lightning, code):
    assert "RotorCallback" in without_lightning[code]
    assert "pip install lightning" in without_lightning[code]


def test_no_line_is_wider_than_120_columns() -> None:
    for path in MODULES:
        assert max(map(len, path.read_text(encoding="utf-8").splitlines()), default=0) <= 120, path


def test_benchmarks_import_nothing_of_tests_and_each_other_by_full_names() -> None:
    benchmarks = sorted((ROOT / "benchmarks").glob("*.py"))
    foreign = {
        "tests",
        "conftest",
        *(path.stem for folder in ("tests", "benchmarks") for path in (ROOT / folder).glob("*.py")),
    }
    wrong = [
        f"{where(path, line)} imports {name}"
        for path in benchmarks
        for name, line in imports(ast.parse(path.read_text(encoding="utf-8")))
        if name.partition(".")[0] in foreign
    ]
    assert not wrong, "\n".join(wrong)
