"""What attacks are run on: an executor in this process, and a Python that any user can run."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import elsewhere
import pytest
from harness import Stage, stage_folder

from trl_rollouts.sandbox.local import LocalExecutor


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all tests of a module: a session belongs to the one that opened it."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def stage(runner: asyncio.Runner) -> Iterator[Stage]:
    """Everything that an attack must leave alone, run by this user."""
    with stage_folder() as root:
        stage = Stage(LocalExecutor(modules=["numpy"], folder=root), root)
        runner.run(stage.set_up())
        yield stage
        runner.run(stage.tear_down())
        runner.run(stage.executor.close())


@pytest.fixture(scope="session")
def anyones_python() -> Iterator[Path]:
    """A Python with numpy and this package that any user of the machine can run."""
    if (python := elsewhere.readable_python()) is None:
        pytest.skip("No Python of this version is installed where another user can run it, such as /usr/bin.")
    with tempfile.TemporaryDirectory(prefix="anyones-python-") as folder:
        yield elsewhere.build(Path(folder), python)
