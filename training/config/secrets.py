"""Removes secrets from everything that is written down: configurations, command lines, messages."""

from __future__ import annotations

import re
from typing import Any

SECRET = re.compile(
    r"(^|[._-])(api_?key|key|token|secret|password|passwd|credentials?|authorization|signature|sig)($|[._-])",
    re.IGNORECASE,
)
"""Names of secrets, in keys and in the queries of addresses: we never write their values down."""
IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
QUERY = re.compile(r"(://[^\s?\"']*\?)[^\s\"']+")
"""The whole of it: who signs a URL names the parameters, and their order."""
WORD = re.compile(r"((?:^|[?&\s])([\w.-]+)=)[^&\s]+")
ENTRY = re.compile(r"([{,\[]\s*([\w.-]+):\s?)[^,{}\[\]]+")


def redacted(node: Any) -> Any:
    """The same tree with the values of keys that look like secrets removed."""
    if isinstance(node, dict):
        return {k: "<redacted>" if SECRET.search(str(k)) and v is not None else redacted(v) for k, v in node.items()}
    if isinstance(node, list):
        return [redacted(v) for v in node]
    return scrubbed(node) if type(node) is str else node


def scrubbed(text: str) -> str:
    """The same text, its values under names of secrets redacted: in addresses, in mappings, in words."""

    def named(found: re.Match[str]) -> str:
        return f"{found[1]}<redacted>" if SECRET.search(found[2]) else found[0]

    text = QUERY.sub(r"\1<redacted>", IN_ADDRESS.sub("<redacted>", text))
    return ENTRY.sub(named, WORD.sub(named, text))


def redact_words(words: list[str]) -> list[str]:
    """`key=value` words with the values of such keys removed, and without the folders that Hydra searches."""
    parts = [word.partition("=") for word in words if not word.startswith("hydra.searchpath=")]
    return [
        f"{key}=<redacted>" if equals and SECRET.search(key) else scrubbed(f"{key}{equals}{value}")
        for key, equals, value in parts
    ]
