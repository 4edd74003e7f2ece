"""Images made by hand: layers as tar streams, OCI layouts as files, and a root small enough to make in a test."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

PROGRAMS = (
    "sh",
    "cat",
    "ls",
    "id",
    "env",
    "mkdir",
    "rm",
    "mv",
    "ln",
    "touch",
    "chmod",
    "stat",
    "sleep",
    "true",
    "cp",
    "readlink",
)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
Item = tuple[str, Any]


def entry(name: str, data: bytes | None = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A header as it is said, however wrong it is, and its content. `data=None` is a directory."""
    info = tarfile.TarInfo(name)
    info.mode = 0o755 if data is None else 0o644
    info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
    info.size = len(data or b"")
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data or b""


def link(name: str, target: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, b"", type=tarfile.SYMTYPE, linkname=target, **fields)


def hard_link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, b"", type=tarfile.LNKTYPE, linkname=target)


def layer(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return made.getvalue()


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def write_layout(
    directory: Path, *layers: bytes, config: dict[str, Any] | None = None, tag: str = "latest", compress: bool = True,
    architecture: str | None = None, change: Any = None,
) -> str:  # fmt: skip
    """An OCI layout with one image of these (uncompressed) layers; the manifest's digest."""
    blobs = directory / "blobs/sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def put(data: bytes) -> dict[str, Any]:
        (blobs / digest(data).removeprefix("sha256:")).write_bytes(data)
        return {"digest": digest(data), "size": len(data)}

    packed = [gzip.compress(data, 1, mtime=0) if compress else data for data in layers]
    kind = "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if compress else "")
    facts = {
        "architecture": architecture or _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": config or {},
        "rootfs": {"type": "layers", "diff_ids": [digest(data) for data in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            **put(json.dumps(facts).encode()),
        },
        "layers": [{"mediaType": kind, **put(data)} for data in packed],
    }
    if change is not None:
        change(manifest)
    found = put(json.dumps(manifest).encode())
    index = {
        "schemaVersion": 2,
        "manifests": [
            {
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "annotations": {"org.opencontainers.image.ref.name": tag},
                **found,
            }
        ],
    }
    (directory / "index.json").write_text(json.dumps(index))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return str(found["digest"])


@cache
def small_root(*more: str) -> bytes:
    """A layer with a shell, a few programs and what they load: this machine's, but nothing else of it."""
    paths: dict[str, str] = {}
    for name in (*PROGRAMS, *more):
        program = subprocess.run(
            ["/bin/sh", "-c", f"command -v -p {name} || command -v /bin/{name}"],
            capture_output=True,
            text=True,
        ).stdout.strip()
        program = program if program.startswith("/") else f"/bin/{name}"
        paths[f"bin/{name}"] = os.path.realpath(program)
        loaded = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
        for library in re.findall(r"(/\S+) \(0x", loaded):
            paths[library.lstrip("/")] = os.path.realpath(library)
    entries = [entry("etc", None), entry("bin", None), entry("etc/os-release", b"ID=small\n")]
    entries += [entry(name, Path(path).read_bytes(), mode=0o755) for name, path in sorted(paths.items())]
    return layer(*entries)
