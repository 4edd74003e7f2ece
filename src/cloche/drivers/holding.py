"""What holds a machine: a cgroup where the host gives one, rlimits and affinity where not, and a name to sweep by.

Shared by every driver that runs our guest on this host's kernel.
"""

from __future__ import annotations

import asyncio
import socket
from typing import NamedTuple

from cloche import errors, interfaces, model, policy
from cloche.drivers import machine
from cloche.linux import cgroups, processes

_MIB = 1 << 20


class Held(NamedTuple):
    """What the sandbox's first process does about its limits itself."""

    rlimits: dict[str, int]
    affinity: list[int] | None


class HeldMachine(machine.GuestMachine):
    """A machine in a cgroup of its own, where there is one. The driver says how it is killed."""

    def __init__(
        self, sandbox_id: str, sock: socket.socket, group: cgroups.Group | None, isolation: model.Isolation
    ) -> None:
        super().__init__(sandbox_id, sock, {}, isolation)
        self._group = group
        self._pidfd = -1
        self._paused = False
        self._stopped: set[int] = set()
        self._agents = 1
        self._removed: asyncio.Future[bool] | None = None

    def hold(
        self, resources: model.Resources, disk: model.Limit, *, agents: int = 1, running: int | None = 0
    ) -> Held:
        """Apply the limits, and say for each who holds it: the kernel, a look from time to time, or nobody.

        `agents` are processes of ours that count but are not the user's. `running` is how many processes the kernel
        already counts against RLIMIT_NPROC; None where it binds nobody.
        """
        self._agents = agents
        enforced: frozenset[str] = frozenset()
        if self._group is not None:
            pids = resources.pids + agents
            enforced = self._group.set_limits(memory_mib=resources.memory_mib, cpus=resources.cpus, pids=pids)
        rlimits: dict[str, int] = {"CORE": 1}  # 0 would not stop a core pattern that is a pipe; 1 does
        affinity = None
        for name, value in (
            ("memory_mib", resources.memory_mib),
            ("pids", resources.pids),
            ("cpus", resources.cpus),
        ):
            self.limits[name] = model.Limit(value=value, enforcement="enforced", by="cgroup")
        if "memory" not in enforced:
            by = "proportional memory of the tree"
            self.limits["memory_mib"] = model.Limit(value=resources.memory_mib, enforcement="watched", by=by)
        if "pids" not in enforced and running is None:
            by = "RLIMIT_NPROC does not bind root"
            self.limits["pids"] = model.Limit(value=resources.pids, enforcement="none", by=by)
        elif "pids" not in enforced and running is not None:
            rlimits["NPROC"] = running + resources.pids + 1
            self.limits["pids"] = model.Limit(value=resources.pids, enforcement="enforced", by="RLIMIT_NPROC")
        if "cpus" not in enforced:
            affinity = processes.affinity_for(resources.cpus)
            self.limits["cpus"] = model.Limit(value=len(affinity), enforcement="enforced", by="affinity")
        self.limits["disk_mib"] = disk
        return Held(rlimits, affinity)

    def _rebind_limits(self, resources: model.Resources) -> None:
        disk = self.limits["disk_mib"]
        by = {self.limits[name].by for name in ("memory_mib", "pids", "cpus")}
        if disk.value != resources.disk_mib or by != {"cgroup"} or self._group is None:
            raise errors.error(
                "not_supported_by_driver",
                "the limits of a running sandbox can be changed where a cgroup holds them; its disk never",
            )
        self.hold(resources, disk, agents=self._agents)

    @property
    def host_pid(self) -> int:
        """The first process, as the host counts; -1 once it has ended."""
        return processes.pid_of(self._pidfd) if self._pidfd >= 0 else -1

    def leader_of(self, peer: tuple[str, int]) -> int:
        if self._pidfd < 0:
            return 0
        holder = processes.socket_holder(self.host_pid, *peer)
        return processes.session_inside(holder) if holder else 0

    def usage(self) -> interfaces.Usage:
        if self._group is not None:
            stats = self._group.stats()
            return interfaces.Usage(
                (stats.memory_bytes or 0) / _MIB, (stats.memory_peak_bytes or 0) / _MIB, stats.cpu_ms or 0,
                stats.pids or 0, stats.oom_kills or 0,
            )  # fmt: skip
        pids = processes.descendants(self.host_pid)
        tree = [self.host_pid, *pids]
        return interfaces.Usage(processes.tree_pss_mib(tree), 0, processes.tree_cpu_ms(tree), len(pids), 0)

    async def pause(self) -> None:
        """By the kernel's freezer, which nobody inside can notice; without one by stopping each process, which a parent
        that waits for stopped children can."""
        if self._group is not None and self._group.freeze():
            self._paused = True
            return
        if self._group is not None:
            self._group.thaw()
        stopped = await asyncio.to_thread(processes.stop_tree, self.host_pid)
        if stopped is None:
            raise errors.error(
                "not_supported_by_driver",
                "the sandbox does not stop: this host gives no freezer, and it starts processes faster than they are stopped",
                hint="end what runs in it; `cloche doctor` says what a freezer would need",
            )
        self._stopped = stopped
        self._paused = True

    async def resume(self) -> None:
        self.thaw()

    def thaw(self) -> None:
        """Also before any kill: a task frozen by cgroup v1 does not die on SIGKILL."""
        if self._paused and self._group is not None:
            self._group.thaw()
        processes.continue_all(self._stopped)
        self._stopped = set()
        self._paused = False

    def _remove_group(self) -> None:
        """Beside the event loop: the kernel takes two milliseconds over it."""
        if self._group is not None:
            self._removed = self._loop.run_in_executor(None, self._group.remove)

    async def _wait_gone(self) -> None:
        """Wait until nothing is left, the group included."""
        await asyncio.shield(self.ended)
        if self._removed is not None:
            await asyncio.shield(self._removed)


def sweep_groups(keep: set[str]) -> list[str]:
    """Remove the groups of dead engines; their names."""
    found = cgroups.detect().sweep("cloche-", keep)
    return [group.name for group in found if _is_orphan(group.name) and group.remove()]


def _is_orphan(group: str) -> bool:
    """Whether it is named as `beginning.make_group` names, and that engine is gone. Other names are other people's."""
    parts = group.split("-")
    if len(parts) != 4 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return False
    return processes.start_time(int(parts[1])) != int(parts[2])


def check_calls(rules: policy.Merged) -> None:
    """Refuse a policy whose `syscalls.deny` the filter could not obey."""
    if not rules.syscalls.deny:
        return
    from cloche.linux import seccomp

    try:
        seccomp.check_names(rules.syscalls.deny)
    except ValueError as problem:
        raise errors.error(
            "policy_invalid",
            f"syscalls.deny: {problem}",
            hint="names are those of the manual pages, section 2, such as ptrace",
            key="syscalls.deny",
        ) from None
