"""Behaviours of files: exact content, whole replacements, errors that name themselves, and no way out."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

from cloche import errors, model
from cloche.testing.conformance.bench import Bench, Box
from cloche.testing.conformance.registry import behaviour, expect, refused, same

ALL_BYTES = bytes(range(256)) * 16

# ── content ────────────────────────────────────────────────────────────────────────────────────────


@behaviour("files")
async def a_written_file_is_read_back(bench: Bench) -> None:
    """Every byte comes back, and a command sees the same."""
    box = await bench.box()
    info = await box.write("data.bin", ALL_BYTES)
    same((info.size, info.type), (len(ALL_BYTES), "file"))
    same(await box.read("data.bin"), ALL_BYTES)
    same((await box.exec(["cat", "data.bin"])).stdout_bytes, ALL_BYTES)


@behaviour("files")
async def an_empty_file_is_a_file(bench: Bench) -> None:
    """Nothing can be written and read, too."""
    box = await bench.box()
    await box.write("empty", b"")
    same((await box.read("empty"), await box.names()), (b"", ["empty"]))


@behaviour("files")
async def a_file_of_16_mib_makes_the_round_trip(bench: Bench) -> None:
    """A large file arrives whole, read at once and as a stream."""
    box = await bench.box()
    data = os.urandom(1 << 20) * 16
    await box.write("large", data)
    expect(await box.read("large") == data, "the file changed on the way")
    pieces = [piece async for piece in bench.engine.read_file_stream(box.id, "large")]
    expect(b"".join(pieces) == data, "the stream changed on the way")


@behaviour("files")
async def what_a_command_wrote_is_read(bench: Bench) -> None:
    """Files of commands are files of the API."""
    box = await bench.box()
    await box.out("mkdir -p sub && printf 'by command' >sub/file")
    same(await box.read("sub/file"), b"by command")
    same(await box.read("/workspace/sub/file"), b"by command")


@behaviour("files")
async def missing_directories_are_made(bench: Bench) -> None:
    """Writing a file makes the directories above it."""
    box = await bench.box()
    await box.write("a/b/c/file", "deep")
    same(await box.out(["cat", "a/b/c/file"]), "deep")


@behaviour("files")
async def odd_names_are_names(bench: Bench) -> None:
    """Spaces, quotes, dashes and letters of any script are taken as they are."""
    box = await bench.box()
    odd = ["-dash", "a b", "quote'\"", "*", "$HOME", "ünï 玻璃 🔔", ".hidden"]
    for name in odd:
        await box.write(name, name)
    same(sorted(await box.names()), sorted(odd))
    same([(await box.read(name)).decode() for name in odd], odd)
    same(sorted((await box.out("printf '%s\\0' * .h*")).split("\0")[:-1]), sorted(odd))


# ── replacing ──────────────────────────────────────────────────────────────────────────────────────


@behaviour("files")
async def replacing_a_file_is_atomic(bench: Bench) -> None:
    """Who has the old file open reads the old content to its end, never half of the new."""
    box = await bench.box()
    await box.write("file", "old content\n")
    running = await box.start("exec 3<file; echo ready; read x; cat <&3; cat file", open_stdin=True)
    await running.until(b"ready\n")
    await box.write("file", "new\n")
    await running.write(b"\n")
    same((await running.wait()).stdout, "ready\nold content\nnew\n")


@behaviour("files")
async def writing_leaves_no_draft(bench: Bench) -> None:
    """After a write the directory holds the file and nothing else."""
    box = await bench.box()
    await box.write("file", "one")
    await box.write("file", "two")
    same(await box.out("ls -A"), "file\n")


@behaviour("files")
async def a_failed_write_leaves_the_old_file(bench: Bench) -> None:
    """What cannot be written whole is not written at all."""
    box = await bench.box()
    await box.write("keep/file", "old")
    await box.out("chmod 555 keep")
    with refused("permission_denied"):
        await box.write("keep/file", "new")
    same(await box.out("cat keep/file; ls -A keep"), "oldfile\n")


@behaviour("files")
async def a_mode_given_is_set(bench: Bench) -> None:
    """A file written with a mode has that mode."""
    box = await bench.box()
    await box.write("private", "x", mode=0o600)
    await box.write("usual", "x")
    same(await box.out("stat -c %a private usual"), "600\n644\n")


@behaviour("files")
async def replacing_keeps_the_mode(bench: Bench) -> None:
    """A script that is replaced stays executable."""
    box = await bench.box()
    await box.write("script", "#!/bin/sh\necho one\n", mode=0o755)
    await box.write("script", "#!/bin/sh\necho two\n")
    same(await box.out(["./script"]), "two\n")


@behaviour("files")
async def a_written_script_runs(bench: Bench) -> None:
    """Write a file, then run it."""
    box = await bench.box()
    await box.write("tool.py", "import sys\nprint('ran with', sys.argv[1])\n")
    same(await box.out(["python3", "tool.py", "this"]), "ran with this\n")


@behaviour("files")
async def files_belong_to_the_user(bench: Bench) -> None:
    """What the API writes is owned by the user that commands run as, who may change it."""
    box = await bench.box()
    await box.write("mine", "x")
    same((await bench.engine.stat_file(box.id, "mine")).owner, "user")
    same(await box.out('[ "$(stat -c %u mine)" = "$(id -u)" ] && echo more >>mine && cat mine'), "xmore\n")


# ── looking ────────────────────────────────────────────────────────────────────────────────────────


@behaviour("files")
async def a_listing_tells_type_size_mode_and_target(bench: Bench) -> None:
    """Every entry says what it is."""
    box = await bench.box()
    await box.out("mkdir -m 750 dir; printf 12345 >file; chmod 640 file; ln -s file link; mkfifo fifo")
    found = {e.name: (e.type, e.target) for e in await bench.engine.list_files(box.id, ".")}
    same(
        found,
        {
            "dir": ("directory", None),
            "file": ("file", None),
            "link": ("symlink", "file"),
            "fifo": ("other", None),
        },
    )
    file = await bench.engine.stat_file(box.id, "file")
    same((file.size, file.mode), (5, 0o640))
    same((await bench.engine.stat_file(box.id, "dir")).mode, 0o750)


@behaviour("files")
async def a_listing_can_go_deeper(bench: Bench) -> None:
    """Depth 2 lists the entries of directories, and no further."""
    box = await bench.box()
    await box.out("mkdir -p a/b/c; touch top a/one a/b/two a/b/c/three")
    same(sorted(await box.names(".", 2)), ["a", "a/b", "a/one", "top"])
    same(sorted(await box.names("/workspace/a")), ["/workspace/a/b", "/workspace/a/one"])


@behaviour("files")
async def a_directory_of_1500_entries_is_listed_whole(bench: Bench) -> None:
    """However many entries there are, each is listed once."""
    box = await bench.box()
    await box.out("mkdir many && cd many && seq -f 'f%04g' 1 1500 | xargs touch")
    same(await box.names("many"), [f"many/f{n:04d}" for n in range(1, 1501)])


@behaviour("files")
async def a_symlink_is_told_from_its_target(bench: Bench) -> None:
    """stat tells of the link itself; reading follows it, inside."""
    box = await bench.box()
    await box.out("echo content >target; ln -s target link")
    info = await bench.engine.stat_file(box.id, "link")
    same((info.type, info.target), ("symlink", "target"))
    same(await box.read("link"), b"content\n")


@behaviour("files")
async def writing_through_a_symlink_writes_its_target(bench: Bench) -> None:
    """A symlink that is written to stays a symlink."""
    box = await bench.box()
    await box.out("echo old >target; ln -s target link")
    await box.write("link", "new\n")
    same(await box.out("readlink link; cat target"), "target\nnew\n")


@behaviour("files")
async def what_is_not_there_says_so(bench: Bench) -> None:
    """Reading, looking at, moving and removing nothing is file_not_found."""
    box = await bench.box()
    with refused("file_not_found"):
        await box.read("nothing")
    with refused("file_not_found"):
        await bench.engine.stat_file(box.id, "nothing")
    with refused("file_not_found"):
        await bench.engine.list_files(box.id, "nothing")
    with refused("file_not_found"):
        await bench.engine.move_file(box.id, "nothing", "else")
    with refused("file_not_found"):
        await bench.engine.remove_file(box.id, "nothing")


@behaviour("files")
async def a_directory_is_not_a_file(bench: Bench) -> None:
    """Reading or replacing a directory, and entering a file, have errors of their own."""
    box = await bench.box()
    await box.out("mkdir dir; touch file")
    with refused("is_directory", "not_regular_file"):
        await box.read("dir")
    with refused("is_directory"):
        await box.write("dir", "x")
    with refused("not_directory"):
        await box.read("file/below")
    with refused("not_directory"):
        await bench.engine.list_files(box.id, "file")


@behaviour("files")
async def a_file_without_permission_is_refused(bench: Bench) -> None:
    """The API reads as the user: what the user may not read, it does not."""
    box = await bench.box()
    await box.out("echo x >closed; chmod 000 closed")
    with refused("permission_denied"):
        await box.read("closed")


# ── moving and removing ────────────────────────────────────────────────────────────────────────────


@behaviour("files")
async def a_file_can_be_moved(bench: Bench) -> None:
    """A moved file is at its new place, made if need be, and only there."""
    box = await bench.box()
    await box.write("from", "content")
    await bench.engine.move_file(box.id, "from", "new/place/to")
    same(await box.out("cat new/place/to; ls"), "contentnew\n")


@behaviour("files")
async def a_move_need_not_overwrite(bench: Bench) -> None:
    """With overwrite off an existing target is kept and told; with it on, it is replaced."""
    box = await bench.box()
    await box.write("one", "1")
    await box.write("two", "2")
    with refused("file_exists"):
        await bench.engine.move_file(box.id, "one", "two", overwrite=False)
    same(await box.out("cat one two"), "12")
    await bench.engine.move_file(box.id, "one", "two")
    same(await box.out("cat two; ls"), "1two\n")


@behaviour("files")
async def a_file_can_be_removed(bench: Bench) -> None:
    """A removed file is gone; a removed symlink leaves its target."""
    box = await bench.box()
    await box.out("echo x >target; ln -s target link; touch file")
    await bench.engine.remove_file(box.id, "file")
    await bench.engine.remove_file(box.id, "link")
    same(await box.out("ls -A"), "target\n")


@behaviour("files")
async def a_full_directory_is_removed_only_when_asked(bench: Bench) -> None:
    """Without recursive a directory that holds something stays; with it, all goes, and symlinks are not followed."""
    box = await bench.box()
    await box.out("mkdir -p dir/sub keep; touch dir/sub/file keep/me; ln -s ../keep dir/link")
    with refused("directory_not_empty"):
        await bench.engine.remove_file(box.id, "dir")
    same(await box.out("ls dir/sub"), "file\n")
    await bench.engine.remove_file(box.id, "dir", recursive=True)
    same(await box.out("ls -A; ls keep"), "keep\nme\n")


@behaviour("files")
async def making_a_directory_tells_whether_it_was_there(bench: Bench) -> None:
    """make_dir makes what is missing above, and says False the second time."""
    box = await bench.box()
    same(await bench.engine.make_dir(box.id, "x/y/z"), True)
    same(await bench.engine.make_dir(box.id, "x/y/z"), False)
    same(await box.out("touch x/y/z/in && ls x/y/z"), "in\n")


# ── trees ──────────────────────────────────────────────────────────────────────────────────────────


def _archive(*members: tuple[str, bytes | None, str]) -> bytes:
    """A tar of (name, content, link target) with None for a symlink's content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content, target in members:
            item = tarfile.TarInfo(name)
            if content is None:
                item.type, item.linkname = tarfile.SYMTYPE, target
            else:
                item.size, item.mode = len(content), 0o755
            archive.addfile(item, io.BytesIO(content or b""))
    return buffer.getvalue()


