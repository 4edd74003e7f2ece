"""`files ACT ID PATH`: a sandbox's files, touched as its user."""

import argparse
import json
import stat
import sys
from binascii import a2b_base64, b2a_base64
from typing import Any

from cloche import errors
from cloche.cli import client, output, talk, thin

ACTS = {
    "ls": "a directory's entries",
    "cat": "a file's content",
    "write": "write a file from standard input",
    "rm": "remove a file or, with --recursive, a tree",
    "mkdir": "make a directory and its parents",
    "mv": "move or rename",
    "stat": "one entry",
    "watch": "changes beneath a directory, as they happen",
}


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("act", metavar="ACT", choices=tuple(ACTS), help=", ".join(ACTS))
    parser.add_argument("sandbox", metavar="ID", help="its id or name")
    parser.add_argument(
        "path", metavar="PATH", nargs="?", default=".", help="relative ones mean the working directory"
    )
    parser.add_argument("target", metavar="TARGET", nargs="?", help="where to, for mv")
    parser.add_argument("--recursive", action="store_true", help="rm, watch: the whole tree")
    parser.add_argument("--depth", metavar="N", type=int, default=1, help="ls: levels (default: 1)")
    parser.add_argument("--mode", metavar="OCTAL", help="write: permissions, as in 755")
    parser.add_argument(
        "--user", metavar="NAME", default="user", choices=("user", "root"), help="as whom (default: user)"
    )


def execute(verb: str, chosen: argparse.Namespace) -> int:
    if chosen.act in ("cat", "write", "rm", "mkdir", "mv") and chosen.path == ".":
        raise errors.error("path_invalid", f"`cloche files {chosen.act}` needs a path")
    if (chosen.act == "mv") != (chosen.target is not None):
        raise errors.error("argument_invalid", "`mv` takes a path and a target, and only it does")
    with client.reach() as server:
        code: int = globals()[f"_{chosen.act}"](server, chosen)
        return code


def _where(chosen: argparse.Namespace) -> dict[str, Any]:
    return {"sandbox": chosen.sandbox, "path": chosen.path, "user": chosen.user}


def _done(chosen: argparse.Namespace, **data: Any) -> int:
    if chosen.json:
        output.as_json({"path": chosen.path, **data})
    return 0


def _ls(server: client.Client, chosen: argparse.Namespace) -> int:
    found = server.call("list_files", **_where(chosen), depth=chosen.depth)
    if chosen.json:
        output.as_json(found)
    elif found:
        output.table(
            ("MODE", "OWNER", "SIZE", "MODIFIED", "NAME"), [_row(entry, chosen.depth > 1) for entry in found]
        )
    return 0


def _row(entry: dict[str, Any], whole: bool) -> tuple[object, ...]:
    name = entry["path"] if whole else entry["name"]
    name += "/" if entry["type"] == "directory" else f" -> {entry['target']}" if entry["target"] else ""
    kind = {"directory": stat.S_IFDIR, "symlink": stat.S_IFLNK, "file": stat.S_IFREG}.get(entry["type"], 0)
    mode = stat.filemode(kind | stat.S_IMODE(entry["mode"]))
    return mode, entry["owner"], entry["size"], output.clock(entry["modified_at"])[:16], name


def _cat(server: client.Client, chosen: argparse.Namespace) -> int:
    if chosen.json:
        raw = server.call("read_file", **_where(chosen))
        output.as_json({"path": chosen.path, **_content(raw)})
        return 0
    for data in server.stream("read_file_stream", **_where(chosen)):
        if not thin.write_all(1, a2b_base64(data)):
            return 141
    return 0


def _content(encoded: str) -> dict[str, str]:
    try:
        return {"text": a2b_base64(encoded).decode()}
    except UnicodeDecodeError:
        return {"base64": encoded}


def _write(server: client.Client, chosen: argparse.Namespace) -> int:
    mode = None
    if chosen.mode is not None:
        try:
            mode = int(chosen.mode, 8)
        except ValueError:
            raise errors.error(
                "argument_invalid", f"--mode is {chosen.mode!r}, which is not octal, as in 755"
            ) from None
    data = sys.stdin.buffer.read()
    info = server.call(
        "write_file", **_where(chosen), data=b2a_base64(data, newline=False).decode(), mode=mode
    )
    if chosen.json:
        output.as_json(info)
    return 0


def _rm(server: client.Client, chosen: argparse.Namespace) -> int:
    server.call("remove_file", **_where(chosen), recursive=chosen.recursive)
    return _done(chosen)


def _mkdir(server: client.Client, chosen: argparse.Namespace) -> int:
    return _done(chosen, made=server.call("make_dir", **_where(chosen)))


def _mv(server: client.Client, chosen: argparse.Namespace) -> int:
    server.call("move_file", **_where(chosen), target=chosen.target)
    return _done(chosen, target=chosen.target)


def _stat(server: client.Client, chosen: argparse.Namespace) -> int:
    info = server.call("stat_file", **_where(chosen))
    if chosen.json:
        output.as_json(info)
    else:
        output.fields(
            [
                ("path", info["path"]), ("type", info["type"]), ("target", info["target"]), ("size", info["size"]),
                ("mode", f"{stat.S_IMODE(info['mode']):04o}"), ("owner", f"{info['owner']}:{info['group']}"),
                ("modified", output.clock(info["modified_at"])),
            ]
        )  # fmt: skip
    return 0


def _watch(server: client.Client, chosen: argparse.Namespace) -> int:
    for event in server.stream("watch_files", **_where(chosen), recursive=chosen.recursive):
        if chosen.json:
            print(json.dumps(event), flush=True)
        else:
            print(talk.clean(f"{event['type']:<8} {event['path']}"), flush=True)
    return 0
