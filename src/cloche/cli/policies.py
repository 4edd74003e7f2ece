"""`policy`: what is allowed and why; checking and testing policy files; trusting a project's.

Every answer comes from the functions that enforce: the workspace's plan, the proxy's `decide`, the filter's table. Reads the
files of this machine, as an engine here would; no sandbox and no server is needed.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from cloche import errors, policy, settings
from cloche.cli import output, talk

_KINDS = ("path", "host", "syscall", "env", "secret")
_ACTS = ("explain", "show", "check", "test", "trust", "untrust")


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "act", metavar="ACT", choices=_ACTS, help="explain, show, check, test, trust or untrust"
    )
    parser.add_argument(
        "words",
        metavar="WORD",
        nargs="*",
        help="explain: path, host, syscall, env or secret, and its name; else a file",
    )
    parser.add_argument("--workspace", metavar="DIR", help="with the policy file of this workspace")
    parser.add_argument("--profile", metavar="P", help="the profile, instead of the settings' default")
    parser.add_argument(
        "--mode", metavar="AGENT", help="instead of a profile: claude-code, codex, gemini or your own"
    )
    parser.add_argument("--policy", metavar="FILE", help="a policy file, as given to run --policy")
    parser.add_argument("--write", action="store_true", help="explain path: writing instead of reading")
    parser.add_argument("--method", metavar="M", help="explain host: a plain HTTP request with this method")
    parser.add_argument("--path", metavar="P", help="explain host: … and this path")


def execute(verb: str, chosen: argparse.Namespace) -> int:
    acts: dict[str, Callable[[argparse.Namespace], int]] = {
        "explain": _explain, "show": _show, "check": _check, "test": _test, "trust": _trust, "untrust": _untrust,
    }  # fmt: skip
    return acts[chosen.act](chosen)


def _one(chosen: argparse.Namespace) -> str:
    if len(chosen.words) != 1:
        raise errors.error("argument_invalid", f"cloche policy {chosen.act} takes one file")
    word: str = chosen.words[0]
    return word


# ── explain ────────────────────────────────────────────────────────────────────────────────────────


class Asker:
    """One stack of layers, and the questions to it."""

    def __init__(self, chosen: Mapping[str, Any]) -> None:
        config = settings.load(os.environ)
        self._home = config.home
        self.workspace: str | None = chosen.get("workspace")
        files = settings.PolicyFiles(config, os.environ)
        given, profile, mode = chosen.get("policy"), chosen.get("profile"), chosen.get("mode")
        self.layers = policy.stack(
            profile=config.defaults.profile if profile is None and mode is None else profile,
            mode=mode,
            sources=files(self.workspace),
            arguments=None if given is None else settings.load_policy(given),
        )

    def explain(self, kind: str, target: str, **more: Any) -> Any:
        from cloche.policy import explaining

        ask: dict[str, Callable[..., Any]] = {
            "path": self._path, "host": self._host, "syscall": self._call, "env": explaining.variable,
            "secret": explaining.secret,
        }  # fmt: skip
        if kind not in ask:
            raise errors.error(
                "argument_invalid", f"a policy has no {kind!r}", hint=errors.nearest(kind, _KINDS)
            )
        return explaining.explain(self.layers, lambda merged: ask[kind](merged, target, **more))

    def _path(self, merged: policy.Merged, target: str, *, write: bool = False) -> Any:
        from cloche import workspaces

        made = workspaces.survey(
            self.workspace or os.getcwd(), rules=merged, home=os.path.expanduser("~"), environment=os.environ,
            state=os.path.join(self._home, "workspaces", "none"),
        )  # fmt: skip
        return workspaces.explain(made, target, write=write)

    def _host(
        self, merged: policy.Merged, target: str, *, method: str | None = None, path: str | None = None
    ) -> Any:
        from cloche.policy import explaining

        asked = explaining.request_to(target, method=method, below=path)
        return explaining.host(merged, asked)

    def _call(self, merged: policy.Merged, target: str) -> Any:
        from cloche.linux import seccomp, syscalls
        from cloche.policy import explaining

        if target not in syscalls.TABLE:
            raise errors.error(
                "argument_invalid",
                f"there is no system call {target!r}",
                hint=errors.nearest(target, syscalls.TABLE),
            )
        return explaining.system_call(merged, target, seccomp.explain)


def _explain(chosen: argparse.Namespace) -> int:
    if len(chosen.words) != 2:
        raise errors.error(
            "argument_invalid",
            "cloche policy explain takes a kind and a name",
            hint=f"such as `cloche policy explain host pypi.org:443`; kinds are {', '.join(_KINDS)}",
        )
    kind, target = chosen.words
    found = Asker(vars(chosen)).explain(kind, target, **_more(kind, vars(chosen)))
    if chosen.json:
        output.as_json({"kind": kind, "target": target, **msgspec.to_builtins(found)})
    else:
        output.fields(
            [("verdict", found.verdict), ("rule", found.rule), ("field", found.field), ("source", found.source),
             ("reason", found.reason)]
        )  # fmt: skip
    return 0


def _more(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    if kind == "path":
        return {"write": bool(given.get("write"))}
    return {"method": given.get("method"), "path": given.get("path")} if kind == "host" else {}


# ── show ───────────────────────────────────────────────────────────────────────────────────────────


def _show(chosen: argparse.Namespace) -> int:
    if chosen.words:
        raise errors.error("argument_invalid", "cloche policy show takes no further words")
    layers = Asker(vars(chosen)).layers
    rows = [row for group in policy.Merged.__struct_fields__ for row in _origins(layers, group)]
    if chosen.json:
        merged = msgspec.to_builtins(policy.resolve(layers))
        origins = [{"field": field, "value": value, "source": source} for field, value, source in rows]
        output.as_json({"policy": merged, "layers": [layer.name for layer in layers], "origins": origins})
        return 0
    output.table(("FIELD", "VALUE", "SOURCE"), _shortened(rows))
    return 0


def _origins(layers: tuple[policy.Layer, ...], group: str) -> list[tuple[str, Any, str]]:
    """A row for each word, number and entry that counts, with the layer from which on it did."""
    steps = [msgspec.to_builtins(policy.resolve(layers[: count + 1]))[group] for count in range(len(layers))]
    rows: list[tuple[str, Any, str]] = []
    for field, value in steps[-1].items():
        for part in _parts(value):
            first = len(steps) - 1
            while first > 0 and part in _parts(steps[first - 1][field]):
                first -= 1
            rows.append((f"{group}.{field}", part, _where(layers[first], group, field, part)))
    return rows


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [f"{name} = {text}" for name, text in value.items()]
    return list(value) if isinstance(value, list | tuple) else [value]


def _where(layer: policy.Layer, group: str, field: str, part: Any) -> str:
    named = field in layer.fields.get(group, {})
    return layer.where((group, field), part if isinstance(part, str) else "") if named else layer.name


def _shortened(rows: list[tuple[str, Any, str]]) -> list[tuple[str, Any, str]]:
    """For people: what is not set is left out, and a profile's long list is counted."""
    shown: list[tuple[str, Any, str]] = []
    counted: dict[tuple[str, str], int] = {}
    for field, value, source in rows:
        if field == "files.protected" and source.startswith("profile "):
            counted[field, source] = counted.get((field, source), 0) + 1
        elif value is not None:
            shown.append((field, value, source))
    return shown + [(field, f"{count} names", source) for (field, source), count in counted.items()]


