"""What a job takes for images: folders, tars and `datasets`; what it does not use, refuses, or
finds odd."""

from __future__ import annotations

import gzip
import io
import os
import random
import tarfile
from pathlib import Path

import pytest
from PIL import Image, features

from encoding import images
from encoding.images import EXTENSIONS, ImageList
from encoding.sources import list_images

PICTURE = io.BytesIO()
Image.new("RGB", (8, 8), (200, 0, 0)).save(PICTURE, "PNG")
PNG = PICTURE.getvalue()


def folder_of(path: Path, *names: str, content: bytes = PNG) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def tar_of(file: Path, members: dict[str, bytes], **settings: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w", **settings) as tar:  # pyright: ignore[reportArgumentType]
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file


def labelled(*labels: object, first: int = 0) -> dict[str, bytes]:
    """Members of a tar: an image and a label each."""
    members = {}
    for i, label in enumerate(labels, first):
        members |= {
            f"{i:04d}.png": PNG,
            f"{i:04d}.cls": label if isinstance(label, bytes) else str(label).encode(),
        }
    return members


def keys(found: ImageList) -> list[str]:
    return [entry.key for entry in found.entries]


# What is stated


def test_the_plan_states_classes_and_what_is_not_used(tmp_path: Path):
    folder_of(
        tmp_path,
        "cat/1.png",
        "cat/2.png",
        "dog/deep/er/3.jfif",
        "cat/old.jpg/4.png",
        "top.png",
        "cat/x.tar",
    )
    folder_of(
        tmp_path,
        "cat/a.txt",
        "cat/b.TXT",
        "LICENSE",
        "dog/x.tar.gz",
        "none/readme.md",
        ".git/x.png",
        "cat/._1.png",
    )
    folder_of(tmp_path, "dog/empty.png", content=b"")
    os.symlink("nowhere.png", tmp_path / "dog" / "gone.png")
    os.symlink("../dog", tmp_path / "dog" / "again")
    os.symlink("self", tmp_path / "dog" / "self")
    os.mkfifo(tmp_path / "dog" / "pipe.png")
    found = list_images(tmp_path)
    assert keys(found) == ["cat/1.png", "cat/2.png", "cat/old.jpg/4.png", "dog/deep/er/3.jfif"]
    first, classes, unused = found.describe("photos", 3).splitlines()
    assert first == "4 images of 2 classes in photos, 3 to encode"
    assert classes == "  cat: 3, dog: 1"
    assert set(unused.removeprefix("  not used: ").split("; ")) == {
        "2 .txt (e.g. cat/a.txt)",
        "2 hidden (e.g. .git)",
        "3 symlinks to nothing or in a circle (e.g. dog/again)",
        "1 empty files (e.g. dog/empty.png)",
        "1 neither file nor folder (e.g. dog/pipe.png)",
        "1 images in the root beside class folders (e.g. top.png)",
        "1 folders named like images (only what is in them) (e.g. cat/old.jpg)",
        "1 top folders without images (e.g. none)",
        "1 without extension (e.g. LICENSE)",
        "1 .md (e.g. none/readme.md)",
        "1 .tar (e.g. cat/x.tar)",
        "1 .tar.gz (e.g. dog/x.tar.gz)",
    }


def test_many_classes_are_stated_by_number_and_extremes(tmp_path: Path):
    folder_of(tmp_path, *(f"c{i:03d}/{j}.png" for i in range(101) for j in range(1 + i % 3)))
    assert list_images(tmp_path).describe("x", 1).splitlines()[1:] == [
        "  from 1 images (c000) to 3 (c098)"
    ]


def test_a_class_of_a_tar_without_images_is_stated(tmp_path: Path):
    said = list_images(tar_of(tmp_path / "a.tar", labelled(0, 3, 3, 3))).describe("x", 4)
    assert "  0: 1, 1: 0, 2: 0, 3: 3\n  classes without images: 1, 2" in said


@pytest.mark.parametrize(
    "names", [("train", "val"), ("Training", "Test"), ("TRAIN", "test_set", "extra"), ("train",)]
)
def test_folders_of_splits_are_no_classes(tmp_path: Path, names: tuple[str, ...]):
    folder_of(tmp_path, *(f"{name}/cat/1.png" for name in names))
    with pytest.raises(
        ValueError,
        match=rf"which are parts of a set and no classes; name one: source=\S+/{names[0]}\.$",
    ):
        list_images(tmp_path)
    assert "note: images of" in list_images(tmp_path, "none").describe("x", 1)


def test_a_class_called_test_among_others_is_noted(tmp_path: Path):
    folder_of(tmp_path, "cat/1.png", "dog/1.png", "test/1.png")
    found = list_images(tmp_path)
    assert found.class_names == ["cat", "dog", "test"]
    assert found.describe("x", 3).endswith(
        "note: test among the class folders: parts of a set, or classes?"
    )


def test_class_folders_two_levels_deep_are_merged_with_a_note(tmp_path: Path):
    folder_of(tmp_path, "apple/red/1.png", "apple/green/1.png", "pear/1.png", "plum/images/1.png")
    assert list_images(tmp_path).notes == [
        "2 subfolders are merged into 1 class (apple); if the subfolders are the classes, take "
        f"one folder, source={tmp_path}/apple, or move them up one level"
    ]
    folder_of(tmp_path, "pear/old/1.png", "pear/new/1.png", "pear/new/more/1.png")
    assert (
        list_images(tmp_path)
        .notes[0]
        .startswith("4 subfolders are merged into 2 classes (apple, pear); if ")
    )


def test_a_stray_tar_beside_class_folders_is_refused(tmp_path: Path):
    tar_of(folder_of(tmp_path, "cat/1.png", "dog/1.png") / "stray.tar", labelled(0))
    with pytest.raises(
        ValueError,
        match=r"holds both stray\.tar and images such as cat/1\.png; take the tar, source=",
    ):
        list_images(tmp_path)


# Without classes


def test_a_flat_folder_needs_classes_none(tmp_path: Path):
    folder_of(tmp_path, "b.png", "a.png", "notes.txt")
    with pytest.raises(
        ValueError,
        match=r"holds 2 images and no class folders; .* take classes=none to train without",
    ):
        list_images(tmp_path)
    found = list_images(folder_of(tmp_path, "deep/c.png"), "none")
    assert (keys(found), found.class_names) == (["a.png", "b.png", "deep/c.png"], [])
    assert {entry.label for entry in found.entries} == {0}
    assert "without classes in x, 3 to encode\n  not used: 1 .txt" in found.describe("x", 3)


def test_tars_without_labels_need_classes_none(tmp_path: Path):
    tar_of(tmp_path / "a.tar", {"1.png": PNG, "2.jpg": PNG, "2.cls": b"7"})
    with pytest.raises(ValueError, match=r"1\.png has no label; .* classes=none"):
        list_images(tmp_path)
    found = list_images(tmp_path, "none")
    assert ([(e.key, e.label) for e in found.entries], found.class_names) == (
        [("a.tar:1.png", 0), ("a.tar:2.jpg", 0)],
        [],
    )
    assert "1 .cls (e.g. a.tar:2.cls)" in found.describe("x", 2)


@pytest.mark.parametrize("labels", [["cat", "dog"], [0.5, 1.0], [0, 5], [0, -1], [0, None]])
def test_rows_whose_labels_are_no_class_indices_are_refused(tmp_path: Path, labels: list[object]):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(
        {"image": [{"bytes": PNG, "path": None}] * 2, "label": labels}
    )
    made.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "rows")
    said = r"row \d has the label .*, and there are 2 images; number the classes .* say how many"
    with pytest.raises(ValueError, match=said):
        list_images(tmp_path / "rows")
    assert len(list_images(tmp_path / "rows", "none").entries) == 2


