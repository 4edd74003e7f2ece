"""The few nftables rules that a sandbox's namespace needs, spoken to the kernel directly.

    nftables.load(15001, 53)        one transaction: all of `text()`, or nothing and an OSError

Not by the program `nft`: starting it costs 13–19 ms where this costs 0.3, hosts need not have it, and without root it cannot
work at all: a launcher in a user namespace that maps one ordinary uid has its privilege until the next exec only.
`text()` is what `nft list ruleset` prints afterwards; tests/egress/test_capture.py compares the two.

    message = nlmsghdr nfgenmsg *attribute           in a batch: BEGIN, one table, two chains, their rules, END
    rule    = list of expressions over registers     "load l4proto; compare with tcp; load the port; redirect"

Numbers are those of linux/netfilter/nf_tables.h. Standard library only: the launcher imports this.
"""

import _socket
import os
import struct

TABLE = "cloche"
_NETFILTER = 12
_INET = 1
_BATCH_BEGIN, _BATCH_END = 16, 17
_SUBSYSTEM = 10
_NEW_TABLE, _NEW_CHAIN, _NEW_RULE = (_SUBSYSTEM << 8 | number for number in (0, 3, 6))
_REQUEST, _ACK, _CREATE, _APPEND = 1, 4, 0x400, 0x800
_NESTED = 0x8000
_ERROR = 2
_HOOK_OUTPUT = 3
_DROP, _ACCEPT, _RETURN = 0, 1, -5
_REGISTER = 1
_VERDICT_REGISTER = 0
_WAIT_S = 5


def text(capture_port: int, dns_port: int) -> str:
    """The rules as nft writes them."""
    return f"""\
table inet {TABLE} {{
	chain capture {{
		type nat hook output priority -100; policy accept;
		ip daddr 127.0.0.0/8 return
		ip6 daddr ::1 return
		meta l4proto tcp redirect to :{capture_port}
		ip protocol udp udp dport 53 redirect to :{dns_port}
	}}

	chain rest {{
		type filter hook output priority filter; policy drop;
		ip daddr 127.0.0.0/8 accept
		ip6 daddr ::1 accept
		ct state established,related accept
		reject with icmpx admin-prohibited
	}}
}}
"""


def load(capture_port: int, dns_port: int) -> None:
    """Put the rules into this network namespace, in one transaction."""
    # SAFETY: changes the network namespace of the calling thread only, which the caller made for one sandbox.
    # tests/egress/test_capture.py::test_rules_stay_in_their_namespace
    to_v4_loopback = [*_family(_socket.AF_INET), _payload(1, 16, 1), _compare(b"\x7f")]
    to_v6_loopback = [
        *_family(_socket.AF_INET6),
        _payload(1, 24, 16),
        _compare(_socket.inet_pton(_socket.AF_INET6, "::1")),
    ]
    is_tcp = [_meta(16), _compare(bytes([_socket.IPPROTO_TCP]))]
    is_v4_udp = [*_family(_socket.AF_INET), _payload(1, 9, 1), _compare(bytes([_socket.IPPROTO_UDP]))]
    to_port_53 = [_payload(2, 2, 2), _compare(struct.pack(">H", 53))]
    _send(
        [
            _message(_NEW_TABLE, _attribute(1, _name(TABLE)), _CREATE),
            _chain("capture", "nat", -100, _ACCEPT),
            _rule("capture", [*to_v4_loopback, _verdict(_RETURN)]),
            _rule("capture", [*to_v6_loopback, _verdict(_RETURN)]),
            _rule("capture", [*is_tcp, *_redirect(capture_port)]),
            _rule("capture", [*is_v4_udp, *to_port_53, *_redirect(dns_port)]),
            _chain("rest", "filter", 0, _DROP),
            _rule("rest", [*to_v4_loopback, _verdict(_ACCEPT)]),
            _rule("rest", [*to_v6_loopback, _verdict(_ACCEPT)]),
            _rule("rest", [*_is_answer(), _verdict(_ACCEPT)]),
            _rule("rest", [_expression("reject", _number(1, 2) + _attribute(2, b"\x03"))]),
        ]
    )


# ── rules ──────────────────────────────────────────────────────────────────────────────────────────


