"""The policy question: may this sandbox speak to this host and port? One pure function, used for enforcing and explaining.

    rule    = target [ ":" port ] { " " option }
    target  = host | "*." host | "**." host | address | network
    option  = "methods=" METHOD { "," METHOD } | "path=/" prefix | "upload_bytes=" number | "raw"
            | "reason=" text to the end of the line

    pypi.org                                     that name, every port
    **.github.com:443 methods=GET,HEAD           github.com and all names below it (`*.` without the apex itself)
    10.1.0.0/16:5432                             addresses, which nothing else allows: they are not public

* Deny wins over ask, ask over allow; an empty list allows nothing. Among allowing rules the most specific one counts
  (exact name, then the longest suffix; within those, the first), because it carries the upload cap.
* An address satisfies only address and network rules, a name only name rules. After a name is resolved, `check_address`
  judges each address: what is not public needs a network rule, a metadata service is refused whatever anybody wrote.
* `mode` is `off` (nothing), `rules`, or `open` (all public addresses, but for deny and ask).
* Methods and paths can only be seen in HTTP: plain, or inside TLS that the proxy ends (`asks_to_see`). An allow rule with them does not match bytes that cannot be read; a deny
  rule with them does. Until content is seen (`protocol` is one of `OPENING`) it is the other way round: the question is then
  whether anything could be allowed at all.
* `host.cloche.internal` is the host's loopback: only an allow rule with that very name and a port reaches it.
* `ask` refuses until somebody who was asked has granted it (`is_askable` says what may be asked about). Granting goes before
  ask and after deny; addresses are judged afterwards as always.

A decision costs microseconds: rules are indexed once by exact name, suffix and network length.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import msgspec

from cloche import errors
from cloche.policy import names

Verdict = Literal["allow", "deny"]
Mode = Literal["off", "rules", "open"]
Protocol = Literal["http", "https", "tls", "tcp", "dns", "connect", "socks", "transparent"]
OPENING: frozenset[str] = frozenset(("dns", "connect", "socks", "transparent"))

_METHODS = re.compile(r"[A-Z]{1,16}(,[A-Z]{1,16})*\Z")
_AMBIGUOUS = re.compile(r"(^|/)\.{1,2}(/|$)|//|\\|%|[\x00-\x20\x7f]")
_BASE_HINT = "see docs/concepts/network.md for the grammar"


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a list. `host` may be a name, `*.name`, `**.name`, an address or a network; it is kept canonical."""

    host: str
    port: int | None = None
    methods: tuple[str, ...] = ()
    path: str = ""
    upload_bytes: int | None = None
    """How much one connection may send before it is cut; None is without limit."""
    raw: bool = False
    """Lets bytes through unseen: no TLS needed on 443, no HTTP on 80."""
    reason: str = ""
    """The author's own words, shown with a refusal."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "host", _canonical_target(self.host))
        msgspec.structs.force_setattr(self, "methods", tuple(method.upper() for method in self.methods))
        if self.port is not None and not 1 <= self.port <= 65535:
            raise _bad(self.host, f"{self.port} is not a port")
        if self.methods and not _METHODS.match(",".join(self.methods)):
            raise _bad(self.host, "methods are words such as GET,HEAD")
        if self.path and (not self.path.startswith("/") or _AMBIGUOUS.search(self.path) or "?" in self.path):
            raise _bad(self.host, "a path starts with / and is written plainly: no dots, escapes or query")
        if self.upload_bytes is not None and self.upload_bytes < 0:
            raise _bad(self.host, "upload_bytes is 0 or more")
        if self.raw and (self.methods or self.path):
            raise _bad(self.host, "raw bytes have no methods and no path")

    @classmethod
    def parse(cls, text: str) -> Rule:
        """A rule from its one-line form."""
        target, *options = text.strip().split(" ")
        host, port = _split_target(target)
        return cls(host=host, port=port, **_options(text, options))

    @property
    def is_conditional(self) -> bool:
        return bool(self.methods or self.path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host and self.port else self.host
        parts = [host + (f":{self.port}" if self.port else "")]
        if self.methods:
            parts.append("methods=" + ",".join(self.methods))
        if self.path:
            parts.append(f"path={self.path}")
        if self.upload_bytes is not None:
            parts.append(f"upload_bytes={self.upload_bytes}")
        if self.raw:
            parts.append("raw")
        if self.reason:
            parts.append(f"reason={self.reason}")
        return " ".join(parts)


class Request(NamedTuple):
    """What somebody inside wants. Method and path are None where they cannot be seen (or not yet)."""

    host: str
    port: int
    protocol: Protocol = "tcp"
    method: str | None = None
    path: str | None = None


class Decision(NamedTuple):
    """Why it is so. `reason` is a stable word, `hint` a sentence that says what to do."""

    verdict: Verdict
    rule: Rule | None
    source: str
    reason: str
    hint: str = ""

    @property
    def allowed(self) -> bool:
        return self.verdict == "allow"


class RuleSet(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, dict=True
):
    """All that decides about one sandbox's network."""

    mode: Mode = "off"
    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()
    ask: tuple[Rule, ...] = ()
    resolve: dict[str, str] = {}
    """`host:port` → `address:port`: where that one is dialled, whatever the name service says."""
    asks: bool = False
    """Somebody wants to be asked about what no rule decides."""
    granted: tuple[Rule, ...] = ()
    """What somebody who was asked has allowed, for as long as the sandbox lives."""

    def __post_init__(self) -> None:
        for rule in self.allow:
            _check_allow(rule)
        msgspec.structs.force_setattr(self, "resolve", dict(_overrides(self.resolve)))

    @classmethod
    def make(
        cls,
        mode: Mode = "rules",
        *,
        allow: Iterable[str | Rule | Mapping[str, Any]] = (),
        deny: Iterable[str | Rule | Mapping[str, Any]] = (),
        ask: Iterable[str | Rule | Mapping[str, Any]] = (),
        resolve: Mapping[str, str] | None = None,
        asks: bool = False,
        granted: Iterable[str | Rule | Mapping[str, Any]] = (),
    ) -> RuleSet:
        """From what users write: lines, tables or rules. A mistake raises `policy_invalid` and names the line."""
        return cls(
            mode=mode,
            allow=tuple(map(_rule, allow)),
            deny=tuple(map(_rule, deny)),
            ask=tuple(map(_rule, ask)),
            resolve=dict(resolve or {}),
            asks=asks,
            granted=tuple(map(_rule, granted)),
        )

    @classmethod
    def from_builtins(cls, data: Any) -> RuleSet:
        """What `to_builtins` gave, after a wire."""
        return msgspec.convert(data, cls)

    def to_builtins(self) -> Any:
        return msgspec.to_builtins(self)

    @functools.cached_property
    def index(self) -> Index:
        return Index(self)


