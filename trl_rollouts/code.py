"""Code that the model writes: an environment whose step runs the blocks of one turn, and shows what came of them.

A block is text between two marks (`CodeFormat`), which the model learns from the prompt. The rollout stops a
completion behind the closing mark, so the result follows the code at once, and the model reads it before it goes on.
Whatever is wrong with code is answered like a result; a trajectory ends when the model writes no block.

Not here: where code runs (`sandbox`), and what of a turn was sampled (`episode`).
"""

import functools
import json
import logging
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .env import StepResult
from .parsing.formats import PLAIN
from .sandbox import ExecResult, ExecStatus, Executor, Session
from .tools import Tool, Toolbox
from .trajectory import Message

logger = logging.getLogger(__name__)

MAX_STDERR_LINES = 10
MAX_BLOCKS_PER_TURN = 8
MAX_CALLS_PER_BLOCK = 32
MAX_ARGUMENTS_CHARS = 64 << 10
"""Of all calls of a block, as JSON. They are kept for the reward functions."""

CODE_NAME = "python"
"""By which blocks are reported beside functions."""

_LOST = {ExecStatus.KILLED, ExecStatus.DIED, ExecStatus.PROTOCOL}
_ERROR_KINDS = {ExecStatus.OK: None, ExecStatus.ERROR: "exception", ExecStatus.EXIT: None}


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """How code is marked in a turn, and its result in the answer."""

    opening: str
    closing: str
    stop: str
    """Ends a completion."""
    find: Callable[[str], list[str]]
    """The code between marks, in order."""
    begun: re.Pattern[str]
    """Matches a mark, in a turn without a whole block."""
    result: str
    """With `{}` for the text."""

    def blocks(self, text: str) -> list[str]:
        """The code of each block, as it is run: without an indentation or a fence around all of it."""
        return [textwrap.dedent(_FENCED.sub(r"\1", code)).strip("\r\n") for code in self.find(text)]

    def problem(self, text: str) -> str | None:
        """What is wrong with a turn that was meant to have a block, and has none."""
        if self.begun.search(text) is None:
            return None
        return f"the code is not between {self.opening} and {self.closing}, so it was not run."


def _between_tags(text: str) -> list[str]:
    """Of two opening tags before a closing one, the first is prose."""
    return re.findall(r"<code>((?:(?!<code>).)*?)</code>", text, re.DOTALL)


def _between_fences(text: str) -> list[str]:
    """Python's blocks of Markdown. Those of other languages are passed over: their end is no beginning."""
    blocks: list[str] = []
    lines: list[str] | None = None
    fence = ""
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):  # `splitlines` knows ends of lines that Markdown does not
        bare = line.strip()
        if fence and len(bare) >= len(fence) and not bare.strip(fence[0]):
            blocks += ["".join(lines)] if lines is not None else []
            lines, fence = None, ""
        elif lines is not None:
            lines.append(line)
        elif match := _PYTHON_FENCE.search(line):
            lines, fence = [], match[1]
        elif not fence and (match := _ANY_FENCE.match(line)):
            fence = match[1]
    return blocks


# A run of backticks is entered once, at its beginning, and never given back: a long one takes linear time.
_PYTHON_FENCE = re.compile(r"(?<![`~])(`{3,}+|~{3,}+)[ \t]*+(?:python\d?|py)\b(?![^\n`~]*[`~])", re.IGNORECASE)
_ANY_FENCE = re.compile(r"[ \t]*+(`{3,}+|~{3,}+)(?![^\n`]*`)")
_FENCED = re.compile(r"\A\s*```(?:python|py)?[ \t\r]*\n(.*?)```\s*\Z", re.DOTALL | re.IGNORECASE)
"""What chat models put around code out of habit."""

FORMATS = {
    "tags": CodeFormat(
        opening="<code>",
        closing="</code>",
        stop="</code>",
        find=_between_tags,
        begun=re.compile(r"</?code>"),
        result="<result>\n{}\n</result>",
    ),
    "fenced": CodeFormat(
        opening="```python",
        closing="```",
        stop="\n```\n",
        find=_between_fences,
        begun=_PYTHON_FENCE,
        result="```output\n{}\n```",
    ),
}

