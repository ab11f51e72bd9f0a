"""The launcher of multi-process tests: what comes back, what is kept apart, and what ends when things go wrong."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor._redistribute import _gen_transform_infos as _redistribution

from tests import launcher, sharding
from tests.launcher import WorkerError, run_distributed
from tests.processes import is_alive


@pytest.fixture
def new_pool() -> Iterator[None]:
    """A pool for one test."""
    launcher.shutdown()
    yield
    launcher.shutdown()


def _sum_of_ranks(rank: int, world_size: int, factor: float = 1.0, *, offset: float = 0.0) -> torch.Tensor:
    tensor = torch.tensor([factor * rank + offset], requires_grad=True)
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total * tensor.requires_grad


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank(world_size: int) -> None:
    results = run_distributed(_sum_of_ranks, 2.0, world_size=world_size, offset=1.0)
    assert [result.item() for result in results] == [world_size * (world_size - 1) + world_size] * world_size


def _pid(rank: int, world_size: int) -> int:
    return os.getpid()


def test_workers_stay_alive_and_a_warm_call_is_quick() -> None:
    first = run_distributed(_pid, world_size=4)
    assert first == launcher.worker_pids()
    run_distributed(_pid, world_size=4)
    started = time.monotonic()
    assert run_distributed(_pid, world_size=4) == first
    assert run_distributed(_pid, world_size=2) == first[:2]
    # 0.6 s on two idle cores.
    assert time.monotonic() - started < 5


def _environment(rank: int, world_size: int) -> dict[str, str]:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "SEEN"]
    found = {name: os.environ.get(name, "") for name in names}
    return {**found, "cwd": os.getcwd(), "elastic": str(dist.is_torchelastic_launched())}


def test_environment_is_the_callers_and_torchruns(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    monkeypatch.setenv("SEEN", "yes")
    monkeypatch.chdir(tmp_path)
    for rank, found in enumerate(run_distributed(_environment)):
        assert found["RANK"] == found["LOCAL_RANK"] == str(rank)
        assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "2"
        assert found["GROUP_RANK"] == found["NODE_RANK"] == "0"
        assert (found["MASTER_ADDR"], found["SEEN"], found["elastic"]) == ("127.0.0.1", "yes", "True")
        assert os.path.realpath(found["cwd"]) == os.path.realpath(tmp_path)


def _pollute(rank: int, world_size: int) -> None:
    os.environ["LEAK"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    os.chdir("/")
    torch.manual_seed(99)
    sharding.mesh_1d().__enter__()
    warnings.simplefilter("ignore")


def _observe(rank: int, world_size: int) -> tuple[object, ...]:
    draws = (random.random(), torch.rand(1).item())
    state = ("LEAK" in os.environ, torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    return (
        *draws,
        *state,
        os.getcwd(),
        torch.empty(1).device.type,
        warnings.filters[0][0],
        len(dist.distributed_c10d._world.pg_map),
    )


def test_nothing_leaks_into_the_next_call() -> None:
    before = run_distributed(_observe)
    run_distributed(_pollute)
    assert run_distributed(_observe) == before
    assert before[0] == before[1]
    assert before[0][2:6] == (False, torch.float32, 1, True)


def _redistribute(rank: int, world_size: int) -> tuple[torch.Tensor, int, int]:
    num_old_plans = _redistribution.cache_info().currsize
    tensor = distribute_tensor(torch.arange(5.0), sharding.mesh_1d(), [Shard(0)])
    total = sharding.full((tensor * 2).sum()) + sharding.full(tensor)
    return total, num_old_plans, _redistribution.cache_info().currsize


def test_dtensor_plans_do_not_survive_their_group() -> None:
    for world_size in (2, 4, 2, 2):
        for result, num_old_plans, num_plans in run_distributed(_redistribute, world_size=world_size):
            assert result.tolist() == [20, 21, 22, 23, 24]
            assert num_old_plans == 0 < num_plans


def _fail_on_one(rank: int, world_size: int) -> None:
    sys.stdout.write(f"a word from rank {rank}\n")
    if rank == 1:
        raise ValueError("the root cause")
    dist.barrier()


def test_the_root_cause_comes_first_with_its_output() -> None:
    with pytest.raises(WorkerError, match=r"_fail_on_one failed on rank 1, 0: ValueError: the root cause") as caught:
        run_distributed(_fail_on_one)
    assert isinstance(caught.value.__cause__, ValueError)
    assert [failure.rank for failure in caught.value.failures] == [1, 0]
    assert 'raise ValueError("the root cause")' in caught.value.failures[0].details
    assert "a word from rank 1" in str(caught.value)
    # All ranks answered: the same workers serve the next call.
    pids = launcher.worker_pids()
    assert run_distributed(_pid) == pids[:2]


def _fail_and_hang(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ValueError("the root cause")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)


@pytest.mark.usefixtures("new_pool")
def test_ranks_that_hang_after_a_failure_are_killed() -> None:
    run_distributed(_pid)
    pids = launcher.worker_pids()
    started = time.monotonic()
    with pytest.raises(WorkerError, match="the root cause") as caught:
        run_distributed(_fail_and_hang)
    assert time.monotonic() - started < launcher.GRACE_SECONDS + 10
    assert "rank 1, unfinished" in str(caught.value)
    assert "in _fail_and_hang" in str(caught.value).split("rank 1, unfinished")[1]
    assert not any(is_alive(pid) for pid in pids)
    assert not set(run_distributed(_pid)) & set(pids)


def _deadlock(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        time.sleep(1000)


@pytest.mark.usefixtures("new_pool")
def test_a_deadlock_shows_every_ranks_stack() -> None:
    run_distributed(_pid)  # so that two seconds are enough to get there
    with pytest.raises(TimeoutError, match=r"did not end within 2 s on ranks \[0, 1\]") as caught:
        run_distributed(_deadlock, timeout=2)
    first, second = str(caught.value).split("rank 1, unfinished")
    assert "in barrier" in first
    assert "in _deadlock" in second
    assert launcher.worker_pids() == []


def _die(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.usefixtures("new_pool")
def test_a_killed_rank_is_named() -> None:
    with pytest.raises(WorkerError, match="failed on rank 1, 0: the process died with exit status -9"):
        run_distributed(_die)
    assert len(run_distributed(_pid)) == 2


def _crash(rank: int, world_size: int, path: str, times: int) -> int:
    if rank == 1:
        with open(path, "a") as file:
            file.write("x")
        if os.path.getsize(path) <= times:
            os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    return rank


@pytest.mark.usefixtures("new_pool")
def test_a_crash_in_native_code_is_tried_once_more_and_told(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "crashes", [])
    assert run_distributed(_crash, str(tmp_path / "once"), 1) == [0, 1]
    assert len(launcher.crashes) == 1
    assert "exit status -11" in launcher.crashes[0]
    assert "in _crash" in launcher.crashes[0]  # where Python was
    with pytest.raises(WorkerError, match="exit status -11"):
        run_distributed(_crash, str(tmp_path / "twice"), 2)


def _warn(rank: int, world_size: int) -> None:
    if rank == 1:
        warnings.warn("a sentence for the test", UserWarning, stacklevel=1)


def test_a_warning_is_an_error() -> None:
    with pytest.raises(WorkerError, match="UserWarning: a sentence for the test"):
        run_distributed(_warn)


@pytest.mark.filterwarnings("ignore:a sentence for the test")
def test_a_tests_own_filter_holds_in_the_workers() -> None:
    run_distributed(_warn)


def test_without_pytest_the_filters_come_from_the_project() -> None:
    assert launcher._filters_of_the_project()[0] == "error"


_kept: list[subprocess.Popen[bytes]] = []


def _leave_a_child(rank: int, world_size: int) -> None:
    if rank == 1:
        _kept.append(subprocess.Popen(["sleep", "1000"]))


@pytest.mark.usefixtures("new_pool")
def test_a_child_left_behind_is_an_error() -> None:
    with pytest.raises(WorkerError, match=r"failed on rank 1: .*left child processes behind: \['\d+ \(sleep 1000\)'\]"):
        run_distributed(_leave_a_child)
    assert run_distributed(_pid)


def _fail_in_a_thread(rank: int, world_size: int) -> None:
    def run() -> None:
        raise KeyError("nobody hears this")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_an_exception_in_a_thread_is_an_error() -> None:
    with pytest.raises(WorkerError, match="nobody hears this"):
        run_distributed(_fail_in_a_thread)


def _return_dtensor(rank: int, world_size: int) -> torch.Tensor:
    return distribute_tensor(torch.arange(4.0), sharding.mesh_1d(), [Shard(0)])


def test_calls_that_cannot_work_say_why() -> None:
    with pytest.raises(ValueError, match=r"world_size=5 is not in 1\.\.4"):
        run_distributed(_pid, world_size=5)
    with pytest.raises(ValueError, match="cannot be pickled"):
        run_distributed(lambda rank, world_size: None)
    with pytest.raises(WorkerError, match=r"return `\.full_tensor\(\)` or `\.to_local\(\)`"):
        run_distributed(_return_dtensor)
