"""The driver `process`: Landlock, a system call filter and resource limits around an ordinary process.

The lowest rung, for hosts where namespaces are refused altogether. Nothing is hidden, everything is denied: programs see
the host's paths and may read and run what the template `base` would show; they write to a private directory beneath the
state directory, and nowhere else. That directory plays the part of a root in the API only:

    /workspace, relative paths     sandboxes/<id>/workspace
    /home/user                     sandboxes/<id>/home        (HOME)
    /tmp, /var/tmp                 sandboxes/<id>/tmp         (TMPDIR)

Commands see the real paths. What has no namespace is closed by the filter instead (drivers/narrow.py): no socket of any
kind but connected pairs, no System V or POSIX ipc, no change of mode, owner or times outside the private directory.
Ending everything is the supervisor's work (drivers/supervising.py). Below Landlock 3 truncating a foreign file could not
be refused, so there is no sandbox there; this rung never fails open.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from cloche import errors, interfaces, model, policy
from cloche.drivers import beginning, holding, narrow, spawned, supervising
from cloche.guest import wire
from cloche.images import host
from cloche.linux import cgroups, landlock, seccomp

LEAST_ABI = 3
SCOPED_ABI = 6
_MIB = 1 << 20
_ENTRY = "cloche.drivers.supervising:main"
_MARK = ".process"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
_MAPPED = {"/workspace": "workspace", "/home/user": "home", "/var/tmp": "tmp", "/tmp": "tmp"}
_MISSING = (
    "no namespaces: programs see that the host's processes, paths and names exist",
    "no private root: /workspace, /home/user and /tmp exist in the API only, commands see the real paths",
    "disk space is not limited in total",
)
_SIGNALS = "Landlock is older than 6 (Linux 6.12): programs may signal other processes of the same user"


class ProcessDriver(spawned.SpawnedDriver):
    name = "process"
    level: model.Level = "process"

    async def prepare(self) -> None:
        if self.abi < LEAST_ABI:
            what = f"Landlock {self.abi}" if self.abi else "no Landlock"
            raise errors.error(
                "kernel_feature_missing",
                f"this kernel has {what}, and the driver 'process' needs Landlock {LEAST_ABI} (Linux 6.2)",
                hint="boot with lsm=landlock,… on Linux 6.2 or newer, or let Cloche make namespaces; see `cloche doctor`",
            )

    @property
    def _sandboxes(self) -> str:
        return os.path.join(os.path.realpath(self.home), "sandboxes")  # as the kernel will name what is in it

    def held_features(self) -> set[str]:
        return {"seccomp", "landlock"}

    def make(self, sandbox_id: str, spec: model.SandboxSpec, rules: policy.Merged) -> ProcessMachine:
        room, lock = self._make_room(sandbox_id)
        try:
            here, there = wire.pair()
            control, their_control = wire.pair()
            made = ProcessMachine(
                self, sandbox_id, here, beginning.make_group(self.groups), self._isolation(), room, control
            )
        except BaseException:
            os.close(lock)
            supervising.remove(room)
            raise
        disk = model.Limit(
            value=spec.resources.disk_mib, enforcement="none", by="RLIMIT_FSIZE bounds each file only"
        )
        try:
            held = made.hold(spec.resources, disk, agents=self.agents, running=_tasks_of_user())
            held.rlimits["FSIZE"] = spec.resources.disk_mib * _MIB
            argv = [sys.executable, *spawned.program(_ENTRY, spawned.PACKAGE_ROOT)]
            made.launch(argv, [there.fileno(), their_control.fileno(), lock])
            made.tell(self._message(made, spec, rules, held))
        except BaseException:
            made.kill_now()
            if made.host_pid < 0:
                made.died("it could not be started")
            raise
        finally:
            there.close()
            their_control.close()
            os.close(lock)  # the supervisor holds it now, for as long as it lives
        return made

    def _make_room(self, sandbox_id: str) -> tuple[str, int]:
        """The private directory, locked: who holds the lock is alive, whatever its pid (`sweep`)."""
        room = os.path.join(self._sandboxes, sandbox_id)
        os.makedirs(self._sandboxes, mode=0o700, exist_ok=True)
        os.mkdir(room, 0o700)
        lock = os.open(room, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in ("workspace", "home", "tmp"):
            os.mkdir(f"{room}/{name}", 0o755)
        os.close(os.open(f"{room}/{_MARK}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        return room, lock

    def _isolation(self) -> model.Isolation:
        missing = _MISSING if self.abi >= SCOPED_ABI else (*_MISSING, _SIGNALS)
        return model.Isolation(
            level=self.level, driver=self.name, user_namespace=False, seccomp=True, landlock_abi=self.abi,
            uid_range=False, root="host", network="off", missing=missing,
        )  # fmt: skip

    def _message(
        self, made: ProcessMachine, spec: model.SandboxSpec, rules: policy.Merged, held: holding.Held
    ) -> dict[str, Any]:
        extra = (*narrow.PROCESS, *(narrow.PINNED if held.affinity else ()))
        program = narrow.before(
            seccomp.build(rules.syscalls.profile, deny=rules.syscalls.deny, notify=True), extra
        )
        places = {
            "HOME": f"{made.room}/home",
            "TMPDIR": f"{made.room}/tmp",
            "CLOCHE_WORKSPACE": f"{made.room}/workspace",
        }
        return {
            "engine": os.getpid(), "home": made.room, "roots": made.roots, "group": made.group_name,
            "cgroups": made.group_paths, "rlimits": held.rlimits, "affinity": held.affinity, "no_tcp": True,
            "landlock": landlock_rules(made.roots), "landlock_abi": self.abi, "filter": program.hex(), "terminals": "/dev",
            "agent": {
                "env": {**host.environment(), **places, **spec.env}, "cwd": f"{made.room}/workspace",
                "uid": host.USER_ID, "can_switch": False,
            },
        }  # fmt: skip

    def sweep(self, keep: set[str]) -> list[str]:
        """Besides cgroups: private directories whose supervisor is gone, found by their lock."""
        swept = super().sweep(keep)
        sandboxes = self._sandboxes
        for name in os.listdir(sandboxes) if os.path.isdir(sandboxes) else ():
            room = f"{sandboxes}/{name}"
            if name not in keep and os.path.exists(f"{room}/{_MARK}") and _abandoned(room):
                supervising.remove(room)
                swept.append(name)
        return swept


def landlock_rules(roots: list[str]) -> list[tuple[str, int]]:
    """What may be touched, as far as it exists: Landlock denies all else, and an absent path can have no rule."""
    rules = [(path, landlock.READ_ONLY) for path in host.PROGRAMS]
    rules += [(f"/etc/{name}", landlock.READ) for name in host.ETC]
    rules += [("/proc", landlock.READ), *((path, landlock.DEVICE) for path in _DEVICES)]
    rules += [(path, landlock.READ_WRITE) for path in roots]
    return [(path, access) for path, access in rules if os.path.exists(path)]


def _abandoned(room: str) -> bool:
    lock = os.open(room, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _tasks_of_user() -> int | None:
    """What the kernel counts against this user's RLIMIT_NPROC, about; None for root, whom it does not bind."""
    if os.getuid() == 0:
        return None
    return sum(_tasks())


