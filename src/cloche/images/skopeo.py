"""Fetching: registries, credentials and archive formats are skopeo's; what it brings is checked here.

It copies into its `dir:` form, which keeps the registry's manifest byte for byte, so that the digest we record is the
registry's. Its own words on stderr are the only account of a failure, so they are sorted into codes here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import re
import resource
import shutil
import signal
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from cloche import errors, model, settings
from cloche.images import layers, references

_PASSED_ON = (
    "PATH", "HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "HTTP_PROXY", "HTTPS_PROXY",
    "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
_POLICIES = ("/etc/containers/policy.json", "~/.config/containers/policy.json")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_MOST_MANIFEST = 4 << 20
_MOST_LAYERS = 128
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
# The first that matches. Words of skopeo 1.9 to 1.20 and of the registries behind it.
_MEANINGS = (
    ("image_auth_required", r"unauthorized|authentication required|requested access to the resource is denied|403 \(Forbidden\)|invalid username/password"),
    ("image_not_found", r"manifest unknown|name unknown|repository name not known|not found|no such file|no image found|no descriptor found|choose an image|Tag .* not found"),
    ("image_registry_failed", r"server gave HTTP response to HTTPS client|x509|tls:|connection refused|no such host|i/o timeout|network is unreachable|EOF|pinging container registry|status code 5|received unexpected HTTP status|toomanyrequests"),
    ("image_digest_mismatch", r"does not match|mismatch"),
    ("disk_full", r"no space left on device"),
    ("image_too_large", r"file too large"),
)  # fmt: skip


class Fetched(NamedTuple):
    """An image as files: what its maker says of it, and its layers, lowest first."""

    digest: str
    config: dict[str, Any]
    blobs: tuple[layers.Blob, ...]


async def fetch(
    reference: references.Reference,
    directory: str,
    chosen: settings.Images,
    environment: Mapping[str, str],
    progress: Callable[[str], None],
) -> Fetched:
    """Copy an image into the empty `directory`, and check what came."""
    if shutil.which("skopeo", path=environment.get("PATH")) is None:
        raise errors.error(
            "image_tool_missing", f"{reference.text} is fetched with skopeo, and there is no `skopeo` here",
            hint="apt-get install skopeo (or your system's package of that name)", tool="skopeo",
        )  # fmt: skip
    progress(f"fetching {reference.text}")
    await _copy(reference, directory, chosen, environment, progress)
    return await asyncio.to_thread(read, directory)


async def _copy(
    reference: references.Reference,
    directory: str,
    chosen: settings.Images,
    environment: Mapping[str, str],
    progress: Callable[[str], None],
) -> None:
    child = await asyncio.create_subprocess_exec(
        *_command(reference, directory, chosen, environment),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={name: environment[name] for name in _PASSED_ON if name in environment} | {"TMPDIR": directory},
    )  # fmt: skip
    # One blob larger than all that may be unpacked is refused while it comes, not when the disk is full.
    limit = chosen.max_mib << 20
    with suppress(ProcessLookupError):
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (limit, limit))
    said: deque[str] = deque(maxlen=20)
    assert child.stdout is not None
    try:
        async for line in child.stdout:
            text = line.decode("utf-8", "replace").strip()
            said.append(text)
            if text and "level=" not in text:
                progress(text)
        code = await child.wait()
        if code != 0:
            raise _failure(reference, "file too large" if code == -signal.SIGXFSZ else "\n".join(said))
    except ValueError:  # a line longer than the reader's limit
        raise _failure(reference, "skopeo's output cannot be read") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def _command(
    reference: references.Reference, directory: str, chosen: settings.Images, environment: Mapping[str, str]
) -> list[str]:
    words = ["skopeo", "--tmpdir", directory]
    home = environment.get("HOME", "/")
    if not any(os.path.exists(path.replace("~", home, 1)) for path in _POLICIES):
        words.append("--insecure-policy")  # who wrote no policy of signatures has none
    words.append("copy")
    if reference.kind == "registry":
        insecure = reference.registry in chosen.registries_insecure
        words.append(f"--src-tls-verify={'false' if insecure else 'true'}")
        if chosen.auth_file is not None:
            words += ["--authfile", os.path.expanduser(chosen.auth_file)]
    return [*words, reference.text, f"dir:{directory}"]


def _failure(reference: references.Reference, said: str) -> errors.ClocheError:
    default = "image_registry_failed" if reference.kind == "registry" else "image_invalid"
    code = next((code for code, words in _MEANINGS if re.search(words, said, re.IGNORECASE)), default)
    if code == "image_registry_failed":
        code = default  # words like these of a file are about the file
    if code == "image_not_found" and reference.kind != "registry" and "no such file" in said:
        code = "image_invalid"  # it is there, but its parts are not
    return errors.error(
        code, f"{reference.text} cannot be fetched: {_reason(said)}", hint=_hint(code, reference, said),
        reference=reference.text,
    )  # fmt: skip


def _reason(said: str) -> str:
    """The last thing that skopeo complains of, without its log's dressing."""
    found = re.findall(r'msg="((?:[^"\\]|\\.)*)"', said)
    text = found[-1].replace('\\"', '"') if found else said.strip().rpartition("\n")[2]
    return text[:500] or "skopeo did not say why"


