"""scripts.import_latents: what other tools wrote, unchanged but for its scale; and nothing
guessed."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from data.blocks import BlockReader
from data.manifest import read_manifest
from data.resident import ResidentLatents
from data.source import open_source
from encoding.foreign import ForeignOptions, open_foreign
from scripts.import_latents import ImportConfig, check_config, import_latents, main
from scripts.verify_latents import VerifyConfig, verify
from tests.harness.words import CPU
from training.config.compose import parse_words, report_user_errors

COUNT = 30
SCALE = 0.5
"""The tiny autoencoder's scaling_factor is 0.5: its raw latents are about 2 in size."""


@pytest.fixture(scope="module")
def samples() -> tuple[Tensor, Tensor]:
    """Raw latents as the encoder would give them, and labels."""
    generator = torch.Generator().manual_seed(0)
    return 2.0 * torch.randn(COUNT, 2, 8, 8, generator=generator), torch.arange(COUNT) % 3


def npy(path: Path, latents: Tensor, labels: Tensor) -> dict[str, str]:
    np.save(path / "latents.npy", latents.numpy())
    np.save(path / "labels.npy", labels.numpy())
    return {"source": str(path / "latents.npy"), "labels": str(path / "labels.npy")}


def pt(path: Path, latents: Tensor, labels: Tensor) -> dict[str, str]:
    torch.save({"z": latents, "y": labels}, path / "all.pt")
    return {"source": str(path / "all.pt"), "latents_key": "z", "labels_key": "y"}


def pt_alone(path: Path, latents: Tensor, labels: Tensor) -> dict[str, str]:
    torch.save(latents, path / "latents.pt")
    torch.save(labels, path / "labels.pt")
    return {"source": str(path / "latents.pt"), "labels": str(path / "labels.pt")}


def safetensors(path: Path, latents: Tensor, labels: Tensor) -> dict[str, str]:
    for i, part in enumerate(torch.arange(COUNT).split(13)):
        save_file(
            {"latents": latents[part], "labels": labels[part]}, path / f"latents_{i}.safetensors"
        )
    return {"source": str(path)}


def fast_dit(path: Path, latents: Tensor, labels: Tensor) -> dict[str, str]:
    for name in ("imagenet256_features", "imagenet256_labels"):
        (path / name).mkdir()
    for i in range(COUNT):
        np.save(path / "imagenet256_features" / f"{i:04d}.npy", latents[i : i + 1].numpy())
        np.save(path / "imagenet256_labels" / f"{i:04d}.npy", labels[i : i + 1].numpy())
    return {"source": str(path)}


def edm2(path: Path, latents: Tensor, labels: Tensor) -> dict[str, str]:
    (path / "00000").mkdir()
    for i in range(COUNT):
        np.save(path / "00000" / f"img{i:04d}.npy", latents[i].numpy())
    listed = [[f"00000/img{i:04d}.npy", int(labels[i])] for i in range(COUNT)]
    (path / "dataset.json").write_text(json.dumps({"labels": listed}))
    return {"source": str(path)}


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def tars(path: Path, latents: Tensor, labels: Tensor) -> dict[str, str]:
    for number, part in enumerate(torch.arange(COUNT).split(17)):
        with tarfile.open(path / f"{number}.tar", "w") as tar:
            for i in part.tolist():
                if number:
                    add(tar, f"{i:04d}.safetensors", save({"latents": latents[i].clone()}))
                    add(tar, f"{i:04d}.json", json.dumps({"label": int(labels[i])}).encode())
                else:
                    stream = io.BytesIO()
                    np.save(stream, latents[i].numpy())
                    add(tar, f"{i:04d}.latent.npy", stream.getvalue())
                    add(tar, f"{i:04d}.cls", str(int(labels[i])).encode())
    return {"source": str(path)}


FORMATS = [npy, pt, pt_alone, safetensors, fast_dit, edm2, tars]


