"""`snapshot ACT`, `restore`, `fork`, `volume ACT`: files that are kept, and directories that stay."""

import argparse
from typing import Any

from cloche import errors
from cloche.cli import client, output, talk, thin

SNAPSHOT_ACTS = {
    "create": "keep a sandbox's files as they are now",
    "list": "the snapshots there are",
    "info": "one snapshot",
    "diff": "what became of one snapshot's files in another",
    "delete": "remove snapshots",
}
VOLUME_ACTS = {
    "create": "make a volume",
    "list": "the volumes there are",
    "info": "one volume",
    "delete": "remove volumes",
}


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    add = parser.add_argument
    if verb == "restore":
        add("sandbox", metavar="ID", help="its id or name")
        add("snapshot", metavar="SNAPSHOT", help="the snapshot's id or name")
    elif verb == "fork":
        add("sandbox", metavar="ID", help="its id or name")
        add("--count", metavar="N", default="1", help="how many (default: 1)")
    elif verb == "snapshot":
        add("act", metavar="ACT", choices=tuple(SNAPSHOT_ACTS), help=", ".join(SNAPSHOT_ACTS))
        add("names", metavar="NAME", nargs="*", help="create: a sandbox; otherwise snapshots")
        add("--name", metavar="NAME", help="create: a name for it")
        add("--tag", metavar="WORD", action="append", default=[], help="create, list: a word to find it by")
    else:
        add("act", metavar="ACT", choices=tuple(VOLUME_ACTS), help=", ".join(VOLUME_ACTS))
        add("names", metavar="NAME", nargs="*", help="volumes")
        add("--size", metavar="MIB", help="create: its size (default: 1024)")
        add("--label", metavar="K=V", action="append", default=[], help="create: a label to find it by")


def execute(verb: str, chosen: argparse.Namespace) -> int:
    if verb in ("restore", "fork"):
        with client.reach() as server:
            return _restore(server, chosen) if verb == "restore" else _fork(server, chosen)
    _check(verb, chosen)
    with client.reach_keeper() if chosen.act == "create" else client.reach() as server:
        code: int = globals()[f"_{verb}_{chosen.act}"](server, chosen)
        return code


_COUNTS = {"create": (1, 1), "list": (0, 0), "info": (1, 1), "diff": (2, 2), "delete": (1, 1000)}


def _check(verb: str, chosen: argparse.Namespace) -> None:
    least, most = _COUNTS[chosen.act]
    if not least <= len(chosen.names) <= most:
        wants = {(0, 0): "no name", (1, 1): "one name", (2, 2): "two names"}.get((least, most), "a name")
        raise errors.error("argument_invalid", f"`cloche {verb} {chosen.act}` takes {wants}")
    only = {"name": ("create",), "tag": ("create", "list"), "size": ("create",), "label": ("create",)}
    for flag, acts in only.items():
        if getattr(chosen, flag, None) and chosen.act not in acts:
            raise errors.error("argument_invalid", f"--{flag} is for `cloche {verb} {acts[0]}`")


def _tell(chosen: argparse.Namespace, data: Any, text: str) -> int:
    if chosen.json:
        output.as_json(data)
    else:
        print(talk.clean(text), flush=True)
    return 0


# ── sandboxes ──────────────────────────────────────────────────────────────────────────────────────


def _restore(server: client.Client, chosen: argparse.Namespace) -> int:
    info = server.call("restore", sandbox=chosen.sandbox, snapshot=chosen.snapshot)
    return _tell(chosen, info, info["phase"])


def _fork(server: client.Client, chosen: argparse.Namespace) -> int:
    made = server.call("fork", sandbox=chosen.sandbox, count=_number(chosen.count, "--count"))
    return _tell(chosen, made, "\n".join(info["id"] for info in made))


def _number(text: str, what: str) -> int:
    value = thin.number(text)
    if value is None or value != int(value):
        raise errors.error("limit_invalid", f"{what} is {text!r}, which is not a number")
    return int(value)


# ── snapshots ──────────────────────────────────────────────────────────────────────────────────────


def _snapshot_create(server: client.Client, chosen: argparse.Namespace) -> int:
    info = server.call("snapshot", sandbox=chosen.names[0], name=chosen.name, tags=chosen.tag)
    return _tell(chosen, info, info["id"])