# ── check and test ─────────────────────────────────────────────────────────────────────────────────


def _check(chosen: argparse.Namespace) -> int:
    path = _one(chosen)
    made = settings.load_policy(path)
    _check_calls(made)
    for name in made.profiles:
        policy.stack(profile=name, arguments=made)
    for name in made.agents:
        policy.stack(profile=None, mode=name, arguments=made)
    needs = _needs_trust(made)
    if chosen.json:
        output.as_json({"file": path, "valid": True, "needs_trust": needs})
    else:
        print(f"{talk.clean(path)}: ok")
        if needs:
            talk.say(f"as a project's file it must be trusted first: {needs}")
    return 0


def _check_calls(made: policy.Policy) -> None:
    from cloche.linux import seccomp

    named = ((), *(("profiles", name) for name in made.profiles), *(("agents", name) for name in made.agents))
    for above in named:
        table: Any = made.to_builtins()
        for key in above:
            table = table[key]
        denied = table.get("syscalls", {}).get("deny", ())
        for name in denied:
            try:
                seccomp.check_names([name])
            except ValueError as problem:
                where = made.where((*above, "syscalls", "deny"), name)
                raise errors.error(
                    "policy_invalid", f"{where}: {problem}", hint="see man 2 syscalls"
                ) from None


def _needs_trust(made: policy.Policy) -> str:
    try:
        policy.stack(profile="moderate", sources=policy.Sources(project=made))
    except errors.ClocheError as problem:
        if problem.code != "policy_untrusted":
            raise
        return str(problem.details.get("key", ""))
    return ""


