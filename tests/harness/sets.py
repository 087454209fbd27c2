"""Small things that several tests need: autoencoders with random weights, images, a latent set,
pairs of choices."""

import io
import tarfile
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from accel.saved_tensors import count_saved
from common.condition import Condition
from common.files import read_object, write_json
from data.loader import Batch
from data.manifest import Manifest
from encoding.shards import ShardWriter
from models.autoencoders import add_global_branch

PIXELS = {"_target_": "models.autoencoders.PixelAutoencoder"}
BLOCKS = {
    "block_out_channels": (8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "norm_num_groups": 2,
}
TINY = {
    "AutoencoderKL": {**BLOCKS, "latent_channels": 2, "scaling_factor": 0.5, "shift_factor": 0.25},
    "AutoencoderKLFlux2": {**BLOCKS, "latent_channels": 4},
    "AutoencoderKLQwenImage": {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 1],
        "temperal_downsample": [False],
    },
    "AutoencoderTiny": {
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1),
    },
    "AutoencoderDC": {
        "latent_channels": 4,
        "attention_head_dim": 4,
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "encoder_layers_per_block": (1, 1),
        "decoder_layers_per_block": (1, 1),
        "encoder_qkv_multiscales": ((), ()),
        "decoder_qkv_multiscales": ((), ()),
    },
}
"""Arguments of diffusers' classes for the smallest model of each; all of them halve the side."""


def save_tiny_autoencoder(kind, folder):
    """Saves a model of diffusers' class `kind` with random weights, always the same, to
    `folder`."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        getattr(diffusers, kind)(**TINY[kind]).save_pretrained(folder)
    return folder


def save_tiny_taef2(folder):
    """Saves an AutoencoderTiny with a global branch in every block; TAEF2 has them in its middle
    blocks."""
    import diffusers
    from diffusers.models.autoencoders.vae import AutoencoderTinyBlock

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = diffusers.AutoencoderTiny(**TINY["AutoencoderTiny"])
        for block in list(model.modules()):
            if isinstance(block, AutoencoderTinyBlock):
                add_global_branch(block, 4, 8)
        model.register_to_config(mid_block_global_branch=True)
        model.save_pretrained(folder)
    return folder


def save_images(folder, classes, per_class):
    """Writes random PNGs and JPEGs of various sizes to `folder/<class>/<number>.<extension>`."""
    draw = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            pixels = draw.integers(0, 256, (18 + i, 20 + i % 3, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i:03d}.{'png' if i % 2 else 'jpg'}")
    return folder


def save_latent_set(folder, shards, captions=None, **changes):
    """Writes `(split, tensors)` as one shard each, and their manifest; `changes` replace fields of
    the manifest. `captions`, a CaptionJob, adds the captions of all samples, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    if captions:
        numbers = captions.number_captions(captions.captions)
        parts = numbers.split([len(tensors["labels"]) for _, tensors in shards])
        pairs = zip(shards, parts, strict=True)
        shards = [(split, tensors | {"captions": part}) for (split, tensors), part in pairs]
    written = [
        write_shard(folder / f"{split}-{i:05d}.tar", tensors, split)
        for i, (split, tensors) in enumerate(shards)
    ]
    channels, height, width = shards[0][1]["latents"].shape[1:]
    fields = {
        "channels": channels,
        "height": height,
        "width": width,
        "class_names": ["apple", "pear", "plum"],
        "kind": "mean_std",
        "dtype": "float16",
        "flips": True,
        "mean": [0.5 * c - 0.25 for c in range(channels)],
        "std": [1.0 + c for c in range(channels)],
        "encoder": {
            "_target_": "models.autoencoders.DiffusersAutoencoder",
            "path": "someone/some-vae",
        },
        "encoder_class": "AutoencoderKL",
        "encoder_sha256": "0" * 64,
        "scaling_factor": 0.5,
        "shift_factor": 0.25,
        "input_range": [-1.0, 1.0],
        "resize": "none",
        "resolution": 16,
        "psnr_db": 30.0,
        "precision": "fp32",
        "count": sum(shard.count for shard in written if shard.split == "train"),
        "held_out": sum(shard.count for shard in written if shard.split == "held_out"),
        "source": "random numbers",
        "source_sha256": "0" * 64,
        "seed": 0,
        "versions": {},
        "shards": [*written, *(captions.run(folder) if captions else ())],
        "text": captions and captions.spec,
    }
    manifest = Manifest(**fields | changes)
    manifest.write(folder)
    return manifest


