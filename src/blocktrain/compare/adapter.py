"""Adapters: how another package's method is built, started and found.

An adapter is a function from a run to an `ExternalMethod`, with what has to be known about the package. Those of the
experiments are in `experiments/rivals/`, outside of the wheel. A module that registers adapters is imported by the
configuration's key `imports`:

    ADAPTERS["lisa"] = Adapter(build=lisa, cycle=draws)
"""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from blocktrain.compare.external_module import ExternalMethod
from blocktrain.errors import ConfigError, first_line
from blocktrain.train.context import TrainingContext


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A method of another package.

    build: (run, steps between two switches; None: the method's usual) -> what trains. The run's model comes trainable
        as a whole.
    rate: the learning rate to start a search from, as a multiple of AdamW's.
    optimizer: the optimizer's name in the records; None is the configured class.
    module, package: what is imported, and what to install for it; None: nothing.
    cuda_only: why it needs a GPU, if it does.
    cycle: how many switches it takes until everything was trained once. It is called before `build`, which may freeze.
    """

    build: Callable[[TrainingContext, int | None], ExternalMethod]
    rate: float = 1.0
    optimizer: str | None = None
    module: str | None = None
    package: str | None = None
    cuda_only: str | None = None
    cycle: Callable[[TrainingContext], int] = lambda context: 1

    def require(self, name: str, device: torch.device) -> None:
        """Raise `ConfigError` where it cannot run: on another device, or without its package."""
        if self.cuda_only and device.type != "cuda":
            raise ConfigError(f"method '{name}' needs a CUDA device, and this run is on {device}: {self.cuda_only}")
        if self.module is not None:
            import_package(self.module, name, self.package or self.module)


ADAPTERS: dict[str, Adapter] = {}


def import_package(module: str, name: str, package: str) -> Any:
    """Import `module` for method `name`; raises `ConfigError` that says what to install."""
    try:
        with silenced():
            return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"method '{name}' needs {package}, which cannot be imported ({first_line(error)}); pip install {package}"
        ) from None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Inside, another package's warnings and prints are dropped."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
