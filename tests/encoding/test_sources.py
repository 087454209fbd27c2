"""Folders and `datasets` as sources of images: what a job uses, does not use, refuses, or finds
odd."""

import os
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from PIL import features

from encoding import images
from encoding.images import EXTENSIONS
from encoding.sources import list_images
from tests.harness.refusals import expect_refusal
from tests.harness.sets import PNG, label_images, read_keys, save_files, write_tar

ROW = {"bytes": PNG, "path": None}


def save_rows(path, form=None, class_names=None, **columns):
    """Saves rows of `datasets`; columns named image… hold PNGs."""
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict(columns)
    for name in columns:
        if name.startswith("image"):
            dataset = dataset.cast_column(name, datasets.Image())
    if class_names:
        dataset = dataset.cast_column("label", datasets.ClassLabel(names=class_names))
    dataset.with_format(form).save_to_disk(path)
    return path


# The plan's description


def test_the_plan_states_classes_and_what_is_not_used(tmp_path):
    used = ["cat/1.png", "cat/2.png", "cat/old.jpg/4.png", "dog/deep/er/3.jfif"]
    save_files(tmp_path, *used, "top.png", "cat/x.tar", "cat/a.txt", "cat/b.TXT", "LICENSE")
    save_files(tmp_path, "none/a.txt", ".git/x.png", "cat/._1.png")
    save_files(tmp_path, "dog/empty.png", content=b"")
    for name, target in (("gone.png", "nowhere.png"), ("again", "../dog"), ("self", "self")):
        os.symlink(target, tmp_path / "dog" / name)
    os.mkfifo(tmp_path / "dog" / "pipe.png")
    listed = list_images(tmp_path)
    assert read_keys(listed) == used
    first, classes, unused = listed.describe("photos", 3).splitlines()
    assert first == "4 images of 2 classes in photos, 3 to encode"
    assert classes == "  cat: 3, dog: 1"
    assert set(unused.removeprefix("  not used: ").split("; ")) == {
        "3 .txt (e.g. cat/a.txt)",
        "2 hidden (e.g. .git)",
        "3 symlinks to nothing or in a circle (e.g. dog/again)",
        "1 empty files (e.g. dog/empty.png)",
        "1 neither file nor folder (e.g. dog/pipe.png)",
        "1 images in the root beside class folders (e.g. top.png)",
        "1 folders named like images (only what is in them) (e.g. cat/old.jpg)",
        "1 top folders without images (e.g. none)",
        "1 without extension (e.g. LICENSE)",
        "1 .tar (e.g. cat/x.tar)",
    }


@pytest.mark.parametrize(
    "names", [("Training", "Test"), ("TRAIN", "test_set", "extra"), ("train",)]
)
def test_folders_of_splits_are_no_classes(tmp_path, names):
    save_files(tmp_path, *(f"{name}/cat/1.png" for name in names))
    keys = ("source", "held_out")[: len(names)]
    words = " ".join(rf"{key}=\S+/{name}" for key, name in zip(keys, names, strict=False))
    with expect_refusal(rf"which are parts of a set and no classes; name {words}\.$"):
        list_images(tmp_path)
    assert "note: images of" in list_images(tmp_path, "none").describe("x", 1)


def test_class_folders_two_levels_deep_are_merged_with_a_note(tmp_path):
    save_files(tmp_path, "apple/red/1.png", "apple/green/1.png", "pear/1.png", "plum/images/1.png")
    (note,) = list_images(tmp_path).notes
    assert note.startswith("2 subfolders are merged into 1 class (apple); if the subfolders are ")


def test_a_stray_tar_beside_class_folders_is_refused(tmp_path):
    write_tar(save_files(tmp_path, "cat/1.png", "dog/1.png") / "stray.tar", label_images(0))
    with expect_refusal(
        r"holds both stray\.tar and images such as cat/1\.png; take the tar, source="
    ):
        list_images(tmp_path)


# Without classes


def test_a_flat_folder_needs_classes_none(tmp_path):
    save_files(tmp_path, "b.png", "a.png", "notes.txt")
    with expect_refusal(
        r"holds 2 images and no class folders; .* take classes=none to train without"
    ):
        list_images(tmp_path)
    listed = list_images(save_files(tmp_path, "deep/c.png"), "none")
    assert (read_keys(listed), listed.class_names) == (["a.png", "b.png", "deep/c.png"], [])
    assert {entry.label for entry in listed.entries} == {0}


@pytest.mark.parametrize("labels", [["cat", "dog"], [0.5, 1.0], [0, 5], [0, None]])
def test_rows_whose_labels_are_no_class_indices_are_refused(tmp_path, labels):
    save_rows(tmp_path / "rows", image=[ROW] * 2, label=labels)
    with expect_refusal(r"row \d has the label .*, and there are 2 images; number the classes"):
        list_images(tmp_path / "rows")
    assert len(list_images(tmp_path / "rows", "none").entries) == 2


