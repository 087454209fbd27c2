"""The configuration: what composes, and what every mistake says."""

import enum
import functools
import importlib
import operator
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf

from common.files import ROOT
from scripts.import_latents import ImportConfig
from train import train
from training.config.build import build, resolve_target
from training.config.compose import (
    CONF_FOLDER,
    compose,
    parse_words,
    read_config,
    refuse_paths,
    report_user_errors,
)
from training.config.schema import PrecomputeConfig, RuntimeConfig, TrainConfig
from training.config.words import FOREIGN_KEYS
from training.distributed.exit import run_app


def run_command(*words, program="train.py", cwd=ROOT, environment=None):
    """Runs an entry point as a user would; what it prints, after its exit code."""
    start = ["-m", program] if program.startswith("scripts.") else [str(ROOT / program)]
    command = [sys.executable, *start, *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    return f"{done.returncode}\n{done.stdout}{done.stderr}"


def list_choices(group):
    return sorted(file.stem for file in (CONF_FOLDER / group).glob("*.yaml"))


GROUPS = [
    "model",
    "adapter",
    "data",
    "objective",
    "optim",
    "runtime",
    "logger",
    "experiment",
    "encoder",
]


@pytest.mark.parametrize("group", GROUPS)
def test_every_file_of_every_group_composes(group):
    for name in list_choices(group):
        if group == "encoder":
            composed = compose([f"encoder={name}", "source=x", "out=y"], "precompute_latents")
        else:
            composed = compose([f"{group}={name}", "init_from=x"])
        assert composed.choices[group] == name


def test_every_yaml_says_what_it_is_and_when_to_use_it():
    for file in CONF_FOLDER.rglob("*.yaml"):
        lines = [line for line in file.read_text().splitlines() if "@package" not in line]
        assert lines[0].startswith("# "), file


def test_train_alone_means_fast_on_digits():
    composed = compose()
    assert (composed.choices["runtime"], composed.choices["data"]) == ("fast", "digits")
    assert isinstance(composed.cfg, TrainConfig)


def test_a_default_stands_once():
    """What the dataclasses say is what composes; the primary files and `runtime=eager` hold no
    value of their own."""
    job = compose(["source=x", "out=y"], "precompute_latents").cfg
    job_defaults = PrecomputeConfig(source="x", out="y")
    for cfg, defaults in ((compose().cfg, TrainConfig()), (job, job_defaults)):
        differing = {key for key, value in vars(cfg).items() if value != getattr(defaults, key)}
        assert differing <= set(GROUPS)
    assert compose(["runtime=eager"]).cfg.runtime == RuntimeConfig()
    for name in ("train", "precompute_latents", "runtime/eager"):
        assert set(OmegaConf.load(CONF_FOLDER / f"{name}.yaml")) <= {"defaults", "hydra"}


def test_an_experiment_overrides_the_runtime_and_the_command_line_overrides_both():
    assert compose(["experiment=fullrun"]).cfg.runtime.on_unavailable.value == "error"
    cfg = compose(
        ["experiment=fullrun", "runtime.on_unavailable=degrade", "batch_size=32", "runtime=eager"]
    ).cfg
    assert cfg.runtime.on_unavailable.value == "degrade"
    assert cfg.batch_size == 32
    assert not cfg.runtime.tf32


def test_the_configuration_cannot_be_changed_after_it_was_composed():
    cfg = compose().cfg
    with pytest.raises(AttributeError):
        cfg.seed = 1
    with pytest.raises(AttributeError):
        cfg.runtime.tf32 = False


def test_help_is_quick_and_lists_groups_with_examples():
    output = run_command("--help", environment=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"})
    assert output.startswith("0\n")
    assert "model: conv_b" in output
    assert "experiment=fastrun" in output
    assert "| torch" not in output, "torch was imported"


@pytest.mark.parametrize(
    ("program", "words"), [("precompute_latents.py", "encoder=sd"), ("scripts.sample", "guidance")]
)
def test_other_commands_have_help(program, words):
    output = run_command("--help", program=program)
    assert output.startswith("0\n")
    assert words in output


def test_the_configuration_prints_without_holes_from_any_folder(tmp_path):
    output = run_command("--cfg", "job", "--resolve", cwd=tmp_path)
    assert output.startswith("0\n")
    assert "???" not in output
    assert "total_samples" in output
    assert list(tmp_path.iterdir()) == []


MISTAKES = yaml.safe_load((ROOT / "tests/assets/mistakes.yaml").read_text())


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_gets_one_sentence_with_key_value_and_fix(words, tmp_path, capsys, monkeypatch):
    if words == "runtime.device=cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    folder = tmp_path / "run"
    with pytest.raises(SystemExit) as stopped, report_user_errors():
        train(compose(["total_samples=64", f"run_dir={folder}", *words.split()]))
    message = capsys.readouterr().err
    assert stopped.value.code == 1
    assert message.startswith("error: ")
    assert "Traceback" not in message
    for part in MISTAKES[words]:
        assert part in message
    assert not folder.exists(), "a run that never started left a folder"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("modle:\n  depth: 2\n", "did you mean model?"),
        ("optim:\n  lrr: 2\n", "did you mean optim.lr?"),
        (
            "total_samples: x\n",
            "could not be converted to Integer; it must be a whole number, such as",
        ),
    ],
)
def test_a_typo_inside_an_experiment_file_is_refused(content, sentence, monkeypatch):
    file = CONF_FOLDER / "experiment" / "typo_for_a_test.yaml"
    monkeypatch.setattr(sys, "argv", ["train.py"])
    try:
        file.write_text("# @package _global_\n# A typo.\n" + content)
        with pytest.raises(ValueError, match=re.escape(sentence)):
            train(compose(["experiment=typo_for_a_test"]))
    finally:
        file.unlink()


