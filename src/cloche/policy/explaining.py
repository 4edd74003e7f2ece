"""Which rule decides about something, and where it stands.

The questions are those that enforcement asks, of the same functions: `variable` and `secret` here, `rules.decide` for hosts,
the workspace's own plan for paths and the filter's own table for system calls, which stand on higher floors and are handed in.
So an explanation cannot differ from what happens.

Where a rule stands is found by asking the question again of every shorter stack of layers: the layer at which the answer
became what it is, and stayed, is the one that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from cloche import model
from cloche.policy import globs, layers, nouns, paths

if TYPE_CHECKING:  # hosts are asked about by few; workspaces import this file
    from cloche.policy import rules

Ask = Callable[[nouns.Merged], "Explanation"]


class Explanation(model.Noun, frozen=True, kw_only=True):
    """An answer. `field` is the list or word of the policy that holds the rule; empty for what no policy decides."""

    verdict: Literal["allow", "deny"]
    rule: str
    field: str = ""
    source: str = ""
    """`FILE:LINE`, a profile or mode, `arguments`, or `built-in`."""
    reason: str = ""


def explain(stack: Sequence[layers.Layer], ask: Ask) -> Explanation:
    """The answer for a whole stack, with the place of the rule that decides."""
    answers = [ask(layers.resolve(stack[:count])) for count in range(1, len(stack) + 1)]
    final = answers[-1]
    if not final.field:
        return _replace(final, source=final.source or "built-in")
    first = len(answers) - 1
    while first > 0 and _same(answers[first - 1], final):
        first -= 1
    return _replace(final, source=_place(stack[: first + 1], final))


def _same(one: Explanation, other: Explanation) -> bool:
    return (one.verdict, one.rule, one.field) == (other.verdict, other.rule, other.field)


def _place(stack: Sequence[layers.Layer], found: Explanation) -> str:
    """Where the deciding layer names the field; a rule made of two layers is named with the upper one."""
    group, _, field = found.field.partition(".")
    for layer in reversed(stack):
        if field in layer.fields.get(group, {}):
            where: str = layer.where((group, field), found.rule)
            return where
    return stack[-1].name


def _replace(found: Explanation, **changes: str) -> Explanation:
    import msgspec

    return msgspec.structs.replace(found, **changes)


# ── the questions ─────────────────────────────────────────────────


def variable(merged: nouns.Merged, name: str) -> Explanation:
    """Whether a caller may pass a variable of this name in."""
    denied = globs.matching(merged.environment.deny, name)
    if denied is not None:
        return Explanation(verdict="deny", rule=denied, field="environment.deny")
    allowed = globs.matching(merged.environment.allow, name)
    if allowed is not None:
        return Explanation(verdict="allow", rule=allowed, field="environment.allow")
    return Explanation(verdict="deny", rule="", field="environment.allow", reason="no entry has this name")


def secret(merged: nouns.Merged, name: str) -> Explanation:
    """Whether a stored credential of this name may be bound."""
    allowed = globs.matching(merged.secrets.allow, name)
    if allowed is not None:
        return Explanation(verdict="allow", rule=allowed, field="secrets.allow")
    return Explanation(verdict="deny", rule="", field="secrets.allow", reason="no entry has this name")


def path(merged: nouns.Merged, relative: str, *, write: bool, root: str = "") -> Explanation:
    """Whether a path of a workspace may be read or written, by its spelling alone: what links lead to and what is there
    only a workspace can say (`workspaces.explain`)."""
    for field, entries in (("files.deny", merged.files.deny), ("files.protected", merged.files.protected)):
        if field == "files.protected" and not write:
            break
        found = paths.covering(
            [made for made in (paths.parse(entry, root) for entry in entries) if made], relative
        )
        if found is not None:
            return Explanation(verdict="deny", rule=found.entry, field=field)
    return Explanation(verdict="allow", rule="workspace", reason="no entry covers it")


def rule_set(network: nouns.Network) -> rules.RuleSet:
    from cloche.policy import rules

    return rules.RuleSet.make(
        network.mode, allow=network.allow, deny=network.deny, ask=network.ask, resolve=network.resolve
    )


def host(merged: nouns.Merged, request: rules.Request) -> Explanation:
    """Whether a sandbox may speak to a host, as the proxy decides it; the address that a name leads to is judged later."""
    from cloche.policy import rules

    decision = rules.decide(rule_set(merged.network), request)
    field = decision.source.removeprefix("policy.") if decision.source.startswith("policy.") else ""
    if field == "network":
        field = "network.mode"
    rule = (
        str(decision.rule)
        if decision.rule is not None
        else merged.network.mode
        if field == "network.mode"
        else ""
    )
    return Explanation(
        verdict=decision.verdict, rule=rule, field=field, reason=decision.hint or decision.reason
    )


def system_call(merged: nouns.Merged, name: str, explain_call: Callable[[str, str], str]) -> Explanation:
    """What the filter does with a system call; `explain_call` is `linux.seccomp.explain`."""
    if name in merged.syscalls.deny:
        return Explanation(verdict="deny", rule=name, field="syscalls.deny", reason="refused with EPERM")
    answer = explain_call(merged.syscalls.profile, name)
    how, _, code = answer.partition(":")
    words = {
        "allow": "",
        "check": f"its arguments decide; refused with {code}",
        "refuse": f"refused with {code}",
    }
    return Explanation(
        verdict="deny" if how == "refuse" else "allow",
        rule=merged.syscalls.profile,
        field="syscalls.profile",
        reason=words[how],
    )


def question(
    kind: str, target: str, *, write: bool = False, method: str | None = None, below: str | None = None
) -> Ask:
    """A question in a caller's words. Paths are judged by their spelling, system calls not at all (see `system_call`)."""
    if kind == "env":
        return lambda merged: variable(merged, target)
    if kind == "secret":
        return lambda merged: secret(merged, target)
    if kind == "path":
        return lambda merged: path(merged, target, write=write)
    asked = request_to(target, method=method, below=below)
    return lambda merged: host(merged, asked)


def request_to(target: str, *, method: str | None = None, below: str | None = None) -> rules.Request:
    """What somebody inside wants who names HOST[:PORT], and for plain HTTP a method or the path below it."""
    from cloche.policy import names, rules

    try:
        name, port = names.split_authority(target, 443)
    except names.BadHost:
        name, port = target, 443  # `decide` says what is wrong with it
    plain = method is not None or below is not None
    protocol: rules.Protocol = "http" if plain else "tls" if port == 443 else "tcp"
    return rules.Request(
        name, port, protocol, (method or "GET") if plain else None, below or ("/" if plain else None)
    )
