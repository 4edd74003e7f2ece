"""Files through E2B's SDK; what is there through our own API."""

import httpx
import pytest

from tests.server import conftest as server
from tests.wires.e2b.conftest import Client, Raised

pytestmark = pytest.mark.timeout(900)
ALL_BYTES = bytes(range(256)) * 3


def content(http: httpx.Client, sandbox: str, path: str) -> bytes:
    return http.get(f"/v1/sandboxes/{sandbox}/files", params={"path": path}).raise_for_status().content


def test_write_and_read(program: Client, box: str, http: httpx.Client) -> None:
    told = program(f"""
        w = box.files.write("deep/er/a.txt", "grüße")
        box.files.write_files([{{"path": "/tmp/one", "data": {ALL_BYTES!r}}}, {{"path": "two", "data": "zwei"}}])
        answer = [w.name, w.path, box.files.read("deep/er/a.txt"), list(box.files.read("/tmp/one", format="bytes"))]
    """)
    assert told == ["a.txt", "/home/user/deep/er/a.txt", "grüße", list(ALL_BYTES)]
    assert content(http, box, "/home/user/deep/er/a.txt").decode() == "grüße"
    assert content(http, box, "/tmp/one") == ALL_BYTES
    assert content(http, box, "/home/user/two") == b"zwei"
    assert program("answer = b''.join(box.files.read('two', format='stream')).decode()") == "zwei"
    assert program("answer = box.files.read('~/two')") == "zwei"


def test_what_is_not_there_and_what_is_a_directory(program: Client, box: str) -> None:
    with pytest.raises(Raised) as missing:
        program("box.files.read('nope')")
    assert missing.value.name == "FileNotFoundException"
    with pytest.raises(Raised) as directory:
        program("box.files.read('/tmp')")
    assert directory.value.name == "InvalidArgumentException"
    with pytest.raises(Raised):
        program("box.files.list('nope')")
    with pytest.raises(Raised) as missing:
        program("box.files.rename('nope', 'other')")
    assert missing.value.name == "FileNotFoundException"


def test_directories(program: Client, box: str, http: httpx.Client) -> None:
    assert program("answer = [box.files.make_dir('d/e'), box.files.make_dir('d/e')]") == [True, False]
    program("box.files.write('d/f', 'x'); box.files.write('d/e/g', 'yy')")
    listed = program(
        "answer = sorted((e.path, e.type.value, e.size) for e in box.files.list('d', depth=2) if e.type.value == 'file')"
    )
    assert listed == [["/home/user/d/e/g", "file", 2], ["/home/user/d/f", "file", 1]]
    assert program("answer = [e.name for e in box.files.list('d')]") in (["e", "f"], ["f", "e"])
    program("box.files.rename('d/f', 'moved/to/h')")
    assert content(http, box, "/home/user/moved/to/h") == b"x"
    assert program("answer = [box.files.exists('d/f'), box.files.exists('moved/to/h')]") == [False, True]
    program("box.files.remove('d'); box.files.remove('d')")
    gone = http.get(f"/v1/sandboxes/{box}/files/stat", params={"path": "/home/user/d"})
    assert gone.status_code == 404


def test_an_entry_tells_all(program: Client, box: str) -> None:
    program("box.commands.run('echo x > plain; chmod 640 plain; ln -s plain link')")
    told = program(
        "i = box.files.get_info('plain'); answer = [i.name, i.size, i.mode, i.permissions, i.owner, i.group]"
    )
    assert told == ["plain", 2, 0o640, "-rw-r-----", "user", "user"]
    assert program("answer = box.files.get_info('link').symlink_target") == "plain"


def test_a_watcher_sees_what_happens_after_it_was_made(program: Client, box: str) -> None:
    told = program("""
        box.files.make_dir("watched")
        w = box.files.watch_dir("watched", recursive=True)
        box.files.write("watched/new.txt", "x")
        box.commands.run("mkdir watched/sub; rm watched/new.txt")
        found, deadline = [], time.monotonic() + 40
        while ["new.txt", "remove"] not in found and time.monotonic() < deadline:
            found += [[e.name, e.type.value] for e in w.get_new_events()]
        w.stop()
        answer = found
    """)
    assert ["new.txt", "create"] in told
    assert ["new.txt", "write"] in told
    assert ["sub", "create"] in told
    assert told[-1] == ["new.txt", "remove"]
    assert all(not name.startswith(".") for name, _ in told)
    with pytest.raises(Raised):
        program("box.files.watch_dir('no-such-directory')")


def test_an_async_watcher(program: Client, box: str) -> None:
    told = program("""
        async def main():
            other = await e2b.AsyncSandbox.connect(box.sandbox_id)
            await other.files.make_dir("streamed")
            seen, came = [], asyncio.Event()
            def on_event(event):
                seen.append([event.name, event.type.value])
                came.set()
            w = await other.files.watch_dir("streamed", on_event)
            await other.files.write("streamed/a", "x")
            await asyncio.wait_for(came.wait(), 40)
            await w.stop()
            return seen[0]
        answer = asyncio.run(main())
    """)
    assert told == ["a", "create"]


def test_signed_addresses(program: Client, box: str, http: httpx.Client) -> None:
    upload, download = program(
        "answer = [box.upload_url('up.txt'), box.download_url('up.txt', use_signature_expiration=600)]"
    )
    with httpx.Client(trust_env=False, timeout=50) as anybody:
        assert (
            anybody.post(upload, files={"file": ("whatever", b"by form")}).json()[0]["path"]
            == "/home/user/up.txt"
        )
        assert content(http, box, "/home/user/up.txt") == b"by form"
        assert anybody.get(download).content == b"by form"


def test_by_host_name(program: Client, box: str, served: server.Served) -> None:
    token = program("box.files.write('a', 'x'); answer = box._envd_access_token")
    host = program("answer = box.get_host(49983)")
    assert host == f"49983-{box}.localhost:{served.url.rpartition(':')[2]}"
    with httpx.Client(base_url=served.url, trust_env=False, timeout=50, headers={"Host": host}) as client:
        assert client.get("/files?path=a").status_code == 401
        assert client.get("/files?path=a", headers={"X-Access-Token": token}).text == "x"
        assert client.get("/v1/sandboxes", headers={"X-Access-Token": token}).status_code == 404


def test_several_files_of_one_form(
    program: Client, box: str, served: server.Served, http: httpx.Client
) -> None:
    token = program("answer = box._envd_access_token")
    headers = {"E2b-Sandbox-Id": box, "E2b-Sandbox-Port": "49983", "X-Access-Token": token}
    forms = [("file", ("sub/a b.bin", ALL_BYTES)), ("file", ("/tmp/c", b"\r\n--x\r\n"))]
    with httpx.Client(base_url=served.url, trust_env=False, timeout=50, headers=headers) as client:
        assert [one["name"] for one in client.post("/files", files=forms).json()] == ["a b.bin", "c"]
        cut = {"content-type": "multipart/form-data; boundary=x"}
        assert client.post("/files", content=b"--x\r\nhalf", headers=cut).status_code == 400
    assert content(http, box, "/home/user/sub/a b.bin") == ALL_BYTES
    assert content(http, box, "/tmp/c") == b"\r\n--x\r\n"
