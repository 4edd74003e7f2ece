"""Sandboxes whose root is an image: what is theirs, what stays ours, and what an image cannot do to the mounts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cloche import errors, model
from tests.images import layouts
from tests.images.conftest import need, output
from tests.images.layouts import entry, layer, link

ROOT = os.geteuid() == 0


def test_the_root_is_the_image_s_and_the_user_is_ours(with_engine, small):
    async def work(made):
        box = await made.create(model.SandboxSpec(image=f"oci:{small}", env={"B": "2"}))
        seen = await output(
            made,
            box.id,
            "cat /etc/greeting; id -un; id -u; echo $HOME $GREETING $PATH $B; pwd; ls -d /usr/bin || true",
        )
        assert seen.split("\n")[:5] == [
            "hello",
            "user",
            "1000",
            "/home/user hi /bin:/opt/bin 2",
            "/workspace",
        ]
        for line in (
            "echo x > /workspace/a",
            "echo x > /home/user/a",
            "echo x > /tmp/a",
            "echo x > /dev/shm/a",
            "echo x > /var/tmp/a",
        ):
            await output(made, box.id, line)
        assert (
            await output(made, box.id, "cat /etc/machine-id /etc/hostname")
            == "c10c4ec10c4ec10c4ec10c4ec10c4e00\ncloche\n"
        )
        assert "app" not in await output(made, box.id, "cat /etc/passwd")

    with_engine(work)


def test_nothing_of_the_host_is_in_it(with_engine, small, tmp_path):
    (tmp_path / "secret").write_text("x")

    async def work(made):
        box = await made.create(model.SandboxSpec(image=f"oci:{small}"))
        for path in (tmp_path / "secret", "/etc/shadow", "/usr/bin/python3", "/etc/debian_version"):
            result = await made.exec(box.id, model.ExecRequest(command=["cat", str(path)]))
            assert result.exit_code != 0, path

    with_engine(work)


def test_sandboxes_of_one_image_do_not_see_each_other_s_changes(with_engine, small):
    async def work(made):
        boxes = [await made.create(model.SandboxSpec(image=f"oci:{small}")) for _ in range(2)]
        await output(made, boxes[0].id, "echo changed > /opt/mine")
        assert await output(made, boxes[0].id, "cat /opt/mine") == "changed\n"
        assert await output(made, boxes[1].id, "cat /opt/mine") == "1\n"

    with_engine(work)


def test_a_restrictive_sandbox_cannot_write_the_image(with_engine, small):
    async def work(made):
        box = await made.create(model.SandboxSpec(image=f"oci:{small}", profile="restrictive"))
        assert (await made.exec(box.id, model.ExecRequest(command="echo x > /opt/mine"))).exit_code != 0
        await output(made, box.id, "echo x > /workspace/a; echo x > /tmp/a")

    with_engine(work)


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="an ordinary user has one uid")
def test_owners_are_those_of_the_image(with_engine, small):
    async def work(made):
        box = await made.create(model.SandboxSpec(image=f"oci:{small}"))
        assert (
            await output(made, box.id, "stat -c %U:%G /etc/greeting /opt/mine /workspace")
            == "root:root\nuser:user\nuser:user\n"
        )
        assert (await made.exec(box.id, model.ExecRequest(command="echo x > /etc/greeting"))).exit_code != 0
        await output(made, box.id, "echo x > /etc/greeting", user="root")

    with_engine(work)


@pytest.mark.parametrize(
    "trap",
    [
        [link("proc", "/etc"), link("dev", "../../.."), link("tmp", "/etc"), link("workspace", "/")],
        [entry("proc", b"a file"), entry("dev", b"a file"), link("run", "/run"), link("sys", "/sys")],
        [entry("home", None), link("home/user", "/root"), entry("var", None), link("var/tmp", "/etc")],
        [
            entry("etc/passwd", b"user:x:0:0::/:/bin/sh\nevil:x:1000:1000::/:/bin/sh\n"),
            link("etc/group", "/etc/group"),
        ],
        [
            link("etc/resolv.conf", "/etc/resolv.conf"),
            link("etc/hosts", "../../../../etc/hosts"),
            link("etc/machine-id", "/etc/x"),
        ],
    ],
)
def test_an_image_cannot_send_a_mount_or_a_file_elsewhere(with_engine, tmp_path, trap):
    need("skopeo")
    layouts.write_layout(tmp_path / "i", layouts.small_root(), layer(*trap))
    watched = ("/etc/hosts", "/etc/passwd", "/etc/group", "/etc/resolv.conf")
    before = {path: Path(path).read_bytes() for path in watched}

    async def work(made):
        for profile in ("moderate", "restrictive"):
            box = await made.create(model.SandboxSpec(image=f"oci:{tmp_path}/i", profile=profile))
            assert (await output(made, box.id, "id -u; id -un")).split() == ["1000", "user"]
            await output(
                made,
                box.id,
                "test -e /proc/self/status && echo x > /tmp/planted && echo x > /workspace/planted && cat /dev/null",
            )
            assert await output(made, box.id, "readlink /proc /tmp /dev /workspace /home/user || true") == ""

    with_engine(work)
    assert before == {path: Path(path).read_bytes() for path in watched}
    assert not any(os.path.exists(path) for path in ("/etc/planted", "/root/planted", "/planted"))


def test_an_image_whose_etc_is_a_link_is_refused(with_engine, tmp_path):
    need("skopeo")
    layouts.write_layout(tmp_path / "i", layer(entry("usr", None), link("etc", "/etc")))

    async def work(made):
        with pytest.raises(errors.InvalidInput) as caught:
            await made.create(model.SandboxSpec(image=f"oci:{tmp_path}/i"))
        assert caught.value.code == "image_invalid"
        assert await made.images() == []

    with_engine(work)


def test_a_workspace_is_shown_in_an_image(with_engine, small, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work/a").write_text("1\n")

    async def work(made):
        box = await made.create(model.SandboxSpec(image=f"oci:{small}", workspace=str(tmp_path / "work")))
        assert await output(made, box.id, "cat a; echo 2 > b; pwd") == f"1\n{tmp_path}/work\n"

    with_engine(work)
    assert (tmp_path / "work/b").read_text() == "2\n"


def test_a_workspace_behind_a_link_of_the_image_is_refused(with_engine, tmp_path):
    need("skopeo")
    (tmp_path / "work").mkdir()
    first = str(tmp_path).split("/")[1]
    layouts.write_layout(
        tmp_path / "i", layouts.small_root(), layer(link(f"{first}/{str(tmp_path).split('/')[2]}", "/etc"))
    )
    if first == "tmp":
        expected = ("workspace_refused",)
    else:
        pytest.skip("the test's directory is not below /tmp")

    async def work(made):
        for overlay in (False, True):
            with pytest.raises(errors.ClocheError) as caught:
                await made.create(
                    model.SandboxSpec(
                        image=f"oci:{tmp_path}/i", workspace=str(tmp_path / "work"), overlay=overlay
                    )
                )
            assert caught.value.code in expected

    with_engine(work)
    assert os.listdir(tmp_path / "work") == []


@pytest.mark.parametrize("driver", ["bubblewrap", "process"])
def test_a_driver_that_has_no_other_root_says_so(with_engine, small, driver):
    async def work(made):
        try:
            await made.create(model.SandboxSpec(driver=driver, minimum_isolation="process"))
        except errors.NotSupported:
            pytest.skip(f"{driver} does not run here")
        with pytest.raises(errors.NotSupported) as caught:
            await made.create(
                model.SandboxSpec(image=f"oci:{small}", driver=driver, minimum_isolation="process")
            )
        assert caught.value.code == "not_supported_by_driver"
        assert not (await made.image(f"oci:{small}")).in_use

    with_engine(work)


def test_an_image_without_a_shell_runs_what_it_has(with_engine, tmp_path):
    need("skopeo")
    layouts.write_layout(tmp_path / "i", layer(entry("usr", None)))

    async def work(made):
        box = await made.create(model.SandboxSpec(image=f"oci:{tmp_path}/i"))
        result = await made.exec(box.id, model.ExecRequest(command="true"))
        assert result.exit_code == 127

    with_engine(work)