def test_rows_saved_in_a_format_of_numpy_are_read(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(
        {"image": [{"bytes": PNG, "path": None}] * 2, "label": [1, 0]}
    )
    made.cast_column("image", datasets.Image()).with_format("numpy").save_to_disk(tmp_path / "rows")
    assert [entry.label for entry in list_images(tmp_path / "rows").entries] == [1, 0]


def test_a_broken_folder_of_datasets_is_a_sentence(tmp_path: Path):
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match="is a broken folder of datasets"):
        list_images(folder_of(tmp_path, "dataset_info.json", content=b"{"))


# Formats and names


def test_every_extension_is_found_in_folders_and_tars(tmp_path: Path):
    folder_of(tmp_path, *(f"cat/{i}{extension.upper()}" for i, extension in enumerate(EXTENSIONS)))
    assert len(list_images(tmp_path).entries) == len(EXTENSIONS)
    tar = tar_of(
        tmp_path / "tars" / "a.tar",
        {f"{i}{extension}": PNG for i, extension in enumerate(EXTENSIONS)},
    )
    assert len(list_images(tar, "none").entries) == len(EXTENSIONS)


def test_images_of_a_codec_that_pillow_lacks_are_not_used_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(features, "check", lambda name: name != "avif")
    images.find_missing_codec.cache_clear()
    said = list_images(folder_of(tmp_path, "cat/1.png", "cat/2.avif")).describe("x", 1)
    images.find_missing_codec.cache_clear()
    assert "not used: 1 .avif (this Pillow has no AVIF) (e.g. cat/2.avif)" in said