def _hint(code: str, reference: references.Reference, said: str) -> str:
    if code == "image_auth_required":
        return (
            f"log in (`skopeo login {reference.registry}`), or name a file of credentials in images.auth_file"
        )
    if code == "image_registry_failed" and ("HTTPS client" in said or "x509" in said or "tls:" in said):
        return f"if you trust the network to it, add {reference.registry!r} to images.registries_insecure"
    return {
        "image_not_found": "check name and tag; a private image may need credentials",
        "image_registry_failed": "is the registry reachable from here?",
        "image_invalid": "is it an image, of the format that its scheme says?",
        "image_digest_mismatch": "it was damaged or changed on its way: try again",
        "image_too_large": "raise images.max_mib if you trust its maker",
        "disk_full": "free space below CLOCHE_HOME, or run `cloche image gc`",
    }[code]


def read(directory: str) -> Fetched:
    """What skopeo left in a directory. Nothing in it is believed before its digest was checked."""
    raw = _read(f"{directory}/manifest.json")
    manifest = _decode(raw, "its manifest")
    config, descriptors = manifest.get("config"), manifest.get("layers")
    if not isinstance(config, dict) or not isinstance(descriptors, list):
        raise _not_an_image("its manifest has no config or no layers")
    if config.get("mediaType") not in _CONFIGS:
        raise _not_an_image(f"its kind is {str(config.get('mediaType'))[:100]!r}")
    if len(descriptors) > _MOST_LAYERS:
        raise _not_an_image(f"it has {len(descriptors)} layers; at most {_MOST_LAYERS} are taken")
    facts = _config(directory, config)
    rootfs = facts.get("rootfs")
    ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(ids, list) or len(ids) != len(descriptors):
        raise _not_an_image("its config does not name the layers that its manifest has")
    blobs = []
    for descriptor, diff_id in zip(descriptors, ids, strict=True):
        digest = _digest(descriptor)
        blobs.append(layers.Blob(f"{directory}/{digest.partition(':')[2]}", digest, str(diff_id)))
    return Fetched(f"sha256:{hashlib.sha256(raw).hexdigest()}", facts, tuple(blobs))


def _config(directory: str, descriptor: dict[str, Any]) -> dict[str, Any]:
    digest = _digest(descriptor)
    raw = _read(f"{directory}/{digest.partition(':')[2]}")
    if hashlib.new(digest.partition(":")[0], raw).hexdigest() != digest.partition(":")[2]:
        raise errors.error("image_digest_mismatch", f"the config of the image is not {digest}")
    facts = _decode(raw, "its config")
    machine = platform.machine()
    ours = ("linux", _ARCHITECTURES.get(machine, machine))
    theirs = (facts.get("os", "linux"), facts.get("architecture", ours[1]))
    if theirs != ours:
        raise _not_an_image(f"it is for {theirs[0]}/{theirs[1]}, and this machine is {'/'.join(ours)}")
    return facts


def facts_of(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `model.ImageInfo` that an image's config holds."""
    inner = config.get("config")
    inner = inner if isinstance(inner, dict) else {}
    env = dict(pair.partition("=")[::2] for pair in _texts(inner.get("Env")))
    try:
        model.check_environment(env)
    except errors.ClocheError as problem:
        raise _not_an_image(problem.message) from None
    return {
        "env": env, "user": str(inner.get("User") or ""), "working_dir": str(inner.get("WorkingDir") or ""),
        "entrypoint": tuple(_texts(inner.get("Entrypoint"))), "cmd": tuple(_texts(inner.get("Cmd"))),
    }  # fmt: skip


def _texts(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _digest(descriptor: object) -> str:
    digest = descriptor.get("digest") if isinstance(descriptor, dict) else None
    # SAFETY: it becomes a file's name. tests/images/test_sources.py::test_a_digest_that_is_a_path
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise _not_an_image("its manifest names something by a digest that is none")
    return digest


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            raw = file.read(_MOST_MANIFEST + 1)
    except OSError:
        raise _not_an_image("its manifest or config is missing") from None
    if len(raw) > _MOST_MANIFEST:
        raise _not_an_image("its manifest or config is larger than 4 MiB")
    return raw


def _decode(raw: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _not_an_image(f"{what} is not JSON")
    return found


def _not_an_image(why: str) -> errors.ClocheError:
    return errors.error("image_invalid", f"it is not an image that can be used: {why}")