def _tasks() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it ended meanwhile
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    yield len(os.listdir(f"/proc/{name}/task"))


class _Refused(msgspec.Struct):
    """What the supervisor says: a call that it refused."""

    refused: str
    leader: int
    args: list[str]


_decode = msgspec.json.Decoder(_Refused).decode


class ProcessMachine(spawned.SpawnedMachine):
    def __init__(
        self, driver: ProcessDriver, sandbox_id: str, sock: socket.socket, group: cgroups.Group | None,
        isolation: model.Isolation, room: str, control: socket.socket,
    ) -> None:  # fmt: skip
        super().__init__(driver, sandbox_id, sock, group, isolation)
        self.room = room
        self.roots = [f"{room}/{name}" for name in ("workspace", "home", "tmp")]
        self._control = control
        control.setblocking(False)
        self._loop.add_reader(control.fileno(), self._told)

    @property
    def group_name(self) -> str:
        return self._group.name if self._group is not None else ""

    @property
    def group_paths(self) -> list[str]:
        return self._group.paths if self._group is not None else []

    # ── paths: the private directory plays the root in the API ──────────────────────────────────

    def real(self, path: str) -> str:
        """Where a path of the API lies on the host; relative ones are the agent's to resolve."""
        for inside, name in _MAPPED.items():
            if path == inside or path.startswith(inside + "/"):
                return f"{self.room}/{name}{path[len(inside) :]}"
        return path

    async def start(self, start: interfaces.Start) -> interfaces.Child:
        return await super().start(start._replace(cwd=None if start.cwd is None else self.real(start.cwd)))

    async def open_file(
        self, path: str, flags: int, *, mode: int = 0o644, user: str = "user", parents: bool = False
    ) -> int:
        return await super().open_file(self.real(path), flags, mode=mode, user=user, parents=parents)

    async def file_act(self, act: str, path: str, *, user: str = "user", **arguments: Any) -> Any:
        if "target" in arguments:
            arguments["target"] = self.real(arguments["target"])
        return await super().file_act(act, self.real(path), user=user, **arguments)

    async def bind(self, binding: interfaces.Binding) -> None:
        files = [(self.real(path), data, mode) for path, data, mode in binding.files]
        await super().bind(binding._replace(files=files))

    def watch(self, path: str, *, recursive: bool, user: str = "user") -> AsyncIterator[model.FileEvent]:
        return super().watch(self.real(path), recursive=recursive, user=user)

    async def connect(self, port: int) -> int:
        raise errors.error(
            "not_supported_by_driver",
            f"port {port} cannot be reached: a sandbox of the driver 'process' has no network of its own",
            hint="use the driver 'namespaces' or 'bubblewrap'",
        )

    async def listening(self) -> list[tuple[str, int]]:
        raise errors.error(
            "not_supported_by_driver",
            "a sandbox of the driver 'process' has no ports of its own",
            hint="use the driver 'namespaces' or 'bubblewrap'",
        )

    def read_only_rule(self, path: str) -> str | None:
        mine = any(path == own or path.startswith(own + "/") for own in (*_MAPPED, *self.roots))
        return None if mine else "landlock.read-only"

    # ── refusals, told by the supervisor ────────────────────────────────────────────────────────

    def _told(self) -> None:
        try:
            body, fds = wire.receive_raw(self._control)
        except BlockingIOError:
            return
        except OSError:
            body, fds = b"", []
        wire.close_all(fds)
        if not body:
            self._let_go()
            return
        call = _decode(body)
        self.on_denial(call.leader, _denial(call))

    def _let_go(self) -> None:
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()

    # ── the end ─────────────────────────────────────────────────────────────────────────────────

    def kill_now(self) -> None:
        """The supervisor ends everything as soon as nobody holds the other end of its socket."""
        self.thaw()
        self._let_go()
        spawned.signal_quietly(self._pidfd, signal.SIGCONT)

    def _release(self) -> None:
        self._let_go()
        super()._release()
        if os.path.exists(self.room):  # the supervisor did not get to it
            with suppress(OSError):
                supervising.remove(self.room)


def _denial(call: _Refused) -> model.Denial:
    changes = call.refused in narrow.SUPERVISED
    hint = (
        "only files of the sandbox can be changed"
        if changes
        else "this call is not available inside the sandbox"
    )
    return model.Denial(
        kind="file" if changes else "syscall", operation=call.refused, target=", ".join(call.args),
        rule=f"syscalls.{call.refused}", hint=hint, evidence="seccomp",
    )  # fmt: skip
