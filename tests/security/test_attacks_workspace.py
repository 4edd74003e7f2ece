"""Attacks on files and configuration through a workspace: whatever is tried inside, what a later, trusted process reads stays.

Two projects: one that has every control file, one that has none, because what is not there yet must not be made either. All attacks
run in one sandbox each, with a token apiece; then the sandbox ends, and only then the host's disk is looked at.
"""

import os
import secrets
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.security import glass
from tests.security.attacks import Case

pytestmark = pytest.mark.timeout(120)

CONTROL = {
    ".git/hooks/pre-commit": ".git/refs/heads/pre-commit",
    ".git/hooks/post-checkout": ".git/objects/notes",
    ".git/config.worktree": ".git/COMMIT_EDITMSG",
    ".git/info/attributes": ".git/logs/notes",
    ".gitconfig": "gitconfig.txt",
    ".bashrc": "bashrc.txt",
    ".bash_profile": "bash_profile.txt",
    ".bash_login": "bash_login.txt",
    ".bash_logout": "bash_logout.txt",
    ".profile": "profile.txt",
    ".zshrc": "zshrc.txt",
    ".zshenv": "zshenv.txt",
    ".zprofile": "zprofile.txt",
    ".zlogin": "zlogin.txt",
    ".config/fish/config.fish": ".config/notes",
    ".ripgreprc": "ripgreprc.txt",
    ".mcp.json": "mcp.json",
    ".claude/settings.json": ".claude/notes.md",
    ".claude/settings.local.json": ".claude/settings.txt",
    ".claude/commands/deploy.md": "commands/deploy.md",
    ".claude/agents/helper.md": "agents/helper.md",
    ".claude/skills/x/SKILL.md": "skills/x/SKILL.md",
    ".claude/hooks/stop.sh": "hooks/stop.sh",
    ".claude/workflows/a.yml": "workflows/a.yml",
    ".codex/config.toml": "codex/config.toml",
    ".agents/skills/x.md": "agents/skills.md",
    ".gemini/settings.json": "gemini/settings.json",
    ".opencode/config.json": "opencode/config.json",
    ".cursor/mcp.json": "cursor/mcp.json",
    ".vscode/tasks.json": "vscode/tasks.json",
    ".idea/workspace.xml": "idea/workspace.xml",
    ".envrc": "envrc.txt",
    ".husky/pre-commit": "husky/pre-commit",
    ".npmrc": "npmrc.txt",
    ".yarnrc": "yarnrc.txt",
    ".yarnrc.yml": "yarnrc.yml",
    ".pypirc": "pypirc.txt",
    "cloche.toml": "cloche.txt",
}
"""What is protected, and beside it something that is not."""

CASES = [
    Case(
        f"{'present' if there else 'absent'} {control}",
        "git hooks and config" if control.startswith((".git/", ".gitconfig")) else "agent config",
        (there, control),
        (there, twin),
    )
    for there in (True, False)
    for control, twin in CONTROL.items()
]

# Everything one can do to a name. `$1` is the path, `$2` the token; failures are expected and go unsaid.
ATTACK = r"""
try() {
    path=$1 token=$2 parent=${1%/*}
    [ "$parent" = "$1" ] && parent=.
    mkdir -p "$parent"
    echo "$token" >> "$path"
    echo "$token" > "$path"
    chmod u+w "$path" && echo "$token" > "$path"
    echo "$token" > "$path.new" && mv -f "$path.new" "$path"
    rm -rf "$path.new"
    echo "$token" > "/tmp/$token" && cp -f "/tmp/$token" "$path"
    mv "$path" "/tmp/moved-$token" && echo "$token" > "$path"
    rm -f "$path" && echo "$token" > "$path"
    ln -sf "/tmp/$token" "$path"
    ln -f "/tmp/$token" "$path"
    if [ "$parent" != . ]; then
        mv "$parent" "$parent-away" && mkdir -p "$parent" && echo "$token" > "$path"
        [ -e "$parent-away" ] && [ ! -e "$parent" ] && mv "$parent-away" "$parent"
        rm -rf "$parent" && mkdir -p "$parent" && echo "$token" > "$path"
    fi
}
"""
CALLS = r"""
import os, sys
for path, token in zip(sys.argv[1::2], sys.argv[2::2]):
    for act in (
        lambda: os.truncate(path, 0),
        lambda: os.write(os.open(path, os.O_RDWR | os.O_CREAT), token.encode()),
        lambda: os.write(os.open("/proc/self/cwd/" + path, os.O_WRONLY | os.O_CREAT), token.encode()),
        lambda: os.setxattr(path, "user.x", token.encode()),
        lambda: os.utime(path, (1, 1)),
    ):
        try:
            act()
        except OSError:
            pass
"""
GENTLE = r"""
keep() { mkdir -p "$(dirname "$1")"; echo "$2" > "$1"; }
"""


