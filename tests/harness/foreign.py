"""Latents and labels as other tools save them, and edits that break their files."""

import json
import tarfile

import numpy as np
import torch
import webdataset
from safetensors.torch import save, save_file

from data.blocks import BlockReader
from data.manifest import read_manifest
from data.source import open_source
from tests.harness.sets import write_tar

COUNT = 30
"""Number of samples that each format writes; the writers return the settings of
scripts.import_latents that name their files."""


def npy(path, latents, labels):
    np.save(path / "latents.npy", latents.numpy())
    np.save(path / "labels.npy", labels.numpy())
    return {"source": f"{path}/latents.npy", "labels": f"{path}/labels.npy"}


def pt(path, latents, labels):
    torch.save({"z": latents, "y": labels}, path / "all.pt")
    return {"source": f"{path}/all.pt", "latents_key": "z", "labels_key": "y"}


def pt_alone(path, latents, labels):
    torch.save(latents, path / "latents.pt")
    torch.save(labels, path / "labels.pt")
    return {"source": f"{path}/latents.pt", "labels": f"{path}/labels.pt"}


def safetensors(path, latents, labels):
    for i, part in enumerate(torch.arange(COUNT).split(13)):
        tensors = {"latents": latents[part], "labels": labels[part]}
        save_file(tensors, path / f"imagenet_256x256_{i}.safetensors")
    return {"source": str(path)}


def fast_dit(path, latents, labels):
    for kind, column in (("features", latents), ("labels", labels)):
        folder = path / f"imagenet256_{kind}"
        folder.mkdir()
        for i in range(COUNT):
            np.save(folder / f"{i:04d}.npy", column[i : i + 1].numpy())
    return {"source": str(path)}


def edm2(path, latents, labels):
    (path / "00000").mkdir()
    pairs = []
    for i in range(COUNT):
        name = f"00000/img{i:04d}.npy"
        np.save(path / name, latents[i].numpy())
        pairs.append([name, int(labels[i])])
    (path / "dataset.json").write_text(json.dumps({"labels": pairs}))
    return {"source": str(path)}


def tars(path, latents, labels):
    """Writes one tar of .npy and .cls members and one of .safetensors and .json members."""
    for number, part in enumerate(torch.arange(COUNT).split(17)):
        with webdataset.TarWriter(f"{path}/{number}.tar", mtime=0) as tar:
            for i in part.tolist():
                members = {"latent.npy": latents[i].numpy(), "cls": int(labels[i])}
                if number:
                    members = {
                        "safetensors": save({"latents": latents[i].clone()}),
                        "json": {"label": int(labels[i])},
                    }
                tar.write({"__key__": f"{i:04d}", **members})
    return {"source": str(path)}


def sd_scripts(path, latents, labels):
    """Writes files as library/strategy_base.py and strategy_flux.py of kohya-ss/sd-scripts at
    48d368f do, with flip_aug, beside the output of a text encoder; earlier versions wrote the names
    without sizes."""
    for i, sample in enumerate(latents.numpy()):
        size = "_8x6" * (i % 2)
        arrays = {
            f"latents{size}": sample,
            f"latents_flipped{size}": -sample,
            f"crop_ltrb{size}": [0] * 4,
        }
        np.savez(path / f"{i:04d}_0048x0064_flux.npz", **arrays)
    np.savez(path / "0000_flux_te.npz", l_pooled=latents)
    return {"source": str(path), "classes": "none"}


def musubi(path, latents, labels):
    """Writes files as src/musubi_tuner/dataset/cache_io.py and image_video_dataset.py of
    kohya-ss/musubi-tuner at 30c658c do."""
    facts = {"architecture": "hunyuan_video", "format_version": "1.0.1"}
    for i, sample in enumerate(latents):
        tensors = {"latents_1x8x6_float32": sample[:, None].clone()}
        save_file(tensors, path / f"{i:04d}_0048x0064_hv.safetensors", facts)
    save_file({"llm_float32": latents}, path / "0000_hv_te.safetensors", facts)
    return {"source": str(path), "classes": "none"}


FORMATS = [npy, pt, pt_alone, safetensors, fast_dit, edm2, tars]


def one_file(**tensors):
    """Makes the writer of a safetensors file in which `tensors` replace latents, labels, or add to
    them."""

    def write(path, latents, labels):
        save_file({"latents": latents, "labels": labels} | tensors, path / "a.safetensors")
        return {"source": str(path)}

    return write


def write_edited(write, edit):
    """Makes the writer of a format whose files `edit` then changes."""

    def write_both(path, latents, labels):
        settings = write(path, latents, labels)
        edit(path)
        return settings

    return write_both


def cut(file, size):
    return lambda path: (path / file).write_bytes((path / file).read_bytes()[:size])


def edit_array(file, change):
    return lambda path: np.save(path / file, change(np.load(path / file)))


def edit_list(change):
    """Changes the pairs (file, label) that dataset.json lists."""

    def edit(path):
        file = path / "dataset.json"
        pairs = json.loads(file.read_text())["labels"]
        file.write_text(json.dumps({"labels": change(pairs)}))

    return edit


def edit_members(changes):
    """Replaces the content of members of the first tar; None drops a member."""

    def edit(path):
        with tarfile.open(path / "0.tar") as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar}
        kept = {name: content for name, content in (members | changes).items() if content}
        write_tar(path / "0.tar", kept)

    return edit


def read_set(folder):
    """Reads all samples of a latent set, the training split first."""
    source = open_source(folder)
    readers = [BlockReader(source, read_manifest(source), split) for split in ("train", "held_out")]
    blocks = [reader.read(number) for reader in readers for number in range(len(reader.places))]
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
