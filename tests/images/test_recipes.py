"""Recipes: what is no recipe, what a step may not reach, what a failed one leaves (nothing), and what is not run twice."""

from __future__ import annotations

import os
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from cloche import errors, model
from cloche.images import cache, recipes
from tests.images.conftest import output
from tests.images.layouts import entry, layer, link, small_root, write_layout

ROOT = os.geteuid() == 0
BASE = "oci:/x"


def leftovers(home: Path) -> list[str]:
    return [path.name for path in (home / "s/images/drafts").glob("*") if path.is_dir()]


async def built(made, recipe, directory="/nonexistent") -> tuple[model.ImageInfo, list[model.ImageProgress]]:
    said = [progress async for progress in made.build_image(recipe, str(directory))]
    assert said[-1].image is not None
    return said[-1].image, said


async def fails(made, recipe, directory="/nonexistent") -> errors.ClocheError:
    with pytest.raises(errors.ClocheError) as caught:
        await built(made, recipe, directory)
    assert await made.list() == []
    return caught.value


# ── no recipe ──────────────────────────────────────────────────────────────────────────────────────

WRONG = [
    ("", "Expected `object`"),
    ("[", "not YAML"),
    ("- a", "Expected `object`"),
    ("steps: []", "missing required field `from`"),
    ({"from": BASE, "stages": []}, "unknown field `stages`"),
    ({"from": BASE, "steps": [{"run": "a", "apt": ["b"]}]}, "step 1 has 2 verbs"),
    ({"from": BASE, "steps": [{}]}, "step 1 has 0 verbs"),
    ({"from": BASE, "steps": [{"add": "x"}]}, "unknown field `add`"),
    ({"from": BASE, "steps": [{"run": " "}]}, "run is empty"),
    ({"from": BASE, "steps": [{"apt": []}]}, "names no package"),
    ({"from": BASE, "steps": [{"apt": ["--allow-unauthenticated"]}]}, "not the name of a package"),
    ({"from": BASE, "steps": [{"apt": ["git; rm -rf /"]}]}, "not the name of a package"),
    ({"from": BASE, "steps": [{"pip": ["--index-url=http://evil"]}]}, "not the name of a package"),
    ({"from": BASE, "steps": [{"pip": ["x @ file:///etc/passwd"]}]}, "not the name of a package"),
    ({"from": BASE, "steps": [{"npm": ["-g"]}]}, "not the name of a package"),
    ({"from": BASE, "steps": [{"npm": ["../evil"]}]}, "not the name of a package"),
    ({"from": BASE, "steps": [{"copy": {"from": "../x", "to": "/x"}}]}, "not a path below"),
    ({"from": BASE, "steps": [{"copy": {"from": "/etc/passwd", "to": "/x"}}]}, "not a path below"),
    ({"from": BASE, "steps": [{"copy": {"from": "a", "to": "x"}}]}, "not an absolute path"),
    ({"from": BASE, "steps": [{"copy": {"from": "a", "to": "/x/../y"}}]}, "not an absolute path"),
    ({"from": BASE, "steps": [{"copy": {"from": "a"}}]}, "missing required field `to`"),
    ({"from": BASE, "steps": [{"env": {"A=B": "1"}}]}, "step 1"),
    ({"from": BASE, "steps": [{"run": "true"}] * 101}, "at most 100"),
    ({"from": "host"}, "no root of its own"),
    ("a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c]\nfrom: [*d,*d,*d,*d,*d]", "more than 10000 values"),
    ("from: x\n" + "#" * 70_000, "larger than 64 KiB"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "why"), WRONG, ids=[why[:30] for _, why in WRONG])
def test_what_is_no_recipe_is_refused(given, why):
    with pytest.raises(errors.InvalidInput) as caught:
        recipes.parse(given)
    assert caught.value.code == "recipe_invalid"
    assert why in caught.value.message
    assert caught.value.hint


def test_an_image_that_is_none_keeps_its_own_error():
    with pytest.raises(errors.InvalidInput) as caught:
        recipes.parse({"from": "python"})
    assert caught.value.code == "image_reference_invalid"


def test_a_recipe_is_yaml_or_data():
    text = "from: oci:/x\nsteps:\n  - apt: [git, 'g++=4:12']\n  - pip: ['requests[socks]>=2,<3']\n  - npm: ['@types/node@20']\n"
    read = recipes.parse(text)
    assert [step.verb for step in read.steps] == ["apt", "pip", "npm"]
    assert "-- 'requests[socks]>=2,<3'" in read.steps[1].line


# ── what a step cannot reach ───────────────────────────────────────────────────────────────────────