def save_named_set(folder, names, shape=(1, 4, 6)):
    """Writes random latents of classes with these names, and returns the words of a run on them."""
    samples = [draw_random_samples(count, seed, shape) for seed, count in enumerate((20, 4))]
    for split in samples:
        split["labels"] %= max(1, len(names))
    shards = list(zip(("train", "held_out"), samples, strict=True))
    save_latent_set(folder, shards, class_names=names, encoder=PIXELS, encoder_sha256=None)
    return ["data=resident", f"data.path={folder}", "model.patch_size=2"]


def save_random_set(folder, *train, held_out=0, captions=None):
    """Saves a training shard for each of these numbers of samples, with seeds 0, 1, 2 …, and a
    held-out one, with seed 9; `captions` as in `save_latent_set`."""
    shards = [("train", draw_random_samples(count, seed)) for seed, count in enumerate(train)]
    if held_out:
        shards.append(("held_out", draw_random_samples(held_out, 9)))
    save_latent_set(folder, shards, captions)
    return folder


def write_shard(file, tensors, split="train"):
    """One shard in blocks of four samples, handed over in chunks of five."""
    writer = ShardWriter(file, split, block_size=4)
    for chunk in torch.arange(len(tensors["labels"])).split(5):
        writer.add({name: tensor[chunk] for name, tensor in tensors.items()})
    return writer.close()


def draw_random_samples(count, seed, shape=(3, 4, 2)):
    """All tensors that a block can hold, random."""
    generator = torch.Generator().manual_seed(seed)
    names = ("latents", "std", "mirrored", "mirrored_std")
    tensors = {name: torch.randn(count, *shape, generator=generator).half() for name in names}
    tensors |= {name: tensors[name].abs() for name in names if name.endswith("std")}
    return tensors | {"labels": torch.arange(count) % 3}


def write_tar(file, members):
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file


def encode_image(image, kind="PNG", **settings):
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def encode_png(*size):
    return encode_image(Image.new("RGB", size, (200, 0, 0)))


PNG = encode_png(8, 8)
"""A whole image."""


def save_files(path, *names, content=PNG):
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def label_images(*labels, first=0):
    """Makes members of a tar: an image and a label each."""
    members = {}
    for i, label in enumerate(labels, first):
        content = label if isinstance(label, bytes) else str(label).encode()
        members |= {f"{i:04d}.png": PNG, f"{i:04d}.cls": content}
    return members


def read_keys(listed):
    return [entry.key for entry in listed.entries]


def read_contents(folder):
    """The files of a folder but its lock, by name."""
    files = [file for file in sorted(folder.iterdir()) if file.name != ".lock"]
    return {file.name: file.read_bytes() for file in files}


def flip_byte(file, place=-1):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def edit_json(file, changes):
    write_json(file, read_object(file) | changes)


def edit_manifest(folder, **changes):
    edit_json(folder / "manifest.json", changes)


def match(samples, expected, tolerance=1e-5):
    """Finds for each sample the expected one that equals it; every expected one is found once."""
    distance = (samples.flatten(1).float()[:, None] - expected.flatten(1)[None]).abs().amax(2)
    assert distance.amin(1).max() < tolerance
    index = distance.argmin(1).tolist()
    assert sorted(index) == list(range(len(expected)))
    return index


def list_pairs(row):
    return {(i, row[i], j, row[j]) for i in range(len(row)) for j in range(i)}


def cover_pairs(*axes):
    """Few rows that hold every pair of values of any two axes, chosen greedily."""
    rows = list(product(*axes))
    wanted = set().union(*map(list_pairs, rows))
    chosen = []
    while wanted:
        best = max(rows, key=lambda row, wanted=wanted: len(list_pairs(row) & wanted))
        wanted = wanted - list_pairs(best)
        chosen.append(best)
    return chosen


def wait_until_dead(process):
    """Waits until a process has ended, whoever started it; the limit of the test ends the wait."""
    with suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.05)


def measure_kept_bytes(training, samples):
    """Counts the bytes that stay on the device for the backward pass of the loss on `samples`
    samples of zeros; nothing runs compiled."""
    spec = training.loader.spec
    device = training.device
    latents = torch.zeros(samples, spec.channels, spec.height, spec.width, device=device)
    numbers = torch.arange(samples, device=device)
    batch = Batch(latents, Condition(torch.zeros_like(numbers)), numbers, numbers)
    with torch.compiler.set_stance("force_eager"), count_saved(training.model) as kept:
        losses = training.step.compute_losses(batch)
    del losses
    return sum(kept.unmoved.values())
