"""`cloche key create|list|rotate|revoke`: who may call the server."""

from __future__ import annotations

import argparse
import os
import time

from cloche import errors, settings
from cloche.cli import output, talk
from cloche.server import keys


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "act",
        metavar="create|list|rotate|revoke",
        choices=("create", "list", "rotate", "revoke"),
        help="what to do",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="the key's name")
    parser.add_argument(
        "--role",
        action="append",
        default=[],
        metavar="ROLE",
        help=f"one of {', '.join(keys.ROLES)} (developer)",
    )
    parser.add_argument("--scope", action="append", default=[], metavar="SCOPE", help="a single scope")
    parser.add_argument("--tenant", default="", metavar="NAME", help="whose sandboxes it sees (all)")
    parser.add_argument("--days", type=float, metavar="N", help="how long it is good for (without end)")
    parser.add_argument(
        "--overlap",
        type=float,
        metavar="SECONDS",
        help="how long the secret before is still good after `rotate` (0)",
    )


def execute(verb: str, chosen: argparse.Namespace) -> int:
    config = settings.load(os.environ)
    settings.make_home(config.home)
    known = keys.Keys(config.home)
    if chosen.act != "list" and not chosen.name:
        raise errors.error("argument_invalid", f"key {chosen.act} needs a name")
    if chosen.overlap is not None and chosen.act != "rotate":
        raise errors.error("argument_invalid", "--overlap belongs to `key rotate`")
    acts = {"create": _create, "list": _list, "rotate": _rotate, "revoke": _revoke}
    return acts[chosen.act](known, chosen)


def _create(known: keys.Keys, chosen: argparse.Namespace) -> int:
    from cloche.server.http.operations import SCOPES

    for scope in chosen.scope:
        if scope not in SCOPES:
            raise errors.error(
                "argument_invalid", f"there is no scope {scope!r}", hint=errors.nearest(scope, SCOPES)
            )
    roles = tuple(chosen.role) or (() if chosen.scope else ("developer",))
    lifetime_s = None if chosen.days is None else chosen.days * 86400
    scopes = keys.scopes_of(roles, tuple(chosen.scope))
    _record("key_made", chosen.name, f"scopes {' '.join(scopes)}; tenant {chosen.tenant or '-'}")
    secret = known.create(chosen.name, scopes, tenant=chosen.tenant, lifetime_s=lifetime_s)
    if chosen.json:
        output.as_json({"name": chosen.name, "key": secret, "scopes": scopes, "tenant": chosen.tenant})
        return 0
    print(secret)
    talk.say("this is shown once; only a hash is kept")
    return 0


def _list(known: keys.Keys, chosen: argparse.Namespace) -> int:
    found = known.list()
    if chosen.json:
        output.as_json([{**_shown(key), "last_used_at": known.last_used(key.name)} for key in found])
        return 0
    rows = [
        (
            key.name,
            key.prefix + "…",
            key.tenant or "-",
            ",".join(key.scopes),
            _day(key.expires_at, "-"),
            _day(known.last_used(key.name), "never"),
        )
        for key in found
    ]
    output.table(("NAME", "KEY", "TENANT", "SCOPES", "EXPIRES", "LAST USED"), rows)
    return 0


def _shown(key: keys.Key) -> dict[str, object]:
    hidden = ("hash", "former")
    return {name: getattr(key, name) for name in key.__struct_fields__ if name not in hidden}


def _day(moment: float | None, otherwise: str) -> str:
    return otherwise if moment is None else time.strftime("%Y-%m-%d", time.gmtime(moment))


def _rotate(known: keys.Keys, chosen: argparse.Namespace) -> int:
    overlap_s = chosen.overlap or 0.0
    _record("key_rotated", chosen.name, f"the secret before is good for {overlap_s:g} s")
    secret = known.rotate(chosen.name, overlap_s=overlap_s)
    known.keep_secret(chosen.name, secret)
    if chosen.json:
        output.as_json({"name": chosen.name, "key": secret, "overlap_s": overlap_s})
        return 0
    print(secret)
    talk.say("this is shown once; only a hash is kept")
    return 0


def _revoke(known: keys.Keys, chosen: argparse.Namespace) -> int:
    _record("key_revoked", chosen.name)
    known.revoke(chosen.name)
    if chosen.json:
        output.as_json({"revoked": chosen.name})
    else:
        talk.say(f"the key {chosen.name} is no longer accepted")
    return 0


def _record(operation: str, name: str, detail: str = "") -> None:
    """Before it is done, so that nothing is done without."""
    from cloche import events, wiring

    event = events.Administered(
        sandbox=None,
        time=time.time(),
        actor=f"uid:{os.getuid()}",
        operation=operation,
        target=name,
        detail=detail,
    )
    if problem := wiring.record(os.environ, event):
        talk.warning(problem)
