"""What two kept states differ in: layers merged by the overlay's own rules, then compared name by name.

A state is a stack of layers above a root that is the same for both and is not walked: it may be all of /usr. So a merged
state has what was *written*, with whiteouts for what was removed of the root. Whether a name that only one state has was
there before is asked of the root itself, one look each.

Files of the same inode, size and times in two images of one disk are the same (no sandbox sets a change time); others are
told by their content. Standard library and `linux.trees` only: launchers run this.
"""

import copy
import hashlib
import os

from cloche.linux import trees

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Entry = dict[str, Any]

MOST = 100_000  # differences told at once
_TYPES = {"d": "directory", "f": "file", "h": "file", "l": "symlink"}
_SHOWN = ("mode", "uid", "gid", "target")
_CHUNK = 1 << 20


class Node:
    """One name of a merged state."""

    __slots__ = ("children", "content", "entry")

    def __init__(self, entry: "Entry", content: "Callable[[], Iterator[bytes]] | None" = None) -> None:
        self.entry = entry
        self.content = content
        self.children: dict[str, Node] = {}

    def __deepcopy__(self, memo: object) -> "Node":
        """Without recursion: a sandbox chooses how deep its directories are."""
        made = Node(self.entry, self.content)
        left = [(self, made)]
        while left:
            old, new = left.pop()
            for name, child in old.children.items():
                new.children[name] = Node(child.entry, child.content)
                left.append((child, new.children[name]))
        return made

    @property
    def kind(self) -> str:
        return str(self.entry["kind"])


def root() -> Node:
    return Node({"kind": "d", "mode": 0, "uid": 0, "gid": 0})


# --- merging ------------------------------------------------------------------------------------------------


def lay(below: Node, events: "Iterator[tuple[Entry, Callable[[], Iterator[bytes]] | None]]") -> Node:
    """A layer above a state: what both are together."""
    above = copy.deepcopy(below)
    path = [above]
    files: dict[int, Node] = {}
    for entry, content in events:
        if entry["kind"] == "x":
            path.pop()
            continue
        here = path[-1]
        made = Node(entry, content)
        if entry["kind"] == "f" and "file" in entry:
            files[entry["file"]] = made
        elif entry["kind"] == "h":
            made.content = files[entry["file"]].content
        elif entry["kind"] == "d":
            made.children = _kept_children(here.children.get(entry["name"]), entry, below, path)
            path.append(made)
        here.children[entry["name"]] = made
    return above


def _kept_children(
    before: "Node | None", entry: "Entry", below: Node, path: "list[Node]"
) -> "dict[str, Node]":
    """What a directory of the layer shows of what lies below it."""
    redirect = _mark(entry, "redirect")
    if redirect is not None:
        names = redirect.decode("utf-8", "surrogateescape").split("/")
        start = [""] if names[0] == "" else [str(node.entry.get("name", "")) for node in path[1:]]
        moved = _find(below, [name for name in (*start, *names) if name])
        return {} if moved is None else copy.deepcopy(moved).children
    if before is None or before.kind != "d" or _mark(entry, "opaque") == b"y":
        return {}
    return before.children


def _mark(entry: "Entry", name: str) -> "bytes | None":
    for prefix in ("trusted.overlay.", "user.overlay."):
        if prefix + name in entry.get("xattrs", {}):
            return bytes.fromhex(entry["xattrs"][prefix + name])
    return None


def _find(top: Node, names: "list[str]") -> "Node | None":
    here: Node | None = top
    for name in names:
        here = here.children.get(name) if here is not None else None
    return here


# --- where states come from ---------------------------------------------------------------------------------


def of_directory(
    top: int, first_id: int = 0
) -> "Iterator[tuple[Entry, Callable[[], Iterator[bytes]] | None]]":
    """The events of a mounted layer; contents are read when they are asked for, while `top` is open."""
    names: list[str] = []
    for entry, _ in trees.walk(top, first_id):
        if entry["kind"] == "x":
            names.pop()
            yield entry, None
            continue
        place = (*names, entry["name"])
        yield entry, (lambda place=place: _read(top, place)) if entry["kind"] == "f" else None  # type: ignore[misc]
        if entry["kind"] == "d":
            names.append(entry["name"])


