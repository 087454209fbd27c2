"""scripts.import_latents: what other tools wrote, unchanged but for its scale; and nothing guessed."""

from __future__ import annotations

import io
import json
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
from scripts.import_latents import ImportConfig, checked, import_latents
from scripts.verify_latents import VerifyConfig, verify
from tests.helpers import CPU

COUNT, SCALE = 30, 0.5
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
        save_file({"latents": latents[part], "labels": labels[part]}, path / f"latents_{i}.safetensors")
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
        given = {"encoder": str(vae), "scale": SCALE, "shift": 0.25, "out": str(tmp_path / "out"), "device": "cpu"}
        small = {"held_out": 0.2, "shard_size": 7, "block_size": 3, "dtype": "float32"}
        cfg = ImportConfig(**given | small | settings)  # pyright: ignore[reportArgumentType]
        return import_latents(checked(cfg)).parent

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
    assert (manifest.kind, manifest.class_names, manifest.psnr_db) == ("sample", ["0", "1", "2"], None)
    assert verify(VerifyConfig(path=str(folder), count=2, out=str(tmp_path / "x.png"), device="cpu")) == []
    loader = ResidentLatents(path=str(folder), batch_size=24, seed=0, device=CPU)
    assert abs(next(loader).latents.std() - 1.0) < 0.05


def test_the_same_import_gives_the_same_bytes(samples, run, tmp_path: Path):
    (tmp_path / "in").mkdir()
    source = npy(tmp_path / "in", *samples)
    one, two = (run(**source, scale=1.0, out=str(tmp_path / name)) for name in ("one", "two"))
    for file in sorted(one.glob("*.tar")):
        assert file.read_bytes() == (two / file.name).read_bytes()
    assert read_manifest(one).fingerprint() == read_manifest(two).fingerprint()


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
        ({"shift": None}, r"shift is not set, and this encoder has one \(0\.25\); say whether it was subtracted"),
        ({"scale": 5.0}, r"with scale=5\.0 the latents have a std of .*have about 2 \(its scaling_factor is 0\.5\)"),
        ({"scale": 0.0}, r"scale=0\.0 and shift=0\.25 must be finite, and scale not 0"),
        ({"moments": "all"}, r"moments=all is unknown"),
        ({"dtype": "int8"}, r"dtype=int8 is unknown"),
        ({"block_size": 0}, r"block_size=0 must be at least 1"),
        ({"labels": None}, r"latents\.npy has no labels; set labels_key=.*labels=<file>, or .* classes=none"),
        ({"source": "nowhere"}, r"source=nowhere does not exist"),
        ({"moments": "mean_logvar"}, r"cannot decode latents of shape \(1, 8, 8\)"),
    ],
)
def test_what_is_not_said_or_cannot_be_is_refused(settings: dict, sentence: str, samples, run, tmp_path: Path):
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
            r"sample 17 of .* has latents that are too large for dtype=float16; use dtype=bfloat16 or float32",
        ),
        (float("nan"), labels, r"sample 17 of .* has nan in the source itself; encode that sample again"),
        (float("inf"), labels, r"sample 17 of .* has inf in the source itself"),
        (0.0, labels - 1, r"sample 0 of .* has the label -1; number the classes from 0 on"),
    ):
        changed = latents.clone()
        changed[17, 1, 2, 3] = value
        source = npy(tmp_path / "in", changed, labels_too)
        with pytest.raises(ValueError, match=fault):
            run(**source, scale=1.0, dtype="float16", check_scale=False)
        assert sorted(file.name for file in tmp_path.iterdir()) == ["in"]


def test_nothing_is_unpickled(run, tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    torch.save({"latents": Evil()}, tmp_path / "evil.pt")
    np.save(tmp_path / "evil.npy", np.array([Evil()], dtype=object))
    for name in ("evil.pt", "evil.npy"):
        with pytest.raises(ValueError, match=r"cannot be read .*save plain tensors, for nothing is unpickled"):
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
