"""The leaderboard of learning speeds: its rule, the length of its runs, its rows."""

import time
from math import isnan, nan

import pytest

from common.config.compose import compose
from scripts.bench import TABLES, Case, measure, speedrun
from scripts.bench.cases import plan_job
from scripts.bench.measure import measure_case
from scripts.bench.publish import Page, make_tables
from scripts.bench.rows import Result, format_entries
from scripts.bench.runner import Runner
from scripts.bench.speedrun import climb, count_samples
from scripts.timing import summarise
from training.inputs import foresee_latents
from training.weights.pretrained import build_on_meta

FIGURES = ["fd_encoder", "fd_random", "eval_loss"]
ONES = dict.fromkeys(FIGURES, 1.0)
SPEEDUPS = [3.0, 1.0, 2.0, 1.5]
SMALL = "model.dim=32 model.depth=1 runtime=eager"
QUICK = "steps=1 repeats=1 seeds=[0] total_samples=256 speedups=[1] runtime.device=cpu"
QUICK += " fd.count=520 fd.reference_count=520 sampling.steps=1"


# The rule.


@pytest.mark.parametrize(
    ("faster", "best", "tried"),
    [
        ({"fd_random": 0.99}, (2.0, 0.0, 2.0), 4),
        ({"fd_encoder": 1.7, "fd_random": 1.0, "eval_loss": 1.4}, (1.5, 1.0, 1.0), 3),
        ({"fd_encoder": nan}, (0.0, 2.0, 2.0), 4),
        (dict.fromkeys(FIGURES, 0.5), (0.0, 0.0, 0.0), 1),
        (dict.fromkeys(FIGURES, 9.0), (3.0, 3.0, 3.0), 4),
    ],
)
def test_a_run_is_as_many_times_faster_as_its_figures_are_no_worse(faster, best, tried):
    """Its figures are as good as the baseline's up to these speed-ups, or up to 2."""
    faster = dict.fromkeys(FIGURES, 2.0) | faster
    attempts, found = climb(SPEEDUPS, ONES, lambda k: {name: k / faster[name] for name in FIGURES})
    assert tuple(found[name] for name in FIGURES) == best
    assert [attempt["times_faster"] for attempt in attempts] == sorted(SPEEDUPS)[:tried]


def test_a_figure_that_was_worse_once_gets_no_second_chance():
    _, best = climb(SPEEDUPS, ONES, lambda k: ONES | {"fd_random": 1.1 if k == 1.5 else 0.5})
    assert best == {"fd_encoder": 3.0, "fd_random": 1.0, "eval_loss": 3.0}


def test_medians_are_over_seeds_and_a_seed_without_a_figure_spoils_them(monkeypatch):
    runs = [dict.fromkeys(FIGURES, value) for value in (3.0, 1.0, 2.0)]
    runs[1]["fd_random"] = nan
    monkeypatch.setattr(speedrun, "train_run", lambda words, samples, seed, sets: runs[seed])
    figures = speedrun.train_seeds([], 64, plan_job("speedrun", ["rows=[dit]"]).cfg)
    assert (figures["fd_encoder"], figures["fd_encoder_max"]) == (2.0, 3.0)
    assert isnan(figures["fd_random"])


@pytest.mark.parametrize(
    ("times_faster", "cost", "batch", "samples"),
    [(1.0, 1.0, 64, 25600), (2.0, 1.25, 64, 10240), (1.5, 1.0, 64, 17024), (3.0, 0.5, 100, 17000)],
)
def test_the_length_of_a_run_follows_from_its_seconds(times_faster, cost, batch, samples):
    assert count_samples(25_600, times_faster, cost, batch) == samples
    assert samples * cost * times_faster <= 25_600


def test_both_spaces_must_be_no_worse(monkeypatch):
    def plant(words, samples, cfg):
        values = ONES
        if words:
            # The rule does not ask for the loss.
            random = 0.6 + 0.2 * cfg.total_samples / samples
            values = ONES | {"fd_random": random, "eval_loss": 2.0}
        figures = {"samples": samples}
        for name, value in values.items():
            figures |= summarise(name, [value])
        return figures

    costs = {"cost": 1.0, "batch_size": 64, "flops_ratio": 0.8}
    monkeypatch.setattr(speedrun, "find_cost", lambda case, cfg: costs)
    monkeypatch.setattr(speedrun, "train_seeds", plant)
    case = Case("x", speedrun.measure_speedup, ["own"], [])
    figures = speedrun.measure_speedup(case, plan_job("speedrun", []).cfg)
    found = [figures[name] for name in ("k", "k_fd_encoder", "k_fd_random", "k_flops")]
    assert found == [2.0, 3.0, 2.0, 2.5]
    assert figures["k_eval_loss"] == 0.0

    # Losses of other latents are not compared, and a board of such rows shows distances.
    case.overrides.append("data.path=other")
    figures = speedrun.measure_speedup(case, plan_job("speedrun", []).cfg)
    assert figures["k"] == 2.0
    assert "k_eval_loss" not in figures
    figures |= {"name": "x", "cost": 0.5, "board": "pixels, 3 seeds, against plain"}
    for row in ("baseline", "first"):
        figures[row] |= {"runs": [{}] * 3} | summarise("fd_picture", [4.0, 5.0, 7.0])
    figures["first"]["fd_random"] = None
    run = {"command": "python -m scripts.bench speedrun", "date": "", "device": "cpu"}
    page = Page("speedrun_pixels", [Result(figures, run | {"hardware": "a CPU"})])
    lines = make_tables([page])["speedrun"].splitlines()
    assert "| `plain` | 5 (4–7) | 1 (1–1) | 25,600 | ×1.00 |" in lines
    assert "| `x` | 5 (4–7) | – | 25,600 | ×0.50 |" in lines


