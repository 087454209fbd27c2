"""Pictures that are hardly any, and archives as they are downloaded."""

import io
import os
import tarfile

import numpy as np
import pytest
from PIL import Image

from data.manifest import read_manifest
from encoding.images import UnusableError, decode_image
from encoding.sources import list_images
from evaluation.evaluator import make_folder_source
from tests.harness.refusals import expect_refusal
from tests.harness.sets import encode_png, save_files


@pytest.mark.parametrize(("size", "side"), [((1, 4000), 256), ((30000, 2), 512)])
def test_a_strip_is_left_out_before_it_is_enlarged(size, side):
    with pytest.raises(UnusableError, match=r"pixels before the crop are above max_megapixels=80"):
        decode_image(encode_png(*size), side)
    assert decode_image(encode_png(8, 800), 64).shape == (3, 64, 64)


def test_a_strip_is_listed_and_does_not_end_a_job_or_a_reference(more_photos, job, capsys):
    save_files(more_photos, "cat/strip.png", content=encode_png(1, 400_000))
    reason = "16×6400000 pixels before the crop are above max_megapixels=80"
    assert read_manifest(job(source=more_photos)).skipped == [f"cat/strip.png: {reason}"]
    reference = make_folder_source(str(more_photos), 16, 100)
    (batches,) = reference.images([range(21)])
    assert sum(len(batch) for batch in batches) == 20
    assert f"{more_photos}: cat/strip.png: {reason}; it is left out" in capsys.readouterr().out


def test_libtiff_does_not_fill_the_screen(capfd):
    stream = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "TIFF", compression="tiff_lzw")
    content = bytearray(stream.getvalue())
    content[100:4000:7] = bytes(byte ^ 90 for byte in content[100:4000:7])
    with pytest.raises(OSError, match="decoder error"):
        decode_image(bytes(content), 32)
    os.write(2, b"heard")
    assert capfd.readouterr().err == "heard"


def test_archives_are_told_how_to_be_unpacked(tmp_path):
    """ILSVRC2012_img_train.tar holds a tar for each class."""
    save_files(tmp_path / "n01440764", "a.JPEG")
    for name, content in (("n01440764.tar", "n01440764/a.JPEG"), ("all.tar", "n01440764.tar")):
        with tarfile.open(tmp_path / name, "w") as tar:
            tar.add(tmp_path / content, content)
    with expect_refusal(r"It holds: 1 \.tar .*if a tar holds them, unpack it first"):
        list_images(tmp_path / "all.tar")
