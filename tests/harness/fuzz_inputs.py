"""Subjects of the fuzzer: configurations, folders and tars of images, and latents of other
tools."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import tarfile
from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from torch import Tensor, nn

from encoding.images import DecodedImages
from encoding.job import plan_shards
from encoding.sources import list_images
from models.autoencoders import PixelAutoencoder
from scripts.import_latents import ImportConfig, check_config, import_latents
from scripts.sample import SampleConfig
from scripts.verify_latents import VerifyConfig, verify
from tests.harness.foreign import COUNT, FORMATS, read_set
from tests.harness.fuzz import ODD, Say, as_json, is_unfit, mutate_file, mutate_tree
from tests.harness.fuzz_sets import good_set
from tests.harness.sets import add_member, save_images
from tests.harness.words import CPU, TINY_RUN
from training.assemble import assemble
from training.config.compose import CONF_FOLDER, compose, parse_words, parse_yaml
from training.config.explain import flatten_tree
from training.config.schema import PrecomputeConfig
from training.distributed.exit import run_app

WORDS = [
    *(
        "",
        " ",
        "null",
        "true",
        "false",
        "0",
        "1",
        "-1",
        "3",
        "0.5",
        "-0.5",
        "nan",
        "inf",
        "-inf",
        "1e-320",
        "-1e308",
    ),
    *(
        "[]",
        "{}",
        "[[]]",
        "[1,2,3]",
        "[null]",
        "{a:1}",
        "{a:{b:[1,{c:2}]}}",
        "{_target_:os.system}",
        "{1:2}",
        "a b",
    ),
    *(
        "'quoted'",
        '"quoted"',
        "'",
        '"',
        "{",
        "}",
        "[",
        "]",
        "(",
        ",",
        "a,b",
        "=",
        "a=b",
        "\\",
        "\\'",
        "#",
        "%s",
        "{}s",
    ),
    *(
        "${seed}",
        "${nope}",
        "${",
        "${oc.env:HOME}",
        "${oc.env:NOPE}",
        "${model}",
        "${${seed}}",
        "$seed",
        "@x",
        "~",
        "/",
    ),
    *(
        "ñ漢🙂",
        "\u202e",
        "\x1b[31m",
        "\n",
        "a\nb",
        "\t",
        "\udc80",
        "x" * 300,
        "[" * 300 + "]" * 300,
        "../x",
        "1e3",
    ),
    *(
        "range(3)",
        "choice(1,2)",
        "glob(*)",
        "0x10",
        "1_000",
        "01",
        "-0",
        "off",
        "2020-01-01",
        "1:30",
        "os.system",
    ),
    *(
        "torch.optim.Adam",
        "models.denoiser.Denoiser",
        "data.digits.DigitLatents",
        "training.objective.FlowMatching",
    ),
]
NUMBERS = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "8",
    "16",
    "0.5",
    "1.5",
    "-0.5",
    "1e-320",
    "nan",
    "inf",
    "true",
    "null",
]
HUGE = [str(2**31), str(2**53 + 1), str(2**63), str(2**70), "9" * 400, "1e308", "1e38"]
HONEST = (
    "batch_size",
    "dim",
    "depth",
    "head_dim",
    "state_dim",
    "expand",
    "mlp_ratio",
    "channels",
    "height",
    "width",
)
HONEST += ("count", "num_classes", "streams", "window", "spike_window", "prefetch_factor")
"""Last parts of keys whose huge values ask for memory honestly: they get none."""
COMMANDS = (SampleConfig, VerifyConfig, ImportConfig)


def known_keys(config_name: str) -> list[str]:
    """All keys of the default configuration, dotted."""
    with initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
        default = OmegaConf.to_container(hydra_compose(config_name), resolve=False)
    return [key for key, _ in flatten_tree(default) if not key.rpartition(".")[2].isdigit()]


@cache
def keys(config_name: str) -> list[str]:
    """The keys of a command, and of components beside the default ones."""
    found = known_keys(config_name)
    if config_name == "train":
        for group, file in (
            ("data", "webdataset"),
            ("data", "synthetic"),
            ("model", "dit_s"),
            ("model", "conv_s"),
        ):
            node = parse_yaml((CONF_FOLDER / group / f"{file}.yaml").read_text())
            found += [f"{group}.{key}" for key in node] + [
                f"{group}.mixer.{key}" for key in node.get("mixer", ())
            ]
    return sorted(set(found))


def word(rng: Random, known: list[str]) -> str:
    """Draws an override: mostly one that a user could type, else one with a wrong sign, key or
    form."""
    key = rng.choice(known)
    values = rng.choice((WORDS, NUMBERS, NUMBERS if key.rpartition(".")[2] in HONEST else HUGE))
    kind = rng.choice((*"=" * 20, "+", "++", "~", "deeper", "bare", "odd"))
    if kind in ("+", "++", "~"):
        return f"{kind}{key}={rng.choice(values)}"
    if kind in ("bare", "odd"):
        return rng.choice(WORDS) + ("" if kind == "bare" else f"={rng.choice(WORDS)}")
    return f"{key}{'.x' if kind == 'deeper' else ''}={rng.choice(values)}"


def config(rng: Random, folder: Path, say: Say) -> None:
    """Words of a command line, and all that is built of them before the first step."""
    if rng.random() < 0.2:
        kind = rng.choice(COMMANDS)
        words = [
            word(rng, [field.name for field in dataclasses.fields(kind)])
            for _ in range(rng.choice((1, 2)))
        ]
        say(f"{kind.__name__} {words}")
        found = parse_words(kind, words, "")
        check_config(
            found
        ) if kind is ImportConfig else found.check() if kind is SampleConfig else None
        return
    command = rng.choice(("train", "train", "train", "precompute_latents"))
    base = [f"source={folder}", f"out={folder}/out"]
    if command == "train":
        good_set(folder)
        base = [
            *TINY_RUN,
            "runtime=eager",
            rng.choice(("data=digits", "data=synthetic", "data=resident")),
        ]
        base += [f"data.path={folder}"] if base[-1] == "data=resident" else []
        base += [f"model={rng.choice(('dit', 'conv', 'mamba', 'mamba1', 'ssd_mlp', 'zigzag'))}_xs"]
    words = [word(rng, keys(command)) for _ in range(rng.choice((1, 1, 2)))]
    say(f"{command} {[*base[-3:], *words]}")
    cfg = compose([*base, *words], command).cfg
    if command == "train":
        assemble(cfg, CPU)


def lines(rng: Random, folder: Path, say: Say) -> None:
    """Whole command lines: words that are split, joined, repeated, lost, quoted, or begin with
    dashes."""
    good_set(folder)
    (folder / "run" / "checkpoints").mkdir(parents=True)
    command, words = rng.choice(
        (
            (
                "train",
                [
                    "model=dit_xs",
                    "data=resident",
                    f"data.path={folder}",
                    "batch_size=8",
                    "run_dir=läufe/ä",
                ],
            ),
            (
                "train",
                ["experiment=fastrun", "runtime=fast", "optim.betas=[0.9,0.95]", "resume=auto"],
            ),
            (
                "precompute_latents",
                [f"source={folder}", f"out={folder}/out", "encoder=sd", "background=white"],
            ),
            (
                "scripts.sample",
                [f"run_dir={folder}/run", "labels=[0,1]", "guidance_interval=[0,1]", "out=über/x"],
            ),
            ("scripts.evaluate", [f"run_dir={folder}/run", "features=[encoder,random]", "count=8"]),
            ("scripts.verify_latents", [f"path={folder}", "count=0"]),
            (
                "scripts.import_latents",
                [f"source={folder}", f"out={folder}/out", "encoder=x", "scale=1"],
            ),
        )
    )
    for _ in range(rng.choice((1, 1, 2, 3))):
        words = mutate_line(rng, words)
    say(f"{command} {words}")
    environment = {"HYDRA_MAIN_MODULE": "__main__", "WORLD_SIZE": "1"}
    with patch.object(sys, "argv", [f"{command}.py", *words]), patch.dict(os.environ, environment):
        module = import_module(command)
        if command.startswith("scripts."):
            module.main(words) if signature(module.main).parameters else module.main()
        else:
            with patch.object(module, command.partition("_")[0], lambda composed: None):
                run_app(module.main)


def mutate_line(rng: Random, words: list[str]) -> list[str]:
    """Changes one word, or their number; a word with an odd sign is as likely as all else."""
    place = rng.randrange(len(words) + 1)
    new = rng.choice(WORDS)
    before = words[:place]
    old = words[place : place + 1]
    after = words[place + 1 :]
    key, equals, value = (old or ["seed=1"])[0].partition("=")
    sign = rng.choice("'\"\\[]{}(),:=#~@!$%&*;<>|`? \t\nñ漢🙂\u202e\udc80-+.")
    cut = rng.randrange(len(value) + 1)
    kinds: dict[str, list[str]] = {
        "lost": [],
        "twice": 2 * old,
        "split": [key, value],
        "three": [key, "=", value],
        "spaced": [f"{key} = {value}"],
        "flag": [f"--{key.replace('_', '-')}", value],
        "flag=": [f"--{key}={value}"],
        "letter": [f"-{key[:1]}", value],
        "joined": [" ".join([*old, *after[:1]])],
        "other": [f"{key}={new}"],
        "odd": [new],
        "quoted": [f"{key}='{value}'"],
        "half quoted": [f"{key}='{value}"],
        "deep": [f"{key}={'[' * rng.choice((3, 99, 5000))}{value}"],
        "sign": [f"{key}{equals}{value[:cut]}{sign}{value[cut:]}"],
        "sign in the key": [f"{key}{sign}{equals}{value}"],
    }
    kind = rng.choice((*kinds, *["sign"] * 6, "other", "other"))
    return [*before, *kinds[kind], *after]


@cache
def good_images() -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        root = save_images(Path(folder) / "photos", ("cat", "dog"), 3)
        return {
            file.relative_to(root).as_posix(): file.read_bytes()
            for file in sorted(root.rglob("*.*"))
        }


NAMES = (
    "x.jpg",
    ".jpg",
    "a.b.png",
    "a\nb.jpg",
    "ñ漢.png",
    "\udcff.jpg",
    "x" * 200 + ".png",
    "x.txt",
    "A.JPG",
    "train",
)


def images(rng: Random, folder: Path, say: Say) -> None:
    """A folder of images, or a tar of them: their bytes, names and kinds."""
    source = folder / "source"
    good = good_images()
    source.mkdir()
    if rng.random() < 0.5:
        for name, content in good.items():
            (source / name).parent.mkdir(exist_ok=True)
            (source / name).write_bytes(content)
        say(mutate_folder(rng, source))
    else:
        write_tar(rng, source / "a.tar", good, say)
        if rng.random() < 0.6:
            say(mutate_file(rng, source / "a.tar"))
        source = rng.choice((source, source / "a.tar"))
    cfg = PrecomputeConfig(source=str(source), limit=rng.choice((None, 1, 3)), held_out=0.2)
    found = list_images(source, rng.choice(("given", "none")), rng.random() < 0.3)
    assert not is_unfit(found.describe(str(source), 1).replace("\n", ""))
    if found.class_names:
        assert all(0 <= entry.label < len(found.class_names) for entry in found.entries)
    plan_shards(found, cfg)
    bytes_of = {content: name for name, content in good.items()}
    for entry, item in zip(
        found.entries, DecodedImages(found.entries, 8, max_megapixels=20.0), strict=False
    ):
        assert isinstance(item, Tensor) or not is_unfit(str(item)), item
        assert not isinstance(item, OSError), item
        content = Path(entry.file).read_bytes()[entry.offset :][: entry.size]
        assert content not in bytes_of or isinstance(item, Tensor), (
            f"{entry.key} is {bytes_of[content]}, and {item}"
        )
        assert not isinstance(item, Tensor) or (
            item.shape == (3, 8, 8) and item.dtype == torch.uint8
        )


def mutate_folder(rng: Random, source: Path) -> str:
    """Changes a file, or puts something beside the files."""
    file = rng.choice(sorted(path for path in source.rglob("*") if path.is_file()))
    other = file.with_name(rng.choice(NAMES))
    kind = rng.choice(("bytes", "bytes", "rename", "link", "circle", "empty"))
    if kind == "bytes":
        return mutate_file(rng, file)
    if kind == "rename":
        file.rename(rng.choice((other, source / other.name)))
    elif kind == "link":
        other.symlink_to(rng.choice(("nowhere", file.name, "/dev/null", "/proc/self/mem")))
    elif kind == "circle":
        other.symlink_to(rng.choice(("..", ".")))
    else:
        rng.choice((other.mkdir, other.touch))()
    return f"{kind}: {file.name}, {other.name!r}"


def write_tar(rng: Random, file: Path, good: dict[str, bytes], say: Say) -> None:
    """Writes the images and their classes, one member of them odd."""
    odd = rng.randrange(2 * len(good))
    with tarfile.open(
        file, "w", format=rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    ) as tar:
        for i, (name, content) in enumerate(good.items()):
            for j, (suffix, part) in enumerate(
                ((Path(name).suffix, content), (".cls", b"%d" % (i % 2)))
            ):
                member = tarfile.TarInfo(f"{i:03d}{suffix}")
                if 2 * i + j == odd:
                    change = rng.choice(("name", "type", "size", "mtime", "pax", "class", "twice"))
                    say(f"{member.name}: {change}")
                    member.name = rng.choice(NAMES) if change == "name" else member.name
                    member.type = (
                        rng.choice(b"1234567gxLKSD").to_bytes() if change == "type" else member.type
                    )
                    member.mtime = rng.choice((-1, 2**40, 0.5)) if change == "mtime" else 0
                    member.pax_headers = {
                        rng.choice(("size", "path", "x")): rng.choice(("-1", "9" * 30, "é"))
                    }
                    member.pax_headers = member.pax_headers if change == "pax" else {}
                    part = (
                        str(rng.choice(ODD)).encode("utf-8", "replace")
                        if change == "class"
                        else part
                    )
                    if change == "twice":
                        add_member(tar, member.name, part)
                member.size = len(part) + (
                    2 * i + j == odd and rng.choice((0, 0, 1, -1, 512, 2**33))
                )
                if member.size < 2**20:
                    tar.addfile(member, io.BytesIO(part + bytes(600)))
                else:  # Python 3.13's addfile wants the content of what has a size
                    tar.fileobj.write(member.tobuf(tar.format))


class Identity(PixelAutoencoder):
    """An encoder that needs no files."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def foreign(rng: Random, folder: Path, say: Say) -> None:
    """Latents of another tool: values, files and lists."""
    write = rng.choice(FORMATS)
    source = folder / "source"
    source.mkdir()
    latents = torch.randn(COUNT, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(COUNT) % 3
    kind = rng.choice(("values", "file", "file", "other"))
    given = (latents, labels) if kind != "values" else mutate_values(rng, latents, labels, say)
    try:
        settings = write(source, *given)
    except (
        IndexError,
        TypeError,
        RuntimeError,
        ValueError,
    ):  # such values cannot be written in this format
        return
    files = sorted(path for path in source.rglob("*") if path.is_file())
    if kind == "file":
        say(f"{write.__name__}: {mutate_file(rng, rng.choice(files))}")
    elif kind == "other" and (source / "dataset.json").is_file():
        listed = json.loads((source / "dataset.json").read_text())
        say(mutate_tree(rng, listed))
        (source / "dataset.json").write_bytes(as_json(listed))
    elif kind == "other":
        say(f"{write.__name__}: {mutate_folder(rng, source)}")
    classes = rng.choice((None, None, 3, 2, "none"))
    small = {
        "shard_size": 7,
        "block_size": 3,
        "dtype": rng.choice(("float16", "float32")),
        "held_out": 0.2,
    }
    facts = {
        "out": str(folder / "out"),
        "encoder": "x",
        "scale": 1.0,
        "device": "cpu",
        "classes": classes,
    }
    with patch("training.config.build.build", lambda *_, **__: Identity()):
        out = import_latents(check_config(ImportConfig(**settings | small | facts))).parent
    assert not (problems := verify(VerifyConfig(path=str(out), count=0))), problems
    apart = ("fast_dit", "edm2", "tars") if kind == "file" else ("fast_dit", "edm2")
    if kind != "values" and write.__name__ in apart:  # a change of one file changes one sample
        found = read_set(out)
        names = labels if classes != "none" else torch.zeros_like(labels)
        original = [
            (t.half().flatten().tolist(), n) for t, n in zip(latents, names.tolist(), strict=True)
        ]
        given = [
            (t.half().flatten().tolist(), n)
            for t, n in zip(found["latents"], found["labels"].tolist(), strict=True)
        ]
        assert sum(sample in given for sample in original) >= COUNT - 2, (
            "other samples than the original ones"
        )


def mutate_values(rng: Random, latents: Tensor, labels: Tensor, say: Say) -> tuple[Tensor, Tensor]:
    """Latents and labels of other types, shapes and sizes."""
    of_latents: dict[str, Callable[[Tensor], Tensor]] = {
        "as float64": Tensor.double,
        "as int64": Tensor.long,
        "as float16": Tensor.half,
        "as bool": Tensor.bool,
        "as complex": lambda t: t.to(torch.complex64),
        "NaN in one": lambda t: t.index_fill(0, torch.tensor(7), float("nan")),
        "times 1e30": lambda t: t * 1e30,
        "1e300": lambda t: t.double() * 1e300,
        "flat": lambda t: t.flatten(1),
        "one dimension more": lambda t: t[:, None],
        "no pixels": lambda t: t[..., :0],
        "no samples": lambda t: t[:0],
        "one sample": lambda t: t[:1],
        "a number": lambda t: t.flatten()[0],
        "zeros": torch.zeros_like,
        "transposed": lambda t: t.transpose(0, 1),
    }
    of_labels: dict[str, Callable[[Tensor], Tensor]] = {
        "as float": Tensor.float,
        "halves": lambda t: t / 2,
        "NaN": lambda t: t * float("nan"),
        "below 0": lambda t: t - 1,
        "huge": lambda t: t + 2**40,
        "10**9": lambda t: t * 500_000_000,
        "one-hot": lambda t: torch.eye(3)[t],
        "of shape (n, 1)": lambda t: t[:, None],
        "none": lambda t: t[:0],
        "one fewer": lambda t: t[1:],
        "as bool": Tensor.bool,
        "as uint8": lambda t: t.to(torch.uint8),
        "a number": lambda t: t[0],
    }
    name = rng.choice(list(of_latents))
    other = rng.choice(list(of_labels))
    which = rng.choice(("latents", "labels", "both"))
    say(f"{which}: {name}, {other}")
    latents = of_latents[name](latents) if which != "labels" else latents
    return latents.contiguous(), (
        of_labels[other](labels) if which != "latents" else labels
    ).contiguous()
