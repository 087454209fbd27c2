"""Files of other tools that are broken, do not pair, or hold no latents or labels: each ends in one
sentence, and nothing is written."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from common.files import ROOT
from encoding.foreign import FORMATS, ForeignOptions, open_foreign
from scripts.import_weights import KINDS
from tests.harness.foreign import (
    COUNT,
    cut,
    edit_array,
    edit_list,
    edit_members,
    edm2,
    fast_dit,
    musubi,
    npy,
    one_file,
    pt,
    safetensors,
    sd_scripts,
    tars,
    write_edited,
)
from tests.harness.refusals import expect_refusal

FEATURE = "imagenet256_features/0003.npy"
CACHE = "0003_0048x0064_flux.npz"
ZEROS = torch.zeros(COUNT, 2, 8, 8)


LABELS = [
    (lambda labels: labels + 0.5, r"sample 0 of .* has the label 0\.5"),
    (lambda labels: np.eye(3)[labels], r"\[1\.0, 0\.0, 0\.0\], not one class.*argmax\(1\)"),
    (lambda labels: labels.astype(str), "has the label '0'"),
    (lambda labels: labels > 0, "has the label False"),
    (lambda labels: labels + np.nan, "has the label nan"),
    (lambda labels: labels - 1, "has the label -1, not one class index"),
    (lambda labels: labels + 10**9, "label 1000000000, not one class index from 0 to 29"),
]
LISTS = [
    (lambda pairs: pairs + pairs[:1], r"names 00000/img0000\.npy twice"),
    (lambda pairs: pairs[1:], r"1 \.npy files in .* have no label in dataset"),
    (lambda pairs: [*pairs, ["a.npy", 0]], r"a\.npy cannot be read \(it is no file"),
    (dict, r'labels should be .*; write \{"labels": \[\[file, label\], …\]\}'),
    (lambda pairs: [3, *pairs], r"is no list of labels: labels\.0 should be .* and is 3"),
    (lambda pairs: [["a\0b", 0], *pairs], r"cannot be read .*it is no file"),
    (lambda pairs: [["../evil.npy", 0]], r"names a file outside its folder: \.\./evil\.npy"),
]
MEMBERS = [
    ("0003.latent.npy", None, r"0003 has \.cls, of"),
    ("0003.cls", None, "0003 has .*no class index in"),
    ("0003.cls", b"\xff", r"0003\.cls cannot be read"),
    ("0003.cls", b"1_0", "0003 has the label '1_0'"),
]
"""Members whose content is replaced, or which are dropped."""
TENSORS = [
    ({"latents": ZEROS[:9]}, r"a\.safetensors has 9 latents and 30 labels"),
    ({"latents": ZEROS[0]}, r"a\.safetensors has 1 latents and 30 labels"),
    ({"flip": ZEROS / 0.0}, "sample 0 of .* has nan in the source itself"),
    ({"latents": ZEROS.long()}, r"sample 0 of .*a\.safetensors holds int64, and latents are"),
    ({"latents": ZEROS[:, :, :0].clone()}, r"sample 0 of .* has the shape \(2, 0, 8\), and"),
    ({"latents": ZEROS[:0], "labels": torch.zeros(0)}, "source=.* holds no samples"),
]
FILES = [
    (npy, cut("latents.npy", 900), r"latents\.npy cannot be read \(mmap length is greater"),
    (
        fast_dit,
        edit_array(FEATURE, lambda latents: latents.view([("a", "f4")])),
        rf"{FEATURE} holds \[\('a'",
    ),
    (
        fast_dit,
        edit_array(FEATURE, lambda latents: latents[..., :4]),
        r"0003\.npy has latents of shape \(2, 8, 4\)",
    ),
    (fast_dit, lambda path: (path / FEATURE).unlink(), rf"0003\.npy lacks .*{FEATURE}; restore"),
    (safetensors, cut("imagenet_256x256_1.safetensors", 20), r"256_1\.safetensors cannot be read"),
    (pt, cut("all.pt", 900), r"all\.pt cannot be read"),
    (pt, lambda path: pt(path, ZEROS, [0]), "labels is a list"),
    (
        pt,
        lambda path: pt(path, ZEROS[:1].expand(10**12, 2, 8, 8), torch.zeros(1).expand(10**12)),
        r"latents is a Tensor, and no dense .*, an expanded tensor as \.contiguous",
    ),
    (
        sd_scripts,
        lambda path: np.savez_compressed(path / CACHE, ZEROS[0]),
        f"{CACHE} holds compressed arrays; write them by",
    ),
    (
        sd_scripts,
        lambda path: np.savez(path / CACHE, latents_8x8=ZEROS[0], latents_9x9=ZEROS[0]),
        rf"{CACHE} has no latents; set latents_key=<name> \(it holds latents_8x8, latents_9x9",
    ),
    (sd_scripts, cut(CACHE, 9), rf"{CACHE} cannot be read \(File is not a zip file\)"),
    (
        musubi,
        lambda path: (path / "0064x0064_qie.safetensors").touch(),
        r"_qie\.safetensors holds latents of Qwen-Image that .* encode the pictures by .*=qwen",
    ),
    (
        musubi,
        lambda path: save_file(
            {"latents_3x8x8_float32": torch.zeros(2, 3, 8, 8)}, path / "0_wan.safetensors"
        ),
        r"wan\.safetensors has the shape \(2, 3, 8, 8\), and .* without the frames of a video",
    ),
    (
        tars,  # `cat` appends a tar to itself
        lambda path: (path / "0.tar").write_bytes((path / "0.tar").read_bytes() * 2),
        "0000.cls is there twice",
    ),
    (
        tars,  # cut between members: a header begins with the member's name
        lambda path: cut("0.tar", (path / "0.tar").read_bytes().index(b"0003.latent.npy"))(path),
        r"0\.tar was cut or is damaged: .* no end marker",
    ),
    (tars, cut("0.tar", 0), r"0\.tar is empty; fetch it again"),
    (
        edm2,
        lambda path: (path / "dataset.json").write_text("[" * 100000),
        r"dataset\.json is not valid JSON",
    ),
    (edm2, lambda path: (path / "a.tar").touch(), "holds several formats; give one"),
    (lambda path, *_: {"source": str(path)}, lambda path: None, "holds no known format; give one"),
]
FAULTS = [
    *((npy, edit_array("labels.npy", change), sentence) for change, sentence in LABELS),
    *((edm2, edit_list(change), sentence) for change, sentence in LISTS),
    *((tars, edit_members({name: content}), sentence) for name, content, sentence in MEMBERS),
    *((one_file(**tensors), lambda path: None, sentence) for tensors, sentence in TENSORS),
    *FILES,
]


@pytest.mark.parametrize(("write", "edit", "sentence"), FAULTS)
def test_a_fault_ends_in_one_sentence_and_leaves_nothing(
    write, edit, sentence, import_files, tmp_path
):
    with expect_refusal(sentence):
        import_files(write_edited(write, edit))
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def test_the_page_lists_every_format():
    row = r"(?m)^\| `([^`]+)` \| .* `[\w.]+` \|$"
    names = re.findall(row, (ROOT / "docs/exchange.md").read_text())
    assert names == [*(known.name for known in FORMATS), *KINDS]


def test_nothing_is_unpickled(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    torch.save({"latents": Evil()}, tmp_path / "evil.pt")
    np.save(tmp_path / "evil.npy", np.array([Evil()], dtype=object))
    for name in ("evil.pt", "evil.npy"):
        with expect_refusal("cannot be read .*save plain tensors, for nothing is unpickled"):
            open_foreign(str(tmp_path / name), ForeignOptions())
    assert not (tmp_path / "owned").exists()
