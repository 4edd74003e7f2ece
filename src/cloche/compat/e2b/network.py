"""E2B's network object as rules of ours, with E2B's meaning.

There an allowed entry wins over a denied one, and what nobody mentions is allowed; here deny wins, and a list of allowed targets denies
the rest. So it is translated, never merged:

* everything denied (`0.0.0.0/0` in `denyOut`, or no internet access): our mode `rules`, with what `allowOut` names as the only targets;
* else: our mode `open`, and the denied networks without the parts of them that `allowOut` names.

Names in `allowOut` mean something only where everything else is denied, in E2B's rules too, which refuse the rest. Private networks, loopback and
metadata services are never reached by E2B's rules, whatever they allow: the mode `open` keeps them out by itself, and what `allowOut` names
of them is left out of ours (refused, where nothing else is left of an entry). The operator's ceiling holds above all of it.

One difference is left, and it is the stricter side: with everything denied, a *name* that `allowOut` does not have is refused even if its address is
there. `test_network.py` holds the translation against an evaluator of E2B's rules.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from cloche.compat.e2b import faults

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_EVERYTHING = ipaddress.ip_network("0.0.0.0/0")
"""Allowed or denied, it means all there is: E2B's sandboxes know no other addresses."""
_MASK = re.compile(r"(?:[A-Za-z0-9._-]|\$\{PORT\}){1,200}(?::(?:\d{1,5}|\$\{PORT\}))?")
_NEVER: tuple[_Network, ...] = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16",
        "::/96", "::ffff:0:0/96", "64:ff9b::/96", "2002::/16", "fc00::/7", "fe80::/10", "fec0::/10",
    )
)  # fmt: skip


class Config(msgspec.Struct, forbid_unknown_fields=True, rename="camel", kw_only=True, omit_defaults=True):
    allow_out: list[str] = []
    deny_out: list[str] = []
    allow_public_traffic: bool | None = None
    rules: dict[str, Any] | None = None
    egress_proxy: Any = None
    mask_request_host: str | None = None
    dns_servers: list[str] | None = None
    https_ports: list[int] | None = None
    allow_internet_access: bool | None = msgspec.field(default=None, name="allow_internet_access")
    """Of the request that replaces the rules of a live sandbox; at creation it stands beside the object."""

    @property
    def public(self) -> bool:
        """Whether a sandbox's ports are open to everybody; they are unless somebody said otherwise."""
        return self.allow_public_traffic is not False

    def masked(self, port: int) -> str:
        """The host name that what listens on a port hears; empty is the one that was asked for."""
        return (self.mask_request_host or "").replace("${PORT}", str(port))

    def after(self, before: Config | None) -> Config:
        """These rules put in the place of others: they are about what goes out, and who may come in stays as it was unless it
        is said anew."""
        if before is None:
            return self
        kept = {
            field: getattr(before, field)
            for field in ("allow_public_traffic", "mask_request_host")
            if getattr(self, field) is None
        }
        return msgspec.structs.replace(self, **kept)


def translate(config: Config, *, internet: bool | None = None) -> dict[str, Any]:
    """The fields of our group `network`."""
    for field, value in (
        ("network.rules", config.rules), ("network.egressProxy", config.egress_proxy),
        ("network.dnsServers", config.dns_servers), ("network.httpsPorts", config.https_ports),
    ):  # fmt: skip
        if value:
            raise faults.missing(field)
    if config.mask_request_host is not None and not _MASK.fullmatch(config.mask_request_host):
        words = f"maskRequestHost is {config.mask_request_host[:100]!r}, which is no host name"
        raise faults.Fault(400, words, name="network_invalid")
    named = [entry for entry in config.allow_out if _network(entry) is None]
    allowed = [found for entry in config.allow_out if (found := _network(entry)) is not None]
    for entry in allowed:
        if not _without(entry, _NEVER):
            words = f"allowOut names {str(entry)!r}: private networks are never reached by these rules"
            raise faults.Fault(400, words, name="network_invalid")
    denied = [_address(entry) for entry in config.deny_out]
    if _EVERYTHING in allowed:
        return {"mode": "open", "allow": [], "deny": []}
    if internet is False or _EVERYTHING in denied:
        return _nothing_but(allowed, named)
    if named:
        raise faults.Fault(
            400,
            f"allowOut names {named[0]!r}: names are allowed only where denyOut has 0.0.0.0/0, which denies the rest",
            name="network_invalid",
        )
    left = [str(part) for entry in denied for part in _without(entry, allowed)]
    return {"mode": "open", "allow": [], "deny": left}


def _nothing_but(networks: list[_Network], names: list[str]) -> dict[str, Any]:
    parts = [str(part) for network in networks for part in _without(network, _NEVER)]
    allow = [*dict.fromkeys(parts), *names]
    return {"mode": "rules" if allow else "off", "allow": allow, "deny": []}


def _network(entry: str) -> _Network | None:
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None


def _address(entry: str) -> _Network:
    found = _network(entry)
    if found is None:
        raise faults.Fault(
            400, f"denyOut takes addresses and networks, not {entry[:100]!r}", name="network_invalid"
        )
    return found


def _without(whole: _Network, holes: Sequence[_Network]) -> list[_Network]:
    """The parts of a network that none of the others covers."""
    parts: list[_Network] = [whole]
    for hole in holes:
        rest: list[_Network] = []
        for part in parts:
            if part.version != hole.version or not part.overlaps(hole):
                rest.append(part)
            elif not part.subnet_of(hole):  # type: ignore[arg-type]
                rest += part.address_exclude(hole)  # type: ignore[arg-type]
        parts = rest
    return parts
