"""The model card: Markdown with the front matter that the Hugging Face hub reads."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from html import escape
from math import isfinite
from typing import Any

from sampling.draw import SAMPLER
from scripts.report.history import HEADS, History, by_protocol, evaluation_rows, text


def plain(value: Any) -> str:
    """A value as one line of Markdown text that is neither markup nor the end of a table's cell."""
    line = escape(" ".join(text(value).split()), quote=False)
    return "".join(f"\\{c}" if c in "\\`*_[]|" else c for c in line)


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [" | ".join(map(plain, row)) for row in (heads, *rows)]
    return "\n".join(
        f"| {line} |" for line in [lines[0], " | ".join(["---"] * len(heads)), *lines[1:]]
    )


def card(run: History, how: str = "") -> str:
    """The model card of a run. `how` to sample stands there instead of a command with its weights
    file."""
    model = run.environment.get("choices.model", "model")
    objective = run.config["objective._target_"].rpartition(".")[2]
    words = [
        f"{key}={run.config[f'sampling.{key}']}"
        for key in SAMPLER
        if f"sampling.{key}" in run.config
    ]
    sample = shlex.join(
        ["python", "-m", "scripts.sample", "weights=ema.safetensors", *words, "out=samples/mine"]
    )
    about, data, weights = of_checkpoint(run)
    facts = [row for row in run.facts().items() if row[0] not in ("command", "finished")]
    parts = {
        "Model": (
            f"A class-conditional model of latents, {plain(model)}, trained with "
            f"{plain(objective)}. {about}"
        ),
        "Data": data,
        "Training": table(("what", "value"), [*run.numbers().items(), *facts]),
        "How to sample": f"{how or f'    {sample}'}\n\n{weights}",
        "Figures": figures(run),
        "Limits": limits(run),
    }
    tags = json.dumps(["fastlatent", "latent-generative-model", model, objective])
    body = "\n".join(f"## {name}\n\n{content}\n" for name, content in parts.items())
    return f"---\nlibrary_name: fastlatent\ntags: {tags}\n---\n\n# {plain(run.name)}\n\n{body}"


def of_checkpoint(run: History) -> tuple[str, str, str]:
    """What the newest checkpoint says of the model, of its data, and of its weights."""
    if run.weights is None:
        return "", "Not known here: the run folder holds no checkpoint.", "No weights are there."
    spec = {
        key.removeprefix("spec."): value
        for key, value in run.state.items()
        if key.startswith("spec.")
    }
    parameters = run.weights.parameters
    shape = " × ".join(text(spec[key]) for key in ("channels", "height", "width"))
    names = spec["class_names"] or []
    classes = (
        f"of {len(names)} classes: {', '.join(map(plain, names[:20]))}{' …' * (len(names) > 20)}"
    )
    base = run.state.get("adapter.base_sha256")
    size = (
        f"an adapter of {parameters:,} parameters on weights of sha256 {base},"
        if base
        else f"{parameters:,} parameters"
    )
    return (
        f"It has {size} and makes latents of {shape} (channels, height, width) for the decoder of "
        f"{plain(spec.get('encoder._target_'))}.",
        f"- {text(spec['count'])} training samples {classes if names else 'without classes'}\n"
        f"- fingerprint of the set: {plain(spec['fingerprint'])}",
        f"The weights are of step {text(run.state['step'])}; sha256 of that checkpoint's "
        f"`ema.safetensors`: {run.weights.sha256}.",
    )


def figures(run: History) -> str:
    """Tables of evaluations and of the last distances of the training itself, with their
    protocols."""
    parts = []
    for shown, settings, apart in by_protocol(run.evaluations):
        parts += [plain(apart), table(HEADS, evaluation_rows(shown)), protocol(settings)]
    last = {
        key: [point for point in run.series(key) if isfinite(point[1])][-1:]
        for key in run.distances()
    }
    if rows := [
        (key, int(samples), value) for key, found in last.items() for samples, value in found
    ]:
        parts += [
            table(("during training", "at samples", "value"), rows),
            protocol(by_protocol([run])[0][1]),
        ]
    return "\n\n".join(filter(None, parts)) or "No distance to a reference was measured."


def protocol(settings: dict[str, Any]) -> str:
    return (
        f"Protocol: {plain(', '.join(f'{key} {text(value)}' for key, value in settings.items()))}."
    )


def limits(run: History) -> str:
    """What nobody measured, and what did not go as requested."""
    off = ", ".join(row.key for row in run.ledger if row.missing)
    found = {
        "Nothing here says how many of the training images the model repeats.": not any(
            "copied" in row
            for evaluation in run.evaluations
            for row in evaluation.features.values()
        ),
        "The samples were not evaluated: there is no result of `python -m scripts.evaluate`.": not run.evaluations,
        "The run is not finished.": not run.summary,
        f"Requested and not active in training: {plain(off)}.": off,
        **{plain(problem): True for problem in run.problems},
    }
    return "\n".join(f"- {line}" for line, told in found.items() if told)
