"""The configuration files of the agents that start us, and how an entry gets in and out of them.

A file is the user's: it is changed by inserting or cutting text, so comments, order and spelling of the rest stay as they are. The new text
is then parsed, and must say what the old one did but for our entry; otherwise nothing is written (a TOML table that is written inline, say).
An entry of our name that says something else is never overwritten.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

from cloche import errors

NAME = "cloche"


class Client(NamedTuple):
    """Where a client's file is (for the user, in a project), which table names servers, and what an entry says beside the command."""

    user: str
    project: str
    table: str
    more: tuple[tuple[str, str], ...] = ()
    home: str = ""
    """The variable that moves the user's file, with what stands for it in `user`."""

    @property
    def toml(self) -> bool:
        return self.user.endswith(".toml")


CLIENTS: dict[str, Client] = {
    "claude-code": Client("~/.claude.json", ".mcp.json", "mcpServers", (("type", "stdio"),)),
    "codex": Client("~/.codex/config.toml", ".codex/config.toml", "mcp_servers", home="CODEX_HOME=~/.codex"),
    "gemini": Client("~/.gemini/settings.json", ".gemini/settings.json", "mcpServers"),
    "cursor": Client("~/.cursor/mcp.json", ".cursor/mcp.json", "mcpServers"),
    "vscode": Client(
        "~/.config/Code/User/mcp.json", ".vscode/mcp.json", "servers", (("type", "stdio"),),
        home="XDG_CONFIG_HOME=~/.config",
    ),
}  # fmt: skip


def path_of(client: Client, environment: Mapping[str, str], project: str | None) -> str:
    """The file to change; behind a link, the file that it leads to."""
    if project is not None:
        return os.path.realpath(os.path.join(project, client.project))
    variable, _, stands_for = client.home.partition("=")
    path = client.user
    if variable and environment.get(variable):
        path = path.replace(stands_for, environment[variable], 1)
    home = environment.get("HOME") or os.path.expanduser("~")
    return os.path.realpath(path.replace("~", home, 1) if path.startswith("~") else path)


def entry(client: Client, command: list[str]) -> dict[str, Any]:
    return {**dict(client.more), "command": command[0], "args": command[1:]}


def read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError:
        raise errors.error("settings_invalid", f"{path} is not UTF-8") from None


def install(client: Client, text: str, wanted: dict[str, Any], path: str) -> str:
    """The text with our entry; the same text if it is there already."""
    now = _parse(client, text, path)
    found = _table(now, client, path).get(NAME)
    if found == wanted:
        return text
    if found is not None:
        raise errors.error(
            "name_conflict",
            f"{path} has an entry {NAME!r} that says something else",
            hint="look at it, and remove it first: --uninstall",
        )
    new = _append_table(text, client, wanted) if client.toml else _insert(text, client.table, wanted)
    expected = {**now, client.table: {**now.get(client.table, {}), NAME: wanted}}
    return _checked(client, new, expected, path)


def uninstall(client: Client, text: str, path: str) -> str:
    """The text without our entry, whatever that says."""
    now = _parse(client, text, path)
    servers = _table(now, client, path)
    if NAME not in servers:
        return text
    new = _cut_table(text, client) if client.toml else _cut(text, client.table)
    rest = {name: value for name, value in servers.items() if name != NAME}
    expected = {**now, client.table: rest}
    if client.toml and not rest:
        del expected[client.table]
    return _checked(client, new, expected, path)


def write(path: str, text: str) -> None:
    """Replace a file at once; who reads it sees the old one or the new one."""
    directory = os.path.dirname(path)
    os.makedirs(directory, exist_ok=True)
    mode = os.stat(path).st_mode & 0o777 if os.path.exists(path) else 0o600
    fd, made = tempfile.mkstemp(dir=directory, prefix=".cloche-")
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(made, mode)
        os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise


def _checked(client: Client, new: str, expected: dict[str, Any], path: str) -> str:
    if _parse(client, new, path) != expected:
        raise errors.error(
            "settings_invalid",
            f"{path} is written in a way that this command cannot change without touching the rest",
            hint=f"change {client.table}.{NAME} by hand; docs/guides/mcp.md says what belongs there",
        )
    return new


