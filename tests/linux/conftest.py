"""What the tests of the primitives share: a forked child to try things in that cannot be undone."""

import os
from collections.abc import Callable

import pytest

Work = Callable[[], None]
InChild = Callable[[Work], None]


def _run(work: Work) -> None:
    """Run `work` in a forked child and fail with what it raised there."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:  # a child must never return into pytest
            os.write(write_end, repr(error).encode())
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as stream:
        said = stream.read().decode()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, said


@pytest.fixture
def in_child() -> InChild:
    return _run
