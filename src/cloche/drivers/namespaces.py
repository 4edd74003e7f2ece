"""The driver `namespaces`: sandboxes forked by a launcher, held by the kernel's own means.

A machine is: one process tree in its own pid namespace, one socket to its agent, one pidfd, one cgroup, and a listener
for the system calls its filter refuses. Nothing of it has a name on the host but the cgroup, so nothing else needs
sweeping.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from cloche import errors, interfaces, model, policy
from cloche.drivers import beginning, holding, keeping, slots, spawning, watching
from cloche.guest import wire
from cloche.images import host, roots
from cloche.linux import cgroups, landlock, mounts

_MOST_EMBRYOS = 24
_REFILL_DELAY_S = 0.005
_READY_TIMEOUT_S = 20.0
_MANY_BLOCKS = 16 << 10  # of 512 bytes


class Facts(NamedTuple):
    """What this host gave the driver at its start."""

    rootless: bool
    landlock_abi: int
    loop_disks: bool
    groups: cgroups.Hierarchy
    missing: tuple[str, ...]


class LauncherFrame(msgspec.Struct):
    ready: bool | None = None
    landlock_abi: int = 0
    reason: str = ""
    spawned: str | None = None
    refused: str | None = None
    died: str | None = None
    status: int = 0
    captured: str | None = None
    roles: list[str] = []
    how: str = ""
    note: str = ""


_UNBORN = model.Isolation(level="namespaces", driver="namespaces")

_decode = msgspec.json.Decoder(LauncherFrame).decode


class NamespacesDriver(interfaces.Driver):
    name = "namespaces"
    level: model.Level = "namespaces"

    def __init__(
        self,
        home: str,
        *,
        launch: spawning.Launch | None = None,
        embryos: int = 2,
        rootless: bool | None = None,
    ) -> None:
        """`embryos` are kept ready; with 0 there is one for the first sandbox and none after it."""
        self._home = home
        self._launch = launch
        self._blanks = 2 * embryos
        self._rootless = rootless
        self._machines: dict[str, NamespacesMachine] = {}
        self._embryos: deque[NamespacesMachine] = deque()
        self._fewest = self._wanted = embryos
        self._missed = False
        self._refilling: asyncio.TimerHandle | None = None
        self._usual: tuple[model.Resources, policy.Root] = (model.DEFAULT_RESOURCES, "overlay")
        self._ready: asyncio.Future[LauncherFrame] | None = None
        self._slots = launch.slots if isinstance(launch, beginning.Told) else slots.Slots(home)
        self._closed = False
        self.facts: Facts

    # ── life ────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        rootless = self._rootless if self._rootless is not None else not spawning.is_privileged()
        try:
            frame = await self._start_launcher(rootless)
        except errors.NotSupported:
            if rootless:
                raise
            # Root of a container is not root of the host: ids cannot be mapped there, but a user namespace may still work.
            rootless = True
            frame = await self._start_launcher(rootless)
        self._image = host.prepare(os.path.join(self._home, "images"))
        groups = cgroups.detect()
        loop_disks = beginning.has_loop_disks(rootless)
        missing = []
        if not frame.landlock_abi:
            missing.append("Landlock is not enabled in this kernel")
        if not loop_disks:
            missing.append("disk space is memory (tmpfs): loop devices need root")
        self.facts = Facts(rootless, frame.landlock_abi, loop_disks, groups, tuple(missing))
        if not self._embryos:
            self._embryos.append(self._conceive())
        self._refill_later()

    @property
    def _stage(self) -> str:
        return os.path.join(self._home, "stage")

    async def _start_launcher(self, rootless: bool) -> LauncherFrame:
        launch = self._launch or spawning.start()
        self._launch = None
        self._link = launch.link
        self._link.setblocking(False)
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(self._link.fileno(), self._readable)
        if not isinstance(launch, beginning.Told):
            beginning.configure(self._link, self._home, self._slots, rootless=rootless, blanks=self._blanks)
        elif launch.embryo is not None:
            self._embryos.append(self._adopt(launch.embryo))
        try:
            frame = await asyncio.wait_for(asyncio.shield(self._ready), _READY_TIMEOUT_S)
        except (TimeoutError, OSError):
            frame = LauncherFrame(ready=False, reason="the launcher did not answer")
        with suppress(ChildProcessError):
            # The intermediate one, which ends before the launcher speaks; the launcher itself is known by its socket.
            os.waitpid(launch.pid, 0)  # noqa: ASYNC222
        if not frame.ready:
            self._drop_link()
            raise errors.error(
                "kernel_feature_missing",
                f"this host does not let Cloche make namespaces: {frame.reason}",
                hint="run `cloche doctor` for the cause and the fix",
            )
        return frame

    def _ensure_slots(self) -> None:
        """The launcher must never run out: a range for each machine, and for what it prepares ahead."""
        taken = self._slots.taken
        if taken and len(self._machines) + self._blanks + 1 >= len(taken):
            wire.send(self._link, {"op": "slots", "slots": self._slots.take()})

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._refilling is not None:
            self._refilling.cancel()
        await asyncio.gather(*(m.kill("the engine closed") for m in list(self._machines.values())))
        self._drop_link()
        self._slots.close()

    def _drop_link(self) -> None:
        with suppress(OSError, ValueError):
            asyncio.get_running_loop().remove_reader(self._link.fileno())
        self._link.close()

    def sweep(self, keep: set[str]) -> list[str]:
        return holding.sweep_groups(keep)

    # ── the launcher's messages ─────────────────────────────────────────────────────────────────

    def _readable(self) -> None:
        while True:
            try:
                body, fds = wire.receive_raw(self._link)
            except BlockingIOError:
                return
            except OSError:
                body, fds = b"", []
            if not body:
                self._launcher_ended()
                return
            self._dispatch(_decode(body), fds)

    def _dispatch(self, frame: LauncherFrame, fds: list[int]) -> None:
        if frame.ready is not None and self._ready is not None and not self._ready.done():
            self._ready.set_result(frame)
        elif frame.spawned is not None and frame.spawned in self._machines:
            self._machines[frame.spawned].born(fds.pop())
        elif frame.refused is not None and frame.refused in self._machines:
            self._machines[frame.refused].refused(frame.reason)
        elif frame.died is not None and frame.died in self._machines:
            self._machines[frame.died].died()
        elif frame.captured is not None and frame.captured in self._machines:
            self._machines[frame.captured].captured(frame, fds)
            return
        wire.close_all(fds)

    def _launcher_ended(self) -> None:
        self._drop_link()
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(LauncherFrame(ready=False, reason="the launcher ended"))
        for lost in list(self._machines.values()):
            lost.died("the launcher ended")

    async def check(self) -> None:
        if not self.alive and not self._closed:
            await self._start_launcher(self.facts.rootless)

    @property
    def alive(self) -> bool:
        return not self._closed and self._link.fileno() >= 0

    # ── making one ──────────────────────────────────────────────────────────────────────────────

    async def create(
        self,
        sandbox_id: str,
        spec: model.SandboxSpec,
        rules: policy.Merged,
        exposure: interfaces.Exposure | None = None,
        image: interfaces.Image | None = None,
    ) -> NamespacesMachine:
        return await self._make(sandbox_id, spec, rules, exposure, image, None)

    async def restore(
        self,
        kept: str,
        sandbox_id: str,
        spec: model.SandboxSpec,
        rules: policy.Merged,
        exposure: interfaces.Exposure | None = None,
        image: interfaces.Image | None = None,
    ) -> NamespacesMachine:
        scratch = os.path.join(self._home, "images")
        mib = spec.resources.disk_mib
        start = await asyncio.to_thread(keeping.begin, kept, mib, scratch)
        try:
            self._check_kind(start)
            return await self._make(sandbox_id, spec, rules, exposure, image, start)
        finally:
            start.close()

    async def compare(self, kept: str, other: str) -> list[model.FileChange]:
        sides = {place: keeping.load(place) for place in (kept, other)}
        message = {
            "act": "diff",
            "left": [image.base for image in sides[kept].images],
            "right": [image.base for image in sides[other].images],
            "layers": keeping.to_compare(sides[kept], sides[other]),
            "stage": self._stage,
        }
        opened: list[int] = []
        try:
            for place in (kept, other):
                opened += keeping.open_all(place, sides[place])
            answer = await self.help(message, opened)
        finally:
            wire.close_all(opened)
        keeping.check_answer(answer, kept)
        changes = sorted(answer["changes"], key=lambda change: str(change["path"]))
        return msgspec.convert(changes, list[model.FileChange])

    def _check_kind(self, start: keeping.Start) -> None:
        if (start.pack < 0) == self.facts.loop_disks:
            return
        how = "by an ordinary user" if self.facts.loop_disks else "by root, as disk images"
        raise errors.error(
            "not_supported_by_driver",
            f"these files were kept {how}, which this engine cannot start from",
            hint="use them as the user who kept them",
        )

    async def _make(
        self,
        sandbox_id: str,
        spec: model.SandboxSpec,
        rules: policy.Merged,
        exposure: interfaces.Exposure | None,
        image: interfaces.Image | None,
        start: keeping.Start | None,
    ) -> NamespacesMachine:
        if image is not None:
            roots.check(image.root, exposure)
        if not self.alive:
            await self._start_launcher(self.facts.rootless)
        self._require(rules)
        self._missed = not self._embryos
        made = self._conceive() if self._missed else self._embryos.popleft()
        try:
            await made.spawned
            made.assign(sandbox_id, self._isolation(rules), exposure)
            held = made.hold(spec.resources, self._disk_limit(spec.resources.disk_mib))
            message = self._message(spec, rules, exposure, held, image)
            made.tell(message, start)
            await made.ready
            made.lies_above(message["steps"], start)
        except BaseException:
            await made.kill("creation failed")
            raise
        finally:
            self._refill_later()
        return made

    # Embryos: sandboxes that have their namespaces and cgroup and nothing else, made before anybody asks.

    def _conceive(self) -> NamespacesMachine:
        self._ensure_slots()
        try:
            return self._adopt(beginning.conceive(self._link, self.facts.groups, self._shape()))
        except OSError as problem:
            raise errors.error(
                "capacity_exceeded",
                f"the launcher cannot take more work: {problem.strerror}",
                hint="try again",
            ) from None

    def _adopt(self, embryo: beginning.Embryo) -> NamespacesMachine:
        made = NamespacesMachine(self, embryo)
        self._machines[made.key] = made
        return made

    def _refill_later(self) -> None:
        """Not at once: making embryos would compete with the first command of the sandbox that was just made."""
        if self._refilling is None and self._fewest and not self._closed:
            self._refilling = asyncio.get_running_loop().call_later(_REFILL_DELAY_S, self._refill)

    def _refill(self) -> None:
        """Keep some ready; more while they are used up faster than they are made."""
        self._refilling = None
        if self._missed:
            self._wanted = min(self._wanted * 2, _MOST_EMBRYOS)
        elif len(self._embryos) > self._wanted // 2:
            self._wanted = max(self._wanted - 1, self._fewest)
        if self.alive:
            with suppress(errors.ClocheError):  # told to whoever asks when none is ready
                for _ in range(self._wanted - len(self._embryos)):
                    self._embryos.append(self._conceive())

    def _require(self, rules: policy.Merged) -> None:
        holding.check_calls(rules)
        held = {"seccomp", "user_namespace"}
        held |= {"landlock"} if self.facts.landlock_abi else set()
        held |= {f"cgroup_{name}" for name in self.facts.groups.enforceable}
        held |= {"uid_range"} if not self.facts.rootless else set()
        held |= {"disk"} if self.facts.loop_disks else set()
        for feature in rules.isolation.required:
            if feature not in held:
                raise errors.error(
                    "kernel_feature_missing",
                    f"the policy requires {feature!r}, which this host does not give",
                    hint="run `cloche doctor`, or drop it from isolation.required of the policy",
                )

    def _isolation(self, rules: policy.Merged) -> model.Isolation:
        return model.Isolation(
            level="namespaces", driver=self.name, user_namespace=True, seccomp=True,
            landlock_abi=self.facts.landlock_abi, uid_range=not self.facts.rootless, root=rules.files.root, network="off",
            missing=self.facts.missing,
        )  # fmt: skip

    def _message(
        self,
        spec: model.SandboxSpec,
        rules: policy.Merged,
        exposure: interfaces.Exposure | None,
        held: holding.Held,
        image: interfaces.Image | None,
    ) -> dict[str, Any]:
        resources = spec.resources
        base = self._image if image is None else roots.of(image)
        self._usual = (resources, rules.files.root)
        extra = dict(exposure.env) if exposure is not None else {}
        view = beginning.make_view(base, resources.memory_mib, rules.files.root == "overlay", exposure)
        return {
            "steps": mounts.plan(view), "rlimits": held.rlimits, "affinity": held.affinity,
            "syscalls": rules.syscalls.profile, "denied_syscalls": list(rules.syscalls.deny), "landlock": _landlock_rules(rules, exposure),
            "disk": beginning.find_disk(self._home, resources.disk_mib, looped=self.facts.loop_disks),
            "owner": list(exposure.owner) if exposure is not None else None,
            "owns": image is not None and image.owns, "layer": rules.files.root == "overlay", "watch_mounts": exposure is not None and bool(exposure.protect or exposure.deny),
            "agent": {
                "env": {**base.environment, **extra, **spec.env}, "uid": host.USER_ID,
                "cwd": exposure.cwd if exposure is not None else "/workspace",
                "can_switch": not self.facts.rootless,
            },
        }  # fmt: skip

    def _disk_limit(self, mib: int) -> model.Limit:
        by = "loop file system" if self.facts.loop_disks else "tmpfs, counted as memory"
        return model.Limit(value=mib, enforcement="enforced", by=by)

    def _shape(self) -> dict[str, Any]:
        """What embryos are given ahead of need: the disk and the root that were asked for last, on the host's programs.
        An image is not held for them: one that was removed must not be in a root that waits."""
        resources, root = self._usual
        return beginning.make_shape(
            self._home, self._image, rootless=self.facts.rootless, memory_mib=resources.memory_mib,
            disk_mib=resources.disk_mib, writable=root == "overlay",
        )  # fmt: skip

    def mount(
        self, key: str, owner: tuple[int, int], protect: list[tuple[str, str]], deny: list[str]
    ) -> None:
        """Bind host paths read-only into a running sandbox, and hide others."""
        steps = [["bind", target, source, {"writable": False, "owner": True}] for source, target in protect]
        for target in deny:
            kind = "directory" if os.path.isdir(target) and not os.path.islink(target) else "file"
            steps.append(["mask", target, kind, {"writable": False}])
        with suppress(OSError):
            wire.send(self._link, {"op": "mount", "id": key, "owner": list(owner), "steps": steps})

    def capture(self, key: str) -> None:
        """Have the sockets made by which a running sandbox reaches the egress process; `captured` is told."""
        wire.send(self._link, {"op": "capture", "id": key})

    async def make_volume(self, directory: str, size_mib: int) -> model.Limit:
        from cloche.drivers import volumes

        return await asyncio.to_thread(volumes.make, directory, size_mib, loop=self.facts.loop_disks)

    async def volume_used(self, directory: str) -> int:
        from cloche.drivers import volumes

        known = volumes.used(directory)
        if known is not None:
            return known
        top = os.open(f"{directory}/{volumes.DATA}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            answer = await self.help({"act": "measure"}, [top])
        finally:
            os.close(top)
        keeping.check_answer(answer, directory)
        return int(answer["size"])

    async def check_volume(self, directory: str) -> None:
        from cloche.drivers import volumes

        volumes.hold(directory, read_only=False).close()

    async def remove_volume(self, directory: str) -> None:
        from cloche.drivers import volumes

        await asyncio.to_thread(volumes.remove, directory)

    async def help(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Have something done by a helper of the launcher, and wait for its answer."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            wire.send(self._link, {"op": "help", **message}, [writing, *fds])
        except OSError as problem:
            os.close(reading)
            raise errors.error(
                "capacity_exceeded",
                f"the launcher cannot take more work: {problem.strerror}",
                hint="try again",
            ) from None
        finally:
            os.close(writing)
        body = await asyncio.to_thread(_read_all, reading)
        if not body:
            raise errors.error("launcher_lost", "the launcher ended while it was asked for something")
        answer: dict[str, Any] = msgspec.json.decode(body)
        return answer

    def forget(self, gone: NamespacesMachine) -> None:
        self._machines.pop(gone.key, None)
        with suppress(ValueError):
            self._embryos.remove(gone)


class NamespacesMachine(holding.HeldMachine):
    def __init__(self, driver: NamespacesDriver, embryo: beginning.Embryo) -> None:
        super().__init__("", embryo.link, embryo.group, _UNBORN)
        self.key = embryo.key
        self.spawned: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._driver = driver
        self._killed = False
        self._protected: tuple[str, ...] = ()
        self._exposure: interfaces.Exposure | None = None
        self._mounts: watching.Mounts | None = None
        self._capturing: asyncio.Future[interfaces.Capture] | None = None
        self._stack = keeping.Stack()
        self._held: list[int] = []  # locks of volumes that no mount holds
        self._own: keeping.Image | None = None

    def born(self, pidfd: int) -> None:
        self._pidfd = pidfd
        if not self.spawned.done():
            self.spawned.set_result(None)

    def refused(self, reason: str) -> None:
        if not self.spawned.done():
            self.spawned.set_exception(
                errors.error("sandbox_create_failed", f"no sandbox could be made: {reason}")
            )
            self.spawned.exception()
        self.died(reason)

    def assign(
        self, sandbox_id: str, isolation: model.Isolation, exposure: interfaces.Exposure | None
    ) -> None:
        self.id = sandbox_id
        self.isolation = isolation
        if exposure is not None:
            self.shown, self.warnings, self.cwd = exposure.shown, exposure.warnings, exposure.cwd
            self._protected = tuple(target for _, target in exposure.protect)
            self._exposure = exposure

    def read_only_rule(self, path: str) -> str | None:
        for target in self._protected:
            if path == target or path.startswith(target + "/"):
                return f"workspace.protected {target}"
        if path.startswith("/proc/"):
            return "proc"
        private = any(path == p or path.startswith(p + "/") for p in (*mounts.PRIVATE, "/dev/shm"))
        return "root.read-only" if self.isolation.root == "read-only" and not private else None

    async def capture(self) -> interfaces.Capture:
        if self._capturing is not None and not self._capturing.done():
            raise errors.error("internal_error", "the sandbox's sockets are being made already")
        self._capturing = asyncio.get_running_loop().create_future()
        try:
            self._driver.capture(self.key)
        except OSError as problem:
            self._capturing = None
            raise errors.error(
                "network_unavailable",
                f"the launcher cannot take more work: {problem.strerror}",
                hint="try again",
            ) from None
        waited: set[asyncio.Future[Any]] = {self._capturing, self.ended}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not self._capturing.done():
            raise errors.error("sandbox_lost", f"the sandbox has ended: {self._reason}")
        return self._capturing.result()

    def captured(self, frame: LauncherFrame, fds: list[int]) -> None:
        waiting = self._capturing
        if waiting is None or waiting.done():
            wire.close_all(fds)
        elif frame.reason or len(frame.roles) != len(fds):
            wire.close_all(fds)
            why = frame.reason or "a socket is missing"
            waiting.set_exception(
                errors.error("network_unavailable", f"the sandbox's network could not be prepared: {why}")
            )
            waiting.exception()
        else:
            sockets = tuple(zip(frame.roles, fds, strict=True))
            waiting.set_result(interfaces.Capture(sockets, frame.how, frame.note))

    def tell(self, message: dict[str, Any], start: keeping.Start | None = None) -> None:
        if start is None:
            self._link.post(message)
            return
        keeping.check_layers(start.kept, message["steps"])
        self._link.post({**message, "kept": start.message()}, start.fds)

    def lies_above(self, steps: list[mounts.Step], start: keeping.Start | None) -> None:
        """Remember what a snapshot of this machine must say about itself."""
        if self._disk < 0:
            return
        below = () if start is None else tuple(b._replace(fd=os.dup(b.fd)) for b in start.below)
        self._stack = keeping.Stack(keeping.layers_of(steps), keeping.sources_of(steps), below)
        if start is not None and start.own is not None:
            self._own = start.own.image
        else:
            mib, empty = int(self.limits["disk_mib"].value), keeping.used_inodes(self._disk)
            self._own = keeping.Image(base=self._base, mib=mib, empty=empty)

    async def save(self, directory: str) -> interfaces.Saved:
        own = self._own
        if own is None or self._disk < 0:
            raise errors.error("sandbox_lost", "the sandbox has ended")
        if self._image < 0:
            return await self._save_pack(directory)
        # Copies of the descriptors: the machine may be killed meanwhile.
        disk, image = os.dup(self._disk), os.dup(self._image)
        below = tuple(b._replace(fd=os.dup(b.fd)) for b in self._stack.below)
        stack = self._stack._replace(below=below)
        try:
            kept = await asyncio.to_thread(keeping.save_images, disk, image, own, stack, directory)
        finally:
            wire.close_all([disk, image, *(b.fd for b in below)])
        return interfaces.Saved(kept.size, kept.files)

    async def attach_volume(self, directory: str, target: str, *, read_only: bool) -> None:
        from cloche.drivers import volumes

        held = volumes.hold(directory, read_only=read_only)
        message = {
            "act": "attach", "id": self.key, "source": held.path, "image": held.image, "target": target,
            "read_only": read_only,
        }  # fmt: skip
        try:
            answer = await self._driver.help(message, [held.fd])
            if "errno" in answer:
                raise _attach_error(answer, target)
            held.settle(read_only=read_only)
        except BaseException:
            held.close()
            raise
        if held.image:
            held.close()  # the mount has it
        else:
            self._held.append(held.fd)

    async def _save_pack(self, directory: str) -> interfaces.Saved:
        writing = keeping.open_pack(directory)
        try:
            message = {
                "act": "pack",
                "first_id": 0 if self._driver.facts.rootless else self._base,
                "wanted": keeping.layer_names(self._stack.layers),
            }
            answer = await self._driver.help(message, [self._disk, writing])
        finally:
            os.close(writing)
        keeping.check_answer(answer, directory)
        kept = keeping.Kept(
            self._stack.layers, self._stack.sources, files=answer["files"], size=answer["size"]
        )
        keeping.write_note(directory, kept)
        return interfaces.Saved(kept.size, kept.files)

    def _let_go_of_disk(self, *, keep_image: bool = False) -> None:
        below, held = self._stack.below, self._held
        self._stack, self._held = self._stack._replace(below=()), []
        wire.close_all([*(b.fd for b in below), *held])
        super()._let_go_of_disk(keep_image=keep_image)

    async def kill(self, reason: str) -> None:
        self._reason = self._reason or reason
        self.kill_now()
        if not self._driver.alive or self._pidfd < 0:
            self.died()
        await self._wait_gone()

    def kill_now(self) -> None:
        """PID 1's death is the death of its pid namespace. Once is enough: nothing survives SIGKILL but a moment."""
        # Before: who lets go last waits for the unmounting.
        self._let_go_of_disk(keep_image=self._image >= 0 and os.fstat(self._image).st_blocks > _MANY_BLOCKS)
        if self._pidfd >= 0 and not self._killed:
            self._killed = True
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.thaw()

    def _watch_mounts(self, fd: int) -> None:
        """When a program on the host replaces a protected file, the kernel takes the protection of that name off."""
        self._mounts = watching.Mounts(fd, self._mend)

    def _mend(self, points: set[str]) -> None:
        exposure = self._exposure
        if exposure is None:
            return
        lost = [(s, t) for s, t in exposure.protect if t not in points and os.path.lexists(s)]
        bared = [target for target in exposure.deny if target not in points and os.path.lexists(target)]
        if lost or bared:
            self._driver.mount(self.key, exposure.owner, lost, bared)

    def _release(self) -> None:
        self._driver.forget(self)
        if self.prepared is not None:
            wire.close_all([fd for _, fd in self.prepared.sockets])
            self.prepared = None
        if self._mounts is not None:
            self._mounts.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._remove_group()


