"""Where images come from: registries, archives, layouts, directories; what is refused, what is pinned, what is kept."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from cloche import errors, model
from cloche.images import cache, references, skopeo
from tests.images import layouts
from tests.images.conftest import Registry, need, output, pulled, write_auth
from tests.images.layouts import entry, layer, link

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def leftovers(home: Path) -> list[str]:
    """What a failed pull left: nothing may be there but locks."""
    images = home / "s/images"
    drafts = [path.name for path in images.glob("drafts/*") if path.is_dir()]
    return (
        drafts
        + [path.name for path in images.glob("roots/*")]
        + [path.name for path in images.glob("pins/*")]
    )


def refused(with_engine, home: Path, reference: str, **chosen: object) -> errors.ClocheError:
    caught: list[errors.ClocheError] = []

    async def work(made):
        with pytest.raises(errors.ClocheError) as problem:
            await made.create(model.SandboxSpec(image=reference))
        caught.append(problem.value)
        assert await made.list() == []

    with_engine(work, **chosen)
    assert leftovers(home) == []
    assert caught[0].hint or caught[0].code == "image_invalid"
    return caught[0]


# ── refused ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text",
    ["", "python", "python:3.12", "docker://python", "dir:relative", "dir:/a/../b", "oci:", "recipe:abc", "sha256:" + "G" * 64,
     "registry.example/UPPER", "registry.example/a:b:c", "registry.example/a@sha256:12", "ftp://x/y", "a b", "docker:// x.y/z",
     "registry.example/a:tag@sha256:" + "0" * 64, "oci:/a\n", "-x.y/z", "docker://--authfile=x.y/z"],
)  # fmt: skip
def test_what_names_no_image_is_refused(text):
    with pytest.raises(errors.InvalidInput) as caught:
        references.parse(text)
    assert caught.value.code == "image_reference_invalid"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("text", "kind", "spelled"),
    [
        ("host", "host", "host"),
        ("dir:/srv//root/", "directory", "dir:/srv/root"),
        ("oci:/a/b", "layout", "oci:/a/b"),
        ("oci:/a/b:v1", "layout", "oci:/a/b:v1"),
        ("docker-archive:/a.tar", "archive", "docker-archive:/a.tar"),
        ("registry.example:5000/x/y:tag", "registry", "docker://registry.example:5000/x/y:tag"),
        ("registry.example/x", "registry", "docker://registry.example/x:latest"),
        ("localhost/x", "registry", "docker://localhost/x:latest"),
        ("docker://r.example/x@sha256:" + "0" * 64, "registry", "docker://r.example/x@sha256:" + "0" * 64),
        ("recipe:" + "a" * 64, "stored", "sha256:" + "a" * 64),
    ],
)
def test_a_reference_has_one_spelling(text, kind, spelled):
    assert references.parse(text)[:2] == (kind, spelled)


def test_a_missing_tool_says_how_to_get_it(home, with_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    (tmp_path / "x.tar").write_bytes(b"")
    problem = refused(with_engine, home, f"oci-archive:{tmp_path}/x.tar")
    assert problem.code == "image_tool_missing"
    assert "apt-get install skopeo" in (problem.hint or "")


def test_a_path_where_nothing_is(home, with_engine, tmp_path):
    need("skopeo")
    for scheme in ("oci", "oci-archive", "docker-archive", "dir"):
        assert refused(with_engine, home, f"{scheme}:{tmp_path}/none").code == "image_not_found"


def test_what_is_no_image(home, with_engine, tmp_path):
    need("skopeo")
    (tmp_path / "file.tar").write_bytes(b"not an archive")
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/index.json").write_text("{}")
    for reference in (
        f"oci-archive:{tmp_path}/file.tar", f"docker-archive:{tmp_path}/file.tar", f"oci:{tmp_path}/odd", f"dir:{tmp_path}/empty",
        f"dir:{tmp_path}/file.tar",
    ):  # fmt: skip
        assert refused(with_engine, home, reference).code in ("image_invalid", "image_not_found"), reference


@pytest.mark.parametrize("path", ["/", "/usr", "/etc", "/proc/1/root", "/home", "/var"])
def test_a_directory_of_this_machine_is_no_root(home, with_engine, path):
    assert refused(with_engine, home, f"dir:{path}").code in ("host_path_refused", "image_not_found")


def test_the_state_directory_is_no_root(home, with_engine):
    (home / "s/images/usr").mkdir(parents=True)
    for path in (home / "s/images", home / "s", home):
        problem = refused(with_engine, home, f"dir:{path}")
        assert problem.code == "host_path_refused"


def test_an_image_of_another_machine(home, with_engine, tmp_path):
    need("skopeo")
    layouts.write_layout(tmp_path / "i", layer(entry("a", b"")), architecture="s390x")
    problem = refused(with_engine, home, f"oci:{tmp_path}/i")
    assert problem.code == "image_invalid"
    assert "s390x" in problem.message


def test_an_artifact_that_is_no_image(home, with_engine, tmp_path):
    need("skopeo")
    layouts.write_layout(
        tmp_path / "i",
        layer(entry("a", b"")),
        change=lambda m: m["config"].update(mediaType="application/vnd.cncf.helm.config.v1+json"),
    )
    assert refused(with_engine, home, f"oci:{tmp_path}/i").code == "image_invalid"


def test_a_hostile_layer_leaves_nothing(home, with_engine, tmp_path):
    need("skopeo")
    layouts.write_layout(
        tmp_path / "i", layouts.small_root(), layer(link("out", "/etc"), entry("out/x", b""))
    )
    problem = refused(with_engine, home, f"oci:{tmp_path}/i")
    assert (problem.code, problem.details["rule"]) == ("image_layer_refused", "symlink_traversal")


def test_an_image_larger_than_the_cache(home, with_engine, small):
    assert refused(with_engine, home, f"oci:{small}", max_mib=1).code == "image_too_large"


def test_a_blob_larger_than_the_cache_is_refused_while_it_comes(home, with_engine, tmp_path):
    need("skopeo")
    layouts.write_layout(tmp_path / "i", layer(entry("usr/filler", os.urandom(3 << 20))))
    assert refused(with_engine, home, f"oci:{tmp_path}/i", max_mib=1).code == "image_too_large"


@pytest.mark.parametrize("digest", ["sha256:../../../etc/passwd", "sha256:" + "A" * 64, "", None, 7])
def test_a_digest_that_is_a_path(tmp_path, digest):
    (tmp_path / "manifest.json").write_text(
        json.dumps({"config": {"mediaType": skopeo._CONFIGS[0], "digest": digest}, "layers": []})
    )
    with pytest.raises(errors.InvalidInput) as caught:
        skopeo.read(str(tmp_path))
    assert caught.value.code == "image_invalid"


@pytest.mark.parametrize("text", ["[]", "{", '{"layers": []}', '{"config": {}, "layers": 7}', "[" * 100_000])
def test_a_manifest_that_is_none(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(errors.InvalidInput) as caught:
        skopeo.read(str(tmp_path))
    assert caught.value.code == "image_invalid"


# ── registries ─────────────────────────────────────────────────────────────────────────────────────


def test_a_registry_without_tls_must_be_named(home, with_engine, registry: Registry, small):
    reference = registry.push(small, "plain/one:v1")
    problem = refused(with_engine, home, reference)
    assert problem.code == "image_registry_failed"
    assert "images.registries_insecure" in (problem.hint or "")

    async def work(made):
        assert (await pulled(made, reference)).kind == "registry"

    with_engine(work, registries_insecure=[registry.host])


def test_what_a_registry_does_not_have(home, with_engine, registry: Registry):
    problem = refused(
        with_engine, home, f"{registry.host}/nobody/nothing:v1", registries_insecure=[registry.host]
    )
    assert problem.code == "image_not_found"


def test_a_registry_that_is_not_there(home, with_engine):
    need("skopeo")
    problem = refused(with_engine, home, "127.0.0.1:1/a/b")
    assert (problem.code, problem.retryable) == ("image_registry_failed", True)


def test_a_locked_registry_wants_credentials(home, with_engine, locked_registry: Registry, small, tmp_path):
    right = write_auth(tmp_path / "right.json", locked_registry)
    wrong = write_auth(tmp_path / "wrong.json", locked_registry, "stone")
    insecure = {"registries_insecure": [locked_registry.host]}
    reference = locked_registry.push(small, "secret/one", auth_file=right)
    for auth_file in (None, str(wrong)):
        chosen = {**insecure, "auth_file": auth_file} if auth_file else insecure
        problem = refused(with_engine, home, reference, **chosen)
        assert problem.code == "image_auth_required"
        assert "images.auth_file" in (problem.hint or "")

    async def work(made):
        info = await made.create(model.SandboxSpec(image=reference))
        assert await output(made, info.id, "cat /etc/greeting") == "hello\n"

    with_engine(work, auth_file=str(right), **insecure)


def test_a_tag_means_what_it_meant_until_it_is_pulled_again(home, with_engine, registry: Registry, tmp_path):
    for number in (1, 2):
        layouts.write_layout(
            tmp_path / f"v{number}", layouts.small_root(), layer(entry("which", b"%d" % number))
        )
    reference = registry.push(tmp_path / "v1", "moving:latest")

    async def which(made, image: str) -> str:
        made_of = await made.create(model.SandboxSpec(image=image))
        said = await output(made, made_of.id, "cat /which")
        await made.delete(made_of.id)
        return said

    async def work(made):
        first = await pulled(made, reference)
        registry.push(tmp_path / "v2", "moving:latest")
        assert await which(made, reference) == "1"
        second = await pulled(made, reference)
        assert second.digest != first.digest
        assert await which(made, reference) == "2"
        by_digest = f"{registry.host}/moving@{first.digest}"
        assert await which(made, by_digest) == "1"
        assert await which(made, first.digest) == "1"

    with_engine(work, registries_insecure=[registry.host])


def test_the_recorded_digest_is_the_registry_s(home, with_engine, registry: Registry, small):
    reference = registry.push(small, "digest/one")
    raw = subprocess.run(
        ["skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{reference}"],
        capture_output=True,
        check=True,
    ).stdout

    async def work(made):
        assert (await pulled(made, reference)).digest == layouts.digest(raw)

    with_engine(work, registries_insecure=[registry.host])


# ── archives and directories ───────────────────────────────────────────────────────────────────────


def test_archives_of_both_kinds(home, with_engine, small, tmp_path):
    for scheme in ("oci-archive", "docker-archive"):
        target = f"{scheme}:{tmp_path}/{scheme}.tar"
        subprocess.run(
            ["skopeo", "--insecure-policy", "copy", f"oci:{small}", f"{target}:x/y:1" if "docker" in scheme else target],
            check=True, capture_output=True,
        )  # fmt: skip

        async def work(made, target=target):
            info = await made.create(model.SandboxSpec(image=target))
            assert await output(made, info.id, "cat /etc/greeting") == "hello\n"

        with_engine(work)


def test_umoci_unpacks_the_same(home, with_engine, small, tmp_path):
    need("umoci")
    subprocess.run(
        ["umoci", "raw", "unpack", *([] if os.geteuid() == 0 else ["--rootless"]), "--image", f"{small}:latest", tmp_path / "theirs"],
        check=True, capture_output=True,
    )  # fmt: skip

    async def work(made):
        info = await pulled(made, f"oci:{small}")
        ours = home / "s/images/roots" / cache._name(info.digest) / "root"
        for path in (tmp_path / "theirs").rglob("*"):
            mine, found = (ours / path.relative_to(tmp_path / "theirs")).lstat(), path.lstat()
            if path.is_file():
                assert (mine.st_mode, mine.st_size, mine.st_uid) == (
                    found.st_mode,
                    found.st_size,
                    found.st_uid,
                ), path

    with_engine(work)


def test_a_directory_is_copied_and_followed_when_it_changes(home, with_engine, small, tmp_path):
    root = tmp_path / "root"

    async def prepare(made):
        info = await pulled(made, f"oci:{small}")
        shutil.copytree(home / "s/images/roots" / cache._name(info.digest) / "root", root, symlinks=True)

    with_engine(prepare)
    os.mkfifo(root / "pipe")

    async def work(made):
        first = await made.create(model.SandboxSpec(image=f"dir:{root}"))
        (root / "etc/greeting").write_text("changed\n")
        assert await output(made, first.id, "cat /etc/greeting; test ! -e /pipe") == "hello\n"
        second = await made.create(model.SandboxSpec(image=f"dir:{root}"))
        assert await output(made, second.id, "cat /etc/greeting") == "changed\n"
        # The host's directory is not the sandbox's.
        await output(
            made, second.id, "echo mine > /etc/greeting", user="root" if os.geteuid() == 0 else "user"
        )
        assert (root / "etc/greeting").read_text() == "changed\n"
        assert len(await made.images()) == 3

    with_engine(work)


# ── the cache ──────────────────────────────────────────────────────────────────────────────────────


def test_what_is_in_use_is_neither_removed_nor_collected(home, with_engine, small, tmp_path):
    layouts.write_layout(
        tmp_path / "other", layouts.small_root(), layer(entry("filler", os.urandom(6 << 20)))
    )

    async def work(made):
        box = await made.create(model.SandboxSpec(image=f"oci:{small}"))
        with pytest.raises(errors.Conflict) as caught:
            await made.remove_image(f"oci:{small}")
        assert caught.value.code == "image_in_use"
        await pulled(made, f"oci:{tmp_path}/other")  # together more than the limit: the idle one would go
        used = {info.reference: info.in_use for info in await made.images()}
        assert used[f"oci:{small}"] is True
        assert await output(made, box.id, "cat /etc/greeting") == "hello\n"
        await made.delete(box.id)
        assert [info.in_use for info in await made.images() if info.reference == f"oci:{small}"] == [False]
        gone = await made.remove_image(f"oci:{small}")
        assert gone.reference == f"oci:{small}"
        with pytest.raises(errors.NotFound):
            await made.image(f"oci:{small}")

    with_engine(work, max_mib=12)


def test_the_least_recently_used_goes_first(home, with_engine, tmp_path):
    need("skopeo")
    for number in range(3):
        layouts.write_layout(tmp_path / f"i{number}", layer(entry("usr/filler", os.urandom(3 << 20))))

    async def work(made):
        for number in (0, 1):
            await pulled(made, f"oci:{tmp_path}/i{number}")
        for found in await made.images():
            if found.reference.endswith("i1"):
                os.utime(home / "s/images/roots" / cache._name(found.digest) / "lock", (1, 1))
        await pulled(made, f"oci:{tmp_path}/i2")
        assert sorted(info.reference[-2:] for info in await made.images()) == ["i0", "i2"]

    with_engine(work, max_mib=7)


def test_two_engines_make_an_image_once_and_hold_it_for_each_other(home, small):
    source = cache.Cache(str(home / "images"))
    other = cache.Cache(str(home / "images"))
    info = model.ImageInfo(
        reference="x", digest="sha256:" + "1" * 64, kind="layout", size_bytes=1, created_at=0, last_used_at=0
    )
    with source.making("x") as first, other.making("x") as second:
        assert (first, second) == (True, False)
    for one in (source, other):  # published twice: the second is as good as the first
        with one.draft() as draft:
            Path(draft.root, "file").write_text("x")
            one.publish(draft, info)
    held = source.hold(info.digest, 5.0)
    assert held is not None
    assert other.images()[0].in_use
    with pytest.raises(errors.Conflict):
        other.remove(info.digest)
    assert other.collect(0) == []
    held.release()
    held.release()
    assert [gone.digest for gone in other.collect(0)] == [info.digest]
    assert source.hold(info.digest, 5.0) is None
    assert all(name.endswith(".making") for name in os.listdir(home / "images/drafts"))


def test_drafts_of_the_dead_are_swept_and_those_of_the_living_are_not(home):
    made = cache.Cache(str(home / "images"))
    with made.draft() as draft:
        dead = home / "images/drafts/dead"
        (dead / "entry/root/closed").mkdir(parents=True)
        (dead / "entry/root/closed").chmod(0)
        (dead / "lock").touch()
        assert made.sweep() == 1
        assert not dead.exists()
        assert Path(draft.root).is_dir()
    assert not Path(draft.path).exists()


def test_a_pull_that_is_left_takes_its_work_with_it(home, with_engine, small):
    async def work(made):
        stream = made.pull_image(f"oci:{small}")
        await anext(stream)
        await stream.aclose()
        assert await made.images() == []

    with_engine(work)
    assert leftovers(home) == []


def test_callers_that_come_together_share_one_pull(home, with_engine, small):
    async def work(made):
        boxes = await asyncio.gather(
            *(made.create(model.SandboxSpec(image=f"oci:{small}")) for _ in range(4))
        )
        for box in boxes:
            assert await output(made, box.id, "cat /etc/greeting") == "hello\n"
        assert len(await made.images()) == 1

    with_engine(work)
