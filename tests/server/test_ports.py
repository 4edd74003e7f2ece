"""Ports over HTTP: refusals first, then what passes, then what happens when people leave. The server inside is `inside.py`."""

import asyncio
import hashlib
import json
import re
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from cloche import errors
from cloche.server import keys
from cloche.server.http import links
from tests.server import conftest

INSIDE = Path(__file__).with_name("inside.py").read_text()


class Port:
    """One port of one sandbox, and the ways to it."""

    def __init__(self, served, http, sandbox, port):
        self.served, self.http, self.sandbox, self.port = served, http, sandbox, port
        self.path = f"/v1/sandboxes/{sandbox}/ports/{port}"
        self.at = int(served.url.rpartition(":")[2])
        self.host = f"{port}-{sandbox}.localhost:{self.at}"

    def by_path(self, method="GET", path="/", **more):
        return self.http.request(method, self.path + path, **more)

    def by_name(self, method="GET", path="/", *, headers=None, key=None, **more):
        given = {"Host": self.host, **(headers or {})}
        if key is not None:
            given["X-API-Key"] = key
        return bare(self.served).request(method, path, headers=given, **more)

    def link(self, **body):
        return self.http.post(self.path + "/link", json=body)

    def token(self, **body):
        return self.link(**body).raise_for_status().json()["url"].rpartition("=")[2]


CLIENTS: dict[str, httpx.Client] = {}


def bare(served):
    """A client without a key, cookies or redirects."""
    made = CLIENTS.get(served.url)
    if made is None:
        made = CLIENTS[served.url] = httpx.Client(
            base_url=served.url, timeout=conftest.PATIENCE_S, trust_env=False
        )
    made.cookies.clear()
    return made


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    for client in CLIENTS.values():
        client.close()


def start_inside(served, http, sandbox, *words):
    begun = http.post(
        f"/v1/sandboxes/{sandbox}/executions", json={"command": ["python3", "-Ic", INSIDE, *words]}
    ).raise_for_status()
    with http.stream("GET", f"/v1/sandboxes/{sandbox}/executions/{begun.json()['id']}/stream") as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                return Port(served, http, sandbox, int(json.loads(line[6:])["text"]))
    raise AssertionError("the server inside did not start")


@pytest.fixture(scope="module")
def client(served):
    with served.client() as made:
        yield made


@pytest.fixture(scope="module")
def inside(served, client):
    sandbox = client.post("/v1/sandboxes", json={"timeout_s": 3000}).raise_for_status().json()["id"]
    yield start_inside(served, client, sandbox)
    client.delete(f"/v1/sandboxes/{sandbox}")


def refused(response, code):
    assert response.status_code == errors.TABLE[code].http, response.text
    assert response.json()["error"]["code"] == code
    assert response.headers["x-cloche-error"] == code
    assert response.headers["x-request-id"] == response.json()["error"]["request_id"]


def forwarded(response):
    assert response.status_code == 200, response.text
    told = response.json()
    return told, dict(told["headers"])


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────


def test_without_a_key_no_port_is_reached(inside, served):
    refused(bare(served).get(inside.path + "/"), "key_missing")
    refused(bare(served).get(inside.path + "/", headers={"X-API-Key": "cl_" + "0" * 40}), "key_refused")
    refused(inside.by_name(), "key_missing")
    refused(inside.by_name(key="cl_" + "0" * 40), "key_refused")
    refused(inside.by_name(headers={"Cookie": "cloche_link=1.x"}), "link_refused")
    assert bare(served).post(inside.path + "/link", json={}).status_code == 401


def test_a_key_needs_the_scope(inside, served):
    key = served.cloche("key", "create", "no-ports", "--scope", "sandboxes", "--scope", "exec").stdout.strip()
    with served.client(key) as client:
        refused(client.get(inside.path + "/"), "scope_missing")
        assert client.post(inside.path + "/link", json={}).json()["error"]["code"] == "scope_missing"
        assert client.get(f"/v1/sandboxes/{inside.sandbox}/ports").json()["error"]["code"] == "scope_missing"
    refused(inside.by_name(key=key), "scope_missing")


