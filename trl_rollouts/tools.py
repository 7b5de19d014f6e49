"""Functions that the model calls: an environment whose step runs the calls of one turn and answers each.

A function's type hints and Google-style docstring become its JSON schema in the prompt, and the same hints check what
the model sends. Whatever is wrong with a call is answered in a sentence the model can learn from; a tool that raises
or hangs concerns its own call only.

Not here: the format in which a model writes calls (`parsing`), and the way they are shown to it (its chat template).
"""

import asyncio
import difflib
import inspect
import json
import time
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from .env import StepResult
from .errors import SetupError
from .parsing import read_arguments
from .trajectory import Message
from .worker import call, exits_as_errors

MAX_CALLS_PER_TURN = 32


class Tool:
    """A function with its schema and the types of its arguments.

    Raises:
        SetupError: the function has no docstring, an argument has no type hint or no description, or it takes
            `*args` or positional-only arguments.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        from pydantic import TypeAdapter
        from transformers.utils.chat_template_utils import get_json_schema

        if not callable(function):
            raise SetupError(f"tools must be functions, not {function!r}.")
        self.function = function
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self._signature = inspect.signature(function)
        for name, parameter in self._signature.parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise SetupError(
                    f"The tool {self.name} takes {parameter}; a call names each argument, so {name} cannot be."
                )
        try:
            self.schema: dict[str, Any] = get_json_schema(function)
            hints = typing.get_type_hints(function)
            self._adapters = {name: TypeAdapter(hints[name]) for name in self._signature.parameters}
        except Exception as cause:  # several kinds, all about the function's text
            raise SetupError(
                f"The tool {self.name} cannot be described to the model: {cause} Give it type hints and a docstring "
                "with an `Args:` section that has a line for each argument."
            ) from cause

    def named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        """The arguments of a call written in Python by their names, or what is wrong with them."""
        try:
            return self._signature.bind_partial(*args, **kwargs).arguments, None
        except TypeError as error:
            return {"*": list(args), **kwargs}, f"{self.name}{self._signature}: {error}."

    @property
    def description(self) -> str:
        """The function in one line, as its caller in Python sees it."""
        return f"{self.name}{self._signature}: {' '.join(self.schema['function']['description'].split())}"

    def bind(self, arguments: Any) -> tuple[dict[str, Any], str | None]:
        """The arguments as the function takes them, converted where nothing is lost, or what is wrong with them."""
        if not isinstance(arguments, dict):
            return {}, f"The arguments of {self.name} must be a JSON object."
        known = list(self._signature.parameters)
        if extra := [name for name in arguments if name not in known]:
            return (
                {},
                f"{self.name} has no argument {', '.join(extra)}. Its arguments are: {', '.join(known) or 'none'}.",
            )
        required = [n for n, parameter in self._signature.parameters.items() if parameter.default is parameter.empty]
        if missing := [name for name in required if name not in arguments]:
            return {}, f"{self.name} needs the argument {', '.join(missing)}."
        bound = {}
        for name, value in arguments.items():
            try:
                bound[name] = _converted(self._adapters[name], value)
            except ValueError as error:
                return {}, f"{self.name}: argument {name}={json.dumps(value)[:100]}: {error}."
        return bound, None


def _converted(adapter: Any, value: Any) -> Any:
    """The value as its type hint has it; text that holds JSON ("[1, 2]" for a list) is read, an integer becomes text.

    Raises:
        ValueError: it is not of that type, in pydantic's words.
    """
    from pydantic import ValidationError

    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        with suppress(ValidationError):
            if isinstance(value, str):
                return adapter.validate_json(value)
            if type(value) is int:
                return adapter.validate_python(str(value))
        raise ValueError(error.errors()[0]["msg"]) from None


class Toolbox:
    """Functions by name. Runs calls of them and reports every one.

    A report is a dict of `name`, `arguments`, `result` (what the function returned), `error` (None, or one of
    "parse_error", "unknown_tool", "invalid_arguments", "exception", "timeout"), `content` (the answer as text) and
    `duration_s`.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = {tool.name: tool for tool in tools}

    async def run(
        self, name: str, arguments: Any, timeout_s: float, problem: tuple[str, str] | None = None
    ) -> dict[str, Any]:
        """Call a function. With a `problem`, an error and what it says, it is only reported."""
        started = time.monotonic()
        result, error, content = (None, *problem) if problem else await self._answer(name, arguments, timeout_s)
        return {
            "name": name,
            "arguments": arguments,
            "result": result,
            "error": error,
            "content": content if error is None else f"Error: {content}"[:_MAX_ERROR_CHARS],
            "duration_s": time.monotonic() - started,
        }

    async def _answer(self, name: str, arguments: Any, timeout_s: float) -> tuple[Any, str | None, str]:
        """The result, the kind of error, and the text for the model."""
        tool = self.tools.get(name)
        if tool is None:
            return None, "unknown_tool", self._unknown(name)
        bound, problem = tool.bind(arguments)
        if problem is not None:
            return None, "invalid_arguments", problem
        task = asyncio.ensure_future(call(tool.function, **bound))
        task.add_done_callback(_forget)
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
        finally:
            task.cancel()  # and not waited for: a tool may catch the cancellation and go on
        if not done:
            return None, "timeout", f"{name} took longer than {timeout_s:.3g} seconds and was given up."
        try:
            result = task.result()
            with exits_as_errors():  # it may run code of the result's
                content = as_text(result)
        except Exception as failure:
            return None, "exception", _one_line(failure)
        return result, None, content

    def _unknown(self, name: str) -> str:
        nearest = difflib.get_close_matches(name, self.tools, n=1)
        guess = f" Did you mean {nearest[0]}?" if nearest else ""
        return f"there is no tool {name[:100]!r}.{guess} The tools are: {', '.join(self.tools) or 'none'}."