def _chain(name: str, kind: str, priority: int, policy: int) -> bytes:
    hook = _number(1, _HOOK_OUTPUT) + _attribute(2, struct.pack(">i", priority))
    body = _attribute(1, _name(TABLE)) + _attribute(3, _name(name)) + _nest(4, hook)
    return _message(_NEW_CHAIN, body + _number(5, policy) + _attribute(7, _name(kind)), _CREATE)


def _rule(chain: str, expressions: "list[bytes]") -> bytes:
    body = _attribute(1, _name(TABLE)) + _attribute(2, _name(chain)) + _nest(4, b"".join(expressions))
    return _message(_NEW_RULE, body, _CREATE | _APPEND)


def _expression(name: str, data: bytes) -> bytes:
    return _nest(1, _attribute(1, _name(name)) + _nest(2, data))


def _meta(key: int) -> bytes:
    return _expression("meta", _number(1, _REGISTER) + _number(2, key))


def _family(family: int) -> "list[bytes]":
    number = {_socket.AF_INET: 2, _socket.AF_INET6: 10}[family]
    return [_meta(15), _compare(bytes([number]))]


def _payload(base: int, offset: int, length: int) -> bytes:
    """Bytes of the packet: base 1 is the network header, 2 the transport header."""
    return _expression(
        "payload", _number(1, _REGISTER) + _number(2, base) + _number(3, offset) + _number(4, length)
    )


def _compare(value: bytes, *, equal: bool = True) -> bytes:
    return _expression(
        "cmp", _number(1, _REGISTER) + _number(2, 0 if equal else 1) + _nest(3, _attribute(1, value))
    )


def _is_answer() -> "list[bytes]":
    """Of a connection that is known: these bits are in the byte order of the machine."""
    mask, nothing = struct.pack("=I", 2 | 4), bytes(4)
    state = _expression("ct", _number(2, 0) + _number(1, _REGISTER))
    masked = _number(1, _REGISTER) + _number(2, _REGISTER) + _number(3, 4)
    masked += _nest(4, _attribute(1, mask)) + _nest(5, _attribute(1, nothing))
    return [state, _expression("bitwise", masked), _compare(nothing, equal=False)]


def _redirect(port: int) -> "list[bytes]":
    value = _number(1, _REGISTER) + _nest(2, _attribute(1, struct.pack(">H", port)))
    return [_expression("immediate", value), _expression("redir", _number(1, _REGISTER) + _number(3, 2))]


def _verdict(code: int) -> bytes:
    data = _nest(2, _attribute(1, struct.pack(">i", code)))
    return _expression("immediate", _number(1, _VERDICT_REGISTER) + _nest(2, data))


# ── netlink ────────────────────────────────────────────────────────────────────────────────────────


def _name(text: str) -> bytes:
    return text.encode() + b"\0"


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def _nest(kind: int, data: bytes) -> bytes:
    return _attribute(kind | _NESTED, data)


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack(">I", value))


def _message(kind: int, body: bytes, flags: int = 0, *, family: int = _INET, subsystem: int = 0) -> bytes:
    content = struct.pack("=BB", family, 0) + struct.pack(">H", subsystem) + body
    return struct.pack("=IHHII", 16 + len(content), kind, _REQUEST | flags, 0, 0) + content


def _send(messages: "list[bytes]") -> None:
    """Send a transaction and wait for every message's answer; the first failure is raised, and then nothing was done."""
    begin = _message(_BATCH_BEGIN, b"", family=0, subsystem=_SUBSYSTEM)
    end = _message(_BATCH_END, b"", family=0, subsystem=_SUBSYSTEM)
    batch = bytearray(begin)
    for number, message in enumerate(messages, 1):
        flags = struct.unpack_from("=H", message, 6)[0] | _ACK
        batch += message[:6] + struct.pack("=HI", flags, number) + message[12:]
    batch += end
    link = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW | _socket.SOCK_CLOEXEC, _NETFILTER)
    try:
        link.settimeout(_WAIT_S)
        link.bind((0, 0))
        link.send(batch)
        answered = 0
        while answered < len(messages):
            answered += _count(link.recv(65536))
    finally:
        link.close()


def _count(data: bytes) -> int:
    """How many messages were accepted, by their answers."""
    place = found = 0
    while place + 20 <= len(data):
        length, kind = struct.unpack_from("=IH", data, place)
        if kind == _ERROR:
            code = -struct.unpack_from("=i", data, place + 16)[0]
            if code:
                raise OSError(code, os.strerror(code))
            found += 1
        place += max(20, length + -length % 4)
    return found
