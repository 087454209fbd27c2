"""Checks the labels and prompts with which a user asks for samples."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Sequence
from numbers import Integral, Number
from typing import Any

from common.errors import UserError


def pair_conditions(
    conditioning: str, labels: Any, prompts: Any
) -> tuple[list[int | str], list[str]]:
    """Returns the labels and prompts of samples: the label 0 for each prompt if the model has no
    labels; in prompts a ? replaces what has no code in UTF-8. Both may be one value, a list, an
    array or None.

    Raises UserError unless these are what a model with this conditioning needs: labels, prompts,
    or as many of each.
    """
    labels = list_values(labels)
    prompts = list_values(prompts)
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise UserError(f"prompts={str(prompts)[:80]} must be texts.")
    needs, fits = {
        "class": ("labels", len(labels) > 0 == len(prompts)),
        "text": ("prompts", len(prompts) > 0 == len(labels)),
        "class_and_text": ("a label for each prompt", len(labels) == len(prompts) > 0),
    }[conditioning]
    if not fits:
        raise UserError(
            f"labels ({len(labels)}) and prompts ({len(prompts)}): this model was trained with "
            f"model.conditioning={conditioning}, which needs {needs}; give only these."
        )
    encodable = [prompt.encode(errors="replace").decode() for prompt in prompts]
    return labels or [0] * len(prompts), encodable


def list_values(values: Any) -> list[Any]:
    """Returns one value, a sequence, an array or None as a list."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if values is None:
        return []
    return [values] if isinstance(values, str | Number) else [*values]


def find_class_numbers(labels: Sequence[int | str], names: list[str], count: int) -> list[int]:
    """Returns the class number for each label, which is the number or the name of one of `count`
    classes. A str is a name, even "3"; without classes only the number 0 is known. Names with
    composed and with decomposed accents are equal.

    Raises UserError for a class that is not there, for a name that several classes have, and for a
    number that is the name of another class.
    """
    numbers = []
    composed = [unicodedata.normalize("NFC", name) for name in names]
    for label in labels:
        text = unicodedata.normalize("NFC", str(label))
        namesakes = [number for number, name in enumerate(composed) if name == text]
        if isinstance(label, str):
            matches = namesakes
        else:
            whole = isinstance(label, Integral) and not isinstance(label, bool)
            matches = [int(label)] if whole and 0 <= label < max(1, count) else []

            # Folders of numbers that are not in the order 0, 1, … have numbers as other names.
            if matches and namesakes not in ([], matches):
                raise UserError(
                    f"labels: {label} is the number of class {names[matches[0]]!r} and the name of "
                    f"class {namesakes[0]}; give the name, in quotes: '{names[matches[0]]}' or "
                    f"'{label}'."
                )
        if len(matches) != 1:
            fault = explain_unclear_label(label, matches, names)
            raise UserError(f"labels: {repr(label)[:80]} is {fault}")
        numbers += matches
    return numbers


def explain_unclear_label(label: object, matches: list[int], names: list[str]) -> str:
    """Returns the end of a sentence that says why `label` names no class, or more than one."""
    if matches:
        return f"the name of {len(matches)} classes, {matches[:5]}; give their numbers."
    if not names:
        return "no class of this run, whose data has none; leave labels out."
    close = difflib.get_close_matches(label[:80], set(names)) if isinstance(label, str) else []
    if close:
        return f"no class of this run; did you mean {' or '.join(close)}?"
    more = ", …" if names[10:] else ""
    return (
        f"no class of this run; its {len(names)} classes are, from 0 on, "
        f"{', '.join(names[:10])}{more}."
    )
