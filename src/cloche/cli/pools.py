"""`template`, `pool` and `claim`: what waits, and how to get one of it. Pools live in the keeper."""

import argparse
import os
import sys
from binascii import b2a_base64
from typing import Any

from cloche import errors
from cloche.cli import client, output, sandboxes, talk, thin

ACTS = {
    "template": {
        "create": "store a template from a YAML file, or replace one",
        "list": "the templates",
        "info": "one template, as it is stored",
        "delete": "forget a template",
    },
    "pool": {
        "create": "keep sandboxes of a template warm",
        "list": "the pools",
        "info": "one pool: members, hits, how long claims take",
        "scale": "another size from now on",
        "delete": "end a pool and what waits in it",
    },
}
_UPDATES = ("OnReplenish", "Recreate", "Rolling")


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    if verb == "claim":
        _claim_flags(parser)
        return
    add = parser.add_argument
    add("act", metavar="ACT", choices=tuple(ACTS[verb]), help=", ".join(ACTS[verb]))
    if verb == "template":
        add(
            "name",
            metavar="NAME",
            nargs="?",
            help="create: the YAML file, or - for standard input; else its name",
        )
        add("--if-version", metavar="V", help="create: replace this version only")
        return
    add("name", metavar="NAME", nargs="?", help="the pool's name; create: default is its template's")
    add("count", metavar="N", nargs="?", help="scale: the size")
    add("--template", metavar="T", help="create: of this template (default: the one of the pool's name)")
    add("--size", metavar="N", help="create: unclaimed ready sandboxes wanted (default: 1)")
    add("--min", metavar="N", help="create: autoscaling keeps at least so many (default: 0)")
    add("--max", metavar="N", help="create: let the size follow the rate of claims, up to this")
    add("--preset", metavar="AGENT", help="create: sizes that suit claude-code, codex or gemini")
    add("--update", metavar="HOW", choices=_UPDATES, help=f"create: on a new version: {', '.join(_UPDATES)}")
    add("--max-surge", metavar="N", help="create: Rolling may have so many more (default: 1)")
    add("--max-unavailable", metavar="N", help="create: Rolling may have so many fewer ready (default: 0)")
    add("--refill-per-s", metavar="X", help="create: at most so many creations a second")
    add("--scale-to-zero-after", metavar="S", help="create: keep none after so long without a claim")
    add("--if-generation", metavar="N", help="create, scale: change this generation only")
    add("--wait", metavar="S", help="create, scale: wait so long for it to be full")


def _claim_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("pool", metavar="NAME", nargs="?", help="a pool, else a template")
    add("--list", action="store_true", help="the claims, instead of making one")
    add(
        "--name",
        metavar="NAME",
        help="makes the claim idempotent: the same name and body is the same sandbox",
    )
    add("--env", metavar="K[=V]", action="append", default=[], help="a variable for every command")
    add(
        "--file",
        metavar="PATH=LOCAL",
        action="append",
        default=[],
        help="a file inside, from one of yours; - is stdin",
    )
    add("--allow", metavar="RULE", action="append", default=[], help="a host it may reach, as in run --allow")
    add("--deny", metavar="RULE", action="append", default=[], help="a host it may not reach")
    add("--secret", metavar="NAME", action="append", default=[], help="a stored secret to use")
    add("--volume", metavar="PATH=NAME[:ro]", action="append", default=[], help="a volume at a path inside")
    add("--label", metavar="K=V", action="append", default=[], help="a label to find it by")
    add(
        "--require",
        metavar="K=V",
        action="append",
        default=[],
        help="a label that a member must have to serve",
    )
    add("--memory", metavar="MIB", help="another limit of memory than the template's")
    add("--cpus", metavar="N", help="another limit of processors")
    add("--pids", metavar="N", help="another limit of processes")
    add("--timeout", metavar="S", help="seconds it lives, or `none` (default: 300)")
    add("--idle-timeout", metavar="S", help="seconds without use after which it ends")
    add("--wait", metavar="S", help="seconds to wait for one (default: 10)")
    add("--ttl-after-finished", metavar="S", help="forget the claim so long after its sandbox ended")
    add("--retain", action="store_true", help="keep the claim when its time is up, without its sandbox")


def execute(verb: str, chosen: argparse.Namespace) -> int:
    if verb == "claim":
        return _claim(chosen)
    if (chosen.act == "list") != (chosen.name is None):
        said = "takes no name" if chosen.act == "list" else "needs a name"
        raise errors.error("argument_invalid", f"`cloche {verb} {chosen.act}` {said}")
    # Pools live in the keeper; a template is a row in the state, which any engine reads.
    reach = client.reach_keeper if verb == "pool" else client.reach
    prepared = globals()[f"_{verb}_{chosen.act}"]
    with reach() as server:
        code: int = prepared(server, chosen)
        return code


