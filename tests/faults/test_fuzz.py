"""Mutants of latents, weights, command lines and runs: each is used right, or refused in one
sentence, in 1 GiB and 5 s."""

import hashlib
import shutil
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.config.compose import compose
from common.files import read_object
from common.trees import list_nodes
from data.manifest import read_manifest
from data.resident import ResidentLatents
from data.streamed import StreamedLatents
from scripts.report.__main__ import ReportConfig, report
from scripts.sample import SampleConfig, sample_run
from scripts.verify_latents import VerifyConfig, verify
from tests.harness.commands import run_here
from tests.harness.limits import is_unfit, run_limited
from tests.harness.mutants import mutate_file, mutate_safetensors, mutate_tree
from tests.harness.outcomes import seal_checkpoint
from tests.harness.payloads import as_json, make_weights, read_description, with_description
from tests.harness.sets import draw_random_samples, save_latent_set
from tests.harness.words import CPU, TINY_RUN, slow
from tests.harness.zygote import read_output
from training.assemble import assemble
from training.weights.pretrained import fit_weights, load_pretrained
from training.weights.pretrained import read_description as read_node


def hash_bytes(content):
    return hashlib.sha256(content).hexdigest()


def break_set(draw, folder):
    """Changes the manifest or a block of a latent set, and in half of the cases makes hashes, sizes
    and counts right, so that a reader gets to the change."""
    shards = [("train", 8, 0), ("train", 5, 1), ("held_out", 6, 2)]
    parts = [(split, draw_random_samples(count, seed, (2, 2, 2))) for split, count, seed in shards]
    save_latent_set(folder, parts)
    tree = read_object(folder / "manifest.json")
    if draw(st.booleans()):
        tree = mutate_tree(draw, tree)
    else:
        break_block(draw, folder, draw(st.sampled_from(tree["shards"])))
    if draw(st.booleans()):
        # What the mutation has removed cannot be made right.
        with suppress(Exception):
            settle(folder, tree)
    (folder / "manifest.json").write_bytes(as_json(tree))
    shared = {"on_corrupt": draw(st.sampled_from(("error", "skip")))}
    cases = [
        partial(use_loader, folder, ResidentLatents, **shared),
        partial(use_loader, folder, ResidentLatents, device_memory_gib=1.2e-6, **shared),
        partial(use_loader, folder, StreamedLatents, window=4, num_workers=0, **shared),
        partial(verify_set, folder),
    ]
    return draw(st.sampled_from(cases))


def break_block(draw, folder, shard):
    """Changes a block of a shard, and the offsets and sizes in the manifest with it."""
    file = folder / shard["file"]
    content = file.read_bytes()
    number = draw(st.integers(0, len(shard["blocks"]) - 1))
    offset, size, *_ = shard["blocks"][number]
    payload = mutate_safetensors(draw, content[offset : offset + size])
    file.write_bytes(content[:offset] + payload + content[offset + size :])
    shard["blocks"][number][1] = len(payload)
    for block in shard["blocks"][number + 1 :]:
        block[0] += len(payload) - size


def settle(folder, tree):
    for shard in tree["shards"]:
        content = (folder / shard["file"]).read_bytes()
        shard |= {"bytes": len(content), "sha256": hash_bytes(content)}
        for block in shard["blocks"]:
            block[3] = hash_bytes(content[block[0] : block[0] + block[1]])
        shard["count"] = sum(block[2] for block in shard["blocks"])
    for split, key in (("train", "count"), ("held_out", "held_out")):
        tree[key] = sum(shard["count"] for shard in tree["shards"] if shard["split"] == split)


def verify_set(folder):
    assert not any(map(is_unfit, verify(VerifyConfig(path=str(folder), count=0))))