def test_another_tenants_sandbox_is_not_there(inside, served):
    key = served.cloche(
        "key", "create", "ports-of-red", "--tenant", "red", "--role", "developer"
    ).stdout.strip()
    with served.client(key) as red:
        refused(red.get(inside.path + "/"), "sandbox_not_found")
        assert red.post(inside.path + "/link", json={}).json()["error"]["code"] == "sandbox_not_found"
        assert red.get(f"/v1/sandboxes/{inside.sandbox}/ports").status_code == 404
        own = red.post("/v1/sandboxes", json={"name": "mine"}).raise_for_status().json()["id"]
        port = start_inside(served, red, own)
        assert port.by_path().status_code == 200
        assert red.get(f"/v1/sandboxes/mine/ports/{port.port}/").status_code == 200
        assert (
            bare(served)
            .get("/", headers={"Host": port.host}, params={"cloche_link": port.token()})
            .status_code
            == 200
        )
        red.delete(f"/v1/sandboxes/{own}")
    refused(inside.by_name(key=key), "sandbox_not_found")


@pytest.mark.parametrize("port", [0, 65536, 70000, 999999])
def test_what_is_no_port(inside, port):
    where = f"/v1/sandboxes/{inside.sandbox}/ports/{port}"
    refused(inside.http.get(where + "/"), "argument_invalid")
    assert inside.http.post(where + "/link", json={}).json()["error"]["code"] == "argument_invalid"


def test_a_dead_sandbox_a_closed_port_and_no_sandbox_are_three_errors(inside, served, http, box):
    refused(http.get(f"/v1/sandboxes/{box}/ports/8000/"), "port_closed")
    dead = Port(served, http, box, 8000)
    refused(dead.by_name(key=served.key), "port_closed")
    token = dead.token()
    refused(dead.by_name(params={"cloche_link": token}), "port_closed")
    http.delete(f"/v1/sandboxes/{box}")
    refused(dead.by_path(), "sandbox_lost")
    refused(dead.by_name(params={"cloche_link": token}), "sandbox_lost")
    refused(http.get(f"/v1/sandboxes/{'x' * 20}/ports/80/"), "sandbox_not_found")
    for url in (f"{dead.path}/", f"{dead.path}/tunnel"):
        with pytest.raises(InvalidStatus) as caught:
            connect(f"ws://127.0.0.1:{dead.at}{url}", additional_headers={"X-API-Key": served.key})
        assert caught.value.response.status_code == 410
        assert json.loads(caught.value.response.body)["error"]["code"] == "sandbox_lost"


def test_a_forged_expired_or_foreign_link_is_refused(inside, served, tmp_path, http, box):
    token = inside.token(ttl_s=60)
    assert inside.by_name(params={"cloche_link": token}).status_code == 200
    expires, made, issuer, mac = token.split(".")
    other = links.Links(str(tmp_path), "http://x", keys.Keys(str(tmp_path)))
    forged = [
        f"{int(expires) + 1}.{made}.{issuer}.{mac}", f"{expires}.{made}.{issuer}.{'A' * len(mac)}", f"{expires}.{made}.dWlkOjA.{mac}",
        f"{expires}.{made}.{issuer}.", f"{made}.{issuer}.{mac}", "x.y", "", "...", f"{token}x", f"{'9' * 3000}.{token}", "Ω",
        other.make(inside.sandbox, inside.port, 60, "uid:0").url.rpartition("=")[2],
    ]  # fmt: skip
    for word in forged:
        refused(inside.by_name(params={"cloche_link": word}), "link_refused")
        refused(inside.by_name(headers={"Cookie": f"cloche_link={word}".encode()}), "link_refused")
    refused(
        Port(served, http, inside.sandbox, inside.port + 1).by_name(params={"cloche_link": token}),
        "link_refused",
    )
    refused(Port(served, http, box, inside.port).by_name(params={"cloche_link": token}), "link_refused")
    state = str(served.home / "s")
    past = links.Links(state, "http://x", keys.Keys(state), now=lambda: time.time() - 100)
    old = past.make(inside.sandbox, inside.port, 60, "uid:0").url.rpartition("=")[2]
    response = inside.by_name(params={"cloche_link": old})
    refused(response, "link_refused")
    assert "expired" in response.json()["error"]["message"]
    # A link is no key.
    assert bare(served).get(inside.path + "/", params={"cloche_link": token}).status_code == 401
    assert (
        bare(served)
        .get("/v1/sandboxes", headers={"Host": inside.host}, params={"cloche_link": token})
        .json()["path"]
        == "/v1/sandboxes"
    )


