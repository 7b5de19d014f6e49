"""The rows of the chaos run: what each is asked, what the model says to it, how its environment behaves, and what must
come of it.

Everything follows from a row's number and plan, which its prompt names, so that a row that got anything of another
one's is found out: `expected_ids` spells out every token.
"""

import asyncio
import re
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trl_rollouts import StepResult
from trl_rollouts.testing import Reply, byte_tokenizer

TOKENIZER = byte_tokenizer()
START, END = 257, 258
NUM_CONTEXT = 4096
NUM_BUDGET = 512
MAX_TURNS = 6
RESET_S, STEP_S, CLOSE_S = 1.5, 1.5, 0.4
HANG_S = 2.2
"""Of what hangs: beyond every limit, and short, since Python cannot end a thread."""

_ROW = re.compile(rb"#(\d{8})# (\w+)")
_TURN = bytes([1]) + b"assistant\n"  # 1 stands for START

# What follows from a plan: the reasons, and what the error says where it is "error".
OK = {"ok_sync", "ok_async", "slow", "final", "close_raises", "close_exits", "close_hangs", "close_hangs_sync"}
FAILING = {
    "factory_raises": "making the environment failed: ValueError: no place",
    "factory_exits": "making the environment failed: RuntimeError: SystemExit",
    "factory_hangs": "making the environment did not come back within reset_timeout_s",
    "reset_raises": "env.reset failed: ValueError: no reset",
    "reset_exits": "env.reset failed: RuntimeError: SystemExit",
    "reset_hangs": "env.reset did not come back within reset_timeout_s",
    "reset_hangs_sync": "env.reset did not come back within reset_timeout_s",
    "reset_nonsense": "env.reset must return the opening messages",
    "step_raises": "env.step failed: ValueError: no step",
    "step_exits": "env.step failed: RuntimeError: SystemExit",
    "step_interrupts": "env.step failed: RuntimeError: KeyboardInterrupt",
    "step_cancels": "env.step failed: RuntimeError: CancelledError",
    "step_stops": "StopIteration",
    "step_hangs": "env.step did not come back within step_timeout_s",
    "step_hangs_sync": "env.step did not come back within step_timeout_s",
    "step_swallows": "env.step did not come back within step_timeout_s",
    "step_nonsense": "env.step returned NoneType",
    "step_nan": "env.step returned reward nan",
    "step_impersonates": "only the model speaks as that",
    "final_raises": "env.final_reward failed: ValueError: no final",
    "final_nan": "env.final_reward returned reward nan",
    "final_hangs": "env.final_reward did not come back within step_timeout_s",
    "parser_raises": "the parser failed: ValueError: no parser",
    "parser_exits": "the parser failed: RuntimeError: SystemExit",
    "parser_nonsense": "The parser returned None",
    "long_prompt": "PromptTooLongError",
}
CUT = {"long_answer": "length", "long_observation": "length", "endless": "max_turns"}
PLANS = [*OK, *FAILING, *CUT]


@dataclass(frozen=True, slots=True)
class Row:
    number: int
    plan: str

    @property
    def text(self) -> str:
        return f"#{self.number:08}# {self.plan}" + (" x" * 3000 if self.plan == "long_prompt" else "")

    @property
    def prompt(self) -> list[dict[str, Any]]:
        task = {"environment": self.plan, "number": self.number}
        return [{"role": "user", "content": self.text, "task": task}]

    @property
    def prompt_ids(self) -> list[int]:
        return [START, *b"user\n", *self.text.encode(), END, 10, START, *b"assistant\n"]

    @property
    def num_turns(self) -> int:
        return MAX_TURNS if self.plan == "endless" else 1 + self.number % 4

    def expected_ids(self) -> list[int]:
        """Of a trajectory that nothing cut short."""
        ids: list[int] = []
        for turn in range(self.num_turns):
            ids += [10, START, *f"user\n{observation(self, turn - 1)}".encode(), END] if turn else []
            ids += [10, START, *b"assistant\n"] if turn else []
            ids += answer(self, turn)
        return ids

    def expected_mask(self) -> list[int]:
        mask: list[int] = []
        for turn in range(self.num_turns):
            bridge = f"\nSuser\n{observation(self, turn - 1)}E\nSassistant\n" if turn else ""
            mask += [0] * len(bridge) + [1] * len(answer(self, turn))
        return mask


def observation(row: Row, turn: int) -> str:
    return f"seen #{row.number:08}# {turn}" + ("y" * 3000 if row.plan == "long_observation" else "")


def answer(row: Row, turn: int) -> list[int]:
    if row.plan == "long_answer":
        return [97] * NUM_BUDGET
    return [*f"#{row.number:08}# turn {turn} {row.plan}".encode(), END]