def test_a_step_that_reads_the_callers_files_fails_and_leaves_nothing(with_engine, home, small, tmp_path):
    secret = Path(os.path.expanduser("~")) / f".cloche-test-{os.getpid()}"
    in_tmp = Path("/tmp") / f"cloche-test-{os.getpid()}"
    for path in (secret, in_tmp):
        path.write_text("secret\n")
    try:

        async def work(made):
            for path in (secret, in_tmp, tmp_path / "small/index.json", "/etc/shadow", home / "s/state.db"):
                problem = await fails(
                    made, {"from": f"oci:{small}", "steps": [{"run": f"echo before; cat {path}"}]}
                )
                assert problem.code == "recipe_step_failed"
                assert "before" in problem.message
                assert "secret" not in problem.message
                assert problem.details["step"] == 1
            assert [info.kind for info in await made.images()] == ["layout"]

        with_engine(work)
    finally:
        secret.unlink()
        in_tmp.unlink()
    assert leftovers(home) == []


def test_the_log_s_end_is_in_the_error_and_the_steps_before_it_stay(with_engine, home, small):
    steps = [
        {"run": "echo one > /one"},
        {"run": "i=0; while [ $i -lt 50 ]; do echo line $i; i=$((i+1)); done; exit 7"},
    ]

    async def work(made):
        problem = await fails(made, {"from": f"oci:{small}", "steps": steps})
        assert problem.details["exit_code"] == 7
        log = str(problem.details["log"]).split("\n")
        assert (log[0], log[-1], len(log)) == ("line 30", "line 49", 20)
        assert "line 49" in problem.message
        _, said = await built(made, {"from": f"oci:{small}", "steps": steps[:1]})
        assert [progress.cached for progress in said if progress.kind == "step"] == [True]

    with_engine(work)
    assert leftovers(home) == []


def test_a_step_that_takes_too_long_fails(with_engine, home, small):
    async def work(made):
        problem = await fails(made, {"from": f"oci:{small}", "steps": [{"run": "sleep 100"}]})
        assert "step_timeout_s" in problem.message

    with_engine(work, build={"step_timeout_s": 1})


def test_a_step_cannot_fill_the_disk(with_engine, home, small):
    async def work(made):
        line = "i=0; while cat /bin/sh >> /opt/big; do i=$((i+1)); done; exit 3"
        assert (await fails(made, {"from": f"oci:{small}", "steps": [{"run": line}]})).details[
            "exit_code"
        ] == 3

    with_engine(work, build={"resources": {"disk_mib": 16}})


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"fetched\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def web() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def fetch(host: str, port: int) -> str:
    return f"exec 3<>/dev/tcp/{host}/{port}; printf 'GET / HTTP/1.0\\r\\nHost: {host}:{port}\\r\\n\\r\\n' >&3; cat <&3 > /page"


@pytest.fixture
def with_bash(tmp_path) -> str:
    """An image whose shell can make connections."""
    from tests.images.conftest import need

    need("skopeo", "bash")
    write_layout(tmp_path / "bash", small_root("bash"))
    return f"oci:{tmp_path}/bash"


@pytest.mark.parametrize("tail", ["", " || true", "; true"])
def test_a_step_that_reaches_for_an_unlisted_host_fails_the_build(with_engine, home, with_bash, web, tail):
    """Whatever its exit code is: what was refused would silently be missing in the image."""

    async def work(made):
        for host in ("unlisted.example", "host.cloche.internal"):
            recipe = {"from": with_bash, "steps": [{"run": f"({fetch(host, web)}){tail}"}]}
            problem = await fails(made, recipe)
            assert problem.code == "recipe_step_failed"
            assert host in str(problem.details["refused"]), problem.details
            assert "build.allow" in (problem.hint or "")

    with_engine(work, build={"allow": ["listed.example"]})
    assert leftovers(home) == []


def test_a_step_reaches_a_listed_host(with_engine, home, with_bash, web):
    async def work(made):
        image, _ = await built(
            made, {"from": with_bash, "steps": [{"run": fetch("host.cloche.internal", web)}]}
        )
        box = await made.create(model.SandboxSpec(image=image.digest))
        assert (await output(made, box.id, "cat /page")).endswith("fetched\n")

    with_engine(work, build={"allow": [f"host.cloche.internal:{web}"]})


# ── copying ────────────────────────────────────────────────────────────────────────────────────────


