"""Recipes: how an image is made, as data. A list of steps in order, each with one verb:

    from: docker://registry.example/library/debian:12
    steps:
      - apt: [git, ripgrep]
      - pip: [requests==2.32.3]
      - npm: [typescript]
      - copy: {from: app, to: /opt/app}
      - run: cd /opt/app && make
      - env: {APP_HOME: /opt/app}

A recipe is a program that others may have written: names of packages are names and never flags, paths are relative to
the recipe's directory and do not leave it, and the document itself is bounded.
"""

from __future__ import annotations

import re
import shlex
from typing import Any, Literal, NamedTuple

import msgspec

from cloche import errors, model
from cloche.images import references

Verb = Literal["apt", "pip", "npm", "run", "copy", "env"]
_MAX_TEXT = 64 << 10
_MAX_STEPS = 100
_MAX_VALUES = 10_000
_APT = re.compile(r"[a-z0-9][a-z0-9+.-]*(:[a-z0-9-]+)?([=/][A-Za-z0-9.+:~-]+)?")
_PIP = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._, -]+\])?\s*([=<>!~]=?[^;@\s]*(,\s*[=<>!~]=?[^;@\s]*)*)?"
)
_NPM = re.compile(r"(@[a-z0-9][a-z0-9._~-]*/)?[a-z0-9][a-z0-9._~-]*(@[A-Za-z0-9.^~<>=*|+-]+)?")
_NAMES = {"apt": _APT, "pip": _PIP, "npm": _NPM}


class Copy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"source": "from"}):
    source: str
    to: str


class Given(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step as it is written: exactly one field."""

    apt: list[str] | None = None
    pip: list[str] | None = None
    npm: list[str] | None = None
    run: str | None = None
    copy: Copy | None = None
    env: dict[str, str] | None = None


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"base": "from"}):
    base: str
    steps: list[Given] = []


class Step(NamedTuple):
    """`argument` is plain data; together with the verb, and what is copied, it is what the step's outcome depends on."""

    verb: Verb
    argument: Any

    @property
    def title(self) -> str:
        text = self.argument if isinstance(self.argument, str) else shlex.join(map(str, _flat(self.argument)))
        return f"{self.verb}: {text if len(text) <= 100 else text[:99] + '…'}"

    @property
    def line(self) -> str:
        """The command of a step that runs one."""
        names = shlex.join(self.argument) if isinstance(self.argument, list) else str(self.argument)
        return _LINES[self.verb].format(names=names) if self.verb in _LINES else names


class Recipe(NamedTuple):
    base: str
    steps: tuple[Step, ...]


_LINES = {
    # The user that apt would switch to has no rights over what is made here; there is no other to protect.
    "apt": "export DEBIAN_FRONTEND=noninteractive && apt-get -qq -o APT::Sandbox::User=root update && "
    "apt-get -qq -y -o APT::Sandbox::User=root -o Dpkg::Use-Pty=0 install --no-install-recommends -- {names} && "
    "rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb /var/cache/apt/*.bin",
    "pip": "PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore python3 -m pip install --no-cache-dir --no-input "
    "--disable-pip-version-check --progress-bar=off -- {names}",
    "npm": "npm install --global --no-fund --no-audit --no-update-notifier --cache=/tmp/npm -- {names}",
}


def parse(given: dict[str, Any] | str) -> Recipe:
    """A recipe from plain data, or from YAML text; `recipe_invalid` names step and key."""
    data = _loaded(given) if isinstance(given, str) else given
    _bound(data)
    try:
        document = msgspec.convert(data, Document)
    except msgspec.ValidationError as problem:
        raise invalid(str(problem)) from None
    if references.parse(document.base).kind == "host":
        raise invalid(
            "`from: host` has no root of its own to build upon",
            hint="begin from an image; `dir:/path` takes a root directory, as debootstrap makes it",
        )
    if len(document.steps) > _MAX_STEPS:
        raise invalid(f"it has {len(document.steps)} steps; at most {_MAX_STEPS} are taken")
    return Recipe(document.base, tuple(_step(step, number) for number, step in enumerate(document.steps, 1)))


def _step(given: Given, number: int) -> Step:
    said = {name: value for name, value in msgspec.to_builtins(given).items() if value is not None}
    if len(said) != 1:
        raise invalid(
            f"step {number} has {len(said)} verbs; it has one of {', '.join(Given.__struct_fields__)}"
        )
    verb, argument = next(iter(said.items()))
    if verb in _NAMES:
        if not argument:
            raise invalid(f"step {number}: {verb} names no package")
        for name in argument:
            if not _NAMES[verb].fullmatch(name):
                raise invalid(f"step {number}: {name[:100]!r} is not the name of a package for {verb}")
    elif verb == "run":
        if not argument.strip() or "\0" in argument:
            raise invalid(f"step {number}: run is empty, or holds a NUL")
    elif verb == "copy":
        _check_copy(argument, number)
    else:
        try:
            model.check_environment(argument)
        except errors.ClocheError as problem:
            raise invalid(f"step {number}: {problem.message}") from None
    return Step(verb, argument)


def _check_copy(argument: dict[str, str], number: int) -> None:
    source, target = argument["from"], argument["to"]
    if not source or source.startswith("/") or ".." in source.split("/") or "\0" in source:
        raise invalid(
            f"step {number}: copy from {source[:100]!r} is not a path below the recipe's directory",
            hint="put what is copied beside the recipe",
        )
    if not target.startswith("/") or ".." in target.split("/") or "\0" in target or len(target) > 1000:
        raise invalid(f"step {number}: copy to {target[:100]!r} is not an absolute path without '..'")


def _loaded(text: str) -> Any:
    if len(text) > _MAX_TEXT:
        raise invalid("it is larger than 64 KiB")
    try:
        return msgspec.yaml.decode(text)
    except msgspec.DecodeError as problem:
        raise invalid(f"it is not YAML: {problem}") from None
    except RecursionError:
        raise invalid("it is nested too deeply") from None


def _bound(data: Any) -> None:
    """YAML's aliases can make a few lines mean millions of values."""
    left = _MAX_VALUES
    waiting = [data]
    while waiting:
        value = waiting.pop()
        left -= 1
        if left < 0:
            raise invalid(f"it has more than {_MAX_VALUES} values")
        if isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value


def _flat(argument: Any) -> list[str]:
    if isinstance(argument, dict):
        return [f"{name}={value}" for name, value in argument.items()]
    return list(argument)


def invalid(why: str, hint: str = "see docs/guides/images.md") -> errors.ClocheError:
    return errors.error("recipe_invalid", f"the recipe cannot be used: {why}", hint=hint)
