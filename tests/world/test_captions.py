"""Captions as the world keeps them: files of Kohya, img2dataset, COCO, Hugging Face and pandas."""

import json
import unicodedata

import pytest
from PIL import Image

from common.config.schema import CaptionLines, CaptionsMissing
from common.files import ROOT
from data.manifest import read_manifest
from encoding.caption_files import CaptionReader, add_captions, settle_missing
from encoding.job import JOB_FILE, read_job
from encoding.shards import hash_content
from encoding.sources import list_images
from scripts.verify_latents import VerifyConfig, verify
from tests.harness.captions import save_bert, save_text
from tests.harness.refusals import expect_refusal
from tests.harness.sets import PNG, read_contents, save_files, save_images
from training.drawing import read_prompts

TEXT_JOB = ["text_encoder=wordllama", "classes=none"]


def list_captioned(source, lines=None):
    return list_images(source, "none", reader=CaptionReader(lines))


def read_captions(images):
    return {entry.key: entry.captions for entry in images.entries}


# Tables


def test_the_imagefolder_of_datasets_reads_the_same_captions(tmp_path):
    import datasets

    save_files(tmp_path / "set", "a.png", "A.png", "deep/c.png")
    for folder, names in (("set", ("a.png", "A.png")), ("set/deep", ("c.png",))):
        rows = [{"file_name": f"./{name}", "text": f"a picture\u2028of {name}"} for name in names]
        lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (tmp_path / folder / "metadata.jsonl").write_text(lines)
    loaded = datasets.load_dataset(
        "imagefolder", data_dir=str(tmp_path / "set"), cache_dir=str(tmp_path / "cache")
    )["train"].cast_column("image", datasets.Image(decode=False))
    theirs = {row["image"]["path"].partition("/set/")[2]: (row["text"],) for row in loaded}
    assert read_captions(list_captioned(tmp_path / "set")) == theirs


def images_of(folder):
    return list_images(folder / "photos")


def write_table(folder, kind, rows):
    """Writes rows of (file name, caption) by pandas, or as COCO's captions_train2017.json is."""
    import pandas

    file = folder / f"captions.{kind}"
    if kind == "json":
        names = sorted({name for name, _ in rows})
        pictures = [{"id": 7 + i, "file_name": name, "width": 8} for i, name in enumerate(names)]
        notes = [
            {"image_id": 7 + names.index(name), "id": i, "caption": text}
            for i, (name, text) in enumerate(rows)
        ]
        file.write_text(json.dumps({"info": {}, "images": pictures, "annotations": notes}))
        return str(file)
    table = pandas.DataFrame(rows, columns=["file_name", "caption"])
    if kind == "csv":
        table.to_csv(file, index=False)
    else:
        table.to_json(file, orient="records", lines=True)
    return str(file)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "json"])
def test_a_table_gives_captions_by_file_name(kind, tmp_path):
    save_files(tmp_path / "photos", "cat/1.png", "cat/2.png", "dog/2.png", "dog/Äpfel.png")
    decomposed = unicodedata.normalize("NFD", "Äpfel.png")
    rows = [("1.png", 'one, "quoted"'), ("1.png", "uno"), ("cat/2.png", "two\nlines")]
    rows += [("2.png", "of two images"), (decomposed, "apples"), ("gone.png", "lost")]
    images = add_captions(images_of(tmp_path), write_table(tmp_path, kind, rows))
    expected = [('one, "quoted"', "uno"), ("two\nlines",), (), ("apples",)]
    assert list(read_captions(images).values()) == expected
    (note,) = images.notes
    assert "2 of 5 names in captions=" in note
    assert note.endswith("belong to no image, or to several, such as 2.png")
    with expect_refusal(r"gives no image a caption; its rows need .*, such as cat/1\.png, in"):
        add_captions(images_of(tmp_path), write_table(tmp_path, kind, [("x.png", "lost")]))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
@pytest.mark.parametrize(
    "content",
    [
        "[1, 2]",
        "\0",
        '{"images": [{}]}',
        '[{"caption": "one"}]',
        "image,text\n1.png,a, b",
        "[" * 9999,
    ],
)
def test_a_file_that_is_no_table_is_refused(name, content, tmp_path):
    save_files(tmp_path / "photos", "cat/1.png")
    (tmp_path / name).write_text(content)
    with expect_refusal("cannot be read as a table of captions|gives no image a caption"):
        add_captions(images_of(tmp_path), str(tmp_path / name))