def _tell(chosen: argparse.Namespace, data: Any, text: str = "") -> int:
    if chosen.json:
        output.as_json(data)
    elif text:
        print(text, flush=True)
    return 0


# ── templates ──────────────────────────────────────────────────────────────────────────────────────


def _template_create(server: client.Client, chosen: argparse.Namespace) -> int:
    import msgspec

    from cloche.compat import kubernetes

    found = (
        kubernetes.read_template(sys.stdin.read(), "standard input")
        if chosen.name == "-"
        else kubernetes.load_template(chosen.name)
    )
    info = server.call(
        "put_template",
        spec=msgspec.to_builtins(found.spec),
        if_version=chosen.if_version,
        warnings=list(found.warnings),
    )
    for words in found.warnings:
        talk.warning(words)
    return _tell(chosen, info, f"{info['spec']['name']} {info['version']}")


def _template_list(server: client.Client, chosen: argparse.Namespace) -> int:
    found = server.call("templates")
    if chosen.json:
        output.as_json(found)
        return 0
    output.table(
        ("NAME", "VERSION", "IMAGE", "DESCRIPTION"),
        [(t["spec"]["name"], t["version"], t["spec"]["image"], t["spec"]["description"]) for t in found],
    )
    return 0


def _template_info(server: client.Client, chosen: argparse.Namespace) -> int:
    info = server.call("template", name=chosen.name)
    if chosen.json:
        output.as_json(info)
        return 0
    spec = info["spec"]
    said = [(field, value) for field, value in spec.items() if value not in (None, "", {}, [], ())]
    output.fields([("version", info["version"]), *said, *(("warning", words) for words in info["warnings"])])
    return 0


def _template_delete(server: client.Client, chosen: argparse.Namespace) -> int:
    server.call("delete_template", name=chosen.name)
    return _tell(chosen, {"deleted": chosen.name})


# ── pools ──────────────────────────────────────────────────────────────────────────────────────────


def _pool_create(server: client.Client, chosen: argparse.Namespace) -> int:
    import msgspec

    from cloche.sdk import pools

    said = {
        "size": _count(chosen.size, "--size"),
        "min": _count(chosen.min, "--min"),
        "max": _count(chosen.max, "--max"),
        "max_surge": _count(chosen.max_surge, "--max-surge"),
        "max_unavailable": _count(chosen.max_unavailable, "--max-unavailable"),
        "update": chosen.update,
        "preset": chosen.preset,
        "refill_per_s": None
        if chosen.refill_per_s is None
        else sandboxes.seconds(chosen.refill_per_s, "--refill-per-s"),
        "scale_to_zero_after_s": None
        if chosen.scale_to_zero_after is None
        else sandboxes.seconds(chosen.scale_to_zero_after, "--scale-to-zero-after"),
    }
    given: Any = {field: value for field, value in said.items() if value is not None}
    spec = pools.AsyncPool(chosen.template or chosen.name, name=chosen.name, stay=True, **given)._spec
    generation = _count(chosen.if_generation, "--if-generation")
    info = server.call("put_pool", spec=msgspec.to_builtins(spec), if_generation=generation)
    return _settled(server, chosen, info)


def _settled(server: client.Client, chosen: argparse.Namespace, info: dict[str, Any]) -> int:
    if chosen.wait is not None:
        wait = sandboxes.seconds(chosen.wait, "--wait")
        info = server.call("wait_pool", name=info["name"], timeout_s=wait or 1e6)
    return _tell(chosen, info, info["name"])


