"""Paths of the server's host over TCP: nowhere, then beneath what the configuration names, and not by way of a link."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche import errors, model
from cloche.server import guarding, hostpaths
from tests.server import conftest
from tests.server.test_frames import far
from tests.server.test_http import refused


@pytest.fixture(scope="module")
def work() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cl-", dir="/var/tmp") as directory:
        root = Path(directory).resolve()
        for place in (
            "shared/project",
            "tenants/red/project",
            "tenants/blue/project",
            "shared-not",
            "elsewhere/secret",
        ):
            (root / place).mkdir(parents=True)
            (root / place / "note").write_text(place)
        (root / "shared/out").symlink_to(root / "elsewhere/secret")
        (root / "shared/up").symlink_to("..")
        yield root


@pytest.fixture(scope="module")
def house(work) -> Iterator[conftest.Served]:
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        lines = f'server.host_paths = ["{work}/shared", "{work}/tenants/{{tenant}}"]\n'
        made = conftest.serve(Path(home), settings=lines)
        try:
            yield made
        finally:
            assert conftest.stop(made) == 0


@pytest.mark.parametrize("path", ["/", "/etc", "/root", "relative", "", "/var/tmp"])
def test_without_a_word_from_the_operator_no_path_means_anything(served, path):
    with served.client() as client:
        refused(client.post("/v1/sandboxes", json={"workspace": path}), "host_path_refused")
        refused(client.post("/v1/sandboxes", json={"image": f"dir:{path}"}), "host_path_refused")
    assert "(host_path_refused)" in far(served, f"Sandbox(workspace={path!r})").stderr


@pytest.mark.parametrize(
    "place",
    [
        "elsewhere/secret", "shared-not", "tenants/red/project", "tenants", "shared/out", "shared/up/elsewhere", "shared/../elsewhere/secret", "shared/nowhere", "",
    ],
)  # fmt: skip
def test_what_leads_elsewhere_is_refused_however_it_is_spelled(house, work, place):
    with house.client() as client:
        told = refused(
            client.post("/v1/sandboxes", json={"workspace": f"{work}/{place}"}), "host_path_refused"
        )
        refused(client.post("/v1/sandboxes", json={"image": f"dir:{work}/{place}"}), "host_path_refused")
        refused(
            client.post("/v1/sandboxes", json={"image": f"oci:{work}/{place}:latest"}), "host_path_refused"
        )
        nowhere = refused(
            client.post("/v1/sandboxes", json={"workspace": "/nowhere/at/all"}), "host_path_refused"
        )
        assert told["message"] == nowhere["message"], "nothing is told of what exists"
        assert client.get("/v1/sandboxes").json()["sandboxes"] == []


def test_a_tenant_names_its_own_and_nobody_else_s(house, work):
    key = house.cloche("key", "create", "of-red", "--tenant", "red").stdout.strip()
    with house.client(key) as red:
        for place in ("tenants/blue/project", "shared/project", "tenants", "tenants/red/../blue/project"):
            refused(red.post("/v1/sandboxes", json={"workspace": f"{work}/{place}"}), "host_path_refused")
        box = (
            red.post("/v1/sandboxes", json={"workspace": f"{work}/tenants/red/project"})
            .raise_for_status()
            .json()["id"]
        )
        ran = red.post(f"/v1/sandboxes/{box}/exec", json={"command": "cat note; pwd"}).json()
        assert ran["stdout"] == f"tenants/red/project{work}/tenants/red/project\n"
        red.delete(f"/v1/sandboxes/{box}")


def test_beneath_a_named_directory_a_workspace_works(house, work):
    with house.client() as client:
        made = (
            client.post("/v1/sandboxes", json={"workspace": f"{work}/shared/up/shared/project"})
            .raise_for_status()
            .json()
        )
        assert made["shown"] == [f"{work}/shared/project"], "and none of the operator's toolchains"
        ran = client.post(
            f"/v1/sandboxes/{made['id']}/exec", json={"command": "echo more >> note; cat note"}
        ).json()
        assert ran["stdout"] == "shared/projectmore\n"
        assert (work / "shared/project/note").read_text() == "shared/projectmore\n"
        client.delete(f"/v1/sandboxes/{made['id']}")
    ran = far(house, f"print(Sandbox(workspace={str(work / 'shared/project')!r}).exec('cat note').stdout)")
    assert ran.stdout == "shared/projectmore\n\n", ran.stderr


def test_the_socket_s_owner_names_any_path(house, work):
    ran = house.cloche("run", "--workspace", str(work / "elsewhere/secret"), "--", "cat", "note")
    assert ran.stdout == "elsewhere/secret"


def test_settings_that_name_everything_are_refused(tmp_path):
    from cloche import settings

    for wrong in ("/", "//", "work", ""):
        (tmp_path / "s.toml").write_text(f'server.host_paths = ["{wrong}"]\n')
        with pytest.raises(errors.ClocheError) as caught:
            settings.load({"HOME": "/h"}, file=str(tmp_path / "s.toml"))
        assert caught.value.code == "settings_invalid"


class Swapped:
    """A backend that opens another directory than the one that was judged: somebody moved a link meanwhile."""

    where = "nowhere"

    def __init__(self) -> None:
        self.deleted: list[str] = []

    async def create(self, spec):
        return model.SandboxInfo(
            id="a" * 20, name=None, phase="running", template="base", profile="moderate", created_at=0, expires_at=None, idle_timeout_s=None,
            isolation=model.Isolation(level="namespaces", driver="fake"), limits={}, server="", owner="", shown=("/etc",),
        )  # fmt: skip

    async def delete(self, sandbox):
        self.deleted.append(sandbox)


def test_what_was_opened_is_looked_at_again(tmp_path):
    backend = Swapped()
    caller = guarding.Principal("k", "", frozenset(("*",)), directories=(str(tmp_path),))
    guarded = guarding.guard(backend, caller)  # type: ignore[arg-type]
    with pytest.raises(errors.PolicyRefused) as caught:
        asyncio.run(guarded.create(model.SandboxSpec(workspace=str(tmp_path))))
    assert caught.value.code == "host_path_refused"
    assert backend.deleted == ["a" * 20]


def test_an_image_is_named_by_where_it_leads(tmp_path):
    root = str(tmp_path.resolve())
    (tmp_path / "layout").mkdir()
    (tmp_path / "link").symlink_to("layout")
    assert hostpaths.image(f"oci:{root}/link:v1", [root]) == f"oci:{root}/layout:v1"
    assert hostpaths.image(f"dir:{root}/link", [root]) == f"dir:{root}/layout"
    assert hostpaths.image(f"dir:{root}/link:v1", [root]) is None
    assert hostpaths.image("dir:/etc", [root]) is None
    assert hostpaths.directories(["/a", "/b/{tenant}"], "") == ("/a",)
    assert hostpaths.directories(["/a", "/b/{tenant}"], "red") == ("/b/red",)
