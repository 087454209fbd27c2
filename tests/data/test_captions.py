"""Captions beside latents: stored once, chosen in an exact order, verified."""

from collections import Counter

import pytest
import torch

from data.blocks import DamagedBlockError
from data.caption_table import quantise
from data.loader import choose_captions
from data.manifest import read_manifest
from encoding.caption_job import CaptionJob
from models.text_encoders import WordLlama
from scripts.verify_latents import VerifyConfig, verify
from tests.harness.batches import LOADERS, resident, take
from tests.harness.captions import plan_captions, read_table, save_captioned_set
from tests.harness.refusals import expect_refusal
from tests.harness.sets import edit_manifest, flip_byte, save_random_set


@pytest.fixture
def folder(tmp_path):
    return save_captioned_set(tmp_path / "set", 20, 16, held_out=5)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_each_different_caption_is_stored_once(dtype, tmp_path):
    folder = save_captioned_set(tmp_path, 40, held_out=4, text_dtype=dtype)
    table = read_table(folder)
    text = read_manifest(folder).text
    assert (text.count, text.per_image, text.width, text.dtype) == (31, 3, 256, dtype)
    assert len(set(table.texts)) == 31
    stored = table.columns.select(torch.arange(-1, 30))
    texts = ["", *table.texts[:30]]
    assert table.texts[30] == ""
    assert stored.pooled[0].tolist() == text.empty_pooled
    again = WordLlama().encode(texts, text.max_tokens)
    assert torch.equal(stored.pooled, again.pooled)
    assert stored.lengths.tolist() == again.lengths.tolist()
    close = torch.cosine_similarity(stored.tokens.float(), again.tokens.float(), dim=2)
    assert (close[stored.tokens.abs().sum(2) > 0] > (0.9999 if dtype == "float16" else 0.999)).all()
    assert read_table(folder, "pooled").columns.select(torch.arange(3)).tokens.shape == (3, 0, 256)


@pytest.mark.parametrize("kind", LOADERS)
def test_all_captions_of_a_sample_come_equally_often(kind, folder):
    """In 6 epochs a sample with k of 1, 2 or 3 captions has each of them 6 / k times."""
    stream = take(LOADERS[kind](folder, batch_size=12, text="pooled"), 6 * 36 // 12)
    seen = Counter(zip(stream.ids.tolist(), stream.condition.numbers.tolist(), strict=True))
    for sample in range(36):
        times = [n for (i, _), n in seen.items() if i == sample]
        assert times == [6 // max(1, sample % 4)] * max(1, sample % 4)
    empty = stream.condition.numbers[stream.ids % 4 == 0]
    assert empty.eq(30).all()


def test_the_first_caption_of_samples_is_random():
    captions = torch.arange(4, dtype=torch.int32).repeat(4000, 1)
    ids = torch.arange(4000)
    for seed in range(2):
        counts = torch.bincount(choose_captions(captions, ids, seed, 0))
        assert (counts - 1000).abs().max() < 5 * 750**0.5
    one, other = (choose_captions(captions, ids, seed, 0) for seed in range(2))
    assert not torch.equal(one, other)


def test_a_run_of_classes_reads_no_captions(folder):
    (folder / "captions-00000.tar").unlink()
    assert next(resident(folder)).condition.text is None
    with pytest.raises(DamagedBlockError, match="is missing"):
        resident(folder, text="pooled")


WRONG_TEXTS = b"""{ 5 null [] ["a","a","a","a","a","a","a"] ["a","a","a","a","a","a","a","a","a"]
[1,1,1,1,1,1,1,1] [["a"],["a"],["a"],["a"],["a"],["a"],["a"],["a"]] ["a","a","a","a","a","a","a",0]
""".split()
"""Wrong texts of a block of eight captions."""


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("", 0, "is damaged: its sha256 differs"),
        ("pooled", 0.0, "holds a caption whose vector is zero"),
        ("lengths", 99, "holds captions of more than"),
        *(("text", [*text], "holds text") for text in WRONG_TEXTS),
        ("text", 5, "holds text"),
    ],
)
def test_damaged_captions_stop_a_run_and_are_found(name, value, sentence, monkeypatch, tmp_path):
    """Also those of a faulty program, whose hashes are right."""
    encode = CaptionJob.encode

    def encode_wrong(self, texts):
        block = encode(self, texts)
        if name == "text":
            block[name] = torch.tensor(value, dtype=torch.uint8)
        elif name:
            block[name][3] = value
        return block

    monkeypatch.setattr(CaptionJob, "encode", encode_wrong)
    folder = save_captioned_set(tmp_path, 20, 16)
    if not name:
        flip_byte(folder / "captions-00000.tar", 2000)
    for kind in ("resident", "webdataset"):
        for on_corrupt in ("error", "skip"):
            with expect_refusal(sentence):
                LOADERS[kind](folder, text="tokens", on_corrupt=on_corrupt)
    problem = next(line for line in verify(VerifyConfig(str(folder), count=0)) if sentence in line)
    assert "of captions)" in problem


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"empty_pooled": [0.0] * 256}, "the empty caption has a vector of zeros"),
        ({"empty_tokens": [[1.0]]}, "has not 256 values"),
        ({"empty_tokens": []}, "the empty caption has 0 tokens"),
        ({"count": 29}, "the captions shards hold 31 samples, and it says 29"),
    ],
)
def test_a_manifest_that_contradicts_itself(changes, sentence, folder):
    edit_manifest(folder, text=vars(read_manifest(folder).text) | changes)
    with expect_refusal(sentence):
        read_manifest(folder)


def test_captions_that_the_table_lacks(monkeypatch, tmp_path):
    number = CaptionJob.number_captions
    monkeypatch.setattr(CaptionJob, "number_captions", lambda *args: 9 * number(*args).abs())
    with expect_refusal(r"holds captions from \d to \d+, but there are 31 captions"):
        resident(save_captioned_set(tmp_path, 20, 16))


def test_older_sets_have_no_captions(tmp_path):
    loader = resident(save_random_set(tmp_path, 8), text="tokens")
    assert loader.spec.text is None
    assert next(loader).condition.text is None


def test_small_vectors_keep_their_direction_in_8_bits():
    vectors = torch.tensor([[1.5e-3, -1e-3, 6e-5]]).half()
    ratios = quantise(vectors, torch.int8).float() / 127.0
    torch.testing.assert_close(ratios, vectors.float() / 1.5e-3, atol=0.005, rtol=0.01)


def test_a_cut_caption_is_pooled_whole():
    """Tokens after the first `text_tokens` are not stored, but the pooled vector knows them."""
    texts = [["one red apple on a table"], ["one red apple"]]
    job = plan_captions(texts, text_tokens=3)
    block = job.encode(job.texts)
    rows = [job.texts.index(text) for (text,) in texts]
    assert block["lengths"][rows].tolist() == [3, 3]
    assert torch.equal(*block["tokens"][rows])
    assert torch.equal(block["pooled"], WordLlama().encode(job.texts, 0).pooled)
    assert not torch.equal(*block["pooled"][rows])
