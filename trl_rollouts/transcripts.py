"""Trajectories as JSON lines, to read, filter and count.

One file a process, `rank0.jsonl` and so on, one line a trajectory, appended after each call. A run that is killed
while it writes leaves at most one torn line at the end: readers skip it, and the next run removes it.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .trajectory import Trajectory


def write_transcripts(folder: Path, trajectories: Sequence[Trajectory], *, step: int, mode: str, rank: int) -> None:
    """Append a batch. `mode` is "train" or "eval", `step` the trainer's global step."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        _line({"step": step, "mode": mode, "rank": rank, "index": index, **_record(trajectory)})
        for index, trajectory in enumerate(trajectories)
    ]
    with (folder / f"rank{rank}.jsonl").open("ab+") as file:
        _drop_torn_line(file)
        for line in lines:
            file.write(line.encode())


def read_transcripts(folder: str | Path) -> Iterator[dict[str, Any]]:
    """All whole lines of a transcript folder, file by file."""
    for path in sorted(Path(folder).glob("rank*.jsonl")):
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield json.loads(line)


def _line(record: dict[str, Any]) -> str:
    """One line of JSON; what JSON cannot hold as it is, as text."""
    try:
        return json.dumps(record, default=str) + "\n"
    except Exception:  # keys that are no strings, values that hold themselves, a __str__ that raises
        return json.dumps({key: _shown(value) for key, value in record.items()}) + "\n"


def _shown(value: Any) -> Any:
    try:
        json.dumps(value)
    except Exception:
        try:
            return [str(item) for item in value] if isinstance(value, list) else str(value)
        except Exception as error:
            return f"({type(error).__name__} while it was written down)"
    return value


def _record(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "messages": trajectory.messages,
        "tool_calls": trajectory.tool_calls,
        "num_turns": trajectory.num_turns,
        "num_prompt_tokens": len(trajectory.prompt_ids),
        "num_sampled_tokens": trajectory.num_sampled,
        "num_observed_tokens": len(trajectory.completion_ids) - trajectory.num_sampled,
        "env_reward": trajectory.reward,
        "step_rewards": trajectory.step_rewards,
        "stop_reason": trajectory.stop_reason,
        "error": trajectory.error,
        "timings": {name: round(seconds, 4) for name, seconds in trajectory.timings.items()},
    }


def _drop_torn_line(file: Any) -> None:
    """Cut the file behind its last newline; nothing to do after an orderly end."""
    end = file.seek(0, 2)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)