# Measuring.


@pytest.fixture
def board(monkeypatch):
    """Plans two tiny rows; steps of the second one take twice as long, and its rate is higher."""
    rows = {"mamba": f"{SMALL} optim.lr=1e-5", "faster": f"{SMALL} optim.lr=2e-2"}
    monkeypatch.setitem(TABLES["cases"]["speedrun"], "digits", rows)

    def take_fixed_times(loops, steps, repeats, clock):
        assert clock is time.process_time
        return {name: [8.0 if name == "case" else 4.0] for name in loops}

    monkeypatch.setattr(measure, "time_steps", take_fixed_times)
    speedrun.train_run.cache_clear()
    yield plan_job("speedrun", QUICK.split())
    measure.BASELINE_CACHE.clear()
    speedrun.train_run.cache_clear()


def test_a_board_is_measured_and_published(board, monkeypatch):
    trained = []

    class Noted(speedrun.Workload):
        def run(self, steps):
            cfg = self.cfg
            trained.append((cfg.optim["lr"], cfg.seed, cfg.total_samples, steps * cfg.batch_size))
            super().run(steps)

    monkeypatch.setattr(speedrun, "Workload", Noted)
    entries = [
        {"name": case.name, **case.labels, **measure_case(case, board.cfg)} for case in board.cases
    ]
    # Each run has its own schedule, and the rows share the runs of their baseline.
    assert trained == [(1e-5, 0, 256, 256), (2e-2, 0, 128, 128)]
    base, faster = entries
    assert base["k"] == base["k_flops"] == base["cost"] == 1.0
    assert faster["baseline"] == base["baseline"]
    assert (faster["k"], faster["k_flops"], faster["cost"]) == (1.0, 2.0, 2.0)

    # The best row comes first.
    assert "held-out loss" in format_entries("speedrun", entries)[0]
    assert "baseline" in faster["text"]
    run = {"command": board.command, "date": "2026-11-25", "device": "cpu", "hardware": "a CPU"}
    shown = [base | {"k": 0.0}, faster, faster | {"name": "best", "k": 1.5}, {"name": "failed"}]
    page = Page("speedrun_digits", [Result(entry, run) for entry in shown])
    lines = make_tables([page])["speedrun"].splitlines()
    assert f"### {base['board']}; a CPU" in lines
    rows = [line.partition("** |")[0] for line in lines if line.startswith("| `")]
    assert rows == ["| `best` | **1.5", "| `faster` | **≥ 1.0", "| `mamba` | **< 1.0"]
    assert make_tables([])["speedrun"].strip() == "Not measured yet."


def test_distances_are_means_over_sets_of_noise(board):
    words = tuple(board.cases[0].overrides)
    one, two = (speedrun.train_run(words, 64, 0, sets) for sets in (1, 2))
    assert one["eval_loss"] == two["eval_loss"]
    assert 0.0 < abs(one["fd_random"] - two["fd_random"]) < 0.2 * one["fd_random"]


def test_a_baseline_without_distances_is_refused(board, monkeypatch):
    monkeypatch.setattr(speedrun, "find_cost", lambda case, cfg: {})
    monkeypatch.setattr(speedrun, "train_seeds", lambda *_: dict.fromkeys(FIGURES, nan))
    assert "baseline=mamba has no fd_encoder" in measure_case(board.cases[0], board.cfg)["error"]


# Rows.


@pytest.mark.parametrize(("setting", "tokens"), [("digits", 16), ("deep", 64)])
def test_rows_are_of_one_size_and_at_tuned_rates(setting, tokens):
    cases = plan_job("speedrun", [f"setting={setting}"]).cases
    sizes = {}
    for case in cases:
        cfg = compose(case.overrides).cfg
        model = build_on_meta(cfg.model, foresee_latents(cfg, 2**40)[0])
        assert model.tokens == tokens
        assert (cfg.optim["lr"] == 2e-3) == case.name.endswith("default_rate")
        sizes[case.name] = sum(p.numel() for p in model.parameters())
    assert min(sizes.values()) > 0.8 * sizes["mamba"] >= 0.8 * max(sizes.values())
    assert cases[0].baseline == cases[0].overrides


def test_words_of_a_user_are_a_row_and_those_of_the_judge_are_for_all():
    words = ["setting=deep", "name=mine", "model=dit_xs", "optim=muon", "fd.count=600"]
    (case,) = plan_job("speedrun", [*words, "baseline=conv"]).cases
    assert case.name == "model=dit_xs optim=muon"
    assert (
        case.labels["board"] == "deep fd.count=600, 25,600 samples, 3 seeds, 2 sets, against conv"
    )
    cfg, baseline = (compose(overrides).cfg for overrides in (case.overrides, case.baseline))
    assert (cfg.model["dim"], cfg.model["patch_size"]) == (64, 1)
    assert cfg.fd.count == baseline.fd.count == 600
    assert cfg.optim != baseline.optim
    assert "model=conv_xs" in case.baseline


def test_a_row_is_stored_once_whichever_rows_are_chosen(tmp_path):
    runs = Runner(tmp_path, machine={"hardware": "a CPU", "versions": {}})
    last = "rows=[dit_default_rate]"
    jobs = [plan_job("speedrun", words) for words in ([], [last], [last, "sets=1"])]
    files = [runs.find_file(job, job.cases[-1]) for job in jobs]
    assert files[0] == files[1] != files[2]