class Expectation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One `[[expect]]`: exactly one kind with its name, and the verdict."""

    verdict: str
    path: str | None = None
    host: str | None = None
    syscall: str | None = None
    env: str | None = None
    secret: str | None = None
    write: bool = False
    method: str | None = None
    request: str | None = None
    """The path of a request to `host`."""
    field: str | None = None


class Expectations(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A file for `cloche policy test`. Paths in it are relative to its directory."""

    expect: list[Expectation]
    profile: str | None = None
    mode: str | None = None
    policy: str | None = None
    workspace: str | None = None


def _test(chosen: argparse.Namespace) -> int:
    path = _one(chosen)
    wanted, line_of = settings.load_table(path, Expectations)
    base = os.path.dirname(os.path.abspath(path))
    given = {
        "profile": chosen.profile or wanted.profile,
        "mode": chosen.mode or wanted.mode,
        "policy": chosen.policy or _beside(base, wanted.policy),
        "workspace": chosen.workspace or _beside(base, wanted.workspace),
    }
    asker = Asker(given)
    failures = []
    for number, one in enumerate(wanted.expect):
        kinds = [kind for kind in _KINDS if getattr(one, kind) is not None]
        if len(kinds) != 1 or one.verdict not in ("allow", "deny"):
            raise errors.error(
                "policy_invalid",
                f"{path}, line {line_of(number)}: an expectation has one of {', '.join(_KINDS)}, and verdict allow or deny",
                hint="see docs/guides/policy.md",
            )
        kind = kinds[0]
        more = _more(kind, {"write": one.write, "method": one.method, "path": one.request})
        found = asker.explain(kind, getattr(one, kind), **more)
        if found.verdict != one.verdict or one.field not in (None, found.field):
            failures.append((line_of(number), f"{kind} {getattr(one, kind)}", one.verdict, found))
    return _tell(chosen, path, len(wanted.expect), failures)


def _beside(base: str, path: str | None) -> str | None:
    return None if path is None else os.path.join(base, path)


def _tell(
    chosen: argparse.Namespace, path: str, count: int, failures: list[tuple[int | None, str, str, Any]]
) -> int:
    if chosen.json:
        rows = [
            {"line": line, "target": target, "wanted": wanted, "found": msgspec.to_builtins(found)}
            for line, target, wanted, found in failures
        ]
        output.as_json({"file": path, "expectations": count, "failures": rows})
    elif failures:
        output.table(
            ("LINE", "TARGET", "WANTED", "FOUND", "RULE", "SOURCE"),
            [(line, target, wanted, found.verdict, f"{found.field} {found.rule}".strip(), found.source)
             for line, target, wanted, found in failures],
        )  # fmt: skip
        talk.say(f"{len(failures)} of {count} expectations do not hold")
    else:
        talk.say(f"all {count} expectations hold")
    return 1 if failures else 0


# ── trust ──────────────────────────────────────────────────────────────────────────────────────────


def _trust(chosen: argparse.Namespace) -> int:
    path = _one(chosen)
    settings.load_policy(path)  # what cannot be read cannot be trusted
    _record("trusted", path)
    made = settings.trust(settings.load(os.environ).home, path)
    if chosen.json:
        output.as_json({"file": made.source, "trusted": True})
    else:
        talk.say(
            f"{made.source} may loosen what it says, as it stands now; when it changes it is untrusted again"
        )
    return 0


def _untrust(chosen: argparse.Namespace) -> int:
    path = _one(chosen)
    _record("distrusted", path)
    was = settings.untrust(settings.load(os.environ).home, path)
    if chosen.json:
        output.as_json({"file": chosen.words[0], "trusted": False, "was": was})
    else:
        talk.say("it may only tighten again" if was else "it was not trusted")
    return 0


def _record(change: Literal["trusted", "distrusted"], path: str) -> None:
    """Before it is done, so that nothing is done without."""
    from cloche import events, wiring

    event = events.PolicyChanged(
        sandbox=None,
        time=time.time(),
        actor=f"uid:{os.getuid()}",
        change=change,
        target=os.path.realpath(path),
    )
    if problem := wiring.record(os.environ, event):
        talk.warning(problem)
