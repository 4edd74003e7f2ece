"""Make or renew one virtual environment for this clone; standard library only.

    python3 environment.py DIRECTORY                 the package, editable: the clone's own .venv
    python3 environment.py DIRECTORY --dev           the same, with what checking and testing need
    python3 environment.py DIRECTORY --copy          the package, copied: for a clone that is not ours to write to
    python3 environment.py DIRECTORY --wheel FILE    a built wheel, as a user would install it

Several may start at once: one works, the others wait and find it done. One that is interrupted leaves
a mark, and the next begins afresh. `cloche.stamp` is written last; scripts/cloche says what it means.

Exit status: 0 done; 1 it failed and said why; 3 this interpreter cannot do it, another may.
"""

import argparse
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNABLE = 3

# What would send pip's work to another place than the environment, or its imports astray.
MISLEADING = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make or renew a Python environment for this clone.")
    parser.add_argument("directory", type=Path)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dev", action="store_true")
    what.add_argument("--copy", action="store_true")
    what.add_argument("--wheel", type=Path)
    arguments = parser.parse_args()
    directory = Path(os.path.abspath(arguments.directory))
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{directory}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return make(directory, dev=arguments.dev, copy=arguments.copy, wheel=arguments.wheel)
    except (OSError, subprocess.SubprocessError) as error:
        return fail(f"the environment {directory} could not be made: {error}")


def make(directory: Path, *, dev: bool, copy: bool, wheel: Path | None) -> int:
    stamp, unfinished = directory / "cloche.stamp", directory / "cloche.unfinished"
    made_for, extras = read_stamp(stamp)
    dev = dev or (extras == "dev" and made_for == str(ROOT))
    wanted_mtime_ns = (ROOT / "pyproject.toml").stat().st_mtime_ns
    current = made_for == str(ROOT) and stamp.stat().st_mtime_ns == wanted_mtime_ns
    if copy and current:
        current = newest_source_ns() <= (directory / "copied.stamp").stat().st_mtime_ns
    if current and wheel is None and (extras == "dev") == dev and usable(directory):
        return 0  # somebody else was faster, or there is nothing to do

    if unfinished.exists() or (made_for and made_for != str(ROOT)) or not usable(directory):
        shutil.rmtree(directory, ignore_errors=True)
    if (status := create(directory)) != 0:
        return status
    if (pip := pip_command(directory)) is None:
        shutil.rmtree(directory, ignore_errors=True)
        return UNABLE
    unfinished.touch()
    stamp.unlink(missing_ok=True)

    say(f"preparing {directory} (once; Python {sys.version_info.major}.{sys.version_info.minor}) ...")
    if wheel is not None:
        target = [str(wheel)]
    elif copy:
        target = ["--upgrade", "--force-reinstall", str(ROOT)]
    else:
        target = ["--editable", f"{ROOT}[dev]" if dev else str(ROOT)]
    (directory / "copied.stamp").touch()  # before the copy: a source changed meanwhile is newer than it
    if not succeeds(*pip, "install", "--quiet", "--no-input", *target, env=pip_environment()):
        return fail("pip could not install the package; what it said is above")

    compile_all(directory, sources=not (copy or wheel))
    if wheel is None:
        stamp.write_text(f"{ROOT}\n{'dev' if dev else ''}\n")
        os.utime(stamp, ns=(wanted_mtime_ns, wanted_mtime_ns))
    unfinished.unlink()
    return 0


def read_stamp(stamp: Path) -> tuple[str, str]:
    try:
        lines = stamp.read_text().split("\n")
    except OSError:
        return "", ""
    return lines[0], lines[1] if len(lines) > 1 else ""


def newest_source_ns() -> int:
    return max((source.stat().st_mtime_ns for source in (ROOT / "src").rglob("*.py")), default=0)


def usable(directory: Path) -> bool:
    """Whether its interpreter still starts, is recent enough and believes to live here."""
    probe = "import sys; print(sys.version_info >= (3, 11) and sys.prefix)"
    try:
        prefix = subprocess.check_output(
            [directory / "bin" / "python", "-I", "-c", probe], text=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return os.path.realpath(prefix.strip()) == os.path.realpath(directory)


def create(directory: Path) -> int:
    """An environment without pip: start-up reads every .pth file in it, and setuptools brings one."""
    if (directory / "bin" / "python").exists():
        return 0
    # The interpreter by its full version (python3.11, not python3): after an upgrade of the system the
    # link dangles, which scripts/cloche sees, instead of leading to a version that finds no packages.
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    if not has("venv"):
        return UNABLE
    made = succeeds(base, "-I", "-m", "venv", "--without-pip", str(directory))
    return 0 if made else fail(f"{base} -m venv failed")


def pip_command(directory: Path) -> list[str] | None:
    python = str(directory / "bin" / "python")
    own = [python, "-I", "-m", "pip"]
    if succeeds(python, "-I", "-c", "import pip.__main__", quiet=True):
        return own
    if has("pip"):
        return [sys.executable, "-I", "-m", "pip", "--python", python]
    if has("ensurepip") and succeeds(python, "-I", "-m", "ensurepip", quiet=True):
        succeeds(*own, "uninstall", "--quiet", "--yes", "setuptools", quiet=True)
        return own
    return None


def has(module: str) -> bool:
    """Whether `python -m module` would find something; distributions ship these apart from Python."""
    try:
        return importlib.util.find_spec(f"{module}.__main__") is not None
    except ImportError:
        return False


def pip_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in MISLEADING}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def compile_all(directory: Path, *, sources: bool) -> None:
    """Byte code for everything that a start imports, whatever PYTHONDONTWRITEBYTECODE says."""
    trees = [*directory.glob("lib/python*/site-packages")]
    if sources:
        trees.append(ROOT / "src" / "cloche")
    succeeds(str(directory / "bin" / "python"), "-I", "-m", "compileall", "-qq", *map(str, trees))


def succeeds(*command: str, env: dict[str, str] | None = None, quiet: bool = False) -> bool:
    where = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, env=env, stdout=where, stderr=where, check=False).returncode == 0


def say(message: str) -> None:
    print(f"cloche: {message}", file=sys.stderr)


def fail(message: str) -> int:
    say(message)
    return 1


if __name__ == "__main__":
    sys.exit(main())
