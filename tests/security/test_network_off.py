"""With the network off nothing leaves: not to the host's loopback, not by any protocol, and inside it still works."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.security import glass


class Listener:
    """Something on the host that would notice a visitor."""

    def __init__(self, family: int, kind: int, address: Any) -> None:
        self.visits: list[bytes] = []
        self.sock = socket.socket(family, kind)
        self.sock.bind(address)
        self._datagrams = kind == socket.SOCK_DGRAM
        if not self._datagrams:
            self.sock.listen(64)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                if self._datagrams:
                    data = self.sock.recv(4096)
                else:
                    visitor, _ = self.sock.accept()
                    with visitor:
                        data = visitor.recv(4096)
            except OSError:
                return
            if data == b"end":
                return
            self.visits.append(data)

    @property
    def port(self) -> int:
        return int(self.sock.getsockname()[1])

    def end(self) -> None:
        """Stop it by a last visit of our own, behind everything that came before it."""
        kind = socket.SOCK_DGRAM if self._datagrams else socket.SOCK_STREAM
        with socket.socket(self.sock.family, kind) as last:
            last.connect(self.sock.getsockname())
            last.send(b"end")
        self._thread.join()
        self.sock.close()


HOST_NAMES = ("127.0.0.1", "localhost", "0.0.0.0", "2130706433", "127.1", "host.cloche.internal")
V6_NAMES = ("::1", "::ffff:127.0.0.1", "::")

_CONNECT = """
kind = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}[sys.argv[1]]
port = int(sys.argv[2])
for name in sys.argv[3:]:
    for family, _, _, _, address in tried(lambda: socket.getaddrinfo(name, port)) or []:
        with socket.socket(family, kind) as link:
            link.settimeout(2)
            tried(lambda: (link.connect(address), link.send(b"visited")))
"""


@pytest.fixture
def listener(request: pytest.FixtureRequest) -> Iterator[Listener]:
    family, kind, address = request.param
    try:
        made = Listener(family, kind, address)
    except OSError as problem:
        pytest.skip(f"this host cannot listen there: {problem}")
    yield made
    made.end()


def _own_addresses() -> list[str]:
    """Addresses of this host that a packet could come back to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return [probe.getsockname()[0]]
        except OSError:
            return []


