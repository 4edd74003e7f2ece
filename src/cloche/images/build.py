"""Building: each step of a recipe makes a root from the one before it, in a sandbox, and is kept under what it depends on.

A step's key is a digest of its parent's digest, its words, and the content that it copies; a step whose key is here is
not run. A step that runs gets a sandbox on its parent's root, with the build's policy; when nothing of it runs any more,
what it wrote is taken over into a clone of that root. Whatever fails, the draft goes, and the steps before it stay.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import stat
import time
from typing import Any

from cloche import errors, interfaces, model
from cloche.images import cache, layers, recipes, source, trees, unpacking
from cloche.linux import syscalls

_VERSION = 1  # of what a step means
_TAIL = 20
_SCOPED = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS


class Builder:
    def __init__(
        self, images: source.LocalImages, runner: interfaces.Runner, progress: interfaces.Progress
    ) -> None:
        self._images = images
        self._runner = runner
        self._progress = progress

    async def build(self, given: dict[str, Any] | str, directory: str) -> interfaces.Image:
        recipe = recipes.parse(given)
        image = await self._images.resolve(recipe.base, self._progress)
        try:
            for number, step in enumerate(recipe.steps, 1):
                following = await self._step(image, step, directory, number, len(recipe.steps))
                image.release()
                image = following
        except BaseException:
            image.release()
            raise
        return image

    async def _step(
        self, parent: interfaces.Image, step: recipes.Step, directory: str, number: int, count: int
    ) -> interfaces.Image:
        digest = await asyncio.to_thread(_key, parent.info.digest, step, directory)
        async with self._images.only_maker(digest):
            held = await asyncio.to_thread(self._images.stored.hold, digest, time.time())
            self._tell("step", step.title, number, count, cached=held is not None)
            if held is not None:
                return held
            with self._images.stored.draft() as draft:
                size = await self._make(parent, step, directory, number, draft)
                facts = _facts(parent.info, step)
                return await asyncio.to_thread(
                    self._images.finish,
                    draft,
                    f"recipe:{digest.removeprefix('sha256:')}",
                    "recipe",
                    digest,
                    size,
                    facts,
                )

    async def _make(
        self, parent: interfaces.Image, step: recipes.Step, directory: str, number: int, draft: cache.Draft
    ) -> int:
        """Fill the draft; the bytes that the step added."""
        if step.verb == "env":
            await asyncio.to_thread(_clone, parent.root, draft.root)
            return 0
        limits = layers.Limits(self._images.most_bytes, unpacking.MOST_FILES)
        if step.verb == "copy":
            await asyncio.to_thread(_clone, parent.root, draft.root)
            await asyncio.to_thread(_copy, step.argument, directory, draft.root, limits)
        else:
            layer = await self._run(parent, step, number)
            try:
                await asyncio.to_thread(self._take_over, parent.root, draft.root, layer, limits)
            finally:
                os.close(layer.fd)
        return limits.most_bytes - limits.bytes

    async def _run(self, parent: interfaces.Image, step: recipes.Step, number: int) -> interfaces.Layer:
        log: list[str] = []

        def say(line: str) -> None:
            log.append(line)
            del log[:-_TAIL]
            self._tell("log", line, number)

        ran = await self._runner.run(parent, step.line, root=step.verb == "apt", say=say)
        if ran.layer is not None:
            return ran.layer
        raise _failed(step, number, ran.result, log)

    def _take_over(self, parent: str, draft: str, layer: interfaces.Layer, limits: layers.Limits) -> None:
        _clone(parent, draft)
        with trees.opened(parent) as below, trees.opened(draft) as target:
            for line in trees.apply(layer.fd, below, target, limits, first_id=layer.first_id):
                self._tell("log", f"left out: {line}")

    def _tell(self, kind: Any, text: str, number: int = 0, count: int = 0, *, cached: bool = False) -> None:
        self._progress(
            model.ImageProgress(kind=kind, text=text[:1000], step=number, steps=count, cached=cached)
        )


def _failed(step: recipes.Step, number: int, result: model.ExecResult, log: list[str]) -> errors.ClocheError:
    network = [denial for denial in result.denials if denial.kind == "network"]
    refused = sorted({denial.target for denial in network})
    if result.timed_out:
        how = "took longer than build.step_timeout_s"
    elif result.exit_code == 0:
        how = f"was refused {', '.join(refused)}, and went on without"
    else:
        how = f"ended with {result.shell_code}" + (f"; refused: {', '.join(refused)}" if refused else "")
    tail = "\n".join(log)
    return errors.error(
        "recipe_step_failed", f"step {number} ({step.title}) {how}" + (f"\n{tail}" if tail else ""),
        hint=f"the rules of a build are build.allow: {network[0].hint}" if network else "the log above says why",
        step=number, title=step.title, exit_code=result.shell_code, log=tail, refused=refused,
    )  # fmt: skip


def _facts(parent: model.ImageInfo, step: recipes.Step) -> dict[str, Any]:
    env = {**parent.env, **step.argument} if step.verb == "env" else parent.env
    return {
        "env": env, "user": parent.user, "working_dir": parent.working_dir, "entrypoint": parent.entrypoint, "cmd": parent.cmd,
    }  # fmt: skip


def _clone(parent: str, draft: str) -> None:
    with trees.opened(parent) as below, trees.opened(draft) as target:
        trees.clone(below, target)
        trees.like(target, os.fstat(below), owners=source.owners())


# ── keys ───────────────────────────────────────────────────────────────────────────────────────────


def _key(parent: str, step: recipes.Step, directory: str) -> str:
    facts: list[Any] = [_VERSION, parent, step.verb, step.argument, source.owners()]
    if step.verb == "copy":
        fd = _open_source(step.argument["from"], directory)
        try:
            facts.append(_content(fd))
        finally:
            os.close(fd)
    return "sha256:" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _open_source(path: str, directory: str) -> int:
    """What is copied: below the recipe's directory, by no link."""
    try:
        base = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as problem:
        raise recipes.invalid(f"its directory {directory!r} cannot be read: {problem.strerror}") from None
    try:
        # SAFETY: tests/images/test_recipes.py::test_a_copy_does_not_leave_the_directory
        fd = syscalls.openat2(
            base, path, os.O_RDONLY | os.O_NONBLOCK,
            resolve=syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS,
        )  # fmt: skip
    except OSError as problem:
        raise recipes.invalid(
            f"copy from {path!r}: {problem.strerror}",
            hint="links are not followed: put what is copied beside the recipe",
        ) from None
    finally:
        os.close(base)
    if stat.S_IFMT(os.fstat(fd).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        os.close(fd)
        raise recipes.invalid(f"copy from {path!r}: it is neither a file nor a directory")
    return fd


def _content(fd: int) -> str:
    """A digest of names, modes, links and bytes; not of owners and times, which differ from clone to clone."""
    digest = hashlib.sha256()

    def add(name: str, directory: int, path: str, depth: int) -> None:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            note(path, found.st_mode, os.fsencode(os.readlink(name, dir_fd=directory)))
        elif stat.S_ISREG(found.st_mode):
            with open(
                os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory), "rb"
            ) as file:
                note(path, found.st_mode, hashlib.file_digest(file, "sha256").digest())
        elif stat.S_ISDIR(found.st_mode) and depth <= layers.DEEPEST:
            note(path, found.st_mode, b"")
            with trees.opened(name, directory) as below:
                each(below, path, depth + 1)

    def each(directory: int, path: str, depth: int) -> None:
        for name in sorted(os.listdir(directory)):
            add(name, directory, f"{path}/{name}", depth)

    def note(path: str, mode: int, data: bytes) -> None:
        digest.update(f"{os.fsencode(path)!r} {mode:o} {data.hex()}\n".encode())

    if stat.S_ISDIR(os.fstat(fd).st_mode):
        each(fd, "", 0)
    else:
        with open(os.dup(fd), "rb") as file:
            note("", os.fstat(fd).st_mode, hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


# ── copying ────────────────────────────────────────────────────────────────────────────────────────


def _copy(argument: dict[str, str], directory: str, root: str, limits: layers.Limits) -> None:
    """Put a file, or what is in a directory, into a root, as root's own; links of the root mean what they mean inside."""
    fd = _open_source(argument["from"], directory)
    try:
        with trees.opened(root) as target:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                place = _make_place(target, argument["to"])
                try:
                    _merge(fd, place, limits, 0)
                finally:
                    os.close(place)
            else:
                _copy_file(fd, target, argument, limits)
    finally:
        os.close(fd)


def _copy_file(fd: int, target: int, argument: dict[str, str], limits: layers.Limits) -> None:
    to = argument["to"]
    name = os.path.basename(to) or os.path.basename(argument["from"])
    place = _make_place(target, os.path.dirname(to))
    try:
        with trees.opened(f"/proc/self/fd/{place}/.") as listed:
            if _is_directory(listed, name):
                raise recipes.invalid(
                    f"copy to {to!r}: it is a directory", hint=f"write {to + '/'!r} to copy into it"
                )
            found = os.fstat(fd)
            limits.take(found.st_size)
            trees.take_away(listed, name)
            trees.write_file(fd, listed, name, found, owners=source.owners(), owner=_root)
    finally:
        os.close(place)


def _merge(directory: int, target: int, limits: layers.Limits, depth: int) -> None:
    if depth > layers.DEEPEST:
        raise recipes.invalid("what is copied is nested too deeply")
    for name in sorted(os.listdir(directory)):
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        limits.take(found.st_size if stat.S_ISREG(found.st_mode) else 0)
        if stat.S_ISDIR(found.st_mode):
            if not _is_directory(target, name):
                trees.take_away(target, name)
                os.mkdir(name, 0o700, dir_fd=target)
            with trees.opened(name, directory) as below, trees.opened(name, target) as made:
                _merge(below, made, limits, depth + 1)
                trees.like(made, found, owners=source.owners(), owner=_root)
        elif stat.S_ISREG(found.st_mode):
            trees.take_away(target, name)
            trees.copy_file(directory, target, name, found, owners=source.owners(), owner=_root)
        elif stat.S_ISLNK(found.st_mode):
            trees.take_away(target, name)
            trees.copy_link(directory, target, name, found, owners=source.owners(), owner=_root)


def _make_place(root: int, path: str) -> int:
    """A directory of the root, made with those above it; looked up as a program inside would, and never outside."""
    made = ""
    for part in path.strip("/").split("/"):
        if not part or part == ".":
            continue
        parent = _open_scoped(root, made or ".")
        try:
            try:
                os.mkdir(part, 0o755, dir_fd=parent)
                if source.owners():
                    os.chown(part, 0, 0, dir_fd=parent, follow_symlinks=False)
            except FileExistsError:
                pass
        finally:
            os.close(parent)
        made += "/" + part
    return _open_scoped(root, made or ".")


def _open_scoped(root: int, path: str) -> int:
    try:
        return syscalls.openat2(root, path, os.O_RDONLY | os.O_DIRECTORY, resolve=_SCOPED)
    except OSError as problem:
        raise recipes.invalid(f"copy to {path!r}: {problem.strerror}") from None


def _is_directory(directory: int, name: str) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _root(_number: int) -> int:
    return 0
