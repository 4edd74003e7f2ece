"""A machine behind an agent: what every driver that runs our guest has in common.

Executions, files, watches and terminals over one link, and the listener for refused system calls. What a driver adds is
how the machine is born, held and ended: `_signal_all`, `_release`, and what it can say about usage.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import signal
import socket
import stat
import struct
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from typing import Any

from cloche import errors, interfaces, model
from cloche.drivers import borders, link, ports
from cloche.guest import wire
from cloche.linux import processes, seccomp

_TIOCSPTLCK, _TIOCGPTPEER = 0x40045431, 0x5441
_MAX_NOTIFIED = 256  # refused calls reported per sandbox; then the listener is closed and they answer ENOSYS
_WATCH_BACKLOG = 10_000


_FILE_EVENTS = ("create", "write", "remove", "rename", "chmod", "overflow")


class GuestMachine(interfaces.Machine):
    def __init__(
        self, sandbox_id: str, sock: socket.socket, limits: dict[str, model.Limit], isolation: model.Isolation
    ) -> None:
        loop = asyncio.get_running_loop()
        self.id = sandbox_id
        self.isolation = isolation
        self.limits = limits
        self.ended = loop.create_future()
        self.on_denial = lambda _pid, _denial: None
        self.ready: asyncio.Future[None] = loop.create_future()
        self.trace: list[int] = []
        # Root's pipes and terminals belong to root; the user inside is somebody else, who may still open /dev/stdout.
        self._strangers = os.geteuid() == 0
        self._loop = loop
        self._terminals = -1
        self.upper_fd = -1
        self._disk = self._image = -1
        self._base = 0
        self._listener = -1
        self._notified = 0
        self._children: dict[int, asyncio.Future[interfaces.ExitStatus]] = {}
        self._early: dict[int, interfaces.ExitStatus] = {}
        self._disowned: set[int] = set()  # commands that nobody waits for, on their way to their end
        self._watches: dict[int, asyncio.Queue[model.FileEvent]] = {}
        self._reason = ""
        self._gone = False
        self._link = link.Link(sock, on_frame=self._frame, on_end=self._link_ended)

    # ── birth and end ───────────────────────────────────────────────────────────────────────────

    def _frame(self, frame: link.Frame, fds: list[int]) -> None:
        if frame.ready and not self.ready.done():
            # These come from the set-up, before anything hostile ran in there.
            passed = {name: fds.pop(0) for name in frame.passed if fds}
            self._terminals = passed.get("terminals", -1)
            self.upper_fd = passed.get("upper", -1)
            self._disk, self._image = passed.get("disk", -1), passed.get("image", -1)
            self._base = frame.first_id or 0
            if "listener" in passed:
                self._listen(passed["listener"])
            if "layer" in passed:
                self.layer = interfaces.Layer(passed["layer"], frame.first_id)
            if "mounts" in passed:
                self._watch_mounts(passed["mounts"])
            self.trace = frame.trace
            self.ready.set_result(None)
        elif frame.failed is not None and not self.ready.done():
            self.ready.set_exception(_creation_error(frame))
        elif frame.exit is not None:
            self._child_exited(frame)
        elif frame.watch >= 0 and frame.watch in self._watches:
            self._watched(self._watches[frame.watch], frame.events)
        wire.close_all(fds)

    def _watched(self, queue: asyncio.Queue[model.FileEvent], events: list[tuple[str, str]]) -> None:
        for kind, path in events[:1000]:
            if kind in _FILE_EVENTS and queue.qsize() < _WATCH_BACKLOG:
                queue.put_nowait(model.FileEvent(type=kind, path=path[:4096]))  # type: ignore[arg-type]

    def _child_exited(self, frame: link.Frame) -> None:
        ended = _exit_status(frame)
        future = self._children.pop(frame.exit or 0, None)
        if frame.exit in self._disowned:
            self._disowned.discard(frame.exit)
        elif future is None:
            if len(self._early) < 1000:
                self._early[frame.exit or 0] = ended  # the exit overtook the answer to its start
        elif not future.done():
            future.set_result(ended)

    def _link_ended(self, reason: str) -> None:
        self._reason = self._reason or reason
        if not self.ready.done():
            self.ready.set_exception(
                errors.error("sandbox_create_failed", f"the sandbox ended while it was made: {reason}")
            )
            self.ready.exception()
        self.kill_now()

    def _misbehaved(self, what: str) -> errors.ClocheError:
        """The guest lies in a way that ours cannot: its sandbox ends."""
        self._link.close(link.MISBEHAVED)
        return errors.error(
            "guest_misbehaved", f"the sandbox was ended because its guest answered with {what}"
        )

    def died(self, reason: str = "") -> None:
        """Nothing inside runs any more: let go of everything, once."""
        if self._gone:
            return
        self._gone = True
        self._reason = self._reason or reason or "its first process ended"
        self._link.close(self._reason)
        if self._terminals >= 0:
            os.close(self._terminals)
            self._terminals = -1
        if self._disk_fds:  # beside the event loop: who lets go last unmounts the disk
            self._loop.run_in_executor(None, self._let_go_of_disk)
        self._stop_listening()
        self._release()
        for future in self._children.values():
            if not future.done():
                future.set_exception(errors.error("sandbox_lost", f"the sandbox has ended: {self._reason}"))
                future.exception()
        self._children.clear()
        if not self.ended.done():
            self.ended.set_result(self._reason)

    @property
    def _disk_fds(self) -> list[int]:
        """All that keeps the sandbox's disk mounted from out here."""
        layer = self.layer.fd if self.layer is not None else -1
        return [fd for fd in (self._disk, self._image, self.upper_fd, layer) if fd >= 0]

    def _let_go_of_disk(self, *, keep_image: bool = False) -> None:
        """With `keep_image`, of all that keeps it mounted, but not yet of its blocks: to free many of them takes time that
        nobody needs to wait for."""
        image, self._image = (self._image, -1) if keep_image else (-1, self._image)
        held = self._disk_fds
        self._disk, self._image, self.upper_fd = -1, image, -1
        self.layer = None
        wire.close_all(held)

    def _watch_mounts(self, fd: int) -> None:
        """A driver that can mount again what the host tore off keeps the descriptor; others have no use for it."""
        os.close(fd)

    def _release(self) -> None:
        """Close and remove what the driver holds for this machine."""
        raise NotImplementedError

    # ── processes ───────────────────────────────────────────────────────────────────────────────

    async def start(self, start: interfaces.Start) -> interfaces.Child:
        if start.user == "root" and not self.isolation.uid_range:
            raise errors.error(
                "needs_subuids",
                "user='root' needs a range of user ids, and this sandbox has one",
                hint="run Cloche as root, or run the command as the user",
            )
        if self._strangers:
            _open_to_all(start.fds)
        command = {"line": start.command} if isinstance(start.command, str) else {"argv": list(start.command)}
        fields = {**command, "env": start.env, "cwd": start.cwd, "user": start.user, "pty": start.pty}
        if start.together:
            fields["together"] = True
        try:
            answer = await self._link.request("exec", fields, start.fds, late=self._disown)
        except OSError as problem:
            raise _start_error(problem, start) from None
        pid = answer.frame.pid
        if pid <= 0 or pid in self._children:
            raise self._misbehaved("a command under a pid that another one has")
        future: asyncio.Future[interfaces.ExitStatus] = self._loop.create_future()
        early = _exit_status(answer.frame) if answer.frame.exit == pid else self._early.pop(pid, None)
        if early is not None:
            future.set_result(early)
        else:
            self._children[pid] = future
        return interfaces.Child(pid, future)

    def _disown(self, frame: link.Frame) -> None:
        """A command was started for somebody who has gone meanwhile."""
        pid = frame.pid
        if pid <= 0 or frame.exit == pid or self._early.pop(pid, None) is not None or pid in self._children:
            return
        self._disowned.add(pid)

        async def end() -> None:
            with suppress(errors.ClocheError):
                await self.signal(pid, signal.SIGKILL, scope="tree")

        self._ending = self._loop.create_task(end(), name=f"end {self.id} {pid}")

    async def reserve(self, count: int) -> int:
        return (await self._link.request("reserve", {"count": count})).frame.mark

    async def adopt(self, pids: Sequence[tuple[int, int]]) -> dict[int, interfaces.Child]:
        wanted = [pid for pid, _ in pids if pid > 1 and pid not in self._children]
        answer = await self._link.request("adopt", {"pids": [pair for pair in pids if pair[0] in wanted]})
        found = {}
        for pid in {*answer.frame.pids} & {*wanted}:
            future: asyncio.Future[interfaces.ExitStatus] = self._loop.create_future()
            early = self._early.pop(pid, None)
            if early is not None:
                future.set_result(early)
            else:
                self._children[pid] = future
            found[pid] = interfaces.Child(pid, future)
        return found

    async def signal(self, pid: int, number: int, *, scope: str = "group") -> None:
        try:
            await self._link.request("signal", {"pid": pid, "sig": number, "scope": scope})
        except OSError as problem:
            raise errors.error(
                "execution_finished", f"the process is not there any more: {problem.strerror}"
            ) from None

    def open_terminal(self) -> interfaces.Terminal:
        """The engine opens the master itself, in the instance mounted before anything hostile ran: a master passed out
        by the guest would share its flags, and a cleared O_NONBLOCK would stop the engine."""
        try:
            master = os.open(
                "ptmx", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._terminals
            )
        except OSError as problem:
            raise errors.error(
                "capacity_exceeded", f"the sandbox can open no further terminal: {problem.strerror}",
                hint="end programs that hold terminals",
            ) from None  # fmt: skip
        try:
            fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
            slave: int = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY)
        except OSError:
            os.close(master)
            raise
        os.set_inheritable(slave, False)
        if self._strangers:
            os.fchmod(slave, 0o666)  # in the sandbox's own instance, which only it can name
        return interfaces.Terminal(master, slave)

    async def bind(self, binding: interfaces.Binding) -> None:
        if binding.resources is not None:
            self._rebind_limits(binding.resources)
        listed = [(path, len(data), mode) for path, data, mode in binding.files]
        fds = [_in_memory(data for _, data, _ in binding.files)] if listed else []
        try:
            await self._link.request("bind", {"env": binding.env, "files": listed}, fds)
        except OSError as problem:
            with borders.paths(str(problem.filename or "a file")):
                raise
        finally:
            wire.close_all(fds)

    def _rebind_limits(self, resources: model.Resources) -> None:
        """A driver that can hold other limits from now on does."""
        raise errors.error(
            "not_supported_by_driver", "the limits of a running sandbox cannot be changed here"
        )

    async def connect(self, port: int) -> int:
        why = ""
        for family in (4, 6):
            try:
                answer = await self._link.request("connect", {"port": port, "family": family})
                return await ports.connected(link.only_tcp(answer.fds))
            except OSError as problem:
                why = why or problem.strerror or str(problem)
        raise errors.error(
            "port_closed",
            f"nothing listens on port {port} inside ({why})",
            hint="start the server in the sandbox first; any address will do, loopback too",
            port=port,
        )

    async def listening(self) -> list[tuple[str, int]]:
        found: set[tuple[str, int]] = set()
        for name in ("tcp", "tcp6"):
            fd = await self.open_file(f"/proc/net/{name}", os.O_RDONLY)
            try:
                found |= ports.listeners(os.pread(fd, ports.MOST_OF_A_TABLE, 0))
            finally:
                os.close(fd)
        return sorted(found, key=lambda each: (each[1], each[0]))

    # ── files ───────────────────────────────────────────────────────────────────────────────────

    async def open_file(
        self, path: str, flags: int, *, mode: int = 0o644, user: str = "user", parents: bool = False
    ) -> int:
        fields = {"path": path, "flags": flags, "mode": mode, "user": user, "parents": parents}
        with borders.paths(path):
            answer = await self._link.request("open", fields)
            return link.only_regular(answer.fds, flags)

    async def file_act(self, act: str, path: str, *, user: str = "user", **arguments: Any) -> Any:
        with borders.paths(path):
            answer = await self._link.request(act, {"path": path, "user": user, **arguments})
        frame = answer.frame
        named = [*frame.entries, frame.entry] if frame.entry is not None else frame.entries
        if not all(_is_name(entry.name, alone=act == "stat") for entry in named):
            raise self._misbehaved("a file name that is none")
        return frame

    async def watch(
        self, path: str, *, recursive: bool, user: str = "user"
    ) -> AsyncIterator[model.FileEvent]:
        with borders.paths(path):
            answer = await self._link.request("watch", {"path": path, "recursive": recursive, "user": user})
        queue: asyncio.Queue[model.FileEvent] = asyncio.Queue(maxsize=0)
        self._watches[answer.frame.watch] = queue
        getting: asyncio.Future[model.FileEvent] | None = None
        try:
            while True:
                getting = asyncio.ensure_future(queue.get())
                waited: set[asyncio.Future[Any]] = {getting, self.ended}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    return
                yield getting.result()
        finally:
            if getting is not None:
                getting.cancel()
            self._watches.pop(answer.frame.watch, None)
            if not self._link.closed:
                with suppress(errors.ClocheError, OSError):
                    await self._link.request("unwatch", {"watch": answer.frame.watch})

    # ── refused system calls ────────────────────────────────────────────────────────────────────

    def _listen(self, fd: int) -> None:
        self._listener = fd
        self._loop.add_reader(fd, self._refused_call)

    def _stop_listening(self) -> None:
        if self._listener >= 0:
            self._loop.remove_reader(self._listener)
            os.close(self._listener)
            self._listener = -1

    def _refused_call(self) -> None:
        """Answer EPERM and tell. A guest that floods is answered ENOSYS by the kernel from then on, at no cost to us."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        found = dict(poll.poll(0)).get(self._listener, 0)
        if not found & select.POLLIN:
            # POLLHUP: nobody under the filter is left. It stays readable until closed, and the loop would spin on it
            # for as long as the kernel takes to end the rest; older kernels would even block in the ioctl.
            if found:
                self._stop_listening()
            return
        try:
            call = seccomp.receive(self._listener)
        except OSError:
            self._stop_listening()
            return
        if call is None:
            return
        leader = processes.session_inside(call.pid)
        seccomp.refuse(self._listener, call.id)
        self.on_denial(leader, _denial(call))
        self._notified += 1
        if self._notified >= _MAX_NOTIFIED:
            self._stop_listening()


def _exit_status(frame: link.Frame) -> interfaces.ExitStatus:
    status = frame.status
    code = None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    return interfaces.ExitStatus(code, number, frame.cpu_ms, frame.rss_kib / 1024)


def _is_name(name: str, *, alone: bool) -> bool:
    """Whether a guest's word for a file can be one; `alone`, the place asked about may be the root or "."."""
    if alone and name in ("/", "."):
        return True
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name and len(name) <= 255


