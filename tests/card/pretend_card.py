"""A process that believes it has a CUDA device, on a machine and with a PyTorch that have none.

PyTorch can compute with fake tensors of a device that is not there, but autograd asks C++ for the device's guard and
its hooks, and ends the process where there are none. `install` gives it both: a guard that does nothing, and hooks that
say that there is one device. It compiles them (one second) and cannot be undone, so it is for a process of its own:

    ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=pretend_card.install)

Inside `running()`, every tensor is fake, a run with `device = "cuda"` is built and trained by its own code, and these
fail as on a card: an operation on tensors of two devices, a page-locked copy of a fake tensor, a number that is read
out of a tensor (`reads` counts them, where the caller allows it).
"""

from __future__ import annotations

import subprocess
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from blocktrain.chain import model_loading
from blocktrain.memory import fake
from blocktrain.modules.dispatch import EagerDispatchMode

SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct CUDAHooks final : at::CUDAHooksInterface {  // PyTorch looks for a class of this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(getDevice()); }
};

namespace at { using ::CUDAHooks; C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks) }
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
"""

FREE_BYTES, TOTAL_BYTES = 23 * 10**9, 24 * 10**9
HOST_BYTES = 64 * 10**9


class Stream:
    """A stream or an event on which nothing ever waits: fake tensors hold no numbers that could be late."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def nothing(self, *_: Any) -> None:
        """Any wait."""

    wait_stream = wait_event = record_event = synchronize = record = wait = nothing


def compile_card(folder: Path) -> Path:
    """The library with the guard and the hooks, to be named in LD_PRELOAD: PyTorch looks for them as it is loaded."""
    source, library = folder / "card.cpp", folder / "card.so"
    source.write_text(SOURCE)
    torch_folder = Path(torch.__file__).parent
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch_folder}/include", f"-L{torch_folder}/lib"]
    link = ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder}/lib"]
    subprocess.run(["c++", *options, str(source), "-o", str(library), *link], check=True)
    return library


def install() -> None:
    """Answer what Python asks of the card, in a process into which the library was loaded."""
    memory = {"max_memory_allocated": 0, "memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0}
    answers: dict[str, Any] = {
        **{name: lambda *_, value=value: value for name, value in memory.items()},
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "mem_get_info": lambda *_: (FREE_BYTES, TOTAL_BYTES),
        "get_per_process_memory_fraction": lambda device=None: _with_index(device) and 1.0,
        "reset_peak_memory_stats": lambda *_: None,
        "get_device_name": lambda *_: "a card that is not there",
        "get_device_capability": lambda *_: (8, 9),
        "get_device_properties": lambda *_: SimpleNamespace(
            total_memory=TOTAL_BYTES, major=8, minor=9, multi_processor_count=128, name="a card that is not there"
        ),
        "is_bf16_supported": lambda *_: True,
        "synchronize": lambda *_: None,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0),
        "manual_seed_all": lambda *_: None,
        "manual_seed": lambda *_: None,
        "get_rng_state": lambda *_: None,
        "set_rng_state": lambda *_: None,
        "Stream": Stream,
        "Event": Stream,
        "current_stream": Stream,
        "stream": Stream,
    }
    for name, answer in answers.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, answer)
    fake._without_memory = uncounted()(fake._without_memory)
    fake.FakeCopy.running = _run_uncounted(fake.FakeCopy.running)  # pyright: ignore[reportAttributeAccessIssue]
    model_loading.available_memory_bytes = lambda: HOST_BYTES
    nn.Module._apply = _apply  # pyright: ignore[reportAttributeAccessIssue]
    FakeTensorMode.avoid_device_init = True  # pyright: ignore - no real constant can be copied to the card
    FakeTensor.numpy = _zeros  # pyright: ignore[reportAttributeAccessIssue]
    FakeTensor.data = property(torch.Tensor.data.__get__, _set_data)  # pyright: ignore[reportAttributeAccessIssue]
    torch.accelerator.synchronize = lambda *_: None
    torch.Tensor.record_stream = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def _apply(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`, which cannot change fake parameters in place: new ones take their places, tied ones too."""
    changed: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for own in (part._parameters, part._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in changed:
                    value = change(tensor)
                    is_new_parameter = isinstance(tensor, nn.Parameter) and value is not tensor
                    changed[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_new_parameter else value
                own[name] = changed[id(tensor)]  # pyright: ignore[reportArgumentType]
    return module


@contextmanager
def uncounted() -> Iterator[None]:
    """Inside, `DeviceBytes` counts nothing: the tensors are those of a model's copy without memory."""
    DeviceBytes.is_counting = False
    try:
        yield
    finally:
        DeviceBytes.is_counting = True


def _run_uncounted(running: Callable[..., AbstractContextManager[None]]) -> Callable[..., AbstractContextManager[None]]:
    @contextmanager
    def run(copy: fake.FakeCopy) -> Iterator[None]:
        with uncounted(), running(copy):
            yield

    return run


def _set_data(tensor: FakeTensor, value: FakeTensor) -> None:
    """`tensor.data = value`, where the value may be on another device."""
    torch.Tensor.data.__set__(tensor, value)  # pyright: ignore[reportAttributeAccessIssue]
    tensor.fake_device = value.fake_device


def _zeros(tensor: FakeTensor) -> np.ndarray:
    """`Tensor.numpy`: zeros for the numbers that a fake tensor on the host does not have."""
    assert tensor.device.type == "cpu", "a tensor on a card has no array"
    return np.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch."))


def _with_index(device: Any) -> torch.device:
    """As PyTorch does: some questions about memory need a device with its index."""
    if isinstance(device, torch.device) and device.type == "cuda" and device.index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
    return torch.device(device or 0)


READS: dict[Any, Any] = {  # operations that read numbers, and what they find here
    torch.ops.aten._local_scalar_dense.default: 1.0,
    torch.ops.aten.allclose.default: True,
    torch.ops.aten.equal.default: True,
}


class HostWaits(EagerDispatchMode):
    """Counts the operations at which the host waits for the card, by name. A number that is read is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in READS and isinstance(args[0], FakeTensor):
            self.seen[str(func)] += args[0].device.type == "cuda"
            return READS[func]
        result = func(*args, **kwargs)
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            blocks = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            if source.device != result.device and blocks:
                self.seen[f"{func} from {source.device} to {result.device}"] += 1
        return result


class DeviceBytes(EagerDispatchMode):
    """The most bytes that were alive at once, for each kind of device. A model's copy without memory takes none."""

    is_counting = True

    def __init__(self) -> None:
        super().__init__()
        self.peak: Counter[str] = Counter()
        self._alive: Counter[str] = Counter()
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor) and DeviceBytes.is_counting:
                self._count(tensor.device.type, tensor.untyped_storage())
        return result

    def _count(self, kind: str, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def forget(_: object) -> None:
            del self._seen[key]
            self._alive[kind] -= size

        self._seen[key] = weakref.ref(storage, forget)
        self._alive[kind] += size
        self.peak |= self._alive


@contextmanager
def running() -> Iterator[None]:
    """Inside, every new tensor is fake."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
