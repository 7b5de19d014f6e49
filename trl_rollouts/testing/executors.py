"""What an `Executor` owes, tried out on one: for whoever writes an executor of their own.

    asyncio.run(check_executor(MyExecutor()))

Not checked: whether the code is confined, which only who knows the machine can say, and what happens when a machine
is lost.
"""

import asyncio
from collections.abc import Awaitable
from textwrap import indent

from ..sandbox import Executor
from .bench import Bench
from .executor_checks import CHECKS, Check


async def check_executor(executor: Executor, *, timeout_s: float = 120.0) -> list[str]:
    """Check that `executor` keeps to the contract (`trl_rollouts.sandbox`), and close it.

    Args:
        executor: any. Nobody else should use it meanwhile.
        timeout_s: how long one check may take.

    Returns:
        The names of the checks, all of which passed.

    Raises:
        AssertionError: it names each check that failed, with what was expected and what was seen.
        SandboxError: not even one session could be opened.
    """
    await (await executor.open()).close()
    failures = {check.__name__: await _failure(check, executor, timeout_s) for check in CHECKS}
    failed = [indent(f"{name}: {what}", "  ") for name, what in failures.items() if what is not None]
    if failed:
        lines = "\n".join(failed)
        raise AssertionError(f"{type(executor).__name__} fails {len(failed)} of {len(CHECKS)} checks.\n{lines}")
    return list(failures)


async def _failure(check: Check, executor: Executor, timeout_s: float) -> str | None:
    bench = Bench(executor)
    failure = await _outcome(check(bench), timeout_s)
    failure_to_close = await _outcome(bench.close(), timeout_s)
    return failure or failure_to_close


async def _outcome(action: Awaitable[None], timeout_s: float) -> str | None:
    """What went wrong, if anything did."""
    try:
        async with asyncio.timeout(timeout_s):
            await action
    except AssertionError as error:
        return str(error) or "an assertion of the executor's failed"
    except TimeoutError:
        return f"it did not come back within {timeout_s:g} s"
    except Exception as error:
        return f"{type(error).__name__} was raised: {error}"
    return None
