"""Git's configuration files: read, compare, and change in place.

    [section "sub\\"section"]        ; comment
        key = value with "quoted # text" \\
              and a continuation
        flag                            # no "=": true

`parse` gives entries with their place in the text, so that a change touches those characters and nothing else. `merge`
takes over what a sandbox may have changed and names what it dropped. The decision is an allow-list of keys *and* of the
shapes of their values: git has some forty keys that run programs and grows more, and a `url` may be one too (`ext::`).
Pure text in, text out; includes are entries like any other and never followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

Key = tuple[str, str | None, str]
Values = dict[Key, list[str | None]]

_HEADER = re.compile(r'\[([A-Za-z0-9.-]+)(?:[ \t]+"((?:[^"\\\n]|\\.)*)")?[ \t]*\]')
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_ESCAPES = {"n": "\n", "t": "\t", "b": "\b", '"': '"', "\\": "\\"}


class ConfigInvalid(ValueError):
    """The text is not a configuration that git would read."""


class Entry(NamedTuple):
    key: Key
    value: str | None
    start: int
    """Where the line of the entry begins, or the entry itself when it shares the line with a header."""
    end: int
    """After its newline."""


class Header(NamedTuple):
    section: str
    subsection: str | None
    start: int
    end: int


class Parsed(NamedTuple):
    entries: list[Entry]
    headers: list[Header]

    def values(self) -> Values:
        found: Values = {}
        for entry in self.entries:
            found.setdefault(entry.key, []).append(entry.value)
        return found


def parse(text: str) -> Parsed:
    return _Parser(text).run()


class _Parser:
    """One pass over the text, by git's own rules (config.c)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 1 if text.startswith("\ufeff") else 0
        self.entries: list[Entry] = []
        self.headers: list[Header] = []

    def run(self) -> Parsed:
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r\n":
                self.at += 1
            elif char in "#;":
                self.skip_line()
            elif char == "[":
                self.header()
            else:
                self.entry()
        return Parsed(self.entries, self.headers)

    def skip_line(self) -> None:
        newline = self.text.find("\n", self.at)
        self.at = len(self.text) if newline < 0 else newline + 1

    def line_start(self, at: int) -> int:
        begin = self.text.rfind("\n", 0, at) + 1
        return begin if not self.text[begin:at].strip() else at

    def header(self) -> None:
        match = _HEADER.match(self.text, self.at)
        if match is None:
            raise ConfigInvalid(f"no section header at character {self.at}")
        section, subsection = match[1].lower(), match[2]
        if subsection is not None:
            subsection = re.sub(r"\\(.)", r"\1", subsection)
        elif "." in section:  # the old spelling [section.sub], folded to lower case
            section, subsection = section.split(".", 1)
        self.at = match.end()
        self.headers.append(Header(section, subsection, self.line_start(match.start()), self.at))

    def entry(self) -> None:
        match = _NAME.match(self.text, self.at)
        if match is None or not self.headers:
            raise ConfigInvalid(f"no key at character {self.at}")
        start = self.line_start(self.at)
        self.at = match.end()
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        value: str | None = None
        if self.text[self.at : self.at + 1] == "=":
            self.at += 1
            value = self.value()
        elif self.at < len(self.text) and self.text[self.at] not in "\r\n#;":
            raise ConfigInvalid(f"no '=' at character {self.at}")
        else:
            self.skip_line()
        header = self.headers[-1]
        self.entries.append(
            Entry((header.section, header.subsection, match[0].lower()), value, start, self.at)
        )

    def value(self) -> str:
        out: list[str] = []
        kept = 0  # length up to the last character that is not trailing space
        quoted = False
        while True:
            char = self.text[self.at : self.at + 1]
            self.at += 1
            if char in ("", "\n") or self.text.startswith("\r\n", self.at - 1):
                if quoted:
                    raise ConfigInvalid("a quoted value runs over the end of its line")
                self.at = min(len(self.text), self.at + (char == "\r"))
                return "".join(out[:kept])
            if char in "#;" and not quoted:
                self.skip_line()
                return "".join(out[:kept])
            if char == '"':
                quoted = not quoted
                kept = len(out)
            elif char == "\\":
                self.escape(out)
                kept = len(out)
            elif quoted or char not in " \t\r":
                out.append(char)
                kept = len(out)
            elif out:
                out.append(char)

    def escape(self, out: list[str]) -> None:
        char = self.text[self.at : self.at + 1]
        self.at += 1
        if char == "\n":
            return
        if char == "\r" and self.text[self.at : self.at + 1] == "\n":
            self.at += 1
            return
        if char not in _ESCAPES or not char:
            raise ConfigInvalid(f"no such escape: \\{char}")
        out.append(_ESCAPES[char])


def spell(key: Key) -> str:
    section, subsection, name = key
    return f"{section}.{name}" if subsection is None else f"{section}.{subsection}.{name}"