def test_a_link_ends_with_the_key_that_made_it(inside, served):
    key = served.cloche("key", "create", "linker", "--scope", "ports").stdout.strip()
    with served.client(key) as linker:
        made = linker.post(inside.path + "/link", json={}).raise_for_status().json()["url"]
    token = {"cloche_link": made.rpartition("=")[2]}
    assert inside.by_name(params=token).status_code == 200
    assert served.cloche("key", "revoke", "linker").returncode == 0
    refused(inside.by_name(params=token), "link_refused")
    again = served.cloche("key", "create", "linker", "--scope", "ports")
    assert again.returncode == 0
    refused(inside.by_name(params=token), "link_refused")  # another key of that name did not make it


@pytest.mark.parametrize("ttl_s", [0, -1, 8 * 24 * 3600, 1e300])
def test_a_link_lives_a_week_at_most(inside, ttl_s):
    assert inside.link(ttl_s=ttl_s).json()["error"]["code"] == "limit_invalid"


def test_a_link_body_is_checked(inside):
    assert inside.link(ttl=5).json()["error"]["code"] == "field_unknown"
    assert inside.http.post(f"/v1/sandboxes/{inside.sandbox}/ports/http/link", json={}).status_code == 400


@pytest.mark.parametrize("host", ["{name}.evil.example", "{name}.localhost.evil.example", "evil.example"])
def test_a_name_that_is_not_ours_is_refused(inside, served, host):
    name = f"{inside.port}-{inside.sandbox}"
    response = bare(served).get("/", headers={"Host": host.format(name=name), "X-API-Key": served.key})
    assert response.json()["error"]["code"] == "peer_refused"


def test_a_page_of_another_origin_cannot_use_the_cookie(inside):
    cookie = {"Cookie": f"cloche_link={inside.token()}"}
    for origin in (
        "https://evil.example",
        "null",
        f"http://1-{inside.sandbox}.localhost:{inside.at}",
        "http://localhost",
    ):
        refused(inside.by_name("POST", headers={**cookie, "Origin": origin}), "peer_refused")
    assert inside.by_name("POST", headers={**cookie, "Origin": f"http://{inside.host}"}).status_code == 200
    refused(inside.by_path("POST", headers={"Origin": f"http://{inside.host}"}), "peer_refused")


@pytest.mark.parametrize(
    ("path", "words"), [("/garbage", "HTTP"), ("/nothing", "unanswered"), ("/strange", "799")]
)
def test_a_server_that_answers_garbage_is_told_from_one_that_is_not_there(inside, path, words):
    for response in (inside.by_path(path=path), inside.by_name(path=path, key=inside.served.key)):
        refused(response, "port_misbehaved")
        assert words in response.json()["error"]["message"]


def test_an_answer_that_breaks_off_is_not_whole(inside):
    with pytest.raises(httpx.RemoteProtocolError):
        inside.by_path(path="/short")


def test_a_server_that_never_answers_is_a_time_out():
    import tempfile

    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        served = conftest.serve(
            Path(home), settings="[server]\nport_timeout_s = 1\ndomain = 'https://ports.example.org'\n"
        )
        try:
            with served.client() as http:
                box = http.post("/v1/sandboxes", json={}).json()["id"]
                port = start_inside(served, http, box)
                refused(port.by_path(path="/never"), "wait_timeout")
                assert port.by_path().status_code == 200
                url = port.link().json()["url"]
                assert url.startswith(f"https://{port.port}-{box}.ports.example.org/?cloche_link=")
                port.host = f"{port.port}-{box}.ports.example.org"
                assert port.by_name(params={"cloche_link": url.rpartition("=")[2]}).status_code == 200
                refused_by_name = port.by_name(headers={"Host": f"{port.port}-{box}.example.org"})
                assert refused_by_name.json()["error"]["code"] == "peer_refused"
        finally:
            assert conftest.stop(served) == 0