def _attach_error(answer: dict[str, Any], target: str) -> errors.ClocheError:
    code, hint = {
        errno.ELOOP: ("path_loop", "name the directory that the link leads to"),
        errno.ENOTDIR: ("not_directory", "choose a directory, or a path that is not there yet"),
        errno.EROFS: (
            "path_invalid",
            "with a read-only root choose a place below /workspace, /home/user or /tmp",
        ),
        errno.EACCES: ("permission_denied", "choose another place"),
        errno.ESRCH: ("sandbox_lost", "create another sandbox"),
    }.get(answer["errno"], ("sandbox_create_failed", "run `cloche doctor`"))
    return errors.error(code, f"a volume cannot be attached at {target!r}: {answer['reason']}", hint=hint)


def _read_all(fd: int) -> bytes:
    with open(fd, "rb") as pipe:
        return pipe.read()


def _landlock_rules(rules: policy.Merged, exposure: interfaces.Exposure | None) -> list[tuple[str, int]]:
    if rules.files.root == "overlay":
        return [("/", landlock.ALL)]
    shown = [b.target for b in exposure.binds if b.writable] if exposure is not None else []
    shown += [target for _, target in exposure.private] if exposure is not None else []
    shown += [exposure.root] if exposure is not None and exposure.overlay else []
    writable = [(path, landlock.ALL) for path in (*mounts.PRIVATE, "/dev", "/proc", *shown)]
    return [("/", landlock.READ_ONLY), *writable]
