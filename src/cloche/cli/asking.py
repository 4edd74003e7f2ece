"""`cloche run --ask` and `cloche shell --ask`: the person at the terminal decides what no rule decides.

The sandbox is made first, then its questions are followed over a connection of their own, then the command runs in it: nothing is
refused because we were not listening yet. Questions are asked in the session's own loop, so while one is on the screen the
command's output waits, and what is typed is the answer. The terminal is read at /dev/tty: the command may have another input.
"""

import json
import os
import select
from contextlib import suppress
from typing import Any

from cloche import errors, framing
from cloche.cli import client, thin

_WORDS = {
    "o": "once",
    "once": "once",
    "s": "sandbox",
    "sandbox": "sandbox",
    "a": "always",
    "always": "always",
}


class Session(thin.Session):
    """A command, and somebody who is asked."""

    def __init__(self, sock: Any, options: thin.Options, asks: client.Client, terminal: int) -> None:
        super().__init__(sock, options)
        self._asks = asks
        self._terminal = terminal
        self._poll.register(asks.sock.fileno(), select.POLLIN)

    def on_other(self, fd: int) -> None:
        try:
            frames = list(self._asks._receive())
        except (OSError, errors.ClocheError):
            frames = [(framing.END, 0, b"")]
        for kind, _, body in frames:
            if kind == framing.ITEM:
                self._ask(json.loads(body))
            elif kind in (framing.END, framing.ERROR):
                self._poll.unregister(fd)

    def _ask(self, question: dict[str, Any]) -> None:
        raw = self._saved is not None
        if raw:
            self._restore_terminal()
        answer = prompt(self._terminal, question)
        if raw:
            self._begin_input()
        with client.reach_keeper() as other, suppress(errors.NotFound):  # its time was up
            if answer == "always":
                answer = "sandbox"
                if not question["rule"]:
                    other.call("allow_always", rule=target(question))
            other.call("answer_ask", sandbox=question["sandbox"], question=question["id"], answer=answer)


def target(question: dict[str, Any]) -> str:
    host = question["host"]
    return f"[{host}]:{question['port']}" if ":" in host else f"{host}:{question['port']}"


def prompt(terminal: int, question: dict[str, Any]) -> str:
    """Ask on the terminal; whatever is not a word of consent is a refusal."""
    why = f"the rule {question['rule']!r} wants you to decide" if question["rule"] else "no rule decides"
    always = "" if question["rule"] else ", [a]lways"
    text = f"\r\ncloche: the sandbox wants to reach {target(question)}; {why}.\r\nAllow it [o]nce, for this [s]andbox{always}, or [N]o? "
    thin.write_all(terminal, text.encode("utf-8", "backslashreplace"))
    try:
        typed = os.read(terminal, 1024).decode("utf-8", "replace")
    except OSError:
        typed = ""
    return _WORDS.get(typed.strip().lower(), "deny")


def run(options: thin.Options) -> Session:
    """Make the sandbox (or take the one that was named), follow its questions, and run the command in it."""
    terminal = _open_terminal()
    server, asks = client.reach_keeper(), client.reach_keeper()
    if options.sandbox is None:
        options.sandbox = server.call("create", spec=_spec(options))["id"]
    _begin(asks, options.sandbox)
    session = Session(server.sock, options, asks, terminal)
    session.run()
    if not options.keep and not session.detached:
        with suppress(errors.ClocheError):
            server.call("delete", sandbox=options.sandbox)
    os.close(terminal)
    asks.close()
    return session


def _open_terminal() -> int:
    """The terminal that controls us, or one that a standard stream is."""
    names = ["/dev/tty", *(os.ttyname(fd) for fd in (2, 0, 1) if os.isatty(fd))]
    for name in names:
        try:
            return os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError:
            continue
    raise errors.error(
        "argument_invalid", "--ask asks on the terminal, and there is none", hint="give rules with --allow"
    )


def _begin(asks: client.Client, sandbox: str) -> None:
    for question in asks.stream("follow_asks", sandbox=sandbox):
        if not question["id"]:
            return


def _spec(options: thin.Options) -> dict[str, Any]:
    import msgspec

    from cloche import rpc, settings

    network = options.spec.setdefault("policy", {}).setdefault("network", {})
    if "mode" not in network and "allow" not in network and options.spec.get("profile") != "permissive":
        network["mode"] = "rules"
    said = {**options.spec, "resources": options.resources, "stay": options.keep}
    made: dict[str, Any] = msgspec.to_builtins(rpc.complete(said, settings.load(os.environ).defaults))
    return made
