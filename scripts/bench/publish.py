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
import string
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader

from accel.stack import TECHNIQUES
from common.config.compose import read_config
from common.environment import read_git_state
from common.errors import UserError
from common.files import ROOT, hash_content, write_atomically
from scripts.bench import TABLES, Case, Figures, Words
from scripts.bench.cases import hash_case, plan_job
from scripts.bench.floor import RATES, describe_floor
from scripts.commands import format_rows, format_table, replace_between
from scripts.doctor import compare_cards
from scripts.timing import shows_no_difference

DOCS = ROOT / "docs" / "benchmarks"
MARKS = "<!-- {}: made by `python -m scripts.bench publish` -->\n", "<!-- end of {} -->"
PLACES = {
    "front": "README.md",
    "techniques": "docs/configuration.md",
    "guides": "docs/techniques.md",
    "hardware": "docs/kernels.md",
    "overview": "docs/benchmarks/README.md",
    "speedrun": "docs/speedrun.md",
}
"""Name of a part of results.md.jinja -> path of the page that shows the table which this part
makes."""
FOLDER = FileSystemLoader(Path(__file__).parent)
TEMPLATES = Environment(loader=FOLDER, trim_blocks=True, lstrip_blocks=True)
GUIDES = read_config(Path(__file__).with_name("guides.yaml"))
"""Content of guides.yaml: group of techniques -> rows, each with a speed-up or saving that guides
to fast training promise, and the benchmark that checks it on a GPU."""
CARDS = ("a100", "h100", "b200", "rtx4090", "rtx5090")
"""GPU models that are the columns of the table of hardware in docs/kernels.md."""
PRINTED = (
    *("name", "reason", "error", "text", "not_on", "baseline_not_on", "emulated", "part", "key"),
    *("n", "batch_size", "speed", "speed_q1", "speed_q3", "memory_reserved_peak"),
    *("baseline_memory_reserved_peak", "board", "parameters", "cost", "cost_q1", "cost_q3"),
    *("tried", "k", "k_fd_encoder", "k_fd_random", "k_eval_loss", "k_flops"),
)
"""Figures that results.md.jinja and `add_remarks` name."""
UNITS = {"M": 1e6, "G": 1e9, "MiB": 2**20, "GiB": 2**30}


def fill(part: str, **facts: Any) -> str:
    """Renders the part of the template results.md.jinja that `part` names, with the variables
    `facts`."""
    return TEMPLATES.get_template("results.md.jinja").render(part=part, **facts)


class Cells(string.Formatter):
    """String formatter for table cells: writes None as a dash, and bytes in MiB or GiB for {:MiB}
    and {:GiB}."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return "–"
        if format_spec in UNITS:
            return f"{value / UNITS[format_spec]:.2f}"
        return format(value, format_spec)


def format_entry(entry: Figures, form: str) -> str:
    """Fills the format string `form`, such as "{step_ms:.1f}", with an entry's figures; a missing
    figure becomes a dash."""
    return Cells().vformat(form, (), defaultdict(lambda: None, entry)).replace("–––", "–")


TEMPLATES.filters["shown_as"] = format_entry


def add_remarks(command: str, entries: Sequence[Figures]) -> list[Figures]:
    """Returns the entries, each with a `remark` such as "no difference", an error, or the
    techniques that are not on; entries of the ladder also get the ratio of their speed to the rung
    before."""
    remarked = []
    rung_before: Figures = {}
    for figures in entries:
        entry = {"ratio": "speed", "speed": None} | figures
        if command == "ladder" and entry["speed"]:
            entry["ratio"] = "times_before"
            # Estimate the quartiles of the ratio from those of both rungs. For the lower quartile,
            # divide this rung's lower quartile by the upper quartile of the rung before; for the
            # upper quartile, divide the upper one by the lower one.
            for quartile, opposite in (("", ""), ("_q1", "_q3"), ("_q3", "_q1")):
                before = rung_before.get(f"speed{opposite}")
                entry[f"times_before{quartile}"] = before and entry[f"speed{quartile}"] / before
            rung_before = entry

        # Report techniques that the case requests and that are not on, except those that its
        # baseline also requests without effect: they do not change the comparison.
        entry["lost"] = {*entry.get("not_on", ())} - {*entry.get("baseline_not_on", ())}
        remarks = [entry.get("reason") or entry.get("error")]
        for label, keys in (("emulated", entry.get("emulated")), ("not on", entry["lost"])):
            if keys:
                remarks.append(f"{label}: {', '.join(sorted(keys))}")
        if entry.get(entry["ratio"]) not in (None, 1.0) and not entry["lost"]:
            remarks.append("no difference" if shows_no_difference(entry, entry["ratio"]) else None)
        remarked.append(entry | {"remark": "; ".join(filter(None, remarks))})
    return remarked


def format_entries(command: str, entries: Sequence[Figures]) -> Words:
    """Returns a list of texts: the table of a command's entries, then the `text` of each entry that
    has one."""
    columns = TABLES["columns"].get(command, {})
    rows: list[Sequence[object]] = [("", *columns, "")]
    for entry in add_remarks(command, entries):
        cells = [format_entry(entry, form) for form in columns.values()]
        rows.append((entry["name"], *cells, entry["remark"]))
    return [format_table(rows), *(entry["text"] for entry in entries if "text" in entry)]


def find_fields(command: str) -> set[str]:
    """Returns the names of the figures of a command's entries that a page or a table prints."""
    forms = [*TABLES["columns"].get(command, {}).values()]
    forms += [row["shows"] for group in GUIDES.values() for row in group["rows"] if "shows" in row]
    parsed = [field for form in forms for _, field, *_ in string.Formatter().parse(form)]
    return {*PRINTED, *filter(None, parsed)}


