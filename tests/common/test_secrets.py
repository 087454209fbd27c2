"""Secrets reach no file of a run, no log and no message; everything else stays as it is."""

import dataclasses
import re

import pytest
import yaml

from common.config import secrets
from common.config.compose import compose, read_config, report_user_errors
from common.config.secrets import SHAPES, redact, redact_text, redact_words
from common.config.words import describe_unreadable
from common.errors import UserError
from common.files import ROOT
from common.trees import list_nodes
from scripts.import_latents import ImportConfig
from tests.harness.commands import run_here
from tests.harness.words import TINY_RUN


@pytest.mark.fault(
    "secrets in keys, in the environment and in addresses",
    "in no file of the run, no log, no message",
)
def test_secrets_stay_secret(run_dir, monkeypatch, capsys):
    monkeypatch.setenv("MY_TOKEN", "hunter2-env")
    monkeypatch.setenv("MY_PROJECT", "canary")
    nccl = "+runtime.parallel.nccl.NCCL_"
    words = [
        "logger=wandb",
        "logger.mode=offline",
        "logger.project=${oc.env:MY_PROJECT}",
        "fd.dinov2=${oc.env:MY_TOKEN}",
        "save_every=1",
        f"run_dir={run_dir}",
        f"{nccl}DEBUG=${{oc.env:MY_TOKEN}}",
        f"{nccl}SOCKET_IFNAME='password=hunter2-key'",
        f"{nccl}IB_HCA='https://me:hunter2@pass@host/x?X-Amz-Signature=hunter2-sig&a=1'",
    ]
    run_here(monkeypatch, *TINY_RUN, *words)
    files = [file for file in run_dir.rglob("*") if file.is_file()]
    # W&B uploads the files of its own folder.
    assert {"config.yaml", "environment.json", "metrics.jsonl"} <= {file.name for file in files}
    assert ".wandb" in {file.suffix for file in files}
    for file in files:
        assert b"hunter2" not in file.read_bytes(), file
        # W&B must know the project, and is the only one.
        assert b"canary" not in file.read_bytes() or "wandb" in file.parts, file
    shown = capsys.readouterr()
    assert "hunter2" not in shown.out + shown.err
    nccl = read_config(run_dir / "config.yaml")["runtime"]["parallel"]["nccl"]
    assert nccl["NCCL_DEBUG"] == "${oc.env:MY_TOKEN}"
    assert nccl["NCCL_SOCKET_IFNAME"] == "password=<redacted>"


def test_messages_are_scrubbed(capsys):
    with pytest.raises(SystemExit), report_user_errors():
        raise UserError("http://u:hunter2@127.0.0.1:9/x?sig=hunter2&part=1 cannot be read.")
    assert "hunter2" not in capsys.readouterr().err
    plain = "a plain: text, a@b.c ?x=1, no key: 3"
    assert redact_text(plain) == plain
    assert redact_words(["a={TOKEN:x,b:1}", "token=x", "b=[{my_key: x}]"]) == [
        "a={TOKEN:<redacted>,b:1}",
        "token=<redacted>",
        "b=[{my_key: <redacted>}]",
    ]


TEXTS = yaml.safe_load((ROOT / "tests/assets/secrets.yaml").read_text())
"""Shape of a secret -> texts that have it."""


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_a_secret_is_redacted(shape):
    for text in TEXTS[shape]:
        for output in (redact_text(text), str(redact({"a": [text]})), redact_words([text])[0]):
            assert "<redacted>" in output, text
            assert re.search(r"HUN|TER2|SFVO|dXNl|1234567", output) is None, text


def test_names_with_a_secret_lose_values_and_no_others():
    names = (
        "apiKey access-token PRIVATE_KEY tokens auth passphrase clientSecret X-Auth-Token "
        "authToken accesskey GITHUB_PAT creds sas sentry_dsn webhook SLACK_WEBHOOK_URL auth_header"
    )
    assert set(redact(dict.fromkeys(names.split(), "x")).values()) == {"<redacted>"}
    assert redact({"ghp_HUNTER2abcdefghijkl": ("sk-HUNTER2abcdefghijkl", 1)}) == {
        "<redacted>": ("<redacted>", 1)
    }
    others = {
        "tokens": 3,
        "tokens_per_s": 3,
        "author": "x",
        "labels_key": "x",
        "use_auth_token": True,
    }
    assert redact(others) == others
    sources = [compose([]).source, compose(["source=x", "out=y"], "precompute_latents").source]
    keys = [key for source in sources for key, _ in list_nodes(source)]
    keys += [field.name for field in dataclasses.fields(ImportConfig)]
    assert not [key for key in keys if secrets.is_secret(key, "x")]


def test_no_sentence_of_ours_is_redacted():
    """Advice such as latents_key=<name> stays, too."""
    messages = [
        "x is not of the form key=value; set latents_key=<name>.",
        "labels_key=label, data.author=me",
        "basic float32 precision",
        "the bearer token expired",
        "python:3.11@sha256:0a1b",
        "{token: …, b: 1}",
        describe_unreadable("logger.api_key='x"),
        "write logger.key=[…] for a list, logger.key=\"'…'\" for text",
    ]
    assert [redact_text(message) for message in messages] == messages
