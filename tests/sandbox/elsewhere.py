"""A Python that any user of the machine can run, with what the harness needs, wherever this one is installed.

`make setup` may well have made its environment from a Python under /root, in a folder that nobody else can enter.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pyseccomp

import trl_rollouts

NOBODY = 65432
"""A user that has nothing on any machine."""
_HERE = Path(__file__).parent


def readable_python() -> str | None:
    """An interpreter of this one's version that another user can run."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    candidates = [os.path.realpath(sys.executable), f"/usr/bin/{name}", f"/usr/local/bin/{name}", shutil.which(name)]
    return next((path for path in candidates if path is not None and _runs(path)), None)


def _runs(path: str) -> bool:
    command = [path, "-I", "-c", "import sys, ctypes, asyncio; print(*sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60.0, **_as_user(NOBODY))
    except OSError:
        return False
    return done.returncode == 0 and done.stdout.split() == [str(number) for number in sys.version_info[:2]]


def build(folder: Path, python: str) -> Path:
    """An environment of `python` in `folder`, as venv makes one. Its interpreter."""
    folder.chmod(0o755)
    packages = folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(python)
    (folder / "pyvenv.cfg").write_text(f"home = {os.path.dirname(python)}\ninclude-system-site-packages = false\n")
    installed = Path(numpy.__file__).parents[1]
    for source in (installed / "numpy", installed / "numpy.libs", Path(trl_rollouts.__file__).parent):
        if source.exists():
            shutil.copytree(source, packages / source.name, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    shutil.copy(pyseccomp.__file__, packages)
    shutil.copytree(_HERE, folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    return folder / "bin/python"


def attacked(python: Path, *arguments: str, uid: int | None, timeout_s: float) -> dict[str, Any]:
    """The harness's report, run by `uid`, or by this user."""
    command = [str(python), "-B", str(python.parents[1] / "tests/harness.py"), *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": os.defpath, "LANG": "C.UTF-8", "CANARY": "CANARY-of-the-host"},
        timeout=timeout_s,
        **({} if uid is None else _as_user(uid)),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _as_user(uid: int) -> dict[str, Any]:
    return {"user": uid, "group": uid, "extra_groups": []} if os.geteuid() == 0 else {}
