"""`create`, `list`, `info`, `delete`, `extend`, `suspend`, `resume`, `usage`, `token`, `diff`, `apply`: sandboxes that stay."""

import argparse
from typing import Any

from cloche import errors
from cloche.cli import client, output, running, talk, thin

_UNITS = {"memory_mib": "MiB", "disk_mib": "MiB", "cpus": "", "pids": ""}


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    if verb == "create":
        running.spec_flags(parser)
        parser.add_argument(
            "--env", metavar="K[=V]", action="append", default=[], help="a variable for every command"
        )
        parser.add_argument("--timeout", metavar="S", help="seconds it lives, or `none` (default: 300)")
        parser.add_argument("--idle-timeout", metavar="S", help="seconds without use after which it ends")
        parser.add_argument(
            "--label", metavar="K=V", action="append", default=[], help="a label to find it by"
        )
    elif verb == "delete":
        parser.add_argument("sandboxes", metavar="ID", nargs="*", help="ids or names")
        parser.add_argument("--all", action="store_true", help="every live sandbox")
    elif verb == "usage":
        parser.add_argument("sandboxes", metavar="ID", nargs="*", help="ids or names (default: all)")
    elif verb != "list":
        parser.add_argument("sandbox", metavar="ID", help="its id or name")
    if verb == "create":
        parser.add_argument("--pause-after", metavar="S", help="seconds without use after which it is paused")
        parser.add_argument(
            "--archive-after", metavar="S", help="seconds without use after which it is archived"
        )
        parser.add_argument(
            "--at-timeout",
            metavar="WHAT",
            choices=("delete", "pause", "archive"),
            help="what the end of its time does: delete (default), pause or archive",
        )
    if verb == "suspend":
        parser.add_argument(
            "--mode",
            metavar="MODE",
            default="pause",
            help="pause (default; memory stays), archive (files only) or hibernate",
        )
    if verb == "token":
        parser.add_argument(
            "--scope",
            metavar="SCOPE",
            action="append",
            default=[],
            help="what it is good for: sandboxes, exec, files, ports, events (exec and files)",
        )
        parser.add_argument(
            "--ttl", metavar="SECONDS", type=float, default=900, help="how long it is good for (900)"
        )
    if verb == "extend":
        parser.add_argument("timeout", metavar="S", help="seconds from now, or `none` for no end")
    if verb == "apply":
        parser.add_argument("paths", metavar="PATH", nargs="*", help="only these (default: everything)")


def execute(verb: str, chosen: argparse.Namespace) -> int:
    if verb == "create":
        return _create(chosen)
    with client.reach() as server:
        code: int = globals()[f"_{verb}"](server, chosen)
        return code


def _create(chosen: argparse.Namespace) -> int:
    spec = _spec(chosen)
    with client.reach_keeper() as server:
        info = server.call("create", spec=spec)
    _tell(chosen, info, info["id"])
    return 0


def _spec(chosen: argparse.Namespace) -> dict[str, Any]:
    """A whole spec: unlike `run`'s, it does not pass through the keeper's own defaults."""
    import msgspec

    from cloche import rpc, settings

    lives = {"timeout_s": chosen.timeout, "idle_timeout_s": chosen.idle_timeout}
    labels = dict(_pair(label) for label in chosen.label)
    options = running.options_from(argparse.Namespace(**{**vars(chosen), "timeout": None}))
    thin.complete(options)
    said = {
        **options.spec,
        "resources": options.resources,
        "env": options.request["env"],
        "labels": labels,
        "stay": True,
    }
    for field, text in lives.items():
        if text is not None:
            said[field] = seconds(text, "--" + field.removesuffix("_s").replace("_", "-"))
    rungs = {"pause_after_s": chosen.pause_after, "archive_after_s": chosen.archive_after}
    ladder: dict[str, Any] = {
        field: seconds(text, "--" + field.removesuffix("_s").replace("_", "-"))
        for field, text in rungs.items()
        if text is not None
    }
    if chosen.at_timeout is not None:
        ladder["at_timeout"] = chosen.at_timeout
    if ladder:
        said["ladder"] = ladder
    import os

    spec = rpc.complete(said, settings.load(os.environ).defaults)
    spec.check()
    made: dict[str, Any] = msgspec.to_builtins(spec)
    return made


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise errors.error("argument_invalid", f"the label {text!r} is not K=V")
    return key, value


def seconds(text: str, what: str) -> float | None:
    if text == "none":
        return None
    value = thin.number(text)
    if value is None or value <= 0:
        raise errors.error(
            "limit_invalid", f"{what} is {text!r}; it is a number of seconds above 0, or `none`"
        )
    return value


def _tell(chosen: argparse.Namespace, data: Any, text: str) -> None:
    if chosen.json:
        output.as_json(data)
    else:
        print(text, flush=True)


