"""Every attack of `attacks`, on each of the three ways in which sessions are confined."""

import asyncio
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attacks import ATTACKS, Attack
from elsewhere import NOBODY, attacked
from harness import Stage

IS_ROOT = os.geteuid() == 0
ALL_ATTACKS_S = 400.0


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_harms_nothing_but_its_own_session(runner: asyncio.Runner, stage: Stage, attack: Attack) -> None:
    verdict = runner.run(stage.run(attack))
    assert not verdict.harm, attack.must
    assert not verdict.odd, attack.must


@pytest.fixture(scope="module")
def reports(anyones_python: Path) -> dict[str, dict[str, Any]]:
    """What all attacks did as another user, and as root with the means to make each session another user; at once."""
    uids = {"a plain user": NOBODY, "root": None}
    with ThreadPoolExecutor() as pool:
        running = {
            user: pool.submit(attacked, anyones_python, uid=uid, timeout_s=ALL_ATTACKS_S) for user, uid in uids.items()
        }
    return {user: future.result() for user, future in running.items()}


@pytest.mark.timeout(ALL_ATTACKS_S + 20)
@pytest.mark.skipif(not IS_ROOT, reason="this user has no privileges anyway: the other tests have shown it")
def test_all_attacks_are_held_for_a_user_without_privileges(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["a plain user"]
    assert report["isolation"] == "limits, landlock, seccomp, as the same user"
    assert _not_held(report) == {}


@pytest.mark.timeout(ALL_ATTACKS_S + 20)
@pytest.mark.skipif(not IS_ROOT, reason="only root can give a session a user of its own")
def test_all_attacks_are_held_where_each_session_has_a_user_of_its_own(reports: dict[str, dict[str, Any]]) -> None:
    report = reports["root"]
    assert report["isolation"] == "limits, landlock, seccomp, as a user of its own"
    assert _not_held(report) == {}


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_within_namespaces_sessions_still_have_users_of_their_own_and_the_layers_hold(anyones_python: Path) -> None:
    names = "kill_victim kill_parent env_proc proc_mem_victim read_passwd write_outside udp_send fork_outlive".split()
    report = attacked(anyones_python, "--bubblewrap", *names, uid=None, timeout_s=100.0)
    user = "a user of its own" if IS_ROOT else "the same user"
    assert report["isolation"] == f"limits, landlock, seccomp, namespaces, as {user}"
    assert _not_held(report, num_attacks=len(names)) == {}


def _not_held(report: dict[str, Any], num_attacks: int = len(ATTACKS)) -> dict[str, list[str]]:
    assert len(report["verdicts"]) == num_attacks
    return {
        name: verdict["harm"] + verdict["odd"]
        for name, verdict in report["verdicts"].items()
        if verdict["harm"] or verdict["odd"]
    }
