"""What the face keeps: nothing of a sandbox that has ended, and nothing that a restart would lose unsaid."""

import asyncio
import tempfile
from pathlib import Path

import pytest

from cloche import settings
from cloche.compat.e2b import face
from tests.server import conftest as server
from tests.wires.e2b.conftest import Raised, client_of


class Door:
    """Knows which sandboxes there are."""

    def __init__(self, living: set[str]) -> None:
        self.living = living
        self.asked: list[str] = []

    async def lives(self, sandbox: str) -> bool:
        self.asked.append(sandbox)
        return sandbox in self.living


def test_nothing_is_kept_of_what_has_ended() -> None:
    async def nobody(scope: object, receive: object, send: object) -> None: ...

    async def main() -> None:
        every = [f"s{number}" for number in range(1000)]
        door = Door(set(every[::10]))
        made = face.Face(nobody, door, settings.Settings(home="/nowhere"))  # type: ignore[arg-type]
        for sandbox in every:
            made._state.issue(sandbox, "key", "access")
        for _ in range(len(every) // face._TIDY_EVERY + 1):
            await made.tidy()
        assert sorted(made._state.ids()) == sorted(door.living)
        door.asked.clear()
        await made.tidy()
        await made.tidy()
        assert set(door.asked) == door.living  # all of them in turn, the same ones not again and again

    asyncio.run(main())


@pytest.mark.timeout(900)
def test_a_restart() -> None:
    """Tokens end with the process, files that were paused without memory do not, and `connect` gives new tokens."""
    with tempfile.TemporaryDirectory(prefix="cl-") as home:
        first = server.serve(Path(home))
        program = client_of("newest", first)
        try:
            program("""
                from e2b_code_interpreter import Sandbox
                kept = Sandbox.create(timeout=600, metadata={"kept": "yes"}, lifecycle={"on_timeout": {"action": "pause", "mode": "filesystem"}})
                kept.files.write("a", "still here"); kept.pause(mode="filesystem")
                lost = Sandbox.create(timeout=600)
            """)
            sandbox = program("answer = kept.sandbox_id")
        finally:
            assert server.stop(first) == 0
            program.close()
        second = server.serve(Path(home))
        program = client_of("newest", second)
        try:
            program("from e2b_code_interpreter import Sandbox")
            listed = program(
                "answer = [[s.sandbox_id, s.state.value, s.metadata] for s in Sandbox.list().next_items()]"
            )
            assert listed == [[sandbox, "paused", {"kept": "yes"}]]
            program(f"box = Sandbox.connect({sandbox!r}, timeout=600)")
            assert program("answer = box.files.read('a')") == "still here"
            assert program("answer = box.get_info().lifecycle['on_timeout']") == "pause"
            with pytest.raises(Raised):
                program(f"Sandbox.connect({'a' * 20!r})")
            assert program("answer = box.kill()") is True
        finally:
            program.close()
            assert server.stop(second) == 0
