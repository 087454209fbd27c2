"""Inputs that would run code or leave their folder: each is refused."""

import dataclasses
import io
import pickle
import re
import shutil
import tarfile
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml

from common.config.build import build
from common.config.compose import CONF_FOLDER, compose
from common.files import ROOT, read_object, write_json
from data.spec import LatentSpec
from encoding.sources import list_images
from models.text_encoders import HubTextEncoder
from scripts.sample import SampleConfig, sample_run
from tests.harness.captions import save_bert
from tests.harness.limits import run_limited
from tests.harness.payloads import DEEP, ON_A_HUB, make_weights, read_description, with_description
from tests.harness.refusals import expect_refusal
from tests.harness.sets import PNG, write_tar
from tests.harness.words import CPU
from training.checkpoint.load import find_weights_file, verify
from training.run import choose_folder
from training.weights.pretrained import build_autoencoder, build_model, fit_weights, load_pretrained


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (open, (str(self.file), "w"))


@pytest.mark.fault(
    "a configuration that names code outside the allow-list",
    "refused in a sentence; nothing is run",
)
@pytest.mark.parametrize("key", ["model", "model.mixer", "data", "objective", "optim", "logger"])
def test_a_malicious_configuration(key, run, run_dir):
    with expect_refusal(rf"{key}._target_=os.system is not allowed"):
        run(f"++{key}._target_=os.system")
    assert not run_dir.exists()


@pytest.mark.parametrize(
    "target",
    [
        *("builtins.eval", "functools.partial", "common.config.compose.report_user_errors"),
        *("models.denoiser.torch.load", "training.assemble.build_model", "data.synthetic.torch"),
        *("models.denoiser.Tensor", "models", "", ".system", ["os.system"], None),
    ],
)
def test_a_target_that_names_no_class_of_ours(target):
    with expect_refusal(rf"model._target_={re.escape(str(target))} is not allowed"):
        build({"_target_": target}, "model")


@pytest.mark.fault(
    "weights or latents whose encoder names code", "refused in a sentence; nothing is run"
)
@pytest.mark.parametrize(
    "encoder",
    [
        {"_target_": "os.system", "path": "x"},
        {
            "_target_": "models.autoencoders.DiffusersAutoencoder",
            "path": {"_target_": "common.files.FolderLock"},
        },
        {"_target_": "models.denoiser.Denoiser"},
        {},
    ],
)
def test_a_malicious_encoder(encoder):
    spec = LatentSpec(1, 8, 8, 10, 1, ["a"], [0.0], [1.0], encoder)
    with expect_refusal(r"do not trust|is no Autoencoder|is not allowed"):
        build_autoencoder(spec, CPU)


