"""What a user may call an image, parsed once. The forms:

host                                     this machine's own programs (the default)
dir:/path                                a root directory
oci:/path[:tag]                          an OCI layout
oci-archive:/path.tar[:tag]  docker-archive:/path.tar[:tag]
docker://registry/name[:tag|@sha256:…]   or without the scheme, if the first part is plainly a host
recipe:<hex>   sha256:<hex>              an image that was made or pulled before
"""

from __future__ import annotations

import os
import re
from typing import Literal, NamedTuple

from cloche import errors

Kind = Literal["host", "directory", "layout", "archive", "registry", "stored"]
_FILES: dict[str, Kind] = {"oci": "layout", "oci-archive": "archive", "docker-archive": "archive"}
_HEX = re.compile(r"[0-9a-f]{64}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_NAME = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::\d{1,5})?")


class Reference(NamedTuple):
    """`text` is the one spelling; `transport` is skopeo's word where it has one."""

    kind: Kind
    text: str
    transport: str = ""
    path: str = ""
    registry: str = ""
    digest: str = ""
    """`sha256:<hex>` where the reference names its content."""


def parse(text: str) -> Reference:
    """The reference that `text` is; `image_reference_invalid` says what it lacks."""
    if not text or len(text) > 4096 or not text.isprintable() or " " in text:
        raise invalid(text, "it is empty, too long, or holds spaces or unprintable characters")
    scheme, colon, rest = text.partition(":")
    if text == "host":
        return Reference("host", text)
    if scheme in ("recipe", "sha256") and colon:
        if not _HEX.fullmatch(rest):
            raise invalid(text, f"after '{scheme}:' come 64 hexadecimal digits")
        return Reference("stored", f"sha256:{rest}", digest=f"sha256:{rest}")
    if scheme == "dir" and colon:
        return Reference("directory", f"dir:{_absolute(text, rest)}", path=_absolute(text, rest))
    if scheme in _FILES and colon:
        path, tag = _tagged(rest)
        made = f"{scheme}:{_absolute(text, path)}" + (f":{tag}" if tag else "")
        return Reference(_FILES[scheme], made, transport=scheme, path=_absolute(text, path))
    if text.startswith("docker://"):
        return _registry(text, text.removeprefix("docker://"))
    host = text.partition("/")[0]
    if "/" in text and ("." in host or ":" in host or host == "localhost"):
        return _registry(text, text)
    raise invalid(text, "it names no registry, path or scheme")


def invalid(text: str, why: str) -> errors.ClocheError:
    return errors.error(
        "image_reference_invalid", f"{text[:200]!r} is not the name of an image: {why}",
        hint="use host, dir:/path, oci:/path[:tag], oci-archive:/file, docker-archive:/file, docker://registry/name[:tag] "
        "or recipe:<digest>",
    )  # fmt: skip


def _absolute(text: str, path: str) -> str:
    if not path.startswith("/") or ".." in path.split("/"):
        raise invalid(text, "its path is not absolute, or contains '..'")
    return os.path.normpath(path)


def _tagged(rest: str) -> tuple[str, str]:
    path, colon, tag = rest.rpartition(":")
    return (path, tag) if colon and "/" not in tag else (rest, "")


def _registry(text: str, rest: str) -> Reference:
    name, at, digest = rest.partition("@")
    registry, slash, path = name.partition("/")
    if not slash or not ("." in registry or ":" in registry or registry == "localhost"):
        raise invalid(
            text,
            "its first part is not a registry's host (for Docker's own: docker://docker.io/library/NAME)",
        )
    path, colon, tag = path.partition(":")
    if not _HOST.fullmatch(registry) or not _NAME.fullmatch(path) or (colon and not _TAG.fullmatch(tag)):
        raise invalid(
            text, "a name is lower-case letters, digits and single separators, a tag at most 128 characters"
        )
    if at and not (digest.startswith("sha256:") and _HEX.fullmatch(digest.removeprefix("sha256:"))):
        raise invalid(text, "after '@' comes sha256: and 64 hexadecimal digits")
    if at and tag:
        raise invalid(text, "it has both a tag and a digest; the digest alone says all")
    suffix = f"@{digest}" if at else f":{tag or 'latest'}"
    return Reference(
        "registry",
        f"docker://{registry}/{path}{suffix}",
        transport="docker",
        registry=registry,
        digest=digest,
    )
