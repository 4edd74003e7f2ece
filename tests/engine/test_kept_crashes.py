"""A process that dies before or after any move of kept files leaves rows and files that belong together.

The points are found in the source. Each is died at in a process of its own that makes and removes one of everything; the
next engine sweeps, and then every row has its files, every file its row, and what is there can be used.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cloche import crash, engine, model, wiring
from cloche.sdk import portal

SOURCES = [Path(engine.__file__).parent / f"{name}.py" for name in ("snapshots", "archiving", "volumes")]
POINTS = sorted(
    {point for path in SOURCES for point in re.findall(r'crash\.point\("([\w:]+)"\)', path.read_text())}
)

LIFE = """
import asyncio, os, sys
from cloche import crash, model, stock, wiring

async def main():
    engine = wiring.make_engine(os.environ)
    box = (await engine.create(model.SandboxSpec(timeout_s=None, name="box"))).id
    await engine.exec(box, model.ExecRequest(command="echo kept > a"))
    crash.arm(sys.argv[1])
    await engine.snapshot(box, "stays")
    await engine.snapshot(box, "goes")
    await engine.delete_snapshot("goes")
    await engine.create_volume(stock.VolumeSpec(name="stays", size_mib=16))
    await engine.create_volume(stock.VolumeSpec(name="goes", size_mib=16))
    await engine.delete_volume("goes")
    await engine.suspend(box, "archive")
    await engine.resume(box)
    print("never")

asyncio.run(main())
"""


def test_every_point_is_tried():
    assert crash.point.__module__ == "cloche.crash"
    assert len(POINTS) == 12


@pytest.mark.parametrize("point", POINTS)
def test_rows_and_files_belong_together(cloche_home, point):
    home = cloche_home / f"crash-{os.urandom(3).hex()}"
    environment = {**os.environ, "CLOCHE_HOME": str(home), "CLOCHE_KEEPER": "off"}
    done = subprocess.run(
        [sys.executable, "-c", LIFE, point], env=environment, capture_output=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]

    async def look():
        own = wiring.make_engine(environment)
        try:
            await own.sweep()
            listed = await own.list()
            found = {
                "snapshots": {info.id for info in await own.snapshots()},
                "volumes": {info.spec.name for info in await own.volumes()},
                "sandboxes": {info.id for info in listed if info.phase == "archived"},
            }
            for info in await own.snapshots():
                made = (await own.create(model.SandboxSpec(snapshot=info.id))).id
                result = await own.exec(made, model.ExecRequest(command="cat a"))
                assert result.stdout == "kept\n"
            for name in found["volumes"]:
                volumes = {"/data": model.Mount(volume=name)}
                made = (await own.create(model.SandboxSpec(volumes=volumes))).id
                assert (await own.exec(made, model.ExecRequest(command="touch /data/x"))).ok
            for box in found["sandboxes"]:
                assert (await own.exec(box, model.ExecRequest(command="cat a"))).stdout == "kept\n"
            return found, listed
        finally:
            await own.aclose()

    found, _ = portal.run(look())
    for kind in ("snapshots", "volumes"):
        place = home / kind
        assert (set(os.listdir(place)) if place.is_dir() else set()) == found[kind], kind
