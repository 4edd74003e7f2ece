"""The network of sandboxes: who has one, what became of their connections, and what is said when it is down.

A sandbox gets its network after it was made and before its first command: the machine makes the sockets, the egress
process accepts on them, and only then is the sandbox anybody's. So rules are bound the same way whether the sandbox was made
for this caller or waited for one, and with any step failing there is no sandbox.

The egress process is started by the first sandbox that needs it. It may die; then everything attached has no network,
`fault` says so, and whoever wants to run something there waits for it a little and is refused with `network_unavailable`.

Where rules look into TLS, or secrets are put into requests, the sandbox trusts this engine's authority: a bundle replaces the
system's, or stands in the home directory where the root is read-only, and variables name it. Values of secrets pass here as a
sealed memory file that is handed on unread.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from cloche import errors, events, interfaces, model, policy
from cloche.engine import asking, files, journal, sandboxes

if TYPE_CHECKING:
    from cloche.measures import Measures

_PATIENCE_S = 10.0
_MOST_GRANTED = 1000
_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
_BUNDLE_AT_HOME = "/home/user/.cloche/ca-certificates.crt"


class Bound:
    """What a sandbox is given for its network: variables and files to see, and credentials that it never sees."""

    def __init__(self, grants: interfaces.Grants, env: dict[str, str], trust: str | None) -> None:
        self.env = {**env, **grants.env}
        self.files = grants.files
        self.credentials = grants.credentials
        self.trust = trust

    def close(self) -> None:
        if self.credentials is not None:
            self.credentials.close()


class Networks:
    def __init__(
        self,
        make: Callable[[], interfaces.Egress],
        secrets: Callable[[], interfaces.Secrets],
        asks: asking.Asks,
        record: journal.Journal,
        clock: interfaces.Clock,
        measures: Measures | None = None,
    ) -> None:
        self._make = make
        self._measures = measures
        self._secrets = secrets
        self.asks = asks
        self._journal = record
        self._clock = clock
        self._egress: interfaces.Egress | None = None
        self._attached: dict[str, sandboxes.Sandbox] = {}
        self._fault = ""
        self._back = asyncio.Event()

    @property
    def egress(self) -> interfaces.Egress:
        if self._egress is None:
            self._egress = self._make()
            self._egress.on_flow = self._flow
            self._egress.on_fault = self._faulted
            self._egress.on_ask = self._asked
        return self._egress

    def check(self, network: policy.Network) -> None:
        """Refuse rules that cannot be, before anything is made for them."""
        if network.mode != "off":
            self.egress.check(network)

    async def bind(self, spec: model.SandboxSpec, rules: policy.Merged, sandbox_id: str) -> Bound:
        """What there is to give before the sandbox is made; whoever gets it closes it."""
        if rules.network.mode == "off":
            if spec.secrets:
                raise errors.error(
                    "argument_invalid",
                    "secrets are put into requests on their way out, and the network is off",
                    hint="allow the hosts that they are bound to",
                )
            return Bound(interfaces.Grants({}, {}, None), {}, None)
        grants = interfaces.Grants({}, {}, None)
        if spec.secrets:
            grants = await asyncio.to_thread(lambda: self._secrets().grants(spec.secrets, sandbox_id))
            _refuse_both(grants, spec.env)
        trust = _bundle_path(rules) if spec.secrets or self.egress.sees_inside(rules.network) else None
        return Bound(grants, self.egress.environment(trust), trust)

    async def attach(self, sandbox: sandboxes.Sandbox, bound: Bound) -> None:
        """Give a sandbox the network of its rules; raises and has given nothing if any part is missing."""
        network = sandbox.rules.network
        machine = sandbox.machine
        if bound.trust is not None:
            await self._place_bundle(machine, bound.trust)
        for path, content in bound.files.items():
            await files.write(machine, _expanded(path), content, mode=0o600)
        made, machine.prepared = machine.prepared, None
        made = made or await machine.capture()
        self._attached[sandbox.id] = sandbox
        sandbox.own_ports = _ports(made)
        try:
            sandbox.trust = bound.trust
            await self.egress.attach(sandbox.id, made, self._permit(sandbox), bound.credentials)
        except BaseException:
            del self._attached[sandbox.id]
            sandbox.trust = None
            raise
        finally:
            for _, fd in made.sockets:
                os.close(fd)
        missing = (*machine.isolation.missing, made.note) if made.note else machine.isolation.missing
        machine.isolation = msgspec.structs.replace(machine.isolation, network=network.mode, missing=missing)

    def _permit(self, sandbox: sandboxes.Sandbox) -> interfaces.Permit:
        return interfaces.Permit(
            sandbox.rules.network,
            granted=tuple(sandbox.granted),
            asks=self.asks.anybody(sandbox.id),
            trusted=sandbox.trust is not None,
        )

    # ── asking ──────────────────────────────────────────────────────────────────────────────────

    def follow_asks(self, sandbox: sandboxes.Sandbox) -> AsyncIterator[model.Question]:
        async def changed() -> None:
            if sandbox.id in self._attached:
                with suppress(errors.SandboxLost):
                    await self.egress.update(sandbox.id, self._permit(sandbox))

        return self.asks.follow(sandbox.id, changed)

    async def _asked(self, question: model.Question, peer: tuple[str, int] | None) -> tuple[bool, str]:
        sandbox = self._attached.get(question.sandbox)
        if sandbox is None:
            return False, "the sandbox has ended"
        execution = sandbox.connected(peer, None)
        answer, why = await self.asks.ask(msgspec.structs.replace(question, execution=execution))
        if answer in ("sandbox", "always") and sandbox.id in self._attached:
            await self._grant(sandbox, question.target)
        return answer != "deny", why

    async def _grant(self, sandbox: sandboxes.Sandbox, rule: str) -> None:
        """From now on it is not asked about again, in this sandbox."""
        if rule in sandbox.granted or len(sandbox.granted) >= _MOST_GRANTED:
            return
        sandbox.granted.append(rule)
        await self.egress.update(sandbox.id, self._permit(sandbox))
        self._journal.append(
            events.PolicyChanged(
                sandbox=sandbox.id,
                time=self._clock.time(),
                actor="answer",
                change="updated",
                target="network",
                summary=(f"+granted {rule}",),
            )
        )

    async def prepare(self, machine: interfaces.Machine) -> None:
        """Ahead of need, for a sandbox that waits: if it is taken with a network, it has most of it already."""
        if self._egress is not None:
            with suppress(errors.ClocheError):
                machine.prepared = await machine.capture()

    def forgo(self, machine: interfaces.Machine) -> None:
        """It was taken without a network: what nobody accepts on is closed, so that attempts fail at once."""
        if machine.prepared is not None:
            for _, fd in machine.prepared.sockets:
                os.close(fd)
            machine.prepared = None

    async def _place_bundle(self, machine: interfaces.Machine, path: str) -> None:
        user = "root" if path == _BUNDLE and machine.isolation.uid_range else "user"
        await files.write(machine, path, await self.egress.trust(), user=user, mode=0o644)

    async def update(self, sandbox: sandboxes.Sandbox, network: policy.Network) -> None:
        """New rules for a live sandbox, in force when this returns."""
        self.egress.check(network)
        before = sandbox.rules
        sandbox.rules = msgspec.structs.replace(before, network=network)
        try:
            if sandbox.id in self._attached:
                await self._renew(sandbox, network)
            elif network.mode != "off":
                bound = await self.bind(sandbox.spec, sandbox.rules, sandbox.id)
                env = {**bound.env, **sandbox.spec.env}
                try:
                    await asyncio.gather(
                        self.attach(sandbox, bound), sandbox.machine.bind(interfaces.Binding(env))
                    )
                finally:
                    bound.close()
        except BaseException:
            sandbox.rules = before
            raise

    async def rebind(self, sandbox: sandboxes.Sandbox, bound: Bound) -> None:
        """The rules of whoever gets a sandbox that waited, which it has by now; variables are bound by the caller."""
        network = sandbox.rules.network
        if sandbox.id not in self._attached:
            if network.mode != "off":
                await self.attach(sandbox, bound)
        elif bound.credentials is not None:
            raise errors.error(
                "not_supported_by_driver", "secrets cannot be added to a sandbox that has its network already"
            )
        else:
            await self._renew(sandbox, network)

    async def _renew(self, sandbox: sandboxes.Sandbox, network: policy.Network) -> None:
        machine = sandbox.machine
        if sandbox.trust is None and self.egress.sees_inside(network):
            path = _bundle_path(sandbox.rules)
            await self._place_bundle(machine, path)
            env = {**self.egress.environment(path), **sandbox.spec.env}
            await machine.bind(interfaces.Binding(env))
            sandbox.trust = path
        await self.egress.update(sandbox.id, self._permit(sandbox))
        machine.isolation = msgspec.structs.replace(machine.isolation, network=network.mode)

    async def detach(self, sandbox: sandboxes.Sandbox) -> None:
        self.asks.forget(sandbox.id)
        if self._attached.pop(sandbox.id, None) is not None:
            await self.egress.detach(sandbox.id)

    async def ready(self, sandbox: sandboxes.Sandbox) -> None:
        """Wait until a sandbox that has a network really has it."""
        if not self._fault or sandbox.id not in self._attached:
            return
        try:
            await asyncio.wait_for(self._back.wait(), _PATIENCE_S)
        except TimeoutError:
            raise errors.error(
                "network_unavailable",
                f"the sandbox has no network at the moment: {self._fault}",
                hint="try again; it is restarted by itself",
            ) from None

    async def aclose(self) -> None:
        if self._egress is not None:
            await self._egress.aclose()

    # ── what the egress process says ────────────────────────────────────────────────────────────

    def _flow(self, flow: interfaces.Flow) -> None:
        if flow.stage == "closed" and self._measures is not None:
            self._measures.carried(flow.bytes_up, flow.bytes_down)
        sandbox = self._attached.get(flow.sandbox)
        if sandbox is None or flow.stage == "closed":
            return
        execution = sandbox.connected(flow.peer, flow.denial)
        event = self._event(flow, execution)
        if execution is not None and (asked := sandbox.execution(execution).trace) is not None:
            event = msgspec.structs.replace(event, trace=asked.id)
        self._journal.append(event)
        if flow.denial is not None and execution is None:
            self._journal.append(
                events.Denied(sandbox=sandbox.id, time=self._clock.time(), actor="guest", denial=flow.denial)
            )

    def _event(self, flow: interfaces.Flow, execution: str | None) -> events.AnyEvent:
        now = self._clock.time()
        if flow.stage == "credential" and flow.verdict == "allow":
            return events.CredentialUsed(
                sandbox=flow.sandbox, time=now, actor="guest", secret=flow.secret, host=flow.target,
                place=flow.place, method=flow.method, execution=execution,
            )  # fmt: skip
        return events.Decided(
            sandbox=flow.sandbox, time=now, actor="guest", verdict=flow.verdict, operation=flow.operation,
            target=flow.target, rule=flow.rule, source=flow.source, reason=flow.reason, method=flow.method,
            address=flow.address, execution=execution, dropped=flow.dropped,
        )  # fmt: skip

    def _faulted(self, reason: str) -> None:
        self._fault = reason
        if not reason:
            self._back.set()
            return
        self._back.clear()
        for sandbox in self._attached.values():
            sandbox.faulted(f"network_unavailable: {reason}")


def _bundle_path(rules: policy.Merged) -> str:
    return _BUNDLE if rules.files.root == "overlay" else _BUNDLE_AT_HOME


def _ports(made: interfaces.Capture) -> frozenset[int]:
    """The TCP ports inside on which the way out is entered."""
    found = set()
    for _, fd in made.sockets:
        with socket.socket(fileno=os.dup(fd)) as shown:
            if shown.type == socket.SOCK_STREAM and shown.family != socket.AF_UNIX:
                found.add(shown.getsockname()[1])
    return frozenset(found)


def _refuse_both(grants: interfaces.Grants, env: dict[str, str]) -> None:
    """A variable that a secret and the caller set: either choice would be a surprise, and one of them leaks a value."""
    both = sorted(set(grants.env) & set(env))
    if not both:
        return
    if grants.credentials is not None:
        grants.credentials.close()
    raise errors.error(
        "environment_invalid",
        f"{both[0]} is set by the sandbox's environment and by a secret",
        hint="leave it to the secret: its placeholder stands for the value",
    )


def _expanded(path: str) -> str:
    return f"/home/user/{path[2:]}" if path.startswith("~/") else path


def difference(before: policy.Network, after: policy.Network) -> tuple[str, ...]:
    """What a change added and took away, a line each."""
    lines = [f"{before.mode} → {after.mode}"] if before.mode != after.mode else []
    for field in ("allow", "deny", "ask", "resolve"):
        old, new = _lines(getattr(before, field)), _lines(getattr(after, field))
        lines += [f"-{field} {line}" for line in old if line not in new]
        lines += [f"+{field} {line}" for line in new if line not in old]
    return tuple(lines)


def _lines(rules: tuple[str, ...] | dict[str, str]) -> list[str]:
    return [f"{key} = {value}" for key, value in rules.items()] if isinstance(rules, dict) else list(rules)