@pytest.fixture
def run(vae: Path, tmp_path: Path) -> Callable[..., Path]:
    """`run(source=…, …)` imports and returns the folder."""

    def start(**settings: object) -> Path:
        given = {
            "encoder": str(vae),
            "scale": SCALE,
            "shift": 0.25,
            "out": str(tmp_path / "out"),
            "device": "cpu",
        }
        small = {"held_out": 0.2, "shard_size": 7, "block_size": 3, "dtype": "float32"}
        cfg = ImportConfig(**given | small | settings)  # pyright: ignore[reportArgumentType]
        return import_latents(check_config(cfg)).parent

    return start


def everything(folder: Path) -> dict[str, Tensor]:
    source = open_source(folder)
    blocks = [BlockReader(source, read_manifest(source), split) for split in ("train", "held_out")]
    parts = [reader.read(number) for reader in blocks for number in range(len(reader.places))]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def matched(found: Tensor, expected: Tensor) -> list[int]:
    """For each found sample the expected one; each is there once."""
    distance = (found.flatten(1)[:, None] - expected.flatten(1)[None]).abs().amax(2)
    assert distance.amin(1).max() < 1e-5
    index = distance.argmin(1).tolist()
    assert sorted(index) == list(range(len(expected)))
    return index


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_every_sample_arrives_with_its_label(write, samples, run, tmp_path: Path):
    (tmp_path / "in").mkdir()
    latents, labels = samples
    folder = run(**write(tmp_path / "in", (latents - 0.25) * SCALE, labels))
    found = everything(folder)
    index = matched(found["latents"], latents)
    assert torch.equal(found["labels"], labels[index])
    manifest = read_manifest(folder)
    assert (manifest.count, manifest.held_out, len(manifest.shards)) == (24, 6, 5)
    assert (manifest.kind, manifest.class_names, manifest.psnr_db) == (
        "sample",
        ["0", "1", "2"],
        None,
    )
    assert (
        verify(VerifyConfig(path=str(folder), count=2, out=str(tmp_path / "x.png"), device="cpu"))
        == []
    )
    loader = ResidentLatents(path=str(folder), batch_size=24, seed=0, device=CPU)
    assert abs(next(loader).latents.std() - 1.0) < 0.05


def test_the_same_import_gives_the_same_bytes(samples, run, tmp_path: Path):
    (tmp_path / "in").mkdir()
    source = npy(tmp_path / "in", *samples)
    one, two = (run(**source, scale=1.0, out=str(tmp_path / name)) for name in ("one", "two"))
    for file in sorted(one.glob("*.tar")):
        assert file.read_bytes() == (two / file.name).read_bytes()
    assert read_manifest(one).compute_fingerprint() == read_manifest(two).compute_fingerprint()


@pytest.mark.parametrize("moments", ["mean_std", "mean_logvar"])
def test_posteriors_are_kept(moments: str, samples, run, tmp_path: Path):
    (tmp_path / "in").mkdir()
    latents, labels = samples
    std = 0.1 + torch.rand(latents.shape)
    second = std * SCALE if moments == "mean_std" else 2.0 * (std * SCALE).log()
    both = torch.cat([(latents - 0.25) * SCALE, second], dim=1)
    folder = run(**npy(tmp_path / "in", both, labels), moments=moments)
    found = everything(folder)
    index = matched(found["latents"], latents)
    torch.testing.assert_close(found["std"], std[index])
    assert read_manifest(folder).kind == "mean_std"


