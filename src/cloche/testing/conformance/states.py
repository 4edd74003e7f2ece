"""What stays: snapshots, forks, archives, volumes. A driver without them refuses with `not_supported_by_driver`."""

from __future__ import annotations

from cloche import model, stock
from cloche.testing.conformance.bench import Bench
from cloche.testing.conformance.registry import behaviour, expect, refused, same


@behaviour("states")
async def a_snapshot_brings_files_back(bench: Bench) -> None:
    """Restoring sets files, links, modes and removals back, ends what ran, and keeps the id."""
    box = await bench.box()
    await box.out("echo one > a; mkdir -m 700 d; echo deep > d/e; ln -s a l; ln a h; mkfifo p")
    snapshot = await bench.engine.snapshot(box.id)
    await box.start("sleep 1000")
    await box.out("echo two > a; rm -r d l p; echo new > n")
    same((await bench.engine.restore(box.id, snapshot.id)).id, box.id)
    same(
        await box.out("cat a d/e l h; stat -c '%a %F' d p; ls"),
        "one\ndeep\none\none\n700 directory\n644 fifo\na\nd\nh\nl\np\n",
    )
    expect(not (await box.exec("pgrep -x sleep")).ok, "a process survived")
    await bench.engine.delete_snapshot(snapshot.id)


@behaviour("states")
async def a_snapshot_is_taken_while_things_run(bench: Bench) -> None:
    """What runs while a snapshot is taken goes on, and does not notice."""
    box = await bench.box()
    running = await box.start("echo up; read x; echo $x", open_stdin=True)
    await running.until(b"up")
    snapshot = await bench.engine.snapshot(box.id)
    await running.write(b"on\n")
    same((await running.wait()).stdout, "up\non\n")
    await bench.engine.delete_snapshot(snapshot.id)


@behaviour("states")
async def forks_have_files_of_their_own(bench: Bench) -> None:
    """Forks begin with the same files, and none sees what another writes."""
    box = await bench.box()
    await box.out("echo base > a")
    forks = await bench.engine.fork(box.id, 2)
    for number, info in enumerate(forks):
        same(await (await bench.known(info.id)).out(f"echo {number} >> a; cat a"), f"base\n{number}\n")
    same(await box.out("cat a"), "base\n")
    for info in forks:
        await bench.engine.delete(info.id)


@behaviour("states")
async def an_archived_sandbox_comes_back(bench: Bench) -> None:
    """Archiving ends everything but the files; use brings the sandbox back under its id."""
    box = await bench.box()
    await box.out("echo kept > a")
    await box.start("sleep 1000")
    same((await bench.engine.suspend(box.id, "archive")).phase, "archived")
    same((await bench.engine.info(box.id)).phase, "archived")
    same(await box.out("cat a"), "kept\n")
    expect(not (await box.exec("pgrep -x sleep")).ok, "a process survived")


@behaviour("states")
async def a_volume_outlives_its_sandboxes(bench: Bench) -> None:
    """What one sandbox writes to a volume, the next one reads."""
    await bench.engine.create_volume(stock.VolumeSpec(name="conformance-stays", size_mib=16))
    try:
        box = await bench.box(volumes={"/workspace/data": model.Mount(volume="conformance-stays")})
        await box.out("echo kept > data/a")
        await bench.engine.delete(box.id)
        box = await bench.box(
            volumes={"/workspace/data": model.Mount(volume="conformance-stays", read_only=True)}
        )
        same(await box.out("cat data/a"), "kept\n")
        expect(not (await box.exec("touch data/b")).ok, "a reader wrote")
        await bench.engine.delete(box.id)
    finally:
        await bench.engine.delete_volume("conformance-stays")


@behaviour("states")
async def one_writes_a_volume_or_several_read_it(bench: Bench) -> None:
    """A second sandbox does not get a volume that somebody writes; readers do not keep each other out."""
    await bench.engine.create_volume(stock.VolumeSpec(name="conformance-used", size_mib=16))
    try:
        reading = {"/workspace/data": model.Mount(volume="conformance-used", read_only=True)}
        writer = await bench.box(volumes={"/workspace/data": model.Mount(volume="conformance-used")})
        with refused("volume_in_use"):
            await bench.box(volumes=reading)
        await bench.engine.delete(writer.id)
        for box in [await bench.box(volumes=reading), await bench.box(volumes=reading)]:
            same(await box.out("ls data"), "")
            await bench.engine.delete(box.id)
    finally:
        await bench.engine.delete_volume("conformance-used")