@pytest.mark.parametrize(
    "head",
    [
        b"GET %s/\xff\xfe HTTP/1.1\r\n", b"CONNECT %s/x HTTP/1.1\r\n", b"GET %s/ HTTP/1.1\r\nX-Odd: a\x01b\r\n",
        b"GET %s/ HTTP/1.1\r\nX-Odd: \xff\r\n", b"GET %s/\x7f HTTP/1.1\r\n",
        b"POST %s/ HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n", b"GET %s/../../../../healthz HTTP/1.1\r\n",
    ],
)  # fmt: skip
def test_a_head_that_cannot_be_passed_on_is_never_a_fault_of_ours(inside, served, head):
    with socket.create_connection(("127.0.0.1", inside.at), timeout=conftest.PATIENCE_S) as raw:
        raw.sendall(
            head % inside.path.encode()
            + f"Host: 127.0.0.1\r\nX-API-Key: {served.key}\r\nConnection: close\r\n\r\n".encode()
        )
        status = int(raw.recv(100).split()[1])
    assert status in (200, 400, 405), status


def test_a_token_for_one_sandbox_opens_its_ports_and_no_other(inside, served, http, box):
    made = http.post(f"/v1/sandboxes/{inside.sandbox}/tokens", json={"scopes": ["ports"], "ttl_s": 600})
    token = made.raise_for_status().json()["token"]
    with served.client(token) as bearer:
        told, headers = forwarded(bearer.get(inside.path + "/"))
        assert token not in json.dumps(told)
        refused(bearer.get(f"/v1/sandboxes/{box}/ports/80/"), "sandbox_not_found")
        assert bearer.post(inside.path + "/link", json={}).json()["error"]["code"] == "scope_missing"
    told, headers = forwarded(inside.by_name(headers={"Authorization": f"Bearer {token}"}))
    assert "authorization" not in headers


# ── what passes ────────────────────────────────────────────────────────────────────────────────────


def test_what_listens_is_listed(inside):
    found = inside.http.get(f"/v1/sandboxes/{inside.sandbox}/ports").raise_for_status().json()
    assert {"port": inside.port, "address": "127.0.0.1"} in found["ports"]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PURGE"])
def test_every_method_passes_with_its_body_and_address(inside, method):
    body = b"\x00\xff" * 50_000 if method != "GET" else b""
    address = "/a%2Fb/%E2%82%AC//c;d?x=1&y=%20&x=2"
    for call in (inside.by_path, lambda *a, **k: inside.by_name(*a, key=inside.served.key, **k)):
        told, _ = forwarded(call(method, address, content=body))
        assert (told["method"], told["path"]) == (method, address)
        assert told["body"] == hashlib.sha256(body).hexdigest()


def test_a_head_has_no_body(inside):
    response = inside.by_path("HEAD")
    assert (response.status_code, response.headers["content-length"], response.content) == (200, "1234", b"")


def test_a_body_of_unknown_length_passes(inside):
    pieces = [b"x" * 1000, b"y" * 70_000, b"z"]
    told, headers = forwarded(inside.by_path("POST", content=iter(pieces)))
    assert told["body"] == hashlib.sha256(b"".join(pieces)).hexdigest()
    assert headers["transfer-encoding"] == "chunked"


def test_what_opens_our_door_never_goes_in(inside, served):
    secrets = {
        "X-API-Key": served.key, "X-Access-Token": "t", "E2b-Traffic-Access-Token": "t", "Proxy-Authorization": "p", "TE": "x",
        "Connection": "x-private", "X-Private": "1", "Forwarded": "for=6.6.6.6", "X-Forwarded-Host": "evil",
    }  # fmt: skip
    told, headers = forwarded(
        inside.by_path(
            headers={**secrets, "Authorization": f"Bearer {served.key}", "Cookie": "a=1", "X-Own": "kept"}
        )
    )
    assert headers["x-own"] == "kept"
    assert headers["host"] == f"localhost:{inside.port}"
    assert headers["x-forwarded-for"] == "127.0.0.1"
    assert headers["x-forwarded-host"] == f"127.0.0.1:{inside.at}"
    assert headers["x-forwarded-prefix"] == inside.path
    assert headers["connection"] == "close"
    gone = {
        "authorization",
        "cookie",
        "x-api-key",
        "x-access-token",
        "e2b-traffic-access-token",
        "proxy-authorization",
        "te",
        "x-private",
        "forwarded",
    }
    assert not gone & set(headers)
    assert served.key not in json.dumps(told)


