"""Disks: formatted once, copied by their data, freed with their mount."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cloche.linux import loops, syscalls

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/loop-control", os.W_OK), reason="loop devices need root"
)


def test_an_image_that_cannot_be_formatted_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises((subprocess.CalledProcessError, FileNotFoundError)):
        loops.format_image(str(tmp_path / "image"), 0)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_is_equal_and_sparse(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    loops.format_image(str(source), 64, ("u0/up",))
    loops.copy_image(str(source), str(target))
    assert target.read_bytes() == source.read_bytes()
    assert target.stat().st_blocks * 512 < 2 << 20


def test_a_copy_never_replaces_a_file(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    loops.format_image(str(source), 16)
    target.write_text("mine")
    with pytest.raises(FileExistsError):
        loops.copy_image(str(source), str(target))
    assert target.read_text() == "mine"


@needs_root
def test_a_device_frees_itself_with_its_mount(tmp_path: Path) -> None:
    image = tmp_path / "image"
    loops.format_image(str(image), 16, ("u0/up",))
    held, device = loops.attach(str(image))
    point = tmp_path / "mount"
    point.mkdir()
    syscalls.mount(device, str(point), "ext4", syscalls.MS_NODEV | syscalls.MS_NOSUID)
    try:
        os.close(held)
        assert (point / "u0" / "up").is_dir()
    finally:
        syscalls.umount2(str(point))
    backing = Path("/sys/block") / Path(device).name / "loop" / "backing_file"
    assert not backing.exists()
