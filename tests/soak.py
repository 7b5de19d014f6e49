"""A chaos run: every boundary of a rollout fails at once, by a seed, for thousands of trajectories.

    python tests/soak.py --trajectories 20000 --seed 1

Servers answer late, wrongly, in pieces, not at all, and are killed and started in the middle of calls; environments,
tools, code and parsers raise, hang, exit and return nonsense. What must hold nevertheless:

    every row        is that of its prompt, token by token; mask, logprobs and rewards are what they must be
    every failure    is one that was planned, or the server's; nobody else's row fails with it
    every call       returns within its bound, or raises where the policy (`trl_rollouts.failures`) says so, and then
                     the next call works
    the process      keeps its memory, descriptors, threads, children and tasks; every environment is closed once

Prints one line of JSON, and exits with 1 where anything did not hold.
"""

import argparse
import asyncio
import ctypes
import gc
import json
import logging
import math
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import soak_plans as plans
from soak_plans import Row

from trl_rollouts import LocalExecutor, Rollout, RolloutError, ServerError, code_rollout, env_rollout, tool_rollout
from trl_rollouts.clients import detect, member
from trl_rollouts.testing import (
    BrokenBody,
    CutOff,
    FakeServer,
    ForeignTokenId,
    Garbage,
    Late,
    LongTokenIds,
    NaNLogprob,
    NoLogprobs,
    NoTokenIds,
    NullLogprob,
    Reordered,
    Reset,
    Restart,
    SeededFaults,
    Silence,
    Status,
    Trickle,
    WrongCount,
    WrongIndex,
    WrongPromptIds,
    fake_trainer,
    tiny_model,
)

REQUEST_S = 2.0
TRAJECTORY_S = 20.0
WAIT_S = 30.0
"""For a server to come back."""
MAX_CONCURRENCY = 64
MAX_GROWTH_MB = 48.0

PASSING = [Status(503), Status(502), Status(429), Reset(), CutOff(), BrokenBody(), Garbage(), Trickle(0.1), Late(0.1)]
HARMLESS = [NullLogprob(0), NaNLogprob(0), WrongIndex()]
LOSING = [Status(400, {"error": "no"}), Status(500), Late(REQUEST_S + 0.5), Trickle(REQUEST_S + 1.0)]
"""Which cost the rows of the request, and no other."""
ENDING = [NoLogprobs(), NoTokenIds(), LongTokenIds(), ForeignTokenId(), WrongPromptIds(), WrongCount()]
"""Which no run may go on after."""


class Tally:
    """What was seen, and what must not have been."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.rows: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.raised: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.num_calls = self.num_restarts = self.num_retries = 0
        self.slowest = ("", 0.0)
        self.lock = threading.Lock()
        self.pulse = Pulse()

    def expect(self, is_so: bool, what: str) -> None:
        if not is_so and len(self.violations) < 50:
            self.violations.append(what)
            print(f"VIOLATION: {what}", file=sys.stderr, flush=True)


class Pulse:
    """How long this process, or all of the machine, stood still: limits of seconds mean nothing then."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._stopping = threading.Event()
        self._last = time.monotonic()
        self._stalls: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._beat, name="soak:pulse", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._stopping.wait(0.02):
            now = time.monotonic()
            if (stall_s := now - self._last) > 0.25:
                self.longest_s = max(self.longest_s, stall_s)
                self._stalls.append((now, stall_s))
            self._last = now

    def stalled_s(self, since: float) -> float:
        """All stalls since then, together."""
        return sum(stall_s for at, stall_s in self._stalls if at >= since)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()


class CountingServer(FakeServer):
    """Keeps its starts among its requests."""

    def start(self) -> None:
        super().start()
        self.requests.append(("start", None))


