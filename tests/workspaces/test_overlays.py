"""What `diff` says and `apply` takes over, from real overlays and from hand-made uppers."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from pathlib import Path

import pytest

from cloche import errors, workspaces
from cloche.linux import syscalls
from tests.workspaces import glass


class Overlay:
    def __init__(self, base: Path, lower: Path) -> None:
        self.lower, self.upper, self.work = lower, base / "upper", base / "work"
        self.upper.mkdir()
        self.work.mkdir()

    def run(self, line: str) -> None:
        """Run a line in an overlay over the lower directory, shown at its own path."""
        pid = os.fork()
        if pid == 0:
            try:
                self._enter()
                os.execve(
                    "/bin/bash",
                    ["bash", "-ec", line],
                    {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"},
                )
            finally:
                os._exit(125)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def _enter(self) -> None:
        uid, gid = os.getuid(), os.getgid()
        assert ctypes.CDLL(None).unshare(0x10000000 | 0x20000) == 0
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        options = f"lowerdir={self.lower},upperdir={self.upper},workdir={self.work},userxattr"
        syscalls.mount("overlay", str(self.lower), "overlay", 0, options)
        os.chdir(self.lower)

    def diff(self) -> list[tuple[str, str, str]]:
        return [
            (change.kind, change.path, change.type)
            for change in workspaces.diff(str(self.lower), str(self.upper))
        ]

    def apply(self, *paths: str, force: bool = False) -> workspaces.Applied:
        return workspaces.apply(str(self.lower), str(self.upper), paths or None, force=force)


@pytest.fixture
def overlay(tmp_path: Path, project: Path) -> Overlay:
    (project / "keep").write_text("keep")
    (project / "old").mkdir()
    (project / "old/one").write_text("1")
    (project / "old/two").write_text("2")
    return Overlay(tmp_path, project)


def _refused(overlay: Overlay) -> list[str]:
    before = sorted(map(str, overlay.lower.rglob("*")))
    with pytest.raises(errors.PolicyRefused) as caught:
        overlay.apply()
    assert caught.value.code == "apply_refused"
    assert sorted(map(str, overlay.lower.rglob("*"))) == before
    refused = caught.value.details["refused"]
    assert isinstance(refused, list)
    assert overlay.apply(force=True).refused == tuple(refused)
    return [line.partition(":")[0] for line in refused]


@pytest.mark.parametrize(
    "target",
    [
        "/etc/passwd",
        "../out",
        "a/../../../out",
        "keep/../x",
        ".git/hooks",
        "../../../../../../etc",
        "x/.git/config",
    ],
)
def test_links_that_lead_out_are_refused(target: str, overlay: Overlay) -> None:
    overlay.run(f"ln -s {target} link")
    assert _refused(overlay) == ["link"]
    assert not os.path.lexists(overlay.lower / "link")


def test_a_link_through_a_link_of_the_users_is_refused(overlay: Overlay) -> None:
    (overlay.lower / "data").symlink_to("/etc")
    overlay.run("ln -s data/passwd link")
    assert _refused(overlay) == ["link"]


def test_special_files_and_set_user_id_are_refused(overlay: Overlay) -> None:
    overlay.run("mkfifo fifo; echo x > suid; chmod 4755 suid; echo x > sgid; chmod 2755 sgid")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(overlay.upper)
        listener.bind("socket")
        os.chdir(here)
    assert _refused(overlay) == ["fifo", "sgid", "socket", "suid"]
    assert not (overlay.lower / "suid").exists()


@pytest.mark.parametrize(
    "path",
    [".git/hooks/pre-commit", ".envrc", ".claude/settings.json", ".vscode/tasks.json", "cloche.toml", ".git/commondir", "deep/.git/hooks/x",
     ".git/modules/a/b/hooks/x", "bare/hooks/x", ".git/info/attributes"],
)  # fmt: skip
def test_control_files_are_refused_added_changed_or_removed(path: str, overlay: Overlay) -> None:
    for head in (".git/modules/a/b", "bare"):
        (overlay.lower / head).mkdir(parents=True, exist_ok=True)
        (overlay.lower / head / "HEAD").write_text("ref: refs/heads/main\n")
    overlay.run(f"mkdir -p $(dirname {path}); echo evil > {path}")
    assert path in _refused(overlay)
    assert not (overlay.lower / path).exists()


def test_removing_a_control_file_is_refused(overlay: Overlay) -> None:
    (overlay.lower / ".npmrc").write_text("mine")
    overlay.run("rm .npmrc")
    assert _refused(overlay) == [".npmrc"]
    assert (overlay.lower / ".npmrc").exists()


def test_a_directory_swapped_for_a_link_on_the_host_is_not_followed(overlay: Overlay, tmp_path: Path) -> None:
    overlay.run("mkdir sub; echo evil > sub/file")
    (tmp_path / "outside").mkdir()
    (overlay.lower / "sub").symlink_to(tmp_path / "outside")
    overlay.apply()
    assert os.listdir(tmp_path / "outside") == []
    assert (overlay.lower / "sub/file").read_text() == "evil\n"


def test_a_directory_swapped_while_writing_is_not_followed(
    overlay: Overlay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlay.run("echo evil > old/three")
    (tmp_path / "outside").mkdir()
    judged = workspaces.diff(str(overlay.lower), str(overlay.upper))
    monkeypatch.setattr("cloche.workspaces.overlays.diff", lambda *_a, **_k: judged)
    (overlay.lower / "old").rename(overlay.lower / "gone")
    (overlay.lower / "old").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError):
        overlay.apply()
    assert os.listdir(tmp_path / "outside") == []


def test_a_redirected_directory_is_refused(overlay: Overlay) -> None:
    (overlay.upper / "moved").mkdir()
    os.setxattr(overlay.upper / "moved", "user.overlay.redirect", b"old")
    assert overlay.diff() == [("moved", "moved", "directory")]
    assert _refused(overlay) == ["moved"]


def test_git_configuration_is_merged_not_copied(prepare, overlay: Overlay) -> None:
    glass.git(str(overlay.lower), "init", "-q")
    overlay.run("git config core.fsmonitor evil; git remote add up https://x/y")
    applied = overlay.apply()
    text = (overlay.lower / ".git/config").read_text()
    assert "evil" not in text
    assert "https://x/y" in text
    assert applied.config_dropped == (".git/config: core.fsmonitor = evil",)


def test_differences_are_named(overlay: Overlay) -> None:
    overlay.run(
        "echo new > new; echo more >> keep; rm old/one; mkdir d; echo x > d/x; touch old/two; ln -s keep link; chmod 700 old"
    )
    assert overlay.diff() == [
        ("added", "d", "directory"), ("added", "d/x", "file"), ("modified", "keep", "file"), ("added", "link", "symlink"),
        ("added", "new", "file"), ("modified", "old", "directory"), ("removed", "old/one", "file"),
    ]  # fmt: skip


def test_nothing_changed_is_no_difference(overlay: Overlay) -> None:
    overlay.run("cat keep > /dev/null; touch keep; echo x > y; rm y")
    assert overlay.diff() == []
    assert overlay.apply() == workspaces.Applied()


LINES = [
    "echo new > new; chmod 750 new; echo more >> keep; rm old/one; mkdir d; echo x > d/x; ln -s ../keep d/link",
    "rm -rf old; mkdir old; echo 3 > old/three",
    "rm -rf old; echo file > old",
    "rm keep; mkdir keep; echo x > keep/x",
    "rm -rf old keep",
    "mv old renamed; mv keep old",
    "ln -s keep a; ln -s old b; rm -rf old; mkdir -p old/deep; ln -s ../../keep old/deep/c",
    "umask 077; mkdir -p p/q; echo x > p/q/r; chmod 1777 p",
]


@pytest.mark.parametrize("line", LINES)
def test_applying_gives_what_the_sandbox_saw(line: str, overlay: Overlay, tmp_path: Path) -> None:
    # Some directories need to be empty for the overlay to rename them; mv then copies, as it does for users.
    seen = tmp_path / "seen"
    overlay.run(line + f"; cp -a . {seen}")
    overlay.apply()
    listing = ["find", ".", "-printf", "%P %y %m %l\n"]
    texts = [
        sorted(subprocess.run(listing, cwd=place, capture_output=True, text=True).stdout.split("\n"))
        for place in (seen, overlay.lower)
    ]
    assert texts[0] == texts[1]
    assert subprocess.run(["diff", "-r", "--no-dereference", seen, overlay.lower]).returncode == 0
    assert overlay.diff() == []


def test_a_selection_takes_its_parents_along(overlay: Overlay) -> None:
    overlay.run("mkdir -p d/e; echo x > d/e/x; echo y > d/y; mkfifo fifo")
    assert overlay.apply("d/e/x").applied == ("d", "d/e", "d/e/x")
    assert not (overlay.lower / "d/y").exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices and trusted attributes")
def test_marks_made_by_root_are_read_too(overlay: Overlay) -> None:
    os.mknod(overlay.upper / "keep", 0o020000, os.makedev(0, 0))
    (overlay.upper / "old").mkdir()
    os.setxattr(overlay.upper / "old", "trusted.overlay.opaque", b"y")
    os.mknod(overlay.upper / "device", 0o020600, os.makedev(1, 3))
    assert overlay.diff() == [
        ("added", "device", "special"), ("removed", "keep", "file"), ("removed", "old/one", "file"), ("removed", "old/two", "file"),
    ]  # fmt: skip
    assert _refused(overlay) == ["device"]


def test_an_overlay_needs_no_protection_and_leaves_no_trace(prepare, repository: Path, tree) -> None:
    before = tree(repository)
    prepared = prepare(repository, overlay=True)
    assert prepared.overlay
    assert prepared.protect == prepared.pinned == ()
    assert str(repository) not in [bind.source for bind in prepared.binds]
    assert tree(repository) == before
    assert workspaces.finish(prepared) == workspaces.Report()
    assert os.listdir(prepared.state) == []