def test_names_that_are_not_utf8_are_used_and_shown_escaped(tmp_path: Path):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    for name in (b"/\xff.png", b"/\xfe.txt"):
        with open(folder + name, "wb") as stream:
            stream.write(PNG)
    found = list_images(tmp_path)
    assert (keys(found), found.class_names) == ([r"caf\xe9/\xff.png"], [r"caf\xe9"])
    assert len(found.sha256()) == 64
    found.describe("x", 1).encode()
    assert images.read_image(found.entries[0]) == PNG


def test_a_folder_that_cannot_be_read_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder_of(tmp_path, "cat/1.png", "dog/1.png")
    scan = os.scandir

    def locked(path: Path):
        if Path(path).name == "dog":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(
        ValueError,
        match=r"/dog cannot be read \(Permission denied\); make it readable, or move it away",
    ):
        list_images(tmp_path)


# Tars


def test_a_tar_cut_anywhere_is_refused_or_used_up_to_there(tmp_path: Path):
    whole = tar_of(tmp_path / "whole.tar", labelled(0, 1, 0)).read_bytes()
    last = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # where the end marker begins
    cut = tmp_path / "cut.tar"
    for size in (0, 100, 512, 1000, 1024, 2048, 2560, 4096, last - 512, last - 1, last, last + 512):
        cut.write_bytes(whole[:size])
        with pytest.raises(
            ValueError, match=r"cut\.tar (was cut or is damaged: byte|is empty|is no tar|holds no)"
        ):
            list_images(cut)
    for size, count in ((2048, 1), (4096, 2), (4200, 2), (4700, 2), (last, 3)):
        cut.write_bytes(whole[:size])
        found = list_images(cut, allow_cut=True)
        assert len(found.entries) == count
        assert "what comes before is used" in found.describe("x", 1)
    cut.write_bytes(whole[: last + 1024])
    assert list_images(cut).describe("x", 3).count("\n") == 1


def test_a_tar_with_a_damaged_header_in_the_middle_is_refused(tmp_path: Path):
    file = tar_of(tmp_path / "a.tar", labelled(0, 1, 0))
    content = bytearray(file.read_bytes())
    content[2048 + 10] ^= 255
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.tar was cut or is damaged: byte 2048 of 10240"):
        list_images(tmp_path)


def test_tars_appended_to_a_tar_are_read_and_other_bytes_refused(tmp_path: Path):
    one, two = (
        tar_of(tmp_path / "parts" / f"{i}.tar", labelled(0, 1, first=2 * i)).read_bytes()
        for i in range(2)
    )
    (tmp_path / "both.tar").write_bytes(one + two + b"\0" * 5000)
    found = list_images(tmp_path / "both.tar")
    assert keys(found) == [f"both.tar:{i:04d}.png" for i in range(4)]
    assert all(images.read_image(entry) == PNG for entry in found.entries)
    # a hole of zeros behind the label looks like an end marker, and goes on
    for classes in ("given", "none"):
        (tmp_path / "both.tar").write_bytes(one[:2048] + bytes(1500) + one[3548:])
        with pytest.raises(
            ValueError, match=r"both.tar was cut or is damaged: byte \d+ of \d+ is no member"
        ):
            list_images(tmp_path / "both.tar", classes)
        assert len(list_images(tmp_path / "both.tar", classes, allow_cut=True).entries) == 1
    (tmp_path / "both.tar").write_bytes(one + two[:2048])
    with pytest.raises(ValueError, match="was cut or is damaged"):
        list_images(tmp_path / "both.tar")


@pytest.mark.parametrize(
    ("names", "said"), [(("x.png", "x.png"), "there twice"), (("x.jpg", "x.png"), "has 2 images")]
)
def test_a_tar_with_two_samples_of_one_key_is_refused(
    tmp_path: Path, names: tuple[str, str], said: str
):
    one, two = (
        tar_of(tmp_path / "parts" / f"{i}.tar", {name: PNG, f"{i}.cls": b"0"})
        for i, name in enumerate(names)
    )
    (tmp_path / "images.tar").write_bytes(one.read_bytes() + two.read_bytes())
    with pytest.raises(ValueError, match=said):
        list_images(tmp_path / "images.tar")


