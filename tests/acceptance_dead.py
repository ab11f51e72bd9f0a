"""One of two processes, the second of which dies on purpose: `python -m tests.acceptance_dead RANK HOST FOLDER`."""

from __future__ import annotations

import datetime
import logging
import os
import sys
from pathlib import Path

__all__ = ["DEAD_STEP", "GROUP_SECONDS"]

#: When the second process dies.
DEAD_STEP = 4
#: The time-out of the process group.
GROUP_SECONDS = 30


def main(rank: int, host: str, folder: Path) -> None:
    """Train until it ends.

    Args:
        rank: Of this process.
        host: One of `tests.acceptance_hosts.HOSTS`.
        folder: That both share.
    """
    logging.basicConfig(level=logging.WARNING)
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "tests", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({**places, **sizes})
    import torch
    import torch.distributed as dist

    from tests.acceptance_runs import run

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2, timeout=timeout)
    run(rank, 2, host, [{"kind": "dead_rank", "step": DEAD_STEP, "rank": 1}], DEAD_STEP + 4, folder)
    print("trained to the end")  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