# ── what may come out of a sandbox ─────────────────────────────────────────────────────────────────

_SCHEMES = ("http", "https", "ssh", "git", "git+ssh", "ssh+git", "file")
_BOOLEAN = re.compile(r"true|false|yes|no|on|off|0|1", re.I)
_REF = r"refs/[^\s:^~?\[\\\x00-\x1f\x7f]+"
_REFSPEC = re.compile(rf"\^{_REF}|\+?(?:{_REF}|HEAD):refs/(?:remotes|tags|notes)/[^\s:^~?\[\\\x00-\x1f\x7f]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def url_is_safe(url: str | None) -> bool:
    """Whether git opens it as a network address or a path, and never as a program."""
    if not url or _CONTROL.search(url) or url.startswith("-") or re.match(r"[A-Za-z0-9+.-]+::", url):
        return False
    scheme = re.match(r"([A-Za-z0-9+.-]+)://(.*)", url)
    if scheme is None:
        return True
    return scheme[1].lower() in _SCHEMES and not scheme[2].startswith("-") and "@-" not in scheme[2]


def _true_or_false(value: str | None) -> bool:
    return value is None or bool(_BOOLEAN.fullmatch(value))


def _path_is_safe(value: str | None) -> bool:
    return (
        bool(value)
        and value is not None
        and not value.startswith(("/", "-"))
        and ".." not in value.split("/")
    )


def _plain(value: str | None) -> bool:
    return value is not None and not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", value)


def _matches(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


_BRANCH_MERGE = _matches(_REF)
_REBASE = _matches(r"true|false|merges|interactive")
_FORMAT = _matches(r"[01]")
_HASH = _matches(r"sha1|sha256")
_FILTER = _matches(r"blob:none|blob:limit=[0-9]+[kmg]?|tree:[0-9]+")


Fresh = Callable[[str], bool]
"""For a repository that was made in the sandbox: whether a `core.worktree` is a place in the workspace. A worktree elsewhere
would let the next checkout on the host write there."""


def allowed(key: Key, value: str | None, *, remotes: set[str], fresh: Fresh | None) -> bool:
    """Whether a changed value may go into the host's file."""
    section, subsection, name = key
    text = value or ""
    if subsection is None:
        return fresh is not None and _fresh(section, name, value, fresh)
    if subsection.startswith("-") or _CONTROL.search(subsection) or ".." in subsection.split("/"):
        return False
    match section, name:
        case "branch", "remote":
            return text == "." or text in remotes
        case "branch", "merge":
            return bool(_BRANCH_MERGE.fullmatch(text))
        case "branch", "rebase":
            return bool(_REBASE.fullmatch(text))
        case "branch", "description":
            return _plain(value)
        case (("remote" | "submodule"), "url"):
            return url_is_safe(value)
        case "remote", "fetch":
            return bool(_REFSPEC.fullmatch(text))
        case "submodule", "active":
            return _true_or_false(value)
        case "submodule", "path":
            return _path_is_safe(value) and _plain(value)
        case "submodule", "branch":
            return text == "." or bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./-]*", text))
        case "remote", "promisor":
            return fresh is not None and _true_or_false(value)
        case "remote", "partialclonefilter":
            return fresh is not None and bool(_FILTER.fullmatch(text))
    return False


def _fresh(section: str, name: str, value: str | None, in_workspace: Fresh) -> bool:
    """What `git init` and `git clone` write, without which there is no repository."""
    text = value or ""
    match section, name:
        case "core", "repositoryformatversion":
            return bool(_FORMAT.fullmatch(text))
        case "core", (
            "filemode" | "bare" | "logallrefupdates" | "symlinks" | "ignorecase" | "precomposeunicode"
        ):
            return _true_or_false(value)
        case "core", "worktree":
            return not _CONTROL.search(text) and in_workspace(text)
        case "extensions", "objectformat":
            return bool(_HASH.fullmatch(text))
        case "extensions", "partialclone":
            return bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", text))
    return False


# ── taking over ────────────────────────────────────────────────────────────────────────────────────


class Merged(NamedTuple):
    text: str
    merged: list[str]
    dropped: list[str]


def merge(host: str, base: str, now: str, *, fresh: Fresh | None = None) -> Merged:
    """`host` with what changed from `base` to `now`, as far as it is allowed.

    Where the host changed the same key meanwhile, the host wins.
    """
    try:
        before, after = parse(base).values(), parse(now).values()
    except ConfigInvalid as problem:
        return Merged(host, [], [f"everything: the changed file cannot be read ({problem})"])
    on_host = parse(without_credentials(host)[0]).values()  # compared as the sandbox saw it
    remotes = _safe_remotes(on_host, after)
    merged: list[str] = []
    dropped: list[str] = []
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key, []), after.get(key, [])
        if old == new:
            continue
        line = f"{spell(key)} = {_shown(new)}" if new else f"{spell(key)} removed"
        if on_host.get(key, []) not in (old, new):
            dropped.append(line + " (the host changed it too)")
        elif not all(allowed(key, value, remotes=remotes, fresh=fresh) for value in new or old):
            dropped.append(line)
        else:
            host = assign(host, key, new)
            merged.append(line)
    return Merged(host, merged, dropped)


