"""The ImageNet example: its data, its models by name, its command line, and one short training."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from PIL import Image
from torchvision.models.googlenet import GoogLeNetOutputs
from torchvision.models.inception import InceptionOutputs

from tests.grids import few

EXAMPLE = Path(__file__).parent.parent / "examples" / "imagenet"
RECIPES = sorted(EXAMPLE.glob("*.yaml"))


@pytest.fixture(scope="module")
def example():
    """Its files, imported as they import each other: by their plain names, which other examples also use."""
    names = ("photographs", "data", "model", "train")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        patch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls what jsonargparse 4.53 will drop
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        for name in names:
            del sys.modules[name]


@pytest.fixture(scope="module")
def photographs(example, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "photographs"
    example.photographs.build(folder)
    return folder


# ------------------------------------------------------------------------------------------------------------------ data


@pytest.mark.parametrize(("width", "height"), [(384, 191), (512, 512), (1411, 1411)])
def test_tiles_cover_a_photograph_without_overlap(example, width, height) -> None:
    painted = torch.zeros(height, width)
    for _, (left, upper, right, lower) in example.photographs.tiles(width, height):
        painted[upper:lower, left:right] += 1
    assert painted.eq(1).all()


def test_a_quarter_of_the_tiles_validates(example) -> None:
    splits = [split for split, _ in example.photographs.tiles(512, 512)]
    assert (splits.count("train"), splits.count("val")) == (18, 6)


def test_photographs_are_an_image_folder(example, photographs) -> None:
    data = example.data.ImageFolderData(cache=photographs.parent, train_size=64, val_size=48, val_resize=56, workers=0)
    data.prepare_data()
    data.setup("fit")
    assert data.train.classes == sorted(example.photographs.PHOTOGRAPHS)
    assert data.num_classes == len(data.train.classes)
    assert (len(data.train), len(data.val)) == (18 * data.num_classes, 6 * data.num_classes)
    assert data.train[0][0].shape == (3, 64, 64)
    assert data.val[0][0].shape == (3, 48, 48)


def test_photographs_are_built_once(example, photographs) -> None:
    before = photographs.stat().st_mtime_ns
    example.photographs.build(photographs)
    assert photographs.stat().st_mtime_ns == before
    assert [path.name for path in photographs.parent.iterdir()] == ["photographs"]


@pytest.mark.parametrize("alphas", [(0.2, 0.0), (0.0, 1.0), (0.2, 1.0)])
@pytest.mark.parametrize("auto_augment", [None, "ta_wide", "ra", "augmix", "imagenet"])
def test_every_augmentation_makes_a_batch(example, photographs, alphas, auto_augment) -> None:
    data = example.data.ImageFolderData(
        photographs,
        batch_size=4,
        workers=0,
        train_size=32,
        auto_augment=auto_augment,
        random_erasing=0.5,
        mixup_alpha=alphas[0],
        cutmix_alpha=alphas[1],
    )
    data.setup("fit")
    images, classes = next(iter(data.train_dataloader()))
    assert images.shape == (4, 3, 32, 32)
    assert images.dtype == torch.float32
    torch.testing.assert_close(classes.sum(dim=1), torch.ones(4))


def test_root_without_classes_says_what_is_expected(example, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"holds 0 classes: expected train/<class>/\*\.JPEG"):
        _ = example.data.ImageFolderData(tmp_path).num_classes


def test_classes_of_both_splits_must_agree(example, tmp_path) -> None:
    make_images(tmp_path, {"train": ["cat", "dog"], "val": ["cat", "cow"]})
    with pytest.raises(ValueError, match="2 are in one only: cow, dog"):
        example.data.ImageFolderData(tmp_path).setup("fit")


def make_images(root: Path, classes: dict[str, list[str]]) -> None:
    for split, names in classes.items():
        for name in names:
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (40, 40), (60 * number, 50, 50)).save(folder / f"{number}.JPEG")


# ----------------------------------------------------------------------------------------------------------------- model


def test_unknown_architecture_lists_close_ones(example) -> None:
    with pytest.raises(ValueError, match=r"model\.arch is 'resnet5O'.* Close to it: resnet50"):
        example.model.build_model("resnet5O", num_classes=10, image_size=64)


@pytest.mark.parametrize("arch", ["shufflenet_v2_x0_5", "vit_b_16", "maxvit_t", "googlenet", "inception_v3"])
def test_models_are_built_by_name(example, arch) -> None:
    with torch.device("meta"):
        module = example.model.build_model(arch, num_classes=3, image_size=224)
    assert list(module.parameters())[-1].shape[0] == 3


def test_recipes_name_models_that_exist(example) -> None:
    known = example.model.architectures()
    assert {yaml.safe_load(path.read_text())["model"]["arch"] for path in RECIPES} <= set(known)


def test_auxiliary_heads_add_to_the_loss_with_their_weights(example) -> None:
    def loss(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return logits

    def total(outputs):
        return float(example.model.with_auxiliary(loss, outputs, None))

    one, ten, hundred = torch.tensor(1.0), torch.tensor(10.0), torch.tensor(100.0)
    assert total(one) == 1
    assert total(InceptionOutputs(one, ten)) == pytest.approx(1 + 0.4 * 10)
    assert total(GoogLeNetOutputs(one, ten, hundred)) == pytest.approx(1 + 0.3 * 110)
    assert total(InceptionOutputs(one, None)) == 1


def test_weight_decay_spares_norms_biases_scales_and_embeddings(example) -> None:
    for arch in ("vit_b_16", "convnext_tiny", "swin_t"):
        with torch.device("meta"):
            module = example.model.build_model(arch, num_classes=10, image_size=32)
        decayed, others = example.model.split_for_decay(module)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        assert len(decayed) + len(others) == len(names)
        assert all(names[id(parameter)].endswith("weight") for parameter in decayed)
        spared = " ".join(names[id(parameter)] for parameter in others)
        assert {"vit_b_16": "pos_embedding", "convnext_tiny": "layer_scale", "swin_t": "position_bias_table"}[arch] in spared  # fmt: skip


def test_learning_rate_rises_and_falls_to_zero(example) -> None:
    factors = [example.model.warmup_then_cosine(step, steps=10, warmup=4, start=0.2) for step in range(11)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[7] == pytest.approx(0.5)
    assert factors[10] == pytest.approx(0)


# ---------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(
    "recipe", few(RECIPES, EXAMPLE / "pipeline.yaml", EXAMPLE / "resnet50.yaml"), ids=lambda path: path.stem
)
def test_recipes_parse_and_round_trip(example, recipe, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit, match="0"):
        example.train.main(["fit", "--config", str(recipe), "--data.root=/data/imagenet", "--print_config"])
    printed = capsys.readouterr().out
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    with pytest.raises(SystemExit, match="0"):
        example.train.main(["fit", "--config", str(again), "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(printed)
    assert yaml.safe_load(printed)["model"]["arch"] == ("resnet50" if recipe.stem == "pipeline" else recipe.stem)


def test_demo_replaces_the_recipe_and_the_command_line_both(example, capsys) -> None:
    recipe = f"--config={EXAMPLE / 'resnet50.yaml'}"
    parsed = {}

    class Parsed(example.train.ImageNetCLI):
        def instantiate_classes(self) -> None:
            parsed.update(self.config.fit.as_dict())

        def _run_subcommand(self, subcommand) -> None:
            pass

    def parse(*args: str):
        Parsed(example.model.ImageClassifier, example.data.ImageFolderData, args=["fit", *args])
        return parsed["data"]["batch_size"], parsed["trainer"]["precision"]

    written = yaml.safe_load((EXAMPLE / "resnet50.yaml").read_text())
    recipe_batch, demo_batch = written["data"]["batch_size"], written["demo"]["data"]["batch_size"]
    assert parse(recipe, "--data.root=/data/imagenet") == (recipe_batch, "bf16-mixed")
    assert "the demo" not in capsys.readouterr().out
    assert parse(recipe) == (demo_batch, "32-true")
    assert "data.root is null: the demo" in capsys.readouterr().out
    assert parsed["demo"] is None  # so that a saved configuration says what ran, and runs the same again
    assert parse(recipe, "--data.batch_size=7") == (7, "32-true")
    assert parse(recipe, "--demo=null") == (recipe_batch, "bf16-mixed")


def test_unknown_architecture_ends_the_command_with_one_line(example, in_folder) -> None:
    with pytest.raises(SystemExit, match=r"^model\.arch is 'shufflenet'.* Close to it: shufflenet_v2"):
        example.train.main(["fit", "--seed_everything=0", "--model.arch=shufflenet"])


def test_demo_trains_and_validates_inside_the_limit(example, photographs, in_folder, capsys) -> None:
    example.train.main(
        [
            "fit",
            f"--config={EXAMPLE / 'resnet50.yaml'}",
            f"--data.cache={photographs.parent}",
            "--model.arch=shufflenet_v2_x0_5",
            "--trainer.limit_train_batches=2",
            "--trainer.max_epochs=1",
            "--trainer.check_val_every_n_epoch=1",
            "--trainer.enable_progress_bar=false",
            "--trainer.callbacks.mem_limit=25MiB",
        ]
    )
    printed = capsys.readouterr().out
    assert "Recomputation plan" in printed
    assert "top-1 accuracy" in printed
    assert "top-5 accuracy" in printed
    measured, limit = re.findall(r"measured peak +([\d.]+) MiB of ([\d.]+) MiB", printed)[0]
    assert float(measured) <= float(limit) == 25


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # of ModelCheckpoint, since each run has its folder
@pytest.mark.wide
def test_two_classes_and_a_checkpoint_that_validates_again(example, in_folder, capsys) -> None:
    make_images(in_folder / "images", {"train": ["cat", "dog"], "val": ["cat", "dog"]})
    small = [
        f"--config={EXAMPLE / 'convnext_tiny.yaml'}",
        "--data.root=images",
        "--data.batch_size=4",
        "--data.workers=0",
        "--data.train_size=64",
        "--data.val_size=64",
        "--data.val_resize=64",
        "--model.arch=shufflenet_v2_x0_5",
        "--trainer.accelerator=cpu",
        "--trainer.precision=32-true",
        "--trainer.max_epochs=1",
        "--trainer.limit_train_batches=2",
        "--trainer.limit_val_batches=2",
        "--trainer.enable_progress_bar=false",
        "--trainer.callbacks.mem_limit=1GiB",
    ]
    example.train.main(["fit", *small])
    assert "top-5 accuracy   100.0%" in capsys.readouterr().out  # of two classes
    (checkpoint,) = in_folder.rglob("last.ckpt")
    example.train.main(["validate", *small, f"--ckpt_path={checkpoint}"])
    assert "val_top1" in capsys.readouterr().out


@pytest.fixture
def in_folder(tmp_path, monkeypatch) -> Path:
    """The directory where a training that the test starts leaves its files."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