@pytest.mark.parametrize("key", FOREIGN_KEYS)
def test_foreign_spellings_get_ours(key):
    word = key if "=" in key else f"{key}=1"
    with pytest.raises(ValueError, match=f"{word} is not spelled so here; use"):
        compose([word])


def test_our_spellings_in_that_table_are_real():
    values = {
        "run_dir": "x",
        "runtime.precision": "bf16",
        "runtime.device": "cpu",
        "runtime.parallel.mode": "ddp",
        "runtime.checkpoint_policy": "selective",
        "runtime.compile_mode": "default",
        "data": "webdataset",
        "data.pin_memory": "true",
        "data.persistent_workers": "true",
        "schedule.kind": "cosine",
        "logger": "wandb",
        "adapter": "lora",
    }
    keys = {ours.partition("=")[0] for ours in FOREIGN_KEYS.values()}
    words = [
        f"{key}={values.get(key, 'true' if key.startswith('runtime.') else '64')}"
        for key in sorted(keys)
    ]
    compose([*words, "init_from=x"])


def test_a_component_may_be_any_class_of_ours_and_no_function():
    assert resolve_target("models.denoiser.Denoiser", "model").__name__ == "Denoiser"
    assert resolve_target("torch.optim.AdamW", "optim").__name__ == "AdamW"
    for target in (
        "training.assemble.build_model",
        "data.synthetic.torch",
        "models.block.F.linear",
        "accel",
        "os.system",
    ):
        with pytest.raises(ValueError, match="not allowed"):
            resolve_target(target, "model")


def build_model(node):
    return build(node, "model", channels=1, height=8, width=8, num_classes=2)


def test_nested_components_are_built_and_checked():
    node = compose(["model=dit_xs", "model.mixer.qk_norm=false"]).cfg.model
    assert build_model(node).blocks[0].layers[0].q_weight is None
    del node["depth"]
    with pytest.raises(ValueError, match="model lacks depth"):
        build_model(node)


def test_an_error_that_is_not_the_users_keeps_its_traceback():
    with pytest.raises(ValueError, match="negative dimension"), report_user_errors():
        np.zeros(-1)
    with pytest.raises(ValueError, match="invalid literal"), report_user_errors():
        enum.IntEnum("Number", {"one": "not a number"})


def test_presets_build_on_each_other():
    """max ⊃ production ⊃ fast ⊃ eager, and each says in its first line when to use it."""
    on = {}
    for file in sorted((CONF_FOLDER / "runtime").glob("*.yaml")):
        assert file.read_text().startswith("# ")
        runtime = compose([f"runtime={file.stem}"]).cfg.runtime
        on[file.stem] = {name for name, value in vars(runtime).items() if value is True}
    assert on["eager"] < on["fast"] < on["production"] < on["max"]
    assert on["max"] - on["production"] == {"cuda_graph"}
    assert on["lowmem"] - on["fast"] == {"gradient_checkpointing", "empty_cache_at_eval"}


PARSE_RUN = compose
PARSE_IMPORT = functools.partial(parse_words, ImportConfig, help_text="")


