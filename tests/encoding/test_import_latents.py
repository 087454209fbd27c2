"""scripts.import_latents: latents of other tools arrive unchanged but for their scale, and the
command guesses nothing."""

import shutil

import numpy as np
import pytest
import torch

from common.config.compose import parse_words
from data.manifest import read_manifest
from scripts.import_latents import ImportConfig, import_latents
from scripts.verify_latents import VerifyConfig, verify
from tests.harness.foreign import (
    COUNT,
    FORMATS,
    edit_array,
    edit_members,
    edm2,
    fast_dit,
    musubi,
    npy,
    one_file,
    read_set,
    sd_scripts,
    tars,
    write_edited,
)
from tests.harness.refusals import expect_refusal
from tests.harness.sets import match, read_contents

SCALE = 0.5
"""The scaling_factor of the tiny autoencoder."""


@pytest.mark.parametrize("write", FORMATS)
def test_every_sample_arrives_with_its_label(write, samples, import_files, tmp_path):
    latents, labels = samples
    stored = (latents - 0.25) * SCALE
    folder = import_files(write, stored, scale=SCALE, shift=0.25, check_scale=True)
    tensors = read_set(folder)
    index = match(tensors["latents"], latents)
    assert torch.equal(tensors["labels"], labels[index])
    assert read_manifest(folder).class_names == ["0", "1", "2"]
    cfg = VerifyConfig(path=str(folder), count=2, out=str(tmp_path / "x.png"), device="cpu")
    assert verify(cfg) == []


def test_the_same_import_gives_the_same_bytes(import_files, tmp_path):
    one, two = (import_files(out=str(tmp_path / name)) for name in ("one", "two"))
    assert read_contents(one) == read_contents(two)


@pytest.mark.parametrize("moments", ["mean_std", "mean_logvar"])
def test_posteriors_are_kept(moments, samples, import_files):
    latents, _ = samples
    std = 0.1 + torch.rand(latents.shape)
    spread = std * SCALE if moments == "mean_std" else 2.0 * (std * SCALE).log()
    both = torch.cat([(latents - 0.25) * SCALE, spread], dim=1)
    folder = import_files(npy, both, moments=moments, scale=SCALE, shift=0.25)
    tensors = read_set(folder)
    index = match(tensors["latents"], latents)
    torch.testing.assert_close(tensors["std"], std[index])
    assert read_manifest(folder).kind == "mean_std"


@pytest.mark.parametrize("write", [sd_scripts, musubi])
def test_files_of_one_sample_each_have_no_labels(write, samples, import_files):
    with expect_refusal("0000_0048x0064_.* has no labels; .* or import without labels: classes=no"):
        import_files(write, classes=None)
    match(read_set(import_files(write))["latents"], samples[0])


@pytest.mark.parametrize("write", [sd_scripts, None])
def test_mirrored_latents_are_kept(write, samples, import_files):
    folder = import_files(write or one_file(latents_flip=-samples[0]))
    tensors = read_set(folder)
    assert read_manifest(folder).flips
    torch.testing.assert_close(tensors["mirrored"], -tensors["latents"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"encoder": None}, "encoder is not set; say encoder=.*it is not guessed"),
        ({"scale": None}, "scale is not set; say scale=.*it is not guessed"),
        (
            {"shift": None, "scale": SCALE},
            r"shift is not set, and this encoder has one \(0\.25\); say whether it was subtracted",
        ),
        (
            {"scale": 5.0, "check_scale": True},
            r"with scale=5\.0 the latents have a std of .*have about 2 \(its scaling_factor is 0\.",
        ),
        ({"scale": 0.0}, "scale=0 cannot be the factor of the latents; give another"),
        ({"moments": "mean_std"}, "moments=mean_std, but a std is negative"),
        ({"moments": "mean_logvar"}, r"cannot decode latents of shape \(1, 8, 6\)"),
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        (
            {"labels": None},
            r"latents\.npy has no labels; set labels_key=.*labels=<file>, or .* classes=none",
        ),
        ({"source": "nowhere"}, "source=nowhere does not exist"),
        ({"held_out": 0.99}, r"held_out=0\.99 of 30 latents leaves none to train on"),
        ({"classes": 2}, "sample 2 of .* has the label 2, not one class index from 0 to 1"),
        ({"classes": 10**9}, "classes=1000000000 must be a number from 1 to 1000000"),
        (
            {"out": "/dev/null/out"},
            r"out=.* cannot be written \(Not a directory\); choose another folder",
        ),
        ({"classes": "none"}, "labels=.* goes with .* not with classes=none; leave labels out"),
    ],
)
def test_what_is_not_said_or_cannot_be_is_refused(settings, sentence, import_files, tmp_path):
    with expect_refusal(sentence):
        import_files(**settings)
    assert not (tmp_path / "out").exists()


