"""What OpenEnv's own rollout function makes of turns that were sampled elsewhere. JSON in, JSON out.

python openenv_harness.py BASE_URL NUM_PROMPTS < [{"prompt_ids": ..., "completion_ids": ..., "guess": ...}, ...]
"""

import json
import sys
from typing import Any

import requests
from openenv.core import GenericEnvClient
from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import MCPHarnessAdapter, ModelStepResult, StepEnvSessionAdapter, build_harness_rollout_func
from openenv.core.llm_client import LLMResponse, ToolCall

BASE_URL, NUM_PROMPTS = sys.argv[1], int(sys.argv[2])
TURNS: list[dict[str, Any]] = json.load(sys.stdin)
OPEN: list[int] = []


class Sessions:
    def create(self, task: Any, **_: Any) -> StepEnvSessionAdapter:
        return StepEnvSessionAdapter(
            client=GenericEnvClient(base_url=BASE_URL).sync(),
            tool_specs=[Tool(name="guess", description="Guess.", input_schema={})],
            action_builder=lambda name, arguments: arguments,
            initial_messages_builder=lambda result, task: task,
            task=[{"role": "user", "content": "G"}],
            reset_kwargs={"seed": 0, "word": "b", "opening": ""},
        )


def model_step_builder(trainer: Any, session: Any) -> Any:
    turns = iter(TURNS)

    def model_step(messages: Any, tools: Any, sampling: Any) -> ModelStepResult:
        turn = next(turns)
        OPEN.append(requests.get(f"{BASE_URL}/sessions", timeout=10).json()["open"])
        calls = [ToolCall(id="1", name="guess", args={"guess": turn["guess"]})]
        ids = turn["completion_ids"]
        return ModelStepResult(LLMResponse("", calls), turn["prompt_ids"], ids, [-1.0] * len(ids))

    return model_step


rollout_func = build_harness_rollout_func(
    session_factory=Sessions(), harness_adapter=MCPHarnessAdapter(), model_step_builder=model_step_builder
)
print(json.dumps({**rollout_func(["G"] * NUM_PROMPTS, None), "open": OPEN}))