def test_members_that_webdataset_writes(tmp_path, monkeypatch):
    import webdataset

    monkeypatch.setattr("webdataset.utils.enforce_security", False)
    file = str(tmp_path / "0.tar")
    with webdataset.TarWriter(file) as tar:
        for i in range(3):
            tar.write({"__key__": f"{i}", "png": PNG, "txt": f"caption {i}", "json": {"width": i}})
        tar.write({"__key__": "3", "png": PNG, "caption": "kohya", "json": {"text": ["b", "c"]}})
        tar.write({"__key__": "4", "txt": "of no image"})
    images = list_captioned(file)
    texts = [sample.get("txt") for sample in webdataset.WebDataset(file, shardshuffle=False)]
    found = [*read_captions(images).values()]
    assert found[:3] == [(text.decode(),) for text in texts[:3]]
    assert found[3:] == [("kohya", "b", "c")]
    unused = str(images.unused)
    assert "3 .json that hold none of captions, caption, text, prompt, tags (e.g. " in unused
    assert "1 .txt (e.g. 0.tar:4.txt)" in unused


# Texts


def test_a_text_with_an_empty_line_between_others_is_one_caption(tmp_path):
    paragraphs = "\ufeffA photograph shows a cat.\r\n\r\nThe mood is calm.\n"
    save_text(tmp_path / "set", a=paragraphs, b="a red apple\u2028on a\vtable\n", c="one\ntwo\n\n")
    assert read_captions(list_captioned(tmp_path / "set")) == {
        "a.png": ("A photograph shows a cat. The mood is calm.",),
        "b.png": ("a red apple\u2028on a\vtable",),
        "c.png": ("one", "two"),
    }
    each = read_captions(list_captioned(tmp_path / "set", CaptionLines.each))
    assert each["a.png"] == ("A photograph shows a cat.", "The mood is calm.")
    whole = read_captions(list_captioned(tmp_path / "set", CaptionLines.whole))
    assert whole["c.png"] == ("one two",)
    (note,) = list_captioned(tmp_path / "set").notes
    assert note.startswith("1 texts have an empty line between others, as ")
    assert "set/a.txt has, and each of these texts is one caption; caption_lines=each" in note
    (tmp_path / "prompts.txt").write_text("one\u2028line\nanother\n")
    assert read_prompts(str(tmp_path / "prompts.txt")) == ["one\u2028line", "another"]


def test_files_of_captions_are_found_or_counted(tmp_path):
    names = ["a.png", "B.JPG", "c.png", "d.png", unicodedata.normalize("NFD", "ä.png"), "e.png"]
    save_files(tmp_path, *names, "E.png")
    texts = {"A.TXT": "one", "b.JPG.txt": "two", "c.caption": "three", "ä.txt": "four"}
    texts |= {"d.json": '{"score": 1, "meta": {}}', "e.txt": "five", "E.txt": "FIVE"}
    texts |= {"gone.txt": "x", "captions/captions_val.json": "{}"}
    for name, text in texts.items():
        save_files(tmp_path, name, content=text.encode())
    images = list_captioned(tmp_path)
    found = {
        unicodedata.normalize("NFC", key): texts for key, texts in read_captions(images).items()
    }
    expected = {"a.png": ("one",), "B.JPG": ("two",), "c.png": ("three",), "d.png": ()}
    assert found == expected | {"ä.png": ("four",), "e.png": ("five",), "E.png": ("FIVE",)}
    unused = str(images.unused)
    assert "1 .txt beside no image of that name (e.g. gone.txt)" in unused
    assert "1 .json beside no image of that name (e.g. captions/captions_val.json)" in unused
    assert "d.json: score, meta)" in unused


def test_images_without_captions(tmp_path):
    save_text(tmp_path, a="one", b="two")
    for number in range(3):
        save_files(tmp_path, f"{number}.png")
    images = list_captioned(tmp_path)
    with expect_refusal("3 of 5 images have no caption, such as 0.png; put a .txt or "):
        settle_missing(images, None)
    assert settle_missing(images, CaptionsMissing.empty).entries == images.entries
    left = settle_missing(images, CaptionsMissing.drop)
    assert [entry.key for entry in left.entries] == ["a.png", "b.png"]
    assert images.notes == ["3 of 5 images have no caption, such as 0.png; they are left out"]
    (tmp_path / "0.png").unlink()
    half = list_captioned(tmp_path)
    assert settle_missing(half, None).entries == half.entries
    with expect_refusal("2 of 4 images have no caption"):
        settle_missing(half, CaptionsMissing.refuse)


