"""The checks of `check_executor`, one function each. Its name says what is owed."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ..errors import SessionError
from ..sandbox import ExecStatus
from .bench import Bench

MAX_CHARS = 1 << 20
"""More than this of one text would come from an executor that bounds none."""
LIMIT_S, SLACK_S = 0.5, 10.0
"""The time limit of a snippet that is to reach it, and how late an end may be."""
NUM_SESSIONS = 16
NUM_CHARS = 100_000

Check = Callable[[Bench], Awaitable[None]]


# What a snippet gives


async def state_is_kept_from_snippet_to_snippet(bench: Bench) -> None:
    session = await bench.open()
    await bench.run(session, "import math\nx = 1\ndef double(n): return 2 * n", value=None)
    await bench.run(session, "x += double(math.floor(20.5))")
    await bench.run(session, "x", value="41")


async def state_that_cannot_be_pickled_is_kept(bench: Bench) -> None:
    session = await bench.open()
    await bench.run(
        session, "import threading\nlock, numbers = threading.Lock(), (n for n in range(9))\nnext(numbers)"
    )
    await bench.run(session, "lock.acquire(), next(numbers)", value="(True, 1)")


async def the_value_is_that_of_the_last_expression(bench: Bench) -> None:
    session = await bench.open()
    await bench.run(session, "1\n'a' + 'b'", value="'ab'", stdout="", stderr="", error=None)
    await bench.run(session, "y = 5", value=None)
    await bench.run(session, "y\ny = 6", value=None)
    await bench.run(session, "None", value=None)


async def output_is_kept_apart_and_not_repeated(bench: Bench) -> None:
    session = await bench.open()
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\nprint(1, end='')"
    await bench.run(session, code, stdout="out\n1", stderr="err\n")
    await bench.run(session, "print('next')", stdout="next\n", stderr="")


async def code_without_a_statement_does_nothing(bench: Bench) -> None:
    session = await bench.open()
    for code in ("", "\n\n", "# only this"):
        await bench.run(session, code, value=None, stdout="", stderr="", error=None)


async def code_may_be_long(bench: Bench) -> None:
    await bench.run(await bench.open(), f"len('{'x' * NUM_CHARS}')", value=str(NUM_CHARS))


async def the_duration_is_the_snippets_own(bench: Bench) -> None:
    result = await bench.run(await bench.open(), "import time; time.sleep(0.3)")
    bench.expect(0.25 < result.duration_s < 0.3 + SLACK_S, "a duration_s of 0.3", result.duration_s)


# Errors


async def a_syntax_error_says_where(bench: Bench) -> None:
    session = await bench.open()
    result = await bench.run(session, "x = 1\ny = = 2", status=ExecStatus.ERROR, value=None)
    bench.expect(
        "SyntaxError" in str(result.error) and "line 2" in str(result.error), "a SyntaxError in line 2", result
    )
    await bench.run(session, "'x' in globals()", value="False")


async def an_exception_says_what_and_where(bench: Bench) -> None:
    session = await bench.open()
    result = await bench.run(
        session, "x = 1\nprint('before')\nx / 0\nx = 2", status=ExecStatus.ERROR, stdout="before\n"
    )
    is_told = "ZeroDivisionError" in str(result.error) and "line 3" in str(result.error)
    bench.expect(is_told, "a ZeroDivisionError in line 3", result.error)
    await bench.run(session, "x", value="1")


async def an_exit_ends_the_snippet_only(bench: Bench) -> None:
    session = await bench.open()
    await bench.run(session, "x = 1\nimport sys\nsys.exit(3)\nx = 2", status=ExecStatus.EXIT)
    await bench.run(session, "x", value="1")
    bench.expect(session.is_alive, "a session that is alive", session.is_alive)


async def an_exception_without_a_text_is_an_error(bench: Bench) -> None:
    session = await bench.open()
    code = "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd"
    result = await bench.run(session, code, status=ExecStatus.ERROR)
    bench.expect("Odd" in str(result.error), "an error that names Odd", result.error)
    await bench.run(session, "1", value="1")


# Time limits and ends


async def the_time_limit_interrupts_and_keeps_state(bench: Bench) -> None:
    session = await bench.open()
    started_at = time.monotonic()
    code = "x = 0\nprint('begun')\nwhile True: x += 1"
    await bench.run(session, code, timeout_s=LIMIT_S, status=ExecStatus.TIMEOUT, stdout="begun\n")
    elapsed_s = time.monotonic() - started_at
    bench.expect(LIMIT_S * 0.9 < elapsed_s < LIMIT_S + SLACK_S, f"an end after {LIMIT_S} s", elapsed_s)
    bench.expect(session.is_alive, "a session that is alive", session.is_alive)
    await bench.run(session, "x > 0", value="True")


async def the_time_limit_interrupts_a_wait(bench: Bench) -> None:
    session = await bench.open()
    code = "x = 1\nimport time\ntime.sleep(1000)"
    await bench.run(session, code, timeout_s=LIMIT_S, status=ExecStatus.TIMEOUT)
    await bench.run(session, "x", value="1")


async def a_snippet_that_swallows_interrupts_is_killed(bench: Bench) -> None:
    session = await bench.open()
    code = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "def go_on():\n    while True:\n        try:\n            time.sleep(0.01)\n"
        "        except BaseException:\n            pass\ngo_on()"
    )
    await bench.run(session, code, timeout_s=LIMIT_S, status=ExecStatus.KILLED)
    await bench.expect_dead(session)


async def a_process_that_ends_takes_its_session_along(bench: Bench) -> None:
    session = await bench.open()
    await bench.run(session, "import os; os._exit(0)", status=ExecStatus.DIED)
    await bench.expect_dead(session)


async def a_cancelled_run_ends_the_session(bench: Bench) -> None:
    session = await bench.open()
    running = asyncio.create_task(session.run("import time; time.sleep(1000)", 1000.0))
    await asyncio.sleep(LIMIT_S)
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=SLACK_S)
    bench.expect(bool(done) and running.cancelled(), "a run that was cancelled", running)
    await bench.expect_dead(session)


async def a_closed_session_runs_nothing(bench: Bench) -> None:
    session = await bench.open()
    await session.close()
    await session.close()
    await bench.expect_dead(session)


# Texts


async def a_flood_of_output_is_bounded(bench: Bench) -> None:
    session = await bench.open()
    code = "import sys\nprint('first')\nfor _ in range(160): print('x' * (1 << 16))\nprint('last')"
    out = (await bench.run(session, code)).stdout
    bench.expect(len(out) <= MAX_CHARS, f"at most {MAX_CHARS} characters", len(out))
    bench.expect(
        out.startswith("first\n") and out.endswith("last\n"), "the beginning and the end", out[:20] + out[-20:]
    )
    value = (await bench.run(session, "'x' * (5 << 20)")).value
    bench.expect(len(value or "") <= MAX_CHARS, f"a value of at most {MAX_CHARS} characters", len(value or ""))
    error = (await bench.run(session, "raise ValueError('x' * (5 << 20))", status=ExecStatus.ERROR)).error
    bench.expect(len(error or "") <= MAX_CHARS, f"an error of at most {MAX_CHARS} characters", len(error or ""))


async def any_character_comes_back(bench: Bench) -> None:
    session = await bench.open()
    text = "a\u00e9\u4e16\U0001f600\u202e\U0010ffff\u0378"
    await bench.run(session, f"print({text!r} + chr(0))", stdout=text + "\0\n")
    await bench.run(session, f"{text!r} == {text!a}", value="True")


async def no_text_is_invalid(bench: Bench) -> None:
    session = await bench.open()
    results = [
        await bench.run(session, "print('a\\ud800b')"),
        await bench.run(session, "import sys\nsys.stdout.buffer.write(b'a\\xff\\xfeb')\nsys.stdout.flush()"),
        await bench.run(session, "import sys; print('a\\udfff', file=sys.stderr)"),
        await bench.run(session, "raise ValueError('a\\ud800')", status=ExecStatus.ERROR),
        await bench.run(session, "class Odd:\n    def __repr__(self): return 'a\\ud800'\nOdd()"),
    ]
    for result in results:
        for text in (result.stdout, result.stderr, result.value or "", result.error or ""):
            valid = text.encode(errors="replace").decode()
            bench.expect(text == valid, "valid Unicode", text)
    bench.expect(all("a" in f"{one.stdout}{one.stderr}{one.value}{one.error}" for one in results), "the rest", results)


async def code_that_is_no_text_is_an_error(bench: Bench) -> None:
    session = await bench.open()
    for code in ("x = '\0'", "x = '\ud800'"):
        result = await session.run(code, 60.0)
        bench.expect(result.status in (ExecStatus.OK, ExecStatus.ERROR), "status ok or error", result)
    await bench.run(session, "1", value="1")


# Functions of the host's


async def a_function_gets_its_arguments_and_gives_its_result(bench: Bench) -> None:
    seen: list[Any] = []

    async def look_up(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs, asyncio.get_running_loop()))
        return {"list": [1, 2.5, None, True], "text": "\u00e9\U0001f600"}

    session = await bench.open({"look_up": look_up})
    await bench.run(session, "found = look_up(1, [2.5, {'a': None}], key='\u4e16')")
    args, kwargs, loop = seen[0]
    bench.expect(args == (1, [2.5, {"a": None}]) and kwargs == {"key": "\u4e16"}, "the arguments", (args, kwargs))
    bench.expect(loop is asyncio.get_running_loop(), "the function to run in the caller's event loop", loop)
    await bench.run(session, "found", value="{'list': [1, 2.5, None, True], 'text': '\u00e9\U0001f600'}")


async def a_function_may_be_called_often(bench: Bench) -> None:
    async def add(a: int, b: int) -> int:
        return a + b

    session = await bench.open({"add": add})
    await bench.run(session, "n = 0\nfor i in range(100): n = add(n, i)\nn", value="4950")
    await bench.run(session, "add(add(1, 2), add(3, 4))", value="10")


async def a_function_that_raises_raises_in_the_snippet(bench: Bench) -> None:
    async def fail(text: str) -> None:
        raise KeyError(text) if text else KeyError

    session = await bench.open({"fail": fail})
    code = "try: fail('no such row')\nexcept RuntimeError as error: said = str(error)\nsaid"
    result = await bench.run(session, code)
    bench.expect("no such row" in str(result.value), "the exception's text", result.value)
    result = await bench.run(session, "fail('')", status=ExecStatus.ERROR)
    bench.expect("RuntimeError: KeyError" in str(result.error), "a RuntimeError that names KeyError", result.error)


async def the_time_of_a_function_is_not_the_snippets(bench: Bench) -> None:
    async def wait() -> str:
        await asyncio.sleep(2 * LIMIT_S)
        return "done"

    session = await bench.open({"wait": wait})
    result = await bench.run(session, "wait()", timeout_s=LIMIT_S, value="'done'")
    bench.expect(result.duration_s < LIMIT_S, f"a duration_s without the {2 * LIMIT_S} s", result.duration_s)


async def what_is_no_plain_data_is_an_error_in_the_snippet(bench: Bench) -> None:
    calls: list[Any] = []

    async def give(*args: Any) -> Any:
        calls.append(args)
        return object()

    session = await bench.open({"give": give})
    await bench.run(session, "give(object())", status=ExecStatus.ERROR)
    bench.expect(not calls, "no call with such an argument", calls)
    result = await bench.run(session, "give(1)", status=ExecStatus.ERROR)
    bench.expect("RuntimeError" in str(result.error), "a RuntimeError about the function's result", result.error)
    await bench.run(session, "1", value="1")


async def a_long_text_passes_through_a_function(bench: Bench) -> None:
    async def twice(text: str) -> str:
        return 2 * text

    session = await bench.open({"twice": twice})
    await bench.run(session, f"len(twice('x' * {NUM_CHARS}))", value=str(2 * NUM_CHARS))


async def half_a_surrogate_pair_reaches_no_function(bench: Bench) -> None:
    seen: list[str] = []

    async def take(text: str) -> None:
        seen.append(text)

    session = await bench.open({"take": take})
    await session.run("take('a\\ud800')", 60.0)
    bench.expect(all(text.encode(errors="replace").decode() == text for text in seen), "valid Unicode", seen)
    await bench.run(session, "1", value="1")


async def a_run_that_is_cancelled_in_a_function_ends_the_session(bench: Bench) -> None:
    is_waiting = asyncio.Event()

    async def wait() -> None:
        is_waiting.set()
        await asyncio.sleep(1000.0)

    session = await bench.open({"wait": wait})
    running = asyncio.create_task(session.run("wait()", 60.0))
    await is_waiting.wait()
    running.cancel()
    await asyncio.wait([running], timeout=SLACK_S)
    await bench.expect_dead(session)


# Several sessions


async def sessions_are_apart(bench: Bench) -> None:
    one, two = await bench.open(), await bench.open()
    await bench.run(one, "x = 1\nimport builtins, math\nbuiltins.y = math.pi = 3\nopen('file', 'w').close()")
    await bench.run(two, "'x' in globals(), 'y' in dir(__builtins__)", value="(False, False)")
    await bench.run(two, "import math, os; math.pi > 3, os.listdir()", value="(True, [])")


async def files_are_kept_from_snippet_to_snippet(bench: Bench) -> None:
    session = await bench.open()
    await bench.run(session, "import os\nos.mkdir('d')\nwith open('d/f', 'w') as file: file.write('kept')")
    await bench.run(session, "print(open('d/f').read())", stdout="kept\n")


async def sessions_run_at_the_same_time(bench: Bench) -> None:
    sessions = await asyncio.gather(*(bench.open() for _ in range(NUM_SESSIONS)))
    started_at = time.monotonic()
    runs = (bench.run(one, f"import time; time.sleep(1); {n}", value=str(n)) for n, one in enumerate(sessions))
    await asyncio.gather(*runs)
    elapsed_s = time.monotonic() - started_at
    bench.expect(
        elapsed_s < NUM_SESSIONS / 2, f"less than {NUM_SESSIONS / 2:g} s for {NUM_SESSIONS} sleeps", elapsed_s
    )


async def one_that_ends_leaves_the_others(bench: Bench) -> None:
    stays, dies = await bench.open(), await bench.open()
    running = asyncio.create_task(bench.run(stays, "import time; time.sleep(0.5); x = 1"))
    await bench.run(dies, "import os; os._exit(1)", status=ExecStatus.DIED)
    await dies.close()
    await running
    await bench.run(stays, "x", value="1")


async def an_executor_closes_what_is_open(bench: Bench) -> None:
    session = await bench.open()
    await bench.run(session, "x = 1")
    await bench.executor.close()
    await bench.executor.close()
    with suppress(SessionError):
        await bench.run(session, "x", status=ExecStatus.DIED, value=None)
    await session.close()


CHECKS: tuple[Check, ...] = (
    state_is_kept_from_snippet_to_snippet,
    state_that_cannot_be_pickled_is_kept,
    the_value_is_that_of_the_last_expression,
    output_is_kept_apart_and_not_repeated,
    code_without_a_statement_does_nothing,
    code_may_be_long,
    the_duration_is_the_snippets_own,
    a_syntax_error_says_where,
    an_exception_says_what_and_where,
    an_exit_ends_the_snippet_only,
    an_exception_without_a_text_is_an_error,
    the_time_limit_interrupts_and_keeps_state,
    the_time_limit_interrupts_a_wait,
    a_snippet_that_swallows_interrupts_is_killed,
    a_process_that_ends_takes_its_session_along,
    a_cancelled_run_ends_the_session,
    a_closed_session_runs_nothing,
    a_flood_of_output_is_bounded,
    any_character_comes_back,
    no_text_is_invalid,
    code_that_is_no_text_is_an_error,
    a_function_gets_its_arguments_and_gives_its_result,
    a_function_may_be_called_often,
    a_function_that_raises_raises_in_the_snippet,
    the_time_of_a_function_is_not_the_snippets,
    what_is_no_plain_data_is_an_error_in_the_snippet,
    a_long_text_passes_through_a_function,
    half_a_surrogate_pair_reaches_no_function,
    a_run_that_is_cancelled_in_a_function_ends_the_session,
    sessions_are_apart,
    files_are_kept_from_snippet_to_snippet,
    sessions_run_at_the_same_time,
    one_that_ends_leaves_the_others,
    an_executor_closes_what_is_open,  # the last one: nothing can be opened with confidence after it
)
