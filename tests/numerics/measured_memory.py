"""What is alive on one rank while an exported file runs a step at full size; run in a process of its own:

    python -m tests.numerics.measured_memory train.py

Fake tensors on a fake process group take no memory but have storages, which are followed from the op that makes them until the
last reference is gone. As on a device, a collective holds what it reads until it is awaited. Parameters and inputs are left out.
Prints one JSON line: `entries`, bytes alive at the entry of each block function; `peak`, the most at any op; `gathered`, the most
blocks whose gathered parameters are alive at once; `left`, bytes alive behind the step that are neither gradients nor the loss.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def storages(values: Any) -> list[torch.UntypedStorage]:
    """A DTensor has none: it is a wrapper with the full shape."""
    return [x.untyped_storage() for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor) and not isinstance(x, DTensor)]


class Alive(TorchDispatchMode):
    def __init__(self, static: list[torch.UntypedStorage]) -> None:
        super().__init__()
        self.static = {StorageWeakRef(storage) for storage in static}
        self.there: dict[StorageWeakRef, int] = {}
        self.held: dict[int, Any] = {}
        self.gathered: list[set[StorageWeakRef]] = []
        self.peak = self.most_gathered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for storage in storages(made):
            ref = StorageWeakRef(storage)
            if ref not in self.static:
                self.there.setdefault(ref, storage.nbytes())
        if func.namespace == "_c10d_functional":
            if func.__name__.startswith("wait_tensor"):
                self.held.pop(id(args[0]), None)
            else:
                self.held[id(made)] = (args, made)
        self.peak = max(self.peak, self.now())
        self.most_gathered = max(self.most_gathered, self.blocks())
        return made

    def now(self) -> int:
        self.there = {ref: size for ref, size in self.there.items() if not ref.expired()}
        return sum(self.there.values())

    def blocks(self) -> int:
        self.gathered = [there for refs in self.gathered if (there := {ref for ref in refs if not ref.expired()})]
        return len(self.gathered)


def measure(path: Path) -> dict[str, Any]:
    file: dict[str, Any] = {"__name__": "exported", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), file)
    file["configure"](["--dry-run"])
    dist.init_process_group("fake", rank=0, world_size=math.prod(file["MESH_SHAPE"]), store=FakeStore())
    file["take_place"]()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = file["Model"](empty=True)
        inputs = [
            torch.zeros(file["local_shape"](shape, layout), dtype=dtype) for shape, layout, dtype, _ in file["INPUTS"].values()
        ]
        own = [p.to_local() for p in model.parameters()]
        with Alive(storages([own, inputs])) as alive:
            entries: list[int] = []
            for name in [name for name in file if "_unshard_" in name]:
                file[name] = gathering(file[name], alive)
            for name in file["BLOCKS"]:
                file[name] = entering(file[name], alive, entries)
            loss = model(*inputs)
            loss.backward()
            kept = storages([loss, [p.grad.to_local() for p in model.parameters() if p.grad is not None]])
            left = alive.now() - sum({StorageWeakRef(storage): storage.nbytes() for storage in kept}.values())
    return {"entries": entries, "peak": alive.peak, "gathered": alive.most_gathered, "left": left}


def gathering(real: Callable[..., Any], alive: Alive) -> Callable[..., Any]:
    def unshard(*arguments: Any) -> Any:
        found = real(*arguments)
        alive.gathered.append({StorageWeakRef(storage) for storage in storages(found)})
        return found

    return unshard


def entering(real: Callable[..., Any], alive: Alive, entries: list[int]) -> Callable[..., Any]:
    def block(*arguments: Any) -> Any:
        entries.append(alive.now())
        return real(*arguments)

    return block


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))), flush=True)
    os._exit(0)
