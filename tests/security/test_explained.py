"""What `cloche policy explain` says is what happens: the same questions, asked of the explanation and of a live sandbox.

The tree, the entries and the paths are random, from fixed seeds. A program inside tries every path and reports; the explanation
was written down before the sandbox was made.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cloche import Policy, policy, workspaces
from cloche.linux import seccomp, syscalls
from cloche.policy import explaining, names, rules
from tests.egress import room
from tests.security import glass

NAMES = ("a", "b", "c.key", "d.pem", ".env", "e.txt", "secrets", "conf")
KNOWN = (".git/hooks/pre-commit", ".git/description", ".git/config", ".codex/x", ".bashrc", "cloche.toml", ".claude/notes",
         ".claude/settings.json", "Makefile", ".vscode/tasks.json")  # fmt: skip
PARTS = (*NAMES, "*", "**", "?", "*.key", "[a-c]*", "[!a]*", "*.p?m")

TRIES = """
import errno
def code(problem): return errno.errorcode.get(problem.errno, str(problem.errno))
def read(path):
    try:
        if os.path.isdir(path):
            os.listdir(path)
            return "read "
        with open(path) as file: return "read " + file.read()
    except OSError as problem: return code(problem)
def write(path):
    made = []
    try:
        if os.path.isdir(path): path += "/fresh-name"
        if os.path.lexists(path) and not os.path.isdir(path):
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
            return "written"
        above = os.path.dirname(path)
        missing = []
        while not os.path.lexists(above):
            missing.append(above)
            above = os.path.dirname(above)
        for directory in reversed(missing):
            os.mkdir(directory)
            made.append(directory)
        with open(path, "x"): made.append(path)
        return "written"
    except OSError as problem: return code(problem)
    finally:
        for one in reversed(made): (os.rmdir if os.path.isdir(one) else os.unlink)(one)
print(json.dumps([[read(path), write(path)] for path in json.loads(sys.argv[1])]))
"""


def plant(root: Path, dice: random.Random) -> list[str]:
    """Some files, directories and links within; what they are called."""
    made = []
    for number in range(30):
        place = root.joinpath(*dice.choices(NAMES, k=dice.randint(1, 4)))
        if any(above.is_file() for above in (place, *place.parents)) or place.exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        made.append(str(place.relative_to(root)))
        if dice.random() < 0.15 and len(made) > 3:
            place.symlink_to(root / dice.choice(made[:-1]))
        else:
            place.write_text(f"token {number}")
    return made


def entries(dice: random.Random, count: int) -> list[str]:
    made = ["/".join(dice.choices(PARTS, k=dice.randint(1, 3))) for _ in range(count)]
    return [entry + dice.choice(("", "/")) for entry in made]


def aims(root: Path, dice: random.Random, planted: list[str], count: int) -> list[str]:
    """Paths to try: planted ones, known ones, and others whose parents could hold them."""
    found: dict[str, None] = {}
    while len(found) < count:
        path = dice.choice(
            (dice.choice(planted), dice.choice(KNOWN), "/".join(dice.choices(NAMES, k=dice.randint(1, 4))))
        )
        place = root / path
        links = place.is_symlink() and not place.exists()
        if not links and all(above.is_dir() or not above.exists() for above in place.parents):
            found[path] = None
        elif dice.random() < 0.05:
            found[f"fresh-{len(found)}/x"] = None
    return list(found)


def told(root: Path, said: Policy, tmp: Path, path: str, *, write: bool) -> explaining.Explanation:
    stack = policy.stack(profile="moderate", arguments=said)

    def ask(merged: policy.Merged) -> explaining.Explanation:
        made = workspaces.survey(
            str(root), rules=merged, home=str(tmp / "home"), state=str(tmp / "state/x"), environment={}
        )
        return workspaces.explain(made, path, write=write)

    return explaining.explain(stack, ask)


@pytest.mark.parametrize("seed", range(5))
def test_paths(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    root = tmp_path / "work"
    root.mkdir()
    planted = plant(root, dice)
    said = Policy(files={"deny": entries(dice, 3), "protected": entries(dice, 3)})
    asked = aims(root, dice, planted, 100)
    merged = policy.resolve(policy.stack(profile="moderate", arguments=said))
    made = workspaces.survey(
        str(root), rules=merged, home=str(tmp_path / "home"), state=str(tmp_path / "state/x"), environment={}
    )
    answers = [
        (workspaces.explain(made, path, write=False), workspaces.explain(made, path, write=True))
        for path in asked
    ]
    contents = {path: (root / path).read_text() for path in asked if (root / path).is_file()}
    with glass.box(workspace=str(root), policy=said) as box:
        tried: list[Any] = box.report(TRIES, json.dumps([str(root / path) for path in asked]))
    wrong = []
    for path, (reading, writing), (read, wrote) in zip(asked, answers, tried, strict=True):
        if path in contents:
            happened = "allow" if read == f"read {contents[path]}" else "deny"
            if happened != reading.verdict:
                wrong.append(("read", path, reading, read))
            # By the spelling alone, which no search of the workspace can miss.
            spelled = str((root / path).resolve().relative_to(root.resolve()))
            if explaining.path(merged, spelled, write=False).verdict == "deny" and happened != "deny":
                wrong.append(("search", path, reading, read))
        elif reading.verdict == "deny" and read.startswith("read"):
            wrong.append(("read", path, reading, read))
        if (wrote == "written") != (writing.verdict == "allow"):
            wrong.append(("write", path, writing, wrote))
    assert wrong == [], said
    assert {answer.verdict for pair in answers for answer in pair} == {"allow", "deny"}


def test_an_explanation_names_the_entry(tmp_path: Path) -> None:
    (tmp_path / "w/a").mkdir(parents=True)
    (tmp_path / "w/a/.env").write_text("x")
    said = Policy(files={"deny": ["**/.env"]})
    found = told(tmp_path / "w", said, tmp_path, "a/.env", write=False)
    assert (found.verdict, found.rule, found.field, found.source) == (
        "deny",
        "**/.env",
        "files.deny",
        "arguments",
    )
    found = told(tmp_path / "w", said, tmp_path, ".git/hooks/x", write=True)
    assert (found.verdict, found.rule, found.source) == ("deny", ".git/hooks/", "profile moderate")


CALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for name, number in json.loads(sys.argv[1]).items():
    ctypes.set_errno(0)
    libc.syscall(number, -1, -1, -1, -1, -1, -1)
    found[name] = errno.errorcode.get(ctypes.get_errno(), "")
print(json.dumps(found))
"""


