"""Captions for latent sets: random samples, and handwritten digits described by templates."""

import torch

from common.config.schema import PrecomputeConfig
from data.blocks import BlockReader
from data.caption_blocks import read_captions
from data.digits import DigitLatents
from data.manifest import read_manifest
from data.source import open_source
from encoding.caption_job import CaptionJob
from tests.harness.sets import PIXELS, save_files, save_latent_set, save_random_set
from tests.harness.words import CPU

WORDLLAMA = {"_target_": "models.text_encoders.WordLlama"}
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEMPLATES = [
    "{}",
    "the digit {}",
    "a handwritten {}",
    "this is a {}",
    "{} on paper",
    "a picture of the figure {}",
    "somebody wrote {} with a pen",
    "{} as a small grey image",
]
UNSEEN = ["please draw the number {}", "a scan that shows {}", "{} written by hand"]


def plan_captions(captions, encoder=WORDLLAMA, **settings):
    """A CaptionJob in small shards."""
    sizes = {"shard_size": 32, "block_size": 8} | settings
    return CaptionJob(captions, PrecomputeConfig(text_encoder=encoder, **sizes), CPU)


def save_bert(folder):
    """A tiny BERT with random weights, and its tokenizer, as transformers saves them."""
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "apple", "pear"]
    (folder / "vocab.txt").write_text("\n".join(words))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(words), intermediate_size=32, **sizes)
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def save_text(path, **texts):
    """Writes an image and the text beside it for each name."""
    for name, text in texts.items():
        save_files(path, f"{name}.png")
        save_files(path, f"{name}.txt", content=text.encode())
    return path


def save_captioned_set(folder, *train, held_out=0, **settings):
    """Saves a random set in which sample i has i % 4 captions, some of them those of others."""
    total = sum(train) + held_out
    captions = [[f"caption {(i + j) % 30} of a sample" for j in range(i % 4)] for i in range(total)]
    return save_random_set(
        folder, *train, held_out=held_out, captions=plan_captions(captions, **settings)
    )


def save_digits(folder, templates=TEMPLATES, count=None, captionless=None, **settings):
    """Writes the digits, or the first `count` of each split, with a caption for each template, but
    none for the digit `captionless`."""
    loader = DigitLatents(batch_size=1, seed=0, device=CPU)
    splits = {"train": loader.whole.train, "held_out": loader.whole.held_out}
    shards = [
        (name, {"latents": split.latents[:count], "labels": split.labels[:count]})
        for name, split in splits.items()
    ]
    labels = torch.cat([tensors["labels"] for _, tensors in shards]).tolist()
    templates = [[] if label == captionless else templates for label in labels]
    names = [DIGITS[label] for label in labels]
    captions = [[t.format(n) for t in own] for own, n in zip(templates, names, strict=True)]
    facts = {"mean": loader.spec.mean, "std": loader.spec.std, "class_names": DIGITS}
    facts |= {"encoder": PIXELS, "encoder_sha256": None, "scaling_factor": None}
    facts |= {"kind": "sample", "dtype": "float32", "flips": False}
    save_latent_set(folder, shards, plan_captions(captions, **settings), **facts)
    return folder


def read_table(folder, level="tokens"):
    """The captions of a latent set, encoded."""
    table = read_captions(BlockReader(open_source(folder), read_manifest(folder), "train"), level)
    assert table is not None
    return table