class Index:
    """A rule set prepared for asking: one lookup per label of a name, one per network length of an address."""

    def __init__(self, rules: RuleSet) -> None:
        self.allow = Lookup(rules.allow)
        self.deny = Lookup(rules.deny)
        self.ask = Lookup(rules.ask)
        self.granted = Lookup(rules.granted)
        self.conditional = any(rule.is_conditional for rule in (*rules.allow, *rules.deny, *rules.ask))


class Lookup:
    """The rules of one list that concern a host, the most specific first."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.exact: dict[str, list[Rule]] = {}
        self.below: dict[str, list[Rule]] = {}
        self.networks: dict[tuple[int, int], dict[int, list[Rule]]] = {}
        for rule in rules:
            self._add(rule)
        self.lengths = sorted(self.networks, reverse=True)

    def _add(self, rule: Rule) -> None:
        host = rule.host
        if host.startswith("*"):
            base = host.lstrip("*")[1:]
            self.below.setdefault(base, []).append(rule)
            if host.startswith("**"):
                self.exact.setdefault(base, []).append(rule)
        elif "/" in host or names.is_address(host):
            network = ipaddress.ip_network(host)
            level = self.networks.setdefault((network.version, network.prefixlen), {})
            level.setdefault(int(network.network_address), []).append(rule)
        else:
            # An exact rule stands before an apex one of `**.`, however they were listed.
            bucket = self.exact.setdefault(host, [])
            bucket.insert(sum(not other.host.startswith("*") for other in bucket), rule)

    def of_name(self, host: str) -> Iterator[Rule]:
        yield from self.exact.get(host, ())
        if self.below:
            dot = host.find(".")
            while dot >= 0:
                yield from self.below.get(host[dot + 1 :], ())
                dot = host.find(".", dot + 1)

    def of_address(self, address: names.Address) -> Iterator[Rule]:
        width = address.max_prefixlen
        value = int(address)
        for version, length in self.lengths:
            if version == address.version:
                base = value >> (width - length) << (width - length)
                yield from self.networks[version, length].get(base, ())


# ── the questions ──────────────────────────────────────────────────────────────────────────────────


def decide(rules: RuleSet, request: Request) -> Decision:
    """Whether a request may be made. For an address this is the whole answer; for a name `check_address` follows."""
    try:
        host = names.canonical(request.host)
    except names.BadHost as problem:
        return _deny("built-in", "name_invalid", f"{problem}; write the host's plain name")
    if rules.mode == "off":
        return _deny(
            "policy.network", "network_off", 'the sandbox has no network; use network="rules" and allow'
        )
    if host != request.host:
        request = request._replace(host=host)
    if names.is_address(host):
        return _decide_address(rules, request)
    return _decide_name(rules, request)


def could_allow(rules: RuleSet, host: str) -> Decision:
    """Whether any request to this name might be allowed: what the name service asks before it gives an address."""
    decision = decide(rules, Request(host, 0, "dns"))
    if is_askable(rules, decision):
        return Decision("allow", decision.rule, decision.source, "ask")
    return decision


def is_askable(rules: RuleSet, decision: Decision) -> bool:
    """Whether a person may turn this refusal: a rule says so, or no rule decides. Never what a rule or the house denies."""
    if decision.allowed:
        return False
    return decision.reason == "ask" or (rules.asks and decision.reason in ("not_allowed", "port_not_allowed"))


def check_address(rules: RuleSet, host: str, address: str, port: int, *, pinned: bool = False) -> Decision:
    """Whether a name that was allowed may be dialled at this address.

    `pinned` says that the address comes from `resolve`, where the caller named it: it need not be public then.
    """
    try:
        parsed, kind = names.facts(names.canonical(address))
    except ValueError as problem:
        return _deny("built-in", "name_invalid", str(problem))
    if kind == "metadata":
        return _metadata(host)
    for rule in rules.index.deny.of_address(parsed):
        if rule.port in (None, port):
            return _denied(rule)
    if kind == "public" or pinned:
        return Decision("allow", None, "built-in", "allowed")
    if host == names.HOST_LOOPBACK and kind == "loopback":
        return Decision("allow", None, "built-in", "allowed")
    for rule in rules.index.allow.of_address(parsed):
        if rule.port in (None, port):
            return Decision("allow", rule, "policy.network.allow", "allowed")
    return _deny("built-in", "private_address", _private_hint(host, parsed, kind, port))


def asks_to_see(rules: RuleSet, host: str, port: int) -> bool:
    """Whether a rule for this host has methods or a path: then TLS must be opened to judge by it."""
    index = rules.index
    if not index.conditional:
        return False
    lookups = (index.allow, index.deny, index.ask)
    if names.is_address(host):
        address = names.facts(host)[0]
        concerned = (rule for lookup in lookups for rule in lookup.of_address(address))
    else:
        concerned = (rule for lookup in lookups for rule in lookup.of_name(host))
    return any(rule.is_conditional and rule.port in (None, port) for rule in concerned)


def denied_by_name(rules: RuleSet, host: str, port: int) -> Decision | None:
    """The refusal of a name by an explicit list, None if none has it: for names seen inside a connection to an address."""
    found = _listed(rules, Request(host, port, "tcp"), lambda lookup: lookup.of_name(host))
    if found is not None and found.allowed:
        return None
    return found or (_metadata(host) if host in names.METADATA_NAMES else None)


def override(rules: RuleSet, host: str, port: int) -> tuple[str, int] | None:
    """Where `resolve` sends a request, as address and port."""
    target = rules.resolve.get(f"{host}:{port}")
    return names.split_authority(target) if target else None


def _decide_name(rules: RuleSet, request: Request) -> Decision:
    host = request.host
    if host in names.METADATA_NAMES:
        return _metadata(host)
    if host == "localhost" or host.endswith(".localhost"):
        return _deny(
            "built-in",
            "private_address",
            f"inside, localhost is the sandbox itself: do not use a proxy for it; the host's is {names.HOST_LOOPBACK}:PORT",
        )
    if refused := _listed(rules, request, lambda lookup: lookup.of_name(host)):
        return refused
    if host == names.HOST_LOOPBACK:
        candidates: Iterator[Rule] = (
            rule for rule in rules.index.allow.exact.get(host, ()) if rule.host == names.HOST_LOOPBACK
        )
        return _first_allowing(candidates, request)
    if rules.mode == "open":
        return _open(rules.index.allow.of_name(host), request)
    return _first_allowing(rules.index.allow.of_name(host), request)


def _decide_address(rules: RuleSet, request: Request) -> Decision:
    address, kind = names.facts(request.host)
    if kind == "metadata":
        return _metadata(request.host)
    if refused := _listed(rules, request, lambda lookup: lookup.of_address(address)):
        return refused
    if rules.mode == "open" and kind == "public":
        return _open(rules.index.allow.of_address(address), request)
    decision = _first_allowing(rules.index.allow.of_address(address), request)
    if decision.reason == "not_allowed" and kind != "public":
        hint = _private_hint(request.host, address, kind, request.port)
        return _deny("built-in", "private_address", hint)
    return decision


def _listed(rules: RuleSet, request: Request, concerned: Any) -> Decision | None:
    """The refusal by the deny or the ask list; what was asked about and granted is allowed."""
    opening = request.protocol in OPENING
    for rule in concerned(rules.index.deny):
        if _meets(rule, request) in ((True,) if opening else (True, None)):
            return _denied(rule)
    for rule in concerned(rules.index.granted):
        if _meets(rule, request):
            return Decision("allow", rule, "answer", "allowed")
    for rule in concerned(rules.index.ask):
        if _meets(rule, request) in ((True,) if opening else (True, None)):
            return Decision(
                "deny",
                rule,
                "policy.network.ask",
                "ask",
                f"the rule {str(rule)!r} wants a person to decide; give the sandbox somebody to ask, or allow or deny it",
            )
    return None


def _first_allowing(candidates: Iterator[Rule], request: Request) -> Decision:
    opening = request.protocol in OPENING
    nearest: Rule | None = None
    unseen = False
    for rule in candidates:
        meets = _meets(rule, request)
        if meets or (meets is None and opening):
            return Decision("allow", rule, "policy.network.allow", "allowed")
        nearest = nearest or rule
        unseen = unseen or meets is None
    return _not_allowed(request, nearest, unseen)


def _open(candidates: Iterator[Rule], request: Request) -> Decision:
    """Everything goes; a rule that concerns it still brings its cap."""
    decision = _first_allowing(candidates, request)
    return decision if decision.allowed else Decision("allow", None, "policy.network", "allowed")


def _meets(rule: Rule, request: Request) -> bool | None:
    """Whether a rule of the right host concerns this request; None if that cannot be seen."""
    if rule.port is not None and rule.port != request.port:
        return False if request.port else None  # 0: the question is about any port
    if not rule.is_conditional:
        return True
    if request.method is None:
        return None
    if rule.methods and request.method not in rule.methods:
        return False
    return _below(rule.path, request.path or "/") if rule.path else True


def _below(prefix: str, path: str) -> bool | None:
    """Whether a request's path is the prefix or below it; None if a server might read the path in another way."""
    plain = unquote(path.partition("?")[0])
    if _AMBIGUOUS.search(plain) or ";" in plain:
        return None
    return plain == prefix or plain.startswith(prefix if prefix.endswith("/") else prefix + "/")