class Lane:
    """One rollout and its servers, kept from call to call as in a training, and what its calls must return."""

    num_servers = 1
    protocol: Any = "vllm"
    kinds: Sequence[Any] = (*PASSING, *HARMLESS, *LOSING, Silence())
    rate = 0.06
    trajectory_s = TRAJECTORY_S
    num_budget = plans.NUM_BUDGET
    sizes = (8, 24, 64, 96)
    moods = (0.84, 0.08, 0.08)
    """How often calls are usual, have nothing but failing environments, have a server that breaks its protocol."""

    def __init__(self, seed: int, tally: Tally, registry: plans.Registry, folder: Path) -> None:
        self.random, self.tally, self.registry, self.folder = random.Random(seed), tally, registry, folder
        self.faults = SeededFaults(seed, self.rate, self.kinds)
        self.servers = [
            CountingServer(
                plans.reply_with(self.answer),
                protocol=self.protocol,
                max_model_len=plans.NUM_CONTEXT,
                faults=self.faults,
            )
            for _ in range(self.num_servers)
        ]
        for server in self.servers:
            server.start()
        self.rollout: Rollout | None = None
        self.is_stalled = False
        self.step, self.num_rows = 0, LANES.index(type(self)) * 10**7

    @property
    def name(self) -> str:
        return type(self).__name__

    def answer(self, row: Row, turn: int) -> list[int]:
        return plans.answer(row, turn)

    def make(self) -> Rollout:
        return env_rollout(
            plans.factories(self.registry),
            max_turns=plans.MAX_TURNS,
            reset_timeout_s=plans.RESET_S,
            step_timeout_s=plans.STEP_S,
            close_timeout_s=plans.CLOSE_S,
            parser=plans.parse,
            **self.options(),
        )

    def options(self) -> Any:
        return {
            "base_url": [server.base_url for server in self.servers],
            "weight_sync": None,
            "max_concurrency": MAX_CONCURRENCY,
            "request_timeout_s": REQUEST_S,
            "trajectory_timeout_s": self.trajectory_s,
        }

    def trainer(self) -> Any:
        trainer = fake_trainer(
            plans.TOKENIZER,
            vllm_server_timeout=WAIT_S,
            max_completion_length=self.num_budget,
            vllm_max_model_length=plans.NUM_CONTEXT,
        )
        trainer.model.config.vocab_size = len(plans.TOKENIZER)
        trainer.state.global_step = self.step
        return trainer

    def rows(self, num: int, first: int, mood: str) -> list[Row]:
        """Most rows are well; in a bad mood none."""
        names = [*plans.FAILING] if mood == "doomed" else [*plans.PLANS]
        well = 0.0 if mood == "doomed" else 0.6
        fine = [*plans.OK]
        return [
            Row(first + index, self.random.choice(fine if self.random.random() < well else names))
            for index in range(num)
        ]

    def call(self, num: int) -> None:
        first, self.num_rows = self.num_rows, self.num_rows + num
        mood = self.random.choices(["usual", "doomed", "broken"], self.moods)[0]
        rows = self.rows(num, first, mood)
        self.faults.kinds, self.faults.rate = (ENDING, 0.3) if mood == "broken" else (self.kinds, self.rate)
        self.faults.drawn.clear()
        if self.rollout is None or self.random.random() < 0.05:
            self.close_rollout()
            self.rollout = self.make()
        self.step += 1
        starts = sum(server._dialect.num_starts for server in self.servers)
        started = time.monotonic()
        outcome: Any = None
        try:
            outcome = self.rollout([row.prompt for row in rows], self.trainer())
        except Exception as error:
            outcome = error
        self._timed(time.monotonic() - started, num)
        self.tally.num_restarts += sum(server._dialect.num_starts for server in self.servers) - starts
        self.is_stalled = self.tally.pulse.stalled_s(started) > 0.5
        with self.tally.lock:
            self._look(outcome, rows, mood)
            self._forget()

    def bound_s(self, num: int) -> float:
        """What the README promises, a look at each server before and after, and a busy machine."""
        each = self.trajectory_s + plans.RESET_S + plans.STEP_S + plans.CLOSE_S
        return math.ceil(num / MAX_CONCURRENCY) * each + 2 * REQUEST_S * len(self.servers) + 5.0

    def _timed(self, seconds: float, num: int) -> None:
        self.tally.slowest = max(self.tally.slowest, (self.name, seconds), key=lambda named: named[1])
        bound = self.bound_s(num)
        self.tally.expect(seconds <= bound, f"{self.name}: a call of {num} took {seconds:.1f} s, bound {bound:.1f} s")

    def _look(self, outcome: Any, rows: list[Row], mood: str) -> None:
        drawn, expect = self.faults.drawn, self.tally.expect
        if isinstance(outcome, Exception):
            self.tally.raised[f"{mood}: {type(outcome).__name__}"] += 1
            message = f"{self.name}, {mood}: {type(outcome).__name__}: {outcome!s:.300} ({dict(drawn)})"
            if type(outcome) is RolloutError:
                lost = sum(drawn[type(fault).__name__] for fault in [*LOSING, Silence()])
                expect(f"All {len(rows)} trajectories failed" in str(outcome), message)
                expect(self.may_all_fail(rows) or bool(lost), message)
            else:
                ended = sum(drawn[type(fault).__name__] for fault in [*ENDING, Reordered()])
                expect(type(outcome) is ServerError and bool(ended), message)
            return
        expect(mood != "doomed", f"{self.name}: a batch without a survivor was returned")
        expect(mood != "broken" or not drawn.total(), f"{self.name}: {dict(drawn)} and the run went on")
        for name, column in outcome.items():
            expect(len(column) == len(rows), f"{self.name}: {len(column)} {name} for {len(rows)} rows")
        for index, row in enumerate(rows):
            got = {name: column[index] for name, column in outcome.items()}
            for problem in self.problems(row, got):
                expect(False, f"{self.name}: {row}: {problem}; {got['stop_reason']}, {got['rollout_error']!s:.200}")
            self.tally.rows[got["stop_reason"]] += 1
            if got["rollout_error"]:
                self.tally.failures[row.plan if "RequestError" not in got["rollout_error"] else "request"] += 1

    def may_all_fail(self, rows: list[Row]) -> bool:
        return self.is_stalled or all(row.plan in plans.FAILING for row in rows)

    def _forget(self) -> None:
        self.tally.num_calls += 1
        asked = [tuple(ids) for server in self.servers for ids in server.prompts]
        self.tally.num_retries += len(asked) - len({*asked})
        self.tally.faults.update(self.faults.drawn)
        for server in self.servers:
            for error in server.errors:
                self.tally.expect(False, f"{self.name}: the server met {error!r}")
            server.errors.clear()
            server.requests.clear()

    def problems(self, row: Row, got: dict[str, Any]) -> Iterator[str]:
        """What is wrong with a row."""
        yield from contract_problems(got, self.num_budget)
        error, reason, ids = got["rollout_error"], got["stop_reason"], got["completion_ids"]
        if got["prompt_ids"] not in ([plans.END], row.prompt_ids) or (
            not error and got["prompt_ids"] != row.prompt_ids
        ):
            yield f"its prompt is {plans.TOKENIZER.decode(got['prompt_ids'])!r:.100}"
        if not (error and ids == [plans.END]) and ids != row.expected_ids()[: len(ids)]:
            yield f"its completion is {plans.TOKENIZER.decode(ids)!r:.200}"
        if error:
            if not self.is_planned(row, error):
                yield "it failed"
            return
        if row.plan in plans.FAILING and not self.may_have_escaped(row, reason):
            yield "it did not fail"
        yield from self.mask_problems(row, got)
        yield from self.ending_problems(row, got)

    def is_planned(self, row: Row, error: str) -> bool:
        is_servers = error.startswith("RequestError: ")
        is_stalled = self.is_stalled and "did not come back within" in error
        return is_servers or is_stalled or (row.plan in plans.FAILING and plans.FAILING[row.plan] in error)

    def may_have_escaped(self, row: Row, reason: str) -> bool:
        return False

    def mask_problems(self, row: Row, got: dict[str, Any]) -> Iterator[str]:
        server = self.servers[0]
        expected = row.expected_mask()
        for place, (token_id, mask, logprob) in enumerate(
            zip(got["completion_ids"], got["env_mask"], got["logprobs"], strict=True)
        ):
            begins = expected[place] and (place == 0 or not expected[place - 1])  # where a logprob may be unknown
            if mask != expected[place] and not (begins and mask == 0):
                yield f"mask {mask} at {place}"
            if mask and not math.isclose(logprob, server.logprob(token_id), abs_tol=1e-9):
                yield f"logprob {logprob} at {place}"

    def ending_problems(self, row: Row, got: dict[str, Any]) -> Iterator[str]:
        reason = got["stop_reason"]
        rewards = [1.0] * got["num_turns"]
        if row.plan == "final" and rewards:
            rewards[-1] += 0.5
        if got["step_rewards"] != rewards or got["env_reward"] != sum(rewards):
            yield f"its rewards are {got['step_rewards']}"
        if reason == "timeout" and self.trajectory_s < TRAJECTORY_S:
            return
        if reason != plans.CUT.get(row.plan, "terminated"):
            yield "it ended otherwise than planned"
        elif row.plan in plans.OK and got["completion_ids"] != row.expected_ids():
            yield f"it has {len(got['completion_ids'])} of {len(row.expected_ids())} tokens"

    def close_rollout(self) -> None:
        if self.rollout is not None:
            self.rollout.close()
        self.rollout = None

    def close(self) -> None:
        self.close_rollout()
        for server in self.servers:
            server.stop()


