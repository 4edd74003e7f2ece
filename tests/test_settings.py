import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche import errors, model, policy, settings

PAGE = Path(__file__).parent.parent / "docs/reference/settings.md"
GROUPS = {
    "limits": settings.Limits,
    "defaults": settings.Defaults,
    "keeper": settings.Keeper,
    "guest": settings.Guest,
    "snapshots": settings.Snapshots,
    "server": settings.Server,
    "jwt": settings.Jwt,
    "quotas": settings.Quotas,
    "mcp": settings.Mcp,
    "audit": settings.Audit,
    "images": settings.Images,
    "build": settings.Build,
    "secrets": settings.Secrets,
    "policy": settings.Ceiling,
    "network": settings.Network,
}


@pytest.fixture
def user(tmp_path):
    """The environment of a user with nothing in it but a home."""
    return {"HOME": str(tmp_path)}


@pytest.fixture
def write(tmp_path):
    """Write the user's settings file."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / ".config/cloche/settings.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def refusal(call, *arguments) -> errors.ClocheError:
    with pytest.raises(errors.ClocheError) as caught:
        call(*arguments)
    assert caught.value.hint
    return caught.value


# ── mistakes in a file ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "line", "key", "hint"),
    [
        ("[limits]\nmax_sandboxs = 3\n", 2, "limits.max_sandboxs", "did you mean 'max_sandboxes'?"),
        ("\n# note\n\n[limit]\n", 4, "limit", "did you mean 'limits'?"),
        ("limits.max = 3", 1, "limits.max", "use one of"),
        ("limits = {\n", 1, None, "toml.io"),
        ("[keeper]\n\nidle_exit_s = -1", 3, "keeper.idle_exit_s", "settings.md"),
        ("[limits]\nmax_sandboxes = 0", 2, "limits.max_sandboxes", "settings.md"),
        ("[limits]\nmax_sandboxes = 'many'", 2, "limits.max_sandboxes", "settings.md"),
        ("[limits]\nmax_sandboxes = true", 2, "limits.max_sandboxes", "settings.md"),
        ("[limits]\nmax_sandboxes = 'none'", 2, "limits.max_sandboxes", "settings.md"),
        ("[defaults]\nprofile = 5", 2, "defaults.profile", "settings.md"),
        ("[defaults.resources]\nmemroy_mib = 1", 2, "defaults.resources.memroy_mib", "did you mean 'memory_mib'?"),
        ("[defaults]\nresources = {pids = -3}", 2, "defaults.resources.pids", "leave pids out"),
        ("[defaults]\nx = '''\ny = 1\n'''\n", 2, "defaults.x", "use one of"),
        ("keeper = 3", 1, "keeper", "settings.md"),
        ("\n[jwt]\nissuer = 'https://id'", 2, "jwt", "belong together"),
        ("[jwt]\nissuer='i'\naudience=['a']\njwks='/k'\nalgorithms = ['HS256']", 5, "jwt.algorithms.0", "RS256"),
        ("home = '/x'", 1, "home", "CLOCHE_HOME"),
        ("[limits]\nmax_sandboxes = 1\nmax_sandboxes = 2", 3, None, "toml.io"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_file_line_and_key(user, write, text, line, key, hint):
    path = write(text)
    problem = refusal(settings.load, user)
    assert problem.code == "settings_invalid"
    assert problem.message.startswith(f"{path}, line {line}: ")
    assert problem.details.get("line") == line
    assert problem.details.get("key") == key
    assert hint in (problem.hint or "")


@pytest.mark.parametrize(
    "text", [b"\xff", b"a = 1\n\xff", b"a = " + b"[" * 20_000, b"a = 1\n" * 20_000, b"a = \0"], ids=len
)
def test_a_file_of_rubbish_is_an_error_and_no_traceback(user, write, text):
    path = write(text)
    problem = refusal(settings.load, user)
    assert problem.code == "settings_invalid"
    assert str(path) in problem.message


def test_a_directory_in_place_of_the_file_is_an_error(user, tmp_path):
    (tmp_path / ".config/cloche/settings.toml").mkdir(parents=True)
    assert refusal(settings.load, user).code == "settings_invalid"


@given(
    st.lists(
        st.sampled_from(["# c", "", "a = 1", "[t]", "b = [\n1,\n2\n]", 'c = """\nz = 1\n"""']),
        max_size=12,
        unique=True,
    ),
    st.integers(0, 12),
)
def test_the_line_of_a_key_is_where_it_was_put(pieces, position):
    pieces = [*pieces[:position], "odd = [\n  3,\n]", *pieces[position:]]
    text = "\n".join(pieces)
    table = "t" if "[t]" in pieces[: pieces.index("odd = [\n  3,\n]")] else None
    key = ("odd",) if table is None else (table, "odd")
    assert settings._line_of(text, key) == text[: text.index("odd =")].count("\n") + 1


def test_the_search_for_a_line_is_bounded():
    text = "a = [\n" + "1,\n" * 20_000 + "]\nodd = 1\n"
    assert settings._line_of(text, ("odd",)) in (20_003, None)


# ── mistakes in the environment ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CLOCHE_HOME", "relative"), ("CLOCHE_HOME", "/a\nb"), ("CLOCHE_KEEPER", "maybe"),
        ("CLOCHE_URL", "localhost:7777"), ("CLOCHE_URL", "file:///etc/passwd"),
    ],
)  # fmt: skip
def test_a_variable_that_makes_no_sense_is_refused_by_name(user, variable, value):
    problem = refusal(settings.load, {**user, variable: value})
    assert problem.code == "settings_invalid"
    assert problem.details["key"] == variable
    assert variable in problem.message


def test_a_socket_path_over_107_bytes_names_the_variable_to_change():
    fits = "/" + "x" * (107 - len("/cloche.sock") - 1)
    assert len(settings.load({"HOME": "/h", "CLOCHE_HOME": fits}).socket_path) == 107
    too_long = settings.load({"HOME": "/h", "CLOCHE_HOME": fits + "x"})
    with pytest.raises(errors.InvalidInput) as caught:
        _ = too_long.socket_path
    assert caught.value.code == "socket_path_too_long"
    assert "CLOCHE_HOME" in (caught.value.hint or "")


def test_bytes_are_counted_and_not_characters():
    wide = settings.load({"HOME": "/h", "CLOCHE_HOME": "/" + "ü" * 50})
    with pytest.raises(errors.InvalidInput):
        _ = wide.socket_path


# ── what is loaded ─────────────────────────────────────────────────────────────────────────────────


def test_without_a_file_everything_has_its_default(user, tmp_path):
    assert settings.load(user) == settings.Settings(home=str(tmp_path / ".local/state/cloche"))


@pytest.mark.parametrize(
    ("extra", "home"),
    [
        ({}, "/h/.local/state/cloche"),
        ({"XDG_STATE_HOME": "/s"}, "/s/cloche"),
        ({"XDG_STATE_HOME": "relative"}, "/h/.local/state/cloche"),
        ({"XDG_STATE_HOME": "/s", "CLOCHE_HOME": "/c/"}, "/c"),
        ({"CLOCHE_HOME": ""}, "/h/.local/state/cloche"),
    ],
    ids=repr,
)
def test_where_state_lives(extra, home):
    loaded = settings.load({"HOME": "/h", **extra})
    assert (loaded.home, loaded.state_path) == (home, f"{home}/state.db")


def test_without_home_the_password_file_is_asked():
    assert os.path.isabs(settings.load({}).home)


def test_a_file_is_read_from_the_configuration_directory(user, tmp_path):
    path = tmp_path / "elsewhere/cloche/settings.toml"
    path.parent.mkdir(parents=True)
    path.write_text(
        "[limits]\r\nmax_sandboxes = 7\r\n[defaults]\ntimeout_s = 'none'\nidle_timeout_s = 30\n"
        "resources.memory_mib = 64\n[keeper]\nwarm_sandboxes = 0\n"
    )
    loaded = settings.load({**user, "XDG_CONFIG_HOME": str(tmp_path / "elsewhere")})
    assert loaded.limits.max_sandboxes == 7
    assert (loaded.defaults.timeout_s, loaded.defaults.idle_timeout_s) == (None, 30)
    assert loaded.defaults.resources == model.Resources(memory_mib=64)
    assert loaded.keeper.warm_sandboxes == 0


@pytest.mark.parametrize(
    ("in_file", "environment", "starts"),
    [
        (True, {}, True),
        (True, {"CI": "true"}, False),
        (True, {"CI": "1"}, False),
        (True, {"CI": "false"}, True),
        (True, {"CLOCHE_KEEPER": "off"}, False),
        (True, {"CLOCHE_KEEPER": "on", "CI": "1"}, True),
        (False, {}, False),
        (False, {"CLOCHE_KEEPER": "on"}, True),
    ],
)
def test_when_a_keeper_starts_by_itself(user, write, in_file, environment, starts):
    write(f"keeper.start = {str(in_file).lower()}")
    assert settings.load({**user, **environment}).keeper.start is starts


def test_server_and_key_come_from_the_environment_and_the_key_is_not_shown(user):
    loaded = settings.load({**user, "CLOCHE_URL": "http://localhost:7777", "CLOCHE_API_KEY": "cl_c0ffee"})
    assert (loaded.url, loaded.api_key) == ("http://localhost:7777", "cl_c0ffee")
    assert "c0ffee" not in repr(loaded)
    assert "api_key='***'" in repr(loaded)


def test_loading_reads_the_environment_it_is_given_and_creates_nothing(user, tmp_path):
    settings.load(user)
    assert list(tmp_path.iterdir()) == []


def test_importing_and_loading_without_a_file_needs_no_parser(user):
    code = "import sys, os; from cloche import settings; settings.load(dict(os.environ)); print(*sys.modules)"
    search = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**user, **search}, capture_output=True, text=True, check=True
    )
    assert not {"tomllib", "difflib", "sqlite3", "asyncio", "pwd"} & set(done.stdout.split())


# ── the state directory ────────────────────────────────────────────────────────────────────────────


def test_the_state_directory_is_its_owners_alone(tmp_path):
    home = tmp_path / "deep/home"
    settings.make_home(str(home))
    assert home.stat().st_mode & 0o777 == 0o700
    home.chmod(0o755)
    settings.make_home(str(home))
    assert home.stat().st_mode & 0o777 == 0o700


def test_a_file_in_place_of_the_state_directory_is_an_error(tmp_path):
    (tmp_path / "home").write_text("")
    problem = refusal(settings.make_home, str(tmp_path / "home"))
    assert problem.code == "settings_invalid"
    assert "CLOCHE_HOME" in (problem.hint or "")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_state_directory_of_somebody_else_is_refused(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 12345, 12345)
    assert "belongs to uid 12345" in refusal(settings.make_home, str(home)).message


# ── policy files ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "code", "line", "hint"),
    [
        ("[files]\n[netwrok]\nmode = 'off'\n", "field_unknown", 2, "did you mean 'network'?"),
        ("[network]\n\nmdoe = 'off'\n", "field_unknown", 3, "did you mean 'mode'?"),
        ("\n[network]\nallow = 'pypi.org'", "policy_invalid", 3, "policy.md"),
        ("network = 'off'", "policy_invalid", 1, "policy.md"),
        ("network.mode = 'sometimes'", "policy_invalid", 1, "policy.md"),
        ("[files]\ndeny = [\n  'a',\n  3,\n]", "policy_invalid", 2, "policy.md"),
        ("[files]\ndeny = [", "policy_invalid", 2, "toml.io"),
        ("[files]\nroot = 'overlay'\n[isolation]\nroot_user = 1\n", "policy_invalid", 4, "policy.md"),
    ],
)
def test_a_mistake_in_a_policy_is_reported_with_file_line_and_key(tmp_path, text, code, line, hint):
    path = tmp_path / "cloche.toml"
    path.write_text(text)
    problem = refusal(policy.Policy.load, str(path))
    assert (problem.code, problem.details["line"]) == (code, line)
    assert problem.message.startswith(f"{path}, line {line}: ")
    assert hint in (problem.hint or "")


@pytest.mark.parametrize("path", ["nowhere.toml", "a\0b", "."])
def test_a_policy_that_cannot_be_read_is_an_error(tmp_path, path):
    assert refusal(settings.load_policy, f"{tmp_path}/{path}").code == "policy_invalid"


def test_a_policy_file_is_the_policy_it_says(tmp_path):
    path = tmp_path / "cloche.toml"
    path.write_text("[files]\nroot = 'read-only'\ndeny = ['secrets/']\n[isolation]\nroot_user = false\n")
    expected = policy.Policy(
        files={"root": "read-only", "deny": ["secrets/"]}, isolation={"root_user": False}
    )
    assert settings.load_policy(path) == expected
    assert policy.Policy.load(str(path)) == expected


# ── the page ───────────────────────────────────────────────────────────────────────────────────────


def paragraphs() -> dict[str, str]:
    """The docstring after each field of each struct, by dotted name."""
    found = {}
    prefix = {kind.__name__: f"{name}." for name, kind in GROUPS.items()} | {"Settings": ""}
    for node in ast.parse(Path(settings.__file__).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in prefix:
            for field, text in zip(node.body, node.body[1:], strict=False):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                        value=ast.Constant(value=str(words))
                    ):
                        found[prefix[node.name] + name] = " ".join(words.split())
    return found


def fields() -> list[str]:
    own = [name for name in settings.Settings.__struct_fields__ if name not in GROUPS]
    return own + [f"{group}.{name}" for group, kind in GROUPS.items() for name in kind.__struct_fields__]


def test_every_setting_has_its_paragraph():
    assert list(paragraphs()) == [*fields()[5:], *fields()[:5]]


def test_the_reference_has_every_setting_with_its_paragraph_and_default():
    sections = dict(re.findall(r"^### `([\w.]+)`\n\n(.+?)(?=\n+#|\Z)", PAGE.read_text(), re.M | re.S))
    assert list(sections) == fields()
    for name, words in paragraphs().items():
        assert words in " ".join(sections[name].split()), name
    for group, kind in GROUPS.items():
        for name, default in zip(kind.__struct_fields__, kind.__struct_defaults__, strict=True):
            assert f"Default: `{spelled(default)}`" in sections[f"{group}.{name}"], name


def spelled(default: object) -> str:
    """A default as a TOML file spells it."""
    match default:
        case None:
            return '"none"'
        case _ if repr(default) == "<factory>":  # how msgspec keeps an empty table
            return "{}"
        case bool():
            return str(default).lower()
        case str():
            return f'"{default}"'
        case tuple():
            return "[" + ", ".join(spelled(item) for item in default) + "]"
        case msgspec.Struct():
            return (
                "{"
                + ", ".join(f"{name} = {getattr(default, name)}" for name in default.__struct_fields__)
                + "}"
            )
        case _:
            return str(default)


def test_a_pattern_that_is_none_is_told_with_its_place(user, tmp_path):
    file = tmp_path / ".config/cloche/settings.toml"
    file.parent.mkdir(parents=True)
    file.write_text('[audit]\nredact = ["fine",\n  "(unclosed"]\n')
    with pytest.raises(errors.InvalidInput) as refused:
        settings.load(user)
    assert refused.value.code == "settings_invalid"
    assert "line 3" in refused.value.message or "line 2" in refused.value.message
    assert "'(unclosed' is not a regular expression" in refused.value.message
    file.write_text('[audit]\nredact = ["project-\\\\w+"]\n')
    assert settings.load(user).audit.redact == (r"project-\w+",)
