"""What every run needs of its machine: device, randomness, copies between host and device, memory, versions.

Code above this file need not know whether there is a GPU: on a CPU the same calls do what makes sense there.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import mmap
import os
import platform
import re
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from blocktrain.errors import BlocktrainError, ConfigError, OutOfMemoryError, first_line


def may_be_on_hub(name: str) -> bool:
    """Whether `name` could name a model on the Hugging Face hub, and is not clearly a path on this machine.

    >>> [may_be_on_hub(name) for name in ("gpt2", "openai/gpt2", "./gpt2", "/models/gpt2", "~/gpt2")]
    [True, True, False, False, False]
    """
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def is_hub_silent(name: str) -> bool:
    """Whether the Hugging Face hub gives no answer about the model `name`: one try, where its client takes a minute."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, timeout=10)
    except HfHubHTTPError:
        return False
    except Exception:  # of the HTTP client, whose classes change with its version
        return True
    return False


def pick_device(name: str = "auto") -> torch.device:
    """The device called `name`, with its index; `auto` takes the first accelerator, else the CPU."""
    try:
        device = torch.accelerator.current_accelerator(check_available=True) if name == "auto" else torch.device(name)
        probe = torch.empty(1, device=device or torch.device("cpu"))
        probe.cpu()  # of 'meta' nothing can be read
        return probe.device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device '{name}' cannot be used here ({first_line(error)}); try 'auto' or 'cpu'") from error


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The keyword arguments of a forward call on `device`. To a GPU they go through page-locked memory: the copy is
    queued, and the processor does not wait for it."""
    if device.type == "cuda":
        batch = {name: _page_locked_copy(tensor) for name, tensor in batch.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def _page_locked_copy(tensor: Tensor) -> Tensor:
    """A small tensor in page-locked memory, which PyTorch keeps and uses again; itself if it is not on the host."""
    on_host = tensor.device.type == "cpu"
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor) if on_host else tensor


def page_locked(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialized tensor in page-locked host memory, for a machine with CUDA; it takes whole pages of 4 KiB.

    PyTorch's own allocator rounds each tensor up to a power of two bytes (the weights of Llama-2-13B take 1.69 times
    their size), so that is for tensors that come and go in every step. Freeing this one waits for the device's copies.
    Raises `OutOfMemoryError` where the system locks no more pages.
    """
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    cudart: Any = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(address, len(memory), 0))
    if error:
        raise OutOfMemoryError(
            f"the system does not lock {len(memory)} bytes more of host memory (CUDA error {error}); end other "
            "programs, or keep less on the host (memory.frozen, optimizer.state, prefix.store)"
        )
    end = (torch.cuda.synchronize, cudart.cudaHostUnregister)
    weakref.finalize(memory, _unlock_pages, address, *end).atexit = False
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


def _unlock_pages(address: int, wait: Callable[[], None], unlock: Callable[[int], object]) -> None:
    wait()  # a copy may be on its way from or to these pages
    unlock(address)


def seed_everything(seed: int, *key: int) -> None:
    """Seed torch on every device from `(seed, *key)`.

    The trainer calls it before each step with the step's number. What dropout draws is then a function of the seed and
    the step, and a checkpoint needs no generator state.
    """
    state = np.random.SeedSequence(seed, spawn_key=key).generate_state(2, np.uint32)
    torch.manual_seed(int(state[0]) << 31 ^ int(state[1]))