def contract_problems(got: dict[str, Any], num_budget: int) -> Iterator[str]:
    """What TRL relies on, of any row."""
    ids, mask, logprobs, failed = (
        got["completion_ids"],
        got["env_mask"],
        got["logprobs"],
        got["stop_reason"] == "error",
    )
    if not (1 <= len(ids) == len(mask) == len(logprobs) <= num_budget):
        yield f"lengths {len(ids)}, {len(mask)}, {len(logprobs)}"
    if any(logprob != 0.0 for flag, logprob in zip(mask, logprobs, strict=True) if not flag):
        yield "a masked logprob is not 0.0"
    if failed != (got["env_reward"] is None) or failed != (got["rollout_error"] is not None):
        yield f"env_reward={got['env_reward']}"
    if failed and any(mask):
        yield "it failed, and is trained on"
    if got["num_turns"] != len(got["step_rewards"]):
        yield f"{got['num_turns']} turns and {len(got['step_rewards'])} rewards"


class OneServer(Lane):
    """Killed and started again in the middle of calls; nobody brings weights."""

    kinds = (*PASSING, *HARMLESS, *LOSING, Silence(), Restart(0.3))


class TwoServers(Lane):
    num_servers = 2
    kinds = (*PASSING, *HARMLESS, *LOSING, Silence(), Restart(0.0), Restart(0.7))