def _table(data: dict[str, Any], client: Client, path: str) -> dict[str, Any]:
    found = data.get(client.table, {})
    if not isinstance(found, dict):
        raise errors.error("settings_invalid", f"{path}: {client.table} is not a table")
    return found


def _parse(client: Client, text: str, path: str) -> dict[str, Any]:
    try:
        if client.toml:
            return tomllib.loads(text)
        return _Reader(text).document().plain() if text.strip() else {}
    except (tomllib.TOMLDecodeError, _Unreadable) as problem:
        raise errors.error(
            "settings_invalid",
            f"{path} cannot be read: {problem}",
            hint="correct it first; nothing was changed",
        ) from None


# ── TOML ───────────────────────────────────────────────────────────────────────────────────────────


def _append_table(text: str, client: Client, wanted: dict[str, Any]) -> str:
    # Strings and arrays of them are spelled alike in JSON and TOML.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in wanted.items()]
    before = text if not text or text.endswith("\n") else text + "\n"
    return before + ("\n" if before else "") + f"[{client.table}.{NAME}]\n" + "\n".join(lines) + "\n"


def _cut_table(text: str, client: Client) -> str:
    """Without the lines from our header to the next; tables below ours go with it."""
    ours = re.compile(rf'\s*\[\s*{client.table}\s*\.\s*"?{NAME}"?\s*(\.[^\]]*)?\]')
    kept: list[str] = []
    cutting = False
    for line in text.splitlines(keepends=True):
        if re.match(r"\s*\[", line):
            if ours.match(line):
                cutting = True
                if kept and not kept[-1].strip():
                    kept.pop()  # the empty line that parted it from what stands before
            elif not re.match(r"\s*\[[^\]]*,", line):
                cutting = False
        if not cutting:
            kept.append(line)
    return "".join(kept)


# ── JSON, with comments and trailing commas as editors allow them ──────────────────────────────────


class _Unreadable(Exception):
    pass


class _Member(NamedTuple):
    key: str
    start: int
    """Where the key begins."""
    node: _Node


class _Node(NamedTuple):
    start: int
    end: int
    value: Any
    members: list[_Member] | None = None
    """Of an object."""

    def plain(self) -> Any:
        if self.members is not None:
            return {member.key: member.node.plain() for member in self.members}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value

    def member(self, key: str) -> _Member | None:
        return next((member for member in self.members or () if member.key == key), None)


