"""Run by test_interruption: a rollout that is under way until a signal ends it.

python interrupted.py env|code BASE_URL
"""

import sys
import time

from trl_rollouts import StepResult, code_rollout, env_rollout
from trl_rollouts.testing import byte_tokenizer, fake_trainer


class Held:
    """Says when it is begun, and when it is closed."""

    def reset(self, prompt: list) -> list:
        print("begun", flush=True)
        return prompt

    def step(self, action: dict) -> StepResult:
        time.sleep(60)
        return StepResult(terminated=True)

    async def close(self) -> None:
        print("closed", flush=True)


def main(kind: str, base_url: str) -> None:
    if kind == "env":
        rollout = env_rollout(Held, base_url=base_url, weight_sync=None)
    else:
        rollout = code_rollout(base_url=base_url, weight_sync=None, timeout_s=60.0, instructions=None)
    rollout([[{"role": "user", "content": "p"}]] * 4, fake_trainer(byte_tokenizer()))


if __name__ == "__main__":
    main(*sys.argv[1:])
