"""Ports of the user's own, by E2B's rules: public unless said otherwise, then by the traffic token; by host name and by headers."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.server import conftest as server
from tests.server.test_ports import INSIDE
from tests.wires.e2b.conftest import Client


class Traffic:
    def __init__(self, served: server.Served, made: dict[str, Any]) -> None:
        self.id, self.token = made["sandboxID"], made["trafficAccessToken"]
        self.at = int(served.url.rpartition(":")[2])
        self.url = served.url
        self.port = 8124

    def by_name(self, path: str = "/", **headers: str) -> httpx.Response:
        return self._get(path, {"Host": self.host, **headers})

    def by_headers(self, path: str = "/", **headers: str) -> httpx.Response:
        return self._get(path, {"E2b-Sandbox-Id": self.id, "E2b-Sandbox-Port": str(self.port), **headers})

    @property
    def host(self) -> str:
        return f"{self.port}-{self.id}.localhost:{self.at}"

    def _get(self, path: str, headers: dict[str, str]) -> httpx.Response:
        with httpx.Client(base_url=self.url, trust_env=False, timeout=50) as client:
            return client.get(path, headers=headers)


def make(served: server.Served, http: httpx.Client, network: dict[str, Any] | None = None) -> Traffic:
    body = {"templateID": "base", "timeout": 600, **({"network": network} if network else {})}
    made = http.post("/sandboxes", json=body).raise_for_status().json()
    found = Traffic(served, made)
    begun = http.post(
        f"/v1/sandboxes/{found.id}/executions", json={"command": ["python3", "-Ic", INSIDE, str(found.port)]}
    ).raise_for_status()
    where = f"/v1/sandboxes/{found.id}/executions/{begun.json()['id']}/stream"
    with http.stream("GET", where) as stream:
        assert next(line for line in stream.iter_lines() if line.startswith("data: "))
    return found


@pytest.fixture
def private(served: server.Served, http: httpx.Client) -> Iterator[Traffic]:
    found = make(served, http, {"allowPublicTraffic": False})
    yield found
    http.delete(f"/sandboxes/{found.id}")


@pytest.fixture
def public(served: server.Served, http: httpx.Client) -> Iterator[Traffic]:
    found = make(served, http)
    yield found
    http.delete(f"/sandboxes/{found.id}")


def test_private_traffic_needs_the_token(
    private: Traffic, public: Traffic, served: server.Served, http: httpx.Client
) -> None:
    for call in (private.by_name, private.by_headers):
        assert call().status_code == 401
        assert call(**{"E2B-Traffic-Access-Token": "wrong"}).status_code == 401
        assert call(**{"E2B-Traffic-Access-Token": public.token}).status_code == 401
        answer = call(**{"E2B-Traffic-Access-Token": private.token})
        assert answer.status_code == 200
        assert private.token not in answer.text
        assert call(**{"X-API-Key": served.key}).status_code == 200
    assert http.get(f"/sandboxes/{private.id}").json()["network"]["allowPublicTraffic"] is False
    http.put(f"/sandboxes/{private.id}/network", json={"allowPublicTraffic": True}).raise_for_status()
    assert private.by_name().status_code == 200
    http.put(f"/sandboxes/{private.id}/network", json={"allowPublicTraffic": False}).raise_for_status()
    assert private.by_name().status_code == 401


def test_public_traffic_needs_nothing_and_opens_nothing_else(public: Traffic, served: server.Served) -> None:
    for call in (public.by_name, public.by_headers):
        told = call("/x?y=1").json()
        assert told["path"] == "/x?y=1"
    assert dict(public.by_name().json()["headers"])["host"] == public.host
    assert "e2b-sandbox-id" not in dict(public.by_headers().json()["headers"])
    public.port = 49983
    assert public.by_name("/files?path=a").status_code == 401
    public.port = 49999
    assert public.by_name("/contexts").status_code == 401
    with httpx.Client(base_url=served.url, trust_env=False) as anybody:
        assert anybody.get(f"/v1/sandboxes/{public.id}/ports/8124/").status_code == 401


def test_a_closed_port_and_a_dead_sandbox_say_so_in_e2bs_words(public: Traffic, http: httpx.Client) -> None:
    for public.port in (
        1,
        3128,
        15001,
    ):  # nobody; and the entrances to the sandbox's own network, which are not for the public
        for call in (public.by_name, public.by_headers):
            assert call().status_code == 502
            assert "port is not open" in call().json()["message"]
    public.port = 8124
    http.delete(f"/sandboxes/{public.id}").raise_for_status()
    assert (
        "was not found" in public.by_headers(**{"E2B-Traffic-Access-Token": public.token}).json()["message"]
    )


def test_a_websocket_passes(public: Traffic, private: Traffic) -> None:
    def link(to: Traffic) -> Any:
        sock = socket.create_connection(("127.0.0.1", to.at))
        return connect(f"ws://{to.host}/socket", sock=sock)

    with link(public) as opened:
        assert opened.recv() == "welcome"
    with pytest.raises(InvalidStatus) as caught:
        link(private)
    assert caught.value.response.status_code == 401
    public.port = 1
    with pytest.raises(InvalidStatus) as caught:
        link(public)
    assert "port is not open" in json.loads(caught.value.response.body)["message"]


def test_the_sdks_host_leads_to_the_port(program: Client, box: str) -> None:
    program("""
        h = box.commands.run("python3 -u -m http.server 8125 --bind 127.0.0.1", background=True)
        next(iter(h))
    """)
    host = program("answer = box.get_host(8125)")
    assert host.startswith(f"8125-{box}.localhost:")
    with httpx.Client(trust_env=False, timeout=50) as anybody:
        answer = anybody.get(f"http://127.0.0.1:{host.rpartition(':')[2]}/", headers={"Host": host})
    assert "Directory listing" in answer.text


def test_new_rules_about_what_goes_out_open_nothing(private: Traffic, http: httpx.Client) -> None:
    http.put(f"/sandboxes/{private.id}/network", json={"denyOut": ["0.0.0.0/0"]}).raise_for_status()
    assert private.by_name().status_code == 401
    forks = http.post(f"/sandboxes/{private.id}/fork", json={"count": 1}).raise_for_status().json()
    fork = forks[0]["sandbox"]["sandboxID"]
    assert http.get(f"/sandboxes/{fork}").json()["network"]["allowPublicTraffic"] is False
    assert http.delete(f"/sandboxes/{fork}").status_code == 204


def test_a_masked_host(served: server.Served, http: httpx.Client) -> None:
    for mask in ("a b", "x\r\nX-More: 1", "", "a/b", "${HOME}.test", "x" * 300):
        body = {"templateID": "base", "network": {"maskRequestHost": mask}}
        assert http.post("/sandboxes", json=body).status_code == 400, mask
    found = make(served, http, {"maskRequestHost": "${PORT}-mine.example.test"})
    try:
        for call in (found.by_name, found.by_headers):
            heard = dict(call("/shown").json()["headers"])
            assert heard["host"] == f"{found.port}-mine.example.test"
    finally:
        http.delete(f"/sandboxes/{found.id}")
