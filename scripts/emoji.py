"""Makes images with captions of the emoji in a font: a small set for text-to-image models.

    python -m scripts.emoji out=photos/emoji
    python -m scripts.emoji out=photos/emoji font=fonts/NotoColorEmoji.ttf

The font is that of Debian's package fonts-noto-color-emoji. `out` receives an image of 128x128
pixels for each emoji, such as 1f34e.png, and beside it the captions, one a line, in 1f34e.txt: the
name in Unicode, as far as Python knows it, and the same in a sentence.

Where Pillow has raqm, as in its wheels, emoji also come in five skin tones. A tenth of these
combinations are held out of `out` and written to <out>_held_out. `out` has all held-out emoji and
tones too, but not together.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from PIL.ImageFont import FreeTypeFont

from common.errors import UserError
from training.config.compose import parse_words, report_user_errors

FONT = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
FONT_SIZE = 109
"""The only size of the font's bitmaps. They have 136x128 pixels."""
SIDE = 128
"""Width and height of the images. The bitmaps have no ink beside the 128 columns in the middle."""
MARGIN = 4
"""Number of columns left of these 128."""
RANGES = (range(0x203C, 0x3300), range(0x1F000, 0x1FB00))
"""Code points to look for in the font."""
TONES = {
    0x1F3FB: "light",
    0x1F3FC: "medium-light",
    0x1F3FD: "medium",
    0x1F3FE: "medium-dark",
    0x1F3FF: "dark",
}
"""Code point that gives the emoji before it a skin tone -> name of the tone in Unicode's CLDR."""
NO_PICTURES = {0x20E3, *range(0x1F1E6, 0x1F200), *TONES, *range(0x1F9B0, 0x1F9B4)}
"""Code points that are only parts of emoji: the box of a keycap, letters of flags, tones, hair."""
HELD_OUT = 10
"""One of so many combinations of an emoji and a skin tone is held out."""


@dataclass(frozen=True)
class EmojiConfig:
    """Keys of the command."""

    out: str = "photos/emoji"
    """New or empty folder for the images; those held out go to <out>_held_out."""
    font: str = FONT


def draw(text: str, font: FreeTypeFont) -> Image.Image:
    """Draws a text on white. The ink is white too: it shows no glyph that has no colours."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(image)
    pen.text((-MARGIN, 0), text, fill="white", font=font, embedded_color=True)
    return image


def draw_emoji(font: FreeTypeFont) -> Iterator[tuple[list[int], str, Image.Image]]:
    """Yields code points, name and image of each emoji that the font has and Unicode names, and of
    its combinations with skin tones."""
    missing = draw("\U0010fffd", font)  # a code point that never gets a character
    blank = draw("", font)
    for code in (code for codes in RANGES for code in codes if code not in NO_PICTURES):
        name = unicodedata.name(chr(code), "").lower()
        image = draw(chr(code), font)
        if not name or image in (missing, blank):
            continue
        yield [code], name, image

        # The font has a combination if it is as wide as the emoji alone; else, and without raqm, it
        # is two glyphs. Noto draws the snowboarder the same in all tones.
        for tone, tone_name in TONES.items():
            text = chr(code) + chr(tone)
            toned = draw(text, font)
            if font.getlength(text) == font.getlength(chr(code)) and toned != image:
                yield [code, tone], f"{name}, {tone_name} skin tone", toned


def write_emoji(cfg: EmojiConfig) -> None:
    """Writes the images and their captions. Raises ValueError if a folder is in use, or if the font
    cannot be read or has no emoji."""
    out = Path(cfg.out).expanduser()
    held_out = Path(f"{out}_held_out")
    for folder in (out, held_out):
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            raise UserError(f"{folder} is not empty; remove it, or take another out=<folder>.")
    remedy = "apt install fonts-noto-color-emoji, or say font=<path> of a NotoColorEmoji.ttf"
    try:
        font = ImageFont.truetype(str(Path(cfg.font).expanduser()), FONT_SIZE)
    except OSError as error:
        raise UserError(f"font={cfg.font} cannot be read ({error}); {remedy}.") from error

    counts = {out: 0, held_out: 0}
    for folder in counts:
        folder.mkdir(parents=True, exist_ok=True)
    for codes, name, image in draw_emoji(font):
        folder = held_out if len(codes) > 1 and sum(codes) % HELD_OUT == 0 else out
        file = folder / "-".join(f"{code:x}" for code in codes)
        image.save(file.with_suffix(".png"))
        article = "an" if name[0] in "aeiou" else "a"
        file.with_suffix(".txt").write_text(f"{name}\na picture of {article} {name}\n")
        counts[folder] += 1
    if not counts[out]:
        raise UserError(f"font={cfg.font} has no emoji as coloured bitmaps; {remedy}.")
    print(
        f"{out}: {counts[out]} images; {held_out}: {counts[held_out]} held-out combinations of an "
        "emoji and a skin tone",
        flush=True,
    )


def main() -> None:
    with report_user_errors():
        write_emoji(parse_words(EmojiConfig, sys.argv[1:], __doc__ or ""))


if __name__ == "__main__":
    main()
