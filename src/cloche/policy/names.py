"""What a host is called: one canonical spelling, matched by rules and dialled as it was matched.

    canonical("PyPI.org.")          "pypi.org"            case and one trailing dot do not count
    canonical("0x7f.1")             "127.0.0.1"           an address in any spelling inet_aton takes
    canonical("evil.org\\0.ok.org")  BadHost               no NUL, CR, LF, blank, %, @, /, … anywhere

    host    = name | address
    name    = label *( "." label )        at most 253 characters, the last label not a number
    label   = 1*63( a–z 0–9 _ - )         no hyphen at its ends; IDNA labels are written out as xn--…
    address = IPv4 in one to four parts, decimal, octal or hex | IPv6 without zone, with or without brackets

Two programs that read one spelling differently are a hole (a NUL in a SOCKS5 host name passed a suffix match and was cut
by the resolver; see design/0007-egress.md), so a spelling either has one meaning here or is refused. A name whose last
label is a number is an address or nothing, as in URLs. IPv4 inside IPv6 (::ffff:a.b.c.d) is the IPv4 address.

Pure, standard library only.
"""

import functools
import ipaddress
import re
from encodings import idna

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

HOST_LOOPBACK = "host.cloche.internal"
"""The host's own loopback, as sandboxes call it; only a rule that names it allows it."""

_PLAIN = re.compile(
    r"(?=.{1,253}\Z)(?!.*xn--)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z"
)
_QUAD = re.compile(r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])(?:\.(?!\Z)|\Z)){4}")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z")
_NUMBER = re.compile(r"[0-9]+\Z|0x[0-9a-f]*\Z")
# ß, ς, ZWJ and ZWNJ: IDNA 2003 and 2008 make different names of them.
_DEVIANT = re.compile("[\u00df\u1e9e\u03c2\u200c\u200d]")
_DOTS = re.compile("[\u3002\uff0e\uff61]")


class BadHost(ValueError):
    """A spelling that is refused; the message says why."""


def canonical(host: str) -> str:
    """The one spelling of a host name or address; raises `BadHost` for what has none."""
    if _PLAIN.match(host) or (_QUAD.match(host) and host.count(".") == 3):
        return host
    if not host:
        raise BadHost("the host is empty")
    if len(host) > 1024:
        raise BadHost("the host is too long")
    if host[0] == "[":
        if host[-1] != "]":
            raise BadHost("a bracket is not closed")
        return _ipv6(host[1:-1])
    if ":" in host:
        return _ipv6(host)
    return _name(host)


def is_address(host: str) -> bool:
    """Whether a *canonical* host is an address."""
    return ":" in host or (host[-1:].isdigit() and host.rpartition(".")[2].isdigit())


def _name(host: str) -> str:
    if not host.isascii():
        host = _ascii(host)
    host = host.lower().removesuffix(".")
    labels = host.split(".")
    if _NUMBER.match(labels[-1]):
        return _ipv4(labels)
    if len(host) > 253:
        raise BadHost("the name is longer than 253 characters")
    for label in labels:
        _check_label(label)
    return host


def _ascii(host: str) -> str:
    """A-labels for U-labels, by IDNA 2003; where 2008 differs, the A-label must be written."""
    if _DEVIANT.search(host):
        raise BadHost("the name has a letter that IDNA versions read differently; write it as xn--…")
    try:
        return ".".join(_label_to_ascii(label) for label in _DOTS.sub(".", host).split("."))
    except UnicodeError:
        raise BadHost("the name is not valid in IDNA") from None


def _label_to_ascii(label: str) -> str:
    return idna.ToASCII(label).decode("ascii") if label else ""


def _check_label(label: str) -> None:
    if not label:
        raise BadHost("a label is empty")
    if not _LABEL.match(label):
        wrong = next((mark for mark in label if mark not in "abcdefghijklmnopqrstuvwxyz0123456789_-"), None)
        if wrong is not None:
            raise BadHost(f"a name cannot contain {wrong!r}")
        raise BadHost("a label is longer than 63 characters or has a hyphen at its end")
    if label.startswith("xn--"):
        try:
            meant = label[4:].encode().decode("punycode")
        except (UnicodeError, ValueError):
            meant = ""
        if meant.isascii() or any("\x7f" <= mark < "\xa0" for mark in meant):
            raise BadHost(f"{label!r} stands for no international name")


def _ipv4(parts: list[str]) -> str:
    """As inet_aton reads it: one to four numbers, the last one fills what is left."""
    if len(parts) > 4:
        raise BadHost("an IPv4 address has at most four parts")
    numbers = [_part(part) for part in parts]
    *front, last = numbers
    if any(number > 255 for number in front) or last >= 256 ** (5 - len(numbers)):
        raise BadHost("a part of the address is too large")
    value = last
    for place, number in enumerate(front):
        value |= number << (24 - 8 * place)
    return str(ipaddress.IPv4Address(value))


def _part(text: str) -> int:
    if len(text) > 12:  # nobody needs more, and int() of a long text is slow
        raise BadHost("a part of the address is too large")
    try:
        if text.startswith("0x"):
            return int(_digits(text[2:], "0123456789abcdef"), 16)
        if text.startswith("0") and len(text) > 1:
            return int(_digits(text[1:], "01234567"), 8)
        return int(_digits(text, "0123456789"))
    except ValueError:
        raise BadHost(f"{text!r} is not a number in any spelling of an address") from None


