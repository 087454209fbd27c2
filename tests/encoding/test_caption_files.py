"""Captions of images: where they are found, and encoded once beside the latents."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config.build import build
from data.manifest import read_manifest
from encoding.caption_files import CaptionReader, fill_templates
from encoding.sources import list_images
from models.text_encoders import HubTextEncoder, WordLlama
from tests.harness.captions import read_table, save_bert, save_text
from tests.harness.foreign import read_set
from tests.harness.refusals import expect_refusal
from tests.harness.sets import PNG, flip_byte, read_contents, save_files


def list_captions(source, **options):
    options = {"classes": "none", "reader": CaptionReader()} | options
    return [entry.captions for entry in list_images(source, **options).entries]


@pytest.mark.parametrize(
    ("content", "captions"),
    [
        ('\ufeff"one"', ("one",)),
        ('{"prompt": "last", "caption": "one"}', ("one",)),
        ('{"captions": ["one", " ", "one"]}', ("one",)),
        ('{"tags": ["one", null, {}, "two"], "meta": {}}', ("one, two",)),
        ('{"captions": [null, " "], "caption": null, "text": "one"}', ("one",)),
        ('[null, "a \\ud800 half"]', ("a ? half",)),
    ],
)
def test_json_of_many_forms(content, captions):
    assert CaptionReader().parse("a.json", content.encode()) == captions


@pytest.mark.parametrize("content", [b'{"text": 3}', b"no json", b"\xff\xfe", b"[" * 99999])
def test_json_without_captions(content):
    with expect_refusal(r"a\.json (must hold a caption|holds no captions in UTF-8)"):
        CaptionReader().parse("a.json", content)


def test_columns_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"image": [{"bytes": PNG, "path": None}] * 2, "text": ["one", "two"]}
    features = datasets.Features(image=datasets.Image(), text=datasets.Value("string"))
    saved = datasets.Dataset.from_dict(rows, features=features)
    saved.save_to_disk(tmp_path / "one")
    assert list_captions(tmp_path / "one") == [("one",), ("two",)]
    saved.rename_column("text", "words").save_to_disk(tmp_path / "two")
    with expect_refusal("has no column of captions"):
        list_captions(tmp_path / "two")


def test_links_out_of_the_source_are_followed_and_counted(tmp_path):
    source = save_text(tmp_path / "photos", a="one")
    save_text(tmp_path / "other", b="two")
    for name in ("other/b.png", "other/b.txt", "other", "photos/a.png"):
        (source / name.replace("/", "-")).symlink_to(tmp_path / name)
    listed = list_images(source, "none", reader=CaptionReader())
    assert listed.entries[1].captions == ("two",)
    assert listed.notes == [
        "links out of the source, which are followed: 1 .png (e.g. other-b.png); 1 .txt (e.g. "
        "other-b.txt); 1 folders (e.g. other)"
    ]


def test_templates_of_class_names(tmp_path):
    save_files(tmp_path / "photos", "red_apple/0.png", "pear/0.png")
    images = list_images(tmp_path / "photos")
    file = tmp_path / "templates.txt"
    file.write_text("a {}\n\n{}, drawn\n")
    captions = [entry.captions for entry in fill_templates(images, str(file)).entries]
    assert captions == [("a pear", "pear, drawn"), ("a red apple", "red apple, drawn")]
    file.write_text("a {}\nnothing\n")
    with expect_refusal(r"each line must have \{\}"):
        fill_templates(images, str(file))
    with expect_refusal("must be given, a table .*, or a text file with a template"):
        fill_templates(images, str(tmp_path / "absent"))
    with expect_refusal("the source has no classes"):
        file.write_text("a {}")
        fill_templates(list_images(tmp_path / "photos", "none"), str(file))


WORDS = ["text_encoder=wordllama", "max_captions=2"]


@pytest.fixture
def captioned(photos, tmp_path):
    """The photos with a caption of their class and number, the first without."""
    source = tmp_path / "captioned"
    shutil.copytree(photos, source)
    for i, image in enumerate(sorted(source.glob("*/*.*"))[1:]):
        image.with_suffix(".txt").write_text(f"a {image.parent.name}\nnumber {i % 3}\nleft out")
    return source


def test_a_job_with_captions(captioned, job, capsys):
    out = job(*WORDS, f"source={captioned}")
    said = capsys.readouterr().out
    assert (
        "different captions, up to 2 an image, in at most 3 tokens of 256 values in float" in said
    )
    assert "note: 1 images have no caption, and get the empty one" in said
    assert said.rstrip().endswith("model.conditioning=text")
    manifest = read_manifest(out)
    texts = [*read_table(out).texts]
    assert "left out" not in texts
    tensors = read_set(out)
    for own, label in zip(tensors["captions"].tolist(), tensors["labels"].tolist(), strict=True):
        if own != [-1, -1]:
            assert texts[own[0]] == f"a {manifest.class_names[label]}"
            assert texts[own[1]].startswith("number ")

    # What is lost is written again, with the same bytes; other captions are another job.
    whole = read_contents(out)
    (out / "manifest.json").unlink()
    flip_byte(out / "captions-00000.tar")
    job(*WORDS, f"source={captioned}")
    assert read_contents(out) == whole
    next(captioned.glob("*/*.txt")).write_text("another caption")
    others = "max_captions was 2, is 1; text_dtype was float16, is int8; text_tokens was 64, is 2"
    with expect_refusal(f"work of another command .captions_sha256 was .*; {others}"):
        job(*WORDS, f"source={captioned}", "text_tokens=2", "text_dtype=int8", "max_captions=1")
    with expect_refusal("text_encoder was .*, is None"):
        job(f"source={captioned}")


def test_captions_that_nobody_wrote(job, tmp_path):
    with expect_refusal("20 of 20 images have no caption, such as cat/000.jpg; put a "):
        job("text_encoder=wordllama", "captions_missing=empty")
    (tmp_path / "words.txt").write_text("a {}")
    templates = f"captions={tmp_path / 'words.txt'}"
    with expect_refusal(r"text_encoder\.path"):
        job(templates, "text_encoder=transformers", "text_encoder.path=nowhere")
    with expect_refusal("captions=templates.txt needs an encoder"):
        job("captions=templates.txt")


def test_an_import_takes_captions(import_files, tmp_path):
    file = tmp_path / "captions.json"
    captions = [["one"], ["two", "three"], [], *[["x"]] * 27]
    file.write_text(json.dumps(["one", *captions[1:]]))
    with expect_refusal("and text_encoder=None: set both, or none"):
        import_files(captions=str(file))
    settings = {"captions": str(file), "text_encoder": "wordllama"}
    out = import_files(**settings)
    texts = [*read_table(out, "pooled").texts]
    numbers = read_set(out)["captions"].tolist()
    assert sorted([texts[n] for n in row if n >= 0] for row in numbers) == sorted(captions)
    file.write_text('["one"]')
    with expect_refusal("must be a list with 30 entries"):
        import_files(out=str(tmp_path / "other"), **settings)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    pytest.importorskip("transformers")
    return save_bert(tmp_path_factory.mktemp("bert"))


def build_encoder(path, **options):
    node = {"_target_": "models.text_encoders.HubTextEncoder", "path": str(path), **options}
    return build(node, "text_encoder")


def test_an_encoder_of_transformers(bert, tmp_path):
    encoder = build_encoder(bert)
    assert (encoder.kind, encoder.width, encoder.revision) == ("BertModel", 16, None)
    text = encoder.encode(["", "a red apple", "pear"], 8, batch_size=2)
    assert text.lengths.tolist() == [2, 5, 3]
    assert text.tokens.shape == (3, 8, 16)
    assert text.tokens[0, 2:].eq(0).all()
    alone = encoder.encode(["pear"], 8)
    torch.testing.assert_close(alone.tokens[0], text.tokens[2], atol=2e-3, rtol=0.0)
    mean = text.tokens[1, :5].float().mean(0)
    torch.testing.assert_close(text.pooled[1].float(), mean, atol=2e-3, rtol=0.0)

    other = shutil.copytree(bert, tmp_path / "other")
    assert build_encoder(other).weights_sha256 == encoder.weights_sha256
    flip_byte(other / "model.safetensors")
    assert build_encoder(other).weights_sha256 != encoder.weights_sha256

    # All files that change tokens count, and no others.
    plain = shutil.copytree(bert, tmp_path / "plain")
    (plain / "tokenizer").mkdir()
    (plain / "tokenization_bert.py").write_text("")
    assert build_encoder(plain).weights_sha256 == encoder.weights_sha256
    (plain / "added_tokens.json").write_text('{"cherry": 9}')
    assert build_encoder(plain).weights_sha256 != encoder.weights_sha256
    with expect_refusal("dtype=bf16"):
        build_encoder(other, dtype="bf16")
    assert build_encoder(other, dtype="bfloat16").encode(["pear"], 2).tokens.dtype == torch.half
    tensors = load_file(other / "model.safetensors")
    first = tensors.pop("encoder.layer.0.output.dense.weight")
    save_file(tensors | {"misnamed": first}, other / "model.safetensors")
    with expect_refusal("lacks 1 weights of a BertModel, such as encoder.layer.0.output.dense"):
        build_encoder(other)
    (other / "model.safetensors").unlink()
    with expect_refusal("cannot be opened by transformers"):
        build_encoder(other)


def save_larger_model(name, folder):
    """A tiny model with random weights, of which at most a part reads text."""
    import transformers

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes["num_attention_heads"] = 2
    vision = sizes | {"image_size": 16, "patch_size": 8}
    if name == "T5":
        config = transformers.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1)
        model = transformers.T5ForConditionalGeneration(config)
    elif name == "CLIP":
        text = sizes | {"vocab_size": 9, "max_position_embeddings": 6}
        config = transformers.CLIPConfig(text_config=text, vision_config=vision)
        model = transformers.CLIPModel(config)
    else:
        model = transformers.ViTModel(transformers.ViTConfig(**vision))
    model.save_pretrained(folder)


def test_the_text_part_of_a_larger_model_is_taken_and_a_model_of_images_refused(bert, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "model")
    for name, kind in (("T5", "T5EncoderModel"), ("CLIP", "CLIPTextModel")):
        save_larger_model(name, folder)
        encoder = build_encoder(folder)
        assert (encoder.kind, encoder.width) == (kind, 8)
        assert encoder.encode(["a red apple", "a " * 9], 8).lengths.tolist()[0] == 5
    save_larger_model("ViT", folder)
    with expect_refusal("ViTModel gives no vectors of a text alone"):
        build_encoder(folder)


def test_a_package_that_is_missing(bert, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with expect_refusal(r"needs the package transformers: pip install 'fastlatent\[text"):
        HubTextEncoder(str(bert))
    monkeypatch.setattr("models.text_encoders.find_spec", lambda name: None)
    with expect_refusal(r"needs the package wordllama: pip install 'fastlatent\[text"):
        WordLlama()
