"""Redacts secrets in configurations, command lines and messages.

The functions replace the value of a secret by `HIDDEN` and keep its name. They also keep
placeholders in fastlatent's messages, such as `latents_key=<name>`, because a placeholder holds no
value.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

HIDDEN = "<redacted>"
NAME_BOUNDARY = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Matches the boundary between two words of a name: accessToken, access-token and ACCESS_TOKEN have
two words each."""
SECRET_NAME = re.compile(
    r".*(password|passwd|passphrase|passcode|secret).*"
    r"|(.*_)?(cred|credential|authorization|bearer|jwt|cookie|webhook|(api|auth|access|private|client)_?(key|token))s?\d*"
    r"(_.*)?"
    r"|(.*tokens?|.*pwd|.*pass|(.*_)?(key|auth|auth_header|pw|sig|signature|pat|sas|dsn))(_?\d+)?"
)
"""Matches a name that belongs to a secret, such as api_key; the name must be in lower case, with
its words joined by _. The words in the pattern's first line may stand anywhere in the name, those
in its second line only as whole words, those in its last line only at the end."""
PUBLIC_KEYS = ("latents_key", "labels_key", "text_tokens")
"""Settings whose name looks like that of a secret, but whose value, the name of an entry in a file
or a number, is not redacted."""
EMPTY_VALUE = re.compile(
    r"['\"\[({]*(<[^<>]*>|…|value|null|none|true|false)?[.,;:)}`'\"\]]*", re.IGNORECASE
)
"""Matches a placeholder or an empty value, such as <name> or null, which holds no secret."""
QUOTED_PATTERN = r"'[^']*'|\"[^\"]*\"|[\[{](?:[^][{}]|[\[{][^][{}]*[\]}])*[\]}]"
"""Matches text in quotes, a list or a mapping. A list or mapping may contain lists and mappings,
but those may contain no further ones."""
VALUE_PATTERN = rf"({QUOTED_PATTERN}|[\[{{].+|\S+)"


class Shape(NamedTuple):
    """A form in which text holds a secret, as two regular expressions: `before` matches the text
    before the value, `value` the value. The group `name` of `before`, the value's name, decides
    whether the value is a secret; without such a group, every value that matches is a secret."""

    before: str
    value: str = VALUE_PATTERN


SHAPES = {
    "https://user:pass@word@host/": Shape(r"(://)", r"([^\s/:@]+:(?!\d+/)\S*|[^\s/]*)(?=@)"),
    "user:pass@word@host": Shape(
        r"((?<![\w/.{-])[\w.-]+:)", r"([^\s:/@]\S*)(?=@(?!sha256:)[\w.-])"
    ),
    "https://host/path?query": Shape(r"(://[^\s?\"']*\?)", r"([^\s\"']+)"),
    "Authorization: scheme value": Shape(
        r"(\b[Aa]uthorization['\"]?\s*[:=]\s*)", r"([^\r\n,}\]]+)"
    ),
    "Cookie: name=value; name=value": Shape(r"(\b[Cc]ookie['\"]?\s*:\s*)", r"([^\r\n}\]]+)"),
    "Bearer value": Shape(r"(\b[Bb]earer\s+)(?!tokens?\s)", r"([^\s,;'\"<]+)"),
    "Basic value": Shape(r"(\b[Bb]asic\s+)", r"((?=\S*(?:=|[a-z\d][A-Z]))[\w+/-]{6,}=*)"),
    "name=value": Shape(r"((?<![\w.-])(?P<name>[\w.-]+)\s*=\s*)"),
    "--name value": Shape(r"((?<!\S)--?(?P<name>[\w-]+)\s+)(?!-)"),
    "X-Name: value": Shape(r"(\b(?P<name>[A-Za-z]+-[\w-]+):\s*)"),
    "{name: value}": Shape(
        r"([{,\[]\s*['\"]?(?P<name>[\w.-]+)['\"]?\s*:\s*)",
        rf"({QUOTED_PATTERN}|(?:[^,}}\]]|,(?!\s*['\"]?[\w.-]+['\"]?\s*:))+)",
    ),
    "name: value, a line": Shape(
        r"((?m:^)[ \t-]*['\"]?(?P<name>[\w.-]+)['\"]?:[ \t]+)", r"('[^']*'|\"[^\"]*\"|\S+)(?m:\s*$)"
    ),
    "a provider's own form": Shape(
        r"(?<![\w-])()",
        r"((hf|gh[a-z]|github_pat|wandb_v1|[rs]k_live|[rs]k_test|npm|dckr_pat|r8|gsk|api_org)_\w{16,}"
        r"|(glpat|sk|pypi|nvapi|tskey|AGE-SECRET-KEY)-[\w-]{16,}|(ya29|hvs|SG)\.[\w.-]{16,}|xox[a-z]-[\w-]{10,}"
        r"|dapi[0-9a-f]{32}|A[KS]IA[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]+\.[\w-]+\.[\w-]*)",
    ),
    "a private key": Shape(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)", r"([^-]+)"),
}
"""Example of a form in which text may hold a secret, such as `--name value` -> the regular
expressions that find it. `redact_text` applies them in this order."""


def is_secret(name: str, value: Any) -> bool:
    """Says whether the value of the setting `name` is a secret, such as that of api_key. A number
    of tokens, such as that of max_tokens=100, is no secret."""
    joined = "_".join(filter(None, NAME_BOUNDARY.split(name))).lower()
    if name.rpartition(".")[2] in PUBLIC_KEYS or EMPTY_VALUE.fullmatch(str(value).strip()):
        return False
    number = joined.endswith("tokens") and re.fullmatch(r"\d[\d_.,;]*", str(value))
    return not number and SECRET_NAME.fullmatch(joined) is not None


def redact(node: Any) -> Any:
    """Returns a copy of nested dicts and lists in which `HIDDEN` replaces the values of secret keys
    and the secrets inside of text."""
    if isinstance(node, dict):
        return {redact(k): HIDDEN if is_secret(str(k), v) else redact(v) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(map(redact, node))
    return redact_text(node) if type(node) is str else node


def redact_text(text: str) -> str:
    """Returns the text with `HIDDEN` in place of each secret that a regular expression in `SHAPES`
    finds."""
    for shape in SHAPES.values():
        text = redact_matches(shape, text)
    return text


def redact_matches(shape: Shape, text: str) -> str:
    """Returns the text with `HIDDEN` in place of each secret in the form `shape`. If the form has a
    name, a match is a secret only if its name is that of a secret, such as api_key; the function
    searches the value of any other match again, because this value may contain a secret of the same
    form."""

    def replace(match: re.Match[str]) -> str:
        name = match.groupdict().get("name")
        if name is None or is_secret(name, match[3]):
            return match[1] + HIDDEN
        return match[1] + redact_matches(shape, match[3])

    return re.sub(shape.before + shape.value, replace, text)


def redact_words(words: list[str]) -> list[str]:
    """Returns the `key=value` words of a command with secrets redacted. Leaves out the word
    hydra.searchpath=…, which fastlatent adds for extensions."""
    parts = [word.partition("=") for word in words if not word.startswith("hydra.searchpath=")]
    return [
        f"{key}={HIDDEN}" if is_secret(key, value) else redact_text(f"{key}{equals}{value}")
        for key, equals, value in parts
    ]