class Done(NamedTuple):
    project: Path
    before: dict[str, bytes]
    tokens: dict[str, str]


def make_project(directory: Path, *, there: bool) -> None:
    directory.mkdir()
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    subprocess.run(["git", "init", "-q", str(directory)], check=True, env=environment)
    (directory / "README").write_text("hello")
    if there:
        for name in CONTROL:
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("# the owner's\n")


def content(project: Path, name: str) -> bytes:
    """All that lies at a name and below it; nothing for what is not there."""
    path = project / name
    if path.is_symlink():
        return b"symlink " + os.readlink(path).encode()
    if path.is_dir():
        return b"".join(content(path, child) for child in sorted(os.listdir(path)))
    return path.read_bytes() if path.exists() else b""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Done]:
    """Both projects after all attacks, and after their sandboxes have ended."""
    found = {}
    for there in (True, False):
        project = tmp_path_factory.mktemp("work") / "project"
        make_project(project, there=there)
        tokens = {name: secrets.token_hex(8) for pair in CONTROL.items() for name in pair}
        before = {name: content(project, name) for name in CONTROL}
        attack = ATTACK + "".join(f"try '{name}' {tokens[name]} 2>/dev/null\n" for name in CONTROL)
        gentle = GENTLE + "".join(f"keep '{name}' {tokens[name]}\n" for name in CONTROL.values())
        with glass.box(workspace=str(project)) as box:
            box.exec(["bash", "-c", attack], timeout_s=90)
            box.exec(
                ["python3", "-I", "-c", CALLS, *(word for name in CONTROL for word in (name, tokens[name]))]
            )
            kept = box.exec(["bash", "-c", gentle], timeout_s=30)
            assert kept.exit_code == 0, kept.stderr
        found[there] = Done(project, before, tokens)
    return found


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_a_control_file_stays_as_it_was_and_its_neighbour_can_be_written(
    case: Case, done: dict[bool, Done]
) -> None:
    there, control = case.forbidden
    _, twin = case.permitted
    world = done[there]
    after = content(world.project, control)
    assert world.tokens[control].encode() not in after
    assert after == world.before[control]
    assert world.tokens[twin].encode() in content(world.project, twin)


# ── git: what the host's own git would run ─────────────────────────────────────────────────────────