@behaviour("files")
async def a_tree_can_be_uploaded(bench: Bench) -> None:
    """Files, modes and symlinks of an archive appear below the target."""
    box = await bench.box()
    data = _archive(
        ("bin/run", b"#!/bin/sh\necho ran\n", ""), ("deep/er/file", b"x", ""), ("link", None, "deep/er/file")
    )
    same(await bench.engine.upload_tree(box.id, "tree", data), 2)
    same(await box.out("tree/bin/run; cat tree/link; readlink tree/link"), "ran\nxdeep/er/file\n")


@behaviour("files")
async def a_tree_can_be_downloaded(bench: Bench) -> None:
    """An archive of a directory holds its files, with content and mode, and its symlinks; a FIFO does not stop it."""
    box = await bench.box()
    await box.out(
        "mkdir -p t/sub; printf content >t/sub/file; chmod 750 t/sub/file; ln -s sub/file t/link; mkfifo t/fifo"
    )
    data = await bench.engine.download_tree(box.id, "t")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = {m.name: (m.mode, m.linkname) for m in archive.getmembers() if not m.isdir()}
        file = archive.extractfile("sub/file")
        same(file.read() if file else None, b"content")
    same(
        (found["sub/file"], found["link"][1], sorted(found)), ((0o750, ""), "sub/file", ["link", "sub/file"])
    )