def test_mirrored_latents_are_kept(samples, run, tmp_path: Path):
    latents, labels = samples
    stored = {"latents": latents * SCALE, "latents_flip": -latents * SCALE, "labels": labels}
    save_file(stored, tmp_path / "a.safetensors")
    folder = run(source=str(tmp_path / "a.safetensors"), shift=0.0)
    found = everything(folder)
    assert read_manifest(folder).flips
    torch.testing.assert_close(found["mirrored"], -found["latents"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"encoder": None}, r"encoder is not set; say encoder=.*it is not guessed"),
        ({"scale": None}, r"scale is not set; say scale=.*it is not guessed"),
        ({"source": None}, r"source is not set"),
        ({"out": None}, r"out is not set"),
        (
            {"shift": None},
            r"shift is not set, and this encoder has one \(0\.25\); say whether it was subtracted",
        ),
        (
            {"scale": 5.0},
            r"with scale=5\.0 the latents have a std of .*have about 2 \(its scaling_factor is 0\.",
        ),
        ({"scale": 0.0}, r"scale=0 is none that latents were multiplied by; give another"),
        ({"moments": "all"}, r"moments=all is unknown"),
        ({"dtype": "int8"}, r"dtype=int8 is unknown"),
        ({"block_size": 0}, r"block_size=0 must be at least 1"),
        (
            {"labels": None},
            r"latents\.npy has no labels; set labels_key=.*labels=<file>, or .* classes=none",
        ),
        ({"source": "nowhere"}, r"source=nowhere does not exist"),
        ({"moments": "mean_logvar"}, r"cannot decode latents of shape \(1, 8, 8\)"),
    ],
)
def test_what_is_not_said_or_cannot_be_is_refused(
    settings: dict, sentence: str, samples, run, tmp_path: Path
):
    (tmp_path / "in").mkdir()
    latents, labels = samples
    source = npy(tmp_path / "in", (latents - 0.25) * SCALE, labels)
    with pytest.raises(ValueError, match=sentence):
        run(**source | settings)
    assert not (tmp_path / "out").exists()


def test_values_that_do_not_fit_leave_nothing_behind(samples, run, tmp_path: Path):
    (tmp_path / "in").mkdir()
    latents, labels = samples
    for value, labels_too, fault in (
        (
            1e6,
            labels,
            r"sample 17 of .* has latents that are too large for dtype=float16; use dtype=bfloat16",
        ),
        (
            float("nan"),
            labels,
            r"sample 17 of .* has nan in the source itself; encode that sample again",
        ),
        (float("inf"), labels, r"sample 17 of .* has inf in the source itself"),
        (0.0, labels - 1, r"sample 0 of .* has the label -1, not one class index from 0 to 29"),
    ):
        changed = latents.clone()
        changed[17, 1, 2, 3] = value
        source = npy(tmp_path / "in", changed, labels_too)
        with pytest.raises(ValueError, match=fault):
            run(**source, scale=1.0, dtype="float16", check_scale=False)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["in"]


def changed(write: Callable, edit: Callable[[Path], object]) -> Callable:
    """The files of a format, and then one thing that is wrong with them."""

    def start(path: Path, latents: Tensor, labels: Tensor) -> dict[str, str]:
        given = write(path, latents, labels)
        edit(path)
        return given

    return start


def cut(file: str, size: int) -> Callable[[Path], object]:
    return lambda path: (path / file).write_bytes((path / file).read_bytes()[:size])


def resaved(file: str, change: Callable) -> Callable[[Path], object]:
    return lambda path: np.save(path / file, change(np.load(path / file)))


def relisted(change: Callable) -> Callable[[Path], object]:
    def edit(path: Path) -> None:
        file = path / "dataset.json"
        file.write_text(json.dumps({"labels": change(json.loads(file.read_text())["labels"])}))

    return edit


def retarred(change: Callable[[str, bytes], tuple[str, bytes] | None]) -> Callable[[Path], object]:
    """`change` gives each member of the first tar another name and content, or None to leave it
    out."""

    def edit(path: Path) -> None:
        with tarfile.open(path / "0.tar") as tar:
            members = [(m.name, tar.extractfile(m).read()) for m in tar]
        with tarfile.open(path / "0.tar", "w") as tar:
            for name, content in filter(None, (change(*member) for member in members)):
                add(tar, name, content)

    return edit


def cut_between_members(path: Path) -> None:
    with tarfile.open(path / "0.tar") as tar:
        place = tar.getmembers()[6].offset
    cut("0.tar", place)(path)


def one_file(**tensors: Tensor) -> Callable:
    return lambda path, latents, labels: (
        save_file({"latents": latents, "labels": labels} | tensors, path / "a.safetensors"),
        {"source": str(path)},
    )[1]