def _digits(text: str, alphabet: str) -> str:
    # int() would also take signs, blanks, underscores and other scripts' digits.
    if not text or text.strip(alphabet):
        raise ValueError(text)
    return text


def _ipv6(text: str) -> str:
    if "%" in text:
        raise BadHost("an address with a zone is refused")
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        raise BadHost("this is not an IPv6 address") from None
    return str(address.ipv4_mapped or address)


# ── kinds of addresses ─────────────────────────────────────────────────────────────────────────────

# Our own table and not `ipaddress.is_global`, which changed its mind between patch releases of Python.
_KINDS: tuple[tuple[str, str], ...] = (
    ("0.0.0.0/8", "unspecified"), ("10.0.0.0/8", "private"), ("100.64.0.0/10", "private"),
    ("127.0.0.0/8", "loopback"), ("169.254.0.0/16", "link-local"), ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "reserved"), ("192.0.2.0/24", "reserved"), ("192.88.99.0/24", "reserved"),
    ("192.168.0.0/16", "private"), ("198.18.0.0/15", "reserved"), ("198.51.100.0/24", "reserved"),
    ("203.0.113.0/24", "reserved"), ("224.0.0.0/4", "multicast"), ("240.0.0.0/4", "reserved"),
    ("::/128", "unspecified"), ("::1/128", "loopback"), ("fc00::/7", "private"), ("fe80::/10", "link-local"),
    ("fec0::/10", "private"), ("ff00::/8", "multicast"),
    # 6to4, Teredo and the rest of 2001::/23 carry other addresses inside; 2001:db8::/32 and 3fff::/20 are examples.
    ("2001::/23", "reserved"), ("2001:db8::/32", "reserved"), ("2002::/16", "reserved"), ("3fff::/20", "reserved"),
)  # fmt: skip
_TABLE = tuple(
    (network.version, int(network.network_address), int(network.netmask), kind)
    for network, kind in ((ipaddress.ip_network(text), kind) for text, kind in _KINDS)
)
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")  # the only block that is handed out

METADATA_ADDRESSES = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",  # AWS, Google, Azure, OpenStack, …
        "169.254.170.2",  # AWS ECS tasks
        "169.254.170.23",  # AWS EKS pod identity
        "fd00:ec2::254",
        "fd00:ec2::23",
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure's wire server: a public address that is none
        "192.0.0.192",  # Oracle
    )
)
METADATA_NAMES = frozenset(
    ("metadata", "metadata.google.internal", "metadata.goog", "instance-data", "instance-data.ec2.internal")
)


def kind_of(address: Address) -> str:
    """`public`, or why it is not: metadata, loopback, private, link-local, multicast, unspecified, reserved."""
    if any(one in METADATA_ADDRESSES for one in (address, *embedded(address))):
        return "metadata"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    version, value = address.version, int(address)
    for family, network, mask, kind in _TABLE:
        if family == version and value & mask == network:
            return kind
    return "public" if version == 4 or address in _GLOBAL_V6 else "reserved"


@functools.lru_cache(maxsize=256)
def public_parts(network: Network) -> tuple[Network, ...]:
    """The networks that make up what is public of one."""
    left: list[Network] = [network]
    if isinstance(network, ipaddress.IPv6Network):
        inside = network.subnet_of(_GLOBAL_V6)
        left = [network] if inside else [_GLOBAL_V6] if _GLOBAL_V6.subnet_of(network) else []
    special = [ipaddress.ip_network(text) for text, _ in _KINDS]
    special += [ipaddress.ip_network(address) for address in METADATA_ADDRESSES]
    for hole in special:
        if hole.version == network.version:
            left = [piece for part in left for piece in _without(part, hole)]
    return tuple(left)


def _without(part: Network, hole: Network) -> list[Network]:
    if part.subnet_of(hole):  # type: ignore[arg-type]
        return []
    return list(part.address_exclude(hole)) if hole.subnet_of(part) else [part]  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def facts(host: str) -> tuple[Address, str]:
    """A *canonical* address and its kind; remembered, because a connection asks several times."""
    address = ipaddress.ip_address(host)
    return address, kind_of(address)


def embedded(address: Address) -> list[ipaddress.IPv4Address]:
    """IPv4 addresses that an IPv6 address may stand for: mapped, compatible, NAT64, 6to4, Teredo."""
    if not isinstance(address, ipaddress.IPv6Address):
        return []
    value = int(address)
    found = []
    # The low 32 bits of any address outside the global block: mapped, compatible and both NAT64 prefixes.
    if address not in _GLOBAL_V6:
        found.append(ipaddress.IPv4Address(value & 0xFFFFFFFF))
    if address.sixtofour is not None:
        found.append(address.sixtofour)
    if address.teredo is not None:
        found.extend(address.teredo)
    return found


def parse_port(text: str) -> int:
    if not 1 <= len(text) <= 5 or not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 65535:
        raise BadHost(f"{text[:16]!r} is not a port")
    return int(text)


def split_authority(text: str, default_port: int | None = None) -> tuple[str, int]:
    """`host[:port]` of a request line or Host header, canonical. Without a port and without a default: refused."""
    if text.startswith("["):
        host, bracket, rest = text.partition("]")
        host += bracket
    else:
        host, colon, rest = text.partition(":")
        rest = colon + rest
    if rest and rest[0] != ":":
        raise BadHost("there is something between host and port")
    if not rest:
        if default_port is None:
            raise BadHost("a port is missing")
        return canonical(host), default_port
    return canonical(host), parse_port(rest[1:])
