"""The workers' side of the launcher: `python -m tests.launcher_worker RANK PARENT CONNECTION LIFELINE STACKS`."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.utils._pytree import tree_map_only

Answer = tuple[float, str, str, "bytes | None"]


def main() -> None:
    """Serve calls until the parent is gone."""
    rank, parent, connection_fd, lifeline, stacks = (int(argument) for argument in sys.argv[1:6])
    _die_with(parent)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    # A crash in C++ shows where Python was.
    faulthandler.enable(file=stacks, all_threads=True)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    torch.set_num_threads(1)
    # Calls share one rendezvous under prefixes: a new server each call would need a free port each call.
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    connection = Connection(connection_fd)
    _send(connection, "ready", server.port if server is not None else 0)
    while True:
        try:
            _, call = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        _serve(connection, rank, call)


def _die_with(parent: int) -> None:
    """Ask Linux for a SIGKILL when the parent dies: it also reaches a process that holds the interpreter lock."""
    if parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)


def _end_with_parent(lifeline: int) -> None:
    """Wait in a thread of its own: the main thread may hang in a collective."""
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def _send(connection: Connection, kind: str, body: Any) -> None:
    # Never `connection.send`: torch teaches its pickler to share memory, which dies with this process.
    connection.send_bytes(pickle.dumps((kind, body)))


def _serve(connection: Connection, rank: int, call: dict[str, Any]) -> None:
    """One call: an outcome, then, when the parent allows, a clean-up and what it found."""
    unraisable: list[str] = []
    with _ambience(rank, call), _collected_unraisables(unraisable), warnings.catch_warnings():
        failure, result = None, b""
        try:
            result = _run(rank, call)
        except BaseException as error:  # a worker must answer, whatever was raised
            failure = _describe(error)
            del error
        _send(connection, *(("failure", failure) if failure is not None else ("result", result)))
        del result
        connection.recv_bytes()
        try:
            _forget()
            left = _children()
            if left:
                raise RuntimeError(f"The call left child processes behind: {left}. End them before it returns.")
            if unraisable:
                raise RuntimeError("An exception that nobody could catch was raised:\n" + "\n".join(unraisable))
            _send(connection, "clean", None)
        except Exception as error:
            _send(connection, "clean", _describe(error))


def _run(rank: int, call: dict[str, Any]) -> bytes:
    _apply_filters(call["filters"])
    function, args, kwargs = pickle.loads(call["payload"])
    # Modules imported by the line above may have put filters of their own in front.
    _apply_filters(call["filters"])
    store = TCPStore("127.0.0.1", call["port"], is_master=False)
    world_size = call["world_size"]
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"call_{call['index']}", store),
        rank=rank,
        world_size=world_size,
        # The parent's limit comes first, because it shows the stacks.
        timeout=datetime.timedelta(seconds=call["timeout"] + 60),
    )
    result = function(rank, world_size, *args, **kwargs)
    return pickle.dumps(tree_map_only(torch.Tensor, _portable, result))


def _portable(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "to_local"):
        raise TypeError("A DTensor cannot leave its process group: return `.full_tensor()` or `.to_local()`.")
    return tensor.detach().cpu().clone()


def _apply_filters(filters: list[str]) -> None:
    from _pytest.config import parse_warning_filter

    warnings.resetwarnings()
    for line in filters:
        warnings.filterwarnings(*parse_warning_filter(line, escape=False))


def _describe(error: BaseException) -> Answer:
    now = time.monotonic()
    summary = "".join(traceback.format_exception_only(error)).strip().split("\n", 1)[0]
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = None
    details = "".join(traceback.format_exception(error))
    traceback.clear_frames(error.__traceback__)
    return now, summary, details, pickled


@contextlib.contextmanager
def _ambience(rank: int, call: dict[str, Any]) -> Iterator[None]:
    """The caller's surroundings, plus what `torchrun` would set; put back afterwards."""
    environment, directory, path, threads = dict(os.environ), os.getcwd(), list(sys.path), torch.get_num_threads()
    dtype, handlers = torch.get_default_dtype(), {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    os.environ.clear()
    os.environ.update(call["environment"], **_torchrun_environment(rank, call))
    os.chdir(call["directory"])
    sys.path[:] = call["path"]
    _seed()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        sys.path[:] = path
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        if torch.empty(0).device.type != "cpu":
            # Only where it is needed: torch 2.9 cannot say its default device any more once it was set to None.
            torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _torchrun_environment(rank: int, call: dict[str, Any]) -> dict[str, str]:
    world_size = str(call["world_size"])
    return {
        "OMP_NUM_THREADS": "1",
        # Host names need not resolve where tests run.
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(call["port"]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        # A group made again inside the call meets at the same store, under keys of this call.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(call["index"]),
    }


def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@contextlib.contextmanager
def _collected_unraisables(found: list[str]) -> Iterator[None]:
    """What only stderr would hear: exceptions in `__del__` (a ResourceWarning made an error) and in threads."""

    def on_unraisable(event: Any) -> None:
        found.append(f"in {event.object!r}: " + "".join(traceback.format_exception(event.exc_value)))

    def on_thread(event: Any) -> None:
        found.append(f"in {event.thread!r}: " + "".join(traceback.format_exception(event.exc_value)))

    before = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = on_unraisable, on_thread
    try:
        yield
    finally:
        sys.unraisablehook, threading.excepthook = before


def _forget() -> None:
    """Drop whatever would let one call change the next."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch.distributed.device_mesh" in sys.modules:
        sys.modules["torch.distributed.device_mesh"]._mesh_resources.mesh_stack.clear()
    if "torch.distributed.tensor" in sys.modules:
        # Cached plans hold meshes, and a mesh equals the next call's mesh of the same shape, whose groups are others.
        from torch.distributed.tensor import DTensor, _redistribute, debug

        if hasattr(debug, "_clear_sharding_prop_cache"):
            debug._clear_sharding_prop_cache()
        else:  # torch 2.9
            DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
        _redistribute._gen_transform_infos.cache_clear()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
        sys.modules["accelerate.state"].GradientState._reset_state()
    gc.collect()


def _children() -> list[str]:
    """Living child processes, except the one that multiprocessing keeps for itself."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    own = tracker._resource_tracker._pid if tracker is not None else None
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        pids = [int(pid) for pid in file.read().split()]
    found = []
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
            if pid != own and command:  # a zombie has none
                found.append(f"{pid} ({command[:120]})")
    return found


if __name__ == "__main__":
    main()
