"""What engine and proxy say to each other, over one SOCK_SEQPACKET socket in the frames of `guest.wire`.

    → {"op":"configure","id":1,"options":{…}}                                once, first
    → {"op":"attach","id":2,"sandbox":"k3","sockets":["proxy","dns"],"rules":{…}}  + that many descriptors, in this order
    → {"op":"rules","id":3,"sandbox":"k3","rules":{…}}                       live: connections that are now refused end
    ← {"mint":"api.github.com"}                                              a certificate for this host is needed
    → {"op":"leaf","id":5,"host":"api.github.com","leaf":"-----BEGIN…"}      empty if there can be none
    → {"op":"detach","id":4,"sandbox":"k3"}                                  its listeners and connections are closed
    → {"op":"seen","id":17}                                                  the record with that id was taken note of
    ← {"ask":{"id":3,"sandbox":"k3","host":"example.com","port":443,…}}      a person is to decide
    → {"op":"answer","id":3,"allow":true}                                    or with false, and a sentence why
    ← {"done":2}                                                             or {"failed":2,"error":"…"}
    ← {"decision":{…Record…}}                                                when decided, and again when it ended

Credentials come as one more descriptor, the last, when `credentials` is true (credentials.py says what is in it).

The proxy trusts its engine. The engine reads what a proxy says as an attacker's words, because a proxy reads an attacker's
bytes: a schema, bounded frames, no descriptors.

A refusal has an id, and the client hears of it when the engine has `seen` it (or does not answer for a moment). Until then its
socket is open, so the engine can tell which process it belongs to; and what a command is refused stands in its result, however
soon it ends afterwards.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cloche import model
from cloche.policy import rules

Stage = Literal["decided", "closed", "credential"]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much one sandbox may take. Times are in seconds."""

    connections: int = 1024
    """At once; a further one is closed on arrival."""
    header_s: float = 10
    """From the first byte of a head, greeting or hello to its last: what trickles longer is cut."""
    connect_s: float = 10
    """To find and reach a server, all its addresses together."""
    idle_s: float = 900
    """Without a byte in either direction. Long, because waiting for a model's answer is ordinary."""
    lookups: int = 8
    """Name lookups at once: each holds a thread, and threads are shared by all sandboxes."""
    records_per_s: int = 100
    """Records beyond this are counted (`Record.dropped`) and not sent."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a proxy process runs. `parent` is `http://[user:password@]host:port`, a proxy that everything goes through."""

    limits: Limits = Limits()
    parent: str = ""
    authorities: str = ""
    """PEM: whom to trust besides this machine's authorities when a server's certificate is checked."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision, or the end of the connection it allowed, or (stage `credential`) a secret that was put in or withheld."""

    sandbox: str
    verdict: rules.Verdict
    host: str
    port: int
    protocol: str
    """http, tls, tcp, dns; or how it came, as long as nothing more is known: connect, socks, transparent."""
    reason: str
    """`allowed`, or a stable word: not_allowed, denied, ask, metadata, private_address, sni_mismatch, …; for one that was
    allowed and has ended, how: allowed, reset, idle, upload_limit, rules_changed, upstream_refused, upstream_timeout, …"""
    stage: Stage = "decided"
    rule: str = ""
    source: str = ""
    hint: str = ""
    method: str = ""
    address: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    duration_ms: float = 0
    dropped: int = 0
    """How many records of this sandbox were not sent before this one."""
    secret: str = ""
    place: str = ""
    """Stage `credential`: the secret's name, and where in a request it belongs."""
    peer: tuple[str, int] | None = None
    """The client's end, as its namespace names it."""
    id: int = 0
    """Of a refusal: what `seen` answers."""

    @property
    def target(self) -> str:
        where = f"[{self.host}]" if ":" in self.host else self.host
        return f"{where}:{self.port}" if self.port else self.host

    def denial(self) -> model.Denial | None:
        """What an execution's result and the journal say; None for what was let through, and for its end."""
        if self.verdict == "allow" or self.stage == "closed":
            return None
        return model.Denial(
            kind="network",
            operation="credential" if self.stage == "credential" else self.protocol,
            target=self.target,
            rule=self.rule or self.reason,
            hint=self.hint,
            evidence="proxy",
        )


class Ask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A connection that waits for somebody's word."""

    id: int
    sandbox: str
    host: str
    port: int
    protocol: str
    rule: str = ""
    """The rule that wants to be asked about; empty where no rule decides."""
    peer: tuple[str, int] | None = None


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Engine to proxy."""

    op: Literal["configure", "attach", "rules", "detach", "leaf", "seen", "answer"]
    id: int
    sandbox: str = ""
    sockets: tuple[Literal["proxy", "transparent", "dns"], ...] = ()
    rules: Any = None
    options: Options | None = None
    inspects: bool = False
    """TLS may be ended for this sandbox: the engine's authority is trusted in it."""
    credentials: bool = False
    host: str = ""
    leaf: str = ""
    allow: bool = False
    hint: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Proxy to engine: exactly one field is set."""

    done: int | None = None
    failed: int | None = None
    error: str = ""
    decision: Record | None = None
    ask: Ask | None = None
    mint: str = ""
