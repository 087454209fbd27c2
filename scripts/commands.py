"""Helpers of this folder's commands: they run a command, split the arguments of a command line into
the command's own keys and overrides of the training configuration, find encoders, format JSON,
and replace parts of pages."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar, cast

from common.config.compose import CONF_FOLDER, parse_words, parse_yaml, report_user_errors
from common.distributed.exit import exit_cleanly
from common.errors import UserError
from common.require_python import stop_at_once

Keys = TypeVar("Keys")
ENCODER_CLASSES = {
    "encoder": "models.autoencoders.DiffusersAutoencoder",
    "text_encoder": "models.text_encoders.HubTextEncoder",
}
"""Group of the configuration -> class that opens a folder or hub id."""


@contextmanager
def end_command() -> Iterator[None]:
    """Ends a command whose work is the `with` block: with one sentence after a mistake of the user
    (exit code 1) and at Ctrl-C (exit code 130)."""
    with exit_cleanly(), report_user_errors():
        # Raise KeyboardInterrupt at Ctrl-C from now on, so that the command removes what it began.
        if signal.getsignal(signal.SIGINT) is stop_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield


def run_command(run: Callable[..., object], schema: type, help_text: str | None) -> None:
    """Runs the function `run` of a command with the keys of the command line, an instance of
    `schema`."""
    with end_command():
        run(parse_words(schema, sys.argv[1:], help_text or ""))


def split_words(
    schema: type[Keys], words: list[str], help_text: str | None
) -> tuple[Keys, list[str]]:
    """Splits the arguments `words` of a command line. Returns an instance of `schema`, made from
    the arguments that set one of its keys, and a list of all other arguments, which are overrides
    of the training configuration. `--json` is json=true."""
    words = ["json=true" if word == "--json" else word for word in words]
    keys = {field.name for field in fields(cast(Any, schema))}
    overrides = [word for word in words if "=" in word and word.partition("=")[0] not in keys]
    key_words = [word for word in words if word not in overrides]
    return parse_words(schema, key_words, help_text or ""), overrides


def format_rows(value: Any, levels: int = 2) -> str:
    """Formats lists and dicts as JSON. A value that lies `levels` levels deep stands on one line
    with all that it contains."""
    if levels == 0 or not isinstance(value, (dict, list)):
        return json.dumps(value)
    if isinstance(value, dict):
        lines = [
            f"{json.dumps(key)}: {format_rows(item, levels - 1)}" for key, item in value.items()
        ]
        return "{\n" + ",\n".join(lines) + "\n}"
    return "[\n" + ",\n".join(format_rows(item, levels - 1) for item in value) + "\n]"


def replace_between(text: str, start: str, end: str, content: str, page: str) -> str:
    """Returns `text` with `content` in place of the text between the marks `start` and `end`.
    Raises a UserError that names `page` if a mark is missing."""
    if start not in text or end not in text:
        raise UserError(
            f"{page} has lost the lines {start.strip()} and {end}; put them around the table."
        )
    before, _, rest = text.partition(start)
    return before + start + content + end + rest.partition(end)[2]


def find_encoder_node(group: str, name: str) -> dict[str, Any]:
    """Returns the configuration of an encoder: a file of conf/<group>, or a folder or hub id."""
    file = CONF_FOLDER / group / f"{name}.yaml"
    if file.is_file() and name not in ("local", "transformers"):
        node = parse_yaml(file.read_text())
        return node.get(group, node)  # the file of pixels also sets the dtype
    return {"_target_": ENCODER_CLASSES[group], "path": name}