def test_by_name_the_sandbox_has_its_own_cookies_and_authorization(inside, served):
    token = inside.token()
    cookie = f'a=1; cloche_link={token}; b="2"'
    told, headers = forwarded(inside.by_name(headers={"Cookie": cookie, "Authorization": "Bearer own-token"}))
    assert headers["cookie"] == 'a=1; b="2"'
    assert headers["authorization"] == "Bearer own-token"
    assert headers["host"] == headers["x-forwarded-host"] == inside.host
    told, headers = forwarded(inside.by_name(headers={"Authorization": f"Bearer {served.key}"}))
    assert "authorization" not in headers
    told, headers = forwarded(inside.by_name(path=f"/x?a=1&cloche_link={token}&b=2"))
    assert told["path"] == "/x?a=1&b=2"
    assert token not in json.dumps(told)


def test_what_the_sandbox_answers_stays_within_its_origin(inside, served):
    by_path, by_name = inside.by_path(path="/headers"), inside.by_name(path="/headers", key=served.key)
    for response in (by_path, by_name):
        assert response.headers["x-own"] == "kept"
        gone = {"clear-site-data", "strict-transport-security", "alt-svc", "x-cloche-error", "x-hop"}
        assert not gone & set(response.headers)
    assert by_path.headers["content-security-policy"] == "sandbox"
    assert by_path.headers["x-content-type-options"] == "nosniff"
    gone = {"set-cookie", "access-control-allow-origin", "service-worker-allowed", "www-authenticate"}
    assert not gone & set(by_path.headers)
    assert by_name.headers.get_list("set-cookie") == ["a=1; Path=/", "b=2"]
    assert by_name.headers["access-control-allow-origin"] == "*"
    assert "content-security-policy" not in by_name.headers


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("/x?y", "{prefix}/x?y"), ("x", "x"), ("http://localhost:{port}/z", "{prefix}/z"), ("//evil.example/", "//evil.example/"),
        ("https://example.org/", "https://example.org/"),
    ],
)  # fmt: skip
def test_a_redirect_stays_below_the_path(inside, location, shown):
    response = inside.by_path(path="/away?" + location.format(port=inside.port))
    assert response.headers["location"] == shown.format(prefix=inside.path)
    by_name = inside.by_name(path="/away?" + location.format(port=inside.port), key=inside.served.key)
    assert by_name.headers["location"] == location.format(port=inside.port)


def test_the_bare_path_leads_to_the_root(inside):
    response = inside.http.get(inside.path + "?a=1")
    assert (response.status_code, response.headers["location"]) == (307, inside.path + "/?a=1")


def test_events_come_as_they_happen(inside):
    with inside.http.stream("GET", inside.path + "/events") as stream:
        lines = stream.iter_lines()
        for number in range(3):
            assert next(line for line in lines if line) == f"data: {number}"
            assert inside.by_path(path="/go").text == "ok"


