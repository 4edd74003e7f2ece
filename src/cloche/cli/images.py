"""`image ACT`: what sandboxes start from."""

import argparse
import os
from typing import Any

from cloche import errors, model
from cloche.cli import client, output, talk

ACTS = {
    "list": "the images that are here",
    "pull": "fetch what a reference means now",
    "build": "make the image of a recipe (a YAML file)",
    "inspect": "one image",
    "remove": "remove images",
    "gc": "remove what is half-made, and what is beyond the size limit",
}
_MOST = 1 << 20


def flags(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("act", metavar="ACT", choices=tuple(ACTS), help=", ".join(ACTS))
    parser.add_argument("references", metavar="REF", nargs="*", help="an image; for build, the recipe's file")
    parser.add_argument(
        "--directory", metavar="DIR", help="build: where copies come from (default: the recipe's directory)"
    )


def execute(verb: str, chosen: argparse.Namespace) -> int:
    count = len(chosen.references)
    if chosen.act in ("list", "gc") and count:
        raise errors.error("argument_invalid", f"`cloche image {chosen.act}` takes no image")
    if chosen.act in ("pull", "build", "inspect", "remove") and (
        not count or (count > 1 and chosen.act != "remove")
    ):
        raise errors.error("argument_invalid", f"`cloche image {chosen.act}` takes one image")
    if chosen.directory is not None and chosen.act != "build":
        raise errors.error("argument_invalid", "--directory is for `cloche image build`")
    with client.reach() as server:
        code: int = globals()[f"_{chosen.act}"](server, chosen)
        return code


def _list(server: client.Client, chosen: argparse.Namespace) -> int:
    found = server.call("images")
    if chosen.json:
        output.as_json(found)
    elif not found:
        talk.say("no images; `cloche image pull` fetches one")
    else:
        output.table(
            ("REFERENCE", "DIGEST", "KIND", "MIB", "USED"),
            [(i["reference"], _short(i["digest"]), i["kind"], _mib(i), _used(i)) for i in found],
        )
    return 0


def _pull(server: client.Client, chosen: argparse.Namespace) -> int:
    return _made(chosen, server.stream("pull_image", reference=model.absolute_image(chosen.references[0])))


def _build(server: client.Client, chosen: argparse.Namespace) -> int:
    path = chosen.references[0]
    with open(path, "rb") as file:
        raw = file.read(_MOST)
    directory = os.path.abspath(chosen.directory or os.path.dirname(path) or ".")
    try:
        recipe = raw.decode()
    except UnicodeDecodeError:
        raise errors.error(
            "recipe_invalid", f"{path!r} is not UTF-8", hint="a recipe is a YAML file"
        ) from None
    return _made(chosen, server.stream("build_image", recipe=recipe, directory=directory))


def _made(chosen: argparse.Namespace, stream: Any) -> int:
    """What happens goes to stderr as it happens, what was made to stdout."""
    for said in stream:
        if said["kind"] == "step":
            talk.say(
                f"step {said['step']} of {said['steps']}: {said['text']}"
                + (" (cached)" if said["cached"] else "")
            )
        elif said["kind"] == "log":
            talk.say(said["text"])
        elif chosen.json:
            output.as_json(said["image"])
        else:
            print(said["image"]["digest"], flush=True)
    return 0


def _inspect(server: client.Client, chosen: argparse.Namespace) -> int:
    found = server.call("image", reference=model.absolute_image(chosen.references[0]))
    if chosen.json:
        output.as_json(found)
        return 0
    output.fields(
        [
            ("reference", found["reference"]), ("digest", found["digest"]), ("kind", found["kind"]),
            ("size", f"{_mib(found)} MiB"), ("made", output.clock(found["created_at"])), ("used", _used(found)),
            ("env", [f"{name}={value}" for name, value in found["env"].items()]), ("user", found["user"]),
            ("working dir", found["working_dir"]), ("entrypoint", found["entrypoint"]), ("cmd", found["cmd"]),
        ]
    )  # fmt: skip
    return 0


def _remove(server: client.Client, chosen: argparse.Namespace) -> int:
    gone = [server.call("remove_image", reference=model.absolute_image(name)) for name in chosen.references]
    return _went(chosen, gone)


def _gc(server: client.Client, chosen: argparse.Namespace) -> int:
    gone = server.call("gc_images")
    if not gone and not chosen.json:
        talk.say("nothing had to go")
    return _went(chosen, gone)


def _went(chosen: argparse.Namespace, gone: list[dict[str, Any]]) -> int:
    if chosen.json:
        output.as_json(gone)
    else:
        for image in gone:
            print(talk.clean(image["digest"]), flush=True)
    return 0


def _short(digest: str) -> str:
    return digest[:19]


def _mib(image: dict[str, Any]) -> float:
    return round(int(image["size_bytes"]) / (1 << 20), 1)


def _used(image: dict[str, Any]) -> str:
    return "now" if image["in_use"] else f"{output.ago(image['last_used_at'])} ago"