# ── watching ───────────────────────────────────────────────────────────────────────────────────────


async def _watch_until(
    bench: Bench, box: Box, line: str, wanted: set[tuple[str, str]], recursive: bool = False
) -> None:
    """Do something again and again until its events have been seen. Nobody says when a watch began, so it is tried out
    first: what is made once only must be made after that."""
    left = set(wanted)
    async with aclosing(bench.engine.watch_files(box.id, ".", recursive)) as events:  # type: ignore[type-var]
        while (await _next_event(box, events, "echo x >begun")).path != "begun":
            pass
        while left:
            event = await _next_event(box, events, line)
            left.discard((event.type, event.path))


async def _next_event(box: Box, events: AsyncIterator[model.FileEvent], line: str) -> model.FileEvent:
    coming = asyncio.ensure_future(anext(events))
    try:
        while not coming.done():
            await box.exec(line)
            await asyncio.wait({coming}, timeout=0.02)
        return coming.result()
    finally:
        if not coming.done():
            coming.cancel()
            await asyncio.wait({coming})


@behaviour("files")
async def a_watch_tells_of_changes(bench: Bench) -> None:
    """Creating, writing, changing the mode of and removing a file are told with its name."""
    wanted = {("create", "file"), ("write", "file"), ("chmod", "file"), ("remove", "file")}
    await _watch_until(bench, await bench.box(), "echo x >file; chmod 600 file; rm file", wanted)