class _Reader:
    """A document, with the places where its parts stand."""

    _SPACE = re.compile(r"(?:[ \t\r\n\ufeff]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
    _SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
    _DEEPEST = 200

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._strings = json.JSONDecoder(strict=False)

    def document(self) -> _Node:
        node = self._value(0)
        self._space()
        if self._at != len(self._text):
            raise self._wrong("something follows its end")
        if node.members is None:
            raise self._wrong("it is not an object")
        return node

    def _value(self, depth: int) -> _Node:
        self._space()
        start, sign = self._at, self._text[self._at : self._at + 1]
        if depth > self._DEEPEST:
            raise self._wrong("it is nested too deeply")
        if sign == "{":
            return self._object(start, depth)
        if sign == "[":
            self._at += 1
            items: list[_Node] = []
            while not self._ends("]"):
                items.append(self._value(depth + 1))
                self._comma("]")
            return _Node(start, self._at, items)
        if sign == '"':
            return _Node(start, self._end_of_string(), json.loads(self._text[start : self._at], strict=False))
        found = self._SCALAR.match(self._text, start)
        if found is None:
            raise self._wrong("a value is missing")
        self._at = found.end()
        return _Node(start, self._at, json.loads(found.group()))

    def _object(self, start: int, depth: int) -> _Node:
        self._at += 1
        members: list[_Member] = []
        while not self._ends("}"):
            begin = self._at
            if self._text[begin : begin + 1] != '"':
                raise self._wrong("a key is missing")
            key = json.loads(self._text[begin : self._end_of_string()], strict=False)
            self._space()
            if self._text[self._at : self._at + 1] != ":":
                raise self._wrong("a colon is missing")
            self._at += 1
            members.append(_Member(key, begin, self._value(depth + 1)))
            self._comma("}")
        return _Node(start, self._at, None, members)

    def _end_of_string(self) -> int:
        try:
            _, self._at = self._strings.raw_decode(self._text, self._at)
        except json.JSONDecodeError:
            raise self._wrong("a string does not end") from None
        return self._at

    def _ends(self, sign: str) -> bool:
        self._space()
        if self._text[self._at : self._at + 1] != sign:
            return False
        self._at += 1
        return True

    def _comma(self, closing: str) -> None:
        self._space()
        sign = self._text[self._at : self._at + 1]
        if sign == ",":
            self._at += 1
        elif sign != closing:
            raise self._wrong("a comma is missing")

    def _space(self) -> None:
        found = self._SPACE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _wrong(self, words: str) -> _Unreadable:
        return _Unreadable(f"line {self._text.count(chr(10), 0, self._at) + 1}: {words}")


def _insert(text: str, table: str, wanted: dict[str, Any]) -> str:
    if not text.strip():
        return json.dumps({table: {NAME: wanted}}, indent=2, ensure_ascii=False) + "\n"
    root = _Reader(text).document()
    unit = _indent_unit(text, root)
    servers = root.member(table)
    if servers is None:
        return _add(text, root, table, {NAME: wanted}, unit)
    return _add(text, servers.node, NAME, wanted, unit)


def _indent_unit(text: str, root: _Node) -> str:
    for member in root.members or ():
        line = text[text.rfind("\n", 0, member.start) + 1 : member.start]
        if line and not line.strip():
            return line
    return "  "


def _add(text: str, node: _Node, key: str, value: Any, unit: str) -> str:
    """One more member, after the last."""
    margin = re.match(r"[ \t]*", text[text.rfind("\n", 0, node.start) + 1 :])
    outer = margin.group() if margin else ""
    said = json.dumps(value, indent=unit, ensure_ascii=False).replace("\n", "\n" + outer + unit)
    member = f"\n{outer}{unit}{json.dumps(key)}: {said}"
    if not node.members:
        body = text[node.start + 1 : node.end - 1]
        return f"{text[: node.start + 1]}{body.rstrip()}{member}\n{outer}{text[node.end - 1 :]}"
    last = node.members[-1].node.end
    comma = re.match(_Reader._SPACE.pattern + ",", text[last : node.end - 1], re.DOTALL)
    place = last + comma.end() if comma is not None else last
    said_after = re.match(r"(?:[ \t]+|//[^\n]*|/\*[^\n]*?\*/)*(?=\r?\n)", text[place : node.end - 1])
    if said_after is not None:  # comments on the line of the last one are about it
        place += said_after.end()
    if comma is not None:  # a trailing comma: ours gets one too
        return f"{text[:place]}{member},{text[place:]}"
    tail = text[place:] if said_after is not None else f"\n{outer}{text[place:].lstrip()}"
    return f"{text[:last]},{text[last:place]}{member}{tail}"


def _cut(text: str, table: str) -> str:
    servers = _Reader(text).document().member(table)
    assert servers is not None
    assert servers.node.members is not None
    members = servers.node.members
    index = next(place for place, member in enumerate(members) if member.key == NAME)
    start, end = members[index].start, members[index].node.end
    comma = re.match(_Reader._SPACE.pattern + ",", text[end:], re.DOTALL)
    if comma is not None:
        end += comma.end()
    elif index > 0:  # the last one: the comma before it goes
        begin = members[index - 1].node.end
        found = re.match("(" + _Reader._SPACE.pattern + "),", text[begin:], re.DOTALL)
        assert found is not None
        place = begin + found.end() - 1
        text = text[:place] + text[place + 1 :]
        start, end = start - 1, end - 1
    begin = len(text[:start].rstrip(" \t"))
    if begin and text[begin - 1] == "\n" and text[end : end + 1] == "\n":
        end += 1  # the whole line
        return text[:begin] + text[end:]
    return text[:start] + text[end:]
