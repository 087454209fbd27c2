"""The benchmarks' commands: settings, words, mistakes and plans."""

from multiprocessing import get_context

import pytest

from accel.stack import TECHNIQUES
from common.config.compose import compose, parse_yaml
from common.files import ROOT
from scripts.bench import cases, kernels, runner
from scripts.bench.__main__ import OTHERS
from scripts.bench.__main__ import main as bench
from scripts.bench.cases import COMMANDS, SETTINGS, plan_job
from training.inputs import foresee_latents
from training.weights.pretrained import build_on_meta

QUICK = ["setting=tiny", "steps=1", "repeats=1", "runtime.device=cpu"]


# Settings, words and mistakes.


@pytest.mark.parametrize(
    ("setting", "batch", "tokens"), [("s32", 32, 256), ("b256", 256, 256), ("s32x512", 32, 512)]
)
def test_settings_are_what_they_say(setting, batch, tokens):
    cfg = compose(SETTINGS[setting]["words"].split()).cfg
    model = build_on_meta(cfg.model, foresee_latents(cfg, 2**40)[0])
    assert cfg.batch_size == batch
    assert model.tokens == kernels.SHAPES[setting]["L"] == tokens
    assert cfg.model == compose([f"model=ssd_mlp_{setting[0]}"]).cfg.model


def test_words_are_the_commands_own_or_overrides():
    words = "setting=s32 steps=7 runtime=max model=dit_s out=x again=all"
    job = plan_job("step", words.split())
    assert job.cfg.steps == job.cfg.loss_steps == 7
    overrides = job.cases[0].overrides
    assert "model=ssd_mlp_s" not in overrides
    assert overrides[-2:] == ["runtime=max", "model=dit_s"]
    # Another data set also replaces the overrides of the setting's own.
    overrides = plan_job("step", ["setting=tiny", "data=digits"]).cases[0].overrides
    assert not [word for word in overrides if word.startswith("data.")]


MISTAKES = parse_yaml((ROOT / "tests/assets/bench_mistakes.yaml").read_text())


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_become_one_sentence(words):
    with pytest.raises(ValueError, match=MISTAKES[words]):
        bench(words.split())


def test_every_command_has_help(capsys):
    bench([])
    overview = capsys.readouterr().out
    assert all(f"\n    {command} " in overview for command in (*COMMANDS, *OTHERS))
    for command in (*COMMANDS, "gpu", "floor"):
        with pytest.raises(SystemExit, match="0"):
            bench([command, "--help"])
        assert ("\ncard=" if command == "floor" else "\nsetting=") in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_command_prints_its_table_and_fails_with_a_case(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "SPAWN", get_context("fork"))
    bench(["doctor", "setting=tiny", f"out={tmp_path}"])
    assert "copy_gb_s" in capsys.readouterr().out
    # Results are published, so they name no folder of this machine.
    assert str(ROOT) not in next(tmp_path.glob("*/*.json")).read_text()
    with pytest.raises(SystemExit, match="1 of 1 cases failed: step"):
        bench(["step", "setting=tiny", "data=resident", f"data.path={tmp_path}", f"out={tmp_path}"])
    assert "manifest.json" in capsys.readouterr().out


# What is planned.


def test_techniques_are_judged_over_eager_in_fp32_and_in_bf16():
    """Each value that a technique lists has its row, and each technique that max adds to eager is
    removed."""
    cases = plan_job("techniques", QUICK).cases
    names = {case.name for case in cases}
    for kind in TECHNIQUES:
        for way in kind.list_ways():
            options = [kind.make_override(way[key], key) for key in kind.options if key in way]
            word = " ".join([kind.make_override(way[kind.key]), *options])
            assert {f"{word} over fp32", f"{word} over bf16"} & names
    eager, full = (compose([f"runtime={name}"]).cfg.runtime.values() for name in ("eager", "max"))
    removed = {case.labels["key"] for case in cases if case.labels["part"] == "removed"}
    assert removed == {kind.key for kind in TECHNIQUES if eager[kind.key] != full[kind.key]}
    for case in cases[::7]:  # composing all takes seconds
        compose([word for word in case.overrides if not word.startswith("newcomer.")])


def test_a_result_is_of_code_and_not_of_comments(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "ROOT", tmp_path)
    file = tmp_path / "models" / "one.py"
    file.parent.mkdir()

    def hash_step(content):
        file.write_text(content)
        cases.read_code.cache_clear()
        return cases.hash_code(plan_job("step", ["setting=tiny"]).cases[0].overrides)

    first = hash_step("x = 1\n")
    assert hash_step("# A comment.\nx = 1\n") == first
    assert hash_step("x = 2\n") != first
    cases.read_code.cache_clear()
