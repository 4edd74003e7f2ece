"""`gc`, `version`, `help`."""

import argparse
import platform

from cloche import __version__, errors, framing
from cloche.cli import client, main, output, talk


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    if verb == "gc":
        parser.add_argument(
            "--restart", action="store_true", help="also stop the keeper, if no sandbox lives in it"
        )
    elif verb == "help":
        parser.add_argument("verb", metavar="VERB", nargs="?", help="the verb to explain")


def execute(verb: str, chosen: argparse.Namespace) -> int:
    return {"gc": _gc, "version": _version, "help": _help}[verb](chosen)


def _gc(chosen: argparse.Namespace) -> int:
    if chosen.restart:
        _stop_keeper()
    with client.reach() as server:
        swept = server.call("sweep")
    if chosen.json:
        output.as_json({"swept": swept})
        return 0
    for sandbox in swept:
        print(talk.clean(str(sandbox)))
    talk.say(f"removed what {len(swept)} dead sandboxes had left" if swept else "nothing was left behind")
    return 0


def _stop_keeper() -> None:
    found = client.running()
    if found is None:
        return
    with found:
        answer = found.call("stop")
    if not answer["stopped"]:
        raise errors.error(
            "state_locked", f"the keeper (pid {answer['pid']}) has {answer['live']} live sandboxes",
            hint="`cloche list` shows them; `cloche delete --all` ends them",
        )  # fmt: skip


def _version(chosen: argparse.Namespace) -> int:
    facts = {
        "version": __version__,
        "protocol": framing.PROTOCOL,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if chosen.json:
        output.as_json(facts)
    else:
        print(
            f"cloche {__version__} (protocol {framing.PROTOCOL}, Python {facts['python']}, {facts['system']})"
        )
    return 0


def _help(chosen: argparse.Namespace) -> int:
    if chosen.json:
        output.as_json({name: row.summary for name, row in main.VERBS.items()})
    elif chosen.verb is None:
        main.show_help()
    elif chosen.verb in main.VERBS:
        main.parser_of(chosen.verb).print_help()
    else:
        raise errors.error(
            "flag_unknown", f"there is no verb {chosen.verb!r}", hint=errors.nearest(chosen.verb, main.VERBS)
        )
    return 0
