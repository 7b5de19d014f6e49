"""Which modules a session finds: installed packages wherever pip put them, and nothing of the host's own folders."""

import os
import subprocess
import sys
from pathlib import Path

HOST = """
import asyncio, sys
from trl_rollouts.sandbox.local import LocalExecutor

async def main():
    executor = LocalExecutor(modules=["only_here"])
    session = await executor.open()
    for code in ("import only_here, only_beside; only_here.x", "import of_a_script", "open('../log')"):
        print((await session.run(code, 20.0)).value)
    await executor.close()

asyncio.run(main())
"""


def test_packages_outside_of_the_interpreters_own_folders_are_found_and_scripts_are_not(tmp_path: Path) -> None:
    packages, scripts = tmp_path / "lib/site-packages", tmp_path / "scripts"
    packages.mkdir(parents=True)
    scripts.mkdir()
    (packages / "only_here.py").write_text("x = 42")
    (packages / "only_beside.py").write_text("")
    (scripts / "of_a_script.py").write_text("")
    (scripts / "host.py").write_text(HOST)
    path = os.pathsep.join([str(packages), str(scripts)])
    done = subprocess.run(
        [sys.executable, str(scripts / "host.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout.split() == ["42", "None", "None"], done.stderr
