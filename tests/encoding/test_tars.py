"""WebDataset tars as sources of images: whole ones are read to their end marker, and a cut or
damaged one is refused or used up to the damage."""

import gzip
import io
import tarfile

import pytest

from encoding import images
from encoding.sources import list_images
from tests.harness.refusals import expect_refusal
from tests.harness.sets import PNG, label_images, read_keys, save_files, write_tar


def test_a_class_of_a_tar_without_images_is_stated(tmp_path):
    listed = list_images(write_tar(tmp_path / "a.tar", label_images(0, 3, 3, 3)))
    text = listed.describe("x", 4)
    assert "  0: 1, 1: 0, 2: 0, 3: 3\n  classes without images: 1, 2" in text


def test_tars_without_labels_need_classes_none(tmp_path):
    write_tar(tmp_path / "a.tar", {"1.png": PNG, "2.jpg": PNG, "2.cls": b"7"})
    with expect_refusal(r"a\.tar: 1\.png has no label; a member named 1\.cls .* classes=none"):
        list_images(tmp_path)
    listed = list_images(tmp_path, "none")
    assert read_keys(listed) == ["a.tar:1.png", "a.tar:2.jpg"]
    assert {entry.label for entry in listed.entries} == {0}
    assert listed.class_names == []


def test_a_tar_cut_anywhere_is_refused_or_used_up_to_there(tmp_path):
    whole = write_tar(tmp_path / "whole.tar", label_images(0, 1, 0)).read_bytes()
    last = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # where the end marker begins
    cut = tmp_path / "cut.tar"
    for size in (0, 100, 512, 1024, 2560, 4096, last - 1, last, last + 512):
        cut.write_bytes(whole[:size])
        with expect_refusal(r"cut\.tar (was cut or is damaged: byte|is empty|is no tar|holds no)"):
            list_images(cut)
    for size, count in ((2048, 1), (4200, 2), (last, 3)):
        cut.write_bytes(whole[:size])
        listed = list_images(cut, allow_cut=True)
        assert len(listed.entries) == count
        assert "what comes before is used" in listed.describe("x", 1)
    cut.write_bytes(whole[: last + 1024])
    assert list_images(cut).describe("x", 3).count("\n") == 1


def test_tars_appended_to_a_tar_are_read_and_other_bytes_refused(tmp_path):
    one, two = (
        write_tar(tmp_path / f"{i}.tar", label_images(0, 1, first=2 * i)).read_bytes()
        for i in range(2)
    )
    both = tmp_path / "both.tar"
    both.write_bytes(one + two + b"\0" * 5000)
    listed = list_images(both)
    assert read_keys(listed) == [f"both.tar:{i:04d}.png" for i in range(4)]
    assert all(images.read_image(entry) == PNG for entry in listed.entries)
    both.write_bytes(one + two[:2048])
    with expect_refusal("was cut or is damaged"):
        list_images(both)

    # zeros after the label look like an end marker, but the tar goes on
    both.write_bytes(one[:2048] + bytes(1500) + one[3548:])
    for classes in ("given", "none"):
        with expect_refusal(r"both.tar was cut or is damaged: byte \d+ of \d+ is no member"):
            list_images(both, classes)
        assert len(list_images(both, classes, allow_cut=True).entries) == 1


@pytest.mark.parametrize(
    ("names", "sentence"),
    [(("x.png", "x.png"), "there twice"), (("x.jpg", "x.png"), "has 2 images")],
)
def test_a_tar_with_two_samples_of_one_key_is_refused(tmp_path, names, sentence):
    parts = [write_tar(tmp_path / f"{i}.tar", {name: PNG}) for i, name in enumerate(names)]
    both = tmp_path / "both.tar"
    both.write_bytes(b"".join(part.read_bytes() for part in parts))
    with expect_refusal(sentence):
        list_images(both)


def test_what_is_no_sample_of_a_tar_is_said(tmp_path):
    others = {"._0.png": PNG, "1.seg.png": PNG, "2.png": b"", "3.heic": PNG}
    file = write_tar(tmp_path / "a.tar", label_images(0) | others)
    with tarfile.open(file, "a") as tar:
        link = tarfile.TarInfo("4.png")
        link.type = tarfile.SYMTYPE
        link.linkname = "0000.png"
        tar.addfile(link)
        sparse = tarfile.TarInfo("5.png")
        sparse.size = 4
        sparse.pax_headers = {"GNU.sparse.map": "0,4", "GNU.sparse.size": "1048576"}
        tar.addfile(sparse, io.BytesIO(b"1234"))
    listed = list_images(tmp_path)
    assert read_keys(listed) == ["a.tar:0000.png"]
    for text in (
        "1 images with two dots in their names (e.g. a.tar:1.seg.png)",
        "1 empty files (e.g. a.tar:2.png)",
        "1 .heic (read in folders, after pip install pillow-heif) (e.g. a.tar:3.heic)",
        "2 links, devices and sparse members of tars (e.g. a.tar:4.png)",
    ):
        assert text in listed.describe("x", 1)


def test_a_part_of_a_set_may_lack_classes_that_are_stated(tmp_path):
    """The labels of one tar of many are not below its number of images."""
    file = write_tar(tmp_path / "a.tar", label_images(999))
    with expect_refusal("has the label 999, and there are 1 images; .* classes=<n>"):
        list_images(file)
    assert len(list_images(file, 1000).class_names) == 1000
    with expect_refusal("has 1 class folders; leave classes=2 out"):
        list_images(save_files(tmp_path / "folders", "cat/0.png"), 2)


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        (b"cat", r"a\.tar: 0000\.cls must hold a class index, not 'cat'"),
        (b"\xff\xfe", r"must hold a class index, not '\\\\xff\\\\xfe'"),
        (b"0" * 65, "must hold a class index, not 65 bytes"),
    ],
)
def test_a_label_that_no_class_can_have_is_refused(tmp_path, label, sentence):
    with expect_refusal(sentence):
        list_images(write_tar(tmp_path / "a.tar", label_images(label)))


@pytest.mark.parametrize("name", ["a.tar", "a.tgz"])
def test_a_compressed_tar_is_refused(tmp_path, name):
    file = write_tar(tmp_path / name, label_images(0))
    file.write_bytes(gzip.compress(file.read_bytes()))
    with expect_refusal(r"is compressed, and images are read from their place.*; decompress it\."):
        list_images(file)