INSTRUCTIONS = (
    "You can run Python. Write code between {opening} and {closing}: it is run, and what it prints and the value of "
    "its last expression are shown to you. Variables and files stay from one piece of code to the next. Once you know "
    "the answer, give it without code."
)
"""The system message of a prompt that has none of its own; `{opening}` and `{closing}` are the format's marks."""


class CodeEnv:
    """Runs the code of each turn in a session of its own, until the model writes none.

    Args:
        executor: opens the session, when the first code comes.
        tools: functions that the code may call; they run on this side.
        timeout_s: time limit of one block, in seconds.
        tool_timeout_s: time limit of all calls of functions by one block, in seconds, beside its own time.
        code_format: how code is marked.
        results_as: "message", a user's message, or "inline", text within the assistant's own turn.
        instructions: the system message of a prompt that has none; None: no message.

    Every block is reported in `info["tool_calls"]` as a call of "python" with the argument `code`, and every call that
    the code made of a function behind it. A block's `result` is the `ExecResult` as a dict; its `error` is None,
    "exception", "timeout", "killed", "died", "protocol", or "parse_error" for half a block, which was not run.
    """

    def __init__(
        self,
        executor: Executor,
        tools: Sequence[Tool] = (),
        *,
        timeout_s: float,
        tool_timeout_s: float,
        code_format: CodeFormat,
        results_as: Literal["inline", "message"],
        instructions: str | None,
    ) -> None:
        self._executor = executor
        self._toolbox = Toolbox(tools)
        self._timeout_s = timeout_s
        self._tool_timeout_s = tool_timeout_s
        self._format = code_format
        self.answer_role = "user" if results_as == "message" else None
        self._instructions = instructions
        self._session: Session | None = None
        self._reports: list[dict[str, Any]] = []
        """Of the turn."""
        self._called: list[dict[str, Any]] = []
        """Of functions by the block that runs."""
        self._num_argument_chars = 0
        """Of these."""

    async def reset(self, prompt: list[Message]) -> list[Message]:
        if self._instructions is None:
            return prompt
        if prompt[0]["role"] in ("system", "developer") or prompt[0].get("is_rendered"):
            text = "".join(str(message.get("content")) for message in prompt)
            if unsaid := [word for word in (self._format.opening, *self._toolbox.tools) if word not in text]:
                _warn_unsaid(tuple(unsaid))
            return prompt
        return [{"role": "system", "content": self._instructions}, *prompt]

    async def step(self, action: Message) -> StepResult:
        self._reports = []
        text = action["content"]
        if blocks := self._format.blocks(text):
            shown = [await self._run(code) for code in blocks[:MAX_BLOCKS_PER_TURN]]
            if len(blocks) > MAX_BLOCKS_PER_TURN:
                shown.append(f"Error: only the first {MAX_BLOCKS_PER_TURN} pieces of code of a turn are run.")
        elif problem := self._format.problem(text):
            shown = [f"Error: {problem}"]
            self._report(text, None, "parse_error", shown[0], 0.0)
        elif text.endswith(self._format.stop):  # the end of another language's fence: it had not finished
            return StepResult(inline="")
        else:
            return StepResult(terminated=True)
        answer = "\n".join(self._format.result.format(part) for part in shown)
        info = {"tool_calls": self._reports}
        if self.answer_role is None:
            return StepResult(inline=f"\n{answer}\n", info=info)
        return StepResult([{"role": "user", "content": answer}], info=info)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _run(self, code: str) -> str:
        """Run a block and report it: what the model is shown of it."""
        if self._session is None:
            self._session = await self._executor.open(list(self._toolbox.tools), self._call)
        session, self._called, self._num_argument_chars = self._session, [], 0
        result = await session.run(code, self._timeout_s)
        shown = shown_result(result)
        kind = _ERROR_KINDS.get(result.status, str(result.status))
        self._report(code, _as_dict(result), kind, shown, result.duration_s)
        self._reports += self._called
        if not session.is_alive:  # a further block gets a new one
            self._session = None
            await session.close()
        return shown

    def _report(self, code: str, result: Any, error: str | None, content: str, duration_s: float) -> None:
        self._reports.append(
            {
                "name": CODE_NAME,
                "arguments": {"code": code},
                "result": result,
                "error": error,
                "content": content,
                "duration_s": duration_s,
            }
        )

    async def _call(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Answer a function's call from the sandbox. A failure is raised there, as it is told to a model."""
        if len(self._called) >= MAX_CALLS_PER_BLOCK:
            raise RuntimeError(f"only {MAX_CALLS_PER_BLOCK} calls of functions are answered in one piece of code")
        left_s = self._tool_timeout_s - sum(report["duration_s"] for report in self._called)
        arguments, problem = self._toolbox.tools[name].named(args, kwargs)
        self._num_argument_chars += len(json.dumps(arguments))
        if self._num_argument_chars > MAX_ARGUMENTS_CHARS:
            arguments, problem = (
                {},
                f"the arguments in one piece of code are longer than {MAX_ARGUMENTS_CHARS} characters.",
            )
        wrong = ("invalid_arguments", problem) if problem else None
        report = await self._toolbox.run(name, arguments, max(left_s, 0.001), wrong)
        self._called.append(report)
        if report["error"] is None:
            try:
                return as_plain_data(report["result"])
            except ValueError as error:
                report.update(error="exception", content=f"Error: {name} returned {error}.")
                logger.warning("The function %s returned %s. Return plain data.", name, error)
        raise RuntimeError(report["content"].removeprefix("Error: "))


@functools.cache
def _warn_unsaid(words: tuple[str, ...]) -> None:
    """Once for the same words."""
    logger.warning(
        "A prompt with a system message of its own, or a string, does not say %s: the model will not know how to run "
        "code, or of these functions. Say it there, or leave the system message out.",
        ", ".join(words),
    )


def as_plain_data(value: Any) -> Any:
    """What a function returned as JSON has it: numpy's numbers and arrays, sets and dataclasses too.

    Raises:
        ValueError: it is none. As text it would be another value, silently.
    """
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    def convert(other: Any) -> Any:
        if hasattr(other, "tolist"):
            return other.tolist()
        raise ValueError(f"{type(other).__name__}, which is no plain data (numbers, texts, lists, dicts)")

    try:
        return to_jsonable_python(value, fallback=convert)
    except (PydanticSerializationError, RecursionError) as error:
        raise ValueError(f"what is no plain data: {error}") from None


def code_parser(code_format: CodeFormat) -> Callable[[str], Message]:
    """A parser that leaves turns with code as they were written, thoughts and all: code may hold their marks."""

    def parse(text: str) -> Message:
        has_code = code_format.begun.search(text) is not None
        return {"role": "assistant", "content": text} if has_code else PLAIN.parse(text, {})

    return parse


def shown_result(result: ExecResult) -> str:
    """What a model is shown of a snippet's end: output, value, the last lines of stderr, what went wrong."""
    stderr = result.stderr.rstrip("\n").splitlines()[-MAX_STDERR_LINES:]
    parts = [result.stdout.rstrip("\n"), result.value or "", "\n".join(stderr), result.error or ""]
    if result.status in _LOST:
        parts.append("All variables and files are lost.")
    elif result.status is ExecStatus.TIMEOUT:
        parts.append("Variables and files are kept.")
    return "\n".join(part for part in parts if part) or "(no output)"


def code_instructions(code_format: CodeFormat, tools: Sequence[Tool]) -> str:
    """The default system message, with a line for each function."""
    text = INSTRUCTIONS.format(opening=code_format.opening, closing=code_format.closing)
    if not tools:
        return text
    lines = [f"- {tool.description}" for tool in tools]
    return "\n".join([text, "", "The code can call these functions:", *lines])


def _as_dict(result: ExecResult) -> dict[str, Any]:
    return {
        "status": str(result.status),
        "stdout": result.stdout,
        "stderr": result.stderr,
        "value": result.value,
        "error": result.error,
    }
