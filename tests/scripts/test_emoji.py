"""scripts.emoji: images with captions from a font of emoji."""

from pathlib import Path

import pytest
from PIL import Image, features

from scripts.emoji import FONT, EmojiConfig, write_emoji
from tests.harness.refusals import expect_refusal


def read_captions(folder):
    """Captions by the name of their image."""
    images = {file.stem for file in folder.glob("*.png")}
    texts = {file.stem: file.read_text().splitlines() for file in folder.glob("*.txt")}
    assert images == texts.keys()
    return texts


@pytest.mark.skipif(not Path(FONT).is_file(), reason="needs Debian's fonts-noto-color-emoji")
def test_each_emoji_is_an_image_with_captions(tmp_path, capsys):
    out = tmp_path / "emoji"
    write_emoji(EmojiConfig(str(out)))
    seen, held_out = read_captions(out), read_captions(tmp_path / "emoji_held_out")
    assert f"emoji: {len(seen)} images; " in capsys.readouterr().out
    assert len(seen) > 1300
    assert seen["1f34e"] == ["red apple", "a picture of a red apple"]
    assert not {"1f1e9", "1f3fd", "20e3", "fe0f", "1f34e-1f3fd", "1f3c2-1f3fd"} & seen.keys()
    with Image.open(out / "1f34e.png") as apple:
        assert apple.size == (128, 128)
        assert apple.getpixel((0, 0)) == (255, 255, 255)
        red, green, blue = apple.getpixel((64, 80))
        assert red > 2 * max(green, blue)

    if not features.check("raqm"):
        assert not held_out
        return
    toned = {**seen, **held_out}
    assert toned["1f44b-1f3fd"][0] == "waving hand sign, medium skin tone"
    assert 40 < len(held_out) < 100
    assert not seen.keys() & held_out.keys()
    bases, tones = zip(*(name.split("-") for name in held_out), strict=True)
    assert set(bases) <= seen.keys()
    assert {name.partition("-")[2] for name in seen} == {"", *tones}


def test_a_font_that_is_not_there_is_refused_and_nothing_made(tmp_path):
    with expect_refusal(r"font=.*none\.ttf cannot .*; apt install fonts-noto-color-emoji, or"):
        write_emoji(EmojiConfig(str(tmp_path / "emoji"), str(tmp_path / "none.ttf")))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("used", ["emoji", "emoji_held_out"])
def test_a_folder_in_use_is_refused(used, tmp_path):
    (tmp_path / used / "mine").mkdir(parents=True)
    with expect_refusal(f"{used} is not empty; remove it, or take another out=<folder>"):
        write_emoji(EmojiConfig(str(tmp_path / "emoji")))