def _safe_remotes(*sources: Values) -> set[str]:
    """The remotes that a branch may follow: a `branch.*.remote` that names none is taken as an address by git."""
    return {
        sub for values in sources for (section, sub, name), urls in values.items()
        if section == "remote" and name == "url" and sub and all(url_is_safe(url) for url in urls)
    }  # fmt: skip


def _shown(values: list[str | None]) -> str:
    text = ", ".join("true" if value is None else value for value in values)
    clean = _CONTROL.sub("?", text.encode("utf-8", "replace").decode())
    return clean if len(clean) <= 200 else clean[:200] + "…"


def assign(text: str, key: Key, values: list[str | None]) -> str:
    """`text` with exactly these values for `key`. Every other character stays, but a header left without entries."""
    parsed = parse(text)
    mine = [entry for entry in parsed.entries if entry.key == key]
    lines = "".join(f"\t{_line(key[2], value)}\n" for value in values)
    if not mine:
        return _append(text, parsed, key, lines) if values else text
    place = mine[0].start
    for entry in reversed(mine):
        ended = text[entry.start : entry.end].endswith("\n")
        opened = (
            entry.start > 0 and text[entry.start - 1] != "\n"
        )  # shares its line with a header: keep the line break
        text = text[: entry.start] + ("\n" if opened and ended else "") + text[entry.end :]
        place = entry.start + (1 if opened and ended else 0)
    if values:
        return text[:place] + ("" if place == 0 or text[place - 1] == "\n" else "\n") + lines + text[place:]
    return _without_empty(text, key)


def _append(text: str, parsed: Parsed, key: Key, lines: str) -> str:
    sections = [header for header in parsed.headers if (header.section, header.subsection) == key[:2]]
    if sections:
        last = sections[-1]
        following = [header.start for header in parsed.headers if header.start > last.start]
        limit = following[0] if following else len(text)
        inside = [entry.end for entry in parsed.entries if last.end <= entry.start < limit]
        at = inside[-1] if inside else min(text.find("\n", last.end) + 1 or len(text), limit)
        return text[:at] + ("" if text[:at].endswith("\n") else "\n") + lines + text[at:]
    subsection = "" if key[1] is None else ' "{}"'.format(key[1].replace("\\", "\\\\").replace('"', '\\"'))
    return text + ("" if not text or text.endswith("\n") else "\n") + f"[{key[0]}{subsection}]\n{lines}"


def _without_empty(text: str, key: Key) -> str:
    """Drop the headers of the key's section that hold neither entries nor comments any more, as git does."""
    parsed = parse(text)
    for index in reversed(range(len(parsed.headers))):
        header = parsed.headers[index]
        following = parsed.headers[index + 1].start if index + 1 < len(parsed.headers) else len(text)
        if (header.section, header.subsection) == key[:2] and not text[header.end : following].strip():
            text = text[: header.start] + text[following:]
    return text


def _line(name: str, value: str | None) -> str:
    if value is None:
        return name
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    if value != value.strip() or any(char in value for char in "#;"):
        escaped = f'"{escaped}"'
    return f"{name} = {escaped}"


# ── going in ───────────────────────────────────────────────────────────────────────────────────────

_USERINFO = re.compile(r"^(https?://)[^/@]*@|^([A-Za-z0-9+.-]+://[^/@:]*):[^/@]*@", re.I)
_SECRET_NAME = re.compile(r"pass|token|secret|cookie|extraheader|sslkey", re.I)


def without_credentials(text: str) -> tuple[str, list[str]]:
    """What a sandbox may read: no authorization headers, no credential helpers, no passwords in addresses.

    A token often stands as the *user* of an http address, so there the whole of it goes.
    """
    hidden: list[str] = []
    for key, values in parse(text).values().items():
        in_name = key[1] is not None and _USERINFO.search(key[1])
        if key[0] == "credential" or in_name or _SECRET_NAME.search(key[2]):
            kept: list[str | None] = []
        else:
            kept = [value if value is None else _bare(value) for value in values]
        if kept != values:
            text = assign(text, key, kept)
            hidden.append(f"{key[0]}.{_bare(key[1])}.{key[2]}" if key[1] is not None else spell(key))
    return text, hidden


def _bare(address: str) -> str:
    return _USERINFO.sub(lambda match: match[1] or match[2] + "@", address)