class ToolEnv:
    """Runs the model's calls until it answers without one.

    Args:
        tools: what the model may call. A row whose task has a list of "tool_names" is given these only.
        timeout_s: time limit of each call, in seconds.
        stop_tools: names of tools that end the episode once one of them has returned.

    Every call is reported in `info["tool_calls"]`, see `Toolbox`; the model reads `max_result_tokens` of its content.
    A further error is "too_many_calls".
    """

    def __init__(self, tools: Sequence[Tool], *, timeout_s: float, stop_tools: Sequence[str] = ()) -> None:
        self._toolbox = Toolbox(tools)
        self._timeout_s = timeout_s
        self._stop_tools = frozenset(stop_tools)
        self.tools = [tool.schema for tool in tools]

    async def reset(self, prompt: list[Message]) -> list[Message]:
        task = prompt[-1].get("task") if prompt else None
        names = task.get("tool_names") if isinstance(task, dict) else None
        if names is not None:
            tools = self._toolbox.tools
            if not isinstance(names, list) or (wrong := [name for name in names if name not in [*tools]]):
                problem = f"knows no {wrong[0]!r:.100}" if isinstance(names, list) else "takes a list of names"
                raise SetupError(
                    f"A row's task has tool_names={names!r:.200}. tool_rollout {problem}; it was given "
                    f"{', '.join(tools)}."
                )
            self._toolbox = Toolbox([tools[name] for name in names])
            self.tools = [tool.schema for tool in self._toolbox.tools.values()]
        return prompt

    async def step(self, action: Message) -> StepResult:
        calls = action.get("tool_calls") or []
        records = await asyncio.gather(*(self._run(index, item) for index, item in enumerate(calls)))
        is_stopped = any(record["name"] in self._stop_tools and record["error"] is None for record in records)
        answers = [
            {
                "role": "tool",
                "tool_call_id": item.get("id", f"call{index:05}"),
                "name": record["name"],
                "content": record["content"],
            }
            for index, (item, record) in enumerate(zip(calls, records, strict=True))
        ]
        return StepResult(answers, terminated=not calls or is_stopped, info={"tool_calls": records})

    async def close(self) -> None:
        pass

    async def _run(self, index: int, item: dict[str, Any]) -> dict[str, Any]:
        problem = None
        if index >= MAX_CALLS_PER_TURN:
            problem = "too_many_calls", f"only the first {MAX_CALLS_PER_TURN} calls of a turn are run."
        elif item.get("error") is not None:
            problem = "parse_error", item["error"]
        arguments = read_arguments(item["function"].get("arguments"))
        return await self._toolbox.run(item["function"]["name"], arguments, self._timeout_s, problem)


_MAX_ERROR_CHARS = 500


def _one_line(failure: Exception) -> str:
    try:
        with exits_as_errors():
            words = " ".join(str(failure).split())
    except Exception:  # an exception's own code, the user's
        words = "(its message cannot be read)"
    return f"{type(failure).__name__}: {words}"


def _forget(task: "asyncio.Future[Any]") -> None:
    """Takes the late outcome of a tool that was given up, which asyncio would report as never retrieved."""
    if not task.cancelled():
        task.exception()


def as_text(result: Any) -> str:
    """A tool's result as the model reads it: text as it is, data as JSON, anything else by `str`."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
