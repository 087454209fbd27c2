"""Writes the benchmark pages and the tables of README and docs from results, by results.md.jinja.

Results go into docs/benchmarks/<card>/<benchmark>.json, where <card> is the GPU model, or cpu. A
newer result replaces the one of the same name; a result that stays keeps the commit that measured
it. The files of a card make its page, docs/benchmarks/<card>.md. A table of the docs says "not
measured" where there is no result; the README leaves such a row out.
"""

from __future__ import annotations

import json
import re
import shlex
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jinja2 import Environment, FileSystemLoader

from accel.stack import TECHNIQUES
from common.config.compose import compose
from common.environment import read_git_state
from common.errors import UserError
from common.files import ROOT, write_atomically
from common.libraries import silence_libraries
from common.text import shorten_error
from models.autoencoders import encode_raw
from scripts.bench import FOLDER, TABLES, Figures, Words
from scripts.bench.cases import hash_code, plan_job
from scripts.bench.floor import describe_floor
from scripts.bench.rows import Result, add_remarks, find_fields, format_entries, format_entry
from scripts.commands import format_rows, replace_between
from scripts.doctor import compare_cards
from scripts.timing import judge_ratio
from training.inputs import foresee_latents
from training.weights.pretrained import build_on_meta

DOCS = ROOT / "docs" / "benchmarks"
MARKS = "<!-- {}: made by `python -m scripts.bench publish` -->\n", "<!-- end of {} -->"
PLACES = TABLES["places"]
"""Name of a part of results.md.jinja -> the page with its table."""
TEMPLATES = Environment(loader=FileSystemLoader(FOLDER), trim_blocks=True, lstrip_blocks=True)
TEMPLATES.filters["shown_as"] = format_entry
TEMPLATE = TEMPLATES.get_template("results.md.jinja")


class Page:
    """Results of one benchmark on one GPU model (or cpu): a section of the page of that GPU
    model."""

    def __init__(self, name: str, results: list[Result]) -> None:
        self.name = name
        self.results = results
        self.entries = [result.entry for result in results]
        self.newest = max(results, key=lambda result: result.environment["date"]).environment
        self.cuda = self.newest["device"] == "cuda"
        self.card = name_card(self.newest)
        self.file = f"{self.card}/{name}.json"
        self.link = f"{self.card}.md#{name.replace('_', '-')}"
        self.command = self.newest["command"].split()[3]
        self.shown = add_remarks(self.command, self.entries)


def name_card(environment: Figures) -> str:
    """Returns "cpu", or the GPU model as one word: h100 for an NVIDIA H100 80GB HBM3."""
    if environment["device"] != "cuda":
        return environment["device"]
    return (re.findall(r"[a-z]*\d\w*", environment["hardware"].lower()) or ["gpu"])[0]


def read_page(file: Path) -> Page:
    """Reads a file of results that `write_figures` wrote."""
    content = json.loads(file.read_text())
    results = [
        Result(entry, content["environment"] | entry.pop("measured", {}))
        for entry in content["cases"]
    ]
    return Page(content["benchmark"], results)


def read_pages(docs: Path) -> list[Page]:
    """Reads all files of results that `write_figures` wrote."""
    return [read_page(file) for file in sorted(docs.glob("*/*.json"))]


@cache
def list_cases(command: str) -> list[str]:
    """Lists the names of the cases of a command line that measured a result, as the present code
    plans it; empty if the code no longer knows that command line."""
    name, *words = command.split()[3:]
    with suppress(UserError):
        return [case.name for case in plan_job(name, words).cases]
    return []


@contextmanager
def open_results(path: Path) -> Iterator[Path]:
    """Yields the folder of results `path`, or a folder with the content of the archive `path`."""
    if not path.is_file():
        yield path
        return
    with TemporaryDirectory() as name:
        try:
            with tarfile.open(path) as tar:
                tar.extractall(name, filter="data")
        except (tarfile.TarError, EOFError) as error:
            raise UserError(
                f"{path} is no archive of results ({shorten_error(error)}); name a folder, "
                "or a file that `bench gpu pack=<file>` wrote."
            ) from error
        yield Path(name)


