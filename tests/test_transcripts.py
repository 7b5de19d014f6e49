"""One JSON line a trajectory, whatever becomes of the run."""

import json
from pathlib import Path

from trl_rollouts import Completion, StopReason, Trajectory, read_transcripts
from trl_rollouts.transcripts import write_transcripts


def trajectory() -> Trajectory:
    made = Trajectory(prompt_ids=[1, 2, 3], messages=[{"role": "user", "content": "hi"}])
    made.append_completion(Completion([11, 12], [-0.1, -0.2], "stop"))
    made.append_observation([99])
    made.append_completion(Completion([21], [-0.1], "stop"))
    made.step_rewards, made.infos = [0.5, 0.5], [{"tool_calls": [{"name": "f", "result": {1, 2}}]}, {}]
    made.end(StopReason.MAX_TURNS)
    return made


def test_a_line_tells_what_happened(tmp_path: Path) -> None:
    write_transcripts(tmp_path, [trajectory()], step=3, mode="train", rank=1)
    [line] = (tmp_path / "rank1.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record.pop("timings")["total_s"] >= 0
    assert record == {
        "step": 3,
        "mode": "train",
        "rank": 1,
        "index": 0,
        "messages": [{"role": "user", "content": "hi"}],
        "tool_calls": [{"name": "f", "result": "{1, 2}"}],
        "num_turns": 2,
        "num_prompt_tokens": 3,
        "num_sampled_tokens": 3,
        "num_observed_tokens": 1,
        "env_reward": 1.0,
        "step_rewards": [0.5, 0.5],
        "stop_reason": "max_turns",
        "error": None,
    }


def test_what_json_cannot_hold_is_written_as_text(tmp_path: Path) -> None:
    made = trajectory()
    made.infos = [{"tool_calls": [{"name": "f", "result": {(1, 2): 3}}]}]
    write_transcripts(tmp_path, [made], step=1, mode="train", rank=0)
    [line] = read_transcripts(tmp_path)
    assert line["tool_calls"] == ["{'name': 'f', 'result': {(1, 2): 3}}"]
    assert line["num_turns"] == 2


def test_later_calls_append(tmp_path: Path) -> None:
    for step in (1, 2):
        write_transcripts(tmp_path, [trajectory(), trajectory()], step=step, mode="train", rank=0)
    assert [(line["step"], line["index"]) for line in read_transcripts(tmp_path)] == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_a_line_that_a_kill_tore_is_skipped_and_then_removed(tmp_path: Path) -> None:
    write_transcripts(tmp_path, [trajectory()], step=1, mode="train", rank=0)
    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write('{"step": 2, "mess')
    assert [line["step"] for line in read_transcripts(tmp_path)] == [1]
    write_transcripts(tmp_path, [trajectory()], step=3, mode="train", rank=0)
    assert [json.loads(line)["step"] for line in (tmp_path / "rank0.jsonl").read_text().splitlines()] == [1, 3]