class OldServer(Lane):
    """TRL's own, one request for many rows. One that is silent is bricked for good, so none is."""

    protocol = "trl"
    kinds = (*PASSING, *HARMLESS, *LOSING, Reordered(), Restart(0.3))


class Impatient(Lane):
    """Trajectories whose time is up in the middle of anything."""

    trajectory_s = 0.6
    moods = (0.92, 0.0, 0.08)

    def may_all_fail(self, rows: list[Row]) -> bool:
        return True

    def may_have_escaped(self, row: Row, reason: str) -> bool:
        return reason == "timeout" or row.plan == "step_swallows"  # which goes on when the trajectory's time is up

    def is_planned(self, row: Row, error: str) -> bool:
        is_late = "no turn was finished within trajectory_timeout_s" in error
        is_busy = row.plan.startswith("final") and "an earlier call of the environment has not returned" in error
        return is_late or is_busy or super().is_planned(row, error)


class Synced(Lane):
    """The weights come from the rollout: after every start of a server, and before anything is sampled from it."""

    num_servers = 2
    kinds = (*PASSING, *HARMLESS, Restart(5.0))  # longer than the attempts of a request, as a real one

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from accelerate import Accelerator

        self.model, self.accelerator = tiny_model(plans.TOKENIZER), Accelerator(cpu=True)

    def options(self) -> Any:
        options = super().options()
        del options["weight_sync"]
        return options

    def trainer(self) -> Any:
        trainer = super().trainer()
        trainer.args.output_dir = str(self.folder)
        trainer.model = trainer.model_wrapped = self.model
        trainer.accelerator = self.accelerator
        return trainer

    def _forget(self) -> None:
        paths = {
            body["kwargs"]["weights_path"] for server in self.servers for body in server.bodies("/collective_rpc")
        }
        self.tally.expect(len(paths) == 1, f"{self.name}: the weights of one step are {paths}")
        for server in self.servers:
            is_loaded = False
            for path, body in server.requests:
                is_loaded = (is_loaded or path == "/reset_prefix_cache") and path not in ("start", "/collective_rpc")
                samples = path == "/v1/completions" and not isinstance(body["prompt"], str)
                self.tally.expect(is_loaded or not samples, f"{self.name}: sampled with other weights")
        super()._forget()


