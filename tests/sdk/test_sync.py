"""The blocking handles are what the generator makes of the asynchronous ones, and nothing else."""

import importlib.util
import inspect
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import get_type_hints

import pytest

from cloche.sdk import pools, sandboxes, sync, sync_pools

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/generate_sync"
PAIRS = [
    (getattr(sandboxes, f"Async{name}"), getattr(sync, name))
    for name in ("Sandbox", "Process", "Processes", "Files", "Context", "Contexts")
] + [(pools.AsyncPool, sync_pools.Pool)]
MADE = (sync.Sandbox, sync_pools.Pool)
"""Their constructor does what `create` does."""


@pytest.fixture(scope="module")
def generator():
    loader = SourceFileLoader("generate_sync", str(SCRIPT))
    spec = importlib.util.spec_from_loader("generate_sync", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def public(kind):
    return {name for name in vars(kind) if not name.startswith("_")}


def test_the_checked_in_file_is_up_to_date():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"run scripts/generate_sync:\n{done.stdout[:2000]}"


def test_a_change_of_the_source_is_drift(generator):
    source = Path(sandboxes.__file__).read_text()
    assert generator.generate(source) == Path(sync.__file__).read_text()
    pooled = Path(pools.__file__).read_text()
    assert generator.generate(pooled, "pools") == Path(sync_pools.__file__).read_text()
    changed = source.replace(
        "async def kill(self) -> None:", "async def kill(self, hard: bool = True) -> None:"
    )
    assert "self._async.kill(hard)" in generator.generate(changed)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda kind: kind.__name__)
def test_every_method_has_its_twin(source, target):
    assert public(target) == public(source) - {"create"} if target in MADE else public(source)
    for name in public(target):
        assert inspect.getdoc(getattr(target, name)), f"{target.__name__}.{name} says nothing"


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda kind: kind.__name__)
def test_twins_take_the_same_arguments(source, target):
    for name in public(target) | {"__init__"} if target in MADE else public(target):
        one, other = inspect.getattr_static(source, name), inspect.getattr_static(target, name)
        if isinstance(one, property):
            assert isinstance(other, property)
            continue
        one, other = (getattr(f, "__func__", f) for f in (one, other))
        mine, theirs = inspect.signature(one).parameters, inspect.signature(other).parameters
        assert list(mine) == list(theirs)
        assert [p.default for p in mine.values()] == [p.default for p in theirs.values()]
        assert [p.kind for p in mine.values()] == [p.kind for p in theirs.values()]


def test_options_are_the_constructors():
    constructor = inspect.signature(sandboxes.AsyncSandbox.__init__).parameters
    hints = get_type_hints(sandboxes.Options)
    assert set(hints) == set(constructor) - {"self"}
    signature = get_type_hints(sandboxes.AsyncSandbox.__init__)
    assert {name: signature[name] for name in hints} == hints


def test_the_generator_refuses_what_it_does_not_know():
    done = subprocess.run([sys.executable, SCRIPT, "--wrong"], capture_output=True, text=True)
    assert done.returncode == 2