def _list(server: client.Client, chosen: argparse.Namespace) -> int:
    found = server.call("list")
    if chosen.json:
        output.as_json(found)
        return 0
    if not found:
        talk.say("no sandboxes; `cloche create` makes one")
        return 0
    output.table(
        ("ID", "NAME", "PHASE", "PROFILE", "AGE", "ENDS IN", "RUNS"),
        [
            (
                s["id"],
                s["name"],
                s["phase"],
                s["profile"],
                output.ago(s["created_at"]),
                output.until(s["expires_at"]),
                s["executions"],
            )
            for s in found
        ],
    )
    return 0


def _info(server: client.Client, chosen: argparse.Namespace) -> int:
    info = server.call("info", sandbox=chosen.sandbox)
    if chosen.json:
        output.as_json(info)
        return 0
    isolation = info["isolation"]
    output.fields(
        [
            ("id", info["id"]), ("name", info["name"]), ("phase", info["phase"]), ("template", info["template"]),
            ("profile", info["profile"]), ("created", f"{output.clock(info['created_at'])} ({output.ago(info['created_at'])} ago)"),
            ("ends in", output.until(info["expires_at"])), ("commands", info["executions"]), ("server", info["server"]),
            ("isolation", f"{isolation['level']} by {isolation['driver']}"),
            ("root", f"{isolation['root']}, network {isolation['network']}"),
            ("filters", f"seccomp {'on' if isolation['seccomp'] else 'off'}, Landlock ABI {isolation['landlock_abi']}"),
            *((f"limit {name.partition('_')[0]}", _limit(name, limit)) for name, limit in info["limits"].items()),
            *(("label", f"{key}={value}") for key, value in info["labels"].items()),
            *(("shown", path) for path in info["shown"]),
            *(("missing", what) for what in isolation["missing"]),
            *(("warning", what) for what in info["warnings"]),
        ]
    )  # fmt: skip
    return 0


def _limit(name: str, limit: dict[str, Any]) -> str:
    return f"{limit['value']:g} {_UNITS.get(name, '')}".strip() + f", {limit['enforcement']} by {limit['by']}"


def _delete(server: client.Client, chosen: argparse.Namespace) -> int:
    wanted = [s["id"] for s in server.call("list")] if chosen.all else chosen.sandboxes
    if not wanted and not chosen.all:
        raise errors.error(
            "argument_invalid", "which sandbox?", hint="cloche delete ID, or cloche delete --all"
        )
    for sandbox in wanted:
        server.call("delete", sandbox=sandbox)
    if chosen.json:
        output.as_json({"deleted": wanted})
    return 0


def _extend(server: client.Client, chosen: argparse.Namespace) -> int:
    info = server.call("extend", sandbox=chosen.sandbox, timeout_s=seconds(chosen.timeout, "the time"))
    _tell(chosen, info, f"ends in {output.until(info['expires_at'])}")
    return 0


def _suspend(server: client.Client, chosen: argparse.Namespace) -> int:
    info = server.call("suspend", sandbox=chosen.sandbox, mode=chosen.mode)
    _tell(chosen, info, info["phase"])
    return 0


def _resume(server: client.Client, chosen: argparse.Namespace) -> int:
    info = server.call("resume", sandbox=chosen.sandbox)
    _tell(chosen, info, info["phase"])
    return 0


def _token(server: client.Client, chosen: argparse.Namespace) -> int:
    scopes = chosen.scope or ["exec", "files"]
    made = server.call("create_token", sandbox=chosen.sandbox, scopes=scopes, ttl_s=chosen.ttl)
    if chosen.json:
        output.as_json(made)
        return 0
    print(made["token"])
    talk.say("whoever has it may use it; it ends with its time, the sandbox, or the key that made it")
    return 0


def _usage(server: client.Client, chosen: argparse.Namespace) -> int:
    wanted = chosen.sandboxes or [s["id"] for s in server.call("list")]
    found = {sandbox: server.call("usage", sandbox=sandbox) for sandbox in wanted}
    if chosen.json:
        output.as_json(found)
        return 0
    if not found:
        talk.say("no sandboxes; `cloche create` makes one")
        return 0
    output.table(
        ("ID", "MEMORY MiB", "PEAK MiB", "CPU s", "PIDS", "OOM KILLS"),
        [
            (sandbox, u["memory_mib"], u["memory_peak_mib"], u["cpu_ms"] / 1000, u["pids"], u["oom_kills"])
            for sandbox, u in found.items()
        ],
    )
    return 0


def _diff(server: client.Client, chosen: argparse.Namespace) -> int:
    found = server.call("diff", sandbox=chosen.sandbox)
    if chosen.json:
        output.as_json(found)
        return 0
    for change in found:
        refused = f"  (not applied: {change['refused']})" if change["refused"] else ""
        print(talk.clean(f"{change['kind']:<8} {change['path']}{refused}"))
    return 0


def _apply(server: client.Client, chosen: argparse.Namespace) -> int:
    taken = server.call("apply", sandbox=chosen.sandbox, paths=chosen.paths or None)
    if chosen.json:
        output.as_json({"applied": taken})
        return 0
    for path in taken:
        print(talk.clean(path))
    return 0