GIT_KEYS = (
    "core.fsmonitor", "core.hooksPath", "core.sshCommand", "core.pager", "core.editor", "core.gitProxy", "core.askPass",
    "diff.external", "filter.x.clean", "filter.x.smudge", "filter.x.process", "diff.x.textconv", "diff.x.command", "merge.x.driver",
    "credential.helper", "gpg.program", "alias.status", "include.path", "sequence.editor", "uploadpack.packObjectsHook",
    "remote.origin.uploadpack", "url.ext::sh.insteadOf", "protocol.ext.allow",
)  # fmt: skip
GIT_CASES = [
    Case(f"git config {key}", "git hooks and config", key, "branch.main.description") for key in GIT_KEYS
]


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the host's .git/config says after a sandbox has set every key that runs something."""
    project = tmp_path_factory.mktemp("git") / "project"
    make_project(project, there=False)
    evil = "; ".join(f"git config {key} 'touch {project}/ran; false'" for key in GIT_KEYS)
    direct = "\n".join(
        f"[{key.partition('.')[0]}]\n\t{key.rpartition('.')[2]} = touch {project}/ran" for key in GIT_KEYS
    )
    with glass.box(workspace=str(project)) as box:
        box.exec(f"cd {project}; {evil}; git config branch.main.description kept")
        box.write(f"{project}/direct", direct)
        box.exec(f"cat {project}/direct >> {project}/.git/config; git config branch.main.description kept")
        box.exec(f"rm {project}/direct")
    environment = {"PATH": os.environ["PATH"], "HOME": str(project.parent), "GIT_CONFIG_NOSYSTEM": "1"}
    for command in (["status"], ["diff"], ["add", "README"]):
        subprocess.run(["git", *command], cwd=project, env=environment, capture_output=True, timeout=30)
    assert not (project / "ran").exists()
    listed = subprocess.run(
        ["git", "config", "--file", ".git/config", "--list"], cwd=project, env=environment, capture_output=True, text=True
    )  # fmt: skip
    assert listed.returncode == 0, listed.stderr
    return listed.stdout.lower()


@pytest.mark.parametrize("case", GIT_CASES, ids=[case.id for case in GIT_CASES])
def test_a_key_that_runs_something_does_not_reach_the_host(case: Case, configured: str) -> None:
    assert not [line for line in configured.splitlines() if line.startswith(case.forbidden.lower() + "=")]
    assert f"{case.permitted}=kept" in configured


def test_a_bare_repository_planted_in_the_workspace_runs_nothing(tmp_path: Path) -> None:
    """`HEAD`, `objects`, `refs` and a `config` in a directory make git take it for a repository."""
    project = tmp_path / "project"
    make_project(project, there=False)
    ran = project / "ran"
    with glass.box(workspace=str(project)) as box:
        box.exec(
            f"cd {project}; mkdir -p objects refs hooks; echo 'ref: refs/heads/main' > HEAD;"
            f"printf '[core]\\n\\tbare = true\\n\\tfsmonitor = touch {ran}\\n' > config"
        )
        assert box.exec(f"cd {project}; echo fine > notes").exit_code == 0
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", "status"], cwd=project, env=environment, capture_output=True, timeout=30)
    assert not ran.exists()
    assert (project / "notes").read_text() == "fine\n"


