"""Makes images with captions of the emoji in a font: a small set for text-to-image models.

    python -m scripts.emoji out=photos/emoji
    python -m scripts.emoji out=photos/emoji font=fonts/NotoColorEmoji.ttf

The font is that of Debian's package fonts-noto-color-emoji. `out` receives an image of 128x128
pixels for each emoji, such as 1f34e.png, and beside it the captions, one a line, in 1f34e.txt: its
name in Unicode, alone and in a sentence. Where Pillow has raqm, as in its wheels, emoji also come
in five skin tones. A tenth of these combinations go to <out>_held_out: `out` has their emoji and
their tones, but not together.
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

FONT_SIZE = 109
"""The only size of the font's bitmaps, which have 136x128 pixels."""
SIDE = 128
"""Width and height of the images. The bitmaps have no ink beside the 128 columns in the middle."""
CODES = [*range(0x203C, 0x3300), *range(0x1F000, 0x1FB00)]
"""Code points to look for in the font."""
TONES = dict(enumerate(("light", "medium-light", "medium", "medium-dark", "dark"), 0x1F3FB))
"""Code point that gives the emoji before it a skin tone -> name of the tone."""
NO_PICTURES = {0x20E3, *range(0x1F1E6, 0x1F200), *TONES, *range(0x1F9B0, 0x1F9B4)}
"""Code points that are only parts of emoji: the box of a keycap, letters of flags, tones, hair."""


@dataclass(frozen=True)
class EmojiConfig:
    """Keys of the command."""

    out: str = "photos/emoji"
    font: str = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"


def draw(text: str, font: FreeTypeFont) -> Image.Image:
    """Draws a text on white. The ink is white too: it shows no glyph that has no colours."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(image)
    pen.text((-4, 0), text, fill="white", font=font, embedded_color=True)
    return image


def draw_emoji(font: FreeTypeFont) -> Iterator[tuple[str, str, Image.Image]]:
    """Yields text, name and image of each emoji that the font has and Unicode names, and of its
    combinations with skin tones."""
    absent = (draw("\U0010fffd", font), draw("", font))  # a code point without a character
    for code in CODES:
        text = chr(code)
        name = unicodedata.name(text, "").lower()
        image = draw(text, font)
        if not name or code in NO_PICTURES or image in absent:
            continue
        yield text, name, image

        # The font has a combination if it is as wide as the emoji alone; else, and without raqm, it
        # is two glyphs. Noto draws the snowboarder the same in all tones.
        for tone, tone_name in TONES.items():
            pair = text + chr(tone)
            toned = draw(pair, font)
            if font.getlength(pair) == font.getlength(text) and toned != image:
                yield pair, f"{name}, {tone_name} skin tone", toned


def write_emoji(cfg: EmojiConfig) -> None:
    """Writes the images and their captions. Raises ValueError if a folder exists, or if the font
    cannot be read or has no emoji."""
    folders = (Path(cfg.out).expanduser(), Path(f"{cfg.out}_held_out").expanduser())
    for folder in folders:
        if folder.exists():
            raise UserError(f"out={folder} is there already; delete it, or choose another folder.")
    try:
        font = ImageFont.truetype(str(Path(cfg.font).expanduser()), FONT_SIZE)
        drawn = list(draw_emoji(font))
    except OSError as error:
        raise UserError(
            f"font={cfg.font} cannot be read ({error}); apt install fonts-noto-color-emoji, or say "
            "font=<path of NotoColorEmoji.ttf>."
        ) from error
    if not drawn:
        raise UserError(f"font={cfg.font} has no emoji as coloured bitmaps; take another font.")

    for text, name, image in drawn:
        codes = [ord(character) for character in text]
        folder = folders[len(codes) > 1 and sum(codes) % 10 == 0]
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "-".join(f"{code:x}" for code in codes)
        image.save(file.with_suffix(".png"))
        article = "an" if name[0] in "aeiou" else "a"
        file.with_suffix(".txt").write_text(f"{name}\na picture of {article} {name}\n")
    print(f"{len(drawn)} emoji in {folders[0]} and, held out, in {folders[1]}", flush=True)


if __name__ == "__main__":
    with report_user_errors():
        write_emoji(parse_words(EmojiConfig, sys.argv[1:], __doc__ or ""))