def collect_pages(folder: Path, docs: Path) -> Iterator[Page]:
    """Yields the sections that the results in a folder create or change; a section contains only
    results of the same hardware."""
    records = [json.loads(file.read_text()) for file in sorted(folder.glob("*/*.json"))]
    if not records:
        raise UserError(f"{folder} has no results; name the `out` folder of a benchmark.")
    groups: dict[str, list[Result]] = defaultdict(list)
    for record in records:
        run = record["environment"]
        # A machine without git stores no commit with its results. If this checkout has the same
        # code (the hashes are equal), use its commit.
        if not run["git"] and run["code"] == hash_code(shlex.split(run["words"])):
            run["git"] = read_git_state()
        entry = record["entry"]
        card = name_card(run)
        if entry.get("mfu") and run["command"].split()[3] == "mixers":
            # The card's rates may be unknown, and the run's keys gone.
            with suppress(UserError):
                floor = describe_floor(shlex.split(run["words"]), card, entry["step_ms"])
                entry["text"] = f"{entry['name']}: {floor}"
        groups[f"{card}/{record['benchmark']}.json"].append(Result(entry, run))

    for name, results in groups.items():
        file = docs / name
        every = [*results, *(read_page(file).results if file.is_file() else ())]

        # Keep only results of the hardware that gave the newest result, because the results of a
        # section must be comparable.
        newest = Page(file.stem, every).newest
        every = [x for x in every if x.environment["hardware"] == newest["hardware"]]
        # Of the results of a case keep the newest, but figures before a failure.
        every.sort(key=lambda x: ("error" not in x.entry, x.environment["date"]))
        best = {result.entry["name"]: result for result in every}
        planned = [case for case in list_cases(newest["command"]) if case in best]
        page = Page(file.stem, [best[case] for case in dict.fromkeys([*planned, *best])])
        if any("reason" not in entry for entry in page.entries):
            yield page


def write_figures(page: Page, docs: Path) -> None:
    """Writes the results of a page as JSON: under `environment` the facts of the newest result
    (hardware, versions, git commit and others), and under `measured` of each other entry the facts
    that differ from these. Leaves out figures that no page prints."""
    entries = []
    fields = find_fields(page.command)
    for entry, run in page.results:
        printed = {key: value for key, value in entry.items() if key in fields}
        different = {key: value for key, value in run.items() if page.newest.get(key) != value}
        entries.append(printed | ({"measured": different} if different else {}))
    content = {"benchmark": page.name, "environment": page.newest, "cases": entries}
    replace_text(docs / page.file, f"{format_rows(content)}\n")


def replace_text(file: Path, text: str) -> None:
    """Writes `text` to a file, unless the file holds this text already."""
    if not file.is_file() or file.read_text() != text:
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, text)
        print(file)


def make_tables(pages: Sequence[Page]) -> dict[str, str]:
    """Returns name of a part of results.md.jinja -> its table for README or docs, made from the
    results of all pages."""
    newest = sorted(pages, key=lambda page: page.newest["date"], reverse=True)

    def find_pages(name: str | None, cuda: bool) -> list[Page]:
        return [page for page in newest if page.name == name and page.cuda == cuda]

    facts = {"of": find_pages, "pages": newest, "tables": TABLES, "kinds": TECHNIQUES}
    facts |= {
        "hardware": compare_cards(TABLES["cards"]),
        "encoders": compare_encoders(),
        "judge": judge_ratio,
    }
    return {name: TEMPLATE.render(part=name, **facts) for name in PLACES}


@cache
@silence_libraries()
def compare_encoders() -> list:
    """Describes the latents that each encoder of `encoders` in pages.yaml makes of an image of 256
    pixels: (name, channels, side, patch size with which one would train, whether there is a
    posterior, FLOPs of dit_b's forward pass)."""
    import diffusers

    rows = []
    for name, (kind, sizes) in TABLES["encoders"].items():
        with torch.device("meta"):
            vae = getattr(diffusers, kind)(**sizes)
            mean, std = encode_raw(vae, torch.empty(1, 3, 256, 256))
        _, channels, side, _ = mean.shape
        patch = max(1, side // 16)
        words = (
            f"data=synthetic data.channels={channels} data.height={side} data.width={side} "
            f"model=dit_b model.patch_size={patch}"
        )
        cfg = compose(words.split()).cfg
        model = build_on_meta(cfg.model, foresee_latents(cfg, 0.0)[0])
        rows.append((name, channels, side, patch, std is not None, model.flops_per_sample()))
    return rows


def publish(words: Words, root: Path = ROOT) -> None:
    """Adds the results in the folders or archives that `words` name to the files in docs/benchmarks
    below `root`, then writes all benchmark pages and tables again."""
    docs = root / "docs" / "benchmarks"
    for word in words:
        with open_results(Path(word).expanduser()) as folder:
            for page in collect_pages(folder, docs):
                write_figures(page, docs)

    pages = read_pages(docs)
    for card in {page.card: None for page in pages}:
        sections = [page for page in pages if page.card == card]
        text = TEMPLATE.render(part="card", card=card, pages=sections, texts=format_entries)
        replace_text(docs / f"{card}.md", text)

    for name, content in make_tables(pages).items():
        file = root / PLACES[name]
        start, end = (mark.format(name) for mark in MARKS)
        replace_text(file, replace_between(file.read_text(), start, end, content, PLACES[name]))
