"""`run`, `exec` and `shell`: one command, attached.

The thin client does this by itself when it can. What comes here is the rest: no keeper, a flag that needs a file read,
a mistake that needs words, a shell that may be detached.
"""

import argparse
from typing import Any

from cloche import errors
from cloche.cli import client, talk, thin

_SHELL = ["/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh"]


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    if verb != "run":
        parser.add_argument(
            "sandbox", metavar="ID", nargs="?" if verb == "shell" else None, help="its id or name"
        )
    if verb != "exec":
        spec_flags(parser)
    command_flags(parser)
    if verb != "exec":
        parser.add_argument(
            "--ask", action="store_true", help="ask on the terminal about what no network rule decides"
        )
    if verb == "run":
        parser.add_argument("--tty", action="store_true", help="run the command on a terminal")
        parser.add_argument(
            "--keep", action="store_true", help="let the sandbox stay when the command has ended"
        )
    elif verb == "exec":
        parser.add_argument("--tty", action="store_true", help="run the command on a terminal")
    else:
        parser.add_argument("--attach", metavar="EXEC", help="take up a shell that was detached")
        parser.add_argument(
            "--after", metavar="N", type=int, default=0, help="with --attach: show from cursor N on"
        )


def command_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--env",
        metavar="K[=V]",
        action="append",
        default=[],
        help="set a variable; without V, the caller's value",
    )
    add("--cwd", metavar="DIR", help="where the command starts (default: /workspace)")
    add("--timeout", metavar="S", help="seconds after which the command is killed (exit code 124)")
    add("--user", metavar="NAME", choices=("user", "root"), help="user (default) or root inside")


def spec_flags(parser: argparse.ArgumentParser) -> None:
    """What decides what a sandbox is; `create` shares them."""
    add = parser.add_argument
    add(
        "--profile",
        metavar="P",
        help="restrictive, moderate (default), permissive or one of your policy file",
    )
    add("--mode", metavar="AGENT", help="instead of a profile: what claude-code, codex or gemini needs")
    add("--template", metavar="T", help="the starting point (default: base)")
    add("--image", metavar="REF", help="what the root is made of (default: the template's)")
    add("--snapshot", metavar="SNAPSHOT", help="start with the files of a snapshot")
    add("--name", metavar="NAME", help="a name, unique among live sandboxes")
    add("--memory", metavar="MIB", help="memory limit (default: 512)")
    add("--cpus", metavar="N", help="processors (default: 1)")
    add("--pids", metavar="N", help="processes (default: 256)")
    add("--disk", metavar="MIB", help="disk limit (default: 1024)")
    add("--workspace", metavar="DIR", help="show a directory at its own path, writable")
    add("--overlay", action="store_true", help="with --workspace: keep changes in a layer above it")
    add("--network", metavar="MODE", choices=("off", "rules", "open"), help="off (default), rules or open")
    add(
        "--allow",
        metavar="RULE",
        action="append",
        default=[],
        help="a host that may be reached: pypi.org:443",
    )
    add(
        "--deny",
        metavar="RULE",
        action="append",
        default=[],
        help="one that may not, whatever else is allowed",
    )
    add(
        "--resolve",
        metavar="HOST:PORT:ADDR:PORT",
        action="append",
        default=[],
        help="dial this address for it",
    )
    add("--secret", metavar="NAME", action="append", default=[], help="a stored credential for its hosts")
    add(
        "--volume",
        metavar="NAME:PATH[:ro]",
        action="append",
        default=[],
        help="show a volume at a path, read-only with :ro",
    )
    add("--policy", metavar="FILE", help="a policy file (TOML)")
    add("--driver", metavar="NAME", help="the driver to use, where there are several")
    add("--minimum-isolation", metavar="LEVEL", help="process, namespaces (default), gvisor or microvm")