@pytest.mark.parametrize(
    ("parse", "word", "sentence"),
    [
        (PARSE_RUN, "", "one word of the command is empty"),
        (PARSE_RUN, "logger=true", "logger=true: a run needs one; choose one of none, tensorboard"),
        (PARSE_RUN, "+model=3", "model=3: a run needs one"),
        (PARSE_RUN, "+optim.lr=1", "+optim.lr=1: the key is there already; leave out the +"),
        (PARSE_RUN, "seed=" + 101 * "[", "more than 100 brackets"),
        (PARSE_RUN, "sampling.guidance_interval.x=1", "x=1: these words cannot be read"),
        (PARSE_IMPORT, "dtype==", "dtype: the word that begins so cannot be read"),
        (PARSE_IMPORT, "source=\t", "source: the word that begins so cannot be read"),
        (PARSE_IMPORT, "scale=" + 400 * "9", 40 * "9" + " does not fit into 64 bits"),
        (PARSE_IMPORT, "source=" + 300 * "[", "more than 100 brackets"),
    ],
)
def test_words_that_hydra_or_yaml_break_on(parse, word, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse([word])


def test_a_message_is_one_line(capsys):
    with pytest.raises(SystemExit), report_user_errors():
        compose(["seed=a\nb\x1b[31m"])
    assert capsys.readouterr().err.count("\n") == 1


def test_a_whole_number_above_all_floats_is_refused():
    node = compose([]).cfg.model | {"drop_path": 10**400}
    with pytest.raises(ValueError, match=r"model.drop_path=10+ must be a finite number"):
        build_model(node)


@pytest.mark.parametrize(
    "word", ["ema.ramp=inf", "objective.logit_std=nan", "sampling.guidance_interval=[0,nan]"]
)
def test_numbers_that_are_not_finite_are_refused(word):
    with pytest.raises(
        ValueError, match=rf"{word.partition('=')[0]}[.\d]*=(nan|inf) is not finite"
    ):
        compose([word])


@pytest.mark.parametrize(
    "words",
    [
        ("model=dit_xs", "model.mlp_ratio=-1"),
        ("model=mamba_xs", "model.mixer.expand=-1"),
        ("model=zigzag_xs", "model.mixer.state_dim=0"),
        ("model=mamba1_xs", "model.mixer.state_dim=0"),
        ("model=conv_xs", "model.mixer.expand=0"),
    ],
)
def test_sizes_below_their_least_are_refused(words):
    with pytest.raises(ValueError, match=rf"{words[1]}(\.0)? must be"):
        build_model(compose([*words]).cfg.model)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("run_dir=läufe/ä", "läufe/ä"),
        ("run_dir=runs/naïve-${seed}", "runs/naïve-0"),
        ("run_dir=runs (1)/a=b", "runs (1)/a=b"),
        ("run_dir=runs/${seed}", "runs/0"),
        ("run_dir=null", None),
        ("fd.features=[encoder, größe,random]", ["encoder", "größe", "random"]),
        ("+runtime.parallel.nccl={NCCL_DEBUG: größe}", {"NCCL_DEBUG": "größe"}),
        ("runtime.parallel.nccl={NCCL_DEBUG: INFO}", {"NCCL_DEBUG": "INFO"}),
    ],
)
def test_a_value_may_have_any_letter(word, value):
    key = word.lstrip("+").partition("=")[0]
    assert operator.attrgetter(key)(compose([word]).cfg) == value


def test_a_run_may_lie_in_a_folder_of_any_name(run, monkeypatch):
    """In a command too, where Hydra reads the words."""
    summary = run(folder="läufe 漢/(1) ä")
    assert Path(summary["run_dir"]).is_dir()
    folders = []
    monkeypatch.setattr("train.train", lambda composed: folders.append(composed.cfg.run_dir))
    monkeypatch.setattr(sys, "argv", ["train.py", f"run_dir={summary['run_dir']}", "seed=1"])
    monkeypatch.setenv("HYDRA_MAIN_MODULE", "__main__")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    run_app(importlib.import_module("train").main)
    assert folders == [summary["run_dir"]]
    assert parse_words(ImportConfig, [f"out={summary['run_dir']}"], "").out == summary["run_dir"]


@pytest.mark.parametrize(
    ("folder", "entry"),
    [
        ("step-4", "state.json"),
        ("run", "checkpoints"),
        ("checkpoints", "step-4"),
        ("run", None),
        (None, None),
    ],
)
def test_a_run_resumes_from_a_checkpoint_or_a_run_that_is_there(folder, entry, tmp_path):
    """Even where run_dir holds checkpoints, which would be taken instead."""
    (tmp_path / "mine" / "checkpoints" / "step-8").mkdir(parents=True)
    if entry:
        (tmp_path / folder / entry).mkdir(parents=True)
    cfg = compose(
        [f"run_dir={tmp_path / 'mine'}", f"resume={tmp_path / (folder or 'nowhere')}"]
    ).cfg
    with (
        nullcontext()
        if entry
        else pytest.raises(ValueError, match=r"resume=.*; name a run, a checkpoint such as")
    ):
        refuse_paths(cfg)


@pytest.mark.parametrize(
    ("earlier", "now"), [("training.process.loggers.NoLogger", "training.loggers.NoLogger")]
)
def test_names_of_earlier_versions_are_understood(earlier, now, tmp_path):
    """On a command line, and in the configuration that a run of an earlier version left."""
    found = resolve_target(earlier, "logger")
    assert f"{found.__module__}.{found.__qualname__}" == now
    file = tmp_path / "config.yaml"
    file.write_text(f"logger:\n  _target_: {earlier}\n")
    assert read_config(file) == {"logger": {"_target_": now}}