def reply_with(answers: Callable[[Row, int], list[int]]) -> Callable[[list[int]], Reply]:
    """What the server says to a prompt: the answer of the row that the prompt names, at its turn."""

    def reply(prompt_ids: list[int]) -> Reply:
        said = bytes(1 if token_id == START else token_id % 256 for token_id in prompt_ids)
        found = _ROW.search(said)
        assert found is not None, said
        row = Row(int(found[1]), found[2].decode())
        turn = said.count(_TURN) - 1
        ids = answers(row, turn)
        return Reply(ids, delay_s=zlib.crc32(b"%d %d" % (row.number, turn)) % 20 / 1000)

    return reply


def parse(text: str) -> Any:
    if "parser_raises" in text:
        raise ValueError("no parser")
    if "parser_exits" in text:
        sys.exit(3)
    return None if "parser_nonsense" in text else {"role": "assistant", "content": text}


class Registry:
    """Which environments are open, and what they saw that was not theirs."""

    def __init__(self) -> None:
        self.num_made = self.num_closed_again = 0
        self.open: dict[int, str] = {}
        """By number, with their plans."""
        self.mixed_up: list[str] = []
        self._lock = threading.Lock()

    def make(self, plan: str) -> int:
        with self._lock:
            self.num_made += 1
            self.open[self.num_made] = plan
            return self.num_made

    def close(self, number: int) -> None:
        with self._lock:
            self.num_closed_again += self.open.pop(number, None) is None

    def problems(self) -> list[str]:
        told = list(self.mixed_up)
        if self.open:
            told.append(
                f"{len(self.open)} of {self.num_made} environments were not closed: {Counter(self.open.values())}"
            )
        if self.num_closed_again:
            told.append(f"{self.num_closed_again} environments were closed once more")
        return told


def factories(registry: Registry) -> dict[str, Callable[[], Any]]:
    """By plan. Some make coroutines' environments, some plain ones."""
    return {plan: _factory(plan, registry) for plan in PLANS}


def _factory(plan: str, registry: Registry) -> Callable[[], Any]:
    kinds = [_Sync] if plan.endswith("_sync") else [_Async] if plan in _ASYNC else [_Sync, _Async]

    def make() -> Any:
        if plan == "factory_raises":
            raise ValueError("no place")
        if plan == "factory_exits":
            sys.exit(3)
        if plan == "factory_hangs":
            time.sleep(HANG_S)
        env = kinds[registry.num_made % len(kinds)](plan, registry)
        if plan.startswith("final"):
            env.final_reward = env.read_final_reward
        return env

    return make


_ASYNC = {"ok_async", "slow", "reset_hangs", "step_hangs", "step_swallows", "close_hangs", "final_hangs"}


class _Episode:
    """What an environment does, apart from hanging."""

    final_reward: Any

    def __init__(self, plan: str, registry: Registry) -> None:
        self.plan, self.registry, self.turn = plan, registry, 0
        self.number = registry.make(plan)

    def begun(self, prompt: Any) -> Any:
        self.row = Row(prompt[-1]["task"]["number"], self.plan)
        if self.plan == "reset_raises":
            raise ValueError("no reset")
        if self.plan == "reset_exits":
            sys.exit(3)
        return 5 if self.plan == "reset_nonsense" else prompt

    def stepped(self, action: Any) -> Any:
        expected = TOKENIZER.decode(answer(self.row, self.turn), skip_special_tokens=True)
        if not action["content"].startswith(expected[:40]):
            self.registry.mixed_up.append(f"{self.row}: turn {self.turn} was answered {action['content']!r:.80}")
        self._misbehave()
        self.turn += 1
        reward = float("nan") if self.plan == "step_nan" else 1.0
        message = {"role": "user", "content": observation(self.row, self.turn - 1)}
        if self.plan == "step_impersonates":
            message["role"] = "assistant"
        is_last = self.turn == self.row.num_turns and self.plan not in CUT
        return StepResult([message], reward=reward, terminated=is_last) if self.plan != "step_nonsense" else None

    def _misbehave(self) -> None:
        match self.plan:
            case "step_raises":
                raise ValueError("no step")
            case "step_exits":
                sys.exit(3)
            case "step_interrupts":
                raise KeyboardInterrupt
            case "step_cancels":
                raise asyncio.CancelledError
            case "step_stops":
                raise StopIteration

    def ended(self) -> None:
        self.registry.close(self.number)
        if self.plan == "close_raises":
            raise ValueError("no close")
        if self.plan == "close_exits":
            sys.exit(3)

    def read(self) -> float:
        if self.plan == "final_raises":
            raise ValueError("no final")
        return float("nan") if self.plan == "final_nan" else 0.5


class _Sync(_Episode):
    def reset(self, prompt: Any) -> Any:
        if self.plan == "reset_hangs_sync":
            time.sleep(HANG_S)
        return self.begun(prompt)

    def step(self, action: Any) -> Any:
        if self.plan == "step_hangs_sync":
            time.sleep(HANG_S)
        return self.stepped(action)

    def close(self) -> None:
        self.ended()
        if self.plan == "close_hangs_sync":
            time.sleep(HANG_S)

    def read_final_reward(self) -> float:
        return self.read()


