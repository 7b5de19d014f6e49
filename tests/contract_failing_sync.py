"""Launched on two processes: the main process cannot save the weights.

    torchrun --standalone --nproc_per_node 2 contract_failing_sync.py BASE_URL FOLDER

Each process writes the error that it ended with to FOLDER/rank<N>.txt.
"""

import sys
from pathlib import Path

from contract_parts import Echo, chat, make_trainer

from trl_rollouts import CheckpointSync, env_reward, env_rollout


def main(base_url: str, folder: Path) -> None:
    no_folder = folder / "file"
    no_folder.touch()
    rollout = env_rollout(Echo, base_url=base_url, weight_sync=CheckpointSync(no_folder / "weights"))
    trainer = make_trainer(
        rollout, folder, [chat("x")] * 2, reward_funcs=env_reward, per_device_train_batch_size=1, num_generations=2
    )
    try:
        trainer.train()
    except Exception as error:
        path = folder / f"rank{trainer.accelerator.process_index}.txt"
        path.write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