def linked(file: str) -> Callable[[Path], object]:
    return lambda path: ((path / file).unlink(), (path / file).symlink_to("nowhere"))


FEATURE = "imagenet256_features/0003.npy"
LABEL = "imagenet256_labels/0003.npy"
ZEROS = torch.zeros(COUNT, 2, 8, 8)
FAULTS = {
    # Latents and labels that do not pair.
    "safetensors, fewer latents": (
        one_file(latents=ZEROS[:9]),
        r"a\.safetensors has 9 latents and 30 labels",
    ),
    "safetensors, fewer mirrored": (
        one_file(flip=ZEROS[:9]),
        r"30 latents and 30 labels and 9 mirrored",
    ),
    "npy, fewer labels": (
        changed(npy, resaved("labels.npy", lambda y: y[:9])),
        r"30 latents and 9 labels",
    ),
    "a feature is gone": (
        changed(fast_dit, lambda p: (p / FEATURE).unlink()),
        rf"0003\.npy lacks .*{FEATURE}; restore",
    ),
    "a label is gone": (
        changed(fast_dit, lambda p: (p / LABEL).unlink()),
        rf"0003\.npy lacks .*{LABEL}; restore",
    ),
    "listed twice": (
        changed(edm2, relisted(lambda pairs: pairs + pairs[:1])),
        r"names 00000/img0000\.npy twice",
    ),
    "not listed": (
        changed(edm2, relisted(lambda pairs: pairs[1:])),
        r"1 \.npy files in .* have no label in dataset",
    ),
    "listed, not there": (
        changed(edm2, relisted(lambda p: [*p, ["a.npy", 0]])),
        r"a\.npy cannot be read \(it is no file",
    ),
    "a label alone": (
        changed(tars, retarred(lambda n, c: None if n == "0003.latent.npy" else (n, c))),
        r"0003 has \.cls, of",
    ),
    "no label": (
        changed(tars, retarred(lambda n, c: None if n == "0003.cls" else (n, c))),
        r"0003 has .*no class index in",
    ),
    "a member twice": (
        changed(tars, retarred(lambda n, c: (n.replace("0003", "0004"), c))),
        r"0004.* is there twice",
    ),
    # Labels that are none.
    "fractional": (
        changed(npy, resaved("labels.npy", lambda y: y + 0.5)),
        r"sample 0 of .* has the label 0\.5, not one class index",
    ),
    "one-hot": (
        changed(npy, resaved("labels.npy", lambda y: np.eye(3)[y])),
        r"has the label \[1\.0, 0\.0, 0\.0\], not one class.*argmax\(1\)",
    ),
    "text": (
        changed(npy, resaved("labels.npy", lambda y: y.astype(str))),
        r"has the label '0', not one class index",
    ),
    "flags": (
        changed(npy, resaved("labels.npy", lambda y: y > 0)),
        r"has the label False, not one class index",
    ),
    "complex": (
        changed(npy, resaved("labels.npy", lambda y: y + 0j)),
        r"has the label 0j, not one class index",
    ),
    "NaN": (
        changed(npy, resaved("labels.npy", lambda y: y + np.nan)),
        r"has the label nan, not one class index",
    ),
    "far too high": (
        changed(npy, resaved("labels.npy", lambda y: y + 10**9)),
        r"label 1000000000, not one class index from 0 to 29",
    ),
    "fast-DiT, one-hot": (
        changed(fast_dit, resaved(LABEL, lambda y: np.eye(3))),
        rf"{FEATURE} has the label \[\[1\.0",
    ),
    "listed as null": (
        changed(edm2, relisted(lambda p: [[p[0][0], None], *p[1:]])),
        r"img0000\.npy has the label None",
    ),
    "not UTF-8": (
        changed(tars, retarred(lambda n, c: (n, b"\xff" if n == "0003.cls" else c))),
        r"0003\.cls cannot be read",
    ),
    "no number": (
        changed(tars, retarred(lambda n, c: (n, b"1_0" if n == "0003.cls" else c))),
        r"0003 has the label '1_0'",
    ),
    # Latents that are none.
    "whole numbers": (
        one_file(latents=ZEROS.long()),
        r"sample 0 of .*a\.safetensors holds int64, and latents are",
    ),
    "structured": (
        changed(fast_dit, resaved(FEATURE, lambda x: x.view([("a", "f4")]))),
        rf"{FEATURE} holds \[\('a'",
    ),
    "other dimensions": (
        one_file(latents=ZEROS[:, 0].clone()),
        r"sample 0 of .* has the shape \(8, 8\), and",
    ),
    "without a size": (
        one_file(latents=ZEROS[:, :, :0].clone()),
        r"sample 0 of .* has the shape \(2, 0, 8\), and",
    ),
    "other shapes": (
        changed(fast_dit, resaved(FEATURE, lambda x: x[..., :4])),
        r"0003\.npy has latents of shape \(2, 8, 4\)",
    ),
    "mirrored NaN": (one_file(flip=ZEROS / 0.0), r"sample 0 of .* has nan in the source itself"),
    "no samples": (
        one_file(latents=ZEROS[:0], labels=torch.zeros(0)),
        r"source=.* holds no samples",
    ),
    "labels as latents": (
        lambda *given: one_file()(*given) | {"latents_key": "labels"},
        r"holds int64, and latents are",
    ),
    "a list": (
        lambda p, x, y: (torch.save({"z": x, "y": [0]}, p / "a.pt"), {**PT, "source": f"{p}/a.pt"})[
            1
        ],
        r"labels is a list",
    ),
    "an expanded tensor": (
        lambda p, x, y: (
            torch.save({"z": x[:1].expand(10**12, 2, 8, 8), "y": y[:1].expand(10**12)}, p / "a.pt"),
            {**PT, "source": f"{p}/a.pt"},
        )[1],
        r"latents is an expanded tensor; save it as \.contiguous",
    ),
    "odd channels": (
        lambda p, x, y: npy(p, x[:, :1], y) | {"moments": "mean_std"},
        r"but latents have 1 channels, and",
    ),
    "a std below 0": (
        lambda *given: npy(*given) | {"moments": "mean_std"},
        r"moments=mean_std, but a std is negative",
    ),
    # Files that are broken.
    "npy cut": (
        changed(npy, cut("latents.npy", 900)),
        r"latents\.npy cannot be read \(mmap length is greater",
    ),
    "npy header cut": (changed(fast_dit, cut(FEATURE, 20)), rf"{FEATURE} cannot be read \(EOF"),
    "npy empty": (changed(edm2, cut("00000/img0003.npy", 0)), r"img0003\.npy cannot be read \(EOF"),
    "safetensors header cut": (
        changed(safetensors, cut("latents_1.safetensors", 20)),
        r"latents_1\.safetensors cannot be read",
    ),
    "pt cut": (changed(pt, cut("all.pt", 900)), r"all\.pt cannot be read"),
    "tar cut between members": (
        changed(tars, cut_between_members),
        r"0\.tar was cut or is damaged: .* no end marker",
    ),
    "tar cut": (changed(tars, cut("0.tar", 4000)), r"0\.tar was cut or is damaged"),
    "two tars in one": (
        changed(tars, lambda p: (p / "0.tar").write_bytes((p / "0.tar").read_bytes() * 2)),
        r"0000.latent.npy is there twice",
    ),
    "tar empty": (changed(tars, cut("0.tar", 0)), r"0\.tar is empty; fetch it again"),
    "JSON broken": (changed(edm2, cut("dataset.json", 20)), r"dataset\.json cannot be read"),
    "JSON deep": (
        changed(edm2, lambda p: (p / "dataset.json").write_text("[" * 100000)),
        r"dataset\.json cannot be read",
    ),
    "JSON of another kind": (
        changed(edm2, relisted(dict)),
        r'has no "labels": \[\[file, label\], …\]',
    ),
    "an entry of another kind": (
        changed(edm2, relisted(lambda p: [3, *p])),
        r"has the entry 3; it must be \[file, label\]",
    ),
    "a name that cannot be": (
        changed(edm2, relisted(lambda p: [["a\0b", 0], *p])),
        r"cannot be read .*it is no file",
    ),
    "a link to nothing": (
        changed(fast_dit, linked(FEATURE)),
        rf"{FEATURE} cannot be read \(it is no file, or a link to none",
    ),
    "a folder named .npy": (
        changed(edm2, lambda p: (p / "x.npy").mkdir()),
        r"\.npy files in .* have no label",
    ),
    "two formats": (
        changed(edm2, lambda p: (p / "a.tar").touch()),
        r"holds several formats; give one",
    ),
    "no format": (lambda path, *_: {"source": str(path)}, r"holds no known format; give one"),
}
PT = {"latents_key": "z", "labels_key": "y"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_in_one_sentence_and_leaves_nothing(
    fault: str, samples, run, tmp_path: Path, monkeypatch, capsys
):
    (tmp_path / "in").mkdir()
    write, sentence = FAULTS[fault]
    with pytest.raises(SystemExit), report_user_errors():
        run(**{"check_scale": False} | write(tmp_path / "in", *samples))
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(sentence, said), said
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", ">f4", "fortran"])
def test_latents_of_other_kinds_and_orders_are_converted(kind: str, samples, run, tmp_path: Path):
    latents, labels = samples
    exact = (
        (latents * 4).round() / 4
        if kind != "float8_e4m3fn"
        else latents.to(torch.float8_e4m3fn).float()
    )
    if kind in (">f4", "fortran"):
        source = npy(tmp_path, exact, labels)
        whole = exact.numpy().astype(">f4") if kind == ">f4" else np.asfortranarray(exact.numpy())
        np.save(tmp_path / "latents.npy", whole)
        np.save(tmp_path / "labels.npy", labels.numpy().astype(">i8").reshape(-1, 1))
    else:
        source = one_file(latents=exact.to(getattr(torch, kind)), labels=labels.float())(
            tmp_path, latents, labels
        )
    found = everything(run(**source, scale=1.0, shift=0.0, check_scale=False))
    index = matched(found["latents"], exact)
    assert torch.equal(found["labels"], labels[index])


def test_classes_are_as_many_as_are_said(samples, run, tmp_path: Path, capsys):
    source = npy(tmp_path, *samples)
    folder = run(**source, scale=1.0, classes=10, check_scale=False)
    assert read_manifest(folder).class_names == [str(i) for i in range(10)]
    assert "10 classes, 7 of them without a training sample" in capsys.readouterr().out
    with pytest.raises(
        ValueError, match=r"sample 2 of .* has the label 2, not one class index from 0 to 1"
    ):
        run(**source, scale=1.0, classes=2, check_scale=False, out=str(tmp_path / "two"))
    for classes in (0, 10**9):
        with pytest.raises(
            ValueError,
            match=rf"classes={classes} must be a number from 1 to 1000000, a text file, or",
        ):
            run(**source, classes=classes)
    with pytest.raises(
        ValueError, match=r"labels=.* goes with .* not with classes=none; leave labels out"
    ):
        run(**source, classes="none", out=str(tmp_path / "none"))


def test_names_of_classes_the_pair_of_files_and_encoder_local_can_be_said(
    samples, vae, tmp_path: Path, monkeypatch
):
    """In the words of precompute_latents.py, and from the folder that holds latents.npy and
    labels.npy."""
    npy(tmp_path, *samples)
    (tmp_path / "names.txt").write_text("apple\n\npear \nplum\n")
    words = [
        f"source={tmp_path}",
        f"out={tmp_path / 'out'}",
        "encoder=local",
        f"encoder.path={vae}",
        "scale=1",
    ]
    words += ["shift=0", "check_scale=false", "device=cpu"]
    monkeypatch.setattr("sys.argv", ["import_latents", *words, f"classes={tmp_path / 'names.txt'}"])
    main()
    assert read_manifest(tmp_path / "out").class_names == ["apple", "pear", "plum"]
    matched(everything(tmp_path / "out")["latents"], samples[0].half().float())
    monkeypatch.setattr(
        "sys.argv", ["import_latents", *words, "classes=none", f"out={tmp_path / 'none'}"]
    )
    main()
    assert read_manifest(tmp_path / "none").class_names == []
    (tmp_path / "twice.txt").write_text("pear\npear\n")
    sentences = {
        "ten": "does not exist; give a number, none, or a text file",
        "twice.txt": "must name each class once",
    }
    for file, sentence in sentences.items():
        with pytest.raises(ValueError, match=sentence):
            check_config(parse_words(ImportConfig, [*words, f"classes={tmp_path / file}"], ""))


UNLABELLED = {
    "npy": lambda *given: {"source": npy(*given)["source"]},
    "safetensors": lambda p, x, y: one_file(labels=torch.rand(3, 2))(p, x, y),
    "fast-DiT": changed(fast_dit, lambda p: shutil.rmtree(p / "imagenet256_labels")),
    "EDM2": changed(edm2, lambda p: (p / "dataset.json").write_text('{"labels": null}')),
    "loose": changed(edm2, lambda p: (p / "dataset.json").unlink()),
    "tars": changed(
        tars, retarred(lambda name, content: (name, content) if name.endswith("npy") else None)
    ),
}


@pytest.mark.parametrize("kind", UNLABELLED)
def test_latents_without_labels_have_no_classes(kind: str, samples, run, tmp_path: Path):
    (tmp_path / "in").mkdir()
    folder = run(
        **UNLABELLED[kind](tmp_path / "in", *samples),
        classes="none",
        scale=1.0,
        shift=0.0,
        check_scale=False,
    )
    found = everything(folder)
    matched(found["latents"], samples[0])
    assert found["labels"].tolist() == [0] * COUNT
    assert read_manifest(folder).class_names == []


def test_no_training_sample_left_is_refused(samples, run, tmp_path: Path):
    with pytest.raises(ValueError, match=r"held_out=0\.99 of 30 latents leaves none to train on"):
        run(**npy(tmp_path, *samples), held_out=0.99)


def test_a_folder_that_cannot_be_written_ends_in_one_sentence(samples, run, tmp_path: Path):
    source = npy(tmp_path, *samples)
    with pytest.raises(
        ValueError, match=r"out=.* cannot be written \(Not a directory\); choose another folder"
    ):
        run(**source, scale=1.0, check_scale=False, out=f"{source['source']}/out")


def test_nothing_is_unpickled(run, tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    torch.save({"latents": Evil()}, tmp_path / "evil.pt")
    np.save(tmp_path / "evil.npy", np.array([Evil()], dtype=object))
    for name in ("evil.pt", "evil.npy"):
        with pytest.raises(
            ValueError, match=r"cannot be read .*save plain tensors, for nothing is unpickled"
        ):
            run(source=str(tmp_path / name))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "dataset.json").write_text(json.dumps({"labels": [["../evil.npy", 0]]}))
    with pytest.raises(ValueError, match=r"names a file outside its folder: \.\./evil\.npy"):
        run(source=str(tmp_path / "set"))
    assert not (tmp_path / "owned").exists()


def test_a_folder_that_is_there_is_kept(samples, run, tmp_path: Path):
    (tmp_path / "in").mkdir()
    source = npy(tmp_path / "in", *samples)
    folder = run(**source, scale=1.0)
    with pytest.raises(ValueError, match=r"is there already; choose a new folder"):
        run(**source, scale=1.0)
    with pytest.raises(ValueError, match=r"is a latent set of ours already; use it"):
        run(source=str(folder), out=str(tmp_path / "again"))


def test_a_damaged_npy_header_shows_no_address_in_memory(tmp_path: Path):
    np.save(tmp_path / "latents.npy", np.zeros((3, 2, 8, 8), np.float32))
    content = (tmp_path / "latents.npy").read_bytes()
    (tmp_path / "latents.npy").write_bytes(content.replace(b"False", b"xalse"))
    with pytest.raises(ValueError, match="malformed node") as caught:
        open_foreign(str(tmp_path / "latents.npy"), ForeignOptions(classes=0))
    assert "0x" not in str(caught.value)