class Called(Lane):
    """What the model calls may fail in any way: the row does not."""

    num_budget = 1024
    moods = (0.92, 0.0, 0.08)
    errors: Any = plans.TOOL_ERRORS

    def answer(self, row: Row, turn: int) -> list[int]:
        return plans.tool_answer(row, turn)

    def make(self) -> Rollout:
        return tool_rollout(plans.TOOLS, tool_timeout_s=1.0, max_result_tokens=64, **self.options())

    def rows(self, num: int, first: int, mood: str) -> list[Row]:
        return [Row(first + index, self.random.choice([*self.errors])) for index in range(num)]

    def problems(self, row: Row, got: dict[str, Any]) -> Iterator[str]:
        yield from contract_problems(got, self.num_budget)
        ids, error = got["completion_ids"], got["rollout_error"]
        others = {*re.findall(r"#(\d{8})#", plans.TOKENIZER.decode(got["prompt_ids"] + ids))} - {f"{row.number:08}"}
        if others:
            yield f"it has text of the rows {others}"
        if error is not None:
            if not self.is_planned(row, error):
                yield "it failed"
            return
        first, last = self.answer(row, 0), self.answer(row, 1)
        if ids[: len(first)] != first or ids[-len(last) :] != last or got["stop_reason"] != "terminated":
            yield f"its completion is {plans.TOKENIZER.decode(ids)!r:.300}"
        if sum(got["env_mask"]) > len(first) + len(last) or got["env_reward"] != 0.0:
            yield "its mask or its reward"
        for token_id, mask, logprob in zip(ids, got["env_mask"], got["logprobs"], strict=True):
            if mask and not math.isclose(logprob, self.servers[0].logprob(token_id), abs_tol=1e-9):
                yield f"logprob {logprob}"
        yield from self.call_problems(row, got)

    def call_problems(self, row: Row, got: dict[str, Any]) -> Iterator[str]:
        if [call["error"] for call in got["tool_calls"]] != [self.errors[row.plan]]:
            yield f"its calls are {got['tool_calls']!r:.300}"


class Coded(Called):
    """Code, in processes that are confined, and now and then killed with all that serve them."""

    errors = plans.CODE_ERRORS
    sizes = (4, 8, 16)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.executor = LocalExecutor(modules=[], max_memory_bytes=256 << 20, folder=self.folder)
        self.is_killed = False

    def answer(self, row: Row, turn: int) -> list[int]:
        return plans.code_answer(row, turn)

    def make(self) -> Rollout:
        return code_rollout(
            self.executor, tools=[plans.echo], timeout_s=1.0, max_result_tokens=64, max_turns=4, **self.options()
        )

    def call(self, num: int) -> None:
        self.is_killed = self.random.random() < 0.1
        timer = threading.Timer(self.random.random(), self._kill)
        if self.is_killed:
            timer.start()
        super().call(num)
        timer.cancel()

    def _kill(self) -> None:
        if self.executor._server is not None:
            os.kill(self.executor._server._process.pid, signal.SIGKILL)

    def is_planned(self, row: Row, error: str) -> bool:
        return super().is_planned(row, error) or (self.is_killed and error.startswith("SessionError: "))

    def call_problems(self, row: Row, got: dict[str, Any]) -> Iterator[str]:
        blocks = [call["error"] for call in got["tool_calls"] if call["name"] == "python"]
        allowed = self.errors[row.plan] | ({"died"} if self.is_killed else set())
        if len(blocks) != 1 or blocks[0] not in allowed:
            yield f"its calls are {got['tool_calls']!r:.300}"

    def close(self) -> None:
        super().close()
        asyncio.run(self.executor.close())
        self.tally.expect(not (left := os.listdir(self.folder)), f"{self.name}: files are left: {left}")


LANES: Sequence[type[Lane]] = [OneServer, TwoServers, OldServer, Impatient, Synced, Called, Coded]


class Census:
    """What the process holds, with every rollout closed and what hung at its end."""

    def __init__(self, registry: plans.Registry, num_threads: int) -> None:
        deadline = time.monotonic() + 15.0
        while time.monotonic() < deadline and (threading.active_count() > num_threads or registry.open):
            time.sleep(0.05)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        process = psutil.Process()
        self.rss_mb = process.memory_info().rss / 2**20
        self.descriptors = process.num_fds()
        self.threads = threading.active_count()
        self.children = len(process.children(recursive=True))