# ── what two rule sets both allow ──────────────────────────────────────────────────────────────────


def both(one: RuleSet, other: RuleSet) -> RuleSet:
    """A rule set that allows what both allow, and denies or asks about what either does.

    The judge is `decide`: whatever is asked with its content in sight, the answer is "allow" if and only if both say so,
    and then with the lower cap of the two rules that count. Before content is seen it may refuse where no content could
    ever satisfy both. `resolve` is the first one's, without the addresses that the other would not let a name lead to.

    Each pair of rules is one rule or none. Pairs stand in the order in which the two sets would look, so that the pair of the
    two rules that count stands before every other pair which matches (tests/policy/test_rules.py has it as a property).
    """
    mode = min(one.mode, other.mode, key=_ORDER.index)
    if mode == "off":
        return RuleSet(deny=_joined(one.deny, other.deny), ask=_joined(one.ask, other.ask))
    pairs = (
        _pair(left, right)
        for left in _looking(one)
        for right in _looking(other)
        if left is not None or right is not None
    )
    return RuleSet(
        mode=mode,
        allow=tuple(dict.fromkeys(rule for pair in pairs for rule in pair)),
        deny=_joined(one.deny, other.deny),
        ask=_joined(one.ask, other.ask),
        resolve={
            key: value
            for key, value in one.resolve.items()
            if check_address(other, key.rpartition(":")[0], *names.split_authority(value)).allowed
        },
    )


