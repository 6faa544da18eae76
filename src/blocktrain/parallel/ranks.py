"""The processes of a run. A single process uses the same class, whose collectives then return their input.

In a step the processes exchange sums of tensors (gradients) and a few numbers (losses, requests to stop). Numbers are
sent over gloo between hosts, tensors over the backend of their device: NCCL on CUDA, gloo on a CPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from blocktrain.errors import BlocktrainError, ConfigError, PeerError, first_line

T = TypeVar("T")

_TORCHRUN_VARIABLES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(kw_only=True, eq=False)
class Ranks:
    """This process's rank among the processes of a run, and the collectives between them.

    All ranks must make the same calls in the same order. A call that the others do not answer within `timeout_seconds`,
    or during which one of them ends, raises `PeerError`.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1  # on this machine
    timeout_seconds: float = 600.0
    all_reduced_bytes: int = 0  # passed to `all_reduce` so far
    cpu_group: dist.ProcessGroup | None = None  # for tensors on the CPU, where the default group sends none (only NCCL)

    @property
    def is_rank0(self) -> bool:
        """Whether this is the process that writes events, checkpoints and reports."""
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Start replacing `tensor` by its sum over all ranks; returns a function that waits until this is done."""
        if self.size == 1:
            return lambda: None
        self.all_reduced_bytes += tensor.nbytes
        with self.peer_errors():
            work = dist.all_reduce(tensor, async_op=True, group=self._group_of(tensor))
        assert work is not None, "an asynchronous call returns a handle"

        def wait() -> None:
            with self.peer_errors():
                work.wait()

        return wait

    def all_gather(self, values: Sequence[float]) -> list[list[float]]:
        """The `values` of every rank, in rank order: equally many on each; whole numbers below 2^53 are exact."""
        if self.size == 1:
            return [list(values)]
        local = torch.tensor(values, dtype=torch.float64)
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        with self.peer_errors():
            dist.all_gather(gathered, local, group=self.cpu_group)
        return [tensor.tolist() for tensor in gathered]

    def rank0_broadcast(self, action: Callable[[], T]) -> T:
        """Call `action` on rank 0 only, and return its result (plain JSON values) on every rank. What it raises is
        raised on rank 0; the other ranks raise `PeerError` with its message."""
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
        message = self._broadcast(None)
        if "error" in message:
            raise PeerError(f"rank {self.rank} stops because rank 0 did: {message['error']}")
        return message["result"]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The `data` of every rank on rank 0, in rank order; an empty list on the other ranks."""
        lengths = [int(length) for (length,) in self.all_gather([len(data)])]
        if not self.is_rank0:
            with self.peer_errors():
                dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), dst=0, group=self.cpu_group)
            return []
        gathered = [data]
        for rank, length in enumerate(lengths[1:], start=1):
            received = torch.empty(length, dtype=torch.uint8)
            with self.peer_errors():
                dist.recv(received, src=rank, group=self.cpu_group)
            gathered.append(received.numpy().tobytes())
        return gathered

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_gather([0.0])

    def _broadcast(self, message: dict | None) -> dict:
        """Rank 0's `message` on every rank."""
        data = torch.tensor(list(json.dumps(message).encode()), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self.broadcast([length])
        if not self.is_rank0:
            data = torch.empty(int(length), dtype=torch.uint8)
        self.broadcast([data])
        return json.loads(bytes(data.tolist()))

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Replace `tensors` by those of rank 0, in place."""
        if self.size == 1:
            return
        with self.peer_errors():
            for tensor in tensors:
                dist.broadcast(tensor, src=0, group=self._group_of(tensor))

    def _group_of(self, tensor: Tensor) -> dist.ProcessGroup | None:
        return self.cpu_group if tensor.device.type == "cpu" else None

    @contextmanager
    def peer_errors(self) -> Iterator[None]:
        """Turns what torch.distributed raises when a peer hangs or has ended into a `PeerError`."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank} of {self.size} got no answer from the others: one of them has ended, or has hung "
                f"for longer than distributed.timeout_seconds = {self.timeout_seconds:g}; its own output says why "
                f"({first_line(error)})"
            ) from error


@contextmanager
def open_ranks(device: str = "auto", *, timeout_seconds: float = 600.0) -> Iterator[Ranks]:
    """The ranks that torchrun started, or those of a process group that exists already; otherwise this process alone.

    device: of the run. Unless it is the CPU, each rank selects the accelerator of its local rank; raises `ConfigError`
        where it names one for all of them, such as "cuda:0".
    """
    if dist.is_initialized():
        yield _ranks_of_process_group(timeout_seconds)
        return
    if not is_launched():
        yield Ranks(timeout_seconds=timeout_seconds)
        return
    if ":" in device and int(os.environ["WORLD_SIZE"]) > 1:
        raise ConfigError(
            f"device '{device}' would put every process of this machine on one card: write "
            f"'{device.partition(':')[0]}', and each takes the card of its LOCAL_RANK"
        )
    if device != "cpu" and torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    rank, size, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=timeout_seconds)
    with Ranks(rank=rank, size=size, timeout_seconds=timeout_seconds).peer_errors():
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))
        # torchrun keeps its store when it restarts the job (PyTorch 2.13, c10d rendezvous). Without a name of its own,
        # a start of the job would find the addresses of dead processes there.
        attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-of-{size}"
        dist.init_process_group(store=dist.PrefixStore(attempt, store), rank=rank, world_size=size, timeout=timeout)
    try:
        yield _ranks_of_process_group(timeout_seconds)
    except PeerError:
        raise  # destroying a process group whose peers hang would hang
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _ranks_of_process_group(timeout_seconds: float) -> Ranks:
    rank, size = dist.get_rank(), dist.get_world_size()
    # Other launchers (accelerate) make groups of NCCL alone.
    sends_from_cpu = "cpu:" in dist.get_backend_config()
    return Ranks(
        rank=rank,
        size=size,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        timeout_seconds=timeout_seconds,
        cpu_group=None if sends_from_cpu else cast(dist.ProcessGroup, dist.new_group(backend="gloo")),
    )


def is_launched() -> bool:
    """Whether torchrun, or a launcher like it, has started this process."""
    return os.environ.keys() >= _TORCHRUN_VARIABLES


def launched_rank() -> int:
    """This process's rank, known before the process group is made; 0 for a process alone."""
    return int(os.environ["RANK"]) if is_launched() else 0