def _read(top: int, place: "tuple[str, ...]") -> "Iterator[bytes]":
    here = os.dup(top)
    try:
        for name in place[:-1]:
            here = trees.step(here, name)
        fd = os.open(place[-1], trees.OPEN_FILE, dir_fd=here)
    finally:
        os.close(here)
    try:
        while data := os.read(fd, _CHUNK):
            yield data
    finally:
        os.close(fd)


def of_pack(pack: int, name: str) -> "Iterator[tuple[Entry, Callable[[], Iterator[bytes]] | None]]":
    """The events of one layer (`u0`, `p_tmp`, …) of a pack."""
    depth, inside = 0, False
    for entry, at in trees.read(pack):
        kind = entry["kind"]
        if kind == "x":
            depth -= 1
            if depth == 1:
                inside = False
            if inside:
                yield entry, None
            continue
        if inside:
            content = (lambda entry=entry, at=at: _unpacked(pack, entry, at)) if kind == "f" else None
            yield entry, content
        if kind == "d":
            depth += 1
            if depth == 1:
                chosen = entry["name"] == name
            elif depth == 2:
                inside = chosen


def _unpacked(pack: int, entry: "Entry", at: int) -> "Iterator[bytes]":
    position = 0
    for start, end in entry["data"]:
        yield from _zeros(start - position)
        position = start
        while position < end:
            data = os.pread(pack, min(_CHUNK, end - position), at)
            yield data
            position, at = position + len(data), at + len(data)
    yield from _zeros(entry["size"] - position)


def _zeros(count: int) -> "Iterator[bytes]":
    while count > 0:
        yield bytes(min(count, _CHUNK))
        count -= _CHUNK


# --- comparing ----------------------------------------------------------------------------------------------


def differences(left: Node, right: Node, prefix: str, base: str) -> "Iterator[Entry]":
    """What became of `left` in `right`, by path; `base` is the root that lies below both, as the host sees it."""
    queue = [(prefix.rstrip("/"), base, left, right)]
    while queue:
        place, below, one, other = queue.pop()
        for name in sorted({*one.children, *other.children}, reverse=True):
            before, after = one.children.get(name), other.children.get(name)
            path, under = f"{place}/{name}", f"{below}/{name}" if below else ""
            change = _change(before, after, under)
            if change is not None:
                shown = after if after is not None and change != "removed" else before
                yield _told(change, path, shown)
            empty = root()
            both = [node if node is not None and node.kind == "d" else empty for node in (before, after)]
            if both[0].children or both[1].children:
                queue.append((path, under, both[0], both[1]))


def _change(before: "Node | None", after: "Node | None", under: str) -> "str | None":
    was = _there(before, under)
    now = _there(after, under)
    if was != now:
        return "added" if now else "removed"
    if not now:
        return None
    if before is None or after is None:
        only = before or after
        # One state has it as the root has it. A directory is in a layer for the sake of what is in it.
        return None if only is not None and only.kind == "d" and os.path.isdir(under) else "modified"
    return "modified" if _differ(before, after) else None


def _there(node: "Node | None", under: str) -> bool:
    return node.kind != "w" if node is not None else bool(under) and os.path.lexists(under)


def _differ(before: Node, after: Node) -> bool:
    one, other = before.entry, after.entry
    kinds = {"h": "f"}
    if kinds.get(before.kind, before.kind) != kinds.get(after.kind, after.kind):
        return True
    if any(one.get(field) != other.get(field) for field in _SHOWN):
        return True
    if before.content is None or after.content is None:
        return False
    if one["size"] != other["size"]:
        return True
    if all(one[field] == other[field] for field in ("ino", "mtime", "ctime")):
        return False
    return _digest(before.content()) != _digest(after.content())


def _digest(pieces: "Iterator[bytes]") -> bytes:
    made = hashlib.blake2b()
    for piece in pieces:
        made.update(piece)
    return made.digest()


def _told(change: str, path: str, node: "Node | None") -> "Entry":
    entry = node.entry if node is not None else {}
    kind = _TYPES.get(str(entry.get("kind")), "special")
    if entry.get("kind") == "w":
        kind = "file"  # what was there is not in any layer; nearly always it was one
    return {"kind": change, "path": path, "type": kind, "size": int(entry.get("size", 0))}
