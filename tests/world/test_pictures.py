"""Pictures that are hardly any or have colour profiles, and archives as they are downloaded.

The profiles are files of saucecontrol/Compact-ICC-Profiles at bdd84663, in the public domain
(CC0 1.0); for grey-gamma-2.2.icc the curve in sGrey-v2-nano.icc was replaced, and sRGB-lcms.icc is
written by Pillow."""

import io
import os
import tarfile

import numpy as np
import pytest
from PIL import Image, ImageCms
from torch.utils.data import DataLoader

from common.config.schema import FdConfig
from common.files import ROOT
from data.manifest import read_manifest
from encoding.decoding import DecodedImages, collate
from encoding.images import CONVERTED, RESIZE, UnusableError, decode_image
from encoding.sources import list_images
from evaluation.evaluator import make_folder_source
from tests.harness.refusals import expect_refusal
from tests.harness.sets import encode_image, encode_png, save_files


@pytest.mark.parametrize(("size", "side"), [((1, 4000), 256), ((30000, 2), 512)])
def test_a_strip_is_left_out_before_it_is_enlarged(size, side):
    with pytest.raises(UnusableError, match=r"pixels before the crop are above max_megapixels=80"):
        decode_image(encode_png(*size), side)
    assert decode_image(encode_png(8, 800), 64).shape == (3, 64, 64)


def test_a_strip_is_listed_and_does_not_end_a_job_or_a_reference(more_photos, job, capsys):
    save_files(more_photos, "cat/strip.png", content=encode_png(1, 600_000))
    reason = "12×7200000 pixels before the crop are above max_megapixels=80"
    assert read_manifest(job(source=more_photos)).skipped == [f"cat/strip.png: {reason}"]
    reference = make_folder_source(FdConfig(reference=str(more_photos)), 16, 12)
    assert reference.facts["resize"] == f"{RESIZE}, 16×12"
    (batches,) = reference.images([range(21)])
    assert sum(len(batch) for batch in batches) == 20
    assert f"{more_photos}: cat/strip.png: {reason}; it is left out" in capsys.readouterr().out


def encode(mode, kind, size, **settings):
    """Returns a file of 32 × 32 random pixels of `size` bytes."""
    pixels = np.random.default_rng(0).bytes(1024 * int(size))
    return encode_image(Image.frombytes(mode, (32, 32), pixels), kind, **settings)


def test_libtiff_does_not_fill_the_screen(capfd):
    content = bytearray(encode("RGB", "TIFF", 3, compression="tiff_lzw"))
    content[100:3000:7] = bytes(byte ^ 90 for byte in content[100:3000:7])
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


PROFILES = ROOT / "tests/assets/profiles"


CASES = """
RGB JPEG 3 DisplayP3-v2-micro.icc RGB
RGB WEBP 3 AdobeCompat-v2.icc RGB
RGBA PNG 4 DisplayP3-v2-micro.icc RGBA
CMYK JPEG 4 CGATS001Compat-v2-micro.icc CMYK
CMYK TIFF 4 CGATS001Compat-v2-micro.icc CMYK
L JPEG 1 grey-gamma-2.2.icc L
LA PNG 2 grey-gamma-2.2.icc LA
RGB PNG 3 sRGB-v2-nano.icc -
RGB JPEG 3 sRGB-lcms.icc -
L PNG 1 sGrey-v2-nano.icc -
RGB PNG 3 ../mistakes.yaml -
L PNG 1 DisplayP3-v2-micro.icc -
RGB JPEG 3 grey-gamma-2.2.icc -
RGB PNG 3 CGATS001Compat-v2-micro.icc -
CMYK JPEG 4 AdobeCompat-v2.icc -
LAB TIFF 3 AdobeCompat-v2.icc -
"""


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_colours_are_those_that_pillow_converts_by_the_profile(case):
    """The last word is the mode of the colours that are converted, with A for a mask; - stands for
    colours of sRGB, which stay, as those whose profile is broken or for another mode. Opaque images
    are halved before, others after."""
    *words, name, mode = case.split()
    content = encode(*words, icc_profile=(PROFILES / name).read_bytes())
    image = Image.open(io.BytesIO(content))
    colours = image.convert(mode.strip("A-") or "RGB")
    half = ((16, 16), Image.Resampling.BOX)
    if "A" not in mode:
        colours = colours.resize(*half)
    if mode != "-":
        srgb = ImageCms.createProfile("sRGB")
        colours = ImageCms.profileToProfile(colours, str(PROFILES / name), srgb, 1, "RGB")
    expected = Image.new("RGB", colours.size, "white")
    expected.paste(colours, mask=image if "A" in mode else None)
    expected = expected.resize(*half).resize((12, 12), Image.Resampling.BICUBIC)
    assert (decode_image(content, 12).permute(1, 2, 0).numpy() == np.asarray(expected)).all()


def test_images_with_another_profile_are_counted(more_photos, job, capsys):
    profile = (PROFILES / "AdobeCompat-v2.icc").read_bytes()
    save_files(more_photos, "cat/p.png", content=encode("RGB", "PNG", 3, icc_profile=profile))
    for convert in (True, False):
        cfg = FdConfig(reference=str(more_photos), convert_profile=convert)
        resize = make_folder_source(cfg, 16, 16).facts["resize"]
        assert resize == f"{RESIZE}, 16" + ", convert_profile=true" * convert
    assert read_manifest(job(source=more_photos)).resize == RESIZE + CONVERTED
    for key, outcome in (("true", "converted"), ("false", "read as sRGB")):
        job(f"convert_profile={key}", "dry_run=true", "batch_size=8", source=more_photos, out=key)
        said = "\n  1 of the first 17 images have another colour profile than sRGB: they are "
        assert said + outcome in capsys.readouterr().out


def test_heic_and_jxl_are_read_by_their_packages(tmp_path, job):
    pytest.importorskip("pillow_heif.HeifImagePlugin")
    pytest.importorskip("pillow_jxl.JpegXLImagePlugin")
    for number in range(10):
        Image.new("RGB", (20, 20)).save(tmp_path / f"{number}.{'heic' if number % 2 else 'jxl'}")
    images = DecodedImages(list_images(tmp_path, "none").entries, 16)
    manifest = read_manifest(job("num_workers=2", "classes=none", source=tmp_path))
    assert (manifest.count, manifest.skipped) == (8, [])
    # A spawned worker imports the packages itself.
    (decoded,) = DataLoader(
        images, 10, num_workers=1, collate_fn=collate, multiprocessing_context="spawn"
    )
    assert (len(decoded.pixels), decoded.pixels.max()) == (10, 0)