@pytest.mark.parametrize("form", [None, "numpy"])
def test_rows_have_images_labels_and_names_in_any_format(tmp_path, form):
    other = ROW | {"bytes": PNG * 2}
    save_rows(tmp_path / "rows", form, ["cat", "dog"], image=[ROW, other], label=[1, 0])
    listed = list_images(tmp_path / "rows")
    assert listed.class_names == ["cat", "dog"]
    assert [entry.label for entry in listed.entries] == [1, 0]
    assert images.read_image(listed.entries[1]) == PNG * 2


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (["image", "image2", "label"], "2 columns of images among image, image2, label"),
        (["image", "text"], "0 columns of class labels among image, text"),
    ],
)
def test_columns_that_cannot_be_told_apart_are_refused(tmp_path, columns, sentence):
    values = {"image": ROW, "image2": ROW, "label": 0, "text": "x"}
    save_rows(tmp_path / "rows", **{name: [values[name]] for name in columns})
    with expect_refusal(f"has {sentence}; keep exactly one"):
        list_images(tmp_path / "rows")


def test_a_folder_of_splits_asks_which(tmp_path):
    for name in ("test", "train"):
        save_rows(tmp_path / name, image=[ROW], label=[0])
    with expect_refusal("holds the splits test, train; name source=.*/train held_out=.*/test\\.$"):
        list_images(tmp_path)


def test_parquet_of_a_hub_becomes_a_folder_by_the_advice(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = datasets.load_from_disk(save_rows(tmp_path / "rows", image=[ROW], label=[0]))
    rows.to_parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
    with expect_refusal("1 .parquet .* Save it with datasets: load_dataset") as error:
        list_images(tmp_path / "hub")
    (advice,) = re.findall(r"load_dataset.*new>..", str(error.value))
    eval(f"datasets.{advice}".replace("<new>", f"{tmp_path}/new"))
    assert len(list_images(tmp_path / "new").entries) == 1


def test_a_broken_folder_of_datasets_is_a_sentence(tmp_path):
    pytest.importorskip("datasets")
    with expect_refusal("is a broken folder of datasets"):
        list_images(save_files(tmp_path, "dataset_info.json", content=b"{"))


# Formats and names


def test_every_extension_is_found(tmp_path):
    save_files(tmp_path, *(f"cat/{i}{extension.upper()}" for i, extension in enumerate(EXTENSIONS)))
    assert len(list_images(tmp_path).entries) == len(EXTENSIONS)


def test_images_of_a_codec_that_pillow_lacks_are_not_used_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "check", lambda name: name != "avif")
    monkeypatch.setitem(sys.modules, "pillow_jxl.JpegXLImagePlugin", None)
    images.find_obstacle.cache_clear()
    text = list_images(save_files(tmp_path, "cat/1.png", "cat/2.avif", "cat/3.JXL")).describe(
        "x", 1
    )
    images.find_obstacle.cache_clear()
    assert "not used: 1 .avif (this Pillow has no AVIF) (e.g. cat/2.avif)" in text
    assert "1 .jxl (read in folders, after pip install pillow-jxl-plugin) (e.g. cat/3.JXL)" in text


def test_names_that_are_not_utf8_are_used_and_shown_escaped(tmp_path):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    for name in (b"/\xff.png", b"/\xfe.txt"):
        Path(os.fsdecode(folder + name)).write_bytes(PNG)
    listed = list_images(tmp_path)
    assert (read_keys(listed), listed.class_names) == ([r"caf\xe9/\xff.png"], [r"caf\xe9"])
    assert len(listed.sha256()) == 64
    listed.describe("x", 1).encode()
    assert images.read_image(listed.entries[0]) == PNG


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([], "source=.*empty is no folder and no tar; give a folder"),
        (["cat/readme.txt"], "holds no images .* in class folders"),
    ],
)
def test_a_source_without_images_is_refused(tmp_path, names, sentence):
    save_files(tmp_path / "empty", *names)
    with expect_refusal(sentence):
        list_images(tmp_path / "empty")


def test_a_folder_that_cannot_be_read_is_a_sentence(tmp_path, monkeypatch):
    save_files(tmp_path, "cat/1.png", "dog/1.png")
    denied = PermissionError(13, "Permission denied")
    monkeypatch.setattr(os, "scandir", Mock(side_effect=denied))
    with expect_refusal(r"cannot be read \(Permission denied\); make it readable, or move it away"):
        list_images(tmp_path)