@behaviour("files")
async def a_recursive_watch_follows_new_directories(bench: Bench) -> None:
    """A directory made later is watched as well."""
    line = "mkdir -p new/deep; echo x >new/deep/file"
    await _watch_until(
        bench, await bench.box(), line, {("create", "new"), ("write", "new/deep/file")}, recursive=True
    )


@behaviour("files")
async def a_watch_ends_with_its_sandbox(bench: Bench) -> None:
    """Whoever watches is not left waiting when the sandbox goes."""
    box = await bench.box()
    events = bench.engine.watch_files(box.id, ".")
    await _next_event(box, events, "touch file")
    await bench.engine.delete(box.id)
    with suppress(errors.SandboxLost):
        async for _ in events:
            pass


# ── no way out, nothing but files ──────────────────────────────────────────────────────────────────


@behaviour("files")
async def a_fifo_is_not_opened(bench: Bench) -> None:
    """Reading or writing a FIFO is refused at once; it neither hangs nor wakes who waits there."""
    box = await bench.box()
    await box.out("mkfifo fifo")
    with refused("not_regular_file"):
        await box.read("fifo")
    with refused("not_regular_file"):
        await box.write("fifo", "x")


@behaviour("files")
async def a_device_is_not_opened(bench: Bench) -> None:
    """A device is refused, directly and behind a symlink."""
    box = await bench.box()
    await box.out("ln -s /dev/zero link")
    for path in ("/dev/zero", "link"):
        with refused("not_regular_file"):
            await box.read(path)


@behaviour("files")
async def a_socket_is_not_opened(bench: Bench) -> None:
    """A unix socket in the sandbox is no file."""
    box = await bench.box()
    await box.python("import socket; socket.socket(socket.AF_UNIX).bind('sock'); print('1')")
    with refused("not_regular_file"):
        await box.read("sock")


@behaviour("files")
async def a_loop_of_symlinks_says_so(bench: Bench) -> None:
    """Symlinks that lead in a circle are path_loop."""
    box = await bench.box()
    await box.out("ln -s two one; ln -s one two; ln -s . here")
    with refused("path_loop"):
        await box.read("one")
    with refused("path_loop", "file_not_found"):
        await box.read("here/" * 60 + "file")