def use_loader(folder, kind, on_corrupt, **options):
    """An epoch must have each sample once, finite, with a label of a class."""
    loader = kind(
        path=str(folder), batch_size=5, seed=0, device=CPU, on_corrupt=on_corrupt, **options
    )
    manifest = read_manifest(str(folder))
    train = [next(loader) for _ in range(-(-manifest.count // 5))]
    for batches, count in ((train, manifest.count), (loader.held_out(4), manifest.held_out)):
        ids = set()
        for batch in batches:
            assert batch.latents.isfinite().all()
            assert 0 <= batch.condition.labels.min() <= batch.condition.labels.max()
            assert batch.condition.labels.max() < max(1, len(manifest.class_names))
            ids.update(batch.ids.tolist())
        assert on_corrupt == "skip" or len(ids) == count


MIXERS = [
    ("attention.Attention", {}),
    ("convolution.Convolution", {}),
    ("zigzag_ssd.ZigzagSSD", {"expand": 2, "state_dim": 8}),
]


def break_weights(draw, folder):
    """Changes a weights file, or what its header says of the model."""
    name, arguments = draw(st.sampled_from(MIXERS))
    payload = make_weights(f"models.mixers.{name}", draw(st.booleans()), **arguments)
    if draw(st.booleans()):
        payload = mutate_safetensors(draw, payload)
    else:
        payload = with_description(payload, mutate_tree(draw, read_description(payload)))
    file = folder / "ema.safetensors"
    file.write_bytes(payload)
    return partial(draw(st.sampled_from((sample_from, start_from))), file)


def sample_from(file):
    cfg = SampleConfig(weights=str(file), count=1, steps=2, out=f"{file}-samples")
    with patch("huggingface_hub.snapshot_download", side_effect=OSError("there is no network")):
        sample_run(cfg)


def start_from(file):
    model, spec = load_pretrained(file, CPU)
    tensors, _ = fit_weights(model, spec, file, read_node(file).model)
    model.load_state_dict(tensors)


TEXTS = st.text(max_size=9) | st.sampled_from(
    (
        *("null", "{a:{b:[1,{c:2}]}}", "{_target_:os.system}", "\\'", "range(3)", "2020-01-01"),
        *("${${seed}}", "${oc.env:NOPE}", "\udc80", "[" * 5000, "9" * 400, "1e-320", "nan"),
        *("-1", "0", "7", "1.5"),
    )
)


@cache
def list_keys():
    return [key for key, _ in list_nodes(compose(["data=synthetic", "model=mamba_xs"]).source)]


def break_command(draw, folder):
    """An override of any key, and words that are split, lost, quoted or begin with dashes; of a run
    everything is built that comes before the first step."""
    model = draw(st.sampled_from(("dit", "conv", "mamba", "zigzag")))
    words = [*TINY_RUN, "runtime=eager", "data=synthetic", f"model={model}_xs"]
    words.append(f"{draw(st.sampled_from(list_keys()))}={draw(TEXTS)}")
    place = draw(st.integers(0, len(words) - 1))
    key, _, value = words[place].partition("=")
    text = draw(TEXTS)
    changes = (
        words[place : place + 1],
        [],
        [text],
        [f"{key}{text}={value}"],
        [f"{key}={value[:2]}{text}{value[2:]}"],
        [f"--{key}", value],
        [f"{key}='{value}"],
    )
    words[place : place + 1] = draw(st.sampled_from(changes))
    return partial(run_command, words)


def run_command(words):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("train.train", lambda composed, began: assemble(composed.cfg, CPU))
        run_here(monkeypatch, *words)


SUBJECTS = {break_set: 20, break_weights: 12, break_command: 12}
"""Examples of each in `make test`; many more are slow."""
MANY = slow(100)


def draw_examples(test, count):
    """Calls the test with `count` series of draws, always the same."""
    options = settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[*HealthCheck],
    )
    options(given(st.data())(lambda data: test(data.draw)))()


@pytest.mark.fault(
    "a mutant of an input at random", "used right, or refused in one sentence, within 1 GiB and 5 s"
)
@pytest.mark.parametrize("count", [None, MANY])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_mutants(subject, count, tmp_path, record_property):
    def test(draw):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        ending = run_limited(subject(draw, tmp_path))
        assert ending.right, f"{ending.kind}: {ending.text}"

    count = count or SUBJECTS[subject]
    record_property("struck", count)
    draw_examples(test, count)


RUN_FILES = (
    *("config.yaml", "environment.json", "ledger.json", "summary.json", "metrics.jsonl"),
    *("checkpoints/step-12/state.json", "checkpoints/step-12/rank-0-of-1.safetensors"),
    *("checkpoints/step-12/model.safetensors", "checkpoints/step-12/manifest.json"),
)


@pytest.mark.fault(
    "a mutant of a finished run at random", "goes on, or refused in one sentence, within 1 GiB"
)
@pytest.mark.parametrize("count", [3, slow(60)])
def test_mutants_of_a_finished_run(count, zygote, run_whole, run_dir, record_property):
    """The same command goes on from them, or says why not; a report reads them."""
    record_property("struck", count)

    def test(draw):
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(run_whole(), run_dir)
        Path(f"{run_dir}.log").unlink(missing_ok=True)
        file = run_dir / draw(st.sampled_from(RUN_FILES))
        mutate_file(draw, file)
        if file.parent.name == "step-12" and file.name != "manifest.json":
            seal_checkpoint(file.parent)
        (code,) = zygote(run_dir, "total_samples=104", environment={"LIMITED": "20"})
        lines = read_output(run_dir).splitlines()
        assert code in (0, 1), lines
        assert len([line for line in lines if line.startswith("error: ")]) == code, lines
        assert "Traceback (most recent call last):" not in lines
        ending = run_limited(lambda: report(ReportConfig(str(run_dir))))
        assert ending.right, f"{ending.kind}: {ending.text}"

    draw_examples(test, count)