class Result(NamedTuple):
    """The figures of one case, and the facts of their measurement: hardware, versions, git commit,
    date and command."""

    entry: Figures
    environment: Figures


def make_sort_key(result: Result) -> tuple[bool, str]:
    """Returns a key that sorts the results of one case, the best last: failures before figures,
    then old before new."""
    return "error" not in result.entry, result.environment["date"]


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
        self.title = name.replace("_", " ")
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
    run = content["environment"]
    results = [Result(e, run | e.pop("measured", {})) for e in content["cases"]]
    return Page(content["benchmark"], results)


def read_pages(docs: Path) -> list[Page]:
    """Reads all files of results that `write_figures` wrote."""
    return [read_page(file) for file in sorted(docs.glob("*/*.json"))]


@cache
def plan_cases(command: str) -> dict[str, Case]:
    """Returns name -> case for the command line that a result was measured by, as the present code
    plans it; {} if the code no longer knows that command line."""
    words = command.split()[3:]
    with suppress(UserError):
        return {case.name: case for case in plan_job(words[0], words[1:]).cases}
    return {}


def identify(name: str, run: Figures) -> str:
    """Returns a hash of what identifies the result of the case `name`: hardware, versions of torch
    and Triton, overrides and keys. `run` is the result's `environment`. The code is no part of it:
    a result stays a result after the next commit, and says by which code it was measured."""
    versions = [run["versions"].get(package) for package in ("torch", "triton")]
    facts = [name, run["hardware"], versions, *map(run.get, ("words", "baseline", "keys"))]
    return hash_content(facts, sort_keys=True)[:12]


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
                f"{path} is no archive of results ({error}); name a folder, or a file that "
                "`bench gpu pack=<file>` wrote."
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
        # A machine without git stores no commit with its results. If the case runs the same code in
        # this checkout (the hashes are equal), use the commit of this checkout.
        case = plan_cases(run["command"]).get(record["entry"]["name"])
        if not run["git"] and case and run["code"] == hash_case(case):
            run["git"] = read_git_state()
        entry = record["entry"]
        card = name_card(run)
        if entry.get("mfu") and run["command"].split()[3] == "mixers" and card in RATES:
            # The run may have keys that are gone.
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
        best = {result.entry["name"]: result for result in sorted(every, key=make_sort_key)}
        planned = [case for case in plan_cases(newest["command"]) if case in best]
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
    file = docs / page.file
    file.parent.mkdir(exist_ok=True)
    content = {"benchmark": page.name, "environment": page.newest, "cases": entries}
    write_atomically(file, format_rows(content) + "\n")
    print(file)


def replace_text(file: Path, text: str) -> None:
    """Writes `text` to a file, unless the file holds this text already."""
    if not file.is_file() or file.read_text() != text:
        write_atomically(file, text)
        print(file)


def make_tables(pages: Sequence[Page]) -> dict[str, str]:
    """Returns name of a part of results.md.jinja -> its table for README or docs, made from the
    results of all pages."""
    newest = sorted(pages, key=lambda page: page.newest["date"], reverse=True)

    def find_pages(name: str | None, cuda: bool) -> list[Page]:
        return [page for page in newest if page.name == name and page.cuda == cuda]

    facts = {"of": find_pages, "items": TABLES["queue"], "rows": TABLES["front"], "guides": GUIDES}
    facts |= {"kinds": TECHNIQUES, "hardware": compare_cards(CARDS), "pages": newest}
    return {name: fill(name, no_difference=shows_no_difference, **facts) for name in PLACES}


def publish(folders: Sequence[Path], root: Path) -> None:
    """Adds the results in `folders`, folders or archives, to the files in docs/benchmarks below
    `root`, then writes all benchmark pages and tables again."""
    docs = root / "docs" / "benchmarks"
    for path in folders:
        with open_results(path) as folder:
            for page in collect_pages(folder, docs):
                write_figures(page, docs)

    pages = read_pages(docs)
    sections_by_card: dict[str, list[Page]] = defaultdict(list)
    for page in pages:
        sections_by_card[page.card].append(page)
    for card, sections in sections_by_card.items():
        replace_text(
            docs / f"{card}.md", fill("card", card=card, pages=sections, texts=format_entries)
        )

    for name, content in make_tables(pages).items():
        file = root / PLACES[name]
        text = file.read_text()
        start, end = (mark.format(name) for mark in MARKS)
        replace_text(file, replace_between(text, start, end, content, PLACES[name]))
