"""What follows from a failure: the whole policy on one page.

    where it arises                         what follows                                    decided in
    a call of the model's (tool, code)      the model is told, in a sentence                tools, code
    a request that may pass                 another attempt, a bounded number of times      clients.http
    a server that is gone                   it is waited for, or the others carry on        clients.pool
    data: env, parser, template, prompt,    that row ends: mask 0, reward None, its         episode, by errors.is_data
      one request, one sandboxed session      siblings carry on
    a batch of which nothing is left        raised, with the counts and the first cause     here
    infra: set-up, server, weights,         raised at once, from every process that met     errors
      sandbox, a bug of ours                  it; the others are ended by their launcher
    a close that fails                      a line in the log                               hosting

Nothing else is caught. Environments' steps, tools and code are never repeated.
"""

import logging
from collections import Counter
from collections.abc import Sequence

from .errors import RolloutError
from .trajectory import StopReason, Trajectory

logger = logging.getLogger(__name__)

MAX_FAILED_IN_A_ROW = 8


class Failures:
    """Counts failed trajectories from call to call, and raises where nothing is left to train on."""

    def __init__(self) -> None:
        self._num_in_a_row = 0

    def check(self, trajectories: Sequence[Trajectory], *, is_whole_update: bool) -> None:
        """Look at a batch. What failed, and is no reason to stop, is logged.

        A process of several, or an evaluation, may be handed a single prompt at a time: there, one failure is a failed
        row, and only a run of them is the run's.

        Args:
            trajectories: of one call.
            is_whole_update: an update cannot do without these rows.

        Raises:
            RolloutError: all failed, or no token of any can be trained.
        """
        failed = [trajectory for trajectory in trajectories if trajectory.stop_reason is StopReason.ERROR]
        all_failed = len(failed) == len(trajectories)
        self._num_in_a_row = self._num_in_a_row + len(failed) if all_failed else 0
        kept = [trajectory for trajectory in trajectories if trajectory.stop_reason is not StopReason.ERROR]
        if is_whole_update and kept and not any(trajectory.num_sampled for trajectory in kept):
            raise RolloutError(
                f"Nothing of {len(kept)} trajectories can be trained: the server gave no logprobs, null for every "
                "token. Its log may say why; where the model itself has become NaN, lower the learning rate."
            )
        if not failed:
            return
        kinds = Counter(type(trajectory.cause).__name__ for trajectory in failed)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        if all_failed and (is_whole_update or self._num_in_a_row >= MAX_FAILED_IN_A_ROW):
            which = f"All {len(failed)}" if is_whole_update else f"The last {self._num_in_a_row}"
            message = f"{which} trajectories failed ({counts}). The first: {failed[0].error}"
            raise RolloutError(message) from failed[0].cause
        logger.warning(
            "%d of %d trajectories failed (%s). The first: %s",
            len(failed),
            len(trajectories),
            counts,
            failed[0].error,
            exc_info=failed[0].cause,
        )
