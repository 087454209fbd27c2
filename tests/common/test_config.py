"""The configuration: what composes, and what every mistake says."""

import functools
import operator
import os
import re
import sys
from itertools import chain, cycle, zip_longest
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from common.config.build import build
from common.config.compose import CONF_FOLDER, compose, parse_words, report_user_errors
from common.config.paths import refuse_paths
from common.config.schema import PrecomputeConfig, RuntimeConfig, SamplingConfig, TrainConfig
from common.config.words import list_foreign
from common.errors import UserError
from common.files import ROOT
from common.require_python import STOPPED
from common.trees import list_nodes
from scripts.import_latents import ImportConfig
from tests.harness.combinations import list_choices
from tests.harness.commands import run_command, run_here
from tests.harness.refusals import expect_refusal
from tests.harness.sets import save_images
from train import train

TOGETHER = [
    ("data", "objective", "optim", "recipe", "logger"),
    ("runtime", "adapter"),
    ("experiment",),
    ("encoder", "text_encoder"),
]
"""Groups whose files go together, whichever they are; tests/models/test_denoiser.py composes the
models."""


@pytest.mark.parametrize("groups", TOGETHER)
def test_every_file_of_every_group_composes(groups):
    job = ["precompute_latents"] if "encoder" in groups else []
    given = ["source=x", "out=y"] if job else ["init_from=x"]
    for names in zip_longest(*map(list_choices, groups)):
        chosen = {group: name for group, name in zip(groups, names, strict=True) if name}
        choices = compose([*given, *map("=".join, chosen.items())], *job).choices
        assert chosen.items() <= dict(choices).items()


def test_train_alone_means_fast_on_digits():
    choices = compose().choices
    assert (choices["runtime"], choices["data"]) == ("fast", "digits")


def test_a_default_stands_once():
    """What the dataclasses say is what composes."""
    job = compose(["source=x", "out=y"], "precompute_latents").cfg
    job_defaults = PrecomputeConfig(source="x", out="y")
    run = compose(["recipe=none"]).cfg
    for cfg, defaults in ((run, TrainConfig()), (job, job_defaults)):
        differing = {key for key, value in vars(cfg).items() if value != getattr(defaults, key)}
        assert differing <= {"model", "sampling", *chain(*TOGETHER)}
    assert run.sampling == SamplingConfig(shift=1.0)  # that of the objective
    assert compose(["runtime=eager"]).cfg.runtime == RuntimeConfig()


def test_an_experiment_overrides_the_runtime_and_the_command_line_overrides_both():
    assert compose(["experiment=fullrun"]).cfg.runtime.on_unavailable.value == "error"
    words = ["experiment=fullrun", "runtime.on_unavailable=degrade", "runtime=eager"]
    runtime = compose(words).cfg.runtime
    assert runtime.on_unavailable.value == "degrade"
    assert not runtime.tf32


RATES = {
    "adafactor": 1e-1,
    "adamw": 2e-3,
    "adamw_4bit": 2e-3,
    "adamw_8bit": 2e-3,
    "adamw_fp8": 2e-3,
    "muon": 2e-3,
    "sgd": 3e-1,
}
"""Optimizer -> its learning rate for all models and data without a recipe."""


def test_only_the_digits_have_a_recipe():
    """Larger models, other data and the experiments keep their rates."""
    assert [*RATES] == list_choices("optim")
    others = cycle(["model=mamba_s", "data=synthetic", "recipe=none"])
    for (name, rate), word in zip(RATES.items(), others, strict=False):
        cfg = compose([f"optim={name}", word]).cfg
        assert (cfg.optim["lr"], cfg.schedule.warmup_samples) == (rate, 1280)
    for words, rate in (
        (["experiment=fastrun", "data=synthetic"], 2e-3),
        (["experiment=fastrun", "model=dit_s"], 2e-3),
        (["experiment=fullrun"], 2e-4),
        (["experiment=small_card"], 1e-4),
    ):
        assert compose(words).cfg.optim["lr"] == rate