def test_a_large_download_needs_no_memory(inside, served):
    def rss():
        status = Path(f"/proc/{served.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]

    inside.by_path(path="/large/1")
    before, size = rss(), 0
    with inside.http.stream("GET", inside.path + "/large/100") as stream:
        for piece in stream.iter_bytes(1 << 20):
            size += len(piece)
    assert size == 100 << 20
    assert rss() - before < 20 << 10


def test_a_large_upload_passes(inside):
    digest = hashlib.sha256()

    def pieces():
        for number in range(40):
            piece = bytes([number]) * (1 << 20)
            digest.update(piece)
            yield piece

    told, _ = forwarded(inside.by_path("PUT", "/up", content=pieces()))
    assert told["body"] == digest.hexdigest()


def test_an_early_answer_arrives_though_the_body_is_not_wanted(inside):
    assert inside.by_path("POST", "/early", content=b"x" * (30 << 20)).status_code == 413


def test_a_paused_sandbox_wakes(served, http, box):
    port = start_inside(served, http, box)
    http.post(f"/v1/sandboxes/{box}/suspend", json={}).raise_for_status()
    assert http.get(f"/v1/sandboxes/{box}").json()["phase"] == "paused"
    assert port.by_name(params={"cloche_link": port.token()}).status_code == 200
    assert http.get(f"/v1/sandboxes/{box}").json()["phase"] == "running"


def test_a_browser_is_given_a_cookie_and_a_clean_address(inside):
    token = inside.token(ttl_s=100)
    navigates = {"Sec-Fetch-Mode": "navigate"}
    response = inside.by_name(path=f"/x?a=1&cloche_link={token}", headers=navigates)
    assert (response.status_code, response.headers["location"]) == (303, "/x?a=1")
    with socket.create_connection(("127.0.0.1", inside.at), timeout=conftest.PATIENCE_S) as raw:
        asked = f"GET //evil.example?cloche_link={token} HTTP/1.1\r\nHost: {inside.host}\r\nSec-Fetch-Mode: navigate\r\n\r\n"
        raw.sendall(asked.encode())
        assert b"\r\nlocation: /evil.example\r\n" in raw.recv(10_000)
    cookie = response.headers["set-cookie"]
    assert cookie.startswith(f"cloche_link={token}; Path=/; Max-Age=")
    assert cookie.endswith("; HttpOnly; SameSite=Lax")
    assert "Domain" not in cookie
    shown = inside.by_name(headers={"Cookie": f"cloche_link=other; {cookie.partition(';')[0]}"})
    assert shown.status_code == 200
    assert "set-cookie" not in shown.headers
    programs = inside.by_name(params={"cloche_link": token})
    assert programs.status_code == 200
    assert programs.headers["set-cookie"].startswith(f"cloche_link={token};")


def test_the_key_of_links_is_the_owners_alone(inside, served):
    inside.token()
    path = served.home / "s/keys/links.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(path.read_text())) == 32


def test_a_link_is_on_record(inside):
    inside.token(ttl_s=77)
    recorded = inside.http.get("/v1/events", params={"limit": 1000}).json()["events"]
    made = [event for event in recorded if "link_made" in str(event) and "for 77 s" in str(event)]
    assert f"{inside.sandbox}:{inside.port}" in str(made)
    assert "cloche_link" not in str(recorded)


# ── WebSockets ─────────────────────────────────────────────────────────────────────────────────────


def closing(caught):
    closed = caught.value.rcvd
    return closed.code, closed.reason


def socket_to(inside, path="/socket", **more):
    headers = {"X-API-Key": inside.served.key, **more.pop("headers", {})}
    url = f"ws://127.0.0.1:{inside.at}{inside.path}{path}"
    return connect(url, additional_headers=headers, open_timeout=conftest.PATIENCE_S, **more)


def test_a_websocket_passes_both_ways(inside):
    with socket_to(inside, subprotocols=["chat", "other"]) as link:
        assert link.subprotocol == "chat"
        assert link.response.headers["X-Own"] == "kept"
        assert link.recv() == "welcome"
        link.send("hällo")
        assert link.recv() == "hällo"
        link.send(b"\x00\xff" * 20_000)
        assert link.recv() == b"\x00\xff" * 20_000
        link.send("close me")
        with pytest.raises(ConnectionClosed) as caught:
            link.recv()
    assert closing(caught) == (4321, "as you like")


def test_a_websocket_by_name_needs_the_same(inside):
    # A client connects to where the name leads; the name is what it asks for.
    def by_name(**headers):
        sock = socket.create_connection(("127.0.0.1", inside.at))
        return connect(
            f"ws://{inside.host}/socket",
            sock=sock,
            additional_headers=headers,
            open_timeout=conftest.PATIENCE_S,
        )

    for headers in ({}, {"Cookie": "cloche_link=1.x"}):
        with pytest.raises(InvalidStatus) as caught:
            by_name(**headers)
        assert caught.value.response.status_code == 401
    cookie = {"Cookie": f"cloche_link={inside.token()}"}
    with pytest.raises(InvalidStatus) as caught:
        by_name(**cookie, Origin="https://evil.example")
    assert caught.value.response.status_code == 403
    with by_name(**cookie, Origin=f"http://{inside.host}") as link:
        assert link.recv() == "welcome"


def test_who_wants_no_websocket_says_so_itself(inside):
    with pytest.raises(InvalidStatus) as caught:
        socket_to(inside, path="/other")
    assert caught.value.response.status_code == 200
    for path in ("/garbage", "/nothing"):
        with pytest.raises(InvalidStatus) as caught:
            socket_to(inside, path=path)
        assert caught.value.response.status_code == 502
        assert json.loads(caught.value.response.body)["error"]["code"] == "port_misbehaved"


def test_a_websocket_that_goes_wrong_is_closed(inside):
    with socket_to(inside) as link:
        link.recv()
        link.send("garbage")
        with pytest.raises(ConnectionClosed) as caught:
            link.recv()
    assert closing(caught)[0] in (1002, 1011)


def test_who_leaves_a_websocket_is_gone_inside_too(inside, until):
    with socket_to(inside) as link:
        link.recv()
    until(lambda: "socket 1000" in inside.by_path(path="/gone").json())


# ── the raw tunnel ─────────────────────────────────────────────────────────────────────────────────


def test_a_tunnel_carries_bytes(inside):
    with socket_to(inside, "/tunnel") as link:
        link.send(b"GET /raw HTTP/1.1\r\nHost: x\r\n")
        link.send(b"Connection: close\r\n\r\n")
        said = b""
        while piece := link.recv():
            said += piece
        assert said.startswith(b"HTTP/1.1 200")
        link.send(b"")
        with pytest.raises(ConnectionClosed) as caught:
            link.recv()
    assert closing(caught)[0] == 1000


def test_a_tunnel_takes_bytes_only_and_needs_a_key(inside, served):
    with socket_to(inside, "/tunnel") as link:
        link.send("text")
        with pytest.raises(ConnectionClosed) as caught:
            link.recv()
    assert closing(caught)[0] == 1003
    with pytest.raises(InvalidStatus) as refusal:
        socket_to(inside, "/tunnel", headers={"X-API-Key": "cl_" + "0" * 40})
    assert refusal.value.response.status_code == 401
    with pytest.raises(InvalidStatus) as refusal:
        socket_to(Port(served, inside.http, inside.sandbox, 1), "/tunnel")
    assert refusal.value.response.status_code == 502


def test_two_hundred_tunnels_at_once(inside):
    from websockets.asyncio.client import connect as open_socket

    async def one(number, ready):
        url = f"ws://127.0.0.1:{inside.at}{inside.path}/tunnel"
        async with open_socket(
            url, additional_headers={"X-API-Key": inside.served.key}, open_timeout=conftest.PATIENCE_S
        ) as link:
            await ready.wait()
            await link.send(b"GET /%d HTTP/1.0\r\n\r\n" % number)
            said = b""
            while piece := await link.recv(decode=False):
                said += piece
            return json.loads(said.partition(b"\r\n\r\n")[2])["path"]

    async def all_of_them():
        ready = asyncio.Barrier(200)  # nobody asks before all are connected
        return await asyncio.gather(*(one(number, ready) for number in range(200)))

    assert asyncio.run(all_of_them()) == [f"/{number}" for number in range(200)]


# ── when people leave ──────────────────────────────────────────────────────────────────────────────


def test_who_leaves_in_the_middle_is_gone_inside_too(inside, until):
    with inside.http.stream("GET", inside.path + "/slow") as stream:
        next(stream.iter_raw())
    until(lambda: "slow" in inside.by_path(path="/gone").json())


def test_a_sandbox_that_ends_in_the_middle_cuts_the_answer(served, http, box):
    port = start_inside(served, http, box)

    def end():
        with served.client() as other:
            other.delete(f"/v1/sandboxes/{box}")

    with http.stream("GET", port.path + "/slow") as stream:
        pieces = stream.iter_raw()
        next(pieces)
        ending = threading.Thread(target=end)
        ending.start()
        with pytest.raises(httpx.RemoteProtocolError):
            for _ in pieces:
                pass
        ending.join()


def test_nothing_of_it_is_left(inside, served, until):
    """Connections to the port end with their requests, in the server and inside; also with those that are not finished."""
    inside.by_path()
    for method, rest in (
        ("POST", "Content-Length: 1000000\r\n\r\nhalf"),
        ("GET", "\r\n"),
        ("POST", "Transfer-Encoding: chunked\r\n\r\n5\r\nhal"),
    ):
        with socket.create_connection(("127.0.0.1", inside.at), timeout=conftest.PATIENCE_S) as raw:
            head = f"{method} {inside.path}/never HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {served.key}\r\n{rest}"
            raw.sendall(head.encode())
            until(lambda: open_inside(inside) > 0)
        until(lambda: open_inside(inside) == 0)


def open_inside(inside):
    """Connections whose far end, which is ours, has not been closed."""
    command = f"awk '$2 ~ /:{inside.port:04X}$/ && $4 == \"01\"' /proc/net/tcp | wc -l"
    ran = inside.http.post(f"/v1/sandboxes/{inside.sandbox}/exec", json={"command": command}).json()
    return int(ran["stdout"])
