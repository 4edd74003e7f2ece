"""Sandboxes on images: a root is resolved before a machine is made, and held until the machine has ended.

Pulling tells what happens as it happens; a caller that goes away takes its pull with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from cloche import errors, events, interfaces, model

if TYPE_CHECKING:
    from cloche import engine

HOST = "host"
_LONGEST = 4096  # of a line of a log


class Use:
    """The image of one machine to come; called with the machine, it stays held until that has ended."""

    def __init__(self, image: interfaces.Image | None, *, ours: bool = True) -> None:
        self.image = image
        self.ours = ours and image is not None

    def __call__(self, machine: interfaces.Machine) -> interfaces.Machine:
        image, ours, self.ours = self.image, self.ours, False
        if image is not None and ours:
            machine.ended.add_done_callback(lambda _: image.release())
        return machine


class Imaging:
    def __init__(self, owner: engine.Engine, source: interfaces.ImageSource | None) -> None:
        self._engine = owner
        self._source = source

    @asynccontextmanager
    async def of(self, spec: model.SandboxSpec, given: interfaces.Image | None) -> AsyncIterator[Use]:
        wanted = spec.image or HOST
        if given is not None or wanted == HOST:
            use = Use(given, ours=False)
        else:
            use = Use(await self.source.resolve(wanted))
        try:
            yield use
        finally:
            if use.ours and use.image is not None:
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
        try:
            info = await asyncio.to_thread(self.source.remove, reference)
        except errors.Conflict:
            await self._engine.cool()  # one that only waits for somebody is no reason to keep an image
            info = await asyncio.to_thread(self.source.remove, reference)
        self._engine.record(self._engine.administered("image_removed", info.reference, info.digest))
        return info

    async def collect(self) -> list[model.ImageInfo]:
        return await asyncio.to_thread(self.source.collect)

    def _about(self, info: model.ImageInfo) -> dict[str, Any]:
        act = self._engine.administered("image", info.reference)
        return {
            "sandbox": None,
            "time": act.time,
            "actor": act.actor,
            "image": info.reference,
            "digest": info.digest,
        }

    def pull(self, reference: str) -> AsyncIterator[model.ImageProgress]:
        async def work(progress: interfaces.Progress) -> model.ImageInfo:
            image = await self.source.resolve(reference, progress, fresh=True)
            image.release()
            await self._engine.cool()  # what waits may be of what the reference meant before
            self._engine.record(events.ImagePulled(**self._about(image.info)))
            return image.info

        return _told(work)

    def build(self, recipe: dict[str, Any] | str, directory: str) -> AsyncIterator[model.ImageProgress]:
        async def work(progress: interfaces.Progress) -> model.ImageInfo:
            image = await self.source.build(recipe, directory, BuildRunner(self._engine), progress)
            image.release()
            self._engine.record(events.ImageBuilt(**self._about(image.info)))
            return image.info

        return _told(work)


class _Owned:
    """An image as a step of a build has it."""

    owns = True

    def __init__(self, image: interfaces.Image) -> None:
        self.info = image.info
        self.root = image.root

    def release(self) -> None:
        """Its holder is the build."""


class BuildRunner(interfaces.Runner):
    """A sandbox for each step: the build's limits, no network but to `build.allow`, nothing of the host."""

    def __init__(self, owner: engine.Engine) -> None:
        self._engine = owner
        self._chosen = owner.settings.build

    async def run(
        self, image: interfaces.Image, line: str, *, root: bool, say: Callable[[str], None]
    ) -> interfaces.Ran:
        made = await self._engine.create(self._spec(image), image=_Owned(image))
        try:
            machine = self._engine.machine_of(made.id)
            if root and not machine.isolation.uid_range:
                raise errors.error(
                    "needs_subuids", "apt installs as root, and this sandbox has one user",
                    hint="build as root, or use pip, npm and run steps",
                )  # fmt: skip
            user = "root" if machine.isolation.uid_range else "user"
            request = model.ExecRequest(
                command=line, cwd="/", user=user, merge=True, timeout_s=self._chosen.step_timeout_s
            )
            result = await self._follow(made.id, request, say)
            refused = any(denial.kind == "network" for denial in result.denials)
            layer = None
            if result.exit_code == 0 and not refused and machine.layer is not None:
                layer = machine.layer._replace(fd=os.dup(machine.layer.fd))
        finally:
            # What was written is looked at when nothing runs any more that could change it meanwhile.
            await self._engine.delete(made.id)
        return interfaces.Ran(result, layer)

    async def _follow(
        self, sandbox: str, request: model.ExecRequest, say: Callable[[str], None]
    ) -> model.ExecResult:
        running = await self._engine.start(sandbox, request)
        partial = b""
        async for event in self._engine.attach(sandbox, running.id, lossless=True):
            if isinstance(event, model.Output):
                *lines, partial = (partial + event.data).split(b"\n")
                for text in lines:
                    say(text[:_LONGEST].decode("utf-8", "replace"))
                partial = partial[-_LONGEST:]
        if partial:
            say(partial.decode("utf-8", "replace"))
        return await self._engine.wait(sandbox, running.id)

    def _spec(self, image: interfaces.Image) -> model.SandboxSpec:
        allow = list(self._chosen.allow)
        network = {"mode": "rules", "allow": allow} if allow else {"mode": "off"}
        return model.SandboxSpec(
            image=image.info.digest, resources=self._chosen.resources, timeout_s=self._chosen.step_timeout_s + 60,
            labels={"cloche.build": image.info.digest}, policy={"network": network},
        )  # fmt: skip


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
