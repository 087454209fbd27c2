"""Samples from prompts: a prompt is text, and its encoder the one that encoded the captions."""

import shutil

import numpy as np
import pytest
import torch

from common.config.compose import compose, parse_words
from common.files import read_object, write_json
from models.text import TextEmbedding
from sampling.load import TrainedModel, load_run
from scripts.evaluate import EvaluateConfig, evaluate_run
from scripts.export.__main__ import ExportConfig, export
from scripts.sample import SampleConfig, sample_run
from tests.harness.captions import DIGITS, save_bert, save_digits
from tests.harness.draws import make_job
from tests.harness.refusals import expect_refusal
from tests.harness.words import CPU, TINY_MODEL
from train import train
from training.inputs import build_loader

PROMPTS = [
    "red: apple",
    "tiger #2",
    "yes",
    "1e3",
    "*star",
    "[x",
    'a "quoted", (bracketed) {word}',
    "${seed} and ${env:HOME}",
    "prompt=twice=thrice",
    "it's a 🍎 – café",
    "--help",
    " ",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_arrives_as_it_was_typed(prompt):
    cfg = parse_words(SampleConfig, ["run_dir=runs/mine", f"prompt={prompt}", "count=3"], "")
    assert (cfg.prompt, cfg.count) == (prompt, 3)


@pytest.fixture(scope="module", params=["text", "class_and_text"])
def captioned_run(request, tmp_path_factory):
    """A few quick steps on digits with captions, of which attention reads the tokens; sixes have
    none. Read only."""
    return train_on_digits(tmp_path_factory.mktemp("captioned"), request.param, captionless=6)


def train_on_digits(folder, conditioning, **settings):
    """Makes a set with captions and trains a few steps on it; returns the folder of the run."""
    save_digits(folder / "set", count=64, **settings)
    words = f"""data=resident data.path={folder}/set model=dit_xs sample_every=8
    model.conditioning={conditioning} model.text_tokens=true
    eval_every=0 save_every=8 sampling.steps=3 sampling.per_class=2
    total_samples=128 batch_size=16 optim.lr=2e-2 runtime.precision=fp32 run_dir={folder}/run"""
    train(compose([*TINY_MODEL, *words.split()]))
    return folder / "run"


def draw(run, out, *words):
    """Draws by words of the command; returns the images, the labels and the facts."""
    words = [f"run_dir={run}", f"out={out}", "count=6", "batch_size=4", "steps=2", *words]
    file = sample_run(parse_words(SampleConfig, words, ""))
    with np.load(file) as arrays:
        facts = read_object(file.with_suffix(".json"))
        return arrays["arr_0"], arrays["labels"].tolist(), facts


def choose(model, *labels):
    """The labels for a model of classes and captions, which takes one for each prompt, or none."""
    return [] if model.conditioning == "text" else [*labels]


PROMPT = "the digit one"
OTHER = "the digit two"


def test_samples_of_prompts(captioned_run, tmp_path):
    model = load_run(captioned_run)
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\n\n{OTHER}\n")
    words = ["guidance=20"]  # after so few steps the images hardly differ
    words += choose(model, "labels=[1,2]")
    images, numbers, facts = draw(
        captioned_run, tmp_path / "a", f"prompts={tmp_path}/prompts.txt", *words
    )
    assert numbers == [0, 1, 0, 1, 0, 1]
    assert facts["classes"] == {"0": PROMPT, "1": OTHER}
    same, *_ = draw(captioned_run, tmp_path / "c", f"prompt=[{PROMPT},{OTHER}]", *words)
    assert np.array_equal(same, images)
    again = model.sample(
        choose(model, 1, 2) * 3, 4, prompts=[PROMPT, OTHER] * 3, steps=2, guidance=20.0
    )
    assert np.array_equal(again, images)
    words += ["grid=4", *choose(model, "labels=[1]")]
    other, _, other_facts = draw(captioned_run, tmp_path / "b", f"prompt={PROMPT}", *words)
    assert np.array_equal(other[0], images[0])
    assert not np.array_equal(other[1], images[1])
    assert other_facts["labels"] != facts["labels"]
    assert (tmp_path / "b.png").is_file()


def test_the_warm_up_reads_captions(captioned_run, monkeypatch):
    """The warm-up compiles the graph of the samples, so they do not wait for another."""
    seen = []
    real = TextEmbedding.forward

    def record(self, text, dropped):
        seen.append(text is not None and len(text.pooled) == len(dropped) == 8)
        return real(self, text, dropped)

    monkeypatch.setattr(TextEmbedding, "forward", record)
    make_job(captioned_run, "batch_size=4")
    assert seen[-1]


def test_samples_of_the_captions_of_the_data(captioned_run, tmp_path):
    """Held-out captions come in order, those of training in the order of the seed."""
    _, numbers, facts = draw(captioned_run, tmp_path / "a")
    config = compose(["data=resident", f"data.path={captioned_run.parent}/set"]).cfg.data
    loader = build_loader(config, 0, 6, CPU, text="pooled")
    held_out = next(loader.held_out(6))
    assert numbers == held_out.condition.numbers.tolist()
    names = [facts["classes"][str(number)] for number in numbers]
    first, *others = held_out.condition.labels.tolist()
    assert (first, names) == (6, ["", *(DIGITS[label] for label in others)])
    _, numbers, facts = draw(captioned_run, tmp_path / "c", "count=2", "grid=2")
    assert list(facts["classes"].values()) == [DIGITS[others[0]], ""]
    assert (tmp_path / "c.png").is_file()
    _, numbers, facts = draw(captioned_run, tmp_path / "b", "prompts=train")
    assert numbers == next(loader).condition.numbers.tolist()
    assert facts["labels"] == "train"
    assert list(captioned_run.glob("samples/*.png"))


def test_refusals(captioned_run, trained, tmp_path, monkeypatch):
    (tmp_path / "empty.txt").write_text("\n")
    needs = "which needs (prompts|a label for each prompt)"
    for run, word, sentence in (
        (trained, "prompt=one", "with model.conditioning=class, which needs labels"),
        (trained, "prompts=train", "prompts=train does not go with a model of classes"),
        (captioned_run, "prompts=absent.txt", "must be held_out, train, or a text file in UTF-8"),
        (captioned_run, f"prompts={tmp_path}/empty.txt", "has no prompt; write one on each line"),
        (captioned_run, "labels=[1]", needs),
        (captioned_run, "labels=data", "a model of captions takes labels and captions"),
    ):
        with expect_refusal(sentence):
            draw(run, tmp_path / "a", word)
    with expect_refusal("prompts=train does not go with prompt; leave it out"):
        draw(captioned_run, tmp_path / "a", "prompt=one", "prompts=train")
    model = load_run(captioned_run)
    for labels, prompts in [([0], []), ([], []), ([0, 1, 2], ["one", "two"])]:
        with expect_refusal(needs):
            model.sample(labels, prompts=prompts)
    weights = shutil.copy(next(captioned_run.glob("checkpoints/*/ema.safetensors")), tmp_path)
    with expect_refusal("prompts=held_out needs the run's data"):
        sample_run(SampleConfig(weights=str(weights), out=str(tmp_path / "a")))
    with expect_refusal("clip=x is for a model of texts"):
        evaluate_run(EvaluateConfig(run_dir=str(trained), clip="x", out=str(tmp_path / "e")))
    monkeypatch.setattr("models.text_encoders.hash_files", lambda files: "0" * 64)
    with expect_refusal("the text_encoder at None has other weights than the one that made"):
        model.sample(choose(model, 1), prompts=["one"])


def test_a_long_prompt_is_cut_and_said(captioned_run, capsys, monkeypatch):
    model = load_run(captioned_run)
    model.sample(choose(model, 0), prompts=["one " * 40], steps=1)
    assert "has 41 tokens, and attention reads 6" in capsys.readouterr().out
    monkeypatch.setattr(TrainedModel, "text_level", "pooled")
    monkeypatch.setattr("models.text_encoders.WordLlama.max_length", 30)
    model.make_conditions(choose(model, 0), ["one " * 40])
    assert "has 41 tokens, and the text encoder reads 30" in capsys.readouterr().out


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A tiny CLIP with random weights."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("clip")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "projection_dim": 8}
    vision = sizes | {"image_size": 16, "patch_size": 8}
    words = ["<|startoftext|>", "<|endoftext|>", "a", "o", "n", "e</w>", "e", "t"]
    text = sizes | {"vocab_size": len(words), "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    torch.manual_seed(0)
    transformers.CLIPModel(config).save_pretrained(folder)
    write_json(folder / "vocab.json", {word: i for i, word in enumerate(words)})
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(f"{folder}/vocab.json", f"{folder}/merges.txt")
    tokenizer.save_pretrained(folder)
    return folder


def test_the_clip_score(captioned_run, clip, tmp_path):
    """transformers computes it from the images and captions that the same settings draw."""
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    (result,) = evaluate_run(
        EvaluateConfig(
            run_dir=str(captioned_run),
            clip=str(clip),
            out=str(tmp_path / "figures"),
            count=8,
            steps=1,
        )
    )
    assert result["protocol"]["labels"] == "train"
    images, numbers, facts = draw(
        captioned_run, tmp_path / "s", "prompts=train", "steps=1", "count=8"
    )
    texts = [facts["classes"][str(number)] for number in numbers]
    tokens = AutoTokenizer.from_pretrained(clip)(texts, padding=True, return_tensors="pt")
    prepare = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=16)
    pixels = prepare(list(images), return_tensors="pt", input_data_format="channels_last")
    output = CLIPModel.from_pretrained(clip)(**pixels, **tokens)
    scores = torch.cosine_similarity(output.image_embeds, output.text_embeds)
    assert result["clip_score"] == pytest.approx(100 * scores.mean().item(), abs=0.3)


def test_the_exported_pipeline_takes_prompts(captioned_run, tmp_path):
    from diffusers import DiffusionPipeline

    model = load_run(captioned_run, runtime={})
    folder = export(ExportConfig(run_dir=str(captioned_run), out=str(tmp_path / "out")))
    pipe = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    prompts = [PROMPT, "some new words"]
    labels = choose(model, 0, 1)
    options = {"num_inference_steps": 2, "output_type": "np"}
    images = pipe(labels, prompt=prompts, **options).images
    expected = model.sample(labels, prompts=prompts, steps=2)
    assert np.array_equal(images, expected)
    if not labels:
        assert np.array_equal(pipe(PROMPT, **options).images[0], expected[0])
    with pytest.raises(ValueError, match=r"must be texts|a label for each prompt"):
        pipe([3, 4], **options)
    for wrong, given in (([], None), ([0, 1, 2], prompts)):
        with pytest.raises(ValueError, match=r"with model.conditioning=.*text, which needs"):
            pipe(wrong, prompt=given, **options)
    pipe.transformer.config.text["encoder_sha256"] = "0" * 64
    del pipe.text_encoder
    with pytest.raises(ValueError, match="other weights than in training"):
        pipe(labels, prompt=prompts, **options)


def test_an_exported_pipeline_opens_an_encoder_of_transformers(tmp_path):
    """The folder does not say where the encoder was on the machine that trained."""
    pytest.importorskip("transformers")
    from diffusers import DiffusionPipeline

    bert = save_bert(tmp_path)
    encoder = {"_target_": "models.text_encoders.HubTextEncoder", "path": str(bert)}
    run = train_on_digits(tmp_path, "text", templates=["a {}"], encoder=encoder)
    folder = export(ExportConfig(run_dir=str(run), out=str(tmp_path / "out")))
    for file in ("README.md", "transformer/config.json"):
        assert str(bert) not in (folder / file).read_text().replace(str(folder), "")
    assert "text_encoder_path=<the folder" in (folder / "README.md").read_text()
    pipe = DiffusionPipeline.from_pretrained(
        folder, trust_remote_code=True, text_encoder_path=str(bert)
    )
    images = pipe("a red apple", num_inference_steps=2, output_type="np").images
    expected = load_run(run, runtime={}).sample(prompts=["a red apple"], steps=2)
    assert np.array_equal(images, expected)
    pipe = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    with pytest.raises(ValueError, match="text_encoder_path=<folder>"):
        pipe("a red apple")