@pytest.fixture
def captioned(more_photos):
    """Photos of which every other one has two paragraphs beside it."""
    for number, image in enumerate(sorted(more_photos.glob("*/*"))):
        if number % 2:
            image.with_suffix(".txt").write_text(f"number {number}\n\nof many words indeed")
    return more_photos


def test_a_job_says_which_images_it_leaves_out(captioned, job, capsys):
    out = job(*TEXT_JOB, "captions_missing=drop", source=captioned)
    said = capsys.readouterr().out
    assert "10 images without classes" in said
    assert "note: 10 of 20 images have no caption, such as cat/000.jpg; they are left out" in said
    manifest = read_manifest(out)
    assert manifest.count + manifest.held_out == 10
    assert not verify(VerifyConfig(path=str(out)))


def forget_keys(out, *keys):
    """Makes job.json as an earlier version wrote it, and the set unfinished."""
    (out / "manifest.json").unlink()
    content = {key: value for key, value in read_job(out).items() if key not in keys}
    (out / JOB_FILE).write_text(json.dumps(content | {"sha256": hash_content(content)}))


def test_an_unfinished_job_without_the_keys_goes_on_as_it_was(captioned, job, capsys):
    old = ["caption_lines=each", "captions_missing=empty", "convert_profile=false"]
    profile = (ROOT / "tests/assets/profiles/AdobeCompat-v2.icc").read_bytes()
    Image.new("RGB", (20, 20), "teal").save(captioned / "cat" / "p.png", icc_profile=profile)
    out = job(*TEXT_JOB, *old, source=captioned)
    content = read_contents(out)
    next(out.glob("train-*.tar")).unlink()
    forget_keys(out, "caption_lines", "captions_missing", "captions", "convert_profile")
    with expect_refusal(r"convert_profile was False, is True\); leave reuse out, or set what it "):
        job(*TEXT_JOB, *old[:2], f"reuse={out}", source=captioned, out="new")
    assert "up to 2 an image" in capsys.readouterr().out
    job(*TEXT_JOB, source=captioned)
    changed = {name for name, value in read_contents(out).items() if content[name] != value}
    assert changed <= {JOB_FILE}
    said = capsys.readouterr().out
    assert "up to 2 an image" in said
    assert "note: the job goes on as it began: colour profiles are not converted" in said
    job(*TEXT_JOB, old[2], source=captioned)
    assert "goes on as it began" not in capsys.readouterr().out
    with expect_refusal(r"out convert_profile=false, which copies"):
        job(*TEXT_JOB, "seed=1", source=captioned)
    with expect_refusal("caption_lines was each, is whole"):
        job(*TEXT_JOB, "caption_lines=whole", source=captioned)


@pytest.mark.parametrize(("limit", "kept"), [(0, 8), (3, 3), (64, 8)])
def test_captions_longer_than_what_is_kept_are_counted(
    limit, kept, captioned, job, tmp_path, capsys
):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(save_bert(tmp_path), model_max_length=8)
    tokenizer.save_pretrained(tmp_path)
    texts = ["apple " * number for number in range(1, 11)]
    for file, text in zip(sorted(captioned.glob("*/*.txt")), texts, strict=True):
        file.write_text(text)
    lengths = sorted(len(tokenizer(text)["input_ids"]) for text in texts)
    longer = [length for length in lengths if length > kept]
    words = ["text_encoder=transformers", f"text_encoder.path={tmp_path}", f"text_tokens={limit}"]
    job(*words, "classes=none", "dry_run=true", source=captioned)
    said = capsys.readouterr().out
    who = "text_tokens keeps" if limit == 3 else "the encoder reads"
    assert f"{len(longer)} of 10 captions are longer than the {kept} tokens that {who}" in said
    assert "8 tokens that the encoder reads (median of these: 10)" in said


def test_folders_named_by_numbers_are_classes_of_these_numbers(job, tmp_path, monkeypatch):
    for number in range(12):
        save_images(tmp_path / "photos", [str(number)], 2)
    by_number = [str(number) for number in range(12)]
    assert list_images(tmp_path / "photos").class_names == by_number

    # A set that was made with the classes in another order keeps that order.
    with monkeypatch.context() as patch:
        patch.setattr("encoding.sources.sort_class_names", lambda names, order: sorted(names))
        out = job(source=tmp_path / "photos")
    content = read_contents(out)
    assert read_manifest(out).class_names == sorted(by_number)
    job(source=tmp_path / "photos")
    next(out.glob("train-*.tar")).unlink()
    forget_keys(out)
    job(source=tmp_path / "photos")
    assert content.items() - read_contents(out).items() == {(JOB_FILE, content[JOB_FILE])}