def _in_memory(pieces: Iterable[bytes]) -> int:
    memory = os.memfd_create("cloche-files", os.MFD_CLOEXEC)
    for data in pieces:
        view = memoryview(data)
        while view:
            view = view[os.write(memory, view) :]
    return memory


def _open_to_all(fds: Sequence[int]) -> None:
    for fd in fds:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.fchmod(fd, 0o666)


def _denial(call: seccomp.Notification) -> model.Denial:
    return model.Denial(
        kind="syscall", operation=call.name, target=", ".join(f"{a:#x}" for a in call.args[:3]),
        rule=f"syscalls.{call.name}", hint=_HINTS.get(call.name, "this call is not available inside the sandbox"),
        evidence="seccomp",
    )  # fmt: skip


_HINTS = {
    "ptrace": "debuggers need profile='permissive'",
    "mount": "file systems cannot be mounted inside; ask for a volume or workspace instead",
    "unshare": "namespaces cannot be made inside; the sandbox already is one",
    "clone": "namespaces cannot be made inside; the sandbox already is one",
}


def _creation_error(frame: link.Frame) -> errors.ClocheError:
    text = f"the sandbox could not be made: {frame.failed}"
    if frame.errno == 28:  # ENOSPC
        return errors.error(
            "disk_full", text, hint="free space below CLOCHE_HOME, or ask for a smaller disk_mib"
        )
    return errors.error("sandbox_create_failed", text, hint="run `cloche doctor`")


def _start_error(problem: OSError, start: interfaces.Start) -> errors.ClocheError:
    if problem.errno in (2, 20):
        return errors.error(
            "cwd_not_found",
            f"there is no directory {start.cwd!r} inside",
            hint="make it first (box.files.make_dir)",
        )
    if problem.errno == 11:
        return errors.error(
            "sandbox_create_failed",
            "the sandbox may not start another process (pids limit)",
            hint="raise pids",
        )
    return errors.error("sandbox_create_failed", f"the command could not be started: {problem.strerror}")