@pytest.mark.parametrize("profile", policy.PROFILES)
def test_system_calls(profile: str) -> None:
    """With arguments that no kernel accepts: what the filter refuses says EPERM, what it lets through fails differently."""
    denied = ["memfd_create", "inotify_init1", "timerfd_create", "ptrace"]
    asked = [*denied, "bpf", "keyctl", "process_vm_readv", "eventfd2", "signalfd4", "getcpu", "sched_getattr"]
    said = Policy(syscalls={"deny": denied})
    merged = policy.resolve(policy.stack(profile=profile, arguments=said))
    told = {name: explaining.system_call(merged, name, seccomp.explain).verdict for name in asked}
    with glass.box(profile=profile, policy=said) as box:
        happened = box.report(CALLS, json.dumps({name: syscalls.number(name) for name in asked}))
    assert {name: "deny" if code == "EPERM" else "allow" for name, code in happened.items()} == told


@pytest.mark.parametrize("name", ["execve", "read", "teleport", "exit_group"])
def test_a_call_that_cannot_be_denied_makes_nothing(name: str) -> None:
    with pytest.raises(Exception, match=name) as refusal:
        glass.Box(policy=Policy(syscalls={"deny": [name]}))
    assert getattr(refusal.value, "code", "") == "policy_invalid"


# ── hosts ──────────────────────────────────────────────────────────────────────────────────────────

TARGETS = ("a.test", "b.a.test", "*.a.test", "**.a.test", "*.b.a.test", "c.test", "**.test", "10.1.2.3", "10.0.0.0/8", "203.0.113.0/24",
           "8.8.8.8", "8.0.0.0/8")  # fmt: skip
HOSTS = ("a.test", "b.a.test", "x.b.a.test", "c.test", "d.test", "A.TEST", "a.test.", "10.1.2.3", "10.9.9.9", "8.8.8.8", "8.1.1.1",
         "203.0.113.7", "169.254.169.254", "metadata.google.internal", "localhost", "0x0a.0x010203", "9.9.9.9")  # fmt: skip
PORTS = (80, 8080)
CONDITIONS = ("", "", "", " methods=GET", " methods=POST", " path=/a", " methods=GET path=/a/b")

REQUESTS = """
import http.client
def ask(host, port, method, path):
    link = http.client.HTTPConnection("127.0.0.1", 3128, timeout=30)
    try:
        link.putrequest(method, f"http://{host}:{port}{path}", skip_host=True)
        link.putheader("Host", f"{host}:{port}")
        link.putheader("Content-Length", "0")
        link.endheaders()
        answer = link.getresponse()
        answer.read()
        return [answer.status, answer.headers.get("X-Proxy-Error", "")]
    except (OSError, http.client.HTTPException) as problem: return [0, repr(problem)]
    finally: link.close()
print(json.dumps([ask(*one) for one in json.loads(sys.argv[1])]))
"""


def lines(dice: random.Random, most: int) -> list[str]:
    return [
        dice.choice(TARGETS) + dice.choice(("", "", ":80", ":8080")) + dice.choice(CONDITIONS)
        for _ in range(dice.randint(0, most))
    ]


@pytest.mark.parametrize("seed", range(5))
def test_hosts(seed: int) -> None:
    """Everything is led to one server on this host, so that whatever the rules let through arrives."""
    dice = random.Random(seed)
    with room.serving() as server:
        plain = {names.canonical(host) for host in HOSTS}
        network = {
            "mode": "open" if seed == 4 else "rules", "allow": lines(dice, 8), "deny": lines(dice, 2),
            "resolve": {f"{host}:{port}": server.address for host in plain for port in PORTS},
        }  # fmt: skip
        said = Policy(network=network)
        merged = policy.resolve(policy.stack(profile="moderate", arguments=said))
        asked = [
            (dice.choice(HOSTS), dice.choice(PORTS), dice.choice(("GET", "POST")), f"{dice.choice(('/', '/a', '/a/b', '/ab'))}?n={n}")
            for n in range(100)
        ]  # fmt: skip
        answers = [
            explaining.host(merged, rules.Request(host, port, "http", method, path))
            for host, port, method, path in asked
        ]
        with glass.box(policy=said) as box:
            happened = box.report(REQUESTS, json.dumps(asked))
        arrived = {path for _, path, _ in server.requests}
    wrong = [
        (one, answer, done)
        for one, answer, done in zip(asked, answers, happened, strict=True)
        if (one[3] in arrived) != (answer.verdict == "allow")
        or (done[0] == 403) != (answer.verdict == "deny")
    ]
    assert wrong == [], network
    assert "deny" in {answer.verdict for answer in answers}
