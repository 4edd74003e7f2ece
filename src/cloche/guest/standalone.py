"""The agent in an interpreter of its own, for rungs that have no launcher to fork it from.

The engine starts a fresh Python with one socket. The first message says everything: environment, limits, rules. What
confines a process is not the guest's knowledge, so `confine` is handed in by the program that starts this
(drivers/confining.py); afterwards nothing is imported or opened that the rules do not give.

    engine ── config ──► serve: confine ── {"ready"} + descriptors ──► engine ── requests ──► Agent

Behind bubblewrap the agent is PID 1 of its own namespace and `agent.Agent` serves as it is. On the rung `process` it
lives among the host's processes and is a `Resident`.
"""

import os
import signal
import socket

from cloche.guest import agent, calls, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Message = dict[str, object]
    Confine = Callable[[Message], int | None]
    Make = Callable[[socket.socket, Message], agent.Agent]


def serve(
    link: socket.socket,
    message: "Message",
    confine: "Confine",
    *,
    make: "Make" = agent.Agent,
    hand_over: "Callable[[int], None] | None" = None,
) -> None:
    """Confine this process and be the agent until the link ends. Never returns; a failure is told first.

    Descriptors of `ready`: where terminals are made, then the listener for refused calls unless somebody else takes it
    (`hand_over`), and last a pidfd of this process.
    """
    try:
        _quiet_stdio()
        agent.prime()
        out = [_open_directory(str(message["terminals"]))]
        own = os.pidfd_open(os.getpid())
        listener = confine(message)
        if listener is not None and hand_over is not None:
            hand_over(listener)
            os.close(listener)
        elif listener is not None:
            out.append(listener)
        served = make(link, message["agent"])  # type: ignore[arg-type]
        wire.send(link, {"ready": True}, [*out, own])
        wire.close_all([*out, own])
    except BaseException as problem:
        tell_failure(link, problem)
        os._exit(1)
    served.run()
    os._exit(0)


def tell_failure(link: socket.socket, problem: BaseException) -> None:
    system = isinstance(problem, OSError)
    text = str(problem) if system else f"{type(problem).__name__}: {problem}"
    wire.send(link, {"failed": text[:2000], "errno": getattr(problem, "errno", None) if system else None})


class Resident(agent.Agent):
    """An agent among the host's processes: what it may call its own is what descends from it.

    `narrow` runs in each command before it starts, to take away what the agent itself still needs; `expose` lets the
    supervisor look at this process (True) or not (False).
    """

    def __init__(
        self,
        link: socket.socket,
        config: "Message",
        narrow: "Callable[[], None]",
        expose: "Callable[[bool], None]",
    ) -> None:
        super().__init__(link, config)
        self.narrow = narrow
        self.expose = expose

    def run(self) -> None:
        super().run()
        self.leaders.clear()  # nobody is left to be told of their ends
        self.end_all()

    def end_all(self) -> None:
        """The supervisor does this when we end; where it was killed, nobody else would."""
        for _ in range(100):
            mine = _beneath(os.getpid(), self.relations()[0]) - {os.getpid()}
            if not mine:
                return
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in mine:
                    _kill(pid, number)
            self.reap()

    def spawn(self, argv: "list[str]", environment: "dict[str, str]", cwd: int, fds: "list[int]") -> int:
        return 0  # a spawned program is not ours for a moment before it starts, so `narrow` needs a fork

    def become(
        self,
        argv: "list[bytes]",
        environment: "dict[str, str]",
        cwd: int,
        identity: int,
        fds: "list[int]",
        tty: bool,
    ) -> None:
        self.narrow()
        super().become(argv, environment, cwd, identity, fds, tty)

    def tree(self, leader: int) -> "set[int]":
        # SAFETY: never beyond our descendants: the agent of a pid namespace may take every process it sees for its own,
        # here that would be the host's. tests/drivers/test_process.py::test_tree_kill_spares_the_host
        parents, sessions = self.relations()
        mine = _beneath(os.getpid(), parents) - {os.getpid()}
        if self.leaders == {leader}:
            return mine
        return (_beneath(leader, parents) | {pid for pid in mine if sessions[pid] == leader}) & mine

    def relations(self) -> "tuple[dict[int, int], dict[int, int]]":
        parents: dict[int, int] = {}
        sessions: dict[int, int] = {}
        for name in os.listdir("/proc"):
            found = calls.parent_and_session(int(name)) if name.isdigit() else None
            if found:
                parents[int(name)], sessions[int(name)] = found
        return parents, sessions

    def processes(self, _message: "Message", _fds: "list[int]") -> "tuple[Message, list[int]]":
        return {"pids": sorted(_beneath(os.getpid(), self.relations()[0]))}, []

    def chmod(self, message: "Message", fds: "list[int]") -> "tuple[Message, list[int]]":
        # Landlock does not know chmod, so the supervisor does it, and must see the path in our memory to judge it.
        self.expose(True)
        try:
            return super().chmod(message, fds)
        finally:
            self.expose(False)


def _beneath(top: int, parents: "dict[int, int]") -> "set[int]":
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found = [top]
    for pid in found:  # grows while it is walked
        found.extend(children.get(pid, ()))
    return set(found)


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _open_directory(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _quiet_stdio() -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
