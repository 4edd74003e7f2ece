"""Sandboxes on images: a root is resolved before a machine is made, and held until the machine has ended.

Pulling tells what happens as it happens; a caller that goes away takes its pull with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from cloche import errors, interfaces, model

if TYPE_CHECKING:
    from cloche import engine

HOST = "host"


class Use:
    """The image of one machine to come; called with the machine, it stays held until that has ended."""

    def __init__(self, image: interfaces.Image | None) -> None:
        self.image = image

    def __call__(self, machine: interfaces.Machine) -> interfaces.Machine:
        image, self.image = self.image, None
        if image is not None:
            machine.ended.add_done_callback(lambda _: image.release())
        return machine


class Imaging:
    def __init__(self, owner: engine.Engine, source: interfaces.ImageSource | None) -> None:
        self._engine = owner
        self._source = source

    @asynccontextmanager
    async def of(self, spec: model.SandboxSpec) -> AsyncIterator[Use]:
        wanted = spec.image or HOST
        use = Use(None if wanted == HOST else await self.source.resolve(wanted))
        try:
            yield use
        finally:
            if use.image is not None:
                use.image.release()

    @property
    def source(self) -> interfaces.ImageSource:
        if self._source is None:
            raise errors.error("not_supported_by_driver", "this engine has no images but the host's")
        return self._source

    async def images(self) -> list[model.ImageInfo]:
        return await asyncio.to_thread(self.source.images)

    async def find(self, reference: str) -> model.ImageInfo:
        return await asyncio.to_thread(self.source.find, reference)

    async def remove(self, reference: str) -> model.ImageInfo:
        return await asyncio.to_thread(self.source.remove, reference)

    async def collect(self) -> list[model.ImageInfo]:
        return await asyncio.to_thread(self.source.collect)

    def pull(self, reference: str) -> AsyncIterator[model.ImageProgress]:
        async def work(progress: interfaces.Progress) -> model.ImageInfo:
            image = await self.source.resolve(reference, progress, fresh=True)
            image.release()
            return image.info

        return _told(work)


Work = Callable[[interfaces.Progress], Coroutine[Any, Any, model.ImageInfo]]


async def _told(work: Work) -> AsyncIterator[model.ImageProgress]:
    """What `work` says while it runs, and at last what it made."""
    said: asyncio.Queue[model.ImageProgress | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def tell(progress: model.ImageProgress) -> None:  # also from threads
        loop.call_soon_threadsafe(said.put_nowait, progress)

    task = loop.create_task(work(tell), name="image")
    task.add_done_callback(lambda _: loop.call_soon(said.put_nowait, None))
    try:
        while (progress := await said.get()) is not None:
            yield progress
        yield model.ImageProgress(kind="done", image=await task)
    finally:
        task.cancel()
        await asyncio.wait([task])