_FOUR = [(socket.AF_INET, kind, ("0.0.0.0", 0)) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
_SIX = [(socket.AF_INET6, kind, ("::", 0)) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]


@pytest.mark.parametrize("listener", [*_FOUR, *_SIX], indirect=True, ids=["tcp4", "udp4", "tcp6", "udp6"])
@glass.identities
def test_the_host_is_not_reached(
    boxes: dict[str, glass.Box], listener: Listener, profile: str, user: str
) -> None:
    kind = "udp" if listener.sock.type == socket.SOCK_DGRAM else "tcp"
    names = [*HOST_NAMES, *V6_NAMES, *_own_addresses()]
    boxes[profile].python(_CONNECT, kind, str(listener.port), *names, user=user)
    assert listener.visits == []


@pytest.mark.parametrize("kind", ["stream", "datagram"])
@glass.profiles
def test_abstract_sockets_of_the_host_are_not_reached(
    boxes: dict[str, glass.Box], profile: str, kind: str
) -> None:
    name = f"\0cloche-canary-{os.getpid()}-{profile}-{kind}"
    types = {"stream": socket.SOCK_STREAM, "datagram": socket.SOCK_DGRAM}
    listener = Listener(socket.AF_UNIX, types[kind], name)
    boxes[profile].python(
        """
kind = socket.SOCK_STREAM if sys.argv[1] == "stream" else socket.SOCK_DGRAM
with socket.socket(socket.AF_UNIX, kind) as link:
    tried(lambda: (link.connect("\\0" + sys.argv[2]), link.send(b"visited")))
""",
        kind,
        name[1:],
    )
    listener.end()
    assert listener.visits == []


@pytest.mark.parametrize("place", ["tmp", "state", "home"])
def test_sockets_in_the_host_s_files_are_not_reached(
    shared: glass.Box, state_directory: Path, place: str
) -> None:
    """Where an engine, a key agent or a desktop bus would listen."""
    directory = {"tmp": "/tmp", "state": str(state_directory), "home": str(Path.home())}[place]
    if not os.access(directory, os.W_OK):
        pytest.skip(f"{directory} cannot be written by this user")
    path = f"{directory}/canary-{os.getpid()}.sock"
    listener = Listener(socket.AF_UNIX, socket.SOCK_STREAM, path)
    os.chmod(path, 0o777)
    program = "s = socket.socket(socket.AF_UNIX); [tried(lambda: (s.connect(p + sys.argv[1]), s.send(b'visited'))) for p in ('', '/proc/1/root', '/proc/self/root')]"
    shared.python(program, path)
    listener.end()
    os.unlink(path)
    assert listener.visits == []


OUTSIDE = [
    "192.0.2.1",
    "10.0.0.1",
    "169.254.169.254",
    "8.8.8.8",
    "224.0.0.1",
    "255.255.255.255",
    "2001:db8::1",
    "fd00:ec2::254",
]


@pytest.mark.parametrize("address", OUTSIDE)
@pytest.mark.parametrize("kind", ["tcp", "udp"])
def test_there_is_no_route(shared: glass.Box, address: str, kind: str) -> None:
    """The kernel of this namespace knows nowhere to send it: no packet is made, whatever the firewall says."""
    routed = shared.report(
        """
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
kind = socket.SOCK_STREAM if sys.argv[2] == "tcp" else socket.SOCK_DGRAM
with socket.socket(family, kind) as link:
    if family == socket.AF_INET:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    link.settimeout(2)
    code = link.connect_ex((sys.argv[1], 53))
    say([code == 0 or code == errno.EINPROGRESS or code == errno.EAGAIN, os.strerror(code)])
""",
        address,
        kind,
    )
    assert routed[0] is False


@glass.profiles
def test_only_loopback_exists(boxes: dict[str, glass.Box], profile: str) -> None:
    seen = boxes[profile].report(
        """
say({"links": [name for _, name in socket.if_nameindex()],
     "routes": [line.split()[0] for line in open("/proc/net/route").read().splitlines()[1:]],
     "routes6": sorted({line.split()[-1] for line in open("/proc/net/ipv6_route")}) if os.path.exists("/proc/net/ipv6_route") else ["lo"],
     "neighbours": open("/proc/net/arp").read().splitlines()[1:]})
"""
    )
    assert seen["links"] == ["lo"]
    assert seen["routes"] == []
    assert seen["routes6"] == ["lo"]
    assert seen["neighbours"] == []


@pytest.mark.parametrize(
    "name", ["example.com", "localhost.localdomain", "metadata.google.internal", "canary.invalid"]
)
def test_names_are_not_resolved(shared: glass.Box, name: str) -> None:
    """Nor asked for: the only way to a name server would be a route."""
    found = shared.report(
        "say([a[4][0] for a in tried(lambda: socket.getaddrinfo(sys.argv[1], 80)) or []])", name
    )
    assert [address for address in found if not address.startswith(("127.", "::1"))] == []


@pytest.mark.parametrize("how", ["raw-icmp", "ping-socket", "ping", "packet"])
@glass.users
def test_no_echo_is_sent(shared: glass.Box, user: str, how: str) -> None:
    programs = {
        "raw-icmp": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).sendto(b'\\x08\\0' + b'\\0' * 6, ('127.0.0.1', 0))",
        "ping-socket": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1).sendto(b'\\x08\\0' + b'\\0' * 6, ('192.0.2.1', 0))",
        "ping": "__import__('subprocess').run(['ping', '-c1', '-W1', '192.0.2.1'], check=True, capture_output=True)",
        "packet": "socket.socket(17, socket.SOCK_RAW).send(b'x')",
    }
    assert shared.report(f"say(tried(lambda: {programs[how]}) is not None)", user=user) is False


