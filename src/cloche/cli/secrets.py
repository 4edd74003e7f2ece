"""`secret ACT`: credentials that sandboxes use and never see.

A value never stands in a command line, where every process of the machine could read it: it comes from standard input, from a
prompt that does not show it, or from a variable that is named.
"""

import argparse
import os
import sys
from binascii import b2a_base64
from typing import Any

from cloche import errors
from cloche.cli import client, output, talk

ACTS = {
    "set": "store a secret, or replace one",
    "list": "the stored secrets, without their values",
    "remove": "forget a secret",
    "rotate-key": "seal all values with a new key",
}
_MOST = 1 << 20


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    add = parser.add_argument
    add("act", metavar="ACT", choices=tuple(ACTS), help=", ".join(ACTS))
    add("name", metavar="NAME", nargs="?", help="set, remove: the secret's name")
    add(
        "--host",
        metavar="HOST",
        action="append",
        default=[],
        help="where it may be sent: host[:port], *.host",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--bearer", action="store_true", help="in the field Authorization (default)")
    how.add_argument("--basic", metavar="USER", help="as the password of USER, in Basic authorization")
    how.add_argument("--header", metavar="FIELD", help="in this header field")
    how.add_argument("--query", metavar="FIELD", help="in this field of the query")
    add("--format", metavar="TEXT", default="", help="with --header: the field's text, {} for the value")
    add("--env", metavar="VAR", default="", help="the variable inside that holds the placeholder")
    add("--file", metavar="PATH", default="", help="the file inside that holds the placeholder")
    add("--body", action="store_true", help="replace the placeholder in request bodies too")
    add("--plain", action="store_true", help="send it over HTTP without TLS too")
    add(
        "--from-env",
        metavar="VAR",
        help="take the value from this variable of yours (default: standard input)",
    )


def execute(verb: str, chosen: argparse.Namespace) -> int:
    needs_name = chosen.act in ("set", "remove")
    if needs_name != (chosen.name is not None):
        said = "needs a name" if needs_name else "takes no name"
        raise errors.error("argument_invalid", f"`cloche secret {chosen.act}` {said}")
    if chosen.act == "set":
        return _set(chosen)
    with client.reach() as server:
        code: int = globals()[f"_{chosen.act.replace('-', '_')}"](server, chosen)
        return code


def _set(chosen: argparse.Namespace) -> int:
    how = next((way for way in ("basic", "header", "query") if getattr(chosen, way) is not None), "bearer")
    secret = {
        "name": chosen.name, "hosts": chosen.host, "how": how, "user": chosen.basic or "",
        "field": chosen.header or chosen.query or "", "format": chosen.format, "env": chosen.env, "file": chosen.file,
        "body": chosen.body, "plain": chosen.plain,
    }  # fmt: skip
    if not chosen.host:
        raise errors.error(
            "secret_invalid",
            "a secret is bound to at least one host",
            hint="say where it may be sent: --host HOST",
        )
    if not chosen.env and not chosen.file:
        raise errors.error(
            "secret_invalid", "the sandbox would not see a placeholder",
            hint="say where it finds one: --env NAME or --file PATH",
        )  # fmt: skip
    value = _value(chosen)
    with client.reach() as server:
        made = server.call("set_secret", secret=secret, value=b2a_base64(value, newline=False).decode())
    if chosen.json:
        output.as_json(made)
    else:
        talk.say(f"stored {talk.clean(made['name'])} for {', '.join(made['hosts'])}")
    return 0


def _value(chosen: argparse.Namespace) -> bytes:
    """The value's bytes, without the line's end that comes with typing and `echo`."""
    if chosen.from_env is not None:
        found = os.environb.get(os.fsencode(chosen.from_env))
        if found is None:
            raise errors.error("environment_invalid", f"the variable {chosen.from_env!r} is not set")
        return found
    if sys.stdin.isatty():
        from getpass import getpass

        return getpass(f"value of {chosen.name}: ").encode("utf-8", "surrogateescape")
    data = sys.stdin.buffer.read(_MOST)
    return data[:-2] if data.endswith(b"\r\n") else data.removesuffix(b"\n")


def _list(server: client.Client, chosen: argparse.Namespace) -> int:
    found = server.call("secrets")
    if chosen.json:
        output.as_json(found)
    elif found:
        output.table(("NAME", "HOSTS", "PLACE", "SEEN AS", "UPDATED"), [_row(entry) for entry in found])
    return 0


def _row(entry: dict[str, Any]) -> tuple[object, ...]:
    place = " ".join(part for part in (entry["how"], entry["field"], entry["user"]) if part)
    seen = " ".join(part for part in (f"${entry['env']}" if entry["env"] else "", entry["file"]) if part)
    return entry["name"], ", ".join(entry["hosts"]), place, seen, output.clock(entry["updated_at"])[:16]


def _remove(server: client.Client, chosen: argparse.Namespace) -> int:
    server.call("remove_secret", name=chosen.name)
    if chosen.json:
        output.as_json({"removed": chosen.name})
    return 0


def _rotate_key(server: client.Client, chosen: argparse.Namespace) -> int:
    count = server.call("rotate_secrets_key")
    if chosen.json:
        output.as_json({"sealed": count})
    else:
        talk.say(
            f"sealed {count} secrets with a new key" if count else "there is a new key, and no secret yet"
        )
    return 0
