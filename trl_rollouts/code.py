"""Code that the model writes: an environment whose step runs the blocks of one turn, and shows what came of them.

A block is text between two marks (`CodeFormat`), which the model learns from the prompt. The rollout stops a
completion behind the closing mark, so the result follows the code at once, and the model reads it before it goes on.
Whatever is wrong with code is answered like a result; a trajectory ends when the model writes no block.

Not here: where code runs (`sandbox`), and what of a turn was sampled (`episode`).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .env import StepResult
from .sandbox import ExecResult, ExecStatus, Executor, Session
from .tools import Tool, Toolbox, as_text
from .trajectory import Message

MAX_STDERR_LINES = 10
MAX_BLOCKS_PER_TURN = 8

_LOST = {ExecStatus.KILLED, ExecStatus.DIED, ExecStatus.PROTOCOL}
_ERROR_KINDS = {ExecStatus.OK: None, ExecStatus.ERROR: "exception", ExecStatus.EXIT: None}


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """How code is marked in a turn, and its result in the answer."""

    opening: str
    closing: str
    stop: str
    """Ends a completion."""
    block: re.Pattern[str]
    """Matches a whole block; its group "code" is what is run."""
    begun: re.Pattern[str]
    """Matches the mark of a block that has no end, in what is left without the whole ones."""
    result: str
    """With `{}` for the text."""

    def blocks(self, text: str) -> list[str]:
        """The code of each block, in order."""
        return [code for match in self.block.finditer(text) if (code := match["code"]) is not None]

    def problem(self, text: str) -> str | None:
        """What is wrong with a turn that was meant to have a block, and has none."""
        rest = self.block.sub("", text)
        if self.begun.search(rest) is None:
            return None
        return f"the code is not between {self.opening} and {self.closing}, so it was not run."


FORMATS = {
    "tags": CodeFormat(
        opening="<code>",
        closing="</code>",
        stop="</code>",
        block=re.compile(r"<code>(?P<code>(?:(?!<code>).)*?)</code>", re.DOTALL),
        begun=re.compile(r"</?code>"),
        result="<result>\n{}\n</result>",
    ),
    "fenced": CodeFormat(
        opening="```python",
        closing="```",
        stop="\n```\n",
        # Fences of other languages are matched as well, and have no code: their end is no beginning.
        block=re.compile(
            r"^```(?:(?:python|py)[ \t]*\n(?P<code>.*?)|(?!(?:python|py)[ \t]*$)[^\n]*\n.*?)^```[ \t]*$",
            re.DOTALL | re.MULTILINE | re.IGNORECASE,
        ),
        begun=re.compile(r"^```(?:python|py)[ \t]*$", re.MULTILINE | re.IGNORECASE),
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
        tool_timeout_s: time limit of one call of a function, in seconds; it does not count as the block's time.
        code_format: how code is marked.
        results_as: "message", a user's message, or "inline", text within the assistant's own turn.
        instructions: the system message of a prompt that has none; None: no message.

    Every block is reported in `info["tool_calls"]` as a call of "python" with the argument `code`, and every call that
    the code made of a function behind it. A block's `result` is the `ExecResult` as a dict; its `error` is None,
    "exception", "timeout", "killed", "died" or "protocol".
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
        self._toolbox = Toolbox(tools, tool_timeout_s)
        self._timeout_s = timeout_s
        self._format = code_format
        self._results_as = results_as
        self._instructions = instructions
        self._session: Session | None = None
        self._calls: list[dict[str, Any]] = []
        """Reports of the turn."""

    async def reset(self, prompt: list[Message]) -> list[Message]:
        if self._instructions is None or prompt[0]["role"] in ("system", "developer") or prompt[0].get("is_rendered"):
            return prompt
        return [{"role": "system", "content": self._instructions}, *prompt]

    async def step(self, action: Message) -> StepResult:
        self._calls = []
        text = "\n".join(part for part in (action.get("reasoning_content"), action["content"]) if part)
        blocks = self._format.blocks(text)
        if blocks:
            shown = [await self._run(code) for code in blocks[:MAX_BLOCKS_PER_TURN]]
            if len(blocks) > MAX_BLOCKS_PER_TURN:
                shown.append(f"Error: only the first {MAX_BLOCKS_PER_TURN} pieces of code of a turn are run.")
        elif problem := self._format.problem(text):
            shown = [f"Error: {problem}"]
            self._report(text, None, "parse_error", shown[0], 0.0)
        else:
            return StepResult(terminated=True)
        answer = "\n".join(self._format.result.format(part) for part in shown)
        info = {"tool_calls": self._calls}
        if self._results_as == "inline":
            return StepResult(inline=f"\n{answer}\n", info=info)
        return StepResult([{"role": "user", "content": answer}], info=info)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _run(self, code: str) -> str:
        """Run a block and report it: what the model is shown of it."""
        if self._session is None:
            self._session = await self._executor.open(list(self._toolbox.tools), self._call)
        session = self._session
        first = len(self._calls)
        result = await session.run(code.strip("\n"), self._timeout_s)
        shown = shown_result(result)
        calls_made, self._calls = self._calls[first:], self._calls[:first]
        kind = _ERROR_KINDS.get(result.status, str(result.status))
        self._report(code, _as_dict(result), kind, shown, result.duration_s)
        self._calls += calls_made
        if not session.is_alive:  # a further block gets a new one
            self._session = None
            await session.close()
        return shown

    def _report(self, code: str, result: Any, error: str | None, content: str, duration_s: float) -> None:
        self._calls.append(
            {
                "name": "python",
                "arguments": {"code": code},
                "result": result,
                "error": error,
                "content": content,
                "duration_s": duration_s,
            }
        )

    async def _call(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Answer a function's call from the sandbox. A failure is raised there, as it is told to a model."""
        tool = self._toolbox.tools.get(name)
        arguments, problem = tool.named(args, kwargs) if tool is not None else (kwargs, None)
        report = await self._toolbox.run(name, arguments, ("invalid_arguments", problem) if problem else None)
        self._calls.append(report)
        if report["error"] is not None:
            raise RuntimeError(report["content"].removeprefix("Error: "))
        try:
            json.dumps(report["result"])
        except (TypeError, ValueError):
            return as_text(report["result"])
        return report["result"]


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