def _count(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    value = thin.number(text)
    if value is None or value != int(value):
        raise errors.error("limit_invalid", f"{flag} is {text!r}; it is a whole number")
    return int(value)


def _pool_list(server: client.Client, chosen: argparse.Namespace) -> int:
    found = server.call("pools")
    if chosen.json:
        output.as_json(found)
        return 0
    if not found:
        talk.say("no pools; `cloche pool create` makes one")
        return 0
    output.table(
        ("NAME", "TEMPLATE", "READY", "SIZE", "HITS", "MISSES", "P50 ms"),
        [
            (p["name"], p["spec"]["template"], p["ready"], p["size"], p["hits"], p["misses"], round(p["claim"]["p50_ms"], 1))
            for p in found
        ],
    )  # fmt: skip
    return 0


def _pool_info(server: client.Client, chosen: argparse.Namespace) -> int:
    info = server.call("pool", name=chosen.name)
    if chosen.json:
        output.as_json(info)
        return 0
    spec, times, asked = info["spec"], info["claim"], info["hits"] + info["misses"]
    bounds = f", autoscaled between {spec['min']} and {spec['max']}" if spec["max"] is not None else ""
    output.fields(
        [
            ("name", info["name"]), ("template", f"{spec['template']} {info['template_version']}"),
            ("size", f"{info['size']}{bounds}"), ("ready", str(info["ready"])), ("making", info["making"] or None),
            ("outdated", info["outdated"] or None), ("generation", info["generation"]),
            ("claims", f"{asked}, {info['hits']} warm" if asked else None),
            ("claim time", f"p50 {times['p50_ms']:.1f} ms, p99 {times['p99_ms']:.1f} ms" if times["count"] else None),
            *((c["type"], f"{c['status']} {c['reason']}: {c['message']}") for c in info["conditions"]),
            *(("member", member) for member in info["members"]),
        ]
    )  # fmt: skip
    return 0


def _pool_scale(server: client.Client, chosen: argparse.Namespace) -> int:
    size = _count(chosen.count, "the size")
    if size is None:
        raise errors.error("argument_invalid", "to what size?", hint=f"cloche pool scale {chosen.name} N")
    generation = _count(chosen.if_generation, "--if-generation")
    info = server.call("scale_pool", name=chosen.name, size=size, if_generation=generation)
    return _settled(server, chosen, info)


def _pool_delete(server: client.Client, chosen: argparse.Namespace) -> int:
    server.call("delete_pool", name=chosen.name)
    return _tell(chosen, {"deleted": chosen.name})


# ── claims ─────────────────────────────────────────────────────────────────────────────────────────


def _claim(chosen: argparse.Namespace) -> int:
    if chosen.list != (chosen.pool is None):
        raise errors.error(
            "argument_invalid", "claim what?", hint="cloche claim NAME, or cloche claim --list"
        )
    if chosen.list:
        return _claims(chosen)
    spec = _claim_spec(chosen)
    with client.reach_keeper() as server:
        info = server.call("claim", spec=spec)
    if info["cold_reason"]:
        talk.say(f"started cold: {info['cold_reason']}")
    return _tell(chosen, info, info["sandbox"])


def _claims(chosen: argparse.Namespace) -> int:
    with client.reach() as server:
        found = server.call("claims")
    if chosen.json:
        output.as_json(found)
        return 0
    if not found:
        talk.say("no claims; `cloche claim NAME` makes one")
        return 0
    output.table(
        ("NAME", "POOL", "SANDBOX", "WARM", "AGE", "STATE"),
        [
            (c["name"], c["spec"]["pool"], c["sandbox"], "yes" if c["warm"] else "no", output.ago(c["created_at"]),
             c["conditions"][0]["reason"] if c["conditions"] else "")
            for c in found
        ],
    )  # fmt: skip
    return 0


def _claim_spec(chosen: argparse.Namespace) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "pool": chosen.pool,
        "name": chosen.name,
        "env": dict(_variable(word) for word in chosen.env),
        "files": dict(_file(word) for word in chosen.file),
        "secrets": chosen.secret,
        "labels": dict(_pair(word, "--label") for word in chosen.label),
        "volumes": dict(_volume(word) for word in chosen.volume),
        "stay": True,
    }
    if chosen.allow or chosen.deny:
        spec["policy"] = {"network": {"mode": "rules", "allow": chosen.allow, "deny": chosen.deny}}
    if chosen.require:
        spec["requirements"] = {"labels": dict(_pair(word, "--require") for word in chosen.require)}
    limits = {"memory_mib": _count(chosen.memory, "--memory"), "pids": _count(chosen.pids, "--pids")}
    limits["cpus"] = None if chosen.cpus is None else sandboxes.seconds(chosen.cpus, "--cpus")  # type: ignore[assignment]
    spec["resources"] = {field: value for field, value in limits.items() if value is not None}
    times = {
        "timeout_s": chosen.timeout, "idle_timeout_s": chosen.idle_timeout, "wait_s": chosen.wait,
    }  # fmt: skip
    for field, text in times.items():
        if text is not None:
            spec[field] = sandboxes.seconds(text, "--" + field.removesuffix("_s").replace("_", "-"))
    if chosen.ttl_after_finished is not None:
        spec["ttl_seconds_after_finished"] = _count(chosen.ttl_after_finished, "--ttl-after-finished")
    if chosen.retain:
        spec["shutdown_policy"] = "Retain"
    return spec


def _pair(text: str, flag: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise errors.error("argument_invalid", f"{flag} {text!r} is not of the form K=V")
    return key, value


def _variable(text: str) -> tuple[str, str]:
    """`K=V`, or `K` for the caller's own value."""
    key, equals, value = text.partition("=")
    if equals:
        return key, value
    if key not in os.environ:
        raise errors.error(
            "environment_invalid", f"--env {key}: you have no variable {key}", hint=f"--env {key}=VALUE"
        )
    return key, os.environ[key]


def _file(text: str) -> tuple[str, str]:
    path, local = _pair(text, "--file")
    if local == "-":
        data = sys.stdin.buffer.read()
    else:
        with open(local, "rb") as file:
            data = file.read()
    return path, b2a_base64(data, newline=False).decode()


def _volume(text: str) -> tuple[str, dict[str, Any]]:
    path, name = _pair(text, "--volume")
    return path, {"volume": name.removesuffix(":ro"), "read_only": name.endswith(":ro")}
