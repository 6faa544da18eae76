"""The processes of a run. One alone is the same object, and its collectives hand back what they were given.

What travels between processes in a step are sums of tensors (gradients) and a few numbers (losses, "I was asked to
stop"). Numbers go over gloo between hosts, tensors over the backend of their device: NCCL on CUDA, gloo on a CPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from blocktrain.errors import BlocktrainError, PeerError, first_line

T = TypeVar("T")

_LAUNCHED = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # what torchrun sets


@dataclass(kw_only=True, eq=False)
class Ranks:
    """This process's place among those of a run, and what they say to each other.

    All ranks must make the same calls in the same order. A call that the others do not answer within
    `timeout_seconds`, or that finds one of them gone, raises `PeerError`.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1  # on this machine
    timeout_seconds: float = 600.0
    payload_bytes: int = 0  # handed to `add_up` so far

    @property
    def is_rank0(self) -> bool:
        """Whether this is the one process that writes events, checkpoints and reports."""
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Start replacing `tensor` by its sum over all ranks; what is returned waits until that is done."""
        if self.size == 1:
            return lambda: None
        self.payload_bytes += tensor.nbytes
        with self.peers():
            work = dist.all_reduce(tensor, async_op=True)
        assert work is not None, "an asynchronous call returns its handle"

        def wait() -> None:
            with self.peers():
                work.wait()

        return wait

    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's `values` (as many on each; whole numbers below 2^53 are exact), in rank order."""
        if self.size == 1:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self.peers():
            dist.all_gather(found, mine)
        return [tensor.tolist() for tensor in found]

    def rank0_broadcast(self, action: Callable[[], T]) -> T:
        """Do `action` on rank 0 and hand its result, plain JSON values, to every rank. What it raises is raised there;
        the others raise `PeerError` with its message."""
        if self.size == 1:
            return action()
        if self.is_rank0:
            try:
                result = action()
            except BlocktrainError as error:
                self._broadcast({"error": str(error)})
                raise
            self._broadcast({"result": result})
            return result
        told = self._broadcast(None)
        if "error" in told:
            raise PeerError(f"rank {self.rank} stops because rank 0 did: {told['error']}")
        return told["result"]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's `data` on rank 0, in rank order; nothing on the others."""
        lengths = [int(length) for (length,) in self.all_gather([len(data)])]
        if not self.is_rank0:
            with self.peers():
                dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), dst=0)
            return []
        found = [data]
        for rank, length in enumerate(lengths[1:], start=1):
            told = torch.empty(length, dtype=torch.uint8)
            with self.peers():
                dist.recv(told, src=rank)
            found.append(told.numpy().tobytes())
        return found

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_gather([0.0])

    def _broadcast(self, message: dict | None) -> dict:
        """Rank 0's `message` on every rank."""
        data = torch.tensor(list(json.dumps(message).encode()), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        with self.peers():
            dist.broadcast(length, src=0)
            if not self.is_rank0:
                data = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(data, src=0)
        return json.loads(bytes(data.tolist()))

    @contextmanager
    def peers(self) -> Iterator[None]:
        """Turn what torch.distributed raises when a peer hangs or is gone into a `PeerError`."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank} of {self.size} got no answer from the others: one of them has ended, or hangs for "
                f"longer than distributed.timeout_seconds = {self.timeout_seconds:g}; its own output says why "
                f"({first_line(error)})"
            ) from error


@contextmanager
def open_ranks(device: str = "auto", *, timeout_seconds: float = 600.0) -> Iterator[Ranks]:
    """The processes that torchrun started, or those of a process group that exists already; otherwise this one alone.

    device: the run's; where it is not the CPU, each rank takes the accelerator of its local rank.
    """
    if dist.is_initialized():
        yield _joined(timeout_seconds)
        return
    if not is_launched():
        yield Ranks(timeout_seconds=timeout_seconds)
        return
    if device != "cpu" and torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    rank, size, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_seconds)
    with Ranks(rank=rank, size=size, timeout_seconds=timeout_seconds).peers():
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))
        dist.init_process_group(store=dist.PrefixStore(_attempt(), store), rank=rank, world_size=size, timeout=timeout)
    try:
        yield _joined(timeout_seconds)
    except PeerError:
        raise  # taking leave of peers that hang would hang
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _attempt() -> str:
    """A name for this start of the job: torchrun keeps its store from one start to the next (PyTorch 2.13, c10d
    rendezvous), so a rank would otherwise find the addresses of dead processes."""
    return f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-of-{os.environ['WORLD_SIZE']}"


def _joined(timeout_seconds: float) -> Ranks:
    rank, size = dist.get_rank(), dist.get_world_size()
    return Ranks(
        rank=rank,
        size=size,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        timeout_seconds=timeout_seconds,
    )


def is_launched() -> bool:
    """Whether this process is one of those that torchrun, or something like it, has started."""
    return os.environ.keys() >= _LAUNCHED


def launched_rank() -> int:
    """This process's rank among those, known before they have found each other; 0 for a process alone."""
    return int(os.environ["RANK"]) if is_launched() else 0