_ORDER: tuple[Mode, ...] = ("off", "rules", "open")


def _joined(one: tuple[Rule, ...], other: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(dict.fromkeys((*one, *other)))


def _looking(rules: RuleSet) -> list[Rule | None]:
    """The allowing rules, the most specific first; None at the end of an open set stands for all that is public."""
    ordered: list[Rule | None] = [*sorted(rules.allow, key=_specificity)]
    return [*ordered, None] if rules.mode == "open" else ordered


def _specificity(rule: Rule) -> tuple[int, int]:
    """Small is specific. Names and addresses never meet, so that one scale does for both."""
    if rule.host.startswith("*"):
        return 1, -rule.host.count(".")
    if _is_network(rule.host):
        return 1, -_network(rule.host).prefixlen
    return 0, 0


def _pair(one: Rule | None, other: Rule | None) -> tuple[Rule, ...]:
    if one is None or other is None:
        rule = one or other
        assert rule is not None
        return _public_part(rule)
    host = _narrower_host(one.host, other.host)
    if host is None or (None not in (one.port, other.port) and one.port != other.port):
        return ()
    methods = tuple(m for m in one.methods or other.methods if m in (other.methods or one.methods))
    if (one.methods or other.methods) and not methods:
        return ()
    path = _narrower_path(one.path, other.path)
    if path is None:
        return ()
    caps = [cap for cap in (one.upload_bytes, other.upload_bytes) if cap is not None]
    return (
        Rule(
            host=host,
            port=one.port if one.port is not None else other.port,
            methods=methods,
            path=path,
            upload_bytes=min(caps, default=None),
            raw=one.raw and other.raw,
            reason=one.reason or other.reason,
        ),
    )


def _public_part(rule: Rule) -> tuple[Rule, ...]:
    """What an open set without a word about it allows of a rule: names, and of addresses those that are public."""
    if rule.host == names.HOST_LOOPBACK:
        return ()
    rule = msgspec.structs.replace(rule, raw=False)  # that is for a rule to say
    if not _is_network(rule.host):
        return (rule,)
    left = names.public_parts(_network(rule.host))
    return tuple(msgspec.structs.replace(rule, host=_network_text(part)) for part in left)


@functools.lru_cache(maxsize=1024)
def _network(text: str) -> names.Network:
    return ipaddress.ip_network(text)


def _network_text(network: names.Network) -> str:
    whole = network.prefixlen == network.max_prefixlen
    return str(network.network_address) if whole else str(network)


def _narrower_host(one: str, other: str) -> str | None:
    """The target that both have; None if there is none."""
    if one == other:
        return one
    if names.HOST_LOOPBACK in (one, other):
        return None  # no wildcard has it
    for narrow, wide in ((one, other), (other, one)):
        if _has_target(wide, narrow):
            return narrow
    return None


def _has_target(wide: str, narrow: str) -> bool:
    if _is_network(wide) != _is_network(narrow):
        return False
    if _is_network(wide):
        outer, inner = _network(wide), _network(narrow)
        return outer.version == inner.version and inner.subnet_of(outer)  # type: ignore[arg-type]
    if not wide.startswith("*"):
        return False
    base = wide.lstrip("*")[1:]
    if narrow.startswith("*"):
        inside = narrow.lstrip("*")[1:]
        return inside.endswith("." + base) or (inside == base and wide.startswith("**"))
    return narrow.endswith("." + base) or (narrow == base and wide.startswith("**"))


def _is_network(host: str) -> bool:
    return "/" in host or (not host.startswith("*") and names.is_address(host))


def _narrower_path(one: str, other: str) -> str | None:
    for narrow, wide in ((one, other), (other, one)):
        if not wide or _below(wide, narrow):
            return narrow
    return None


# ── answers ────────────────────────────────────────────────────────────────────────────────────────


def _deny(source: str, reason: str, hint: str) -> Decision:
    return Decision("deny", None, source, reason, hint)


def _denied(rule: Rule) -> Decision:
    hint = rule.reason or f"the deny rule {str(rule)!r} decides; nothing but removing it allows this"
    return Decision("deny", rule, "policy.network.deny", "denied", hint)


def _metadata(host: str) -> Decision:
    return _deny("built-in", "metadata", f"{host} is a cloud's metadata service; no rule can allow it")


def _not_allowed(request: Request, nearest: Rule | None, unseen: bool) -> Decision:
    where = f"[{request.host}]" if ":" in request.host else request.host
    add = (
        f'add "{where}:{request.port}" to policy.network.allow'
        if request.port
        else f'add "{where}" to policy.network.allow'
    )
    if nearest is None:
        return _deny("policy.network.allow", "not_allowed", add)
    if nearest.port not in (None, request.port):
        return Decision("deny", nearest, "policy.network.allow", "port_not_allowed", add)
    if unseen:
        hint = (
            f"the rule {str(nearest)!r} needs HTTP with a plain path to be checked; {add} to allow it unseen"
        )
        return Decision("deny", nearest, "policy.network.allow", "uninspectable", hint)
    hint = f"the rule {str(nearest)!r} does not have this method or path; {add} to allow all"
    return Decision("deny", nearest, "policy.network.allow", "method_not_allowed", hint)


def _private_hint(host: str, address: names.Address, kind: str, port: int) -> str:
    where = f"{host} is" if host == str(address) else f"{host} is {address}, which is"
    shown = f"[{address}]" if address.version == 6 else str(address)
    hint = f'{where} {kind}, not public; only a rule for the address allows it: "{shown}:{port}"'
    return hint + (f"; the host's loopback is {names.HOST_LOOPBACK}:PORT" if kind == "loopback" else "")


# ── reading what users write ───────────────────────────────────────────────────────────────────────


def _rule(item: str | Rule | Mapping[str, Any]) -> Rule:
    if isinstance(item, Rule):
        return item
    if isinstance(item, str):
        return Rule.parse(item)
    try:
        return msgspec.convert(dict(item), Rule)
    except msgspec.ValidationError as problem:
        raise _bad(str(item.get("host", "")), str(problem)) from None


def _split_target(target: str) -> tuple[str, int | None]:
    if "://" in target:
        raise _bad(target, "a rule has no scheme; write host:port")
    before, slash, after = target.partition("/")
    if slash and target.startswith("["):  # [2001:db8::/32]:443
        inner, bracket, port = target[1:].partition("]")
        return inner if bracket else target, _port(target, port)
    if slash:
        length, colon, port = after.partition(":")
        return f"{before}/{length}", _port(target, colon + port)
    if target.startswith("["):
        inner, bracket, port = target.partition("]")
        return inner + bracket, _port(target, port)
    if target.count(":") > 1:
        return target, None
    host, colon, port = target.partition(":")
    return host, _port(target, colon + port)


def _port(target: str, text: str) -> int | None:
    if not text:
        return None
    try:
        if text[0] != ":":
            raise names.BadHost(f"{text!r} is not a port")
        return names.parse_port(text[1:])
    except names.BadHost as problem:
        raise _bad(target, str(problem)) from None


def _options(text: str, words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key in found:
            raise _bad(text, f"{key} stands there twice")
        if key == "reason" and equals:
            return {**found, "reason": " ".join([value, *words[place + 1 :]])}
        if key == "methods" and value:
            found[key] = tuple(value.split(","))
        elif key == "path" and value:
            found[key] = value
        elif key == "upload_bytes" and value.isascii() and value.isdigit():
            found[key] = int(value)
        elif word == "raw":
            found["raw"] = True
        elif word:
            raise _bad(
                text, f"{word!r} is not an option; there are methods=, path=, upload_bytes=, raw, reason="
            )
    return found


def _canonical_target(host: str) -> str:
    try:
        if "/" in host:
            return _canonical_network(host)
        if host.startswith("*"):
            return _canonical_wildcard(host)
        made = names.canonical(host)
    except names.BadHost as problem:
        raise _bad(host, str(problem)) from None
    if names.is_address(made) and host.strip("[]").lower() != made and ":" not in host:
        # In a rule an odd spelling is a mistake or a trap for the next reader.
        raise _bad(host, f"this address is written {made}")
    if made == "localhost" or made.endswith(".localhost"):
        raise _bad(
            host, f"the host's loopback is {names.HOST_LOOPBACK}:PORT; the sandbox's own needs no rule"
        )
    return made


def _canonical_wildcard(host: str) -> str:
    stars, dot, base = host.partition(".")
    if stars not in ("*", "**") or not dot:
        raise _bad(host, '"*." or "**." stands before a name; for everything use network="open"')
    base = names.canonical(base)
    if names.is_address(base):
        raise _bad(host, "an address has no names below it; write a network such as 10.0.0.0/8")
    return f"{stars}.{base}"


def _canonical_network(host: str) -> str:
    try:
        return str(ipaddress.ip_network(host))
    except ValueError as problem:
        try:
            meant = f"; did you mean {ipaddress.ip_network(host, strict=False)}?"
        except ValueError:
            meant = ""
        raise _bad(host, f"{problem}{meant}") from None


def _check_allow(rule: Rule) -> None:
    if rule.host == names.HOST_LOOPBACK and rule.port is None:
        raise _bad(rule.host, f"the host's loopback is allowed port by port: {names.HOST_LOOPBACK}:8080")
    is_metadata = rule.host in names.METADATA_NAMES
    if not is_metadata and "/" not in rule.host and names.is_address(rule.host):
        is_metadata = names.kind_of(ipaddress.ip_address(rule.host)) == "metadata"
    if is_metadata:
        raise _bad(rule.host, "a cloud's metadata service cannot be allowed")


def _overrides(table: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        try:
            host, port = names.split_authority(key)
            address, address_port = names.split_authority(value)
            if not names.is_address(address):
                raise names.BadHost("the right side is an address")
        except names.BadHost as problem:
            raise _bad(f"{key} = {value}", f"{problem}; resolve is host:port = address:port") from None
        shown = f"[{address}]" if ":" in address else address
        yield f"{host}:{port}", f"{shown}:{address_port}"


def _bad(what: str, why: str) -> errors.ClocheError:
    return errors.error("policy_invalid", f"network rule {what!r}: {why}", hint=_BASE_HINT, rule=what)
