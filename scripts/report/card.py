"""The model card: Markdown with the front matter that the Hugging Face hub reads."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from html import escape
from math import isfinite, prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from scripts.report.history import History, at, settings, text
from scripts.report.quality import HEADS, by_protocol, distance_keys, evaluation_rows, title_of
from training.checkpoint.find import complete

SAMPLER = ("guidance", "guidance_interval", "solver", "steps", "shift")
"""Keys of `sampling` that scripts.sample takes too."""


def plain(value: Any) -> str:
    """A value as one line of Markdown text that is neither markup nor the end of a table's cell."""
    line = escape(" ".join(text(value).split()), quote=False)
    return "".join(f"\\{c}" if c in "\\`*_[]|" else c for c in line)


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(c if c == '---' else plain(c) for c in line)} |" for line in lines)


def card(run: History) -> str:
    """The model card of a run."""
    model = str(at(run.environment, "choices", "model", default="model"))
    objective = str(at(run.config, "objective", "_target_", default="")).rpartition(".")[2]
    tags = json.dumps(["fastlatent", "latent-generative-model", model, *([objective] if objective else [])])
    parts = {
        "Model": about(run, model, objective),
        "Data": data(run),
        "Training": training(run),
        "How to sample": sampling(run),
        "Figures": figures(run),
        "Limits": limits(run),
    }
    body = "\n".join(f"## {name}\n\n{content}\n" for name, content in parts.items())
    return f"---\nlibrary_name: fastlatent\ntags: {tags}\n---\n\n# {plain(run.name)}\n\n{body}"


def about(run: History, model: str, objective: str) -> str:
    """What the model is."""
    parameters = count_parameters(run)
    size = f" with {parameters:,} parameters" if parameters else ""
    spec = run.described.get("spec")
    shape = " × ".join(text(at(spec, key)) for key in ("channels", "height", "width"))
    latents = f" It makes latents of {shape} (channels, height, width)." if isinstance(spec, dict) else ""
    encoder = at(spec, "encoder", "_target_")
    decoded = f" {plain(encoder)} decodes them." if encoder else ""
    trained = f", trained with {plain(objective)}" if objective else ""
    return f"A class-conditional latent generative model, {plain(model)}{size}{trained}.{latents}{decoded}"


def weights(run: History) -> Path | None:
    found = complete(run.folder / "checkpoints")
    file = found[-1] / "ema.safetensors" if found else None
    return file if file and file.is_file() else None


def count_parameters(run: History) -> int | None:
    """Elements of the averaged weights, from the file's header."""
    if (file := weights(run)) is None:
        return None
    try:
        with safe_open(file, "pt") as opened:
            return sum(prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError):
        return None


def data(run: History) -> str:
    """Classes, count and fingerprint of the latent set."""
    spec = run.described.get("spec")
    if not isinstance(spec, dict):
        return "Not known here: the run folder holds no checkpoint, which describes the data."
    names = spec.get("class_names")
    shown = ", ".join(map(plain, names[:20])) + (" …" if len(names) > 20 else "") if isinstance(names, list) else "–"
    return (
        f"- {plain(spec.get('count'))} training samples of {plain(spec.get('num_classes'))} classes: {shown}\n"
        f"- fingerprint of the set: {plain(spec.get('fingerprint'))}"
    )


def training(run: History) -> str:
    """Samples, batch, time, hardware and versions."""
    numbers, facts = run.numbers(), run.facts()
    rows = {
        "samples seen": numbers.get("samples"),
        "steps": numbers.get("steps"),
        "batch (global)": run.config.get("batch_size"),
        "seconds of training": numbers.get("seconds of training"),
        "precision": at(run.ledger, "precision", "active"),
        "loss": numbers.get("loss"),
        "held-out loss": numbers.get("held-out loss"),
        **{key: facts[key] for key in ("hardware", "processes", "versions", "git commit", "last written")},
    }
    return table(("what", "value"), [(key, value) for key, value in rows.items() if value is not None])


def sampling(run: History) -> str:
    """The command, with the settings that the run itself sampled with."""
    node = at(run.config, "sampling", default={})
    values = {
        key: json.dumps(value).replace(" ", "").strip('"') for key in SAMPLER if (value := at(node, key)) is not None
    }
    words = [shlex.quote(f"{key}={value}") for key, value in values.items()]
    line = " ".join(["python -m scripts.sample weights=ema.safetensors", *words, "out=samples/mine"])
    digest = at(run.manifest, "files", "ema.safetensors", "sha256")
    step = run.described.get("step")
    told = (
        f"`ema.safetensors` is of step {plain(step)}, sha256 {plain(digest)}." if digest else "No checkpoint is there."
    )
    return f"    {line}\n\n{told}"


def figures(run: History) -> str:
    """Tables of evaluations with their protocol, and the last distances of the training itself."""
    parts = []
    for group in by_protocol(run.evaluations):
        if group.apart:
            parts.append(f"Another protocol, not to be compared with the one above. {plain(group.apart).capitalize()}.")
        parts += [table(HEADS, evaluation_rows(group.members)), protocol(group.protocol)]
    during = []
    for key in distance_keys([run]):
        finite = [point for point in run.series(key) if isfinite(point[1])]
        during += [(title_of(key), int(samples), value) for samples, value in finite[-1:]]
    if during:
        parts += [table(("during training", "at samples", "value"), during), protocol(settings(run.protocol))]
    return "\n\n".join(parts) or "No distance to a reference was measured."


def protocol(found: dict[str, Any]) -> str:
    """The settings in one paragraph."""
    told = ", ".join(f"{key} {text(value)}" for key, value in found.items())
    return f"Protocol: {plain(told)}." if told else "The protocol is not recorded."


def limits(run: History) -> str:
    """What nobody measured, and what did not go as requested."""
    found = [
        "Nothing here says how many of the training images the model repeats, nor what it does beyond the classes and "
        "the resolution of its data."
    ]
    if not run.evaluations:
        found.append("The samples were not evaluated: there is no result of `python -m scripts.evaluate`.")
    for e in run.evaluations:
        why = ((space, at(f, "why")) for space, f in e.features.items() if at(f, "fd") is None)
        found += [f"{plain(e.file)}, features {plain(space)}: no FD. {plain(reason)}" for space, reason in why]
    if not run.summary:
        found.append("The run is not finished.")
    if off := [row.key for row in run.ledger_rows() if row.missing]:
        found.append(f"Requested and not active in training: {plain(', '.join(off))}.")
    found += map(plain, run.problems)
    return "\n".join(f"- {line}" for line in found)