def test_a_copy_does_not_leave_the_directory(with_engine, home, small, tmp_path):
    place = tmp_path / "recipe"
    place.mkdir()
    (place / "out").symlink_to("/etc")
    (place / "file").symlink_to("/etc/passwd")
    os.mkfifo(place / "pipe")
    (place / "tree").mkdir()
    (place / "tree/link").symlink_to("/etc/passwd")

    async def work(made):
        for path in ("out", "out/passwd", "file", "missing", "pipe"):
            problem = await fails(
                made, {"from": f"oci:{small}", "steps": [{"copy": {"from": path, "to": "/x"}}]}, place
            )
            assert problem.code == "recipe_invalid", path
        image, _ = await built(
            made, {"from": f"oci:{small}", "steps": [{"copy": {"from": "tree", "to": "/x"}}]}, place
        )
        root = home / "s/images/roots" / cache._name(image.digest) / "root"
        assert (root / "x/link").is_symlink()  # a link stays one: nobody follows it on the host

    with_engine(work)
    assert leftovers(home) == []


def test_a_copy_into_a_hostile_image_stays_in_it(with_engine, home, tmp_path):
    write_layout(
        tmp_path / "i", small_root(), layer(link("out", "/etc"), link("up", "../../../../../../etc"))
    )
    (tmp_path / "planted").write_text("x")

    async def work(made):
        for to in ("/out/planted", "/up/planted"):
            image, _ = await built(
                made,
                {"from": f"oci:{tmp_path}/i", "steps": [{"copy": {"from": "planted", "to": to}}]},
                tmp_path,
            )
            root = home / "s/images/roots" / cache._name(image.digest) / "root"
            assert (root / "etc/planted").read_text() == "x"

    with_engine(work)
    assert not Path("/etc/planted").exists()


def test_files_and_directories_are_copied_as_root_s(with_engine, small, tmp_path):
    (tmp_path / "app/sub").mkdir(parents=True)
    (tmp_path / "app/sub/tool").write_text("#!/bin/sh\necho tool\n")
    (tmp_path / "app/sub/tool").chmod(0o4755)
    (tmp_path / "one").write_text("1\n")
    steps = [
        {"copy": {"from": "app", "to": "/srv/app"}},
        {"copy": {"from": "one", "to": "/srv/app/renamed"}},
        {"copy": {"from": "one", "to": "/srv/"}},
        {"copy": {"from": "one", "to": "/etc/greeting"}},
    ]

    async def work(made):
        image, _ = await built(made, {"from": f"oci:{small}", "steps": steps}, tmp_path)
        box = await made.create(model.SandboxSpec(image=image.digest))
        assert (
            await output(made, box.id, "/srv/app/sub/tool; cat /srv/app/renamed /srv/one /etc/greeting")
            == "tool\n1\n1\n1\n"
        )
        assert (await output(made, box.id, "stat -c %a /srv/app/sub/tool")) == "755\n"
        if ROOT:
            assert await output(made, box.id, "stat -c %U /srv/app/sub/tool /srv") == "root\nroot\n"
        # The image that it began from is as it was: nothing is written through a shared file.
        old = await made.create(model.SandboxSpec(image=f"oci:{small}"))
        assert await output(made, old.id, "cat /etc/greeting") == "hello\n"

    with_engine(work)


# ── layers ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_s_changes_are_the_next_one_s_root(with_engine, tmp_path):
    """Whiteouts, opaque directories, renames, links and modes, as the kernel writes them."""
    write_layout(
        tmp_path / "i", small_root(),
        layer(*(entry(f"srv/{d}/{f}", f.encode()) for d in ("a", "b", "c") for f in ("x", "y")), entry("srv/gone", b""), entry("opt/f", b"f")),
    )  # fmt: skip
    steps = [
        {"run": "rm /srv/gone; rm -r /srv/a; mkdir /srv/a; echo new > /srv/a/z"},
        {"run": "mv /srv/b /srv/moved; echo w > /srv/moved/w; rm /srv/moved/x"},
        {"run": "ln /opt/f /opt/g; ln -s ../opt/f /srv/s; chmod 700 /srv/c; rm -r /srv/c/x; echo t > /tmp/t"},
        {"env": {"MADE": "yes"}},
        {"run": "echo $MADE > /made"},
    ]

    async def work(made):
        image, said = await built(made, {"from": f"oci:{tmp_path}/i", "steps": steps})
        assert image.kind == "recipe"
        assert image.reference == "recipe:" + image.digest.removeprefix("sha256:")
        assert [p.step for p in said if p.kind == "step"] == [1, 2, 3, 4, 5]
        box = await made.create(model.SandboxSpec(image=image.reference))
        user = "root" if ROOT else "user"
        seen = await output(
            made, box.id, "cd /srv; ls; ls a moved c; cat moved/y moved/w s /made; ls /tmp; echo $MADE", user
        )
        assert seen.split() == [
            "a",
            "c",
            "moved",
            "s",
            "a:",
            "z",
            "c:",
            "y",
            "moved:",
            "w",
            "y",
            "yw",
            "fyes",
            "yes",
        ]
        modes = (await output(made, box.id, "stat -c %i:%a /opt/f /opt/g /srv/c", user)).split()
        assert modes[0] == modes[1]
        assert modes[2].endswith(":700")

    with_engine(work)