@pytest.mark.fault(
    "weights or latents whose encoder is a repository of a hub, unpinned",
    "refused; no hub is asked",
)
@pytest.mark.parametrize(
    ("revision", "sha256", "pinned"),
    [(None, None, False), ("main", None, False), ("a" * 40, None, True), (None, "0" * 64, True)],
)
def test_an_encoder_that_a_file_names_is_on_this_disk_or_pinned(
    revision, sha256, pinned, monkeypatch, tmp_path
):
    download = Mock(side_effect=OSError("there is no network"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    node = ON_A_HUB | {"revision": revision}
    spec = LatentSpec(1, 8, 8, 1, 1, ["a"], [0.0], [1.0], node, sha256)
    refusal = r"encoder someone/some-vae, .* no hub is asked .* use encoder=<folder>"
    with expect_refusal("the download from the hub failed" if pinned else refusal):
        build_autoencoder(spec, CPU)
    assert download.called == pinned
    # The command itself may name any folder.
    with expect_refusal(r"config\.json does not exist"):
        build_autoencoder(spec, CPU, str(tmp_path))


OTHER_MODEL = pytest.mark.fault(
    "a weights file whose header describes what it does not hold",
    "refused in a sentence, in 1 GiB, 5 s",
)
EXPORT = pytest.mark.fault(
    "weights whose header names code as their model", "refused in a sentence; nothing is run"
)
HOSTILE = [
    ("model", {"depth": 10**9}, "much larger than"),
    ("spec", {"height": 2**20, "width": 2**20}, "much larger than"),
    ("spec", {"num_classes": 10**12, "class_names": []}, "much larger than"),
    ("model", {"dim": 24}, r"pos_embed has shape \(1, 4, 16\) in the file and"),
    ("spec", {"mean": [0.0] * 7}, "mean has 7 values, and there are 1 channels"),
    ("spec", {"std": [0.0]}, "spec.std.0 should be greater than 0.0"),
    ("spec", {"kind": DEEP}, "is not valid JSON .recursion limit"),
    ("spec", {"kind": "x" * 2**24}, "more than 16777216 are not read"),
    (
        "model",
        {"mixer": ON_A_HUB | {"revision": "a" * 40}},
        "names models.autoencoders.DiffusersAutoencoder as part of its model, .* do not trust",
    ),
]
CODE = [
    ("model", {"_target_": "os.system"}, "do not trust this file"),
    ("model", {"_target_": "data.resident.ResidentLatents"}, "do not trust this file"),
    ("model", {"mixer": {"_target_": "models.denoiser.torch.load"}}, "is not allowed"),
]
"""Part of the description in a weights file, its changes, and the sentence that refuses them."""


@pytest.mark.parametrize(
    ("part", "changes", "sentence"),
    [
        *(pytest.param(*case, marks=OTHER_MODEL) for case in HOSTILE),
        *(pytest.param(*case, marks=EXPORT) for case in CODE),
    ],
)
def test_hostile_weights(part, changes, sentence, tmp_path):
    payload = make_weights()
    description = read_description(payload)
    description[part] |= changes
    file = tmp_path / "ema.safetensors"
    file.write_bytes(with_description(payload, description))
    ending = run_limited(lambda: load_pretrained(file, CPU))
    assert ending.kind == "sentence", ending
    assert re.search(rf"error: {file}.*{sentence}", ending.text), ending.text


def test_a_file_that_says_it_has_classes_without_end_starts_a_run_within_limits(tmp_path):
    """The rows that are there decide what is kept."""
    payload = make_weights()
    description = read_description(payload)
    spec = LatentSpec(**description["spec"])
    model = build_model(description["model"], spec, CPU)
    description["spec"] |= {"num_classes": 10**12, "class_names": []}
    file = tmp_path / "x.safetensors"
    file.write_bytes(with_description(payload, description))
    unnamed = dataclasses.replace(spec, class_names=[])
    assert (
        run_limited(lambda: fit_weights(model, unnamed, file, description["model"])).kind
        == "success"
    )


@pytest.mark.fault(
    "a pickle in the place of weights or of a checkpoint's files", "refused; nothing is unpickled"
)
def test_a_pickle_is_never_opened(run_whole, tmp_path):
    evil = Evil(tmp_path / "made")
    for name in ("evil.safetensors", "evil.pt"):
        torch.save({"weights": evil}, tmp_path / name)
    with expect_refusal("cannot be read as safetensors"):
        load_pretrained(tmp_path / "evil.safetensors", CPU)
    with expect_refusal("neither a"):
        find_weights_file(str(tmp_path / "evil.pt"), "init_from")
    checkpoint = tmp_path / "step-12"
    shutil.copytree(run_whole() / "checkpoints" / "step-12", checkpoint)
    (checkpoint / "rank-0-of-1.safetensors").write_bytes(pickle.dumps(evil))
    with expect_refusal(r"rank-0-of-1\.safetensors does not match"):
        verify(checkpoint)
    assert not evil.file.exists()


@pytest.mark.fault(
    "a tar with paths out of its folder, links and pickles",
    "read as names or not at all; nothing is made",
)
def test_a_malicious_tar(tmp_path):
    evil = pickle.dumps(Evil(tmp_path / "made"))
    members = {
        "../../outside.png": PNG,
        "../../outside.cls": b"0",
        "/abs.png": PNG,
        "/abs.cls": b"1",
        "../../outside.pickle": evil,
    }
    file = write_tar(tmp_path / "in" / "evil.tar", members)
    with tarfile.open(file, "a") as tar:
        link = tarfile.TarInfo("link.png")
        link.type = tarfile.SYMTYPE
        link.linkname = "/etc/passwd"
        tar.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    sizes = [entry.size for entry in list_images(tmp_path / "in").entries]
    assert sizes == [len(PNG)] * 2
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["../../etc/x", "a b;rm"])
def test_a_default_folder_stays_among_the_runs(name):
    folder = choose_folder({"model": name, "runtime": "fast"})
    assert folder.parent == Path("runs")
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", folder.name)


@pytest.mark.fault(
    "a variable of NCCL that loads a library or writes a file",
    "refused in a sentence; nothing is set",
)
@pytest.mark.parametrize("name", ["NCCL_NET_PLUGIN", "NCCL_DEBUG_FILE", "NCCL_CONF_FILE"])
def test_nccl_loads_no_code_and_writes_no_file(name):
    with expect_refusal(f"{name} may not be set here"):
        compose([f"+runtime.parallel.nccl.{name}=/tmp/x"])


def test_hub_models_are_pinned():
    """The pin is a commit, of which only safetensors and config are downloaded."""
    for file in sorted((CONF_FOLDER / "encoder").glob("*.yaml")):
        node = yaml.safe_load(file.read_text())
        if file.stem == "pixels":
            continue
        assert node["path"] is None or re.fullmatch(r"[0-9a-f]{40}", node["revision"]), file.name


def test_dependencies_are_past_known_advisories():
    """The table in SECURITY.md against the tested set and the lower bounds."""

    def split(version):
        return [int(part) for part in re.findall(r"\d+", version)[:3]]

    rows = re.findall(
        r"^\| (\S*(?:CVE|GHSA)\S*).*\| `([\w-]+)` \| ([\d.]+) \|$",
        (ROOT / "SECURITY.md").read_text(),
        re.M,
    )
    assert len(rows) >= 5
    for file, pattern in (
        ("constraints.txt", r"^([\w-]+)==([\d.]+)"),
        ("pyproject.toml", r'^    "([\w-]+)>=([\d.]+)'),
    ):
        versions = dict(re.findall(pattern, (ROOT / file).read_text(), re.M))
        for advisory, package, fixed in rows:
            assert split(versions[package]) >= split(fixed), f"{file}: {package}, {advisory}"


def test_sampling_needs_nothing_but_the_weights(run_whole, tmp_path):
    """A copy of one file gives the samples of its run."""
    file = tmp_path / "copied.safetensors"
    shutil.copy(run_whole() / "checkpoints" / "step-12" / "ema.safetensors", file)
    copied, original = (
        sample_run(SampleConfig(**source, count=4, steps=2, out=str(tmp_path / "out"))).read_bytes()
        for source in ({"weights": str(file)}, {"run_dir": str(run_whole())})
    )
    assert copied == original


CUSTOM = {
    "model_type": "custom",
    "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"},
}


@pytest.mark.fault(
    "a text encoder's folder with Python code of its own", "refused; the code never runs"
)
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_no_code_of_a_folder_runs_whatever_stdin_answers(file, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    folder = tmp_path / "bert"
    folder.mkdir()
    save_bert(folder)
    content = read_object(folder / file)
    custom = CUSTOM if file == "config.json" else {"auto_map": {"AutoTokenizer": ["code.T", None]}}
    write_json(folder / file, content | custom | {"tokenizer_class": "T"})
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    # A custom tokenizer is replaced by the one of the model's type.
    refusal = expect_refusal("cannot be opened by transformers")
    with refusal if file == "config.json" else nullcontext():
        HubTextEncoder(str(folder))
    assert not (tmp_path / "ran").exists()
