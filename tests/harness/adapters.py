"""Tiny base models of five digits, and adapters on them."""

import json

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from common.config.compose import compose
from tests.harness.denoisers import fill_zero_layers
from tests.harness.words import CPU
from train import train
from training.assemble import assemble
from training.checkpoint.files import make_header
from training.weights.first_weights import compose_pretrained

FAMILIES = ("mamba", "zigzag", "mamba1", "ssd_mlp", "conv", "dit")
EAGER_RUN = [
    "runtime=eager",
    "batch_size=16",
    "schedule.kind=constant",
    "schedule.warmup_samples=0",
    "sample_every=0",
    "eval_every=0",
]
BASE_CLASSES = "data.classes=[0,1,2,3,4]"
OTHER_CLASSES = "data.classes=[3,4,5,6]"
"""Two classes that a base knows, and two that it does not."""


def save_base(file, family="ssd_mlp"):
    """Saves weights of a model of five digits in which every layer matters."""
    words = [f"model={family}_xs", *EAGER_RUN, BASE_CLASSES]
    if family == "ssd_mlp":
        # no key for the order, as in earlier versions
        words.append("~model.mixer.columns")
    training = assemble(compose(words).cfg, CPU)
    spec = training.loader.spec.as_dict()
    header = make_header({"model": training.cfg.model, "spec": spec, "step": 1}, "model")
    save_file(fill_zero_layers(training.model).state_dict(), file, header)
    return file


def make_words(base, *words):
    """Overrides of a run that goes on from `base`."""
    return [*EAGER_RUN, "model=pretrained", f"init_from={base}", OTHER_CLASSES, *words]


def assemble_on(base, *words):
    return assemble(compose_pretrained(make_words(base, *words)).cfg, CPU)


def train_on(base, run, samples, *words):
    """Trains in the folder `run`; returns the summary."""
    words = make_words(base, *words, f"run_dir={run}", f"total_samples={samples}")
    return train(compose(words))


def edit_header(file, out, edit):
    """Copies a weights file to `out` with an edited description."""
    with safe_open(file, "pt") as opened:
        described = json.loads(opened.metadata()["fastlatent"])
    edit(described)
    save_file(load_file(file), out, {"fastlatent": json.dumps(described)})
    return out
