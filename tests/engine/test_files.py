"""Files of a sandbox: what is refused, and what a reader sees while others write."""

import io
import stat
import tarfile
import threading

import pytest

import cloche

MIB = 1 << 20


def refused(action, code):
    with pytest.raises(cloche.ClocheError) as caught:
        action()
    assert caught.value.code == code, caught.value
    return caught.value


def make_tar(*members):
    """A tar of (name, content) or of ready-made `TarInfo`s."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            name, data = member
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o640
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────

BAD_PATHS = [
    pytest.param("", id="empty"),
    pytest.param("a\0b", id="NUL"),
    pytest.param("a\nb", id="newline"),
    pytest.param("..", id="the parent"),
    pytest.param("a/../b", id="a way back"),
    pytest.param("/workspace/../etc/passwd", id="a way out"),
    pytest.param("x" * 5000, id="too long"),
]


@pytest.fixture(scope="module")
def shared_box():
    with cloche.Sandbox() as box:
        yield box


@pytest.mark.parametrize("path", BAD_PATHS)
@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda files, path: files.read(path), id="read"),
        pytest.param(lambda files, path: list(files.read(path, format="stream")), id="stream"),
        pytest.param(lambda files, path: files.write(path, "x"), id="write"),
        pytest.param(lambda files, path: files.list(path), id="list"),
        pytest.param(lambda files, path: files.stat(path), id="stat"),
        pytest.param(lambda files, path: files.exists(path), id="exists"),
        pytest.param(lambda files, path: files.move(path, "b"), id="move"),
        pytest.param(lambda files, path: files.move("/etc/passwd", path), id="move to"),
        pytest.param(lambda files, path: files.remove(path), id="remove"),
        pytest.param(lambda files, path: files.make_dir(path), id="make_dir"),
        pytest.param(lambda files, path: next(files.watch(path)), id="watch"),
        pytest.param(lambda files, path: files.upload(path, make_tar()), id="upload"),
        pytest.param(lambda files, path: files.download(path), id="download"),
    ],
)
def test_a_path_that_is_none_is_refused_by_every_act(shared_box, act, path):
    refused(lambda: act(shared_box.files, path), "path_invalid")


def test_what_is_not_there_is_not_found(sandbox):
    for act in (
        lambda: sandbox.files.read("nothing"),
        lambda: list(sandbox.files.read("nothing", format="stream")),
        lambda: sandbox.files.stat("nothing"),
        lambda: sandbox.files.list("nothing"),
        lambda: sandbox.files.remove("nothing"),
        lambda: sandbox.files.move("nothing", "b"),
        lambda: sandbox.files.download("nothing"),
        lambda: next(sandbox.files.watch("nothing")),
    ):
        assert isinstance(refused(act, "file_not_found"), cloche.NotFound)
    assert not sandbox.files.exists("nothing")


@pytest.mark.parametrize("path", ["pipe", "/dev/null", "/dev/zero", "/dev/tty", "socket"])
def test_a_fifo_socket_or_device_is_refused_and_does_not_block(sandbox, path):
    sandbox.exec(
        "mkfifo pipe; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'", check=True
    )
    refused(lambda: sandbox.files.read(path), "not_regular_file")
    refused(lambda: sandbox.files.write(path, "x"), "not_regular_file")
    assert sandbox.files.stat(path).type == "other"


def test_a_link_to_a_fifo_is_refused_too(sandbox):
    sandbox.exec("mkfifo pipe; ln -s pipe link; ln -s /dev/zero zero", check=True)
    for path in ("link", "zero"):
        refused(lambda path=path: sandbox.files.read(path), "not_regular_file")
        refused(lambda path=path: sandbox.files.write(path, "x"), "not_regular_file")


def test_a_loop_of_links_is_refused(sandbox):
    sandbox.exec("ln -s b a; ln -s a b", check=True)
    refused(lambda: sandbox.files.read("a"), "path_loop")
    refused(lambda: sandbox.files.write("a", "x"), "path_loop")
    refused(lambda: sandbox.files.list("a"), "path_loop")
    assert sandbox.files.stat("a").target == "b"


@pytest.mark.parametrize(
    "path", ["/proc/self/root/etc/passwd", "/proc/1/root/etc/passwd", "/proc/1/cwd/x", "/proc/self/fd/3"]
)
def test_no_magic_link_leads_anywhere(sandbox, path):
    with pytest.raises(cloche.ClocheError) as caught:
        sandbox.files.read(path)
    assert caught.value.code in ("path_loop", "permission_denied", "file_not_found")


def test_a_directory_is_no_file_and_a_file_no_directory(sandbox):
    sandbox.files.make_dir("directory/below")
    sandbox.files.write("file", "x")
    refused(lambda: sandbox.files.read("directory"), "is_directory")
    refused(lambda: sandbox.files.write("directory", "x"), "is_directory")
    refused(lambda: sandbox.files.list("file"), "not_directory")
    refused(lambda: sandbox.files.write("file/below", "x"), "not_directory")
    refused(lambda: next(sandbox.files.watch("file")), "not_directory")
    refused(lambda: sandbox.files.make_dir("file"), "file_exists")
    refused(lambda: sandbox.files.remove("directory"), "directory_not_empty")


@pytest.mark.parametrize("path", ["/usr/bin/new", "/etc/shadow", "/root/new"])
def test_the_user_may_not_touch_what_is_not_theirs(sandbox, path):
    if not path.startswith("/usr") and not sandbox.info().isolation.uid_range:
        pytest.skip("with a single uid, the sandbox's own /etc and /root are the user's")
    refused(lambda: sandbox.files.write(path, "x"), "permission_denied")
    assert not sandbox.exec(["test", "-s", path]).ok


def test_the_hosts_files_are_not_there(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the host's")
    refused(lambda: sandbox.files.read(str(secret)), "file_not_found")


def test_bytes_that_are_no_text(sandbox):
    sandbox.files.write("data", b"\xff\x00")
    assert "bytes" in refused(lambda: sandbox.files.read("data"), "not_text").hint
    assert sandbox.files.read("data", format="bytes") == b"\xff\x00"


def test_an_unknown_format(sandbox):
    refused(lambda: sandbox.files.read("data", format="base64"), "argument_invalid")


def test_a_target_that_exists_is_kept_if_asked(sandbox):
    sandbox.files.write("a", "a")
    sandbox.files.write("b", "b")
    refused(lambda: sandbox.files.move("a", "b", overwrite=False), "file_exists")
    assert (sandbox.files.read("a"), sandbox.files.read("b")) == ("a", "b")


@pytest.mark.parametrize(
    ("member", "code"),
    [
        pytest.param(("/etc/x", b""), "path_invalid", id="absolute"),
        pytest.param(("../x", b""), "path_invalid", id="upwards"),
        pytest.param(("a/../../x", b""), "path_invalid", id="upwards inside"),
        pytest.param(special("pipe", tarfile.FIFOTYPE), "not_regular_file", id="FIFO"),
        pytest.param(special("device", tarfile.CHRTYPE), "not_regular_file", id="device"),
        pytest.param(special("hard", tarfile.LNKTYPE, "good"), "not_regular_file", id="hard link"),
    ],
)
def test_an_archive_with_a_bad_member_is_refused_whole(sandbox, member, code):
    refused(lambda: sandbox.files.upload("tree", make_tar(("good", b"x"), member)), code)
    assert sandbox.files.list(".") == []


def test_what_is_no_archive_is_refused(sandbox):
    refused(lambda: sandbox.files.upload("tree", b"this is no tar"), "argument_invalid")
    assert sandbox.files.list(".") == []


def test_a_full_disk_says_so_and_keeps_the_old_file(make_sandbox):
    box = make_sandbox(disk_mib=16, memory_mib=256)
    box.files.write("data", "precious")
    problem = refused(lambda: box.files.write("data", b"x" * 64 * MIB), "sandbox_disk_full")
    assert "disk_mib" in problem.hint
    assert box.files.read("data") == "precious"
    assert [f.name for f in box.files.list(".")] == ["data"]
    box.files.write("data", "there is room again")


# ── reading and writing ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "data", [b"", b"x", b"\x00\xff" * 1000, "é\n".encode() * 3, b"y" * (3 * MIB + 1)], ids=len
)
def test_what_is_written_is_read(sandbox, data):
    info = sandbox.files.write("data", data)
    assert (info.size, info.type, info.name) == (len(data), "file", "data")
    assert sandbox.files.read("data", format="bytes") == data
    assert b"".join(sandbox.files.read("data", format="stream")) == data
    assert sandbox.exec("cat data", output_limit=16 * MIB).stdout_bytes == data


def test_the_command_and_the_caller_see_the_same_files(sandbox):
    sandbox.exec("echo inside > made", check=True)
    assert sandbox.files.read("made") == "inside\n"
    assert sandbox.files.read("/workspace/made") == "inside\n"
    sandbox.files.write("/tmp/outside", "x")
    assert sandbox.exec("cat /tmp/outside; stat -c %U /tmp/outside").stdout == "xuser\n"


def test_missing_directories_are_made(sandbox):
    sandbox.files.write("a/b/c.txt", "x")
    assert [f.path for f in sandbox.files.list(".", depth=3)] == ["a", "a/b", "a/b/c.txt"]


def test_modes(sandbox):
    assert sandbox.files.write("plain", "x").mode == 0o644
    assert sandbox.files.write("script", "x", mode=0o755).mode == 0o755
    sandbox.files.write("script", "y")
    assert sandbox.files.stat("script").mode == 0o755  # replacing keeps it
    sandbox.files.write("script", "z", mode=0o600)
    assert sandbox.exec("stat -c %a script").stdout == "600\n"


def test_proc_files_read_although_they_say_to_be_empty(sandbox):
    assert "Name:" in sandbox.files.read("/proc/self/status") or sandbox.files.read("/proc/version")


def test_a_reader_sees_the_old_or_the_new_file_never_half(sandbox):
    old, new = b"o" * MIB, b"n" * MIB
    sandbox.files.write("data", old)
    stop = threading.Event()

    def rewrite():
        while not stop.is_set():
            sandbox.files.write("data", new)
            sandbox.files.write("data", old)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        seen = {sandbox.files.read("data", format="bytes") for _ in range(60)}
    finally:
        stop.set()
        writer.join()
    assert seen <= {old, new}
    assert [f.name for f in sandbox.files.list(".")] == ["data"]


def test_a_link_is_written_through_and_stays(sandbox):
    sandbox.exec("echo old > real; ln -s real link; ln -s made-by-link dangling", check=True)
    sandbox.files.write("link", "new")
    sandbox.files.write("dangling", "fresh")
    assert (sandbox.files.read("real"), sandbox.files.read("made-by-link")) == ("new", "fresh")
    assert sandbox.files.stat("link").type == "symlink"
    assert sandbox.files.read("link") == "new"


def test_an_absolute_link_means_the_sandboxs_root(sandbox):
    sandbox.exec("ln -s /etc/hostname name; ln -s /workspace dir", check=True)
    assert sandbox.files.read("name") == sandbox.exec("cat /etc/hostname").stdout
    sandbox.files.write("dir/x", "1")
    assert sandbox.files.read("x") == "1"


def test_big_files_go_in_pieces(sandbox):
    sandbox.exec("truncate -s 300M big", check=True)
    assert "stream" in refused(lambda: sandbox.files.read("big", format="bytes"), "file_too_large").hint
    total = 0
    for piece in sandbox.files.read("big", format="stream"):
        total += len(piece)
    assert total == 300 * MIB


def test_a_stream_left_early_is_closed(sandbox):
    sandbox.files.write("data", b"x" * 3 * MIB)
    for _ in range(50):
        next(sandbox.files.read("data", format="stream"))


# ── directories ────────────────────────────────────────────────────────────────────────────────────


def test_entries_say_what_they_are(sandbox):
    sandbox.exec("echo hello > file; chmod 640 file; mkdir dir; ln -s file link; mkfifo pipe", check=True)
    found = {f.name: f for f in sandbox.files.list()}
    assert {name: f.type for name, f in found.items()} == {
        "dir": "directory", "file": "file", "link": "symlink", "pipe": "other",
    }  # fmt: skip
    assert list(found) == sorted(found)
    assert (found["file"].size, found["file"].mode, found["file"].owner) == (6, 0o640, "user")
    assert found["link"].target == "file"
    assert found["file"] == sandbox.files.stat("file")


def test_names_that_are_no_utf_8_do_not_break_a_list(sandbox):
    sandbox.exec(r"touch $'bad\377name' good", check=True)
    assert "good" in [f.name for f in sandbox.files.list()]
    assert len(sandbox.files.list()) == 2


def test_a_directory_of_many_entries_is_listed_whole(sandbox):
    sandbox.exec("mkdir many; cd many; seq 3000 | xargs touch", check=True)
    assert {f.name for f in sandbox.files.list("many")} == {str(i) for i in range(1, 3001)}


def test_depth(sandbox):
    sandbox.files.write("a/b/c", "x")
    assert [f.path for f in sandbox.files.list()] == ["a"]
    assert [f.path for f in sandbox.files.list(depth=2)] == ["a", "a/b"]
    assert [f.path for f in sandbox.files.list("/workspace/a")] == ["/workspace/a/b"]
    for depth in (0, -1):
        refused(lambda depth=depth: sandbox.files.list(depth=depth), "limit_invalid")


def test_making_moving_and_removing(sandbox):
    assert sandbox.files.make_dir("a/b") is True
    assert sandbox.files.make_dir("a/b") is False
    sandbox.files.write("a/b/file", "x")
    sandbox.files.move("a/b/file", "new/place")
    assert sandbox.files.read("new/place") == "x"
    sandbox.files.write("other", "y")
    sandbox.files.move("other", "new/place")
    assert sandbox.files.read("new/place") == "y"
    sandbox.files.remove("a/b")
    sandbox.files.remove("new", recursive=True)
    assert [f.path for f in sandbox.files.list(depth=3)] == ["a"]


def test_removing_a_link_leaves_what_it_leads_to(sandbox):
    sandbox.exec("mkdir dir; touch dir/kept; mkdir tree; ln -s ../dir tree/link; ln -s dir link", check=True)
    sandbox.files.remove("link")
    sandbox.files.remove("tree", recursive=True)
    assert [f.path for f in sandbox.files.list(depth=2)] == ["dir", "dir/kept"]


def test_a_deep_tree_is_removed(sandbox):
    sandbox.exec("for i in $(seq 400); do mkdir d; cd d; done", check=True)
    sandbox.files.remove("d", recursive=True)
    assert sandbox.files.list() == []


def test_a_tree_goes_out_and_in(sandbox, make_sandbox):
    sandbox.exec(
        "mkdir -p tree/empty tree/sub; echo one > tree/one; echo two > tree/sub/two; chmod 750 tree/sub/two; "
        "ln -s sub/two tree/link; mkfifo tree/pipe", check=True,
    )  # fmt: skip
    archive = sandbox.files.download("tree")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert sorted(tar.getnames()) == ["empty", "link", "one", "sub", "sub/two"]
    other = make_sandbox()
    assert other.files.upload("copy", archive) == 2
    seen = other.exec("cd copy; cat one sub/two link; stat -c %a sub/two; readlink link; ls -d empty")
    assert seen.stdout == "one\ntwo\ntwo\n750\nsub/two\nempty\n"


def test_one_file_as_a_tar(sandbox):
    sandbox.files.write("dir/file", "x")
    with tarfile.open(fileobj=io.BytesIO(sandbox.files.download("dir/file"))) as tar:
        assert tar.getnames() == ["file"]


def test_an_uploaded_link_does_not_lead_a_later_member_out_of_the_sandbox(sandbox, tmp_path):
    archive = make_tar(special("out", tarfile.SYMTYPE, str(tmp_path)), ("out/file", b"x"))
    with pytest.raises(cloche.ClocheError):
        sandbox.files.upload("tree", archive)
    assert list(tmp_path.iterdir()) == []


def test_setuid_bits_do_not_survive_an_upload(sandbox):
    info = tarfile.TarInfo("tool")
    info.mode = 0o4755
    sandbox.files.upload("tree", make_tar(info))
    assert not sandbox.files.stat("tree/tool").mode & (stat.S_ISUID | stat.S_ISGID)


# ── watching ───────────────────────────────────────────────────────────────────────────────────────


class Watcher:
    """A watch in a thread: it has begun when it sees the first of the marks that are made until then."""

    def __init__(self, box, until, **options):
        self.seen: list[tuple[str, str]] = []
        self._events = box.files.watch(**options)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        marks = iter(range(1_000_000))
        until(lambda: box.files.write(f"mark-{next(marks)}", "") and self.seen)

    def _follow(self):
        try:
            for event in self._events:
                self.seen.append((event.type, event.path))
        except cloche.ClocheError:
            pass

    def join(self):
        self._thread.join(10)
        return not self._thread.is_alive()


def test_changes_are_seen_as_they_happen(sandbox, until):
    watcher = Watcher(sandbox, until)
    sandbox.exec(
        "echo x > new; chmod 600 new; mv new newer; rm newer; mkdir dir; echo y > dir/unseen", check=True
    )
    until(lambda: ("create", "dir") in watcher.seen)
    for expected in [
        ("create", "new"),
        ("write", "new"),
        ("chmod", "new"),
        ("create", "newer"),
        ("remove", "newer"),
    ]:
        assert expected in watcher.seen
    assert all("unseen" not in path for _, path in watcher.seen)
    sandbox.delete()
    assert watcher.join()


def test_a_recursive_watch_follows_new_directories(sandbox, until):
    sandbox.files.make_dir("old")
    watcher = Watcher(sandbox, until, recursive=True)
    sandbox.files.write("old/file", "x")
    until(lambda: any(path == "old/file" for _, path in watcher.seen))
    sandbox.files.make_dir("new")
    until(lambda: ("create", "new") in watcher.seen)
    sandbox.files.write("new/file", "x")
    until(lambda: any(path == "new/file" for _, path in watcher.seen))


def test_an_atomic_write_is_seen(sandbox, until):
    watcher = Watcher(sandbox, until)
    sandbox.files.write("data", "x")
    until(lambda: ("create", "data") in watcher.seen)