@pytest.mark.parametrize("recipe", list_choices("recipe"))
def test_a_recipe_follows_from_the_choices(recipe):
    """The command line has the last word."""
    if recipe == "none":
        assert compose(["optim=sgd"]).choices["recipe"] == recipe
        return
    data, optim, size = re.fullmatch("([a-z]+)_(.*)_([a-z]+)", recipe).groups()
    words = [f"data={data}", f"optim={optim}", f"model=dit_{size}"]
    tuned = compose(words)
    assert tuned.choices["recipe"] == recipe
    assert tuned.cfg.optim["lr"] != RATES[optim]
    assert compose([*words, "optim.lr=0.5"]).cfg.optim["lr"] == 0.5


def test_help_is_quick_and_lists_groups_with_examples():
    output = run_command("--help", environment=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"})
    assert output.startswith("0\n")
    assert "model=mamba_xs  " in output
    assert re.search("batch_size=64 +Samples per step", output)
    assert "| torch" not in output, "torch was imported"


def test_the_configuration_prints_without_holes_from_any_folder(tmp_path):
    output = run_command("--cfg", "job", "--resolve", cwd=tmp_path)
    assert output.startswith("0\n")
    assert "???" not in output
    assert list(tmp_path.iterdir()) == []


MISTAKES = yaml.safe_load((ROOT / "tests/assets/mistakes.yaml").read_text())


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_gets_one_sentence_with_key_value_and_fix(words, run_dir, capsys, monkeypatch):
    if words == "runtime.device=cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    with pytest.raises(SystemExit), report_user_errors():
        train(compose(["total_samples=64", f"run_dir={run_dir}", *words.split()]))
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    for part in MISTAKES[words]:
        assert part in message
    assert not run_dir.exists(), "a run that never started left a folder"


def test_a_typo_inside_an_experiment_file_is_refused(monkeypatch):
    file = CONF_FOLDER / "experiment" / "typo_for_a_test.yaml"
    monkeypatch.setattr(sys, "argv", ["train.py"])
    try:
        file.write_text("# @package _global_\n# A typo.\nmodle:\n  depth: 2\n")
        with expect_refusal("did you mean model"):
            compose(["experiment=typo_for_a_test"])
    finally:
        file.unlink()


SPELLINGS = yaml.safe_load((ROOT / "tests/assets/spellings.yaml").read_text())


@pytest.mark.parametrize("line", SPELLINGS)
def test_what_people_type_is_answered(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("made").mkdir()
    latents = torch.zeros(2, 4)
    torch.save(latents, "made/a.pt")
    np.save("made/b.npy", latents)
    save_file({"latents": latents}, "made/c.safetensors")
    save_images(tmp_path / "photos", ("cat",), per_class=1)
    np.savez("photos/statistics.npz", latents)

    answer = "accepted"
    try:
        refuse_paths(compose(line.split()).cfg)
    except UserError as error:
        answer = str(error)
    assert answer == SPELLINGS[line]


@pytest.mark.parametrize("key", list_foreign("training"))
def test_foreign_spellings_get_ours(key):
    word = key if "=" in key else f"{key}=1"
    with expect_refusal(f"{word} is not spelled so here; use"):
        compose([word])


def test_the_keys_that_answers_name_are_real():
    source = compose(["data=webdataset", "logger=wandb", "adapter=lora", "init_from=x"]).source
    others = vars(ImportConfig()) | vars(PrecomputeConfig())
    keys = [f"{key}." for key in (*dict(list_nodes(source)), *others, "experiment")]
    answers = [answer.partition("; ")[2] for answer in SPELLINGS.values()]
    for answer in (*list_foreign("training").values(), *answers):
        for name in re.findall(r"(?<![\w.-])([a-z][a-z_.\d]*)[=?]", answer):
            assert any(key.startswith(f"{name}.") for key in keys), answer


def build_model(node):
    return build(node, "model", channels=1, height=8, width=8, num_classes=2)


def test_nested_components_are_built_and_checked():
    node = compose(["model=dit_xs", "model.mixer.qk_norm=false"]).cfg.model
    assert build_model(node).blocks[0].layers[0].q_weight is None
    del node["depth"]
    with expect_refusal("model lacks depth"):
        build_model(node)


def test_ctrl_c_ends_a_command_with_one_line(capsys):
    with pytest.raises(SystemExit, match="130"), report_user_errors():
        raise KeyboardInterrupt
    assert capsys.readouterr().err == f"\n{STOPPED}\n"


def test_an_error_that_is_not_the_users_keeps_its_traceback():
    with pytest.raises(ValueError, match="negative dimension"), report_user_errors():
        np.zeros(-1)


def test_presets_build_on_each_other():
    """max ⊃ production ⊃ fast ⊃ eager."""
    on = {}
    for name in list_choices("runtime"):
        runtime = compose([f"runtime={name}"]).cfg.runtime
        on[name] = {key for key, value in vars(runtime).items() if value is True}
    assert on["eager"] < on["fast"] < on["production"] < on["max"]
    assert on["max"] - on["production"] == {"cuda_graph"}
    assert on["production"] - on["fast"] == {"compile"}
    assert "cudnn_benchmark" in on["fast"]
    assert on["lowmem"] - on["fast"] == {"gradient_checkpointing", "empty_cache_at_eval"}


PARSE_RUN = compose
PARSE_IMPORT = functools.partial(parse_words, ImportConfig, help_text="")


@pytest.mark.parametrize(
    ("parse", "word", "sentence"),
    [
        (PARSE_RUN, "", "one word of the command is empty"),
        (PARSE_RUN, "seed=" + 101 * "[", "more than 100 brackets"),
        (PARSE_IMPORT, "dtype==", "dtype: the word that begins so cannot be read"),
        (PARSE_IMPORT, "scale=" + 400 * "9", 40 * "9" + " does not fit into 64 bits"),
    ],
)
def test_words_that_hydra_or_yaml_break_on(parse, word, sentence):
    with expect_refusal(re.escape(sentence)):
        parse([word])


@pytest.mark.parametrize(
    "words",
    [
        ("model=dit_xs", "model.mlp_ratio=-1"),
        ("model=mamba_xs", "model.mixer.expand=-1"),
        ("model=zigzag_xs", "model.mixer.state_dim=0"),
        ("model=conv_xs", "model.mixer.expand=0"),
    ],
)
def test_sizes_below_their_least_are_refused(words):
    with expect_refusal(rf"{words[1]}(\.0)? must be"):
        build_model(compose([*words]).cfg.model)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("run_dir=runs/naïve-${seed}", "runs/naïve-0"),
        ("run_dir=runs (1)/a=b", "runs (1)/a=b"),
        ("run_dir=null", None),
        ("fd.features=[encoder, größe,random]", ["encoder", "größe", "random"]),
        ("+runtime.parallel.nccl={NCCL_DEBUG: größe}", {"NCCL_DEBUG": "größe"}),
    ],
)
def test_a_value_may_have_any_letter(word, value):
    key = word.lstrip("+").partition("=")[0]
    assert operator.attrgetter(key)(compose([word]).cfg) == value


def test_a_run_may_lie_in_a_folder_of_any_name(run, monkeypatch):
    """In a command too, where Hydra reads the words."""
    summary = run(folder="läufe 漢/(1) ä")
    assert Path(summary["run_dir"]).is_dir()
    started = Mock()
    monkeypatch.setattr("train.train", started)
    run_here(monkeypatch, f"run_dir={summary['run_dir']}", "seed=1")
    assert started.call_args.args[0].cfg.run_dir == summary["run_dir"]