class Soak:
    """All lanes, several at a time."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.tally, self.registry = Tally(), plans.Registry()
        self.lanes = [
            kind(seed * 100 + index, self.tally, self.registry, folder / kind.__name__)
            for index, kind in enumerate(LANES)
            if (folder / kind.__name__).mkdir() is None
        ]
        self.num_rows = 0
        self._next = threading.Lock()

    def run(self, num_rows: int, *, num_at_once: int) -> None:
        """Each lane in turn, until there were as many rows."""
        end, order = self.num_rows + num_rows, iter(self.lanes * num_rows)
        busy: set[str] = set()

        def work() -> None:
            while True:
                with self._next:
                    if self.num_rows >= end:
                        return
                    lane = next(one for one in order if one.name not in busy)
                    busy.add(lane.name)
                    num = lane.random.choice(lane.sizes)
                    self.num_rows += num
                lane.call(num)
                with self._next:
                    busy.discard(lane.name)

        workers = [threading.Thread(target=work, name="soak") for _ in range(num_at_once)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def census(self, num_threads: int) -> Census:
        for lane in self.lanes:
            self.tally.expect(not (left := open_tasks(lane.rollout)), f"{lane.name}: tasks are left: {left}")
            lane.close_rollout()
        return Census(self.registry, num_threads)

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()


def open_tasks(rollout: Rollout | None) -> list[str]:
    """What goes on in a rollout's event loop between two calls, after a while."""
    if rollout is None or rollout._engine is None:
        return []
    deadline = time.monotonic() + 10.0
    while (tasks := asyncio.all_tasks(rollout._engine._loop)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"{task.get_coro()!r:.150}" for task in tasks]


class _Complaints(logging.Handler):
    """What asyncio has to say (exceptions that nobody took, tasks that were lost) is a violation."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(logging.ERROR)
        self._tally = tally

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        self._tally.expect(False, f"asyncio: {record.getMessage():.500} {cause!r:.300}")


@contextmanager
def watched(tally: Tally) -> Iterator[None]:
    """Quiet logs, and complaints of asyncio and of threads taken for what they are. Waits are short."""
    ours, theirs, complaints = logging.getLogger("trl_rollouts"), logging.getLogger("asyncio"), _Complaints(tally)
    level, hook = ours.level, threading.excepthook
    ours.setLevel(logging.CRITICAL + 1)
    theirs.addHandler(complaints)
    threading.excepthook = lambda told: tally.expect(False, f"{told.thread}: {told.exc_type} {told.exc_value!r:.300}")
    try:
        with mock.patch.object(detect, "_RETRY_S", 0.2), mock.patch.object(member, "SEARCH_S", 0.2):
            yield
    finally:
        threading.excepthook = hook
        theirs.removeHandler(complaints)
        ours.setLevel(level)


def soak(num_trajectories: int, seed: int, *, num_at_once: int = 3) -> dict[str, Any]:
    """Run it. Returns the figures; `violations` is what did not hold."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Soak(seed, Path(folder))
        tally = run.tally
        with ExitStack() as stack:
            stack.callback(tally.pulse.stop)
            stack.callback(run.close)
            stack.enter_context(watched(tally))
            num_threads = threading.active_count() + 1  # the fork server's
            run.run(num_trajectories // 3, num_at_once=num_at_once)
            before = run.census(num_threads)
            run.run(num_trajectories - run.num_rows, num_at_once=num_at_once)
            after = run.census(num_threads)
    for problem in run.registry.problems():
        tally.expect(False, problem)
    growth = after.rss_mb - before.rss_mb
    tally.expect(growth < MAX_GROWTH_MB, f"memory grew by {growth:.0f} MB")
    for name in ("descriptors", "threads", "children"):
        now, then = getattr(after, name), getattr(before, name)
        tally.expect(now <= then + 1, f"{name}: {then} after a third of the run, {now} at its end")
    return figures(run, before, after, time.monotonic() - started)


def figures(run: Soak, before: Census, after: Census, seconds: float) -> dict[str, Any]:
    tally = run.tally
    return {
        "trajectories": run.num_rows,
        "calls": tally.num_calls,
        "seconds": round(seconds, 1),
        "slowest_call": [tally.slowest[0], round(tally.slowest[1], 1)],
        "rows": dict(tally.rows),
        "failures": dict(tally.failures),
        "raised": dict(tally.raised),
        "faults": dict(tally.faults),
        "retries": tally.num_retries,
        "restarts": tally.num_restarts,
        "environments": run.registry.num_made,
        "longest_stall_s": round(tally.pulse.longest_s, 2),
        "rss_growth_mb": round(after.rss_mb - before.rss_mb, 1),
        "descriptors": [before.descriptors, after.descriptors],
        "threads": [before.threads, after.threads],
        "children": [before.children, after.children],
        "violations": tally.violations,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    result = soak(arguments.trajectories, arguments.seed)
    print(json.dumps(result))
    return 1 if result["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