def _snapshot_list(server: client.Client, chosen: argparse.Namespace) -> int:
    found = [s for s in server.call("snapshots") if set(chosen.tag) <= set(s["tags"])]
    if chosen.json:
        output.as_json(found)
    elif not found:
        talk.say("no snapshots; `cloche snapshot create ID` makes one")
    else:
        output.table(
            ("ID", "NAME", "SANDBOX", "AGE", "MIB", "FILES", "TAGS"),
            [
                (
                    s["id"],
                    s["name"],
                    s["sandbox"],
                    output.ago(s["created_at"]),
                    round(s["size_bytes"] / (1 << 20), 1),
                    s["files"],
                    ",".join(s["tags"]),
                )
                for s in found
            ],
        )
    return 0


def _snapshot_info(server: client.Client, chosen: argparse.Namespace) -> int:
    info = server.call("snapshot_info", snapshot=chosen.names[0])
    if chosen.json:
        output.as_json(info)
        return 0
    output.fields(
        [
            ("id", info["id"]), ("name", info["name"]), ("sandbox", info["sandbox"]), ("parent", info["parent"]),
            ("created", f"{output.clock(info['created_at'])} ({output.ago(info['created_at'])} ago)"),
            ("size", f"{info['size_bytes'] / (1 << 20):.1f} MiB in {info['files']} files"),
            ("template", info["template"]), ("tags", ", ".join(info["tags"]) or None),
        ]
    )  # fmt: skip
    return 0


def _snapshot_diff(server: client.Client, chosen: argparse.Namespace) -> int:
    found = server.call("diff_snapshots", snapshot=chosen.names[0], other=chosen.names[1])
    if chosen.json:
        output.as_json(found)
        return 0
    for change in found:
        print(talk.clean(f"{change['kind']:<8} {change['path']}"))
    return 0


def _snapshot_delete(server: client.Client, chosen: argparse.Namespace) -> int:
    for name in chosen.names:
        server.call("delete_snapshot", snapshot=name)
    if chosen.json:
        output.as_json({"deleted": chosen.names})
    return 0


# ── volumes ────────────────────────────────────────────────────────────────────────────────────────


def _volume_create(server: client.Client, chosen: argparse.Namespace) -> int:
    labels = {}
    for label in chosen.label:
        key, equals, value = label.partition("=")
        if not equals:
            raise errors.error("argument_invalid", f"the label {label!r} is not K=V")
        labels[key] = value
    spec: dict[str, Any] = {"name": chosen.names[0], "labels": labels}
    if chosen.size is not None:
        spec["size_mib"] = _number(chosen.size, "--size")
    info = server.call("create_volume", spec=spec)
    return _tell(chosen, info, info["spec"]["name"])


def _volume_list(server: client.Client, chosen: argparse.Namespace) -> int:
    found = server.call("volumes")
    if chosen.json:
        output.as_json(found)
    elif not found:
        talk.say("no volumes; `cloche volume create NAME` makes one")
    else:
        output.table(
            ("NAME", "MIB", "USED MIB", "HELD", "IN USE BY"),
            [
                (
                    v["spec"]["name"],
                    v["spec"]["size_mib"],
                    round(v["used_bytes"] / (1 << 20), 1),
                    v["limit"]["enforcement"],
                    ",".join(v["attached"]),
                )
                for v in found
            ],
        )
    return 0


def _volume_info(server: client.Client, chosen: argparse.Namespace) -> int:
    info = server.call("volume", volume=chosen.names[0])
    if chosen.json:
        output.as_json(info)
        return 0
    limit = info["limit"]
    output.fields(
        [
            ("name", info["spec"]["name"]),
            ("created", f"{output.clock(info['created_at'])} ({output.ago(info['created_at'])} ago)"),
            ("size", f"{limit['value']:g} MiB, {limit['enforcement']} by {limit['by']}"),
            ("used", f"{info['used_bytes'] / (1 << 20):.1f} MiB"),
            *(("in use by", f"{s}, {'writing' if w else 'reading'}") for s, w in info["attached"].items()),
            *(("label", f"{key}={value}") for key, value in info["spec"]["labels"].items()),
        ]
    )
    return 0


def _volume_delete(server: client.Client, chosen: argparse.Namespace) -> int:
    for name in chosen.names:
        server.call("delete_volume", volume=name)
    if chosen.json:
        output.as_json({"deleted": chosen.names})
    return 0
