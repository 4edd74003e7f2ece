"""The TypeScript SDK: its types follow the routes, its suite passes against a real server, its package holds what it should, its programs run."""

import fcntl
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche
from cloche import errors
from tests.server import conftest as server
from tests.server import test_tls

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sdk/typescript"
PATIENCE_S = 400
pytestmark = [pytest.mark.timeout(2 * PATIENCE_S)]


@functools.cache
def node_directory() -> Path | None:
    """Where a recent node and its npm are: on the PATH, or where scripts/install put them."""
    for directory in (*os.environ["PATH"].split(os.pathsep), str(ROOT / ".cache/node/bin")):
        node, npm = Path(directory) / "node", Path(directory) / "npm"
        if not (node.exists() and npm.exists()):
            continue
        said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
        if re.match(r"v(2[0-9]|[3-9][0-9])\.", said):
            return Path(directory)
    return None


ABSENT: dict[str, str] = {}
"""Verbs of Python that TypeScript does not have, each with its reason."""
needs_node = pytest.mark.skipif(node_directory() is None, reason="needs Node.js 20: scripts/install gets it")


def run(*words: str | Path, env: dict[str, str] | None = None, cwd: Path = PACKAGE) -> str:
    directory = node_directory()
    assert directory is not None
    environment = {
        "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/"),
        "npm_config_cache": str(ROOT / ".cache/npm"),
        "npm_config_update_notifier": "false",
        **{name: os.environ[name] for name in ("npm_config_registry", "NODE_EXTRA_CA_CERTS") if name in os.environ},
    }  # fmt: skip
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment | (env or {}), capture_output=True, text=True, timeout=PATIENCE_S
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def package() -> Path:
    """The package with its locked dependencies, compiled, tests included. Done once per content of the lock file."""
    (ROOT / ".cache").mkdir(exist_ok=True)
    with open(ROOT / ".cache/typescript.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = (PACKAGE / "package-lock.json").read_bytes()
        done = PACKAGE / "node_modules/.installed"
        if not done.exists() or done.read_bytes() != wanted:
            run("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts")
            done.write_bytes(wanted)
        shutil.rmtree(PACKAGE / ".tests", ignore_errors=True)
        run("node", "node_modules/typescript/bin/tsc", "-p", "tsconfig.tests.json")
        run("node", "node_modules/typescript/bin/tsc", "-p", "tsconfig.json")
    return PACKAGE


@pytest.fixture(scope="module")
def served() -> Iterator[server.Served]:
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        made = server.serve(Path(home))
        try:
            yield made
        finally:
            assert server.stop(made) == 0


def reach(served: server.Served) -> dict[str, str]:
    return {
        "CLOCHE_URL": served.url,
        "CLOCHE_API_KEY": served.key,
        "CLOCHE_VECTORS": str(ROOT / "sdk/vectors"),
    }


def test_the_types_follow_the_routes():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/generate_typescript", "--check"], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_versions_agree():
    described = json.loads((PACKAGE / "package.json").read_text())
    locked = json.loads((PACKAGE / "package-lock.json").read_text())
    assert described["version"] == locked["version"] == cloche.__version__
    assert described.get("dependencies", {}) == {}
    assert all(re.fullmatch(r"[\d.]+", version) for version in described["devDependencies"].values())
    assert (PACKAGE / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def public() -> set[str]:
    """Every call that a user can make, as the sources have it."""
    found: set[str] = set()
    for path in (PACKAGE / "src").glob("*.ts"):
        text = re.sub(r"/\*\* @internal \*/\n.*\n", "", path.read_text())
        if path.stem == "index":
            continue
        for noun, body in re.findall(
            r"^export (?:class|const) (\w+)[^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL
        ):
            verbs = re.findall(r"^  (?:static )?(?:async )?\*?(\w+)(?:<.*?>)?\(", body, re.MULTILINE)
            found |= {f"{noun}.{verb}" for verb in verbs if verb not in ("constructor", "if", "for")}
        found |= set(re.findall(r"^export (?:async )?function\*? (\w+)\(", text, re.MULTILINE))
    exported = set(
        re.findall(
            r"\b(\w+)\b",
            re.sub(r"//.*|/\*.*?\*/", "", (PACKAGE / "src/index.ts").read_text(), flags=re.DOTALL),
        )
    )
    return {name for name in found if name.partition(".")[0] in exported}


def test_every_call_has_its_heading_and_no_heading_is_stale():
    page = (ROOT / "docs/reference/typescript.md").read_text()
    headings = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(headings) == len(set(headings))
    assert set(headings) == public()


def test_what_python_does_typescript_does_too():
    """Every verb of the Python SDK, but for what is listed with its reason."""
    from cloche.sdk import sync, sync_pools

    ours = {name.replace("_", "").lower() for name in public()}
    missing = set()
    for kind in (sync.Sandbox, sync.Process, sync.Processes, sync.Files, sync.Context, sync.Contexts, sync.SandboxPolicy, sync.Snapshot, sync.Volume,
                 sync.Image, sync_pools.Pool):  # fmt: skip
        for name, value in vars(kind).items():
            if not name.startswith("_") and not isinstance(value, property):
                call = f"{kind.__name__}.{name}"
                if call.replace("_", "").lower() not in ours:
                    missing.add(call)
    assert missing == set(ABSENT)


@needs_node
def test_the_suite_passes_against_a_real_server(package, served):
    files = sorted((package / ".tests/tests").glob("*.test.js"))
    assert len(files) == len(list((PACKAGE / "tests").glob("*.test.ts")))
    told = run("node", "--test", "--test-concurrency=1", "--test-reporter=tap", *files, env=reach(served))
    counted = {name: int(count) for name, count in re.findall(r"^# (\w+) (\d+)$", told, re.MULTILINE)}
    assert counted["fail"] == counted["cancelled"] == counted["skipped"] == counted["todo"] == 0
    assert counted["pass"] >= 150, told[-2000:]


@needs_node
def test_the_package_holds_what_it_should_and_nothing_else(package):
    (packed,) = json.loads(run("npm", "pack", "--dry-run", "--json", "--ignore-scripts"))
    names = {file["path"] for file in packed["files"]}
    modules = {path.stem for path in (PACKAGE / "src").glob("*.ts")}
    assert names == {
        "LICENSE", "README.md", "package.json", *(f"dist/{name}.{end}" for name in modules for end in ("js", "d.ts")),
    }  # fmt: skip
    assert packed["name"] == "@cloche/sdk"


PAGES = ("docs/guides/typescript.md", "docs/reference/typescript.md", "sdk/typescript/README.md", "README.md")
PROGRAM = re.compile(r"^```typescript\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def compiled(package: Path, place: Path, sources: dict[str, str], *, check: bool = True) -> dict[str, Path]:
    """Programs, type-checked and compiled as a user's would be."""
    place.mkdir(exist_ok=True)
    (place / "node_modules/@cloche").mkdir(parents=True)
    (place / "node_modules/@cloche/sdk").symlink_to(package)
    for name in ("@types", "undici-types"):
        (place / "node_modules" / name).symlink_to(package / "node_modules" / name)
    (place / "package.json").write_text('{"type": "module"}')
    options = {
        "target": "ES2022", "module": "NodeNext", "strict": True, "types": ["node"], "lib": ["ES2023", "ESNext.Disposable"], "outDir": "made",
        "preserveSymlinks": True, "rootDir": ".", "noCheck": not check,
    }  # fmt: skip
    (place / "tsconfig.json").write_text(json.dumps({"compilerOptions": options, "include": ["*.ts"]}))
    for name, source in sources.items():
        (place / f"{name}.ts").write_text(source)
    run("node", package / "node_modules/typescript/bin/tsc", "-p", place, cwd=place)
    return {name: place / f"made/{name}.js" for name in sources}


@pytest.fixture(scope="module")
def programs(package: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """The programs of the documentation, each by its page and number, with what it should print."""
    found = {
        f"{page.replace('/', '-').removesuffix('.md')}-{number}": (source, prints)
        for page in PAGES
        for number, (source, prints) in enumerate(PROGRAM.findall((ROOT / page).read_text()))
    }
    assert {name.rpartition("-")[0] for name in found} == {
        page.replace("/", "-").removesuffix(".md") for page in PAGES
    }
    made = compiled(
        package, tmp_path_factory.mktemp("programs"), {name: source for name, (source, _) in found.items()}
    )
    return {name: (made[name], prints) for name, (_, prints) in found.items()}


@needs_node
def test_the_programs_of_the_documentation_run_and_print_what_it_says(programs, served):
    for name, (program, prints) in programs.items():
        told = run("node", program, env=reach(served), cwd=program.parent)
        assert told == prints or not prints, f"{name} printed:\n{told}"


OVER_TLS = """
import { Sandbox } from '@cloche/sdk'
try {
  await using box = await Sandbox.create({ retries: 0 })
  const port = await box.start(['python3', '-m', 'http.server', '8000', '--bind', '127.0.0.1'])
  while ((await box.ports()).length === 0) await new Promise((resolve) => setTimeout(resolve, 20))
  const tunnel = await box.connect(8000)
  tunnel.end('GET / HTTP/1.0\\r\\n\\r\\n')
  let heard = ''
  for await (const piece of tunnel) heard += String(piece)
  for await (const event of box.execStream('echo streamed')) if (event.type === 'output') console.log(String(Buffer.from(event.data)).trim())
  console.log(heard.split('\\r\\n')[0], port.pid > 1)
} catch (problem) {
  console.log(problem.code, problem.message)
}
"""


@needs_node
def test_https_is_spoken_with_who_is_trusted_only(package, tmp_path):
    authority = test_tls.Authority()
    pair = authority.pair()
    cert, key, ca = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
    cert.write_bytes(pair.cert)
    key.write_bytes(pair.key)
    ca.write_bytes(authority.pem)
    program = compiled(package, tmp_path / "programs", {"tls": OVER_TLS}, check=False)["tls"]
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        secure = server.serve(Path(home), "--tls-cert", str(cert), "--tls-key", str(key))
        try:
            assert secure.url.startswith("https://")
            told = run("node", program, env=reach(secure), cwd=program.parent)
            assert told.startswith("server_unavailable"), told
            assert "SELF_SIGNED" in told or "UNABLE_TO_VERIFY" in told, told
            told = run(
                "node", program, env=reach(secure) | {"NODE_EXTRA_CA_CERTS": str(ca)}, cwd=program.parent
            )
            assert told.split("\n") == ["streamed", "HTTP/1.0 200 OK true", ""]
        finally:
            assert server.stop(secure) == 0


@needs_node
def test_a_program_imports_the_package_by_its_name(package, tmp_path):
    (tmp_path / "node_modules/@cloche").mkdir(parents=True)
    (tmp_path / "node_modules/@cloche/sdk").symlink_to(package)
    (tmp_path / "program.mjs").write_text(
        "import * as sdk from '@cloche/sdk'; console.log(Object.keys(sdk).join(' '))"
    )
    names = set(run("node", tmp_path / "program.mjs", cwd=tmp_path).split())
    assert {"Sandbox", "Pool", "Template", "Snapshot", "Volume", "run", "runStream", "ClocheError"} <= names
    assert {kind.__name__ for kind in errors._CODES} < names