def options_from(chosen: argparse.Namespace) -> thin.Options:
    """The same meaning that the thin scan gives to each flag, from argparse's result."""
    options = thin.Options()
    given = vars(chosen)
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if flag in thin.VALUED:
            for text in value if isinstance(value, list) else [value]:
                if text is not None and not thin.apply(options, flag, text):
                    raise _unfit(flag, text)
    if thin.contradicts(options):
        raise errors.error(
            "argument_invalid",
            "--allow gives a network and --network off takes it",
            hint="leave one of them out",
        )
    if given.get("policy"):
        options.spec["policy"] = _merged(_policy(chosen.policy), options.spec.get("policy", {}))
    if given.get("overlay"):
        options.spec["overlay"] = True
    options.json, options.keep, options.tty = chosen.json, bool(given.get("keep")), bool(given.get("tty"))
    options.sandbox = given.get("sandbox")
    return options


def _unfit(flag: str, text: str) -> errors.ClocheError:
    if flag == "--resolve":
        return errors.error(
            "argument_invalid", f"--resolve is {text!r}, which is not HOST:PORT:ADDR:PORT",
            hint="cloche run --resolve api.test:443:127.0.0.1:18443 …",
        )  # fmt: skip
    if flag == "--volume":
        return errors.error(
            "argument_invalid", f"--volume is {text!r}, which is not NAME:PATH or NAME:PATH:ro",
            hint="cloche run --volume cache:/data …",
        )  # fmt: skip
    return errors.error("limit_invalid", f"{flag} is {text!r}, which is not a number")


def _merged(base: Any, said: Any) -> Any:
    """A policy file with the flags added to it: lists grow, what is single is replaced."""
    network = dict(base.get("network", {}))
    flags = said.get("network", {})
    if flags.get("allow") and network.get("mode") == "off":
        del network["mode"]
    if flags.get("mode") == "off":
        network = {field: value for field, value in network.items() if field not in ("allow", "ask")}
    for field, value in flags.items():
        if isinstance(value, list):
            network[field] = [*network.get(field, ()), *value]
        elif isinstance(value, dict):
            network[field] = {**network.get(field, {}), **value}
        else:
            network[field] = value
    return {**base, "network": network} if network else base


def _policy(path: str) -> Any:
    from cloche import settings

    return settings.load_policy(path).to_builtins()


def execute(verb: str, chosen: argparse.Namespace) -> int:
    options = options_from(chosen)
    if verb == "shell":
        return _shell(chosen, options)
    if not chosen.command:
        raise errors.error(
            "command_empty",
            f"`cloche {verb}` needs a command",
            hint=f"cloche {verb} ... -- python3 -c 'print(1 + 1)'",
        )
    options.request["command"] = chosen.command
    if getattr(chosen, "ask", False):
        return _asking(options)
    return attached(options, keeper=verb == "exec" or options.keep)


def _shell(chosen: argparse.Namespace, options: thin.Options) -> int:
    if chosen.attach and options.sandbox is None:
        raise errors.error(
            "argument_invalid", "--attach needs the sandbox's id", hint="cloche shell ID --attach EXEC"
        )
    options.tty = options.detachable = True
    options.request["command"] = chosen.command or _SHELL
    options.execution, options.after = chosen.attach, chosen.after
    return _asking(options) if chosen.ask else attached(options, keeper=True)


def _asking(options: thin.Options) -> int:
    from cloche.cli import asking

    thin.complete(options)
    session = asking.run(options)
    return _detached(session) if session.detached else thin.conclude(session)


def attached(options: thin.Options, *, keeper: bool) -> int:
    """Run through a keeper if one is there or needed, else in process with a keeper left starting behind."""
    thin.complete(options)
    found = client.reach_keeper() if keeper else client.running()
    if found is None:
        from cloche.cli import here

        client.home()
        return here.run(options)
    session = thin.Session(found.sock, options)
    session.run()
    if session.detached:
        return _detached(session)
    return thin.conclude(session)


def _detached(session: thin.Session) -> int:
    import json

    names = json.loads(session.started)
    talk.say(f"detached; come back with: cloche shell {names['sandbox']} --attach {names['execution']}")
    return 0