@pytest.mark.parametrize("request_", ["up", "address", "route", "firewall"])
@glass.users
def test_the_network_cannot_be_reconfigured(shared: glass.Box, user: str, request_: str) -> None:
    """Netlink may be asked, not told; no interface, address or route comes of it."""
    before = shared.out(
        "cat /proc/net/route /proc/net/dev_snmp6/* /proc/net/if_inet6 2>/dev/null | grep -v Ip6 | head -5; ls /proc/sys/net/ipv4/conf"
    )
    shared.python(
        """
link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12 if sys.argv[1] == "firewall" else 0)
link.settimeout(2)
kind = {"up": 16, "address": 20, "route": 24, "firewall": 0x0a00}[sys.argv[1]]
body = {"up": struct.pack("BxHiII", 0, 1, 0, 1, 1) + struct.pack("HH", 10, 3) + b"can0\\0\\0" + struct.pack("HH", 16, 18) + struct.pack("HH", 10, 1) + b"dummy\\0",
        "address": struct.pack("BBBBI", 2, 8, 0, 0, 1) + struct.pack("HH", 8, 2) + bytes([10, 9, 9, 9]),
        "route": struct.pack("BBBBBBBBI", 2, 0, 0, 0, 254, 3, 0, 1, 0) + struct.pack("HHI", 8, 4, 1),
        "firewall": struct.pack("BBH", 2, 0, 0)}[sys.argv[1]]
tried(lambda: link.send(struct.pack("IHHII", 16 + len(body), kind, 0x605, 1, 0) + body))
tried(lambda: link.recv(4096))
""",
        request_,
        user=user,
    )
    after = shared.out(
        "cat /proc/net/route /proc/net/dev_snmp6/* /proc/net/if_inet6 2>/dev/null | grep -v Ip6 | head -5; ls /proc/sys/net/ipv4/conf"
    )
    assert before == after


_ECHO = """
import threading
family, kind, address = json.loads(sys.argv[1])
server = socket.socket(family, kind)
server.bind(tuple(address) if isinstance(address, list) else address)
if kind == 1:
    server.listen()
def serve():
    if kind == 1:
        link, _ = server.accept()
        link.send(link.recv(100))
    else:
        data, sender = server.recvfrom(100)
        server.sendto(data, sender)
threading.Thread(target=serve, daemon=True).start()
client = socket.socket(family, kind)
if kind == 2 and family == 1:
    client.bind("\\0client")
client.connect(server.getsockname())
client.send(b"inside")
say(client.recv(100).decode())
"""


@pytest.mark.parametrize(
    "where",
    [
        [socket.AF_INET, 1, ["127.0.0.1", 0]], [socket.AF_INET, 2, ["127.0.0.1", 0]], [socket.AF_INET, 1, ["0.0.0.0", 8080]],
        [socket.AF_INET6, 1, ["::1", 0]], [socket.AF_UNIX, 1, "\0abstract"], [socket.AF_UNIX, 1, "/tmp/echo.sock"],
        [socket.AF_UNIX, 2, "\0datagrams"],
    ],
    ids=["tcp", "udp", "tcp-any", "tcp6", "abstract", "path", "abstract-datagram"],
)  # fmt: skip
@glass.profiles
def test_a_server_and_its_client_inside_meet(
    boxes: dict[str, glass.Box], profile: str, where: list[object]
) -> None:
    if where[0] == socket.AF_INET6 and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this kernel has no IPv6")
    assert (
        boxes[profile].report(
            "import os; tried(lambda: os.unlink('/tmp/echo.sock'))\n" + _ECHO, json.dumps(where)
        )
        == "inside"
    )