def test_an_odd_number_of_channels_has_no_posterior(samples, import_files):
    with expect_refusal("but latents have 1 channels, and"):
        import_files(npy, samples[0][:, :1], moments="mean_std")


def test_values_that_do_not_fit_leave_nothing_behind(samples, import_files, tmp_path):
    latents = samples[0].clone()
    latents[17, 1, 2, 3] = 1e6
    with expect_refusal("sample 17 of .* too large for dtype=float16; use dtype=bfloat16"):
        import_files(npy, latents, dtype="float16")
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def store_as(dtype):
    """Makes the writer of a file of latents of this kind, and of labels that are no integers."""
    return lambda path, latents, labels: one_file(latents=latents.to(dtype), labels=labels.float())(
        path, latents, labels
    )


def reorder(convert):
    """Makes the writer of arrays that `convert` makes, and of a column of labels."""
    write = write_edited(npy, edit_array("latents.npy", convert))
    make_column = edit_array("labels.npy", lambda labels: labels.astype(">i8").reshape(-1, 1))
    return write_edited(write, make_column)


@pytest.mark.parametrize(
    "write",
    [
        store_as(torch.bfloat16),
        store_as(torch.float8_e4m3fn),
        reorder(lambda latents: latents.astype(">f4")),
        reorder(np.asfortranarray),
    ],
)
def test_latents_of_other_kinds_and_orders_are_converted(write, samples, import_files):
    latents = samples[0].to(torch.float8_e4m3fn).float()
    tensors = read_set(import_files(write, latents))
    index = match(tensors["latents"], latents)
    assert torch.equal(tensors["labels"], samples[1][index])


def test_classes_are_as_many_as_are_said(import_files, capsys):
    folder = import_files(classes=10)
    assert read_manifest(folder).class_names == [*map(str, range(10))]
    assert "10 classes, 7 of them without a training sample" in capsys.readouterr().out


def test_the_command_takes_a_file_of_names_a_folder_and_encoder_local(samples, vae, tmp_path):
    """The words are those of precompute_latents.py, and `source` is the folder of latents.npy and
    labels.npy."""
    npy(tmp_path, *samples)

    def start():
        import_latents(parse_words(ImportConfig, words, ""))

    names = tmp_path / "names.txt"
    words = [f"source={tmp_path}", "encoder=local", f"encoder.path={vae}", "scale=1", "shift=0"]
    words += ["check_scale=false", "device=cpu", f"out={tmp_path}/out", f"classes={names}"]
    with expect_refusal("does not exist; give a number, none, or a text file"):
        start()
    names.write_text("pear\npear\n")
    with expect_refusal("must name each class once"):
        start()
    names.write_text("apple\n\npear \nplum\n")
    start()
    assert read_manifest(tmp_path / "out").class_names == ["apple", "pear", "plum"]
    match(read_set(tmp_path / "out")["latents"], samples[0].half().float())


@pytest.mark.parametrize(
    "write",
    [
        lambda *samples: {"source": npy(*samples)["source"], "labels": None},
        one_file(labels=torch.rand(3, 2)),
        write_edited(fast_dit, lambda path: shutil.rmtree(path / "imagenet256_labels")),
        write_edited(edm2, lambda path: (path / "dataset.json").write_text('{"labels": null}')),
        write_edited(edm2, lambda path: (path / "dataset.json").unlink()),
        write_edited(tars, edit_members({f"{i:04d}.cls": None for i in range(17)})),
    ],
)
def test_latents_without_labels_have_no_classes(write, samples, import_files):
    folder = import_files(write, classes="none")
    tensors = read_set(folder)
    match(tensors["latents"], samples[0])
    assert tensors["labels"].tolist() == [0] * COUNT
    assert read_manifest(folder).class_names == []


def test_a_folder_that_is_there_is_kept(import_files, tmp_path):
    folder = import_files()
    with expect_refusal("is there already; choose a new folder"):
        import_files()
    with expect_refusal("is a latent set of ours already; use it"):
        import_files(source=str(folder), out=str(tmp_path / "new"))