def test_a_submodule_planted_in_the_index_runs_nothing(tmp_path: Path) -> None:
    """The host's `git status` looks into submodules, and would run what their configuration names."""
    project = tmp_path / "project"
    make_project(project, there=False)
    ran = project / "ran"
    with glass.box(workspace=str(project)) as box:
        planted = box.exec(
            f"cd {project} && git init -q sub && cd sub && git config user.email a@b && git config user.name n && echo x > f && git add f"
            f" && git commit -qm first && git config core.fsmonitor 'touch {ran}; false' && mkdir -p .git/hooks"
            f" && printf '#!/bin/sh\\ntouch {ran}\\n' > .git/hooks/post-checkout && chmod +x .git/hooks/post-checkout"
            " && cd .. && git add sub && git commit -qm both"
        )
        assert planted.exit_code == 0, planted.stderr
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}
    for command in (
        ["status"],
        ["diff"],
        ["-C", "sub", "status"],
        ["-C", "sub", "checkout", "-q", "-f", "HEAD"],
    ):
        subprocess.run(["git", *command], cwd=project, env=environment, capture_output=True, timeout=30)
    assert not ran.exists()
    log = subprocess.run(
        ["git", "-C", "sub", "log", "--format=%s"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert log.stdout == "first\n"


# ── what lies beside the workspace ─────────────────────────────────────────────────────────────────

UNREADABLE = (
    ".ssh/id_ed25519", ".ssh/config", ".gnupg/private-keys-v1.d/k.key", ".aws/credentials", ".azure/msal_token_cache.json", ".kube/config",
    ".docker/config.json", ".config/gcloud/credentials.db", ".config/gh/hosts.yml", ".config/op/config", ".netrc", ".git-credentials",
    ".npmrc", ".pypirc", ".cargo/credentials.toml", ".claude.json", ".claude/.credentials.json", ".codex/auth.json",
    ".gemini/oauth_creds.json", ".password-store/mail.gpg", ".mozilla/firefox/p/logins.json", ".config/google-chrome/Default/Login Data",
    ".local/share/keyrings/login.keyring", ".bash_history", ".zsh_history", ".env", "gha-creds-1.json", "other-project/secret.txt",
)  # fmt: skip
UNWRITABLE = (
    ".bashrc", ".profile", ".ssh/authorized_keys", ".config/autostart/x.desktop", ".gitconfig", ".claude/settings.json",
    ".local/bin/git", ".config/systemd/user/x.service", "other-project/main.py",
)  # fmt: skip
READ_CASES = [
    Case(f"read ~/{name}", "reads of home", name, f"copy/r_{name.replace('/', '_')}") for name in UNREADABLE
]
WRITE_CASES = [
    Case(f"write ~/{name}", "writes outside", name, f"copy/w_{name.replace('/', '_')}") for name in UNWRITABLE
]


class Home(NamedTuple):
    path: Path
    project: Path
    tokens: dict[str, str]
    shown: str
    own: str


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A caller's home with secrets in it, and a project below; what a sandbox of the project could read and write of it."""
    path = tmp_path_factory.mktemp("caller")
    project = path / "project"
    make_project(project, there=False)
    tokens = {name: secrets.token_hex(10) for name in (*UNREADABLE, *UNWRITABLE)}
    (project / "copy").mkdir()
    for name in UNREADABLE:
        planted = path / name
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.write_text(f"secret {tokens[name]}\n")
        (project / "copy" / f"r_{name.replace('/', '_')}").write_text(f"mine {tokens[name][::-1]}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(path))
        with glass.box(workspace=str(project)) as box:
            ways = ["{p}", "/proc/self/root{p}", "/proc/1/root{p}", "/proc/self/cwd/../{n}", "link-{i}"]
            lines = []
            for index, name in enumerate(UNREADABLE):
                lines.append(f"ln -s '{path}/{name}' link-{index}")
                lines += [f"cat '{way.format(p=path / name, n=name, i=index)}'" for way in ways]
                lines.append(f"rm link-{index}")
            lines += [
                f"cp -r '{path}/{name.partition('/')[0]}' /tmp/; cat '/tmp/{name}'" for name in UNREADABLE
            ]
            lines += [f"tar c -C '{path}' . | strings"]
            shown = box.exec(
                f"cd '{project}'\n" + "\n".join(lines), output_limit=1 << 22, timeout_s=90
            ).stdout
            for name in UNWRITABLE:
                token = tokens[name]
                box.exec(
                    f"cd '{project}'; mkdir -p '{(path / name).parent}'; echo {token} >> '{path}/{name}'; echo {token} > '../{name}';"
                    f"ln -s '{path}/{name}' l; echo {token} > l; rm -f l; echo {token} > 'copy/w_{name.replace('/', '_')}'"
                )
            own = box.out(f"cat '{project}'/copy/*", output_limit=1 << 22)
    return Home(path, project, tokens, shown, own)


@pytest.mark.parametrize("case", READ_CASES, ids=[case.id for case in READ_CASES])
def test_what_lies_in_home_cannot_be_read_and_the_workspace_can(case: Case, home: Home) -> None:
    assert home.tokens[case.forbidden] not in home.shown
    assert home.tokens[case.forbidden][::-1] in home.own


@pytest.mark.parametrize("case", WRITE_CASES, ids=[case.id for case in WRITE_CASES])
def test_what_lies_in_home_cannot_be_written_and_the_workspace_can(case: Case, home: Home) -> None:
    planted = home.path / case.forbidden
    assert not planted.exists() or home.tokens[case.forbidden] not in planted.read_text()
    assert (home.project / case.permitted).read_text() == f"{home.tokens[case.forbidden]}\n"