def test_what_is_there_is_not_run_again(with_engine, small, tmp_path):
    (tmp_path / "file").write_text("1")
    recipe = {
        "from": f"oci:{small}",
        "steps": [{"run": "cat /proc/sys/kernel/random/uuid > /id"}, {"copy": {"from": "file", "to": "/f"}}],
    }

    def cached(said):
        return [progress.cached for progress in said if progress.kind == "step"]

    async def work(made):
        first, said = await built(made, recipe, tmp_path)
        assert cached(said) == [False, False]
        again, said = await built(made, recipe, tmp_path)
        assert (cached(said), again.digest) == ([True, True], first.digest)
        (tmp_path / "file").write_text("2")
        changed, said = await built(made, recipe, tmp_path)
        assert cached(said) == [True, False]
        assert changed.digest != first.digest
        os.utime(tmp_path / "file", (1, 1))  # the same content at another time is the same
        _, said = await built(made, recipe, tmp_path)
        assert cached(said) == [True, True]

    with_engine(work)


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="an ordinary user has one uid")
def test_root_of_a_step_owns_its_files_and_nothing_else(with_engine, home, tmp_path):
    """As package managers must: give files away and pass over modes. A sandbox that is no build cannot."""
    write_layout(tmp_path / "i", small_root("chown", "mount", "chroot", "mknod"), layer(entry("opt", None)))
    image_of = f"oci:{tmp_path}/i"
    lines = "touch /srv2 && chown 33:44 /srv2 && mkdir -m 0 /closed && chown 7 /closed && touch /closed/x"

    async def work(made):
        box = await made.create(model.SandboxSpec(image=image_of))
        assert (await made.exec(box.id, model.ExecRequest(command=lines, user="root"))).exit_code != 0
        await made.delete(box.id)
        image, _ = await built(made, {"from": image_of, "steps": [{"run": lines}]})
        root = home / "s/images/roots" / cache._name(image.digest) / "root"
        owners = [
            (path.stat().st_uid, path.stat().st_gid)
            for path in (root / "srv2", root / "closed", root / "closed/x")
        ]
        assert owners == [(33, 44), (7, 0), (0, 0)]
        for line in ("mount -t tmpfs x /opt", "chroot / true", "mknod /d c 1 3"):
            problem = await fails(made, {"from": image_of, "steps": [{"run": line}]})
            assert "not permitted" in problem.message or "denied" in problem.message, problem.message

    with_engine(work)


def test_a_hostile_step_plants_nothing_on_the_host(with_engine, home, small):
    """Links in what a step wrote are taken over as links, and specials not at all."""
    line = "ln -s / /srv; ln -s /etc /opt/etc; mkdir /deep; rm -rf /workspace; ln -s /etc /workspace; rm -rf /tmp; ln -s /etc /tmp"

    async def work(made):
        image, _ = await built(made, {"from": f"oci:{small}", "steps": [{"run": line}]})
        box = await made.create(model.SandboxSpec(image=image.digest))
        await output(made, box.id, "echo x > /tmp/planted; echo x > /workspace/planted")

    with_engine(work)
    assert not Path("/etc/planted").exists()


def test_removing_an_image_leaves_those_made_of_it(with_engine, small):
    async def work(made):
        image, _ = await built(made, {"from": f"oci:{small}", "steps": [{"run": "echo 1 > /opt/one"}]})
        await made.remove_image(f"oci:{small}")
        box = await made.create(model.SandboxSpec(image=image.digest))
        assert await output(made, box.id, "cat /etc/greeting /opt/one") == "hello\n1\n"

    with_engine(work)


def test_a_build_that_is_left_ends_its_sandbox(with_engine, home, small):
    async def work(made):
        stream = made.build_image(
            {"from": f"oci:{small}", "steps": [{"run": "echo started; sleep 100"}]}, "/"
        )
        async for progress in stream:
            if progress.text == "started":
                break
        await stream.aclose()
        assert await made.list() == []

    with_engine(work)
    assert leftovers(home) == []


def test_apt_as_an_ordinary_user_says_what_it_lacks(with_engine, small):
    if ROOT:
        pytest.skip("root has the uids")

    async def work(made):
        assert (
            await fails(made, {"from": f"oci:{small}", "steps": [{"apt": ["git"]}]})
        ).code == "needs_subuids"

    with_engine(work)