def test_what_is_no_sample_of_a_tar_is_said(tmp_path: Path):
    file = tar_of(
        tmp_path / "a.tar",
        labelled(0) | {"._0.png": PNG, "1.seg.png": PNG, "2.png": b"", "/../3.json": b"{}"},
    )
    with tarfile.open(file, "a") as tar:
        link = tarfile.TarInfo("4.png")
        link.type = tarfile.SYMTYPE
        link.linkname = "0000.png"
        tar.addfile(link)
        sparse = tarfile.TarInfo("5.png")
        sparse.size, sparse.pax_headers = 4, {"GNU.sparse.map": "0,4", "GNU.sparse.size": "1048576"}
        tar.addfile(sparse, io.BytesIO(b"1234"))
    tar_of(tmp_path / "b.tar", {})
    found = list_images(tmp_path)
    assert keys(found) == ["a.tar:0000.png"]
    for said in (
        "1 hidden (e.g. a.tar:._0.png)",
        "1 images with two dots in their names (e.g. a.tar:1.seg.png)",
        "1 empty files (e.g. a.tar:2.png)",
        "1 .json (e.g. a.tar:/../3.json)",
        "2 links, devices and sparse members of tars (e.g. a.tar:4.png)",
        "1 tars without images (e.g. b.tar)",
    ):
        assert said in found.describe("x", 1)


def test_a_part_of_a_set_may_lack_classes_that_are_stated(tmp_path: Path):
    """A trial with one tar of many: its labels are not below its number of images."""
    tar_of(tmp_path / "a.tar", {"0.png": PNG, "0.cls": b"999"})
    with pytest.raises(
        ValueError, match=r"has the label 999, and there are 1 images; .* classes=<n>"
    ):
        list_images(tmp_path)
    with pytest.raises(ValueError, match=r"has the label 999, and classes=999"):
        list_images(tmp_path, 999)
    assert len(list_images(tmp_path, 1000).class_names) == 1000
    (tmp_path / "folders" / "cat").mkdir(parents=True)
    (tmp_path / "folders" / "cat" / "0.png").write_bytes(PNG)
    with pytest.raises(ValueError, match="has 1 class folders; leave classes=2 out"):
        list_images(tmp_path / "folders", 2)


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (b"\xff\xfe", r"must hold a class index, not '\\\\xff\\\\xfe'"),
        (b"-1", "must hold a class index, not '-1'"),
        (b"0" * 65, "must hold a class index, not 65 bytes"),
        (b"1000000000", "has the label 1000000000, and there are 1 images; number the classes"),
    ],
)
def test_a_label_that_no_class_can_have_is_refused(tmp_path: Path, label: bytes, said: str):
    with pytest.raises(ValueError, match=said):
        list_images(tar_of(tmp_path / "a.tar", labelled(label)))


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_compressed_tar_is_refused(tmp_path: Path, name: str):
    content = tar_of(tmp_path / "whole" / "whole.tar", labelled(0)).read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(content))
    with pytest.raises(
        ValueError, match=r"compressed.*; decompress it\.|1 \.tar\.gz \(e\.g\. a\.tar\.gz\)"
    ):
        list_images(tmp_path / name)
    folder_of(tmp_path, "sub/x.txt")
    (tmp_path / "whole" / "whole.tar").unlink()
    with pytest.raises(ValueError, match=r"decompress it\.|It holds: .*1 \.tar\.gz"):
        list_images(tmp_path)


def test_random_damage_to_a_tar_is_never_a_traceback(tmp_path: Path):
    whole = tar_of(tmp_path / "a.tar", labelled(0, 1) | {"n" * 200 + ".txt": b"x"}).read_bytes()
    draw = random.Random(0)
    ends = 0
    for _ in range(300):
        content = bytearray(whole[: draw.choice([len(whole), draw.randrange(len(whole))])])
        for _ in range(draw.randint(0, 4)):
            if content:
                content[draw.randrange(min(len(content), 6000))] = draw.randrange(256)
        (tmp_path / "a.tar").write_bytes(content)
        try:
            list_images(tmp_path / "a.tar", allow_cut=draw.random() < 0.5)
        except ValueError:
            ends += 1
    assert 50 < ends < 290
