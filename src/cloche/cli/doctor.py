"""`doctor`: each primitive, its state, the exact cause and the fix; then the glass that a new sandbox really gets.

The last line is not deduced: a sandbox is made and `true` run in it. Exit code 0 if that was on the namespaces rung or a
stronger one, 1 otherwise.
"""

import argparse
import json
from typing import Any

from cloche import errors
from cloche.cli import client, output, talk

_COLOURS = {"ok": "32", "limited": "33", "missing": "31"}
_STRONG = ("namespaces", "gvisor", "microvm")


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    """Nothing but --json."""


def execute(verb: str, chosen: argparse.Namespace) -> int:
    from cloche.linux import probe

    facts = probe.probe()
    tried = _try()
    works = tried.get("level") in _STRONG
    if chosen.json:
        output.as_json({"facts": [fact._asdict() for fact in facts], "sandbox": tried, "ok": works})
        return 0 if works else 1
    _show(facts)
    _show_sandbox(tried)
    return 0 if works else 1


def _show(facts: Any) -> None:
    width = max(len(fact.name) for fact in facts)
    for fact in facts:
        state = talk.paint(fact.state.ljust(7), _COLOURS.get(fact.state, "0"), 1)
        print(talk.clean(f"{fact.name.ljust(width)}  ") + f"{state}  {talk.clean(fact.detail)}")
        for word, text in (("cause", fact.cause), ("fix", fact.fix)):
            if text:
                print(talk.clean(f"{'':{width}}  {word}: {text}"))


def _try() -> dict[str, Any]:
    """Make a sandbox in an engine of our own and run `true`; what came of it."""
    from cloche.cli import here

    engine = here.Here()
    with client.Client(engine.sock, engine) as server:
        try:
            # The weakest rung is asked for, so that whatever this host can do is shown.
            spec = {"minimum_isolation": "process", "timeout_s": 60}
            info = server.call("create", spec=spec)
            result = server.call("exec", sandbox=info["id"], request={"command": ["true"]})
        except errors.ClocheError as problem:
            return {"error": problem.to_dict()}
    return {
        **info["isolation"],
        "limits": {name: limit["enforcement"] for name, limit in info["limits"].items()},
        "exit_code": result["exit_code"],
    }


def _show_sandbox(tried: dict[str, Any]) -> None:
    print()
    if "error" in tried:
        print(talk.clean(f"a new sandbox cannot be made: {tried['error']['message']}"))
        if tried["error"]["hint"]:
            print(talk.clean(f"fix: {tried['error']['hint']}"))
        return
    held = ", ".join(f"{name.partition('_')[0]} {how}" for name, how in tried["limits"].items())
    print(
        f"a new sandbox gets: {tried['level']} (driver {tried['driver']}), `true` exits with {json.dumps(tried['exit_code'])}"
    )
    print(f"its limits: {held}")
    for what in tried["missing"]:
        print(talk.clean(f"it lacks: {what}"))
