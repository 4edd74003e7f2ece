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


def test_a_copy_is_equal_sparse_and_nameless(tmp_path: Path) -> None:
    source = tmp_path / "a"
    loops.format_image(str(source), 64, ("u0/up",))
    copy = loops.Image(str(source)).copy()
    assert os.pread(copy, 64 << 20, 0) == source.read_bytes()
    assert os.fstat(copy).st_blocks * 512 < 2 << 20
    assert os.fstat(copy).st_nlink == 0
    os.close(copy)
    assert list(tmp_path.iterdir()) == [source]


def test_what_is_written_to_a_copy_is_in_no_other(tmp_path: Path) -> None:
    source = tmp_path / "a"
    loops.format_image(str(source), 64, ("u0/up",))
    image = loops.Image(str(source))
    first = image.copy()
    os.pwrite(first, b"secret" * 10_000, 0)
    second = image.copy()
    assert os.pread(second, 64 << 20, 0) == source.read_bytes()
    assert b"secret" in os.pread(first, 4096, 0)
    os.close(first)
    os.close(second)


@needs_root
def test_a_device_frees_itself_with_its_mount(tmp_path: Path) -> None:
    image = tmp_path / "image"
    loops.format_image(str(image), 16, ("u0/up",))
    copy = loops.Image(str(image)).copy()
    held, device = loops.attach(copy)
    os.close(copy)
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
