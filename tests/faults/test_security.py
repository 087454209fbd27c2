"""Inputs that want to run code, leave their folder, or learn a secret; each is tried and
refused."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import pickle
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from common.files import ROOT
from data.loader import LatentSpec
from encoding.sources import list_images
from scripts.import_latents import ImportConfig
from scripts.sample import SampleConfig, sample_run
from tests.harness.fuzz import DEEP, as_json, tried
from tests.harness.fuzz_inputs import known_keys
from tests.harness.fuzz_weights import ON_A_HUB, described_otherwise, description_of, good_file
from tests.harness.words import TINY_RUN
from tests.house.test_house import PACKAGES
from train import train
from training.checkpoint.files import METADATA_KEY
from training.checkpoint.load import find_weights_file, list_complete, verify
from training.config import secrets
from training.config.build import build
from training.config.compose import CONF_FOLDER, compose, report_user_errors
from training.config.contradictions import check_nccl
from training.config.secrets import SHAPES, redact, redact_text, redact_words
from training.config.words import describe_unreadable
from training.run import choose_folder
from training.weights.pretrained import build_autoencoder, build_model, fit_weights, load_pretrained


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return (open, (str(self.file), "w"))


TARGETS = [
    "os.system",
    "builtins.eval",
    "builtins.open",
    "subprocess.Popen",
    "shutil.copy",
    "setuptools._distutils.spawn.spawn",
    "torch.load",
    "pickle.loads",
    "functools.partial",
    "hydra.utils.get_method",
    "models.denoiser.torch.load",
    "models.denoiser.inspect.os.system",
    "training.run.subprocess.run",
    "data.source.os.system",
    "training.config.compose.report_user_errors",
    "logging.os.system",
    "models",
    "",
    ".system",
]


@pytest.mark.fault(
    "a configuration that names code outside the allow-list",
    "refused in a sentence; nothing is run",
)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("key", ["model", "model.mixer", "data", "objective", "optim", "logger"])
def test_a_malicious_configuration(key: str, target: str, tmp_path: Path):
    with pytest.raises(ValueError, match=rf"{key}._target_={re.escape(target)} is not allowed"):
        train(compose([*TINY_RUN, f"++{key}._target_={target}", f"run_dir={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("target", [["os.system"], {"a": 1}, 3, None])
def test_a_target_that_is_no_name(target: Any):
    with pytest.raises(ValueError, match=r"model._target_=.* is not allowed"):
        build({"_target_": target}, "model")


@pytest.mark.fault(
    "weights whose header names code as their model", "refused in a sentence; nothing is run"
)
@pytest.mark.parametrize(
    "target",
    ["os.system", "torch.load", "data.blocks.BlockReader.read", "models.denoiser.torch.load"],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_malicious_export(nested: bool, target: str, whole: Callable[..., Path], tmp_path: Path):
    file = list_complete(whole() / "checkpoints")[-1] / "ema.safetensors"
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        told = json.loads(opened.metadata()[METADATA_KEY])
    (told["model"]["mixer"] if nested else told["model"])["_target_"] = target
    evil = tmp_path / "evil.safetensors"
    save_file(load_file(file), evil, {METADATA_KEY: json.dumps(told)})
    with pytest.raises(ValueError, match=r"do not trust this file|is not allowed"):
        sample_run(SampleConfig(weights=str(evil), out=str(tmp_path / "out")))


@pytest.mark.fault(
    "weights or latents whose encoder names code", "refused in a sentence; nothing is run"
)
@pytest.mark.parametrize(
    "encoder",
    [
        {"_target_": "os.system", "path": "x"},
        {"_target_": "data.resident.ResidentLatents", "path": "http://127.0.0.1:9"},
        {
            "_target_": "models.autoencoders.DiffusersAutoencoder",
            "path": {"_target_": "common.files.FolderLock"},
        },
        {"_target_": "models.denoiser.Denoiser"},
        {},
    ],
)
def test_a_malicious_encoder(encoder: dict):
    spec = LatentSpec(1, 8, 8, 10, 1, ["a"], [0.0], [1.0], encoder)
    with pytest.raises(ValueError, match=r"do not trust|is no Autoencoder|is not allowed"):
        build_autoencoder(spec, torch.device("cpu"))


@pytest.mark.fault(
    "weights or latents whose encoder is a repository of a hub, unpinned",
    "refused; no hub is asked",
)
def test_an_encoder_that_a_file_names_is_on_this_disk_or_pinned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked: list[Any] = []

    def ask(path: str, revision: str | None, **_: object) -> str:
        asked.append((path, revision))
        raise OSError("there is no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", ask)
    pins = (
        (None, None),
        ("main", None),
        (None, "x"),
        ("a" * 39, "0" * 63),
        ("a" * 40, None),
        (None, "0" * 64),
    )
    for revision, sha256 in pins:
        node = {
            "_target_": "models.autoencoders.DiffusersAutoencoder",
            "path": "evil/vae",
            "revision": revision,
        }
        spec = LatentSpec(1, 8, 8, 1, 1, ["a"], [0.0], [1.0], node, sha256)
        pinned = revision == "a" * 40 or sha256 == "0" * 64
        said = (
            "could not be downloaded"
            if pinned
            else r"encoder evil/vae, .* no hub is asked .* use encoder=<folder>"
        )
        with pytest.raises(ValueError, match=said):
            build_autoencoder(spec, torch.device("cpu"))
        # the command itself may name any
        with pytest.raises(ValueError, match=r"config\.json does not exist"):
            build_autoencoder(spec, torch.device("cpu"), str(tmp_path))
    assert asked == [("evil/vae", "a" * 40), ("evil/vae", None)]


HOSTILE: dict[str, tuple[Callable[[dict], Any], str]] = {
    "no end of layers": (lambda told: told["model"].update(depth=10**9), "larger by far"),
    "no end of width": (
        lambda told: told["model"].update(dim=10**6, head_dim=10**6),
        "larger by far",
    ),
    "latents without end": (
        lambda told: told["spec"].update(height=2**20, width=2**20),
        "larger by far",
    ),
    "classes without end": (
        lambda told: told["spec"].update(num_classes=10**12, class_names=[]),
        "larger by far",
    ),
    "other sizes": (
        lambda told: told["model"].update(dim=24),
        r"pos_embed has shape \(1, 4, 16\) in the file and",
    ),
    "a size below zero": (
        lambda told: told["model"].update(mlp_ratio=-1e30),
        "mlp_ratio=-1e.30 must be at least 0",
    ),
    "a mean too many": (
        lambda told: told["spec"].update(mean=[0.0] * 7),
        "mean has 7 values, and there are 1 channels",
    ),
    "a std of zero": (
        lambda told: told["spec"].update(std=[0.0]),
        "spec.std.0 should be greater than 0.0",
    ),
    "a name too few": (
        lambda told: told["spec"].update(class_names=["a"]),
        "names of 1 classes, and there are 3",
    ),
    "brackets without end": (
        lambda told: told.update(step=DEEP),
        "is not valid JSON .recursion limit",
    ),
    "no end of words": (
        lambda told: told.update(more="x" * 2**24),
        "more than 16777216 are not read",
    ),
    "a word for a number": (
        lambda told: told["spec"].update(channels="1"),
        "spec.channels should be a valid integer",
    ),
    "a mixer on a hub": (
        lambda told: told["model"].update(mixer=ON_A_HUB | {"revision": "a" * 40}),
        "names models.autoencoders.DiffusersAutoencoder as part of its model, .* do not trust "
        "this file",
    ),
}


@pytest.mark.fault(
    "a weights file whose header describes what it does not hold",
    "refused in a sentence, in 1 GiB, 5 s",
)
@pytest.mark.parametrize("change", HOSTILE)
def test_hostile_weights(change: str, tmp_path: Path):
    alter, said = HOSTILE[change]

    def subject(rng: Random, folder: Path, say: Callable[[str], None]) -> None:
        payload = good_file("models.mixers.convolution.Convolution", "pixels")
        told = description_of(payload)
        alter(told)
        (folder / "ema.safetensors").write_bytes(described_otherwise(payload, as_json(told)))
        load_pretrained(folder / "ema.safetensors", torch.device("cpu"))

    ending = tried(subject, 0, tmp_path)
    assert ending.ending == "sentence", ending
    assert re.search(rf"error: {tmp_path}/ema.safetensors.*{said}", ending.text), ending.text


def test_a_file_that_says_it_has_classes_without_end_starts_a_run_within_limits(tmp_path: Path):
    def subject(rng: Random, folder: Path, say: Callable[[str], None]) -> None:
        payload = good_file("models.mixers.convolution.Convolution", "pixels")
        told = description_of(payload)
        model = build_model(told["model"], LatentSpec(**told["spec"]), torch.device("cpu"))
        told["spec"].update(num_classes=10**12, class_names=[])
        (folder / "x.safetensors").write_bytes(described_otherwise(payload, as_json(told)))
        fit_weights(
            model, LatentSpec(**told["spec"] | {"num_classes": 3}), folder / "x.safetensors"
        )

    assert tried(subject, 0, tmp_path).ending == "success"  # by the rows that are there


@pytest.mark.fault(
    "a pickle in the place of weights or of a checkpoint's files", "refused; nothing is unpickled"
)
def test_a_pickle_is_never_opened(whole: Callable[..., Path], tmp_path: Path):
    made = tmp_path / "made"
    for name in ("evil.safetensors", "evil.pt"):
        torch.save({"weights": Evil(made)}, tmp_path / name)
    made.unlink(missing_ok=True)
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load_pretrained(tmp_path / "evil.safetensors", torch.device("cpu"))
    with pytest.raises(ValueError, match="neither a"):
        find_weights_file(str(tmp_path / "evil.pt"), "init_from")
    checkpoint = tmp_path / "step-2"
    checkpoint.mkdir()
    for file in list_complete(whole() / "checkpoints")[-1].iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    (checkpoint / "rank-0-of-1.safetensors").write_bytes(pickle.dumps(Evil(made)))
    with pytest.raises(ValueError, match=r"rank-0-of-1\.safetensors does not match"):
        verify(checkpoint)
    assert not made.exists()


@pytest.mark.fault(
    "a manifest of a checkpoint that names files outside it", "not looked at; it does not verify"
)
def test_a_manifest_stays_in_its_folder(tmp_path: Path):
    (tmp_path / "secret").write_text("x")
    checkpoint = tmp_path / "step-2"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text(
        json.dumps({"files": {"../secret": {"bytes": 1, "sha256": "?"}}})
    )
    with pytest.raises(
        ValueError, match=r"no usable checkpoint: its manifest lacks or adds \.\./secret"
    ):
        verify(checkpoint)


@pytest.mark.fault(
    "a tar with paths out of its folder, links and pickles",
    "read as names or not at all; nothing is made",
)
def test_a_malicious_tar(tmp_path: Path):
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "png")
    made = tmp_path / "made"
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "evil.tar", "w") as tar:
        for name, content in {
            "../../outside.png": picture.getvalue(),
            "../../outside.cls": b"0",
            "/abs.png": picture.getvalue(),
            "/abs.cls": b"1",
            "../../outside.pyd": pickle.dumps(Evil(made)),
            "../../outside.pickle": pickle.dumps(Evil(made)),
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("link.png")
        link.type = tarfile.SYMTYPE
        link.linkname = "/etc/passwd"
        tar.addfile(link)
    made.unlink(missing_ok=True)
    before = sorted(tmp_path.rglob("*"))
    assert [entry.size for entry in list_images(tmp_path / "in").entries] == [
        len(picture.getvalue())
    ] * 2
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["../../etc/x", "a/b", "a b;rm", "mamba_s"])
def test_a_default_folder_stays_among_the_runs(name: str):
    folder = choose_folder({"model": name, "runtime": "fast"})
    assert folder.parent == Path("runs")
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", folder.name)


@pytest.mark.fault(
    "secrets in keys, in the environment and in addresses",
    "in no file of the run, no log, no message",
)
def test_secrets_stay_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("MY_TOKEN", "hunter2-env")
    folder = tmp_path / "run"
    words = ["logger=wandb", "logger.mode=offline", f"run_dir={folder}"]
    words += ["+runtime.parallel.nccl.NCCL_DEBUG=${oc.env:MY_TOKEN}", "save_every=1"]
    words += ["+runtime.parallel.nccl.NCCL_SOCKET_IFNAME='password=hunter2-key'"]
    words += [
        "+runtime.parallel.nccl.NCCL_IB_HCA='https://me:hunter2@pass@host/x?X-Amz-Signature=hunter2-sig&a=1'"
    ]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    train(compose([*TINY_RUN, *words]))
    written = [
        file for file in folder.rglob("*") if file.is_file() and "wandb/offline" not in str(file)
    ]
    assert len(written) > 8
    for file in written:
        assert b"hunter2" not in file.read_bytes(), file
    kept_by_wandb = [file for file in folder.glob("wandb/offline-run-*/**/*") if file.is_file()]
    assert any(file.suffix == ".wandb" for file in kept_by_wandb)  # what would be uploaded
    for file in kept_by_wandb:
        assert b"hunter2" not in file.read_bytes(), file
    shown = capsys.readouterr()
    assert "hunter2" not in shown.out + shown.err
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["runtime"]["parallel"]["nccl"]["NCCL_DEBUG"] == "${oc.env:MY_TOKEN}"
    assert config["runtime"]["parallel"]["nccl"]["NCCL_SOCKET_IFNAME"] == "password=<redacted>"


def test_messages_are_scrubbed(capsys):
    with pytest.raises(SystemExit), report_user_errors():
        compose(
            ["data=resident", "data.path=s3://key:hunter2@b/x", "resume=3", "batch_size=-1"]
        ).cfg.check()
    with pytest.raises(SystemExit), report_user_errors():
        train(
            compose(
                [
                    *TINY_RUN,
                    "data=resident",
                    "data.path=http://u:hunter2@127.0.0.1:9/x?sig=hunter2&part=1",
                ]
            )
        )
    assert "hunter2" not in capsys.readouterr().err
    assert redact_text("https://u:p@h/x?sig=s&part=1") == "https://<redacted>@h/x?<redacted>"
    signed = "http://h/set?X-Amz-Signature=hunter2&X-Amz-Credential=hunter2"
    for written in (
        redact({"data": {"path": signed}}),
        redact_words([f"data.path={signed}"]),
        redact_text(signed),
    ):
        assert "hunter2" not in str(written)
        assert "http://h/set?<redacted>" in str(written)
    assert (
        redact_text("a plain: text, a@b.c ?x=1, no key: 3")
        == "a plain: text, a@b.c ?x=1, no key: 3"
    )
    assert redact_words(["a={TOKEN:x,b:1}", "token=x", "b=[{my_key: x}]"]) == [
        "a={TOKEN:<redacted>,b:1}",
        "token=<redacted>",
        "b=[{my_key: <redacted>}]",
    ]


TOLD = {
    "https://user:pass@word@host/": [
        "get https://user:HUN@TER2@h/x",
        "s3://key:HUNTER2@b/x",
        "https://HUNTER2@h:80",
        "http://u:HUN/TER2@h",
    ],
    "user:pass@word@host": ["user:HUN@TER2@h", "path=user:HUNTER2@h:/x"],
    "https://host/path?query": ["http://h/x?part=HUNTER2&b=HUNTER2", "'https://h?HUNTER2'"],
    "Authorization: scheme value": [
        "Authorization: Digest HUNTER2",
        "{'authorization': 'AWS4 HUNTER2'}",
    ],
    "Cookie: name=value; name=value": [
        "Cookie: session=HUNTER2; b=HUNTER2",
        "-H 'set-cookie: a=HUNTER2'",
    ],
    "Bearer value": ["sent Bearer HUNTER2", "-H 'x: bearer HUNTER2'"],
    "Basic value": ["sent Basic SFVOVEVSMg==", "basic dXNlOkhVTlRFUjI"],
    "name=value": [
        *(
            "api_key=HUNTER2",
            "apiKey=HUNTER2",
            "API-KEY=HUNTER2",
            "logger.api_key='HUN TER2'",
            "HF_TOKEN=HUNTER2",
        ),
        *(
            "auth=HUNTER2",
            "pwd=HUNTER2",
            "jwt=HUNTER2",
            "accessToken=HUNTER2",
            "passphrase=HUNTER2",
            "x_pass=HUNTER2",
        ),
        *(
            "privateKey=HUNTER2",
            "tokens=HUNTER2",
            "client_secret=HUNTER2",
            "credentials=HUNTER2",
            "sig=HUNTER2",
        ),
        *(
            "a='password=HUNTER2'",
            "AWS_SECRET_ACCESS_KEY=HUNTER2",
            "password2=HUNTER2",
            "use password = HUNTER2",
            "db.passwd=1234567",
        ),
        *(
            f"{name}=HUNTER2"
            for name in [
                "PGPASSWORD",
                "secretkey",
                "clientsecret",
                "dbpassword",
                "hftoken",
                "sshpass",
            ]
        ),
        *("auth=[me, HUNTER2]", "auth={a: {b: [me, HUNTER2]}, c: HUNTER2}", "password  =  HUNTER2"),
        *("password=ab&HUNTER2", "password=[HUNTER2", "a=1&token=HUNTER2"),
    ],
    "--name value": ["--token HUNTER2", "--api-key 'HUNTER2'"],
    "X-Name: value": ["-H 'X-Api-Key: HUNTER2'", "X-Api-Key: HUNTER2", "x-auth-token: HUNTER2"],
    "{name: value}": [
        "{token: HUNTER2}",
        "{'privateKey': 'HUN,TER2'}",
        '{"a": 1, "apiKey":"HUNTER2"}',
        "[my_key: HUNTER2]",
        *(
            "{auth: [me, HUNTER2]}",
            "{api_key: {a: HUNTER2}, b: 1}",
            "{password: ab,HUNTER2}",
            "{password: ab[HUNTER2}",
        ),
    ],
    "name: value, a line": [
        "password: HUNTER2",
        "a:\n  - token: 'HUN TER2'\n",
        '"api_key": HUNTER2\n',
    ],
    "a provider's own form": [
        f"got {start}HUNTER2abcdefghijkl"
        for start in (
            *(
                "hf_",
                "ghp_",
                "sk-",
                "wandb_v1_",
                "sk_live_",
                "rk_live_",
                "ya29.",
                "npm_",
                "pypi-",
                "dckr_pat_",
                "r8_",
            ),
            *("nvapi-", "gsk_", "tskey-", "hvs.", "SG.", "AGE-SECRET-KEY-", "api_org_"),
        )
    ],
    "a private key": ["-----BEGIN RSA PRIVATE KEY-----\nHUNTER2\n-----END RSA PRIVATE KEY-----"],
}
"""Shape of a secret -> texts that have it."""


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_a_secret_is_redacted(shape: str):
    for text in TOLD[shape]:
        for written in (redact_text(text), str(redact({"a": [text]})), redact_words([text])[0]):
            assert "<redacted>" in written, text
            assert not re.search(r"HUN|TER2|SFVO|dXNl|1234567", written), text


@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_of_the_table_is_needed(shape: str, monkeypatch: pytest.MonkeyPatch):
    kept = [
        ready for name, ready in zip(SHAPES, secrets.COMPILED_SHAPES, strict=True) if name != shape
    ]
    monkeypatch.setattr(secrets, "COMPILED_SHAPES", kept)
    assert any(re.search(r"HUN|TER2|SFVO|dXNl|1234567", redact_text(text)) for text in TOLD[shape])


def test_names_with_a_secret_lose_values_and_no_others():
    names = (
        "apiKey access-token PRIVATE_KEY tokens auth passphrase clientSecret X-Auth-Token "
        "authToken accesskey "
    )
    names += "GITHUB_PAT creds sas sentry_dsn webhook SLACK_WEBHOOK_URL auth_header"
    assert set(redact(dict.fromkeys(names.split(), "x")).values()) == {"<redacted>"}
    assert redact_text(f"dapi{'0123456789abcdef' * 2}") == "<redacted>"
    assert redact({"ghp_HUNTER2abcdefghijkl": ("sk-HUNTER2abcdefghijkl", 1)}) == {
        "<redacted>": ("<redacted>", 1)
    }
    others = {
        "tokens": 3,
        "tokens_per_s": 3,
        "author": "x",
        "labels_key": "x",
        "token_drop": 0.1,
        "use_auth_token": True,
    }
    assert redact(others) == others
    keys = (
        known_keys("train")
        + known_keys("precompute_latents")
        + [f.name for f in dataclasses.fields(ImportConfig)]
    )
    assert [key for key in keys if secrets.is_secret(key, "x")] == []


def test_no_sentence_of_ours_is_redacted():
    """Every text in the code, with a name where a value goes; advice such as latents_key=<name>
    stays."""
    checked = 0
    for file in [
        *ROOT.glob("*.py"),
        *(file for name in PACKAGES for file in (ROOT / name).rglob("*.py")),
    ]:
        for call in [
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Raise)
        ]:
            for node in ast.walk(call):
                if isinstance(node, ast.JoinedStr):
                    parts = [
                        part.value if isinstance(part, ast.Constant) else "photos"
                        for part in node.values
                    ]
                    text = "".join(map(str, parts))
                    assert redact_text(text) == text
                    checked += 1
    assert checked > 200
    for advice in (
        *(
            "x is not of the form key=value; set latents_key=<name>.",
            "labels_key=label, data.author=me",
        ),
        *(
            "basic float32 precision",
            "the bearer token expired",
            "python:3.11@sha256:0a1b",
            "{token: …, b: 1}",
        ),
        *(
            describe_unreadable("logger.api_key='x"),
            "write logger.key=[…] for a list, logger.key=\"'…'\" for text",
        ),
    ):
        assert redact_text(advice) == advice
        with pytest.raises(ValueError, match="is not of the form key=value") as caught:
            compose(["latents_key"])
        assert redact_text(str(caught.value)) == str(caught.value)


@pytest.mark.fault(
    "a variable of NCCL that loads a library or writes a file",
    "refused in a sentence; nothing is set",
)
@pytest.mark.parametrize(
    "name",
    ["NET_PLUGIN", "TUNER_PLUGIN", "PROFILER_PLUGIN", "DEBUG_FILE", "CONF_FILE", "TOPO_FILE"],
)
def test_nccl_loads_no_code_and_writes_no_file(name: str):
    with pytest.raises(
        ValueError, match=rf"runtime\.parallel\.nccl\.NCCL_{name} is none of .* NCCL_{name}=<value>"
    ):
        compose([f"+runtime.parallel.nccl.NCCL_{name}=/tmp/x"])
    for unknown in ("NCCL_", "NCCL_X", "DEBUG", "NCCL_IB_PLUGIN"):
        with pytest.raises(ValueError, match=f"{unknown} is none of"):
            check_nccl([unknown])
    compose(
        [
            f"+runtime.parallel.nccl.{name}=1"
            for name in ("NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_ALGO")
        ]
    )


def test_hub_models_are_pinned():
    """To a commit, whose safetensors and config alone are downloaded; no code is."""
    for file in sorted((CONF_FOLDER / "encoder").glob("*.yaml")):
        node = yaml.safe_load(file.read_text())
        assert node["path"] is None or re.fullmatch(r"[0-9a-f]{40}", node["revision"]), file.name
    code = "\n".join(file.read_text() for file in ROOT.glob("models/*.py"))
    assert "trust_remote_code" not in code
    assert "use_safetensors" in code


def test_dependencies_are_past_known_advisories():
    """The table in SECURITY.md against the tested set and the lower bounds."""

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", version)[:3])

    rows = re.findall(
        r"^\| (\S*(?:CVE|GHSA)\S*).*\| `([\w-]+)` \| ([\d.]+) \|$",
        (ROOT / "SECURITY.md").read_text(),
        re.M,
    )
    assert len(rows) >= 5
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    lowest = dict(
        re.findall(r'^    "([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text(), re.M)
    )
    for advisory, package, fixed in rows:
        assert numbers(pinned[package]) >= numbers(fixed), (
            f"{package} {pinned[package]}: {advisory}"
        )
        assert numbers(lowest[package]) >= numbers(fixed), (
            f"{package} >= {lowest[package]}: {advisory}"
        )


def test_sampling_needs_nothing_but_the_weights(whole: Callable[..., Path], tmp_path: Path):
    """One file, copied away: no run folder, no optimizer, no loop."""
    file = tmp_path / "copied.safetensors"
    file.write_bytes((list_complete(whole() / "checkpoints")[-1] / "ema.safetensors").read_bytes())
    program = (
        "import sys; from scripts.sample import *; "
        f"sample_run(SampleConfig(weights={str(file)!r}, count=4, steps=2, "
        f"out={str(tmp_path / 'samples')!r})); unwanted = 'training.step', 'training.state', "
        "'training.checkpoint.save', 'train'; print([name for name in unwanted if name in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    run = SampleConfig(run_dir=str(whole()), count=4, steps=2, out=str(tmp_path / "other"))
    sample_run(run)
    assert (tmp_path / "samples.npz").read_bytes() == (tmp_path / "other.npz").read_bytes()
