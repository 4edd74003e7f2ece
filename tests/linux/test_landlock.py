"""Landlock in forked children: refusals first, each with its permitted twin beside it."""

import errno
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cloche.linux import landlock, syscalls

InChild = Callable[[Callable[[], None]], None]

ABI = landlock.abi()


def needs_abi(version: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(version > ABI, reason=f"needs Landlock ABI {version}, this kernel has {ABI}")


pytestmark = needs_abi(1)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("open", "closed", "read"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    shutil.copy("/bin/true", tmp_path / "read" / "program")
    shutil.copy("/bin/true", tmp_path / "closed" / "program")
    return tmp_path


def system() -> list[tuple[str | bytes | int, int]]:
    """What a program needs to start."""
    return [
        (path, landlock.READ_ONLY)
        for path in ("/usr", "/lib", "/lib64", "/bin", "/etc")
        if os.path.exists(path)
    ]


def refused(call: Callable[[], object], *codes: int) -> None:
    with pytest.raises(OSError) as caught:
        call()
    assert caught.value.errno in (codes or (errno.EACCES,)), caught.value


def test_abi_is_what_the_kernel_says() -> None:
    assert 1 <= ABI < 100


def test_a_kernel_without_landlock_is_an_error() -> None:
    with pytest.raises(OSError, match="no Landlock"):
        landlock.restrict([], abi=0)


@pytest.mark.parametrize("version", range(1, 8))
def test_trees_hold_for_every_abi(version: int, tree: Path, in_child: InChild) -> None:
    if version > ABI:
        pytest.skip(f"this kernel has ABI {ABI}")

    def work() -> None:
        rules = [*system(), (tree / "open", landlock.READ_WRITE), (tree / "read", landlock.READ_ONLY)]
        held = landlock.restrict(
            [(os.fspath(w) if isinstance(w, Path) else w, a) for w, a in rules], abi=version
        )
        assert held == ({"files", "signals", "abstract_sockets"} if version >= 6 else {"files"})

        refused((tree / "closed" / "file").read_text)
        refused(lambda: os.listdir(tree / "closed"))
        refused(lambda: os.listdir(tree))
        refused(lambda: (tree / "closed" / "new").write_text("x"))
        refused(lambda: subprocess.run([tree / "closed" / "program"]))
        refused(lambda: (tree / "read" / "file").write_text("x"))
        refused((tree / "read" / "new").mkdir)
        refused((tree / "read" / "file").unlink)
        refused(lambda: (tree / "open" / "file").rename(tree / "read" / "moved"), errno.EACCES, errno.EXDEV)
        refused(lambda: os.link(tree / "read" / "program", tree / "open" / "x"), errno.EACCES, errno.EXDEV)
        if version >= 3:
            refused(lambda: os.truncate(tree / "read" / "file", 0))

        assert (tree / "read" / "file").read_text() == "read"
        assert sorted(os.listdir(tree / "read")) == ["file", "program"]
        assert subprocess.run([tree / "read" / "program"]).returncode == 0
        (tree / "open" / "file").write_text("written")
        (tree / "open" / "directory").mkdir()
        (tree / "open" / "file").rename(tree / "open" / "renamed")
        (tree / "open" / "link").symlink_to("renamed")
        assert (tree / "open" / "link").read_text() == "written"
        if version >= 2:
            (tree / "open" / "renamed").rename(tree / "open" / "directory" / "moved")
        shutil.rmtree(tree / "open" / "directory")

    in_child(work)
    assert (tree / "closed" / "file").read_text() == "closed"
    assert (tree / "read" / "file").read_text() == "read"
    assert not (tree / "closed" / "new").exists()


def test_rules_by_descriptor_and_on_files(tree: Path, in_child: InChild) -> None:
    def work() -> None:
        directory = os.open(tree / "read", os.O_PATH)
        held = os.open(tree / "closed" / "file", os.O_RDONLY)
        landlock.restrict([(directory, landlock.READ), (os.fspath(tree / "open" / "file"), landlock.ALL)])
        os.fstat(directory)  # the caller's descriptor stays open
        refused(lambda: os.listdir(tree / "open"))
        refused(lambda: (tree / "open" / "other").write_text("x"))
        refused(lambda: os.execv(tree / "read" / "program", ["program"]))
        (tree / "open" / "file").write_text("x")
        assert (tree / "read" / "file").read_text() == "read"
        assert os.read(held, 100) == b"closed"

    in_child(work)


def test_a_missing_path_is_an_error_and_confines_nothing(tree: Path, in_child: InChild) -> None:
    def work() -> None:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(FileNotFoundError):
            landlock.restrict([(os.fspath(tree / "absent"), landlock.READ)])
        assert len(os.listdir("/proc/self/fd")) == before
        assert (tree / "closed" / "file").read_text() == "closed"

    in_child(work)


def test_restrict_sets_no_new_privs(in_child: InChild) -> None:
    def work() -> None:
        landlock.restrict([("/", landlock.ALL)])
        assert syscalls.prctl(syscalls.PR_GET_NO_NEW_PRIVS) == 1

    in_child(work)


def test_a_second_ruleset_only_narrows(tree: Path, in_child: InChild) -> None:
    def work() -> None:
        landlock.restrict([(os.fspath(tree / "read"), landlock.READ)])
        landlock.restrict([("/", landlock.ALL)])
        refused((tree / "closed" / "file").read_text)
        assert (tree / "read" / "file").read_text() == "read"

    in_child(work)


@needs_abi(4)
def test_tcp_is_refused_on_request_only(in_child: InChild) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def open_network() -> None:
            assert "tcp" not in landlock.restrict([("/", landlock.ALL)])
            socket.create_connection(address).close()
            socket.create_server(("127.0.0.1", 0)).close()

        def closed_network() -> None:
            assert "tcp" in landlock.restrict([("/", landlock.ALL)], no_tcp=True)
            refused(lambda: socket.create_connection(address))
            refused(lambda: socket.create_server(("127.0.0.1", 0)))

        in_child(open_network)
        in_child(closed_network)


def test_an_old_abi_does_not_claim_tcp(in_child: InChild) -> None:
    def work() -> None:
        assert landlock.restrict([("/", landlock.ALL)], abi=3, no_tcp=True) == {"files"}

    in_child(work)


@needs_abi(6)
def test_signals_and_abstract_sockets_stay_inside(in_child: InChild) -> None:
    outside = os.fork()
    if outside == 0:
        signal.pause()
        os._exit(0)
    name = f"\0cloche-test-{os.getpid()}"
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
            server.listen()

            def without_scope() -> None:
                landlock.restrict([("/", landlock.ALL)], scope=False)
                os.kill(outside, 0)
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(name)

            def with_scope() -> None:
                landlock.restrict([("/", landlock.ALL)])
                refused(lambda: os.kill(outside, signal.SIGKILL), errno.EPERM)
                with socket.socket(socket.AF_UNIX) as client:
                    refused(lambda: client.connect(name), errno.EPERM)
                inside = os.fork()
                if inside == 0:
                    signal.pause()
                    os._exit(0)
                os.kill(inside, signal.SIGKILL)
                assert os.waitstatus_to_exitcode(os.waitpid(inside, 0)[1]) == -signal.SIGKILL
                with socket.socket(socket.AF_UNIX) as own:
                    own.bind(f"{name}-own")
                    own.listen()
                    with socket.socket(socket.AF_UNIX) as client:
                        client.connect(f"{name}-own")

            in_child(without_scope)
            in_child(with_scope)
        assert os.waitpid(outside, os.WNOHANG) == (0, 0)
    finally:
        os.kill(outside, signal.SIGKILL)
        os.waitpid(outside, 0)
