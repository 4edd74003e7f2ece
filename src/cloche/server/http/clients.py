"""Which program calls, by its `User-Agent`: a name that we know and a version of two numbers, or `other`.

Anybody can send anything as a `User-Agent`, and what is told apart here becomes a label of a metric, which lives as long as the server. So names
come from a list, versions are two short numbers, and of those only so many are told apart.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

KNOWN = {
    "cloche-python", "cloche-cli", "cloche-typescript",
    "e2b-python-sdk", "e2b-js-sdk", "e2b",
    "claude-code", "codex", "gemini-cli", "cursor", "vscode", "mcp",
    "python-httpx", "python-requests", "python-urllib", "python", "aiohttp", "node", "undici", "axios", "bun", "deno", "go-http-client",
    "curl", "wget", "httpie", "okhttp", "ruby", "java-http-client", "prometheus", "mozilla",
}  # fmt: skip
_AGENT = re.compile(r"\s*([A-Za-z][\w.-]{0,40})(?:/v?(\d{1,3})(?!\d)(?:\.(\d{1,3})(?!\d))?)?")
_ALIASES = {"python-urllib3": "python-urllib", "java": "java-http-client", "go": "go-http-client"}


class Client(NamedTuple):
    name: str
    version: str


OTHER = Client("other", "other")


@lru_cache(maxsize=1024)
def of(agent: bytes) -> Client:
    """The first product of the header; what follows it is about that product's own parts."""
    found = _AGENT.match(agent[:200].decode("latin-1"))
    if found is None:
        return OTHER
    name = found[1].lower()
    name = _ALIASES.get(name, name)
    if name not in KNOWN:
        return OTHER
    return Client(name, f"{int(found[2])}.{int(found[3] or 0)}" if found[2] else "other")
