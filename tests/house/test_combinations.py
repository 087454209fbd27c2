"""Every model, data set and runtime takes a step with every other, and every experiment runs with
each, pairwise."""

import pytest

from common.config.compose import compose
from tests.harness.combinations import DATA, FAMILIES, choose_model, list_choices
from tests.harness.sets import PIXELS, cover_pairs, draw_random_samples, save_latent_set
from tests.harness.words import CPU, TINY_MODEL, TINY_RUN, slow
from training.assemble import assemble

pytestmark = pytest.mark.usefixtures("quick_compiler", "latents")
# runtime=auto tries candidates for seconds: test_slow.py combines it, tests/scripts/test_tuning.py
# tests it.
RUNTIMES = [name for name in list_choices("runtime") if name != "auto"]
# These state keys of their own model, or need a base: the pages of test_readme.py run them.
FIXED = ("photos", "pixels_64", "pixels_128", "pixels_256", "adapt")
EXPERIMENTS = cover_pairs(
    [name for name in list_choices("experiment") if name not in FIXED], FAMILIES, list(DATA)
)
FIRST_OF_EXPERIMENT = {row[0]: row for row in reversed(EXPERIMENTS)}


def list_rows(rows, quick):
    """Rows of a table; those that are not `quick` are slow."""
    return [row if quick(row) else slow(*row) for row in rows]


@pytest.fixture
def latents(tmp_path, monkeypatch):
    """A small latent set in the folder `latents`, with flips and posterior; its decoder is the
    identity."""
    monkeypatch.chdir(tmp_path)
    shards = [("train", draw_random_samples(30, 0)), ("held_out", draw_random_samples(5, 1))]
    save_latent_set(tmp_path / "latents", shards, encoder=PIXELS, encoder_sha256=None)


def test_every_loader_is_here():
    assert set(DATA) == set(list_choices("data"))


# On a CPU `max` compiles what `production` does; these families have every kind of layer.
COMPILED = ("hybrid", "mamba1", "conv")


@pytest.mark.parametrize(
    ("model", "data", "runtime"),
    list_rows(
        cover_pairs(FAMILIES, list(DATA), RUNTIMES),
        lambda row: row[2] != "max" and (row[2] != "production" or row[0] in COMPILED),
    ),
)
def test_a_step_of_every_pair(model, data, runtime):
    words = [*choose_model(model), f"data={data}", f"runtime={runtime}", *DATA[data]]
    assert 0 < assemble(compose([*TINY_RUN, *words]).cfg, CPU).take_step().loss < 20


@pytest.mark.parametrize(
    ("experiment", "model", "data"),
    list_rows(EXPERIMENTS, lambda row: row in FIRST_OF_EXPERIMENT.values()),
)
def test_every_experiment_works_with_every_model_and_data(experiment, model, data, run):
    choices = [f"experiment={experiment}", *choose_model(model), f"data={data}", "runtime=fast"]
    sizes = ["batch_size=8", "total_samples=16", "sampling.steps=2", "sampling.per_class=1"]
    every = ["log_every=1", "save_every=1", "sample_every=1", "eval_every=1"]
    summary = run(*choices, *DATA[data], *sizes, *every, *TINY_MODEL)
    assert summary["steps"] == 2
    assert summary["sample_grid"]
