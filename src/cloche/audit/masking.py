"""What must not be kept: arguments that look like credentials, and whatever the owner says.

A command line is kept because it is what an audit is about, and it is where people put tokens. What is masked becomes `***`; the
words around it stay, so that one can still see what was run. This is a net, not a wall: a secret that looks like nothing gets
through, and belongs into `secrets`, where a sandbox sees a placeholder.

Most commands hold nothing of the kind, so a handful of substring searches decide whether a pattern is tried, or even compiled.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import msgspec

from cloche import events

MASK = "***"

_WORD = (
    r"[\w.-]*(?:passw(?:or)?d|passwd|passphrase|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credentials?)"
    r"(?:[_.-][\w.-]*)?"
)


class Rule(NamedTuple):
    """Tried on a text that holds one of `hints` in lower case; what the first group matches, if there is one, stays."""

    hints: tuple[str, ...]
    pattern: str


_SECRETS = ("passw", "passphrase", "secret", "token", "key", "credential")
_PREFIXES = (
    "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "sk-", "sk_live_", "rk_live_", "pk_live_", "xoxa-", "xoxb-",
    "xoxp-", "xoxr-", "xoxs-", "xapp-", "hf_", "npm_", "pypi-", "dop_v1_", "shpat_", "cl_", "e2b_",
)  # fmt: skip
RULES = (
    # --token=X, -H 'X-Api-Key: X', PGPASSWORD=X, ?access_token=X, "client_secret": "X"
    Rule(_SECRETS, rf"""(?i)({_WORD}["']?\s*[=:]\s*["']?)[^\s"'&;|]+"""),
    Rule(_SECRETS, rf"""(?i)(--?{_WORD}\s+["']?)[^\s"'&;|]+"""),
    Rule(
        ("authorization", "cookie"),
        r"""(?i)((?:authorization|cookie)["']?\s*[=:]\s*["']?(?:(?:bearer|basic|token|digest)\s+)?)[^\s"';|]+""",
    ),
    Rule(("bearer",), r"""(?i)(\bbearer\s+)[a-z0-9._~+/=-]{8,}"""),
    # https://user:password@host
    Rule(("@",), r"""([a-zA-Z][a-zA-Z0-9+.-]*://[^\s:/@"']*:)[^\s/@"']+(?=@)"""),
    # curl -u user:password
    Rule(("-u", "--proxy-u"), r"""((?:^|\s)(?:-u|--user|--proxy-user)[\s=]["']?[^\s:"']+:)[^\s"']+"""),
    # Values that say themselves what they are.
    Rule(_PREFIXES, rf"\b(?:{'|'.join(_PREFIXES)})[A-Za-z0-9_-]{{8,}}"),
    Rule(("akia", "asia", "agpa", "aroa"), r"\b(?:AKIA|ASIA|AGPA|AROA)[A-Z0-9]{12,}"),
    Rule(("aiza",), r"\bAIza[A-Za-z0-9_-]{20,}"),
    Rule(("eyj",), r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"),
    Rule(
        ("private key",), r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
    ),
)
_TEXTS: dict[type, str] = {
    events.Started: "command",
    events.Refused: "message",
    events.Administered: "detail",
}
"""Where words of a caller stand in an event."""


class Masker:
    """`own` are the patterns of `audit.redact`."""

    def __init__(self, own: Sequence[str] = ()) -> None:
        self._own = [re.compile(pattern) for pattern in own]

    def event(self, event: events.AnyEvent) -> events.AnyEvent:
        """The event as it may be kept; the very same one if there is nothing to hide."""
        name = _TEXTS.get(type(event))
        if name is None:
            return event
        text = getattr(event, name)
        kept = self.text(text)
        return event if kept == text else msgspec.structs.replace(event, **{name: kept})

    def text(self, text: str) -> str:
        for own in self._own:
            text = own.sub(MASK, text)
        lower = text.lower()
        for rule in RULES:
            for hint in rule.hints:
                if hint in lower:
                    text = _compiled(rule.pattern).sub(_mask, text)
                    break
        return text


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Takes milliseconds, and few commands need one."""
    return re.compile(pattern)


def _mask(found: re.Match[str]) -> str:
    return (found[1] if found.re.groups else "") + MASK
