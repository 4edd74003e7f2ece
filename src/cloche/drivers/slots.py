"""Ranges of user ids, in blocks: no two engines of this host ever use the same one.

A block is a byte of one file, locked for as long as this process has the file open; the kernel lets go of it however we
end. Standard library only.
"""

import fcntl
import os
import struct

from cloche import errors

FIRST_UID = 0x7000_0000
SLOTS = 32_768
BLOCK = 512  # ranges that one engine takes at a time
_F_OFD_SETLK = 37


class Slots:
    def __init__(self, home: str) -> None:
        self.taken: list[int] = []
        self._home = home
        self._file = -1

    def take(self) -> "list[int]":
        """One more block."""
        if self._file < 0:
            directory = "/run/cloche" if os.access("/run", os.W_OK) else self._home
            os.makedirs(directory, mode=0o700, exist_ok=True)
            self._file = os.open(f"{directory}/uids", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        blocks = SLOTS // BLOCK
        start = int.from_bytes(os.urandom(4), "little") % blocks
        for block in ((start + offset) % blocks for offset in range(blocks)):
            if block * BLOCK in self.taken:
                continue  # ours: the lock would be granted once more
            try:
                fcntl.fcntl(self._file, _F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, block, 1, 0))
            except OSError:
                continue
            taken = list(range(block * BLOCK, (block + 1) * BLOCK))
            self.taken += taken
            return taken
        raise errors.error("capacity_exceeded", f"all {blocks} blocks of uid ranges of this host are taken")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