def permutations(count: int, how_many: int, seed: int, *key: int) -> np.ndarray:
    """Independent permutations of the numbers below `count`, one a column: int64 (count, how_many).

    They are a function of `(seed, *key)`. The numbers are sorted by random keys, because numpy promises that the raw
    numbers of its bit generators stay the same in every version, but not what `Generator.permutation` makes of them.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed, *key])).random_raw(count * how_many)
    return np.argsort(keys.reshape(count, how_many), axis=0, kind="stable")


def permutation(count: int, seed: int, *key: int) -> np.ndarray:
    """The numbers below `count` in the random order of `(seed, *key)`: int64 (count,)."""
    return permutations(count, 1, seed, *key)[:, 0]


def read_numbers(figures: Sequence[Tensor | float]) -> list[float]:
    """The numbers in `figures`, some of which are 0-d tensors: these are read together, so the host waits once."""
    tensors = [figure for figure in figures if isinstance(figure, Tensor)]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    together = [tensor.to(device, non_blocking=True) for tensor in tensors]
    numbers = iter(torch.stack(together).cpu().tolist() if together else ())
    return [next(numbers) if isinstance(figure, Tensor) else figure for figure in figures]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all queued work. On a CPU there is nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class SideStream:
    """A CUDA stream for copies between host and device that run at the same time as the computation.

    to_device    the copy is allocated on the computation's stream:  join() before it is read or freed
    to_host      the copy is in page-locked memory:                  wait() before it is read

    Without CUDA every copy is complete when the call returns.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and torch.cuda.is_available() else None

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` on the device; `tensor` itself if it is there already."""
        if tensor.device == self.device:
            return tensor
        copy = torch.empty_like(tensor, device=self.device)
        with self._copying():
            return copy.copy_(tensor, non_blocking=True)

    def to_host(self, tensor: Tensor, *, is_kept: bool = True) -> Tensor:
        """A copy of `tensor` on the host. The copy of a DTensor is complete when this returns.

        is_kept: in memory of its own size; without it, in memory that PyTorch has locked before and may use again.
        """
        if self._stream is None or type(tensor) is not Tensor:
            return tensor.to("cpu", copy=True)
        copy = self._room_for(tensor) if is_kept else torch.empty_like(tensor, device="cpu", pin_memory=True)
        with self._copying():
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return copy

    def pinned(self, tensor: Tensor) -> Tensor:
        """`tensor` in page-locked host memory, from which copies need not wait for the processor."""
        return tensor.cpu() if self._stream is None else self._room_for(tensor).copy_(tensor)

    @staticmethod
    def _room_for(tensor: Tensor) -> Tensor:
        is_fake = isinstance(tensor, FakeTensor)  # it has no numbers, and a copy of it no memory
        return torch.empty_like(tensor, device="cpu") if is_fake else page_locked(tensor.shape, tensor.dtype)

    def join(self) -> None:
        """Make all computation that is queued from now on wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def wait(self) -> None:
        """Return when the copies are complete."""
        if self._stream is not None:
            self._stream.synchronize()

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Inside, work is queued on the side stream, after all that the computation has queued so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield


class AlwaysCopying(SideStream):
    """A side stream for counting bytes where host and device are one memory: what goes to the device is a copy."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor`."""
        return tensor.clone()


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: allocated memory on a GPU, the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_reserved_bytes(device: torch.device) -> int | None:
    """The most that PyTorch's allocator has taken from a GPU so far, unused parts included; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def reset_peak_memory(device: torch.device) -> None:
    """Start to measure `peak_memory_bytes` again. The peak of a resident set (on a CPU) cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free_memory_bytes(device: torch.device) -> int:
    """Memory that tensors on `device` can still take, within the limits set for this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device)) - torch.cuda.memory_reserved(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return min(free, allowed) + unused
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    statm = Path("/proc/self/statm")
    if limit == resource.RLIM_INFINITY or not statm.is_file():
        return available_memory_bytes()
    mapped = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return max(min(available_memory_bytes(), limit - mapped), 0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that an allocation failed. PyTorch's CPU allocator raises a plain `RuntimeError`."""
    failed = ("can't allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in failed)
    )


@contextmanager
def library_errors(what: str, explain: Callable[[], str] = str) -> Iterator[None]:
    """Turns whatever another library raises inside into a `ConfigError` of one line, which begins with `what`.

    explain: says why the library met a value that it did not expect; called where its own words are Python's. "" where
        it is not known.

    Around calls of libraries that raise errors of any class for wrong input, as transformers does. Our own errors pass,
    and so does a failed allocation.
    """
    try:
        yield
    except BlocktrainError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # Values that the library did not foresee.
        unexpected = TypeError | AttributeError | LookupError | ArithmeticError | RecursionError
        if isinstance(error, unexpected) or isinstance(error.__cause__, unexpected):
            field = re.match(r"Validation error for field '(\w+)'", str(error))  # of transformers, whose words are long
            place = (
                "a value in its files or settings is wrong" if field is None else f"its '{field[1]}' is of a wrong type"
            )
            words = explain() or (place if field else f"{place} ({first_line(error)})")
        else:
            words = first_line(error)
        raise ConfigError(f"{what}: {words}") from error


def available_memory_bytes() -> int:
    """Host memory that is available without swapping, within the container's limit if there is one."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available
    return available if limit == "max" else min(available, int(limit) - int(used))


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Versions, hardware and the commit of the source, as recorded in `run.json` and in every benchmark's result."""
    import transformers

    import blocktrain

    return {
        "blocktrain": blocktrain.__version__,
        "commit": source_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def processor_name() -> str:
    """The processor's model name, or its architecture if the system does not know the name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def source_commit() -> str | None:
    """The git commit that this package runs from, with "+" if files differ from it; None outside a checkout."""
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no", str(folder)) else "")
    except (OSError, subprocess.SubprocessError):
        return None


def result_path(text: str) -> Path:
    """Where a benchmark or an experiment writes its result: the `type` of an argument of `argparse`.

    Raises `ArgumentTypeError` for a place in a checkout whose code is not committed: the result names the commit that
    it was measured at. Other results and documents may differ from it (`.json`, `.md`, `.svg`).
    """
    path = Path(text).resolve()
    folder = next(parent for parent in path.parents if parent.is_dir())
    try:
        root = Path(_git(folder, "rev-parse", "--show-toplevel"))
        changed = _git(root, "diff", "--name-only", "HEAD").splitlines()
        new = _git(root, "ls-files", "--others", "--exclude-standard").splitlines()
    except (OSError, subprocess.SubprocessError):
        return path  # outside of any checkout
    uncommitted = [name for name in (*changed, *new) if not name.endswith((".json", ".md", ".svg"))]
    if uncommitted:
        raise argparse.ArgumentTypeError(
            f"'{path.relative_to(root)}' would name a commit that lacks your changes to '{uncommitted[0]}'; commit "
            "them first, or write a trial to a place outside of the repository"
        )
    return path


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