@behaviour("files")
async def two_dots_are_refused(bench: Bench) -> None:
    """A path with .. is refused by the engine, and a machine that is given one all the same does not leave its root."""
    box = await bench.box()
    with refused("path_invalid"):
        await box.read("../etc/passwd")
    out = "/workspace/" + "../" * 20 + bench.canary.lstrip("/")
    await _not_reached(bench, box, out)


@behaviour("files")
async def a_path_of_the_host_is_not_there(bench: Bench) -> None:
    """An absolute path means the sandbox's, never the host's."""
    await _not_reached(bench, await bench.box(), bench.canary)


@behaviour("files")
async def a_symlink_does_not_lead_out(bench: Bench) -> None:
    """A symlink to a place of the host is followed inside the sandbox, where there is nothing."""
    box = await bench.box()
    await box.out(["ln", "-s", bench.canary, "link"])
    await _not_reached(bench, box, "/workspace/link")


@behaviour("files")
async def a_magic_link_does_not_lead_out(bench: Bench) -> None:
    """Links of /proc that jump to a process's root or descriptors are not followed."""
    box = await bench.box()
    running = await box.start("echo ready; read x", open_stdin=True)
    await running.until(b"ready")
    for link in (f"/proc/{running.pid}/root", "/proc/self/root", "/proc/1/root"):
        await _not_reached(bench, box, link + bench.canary)
    with refused("path_loop", "permission_denied", "file_not_found", "not_regular_file", "path_invalid"):
        await box.read(f"/proc/{running.pid}/fd/0")


async def _not_reached(bench: Bench, box: Box, path: str) -> None:
    """Neither reading nor writing `path` in a machine reaches the host's canary."""
    for flags in (os.O_RDONLY, os.O_RDWR):
        try:
            fd = await box.machine.open_file(path, flags)
        except errors.ClocheError:
            continue
        try:
            expect(os.fstat(fd).st_ino != os.stat(bench.canary).st_ino, f"{path} led to the host's file")
        finally:
            os.close(fd)


@behaviour("files")
async def an_archive_does_not_lead_out(bench: Bench) -> None:
    """An archive that goes through its own symlink puts nothing on the host; one that names .. is refused whole."""
    box = await bench.box()
    with suppress(errors.ClocheError):
        await bench.engine.upload_tree(
            box.id, "tree", _archive(("out", None, bench.host), ("out/planted", b"x", ""))
        )
    same(sorted(os.listdir(bench.host)), ["canary"], "files on the host")
    with refused("path_invalid"):
        await bench.engine.upload_tree(
            box.id, "tree", _archive(("fine", b"x", ""), ("../../planted", b"x", ""))
        )
    expect("tree/fine" not in await box.names("tree"), "half of a refused archive was unpacked")


@behaviour("files")
async def removing_does_not_follow_out(bench: Bench) -> None:
    """Removing a tree with a symlink to the host in it removes the symlink."""
    box = await bench.box()
    await box.out(["sh", "-c", 'mkdir -p tree/sub; ln -s "$1" tree/sub/out', "sh", bench.host])
    await bench.engine.remove_file(box.id, "tree", recursive=True)
    same((os.listdir(bench.host), await box.names()), (["canary"], []))


@behaviour("files")
async def nothing_written_inside_appears_outside(bench: Bench) -> None:
    """Files in the workspace, the home and /tmp of a sandbox have no name on the host that others find."""
    box = await bench.box()
    mark = f"mark-{box.id}"
    for place in ("/workspace", "/tmp", "/home/user"):
        await box.write(f"{place}/{mark}", "x")
    await box.out(["sh", "-c", 'touch "/tmp/$1" "/var/tmp/$1" "$HOME/$1" 2>/dev/null; true', "sh", mark])
    found = [
        p
        for p in ("/tmp", "/var/tmp", "/workspace", "/home/user", os.path.expanduser("~"))
        if os.path.exists(f"{p}/{mark}")
    ]
    for place in found:
        with suppress(OSError):
            os.unlink(f"{place}/{mark}")
    same(found, [], "places on the host")
