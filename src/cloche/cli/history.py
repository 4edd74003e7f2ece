"""`logs` and `events`: what was written, and what happened."""

import argparse
import json
from binascii import a2b_base64
from typing import Any

from cloche import errors
from cloche.cli import client, output, talk, thin

_COMMON = ("seq", "kind", "time", "sandbox")


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    if verb == "logs":
        parser.add_argument("sandbox", metavar="ID", help="its id or name")
        parser.add_argument("execution", metavar="EXEC", nargs="?", help="which command (default: the last)")
        parser.add_argument("--list", action="store_true", help="the commands, instead of what one wrote")
    else:
        parser.add_argument("sandbox", metavar="ID", nargs="?", help="only this sandbox's")
        parser.add_argument("--limit", metavar="N", type=int, default=1000, help="at most N (default: 1000)")
    parser.add_argument("--follow", action="store_true", help="go on until it ends")
    parser.add_argument("--after", metavar="N", type=int, default=0, help="from cursor N on")


def execute(verb: str, chosen: argparse.Namespace) -> int:
    with client.reach() as server:
        if verb == "events":
            return _events(server, chosen)
        if chosen.list:
            return _commands(server, chosen)
        return _logs(server, chosen)


def _logs(server: client.Client, chosen: argparse.Namespace) -> int:
    execution = chosen.execution or _last(server, chosen.sandbox)
    for event in server.stream(
        "attach", sandbox=chosen.sandbox, execution=execution, after=chosen.after, wait=chosen.follow
    ):
        if chosen.json:
            print(json.dumps(_plain(event)), flush=True)
        elif event["type"] == "output":
            if not thin.write_all(1 if event["stream"] == "stdout" else 2, a2b_base64(event["data"])):
                return 141
        elif event["type"] == "truncated":
            talk.say(f"{event['skipped']} bytes of {event['stream']} are not kept")
    return 0


def _last(server: client.Client, sandbox: str) -> str:
    known = server.call("executions", sandbox=sandbox)
    if not known:
        raise errors.error("execution_not_found", f"sandbox {sandbox} has run no command yet")
    found: str = known[-1]["id"]
    return found


def _plain(event: dict[str, Any]) -> dict[str, Any]:
    """A stream's event as one line: text where it is text."""
    if event["type"] == "output":
        raw = a2b_base64(event.pop("data"))
        return {**event, "text": raw.decode(errors="replace")}
    if event["type"] == "exited":
        result = event["result"]
        return {**event, "result": {k: v for k, v in result.items() if not k.endswith("_bytes")}}
    return event


def _commands(server: client.Client, chosen: argparse.Namespace) -> int:
    known = server.call("executions", sandbox=chosen.sandbox)
    if chosen.json:
        output.as_json(known)
        return 0
    output.table(
        ("EXEC", "STATE", "AGE", "COMMAND"),
        [(e["id"], _state(e), output.ago(e["started_at"]), e["command"]) for e in known],
    )
    return 0


def _state(execution: dict[str, Any]) -> str:
    if execution["running"]:
        return "running"
    if execution["signal"] is not None:
        return f"signal {execution['signal']}"
    return f"exit {execution['exit_code']}"


def _events(server: client.Client, chosen: argparse.Namespace) -> int:
    if chosen.sandbox is not None:
        chosen.sandbox = _id_of(server, chosen.sandbox)
    if chosen.follow:
        for event in server.stream("follow_events", after=chosen.after, sandbox=chosen.sandbox):
            _print_event(event, chosen.json)
        return 0
    for event in server.call("events", after=chosen.after, sandbox=chosen.sandbox, limit=chosen.limit):
        _print_event(event, chosen.json)
    return 0


def _id_of(server: client.Client, sandbox: str) -> str:
    """Events know ids only, and those of sandboxes that have ended as well."""
    try:
        found: str = server.call("info", sandbox=sandbox)["id"]
    except (errors.NotFound, errors.SandboxLost):
        return sandbox
    return found


def _print_event(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(event), flush=True)
        return
    facts = {**event.get("data", {}), **{k: v for k, v in event.items() if k not in (*_COMMON, "data")}}
    words = " ".join(
        f"{k}={_short(v)}"
        for k, v in facts.items()
        if v not in (None, False, "", [], {}) and k not in _COMMON
    )
    head = f"{event['seq']:>6}  {output.clock(event['time'])}  {event['kind']:<10} {event['sandbox'] or '-'}"
    print(talk.clean(f"{head}  {words}"), flush=True)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:59] + "…"