class _Async(_Episode):
    async def reset(self, prompt: Any) -> Any:
        await asyncio.sleep({"reset_hangs": HANG_S, "slow": 0.02}.get(self.plan, 0.0))
        return self.begun(prompt)

    async def step(self, action: Any) -> Any:
        if self.plan == "step_swallows":
            try:
                await asyncio.sleep(HANG_S)
            except asyncio.CancelledError:
                await asyncio.sleep(0.05)
        await asyncio.sleep({"step_hangs": HANG_S, "slow": 0.02}.get(self.plan, 0.0))
        return self.stepped(action)

    async def close(self) -> None:
        self.ended()
        await asyncio.sleep(HANG_S if self.plan == "close_hangs" else 0.0)

    async def read_final_reward(self) -> float:
        await asyncio.sleep(HANG_S if self.plan == "final_hangs" else 0.0)
        return self.read()


# Tools


def echo(number: int) -> str:
    """Repeat a number.

    Args:
        number: The number.
    """
    return f"#{number:08}#"


def fails(number: int) -> str:
    """Fail.

    Args:
        number: The number.
    """
    raise ValueError(f"no tool for #{number:08}#")


def leaves(number: int) -> str:
    """Leave.

    Args:
        number: The number.
    """
    sys.exit(number)


async def waits(number: int) -> str:
    """Wait for too long.

    Args:
        number: The number.
    """
    try:
        await asyncio.sleep(HANG_S)
    except asyncio.CancelledError:
        await asyncio.sleep(0.2)
    return f"#{number:08}#"


def blocks(number: int) -> str:
    """Block for too long.

    Args:
        number: The number.
    """
    time.sleep(HANG_S)
    return f"#{number:08}#"


def floods(number: int) -> str:
    """Say much.

    Args:
        number: The number.
    """
    return f"#{number:08}#" + "z" * 100_000


TOOLS = [echo, fails, leaves, waits, blocks, floods]
TOOL_ERRORS = {
    "tool_echo": None,
    "tool_fails": "exception",
    "tool_leaves": "exception",
    "tool_waits": "timeout",
    "tool_blocks": "timeout",
    "tool_floods": None,
    "tool_unheard": "unknown_tool",
    "argument_wrong": "invalid_arguments",
    "argument_missing": "invalid_arguments",
    "call_broken": "parse_error",
}
"""By plan: what is reported of its one call."""


def tool_answer(row: Row, turn: int) -> list[int]:
    if turn:
        return [*f"#{row.number:08}# done".encode(), END]
    name = row.plan.removeprefix("tool_") if row.plan.startswith("tool_") else "echo"
    arguments = {"argument_wrong": '{"number": "many"}', "argument_missing": "{}"}
    text = (
        f'{{"name": "{name}", "arguments": {arguments.get(row.plan, f"{{{chr(34)}number{chr(34)}: {row.number}}}")}}}'
    )
    text = text[:-9] if row.plan == "call_broken" else text
    return [*TOKENIZER(f"<tool_call>\n{text}\n</tool_call>")["input_ids"], END]


# Code

_CODES = {
    "code_prints": "print('#%s#')",
    "code_calls": "print(echo(int('%s')))",
    "code_raises": "1 / 0 # %s",
    "code_is_none": "def %s(",
    "code_loops": "while True: pass # %s",
    "code_hogs": "x = []\nwhile True: x.append(bytearray(1 << 22)) # %s",
    "code_asks_much": "x = bytearray(1 << 40) # %s",
    "code_dies": "import os; os._exit(3) # %s",
    "code_kills": "import os; os.kill(os.getpid(), 9) # %s",
    "code_exits": "import sys; sys.exit(3) # %s",
    "code_floods": "print('#%s#' + 'z' * 10_000_000)",
    "code_resists": "while True:\n  try:\n    while True: pass\n  except BaseException: pass # %s",
}
CODE_ERRORS: dict[str, set[str | None]] = {
    "code_prints": {None},
    "code_calls": {None},
    "code_raises": {"exception"},
    "code_is_none": {"exception"},
    "code_loops": {"timeout", "killed"},
    "code_hogs": {"exception", "died", "timeout", "killed"},
    "code_asks_much": {"exception"},
    "code_dies": {"died"},
    "code_kills": {"died", "exception"},
    "code_exits": {None},
    "code_floods": {None, "timeout"},
    "code_resists": {"killed", "timeout"},
}
"""By plan: what may be reported of its one block."""


def code_answer(row: Row, turn: int) -> list[int]:
    if turn:
        return [*f"#{row.number:08}# done".encode(), END]
    return [*f"<code>\n{_CODES[row.plan] % f'{row.number:08}'}\n</code>".encode()]
