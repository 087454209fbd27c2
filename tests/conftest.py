"""Fixtures of all tests: tiny runs, and the real assets where they are at hand."""

import gc
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from accel.stack import TECHNIQUES
from accel.techniques import float8
from accel.techniques.compilation import Compile
from accel.techniques.fused_kernels import FusedKernel
from common.config import build
from common.config.compose import compose
from common.distributed.exit import SIGNALS
from common.files import ROOT
from precompute_latents import precompute
from tests.harness.adapters import save_base
from tests.harness.own_code import forget_package
from tests.harness.sets import save_images, save_tiny_autoencoder
from tests.harness.steps import allow_any_precision
from tests.harness.words import TINY_JOB, TINY_RUN
from tests.harness.zygote import Zygote
from train import train

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("WANDB_SILENT", "true")
# Compute in one thread, as the processes that tests start do: on some CPUs two threads round sums
# otherwise, and tests compare bits.
torch.set_num_threads(1)


def pytest_collection_finish():
    """Freezes what is imported by now, so that the garbage collector need not search it after each
    test: a tenth of the suite's time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """A cache folder for this process's tests, which leave ~/.cache alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def heard_signals():
    """Hears the signals that nohup or a background start lets a suite ignore: processes that tests
    start would inherit that."""
    for name in SIGNALS:
        if signal.getsignal(getattr(signal, name)) is signal.SIG_IGN:
            signal.signal(getattr(signal, name), lambda *_: None)


@pytest.fixture(autouse=True)
def clean_process():
    """Resets the process-wide flags that a run sets."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = False
    torch._dynamo.reset()


@pytest.fixture
def run_dir(tmp_path):
    """The folder in which `run` trains."""
    return tmp_path / "run"


@pytest.fixture
def run(tmp_path):
    """`run("key=value", …)` trains in a temporary folder and returns the summary; two tiny steps
    unless overridden."""

    def start(*overrides, folder="run"):
        return train(compose([*TINY_RUN, f"run_dir={tmp_path / folder}", *overrides]))

    return start


@pytest.fixture
def techniques_of_a_gpu(monkeypatch):
    """Makes available anywhere the techniques whose losses and bytes a CPU shows as well as a
    GPU."""
    for kind in TECHNIQUES:
        if kind.key in ("precision", "offload_optimizer", "offload_activations"):
            monkeypatch.setattr(kind, "find_obstacle", lambda self: None)
    # The small models that a CPU trains have small layers.
    monkeypatch.setattr(float8, "MIN_FEATURES", float8.SIZE_MULTIPLE)


@pytest.fixture
def quick_compiler(monkeypatch):
    """Compiles with a backend that traces as Inductor does and generates no code."""
    monkeypatch.setattr(Compile, "backend", "aot_eager")


@pytest.fixture
def inductor(monkeypatch):
    """Compiles with Inductor, also where `quick_compiler` is in use."""
    monkeypatch.setattr(Compile, "backend", "inductor")


@pytest.fixture
def any_precision(monkeypatch):
    allow_any_precision(monkeypatch)


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """An empty cache folder for one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def kernels_on_a_cpu(monkeypatch, empty_cache):
    """Makes fused kernels available on a CPU, with an empty cache of their proofs."""
    monkeypatch.setattr(FusedKernel, "find_obstacle", lambda self: None)


@pytest.fixture(scope="session")
def zygote():
    started = Zygote()
    yield started
    started.stop()


@pytest.fixture
def assets():
    """Folder of real photos and a real autoencoder: $FASTLATENT_ASSETS, or `<folder>/assets` beside
    the checkout."""
    path = os.environ.get("FASTLATENT_ASSETS")
    places = [Path(path)] if path else ROOT.parent.glob("*/assets")
    for place in places:
        if (place / "vae" / "taef2").is_dir() and (place / "images").is_dir():
            return place
    pytest.skip(
        "no real photos and autoencoder at hand; set FASTLATENT_ASSETS to a folder with images/ "
        "and vae/taef2/"
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Weights file of a tiny model, on which adapters train. Read only."""
    return save_base(tmp_path_factory.mktemp("base") / "base.safetensors")


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return save_tiny_autoencoder("AutoencoderKL", tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """20 images in 2 classes. Read only."""
    return save_images(tmp_path_factory.mktemp("photos"), ("cat", "dog"), per_class=10)


@pytest.fixture
def more_photos(photos, tmp_path):
    """A copy of the photos that a test may change."""
    return Path(shutil.copytree(photos, tmp_path / "photos"))


@pytest.fixture
def job(vae, photos, tmp_path):
    """`job("key=value", …)` encodes the photos and returns the folder of latents."""

    def start(*overrides, source=photos, out="out"):
        settings = [
            *TINY_JOB,
            f"encoder.path={vae}",
            f"source={source}",
            f"out={tmp_path / out}",
            *overrides,
        ]
        return precompute(compose(settings, "precompute_latents")).parent

    return start


@pytest.fixture
def own_code(monkeypatch):
    """Starts with no admitted package; the next test may have another package `myproj`."""
    monkeypatch.setattr(build, "admitted_packages", set())
    yield
    forget_package()
