"""Run in a process of its own: every single move of a lattice, by the helper of exported files, on threads as ranks.

    python -m tests.numerics.moves_on_threads "a=2,b=2" "8,4"

The truth is made from full tensors by code that shares nothing with the helper. Prints one line per wrong move and the number of
moves; exit code 1 if any is wrong.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from planner.graph import TensorMeta
from planner.mesh import Mesh
from planner.placement import P_MAX, S0, P, R, identifier
from planner.redistribution import CollectiveKind, MoveGroup, move_groups
from planner.strategy import Lattice

TEMPLATES = Path(__file__).parents[2] / "planner" / "exporting" / "templates"


def exported_helpers(mesh: Mesh) -> dict:
    """The namespace of the redistribution part of an exported file."""
    head = (TEMPLATES / "head.py.txt").read_text()
    verify = (TEMPLATES / "verify.py.txt").read_text()
    part = head[head.index("local = threading.local()") :]
    counter = verify[verify.index("class CollectiveCounter") : verify.index("def counted_step")]
    axes = range(mesh.num_axes)
    groups = [c for n in range(1, mesh.num_axes + 1) for c in itertools.combinations(axes, n)]
    space: dict = {"GROUPS": groups, "MESH_NAMES": mesh.axis_names}
    prelude = (
        "import math, threading, torch\nfrom collections import Counter\n"
        "from torch.utils._python_dispatch import TorchDispatchMode\n"
    )
    exec(compile(prelude + part + "\n" + counter, "helpers", "exec"), space)
    return space


def expected(full: torch.Tensor, codes: tuple[int, ...], mesh: Mesh, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The local piece of `full` in a layout: splits outermost first; pending sums by unequal weights, maxima by a drop."""
    piece = full
    for code, size, at in zip(codes, mesh.axis_sizes, coordinate, strict=True):
        if code >= S0:
            length = piece.shape[code - S0] // size
            piece = piece.narrow(code - S0, at * length, length)
        elif code == P:
            weights = [2.0**-n for n in range(1, size)]
            piece = piece * ([*weights, 1 - sum(weights)][at])
        elif code == P_MAX:
            piece = piece - at
    return piece


def moves(mesh: Mesh, shape: tuple[int, ...], partial_code: int) -> list[tuple[MoveGroup, tuple[int, ...], tuple[int, ...]]]:
    meta = TensorMeta(shape, "float32")
    lattice = Lattice.build(meta, mesh, dims=tuple(range(len(shape))), partial_code=partial_code)
    found = []
    for group in move_groups(lattice, to_pending=partial_code == P):
        for source, target in zip(group.source, group.target, strict=True):
            found.append((group, tuple(map(int, lattice.codes[source])), tuple(map(int, lattice.codes[target]))))
    return found


def check_rank(space: dict, mesh: Mesh, shape: tuple[int, ...], wrong: list[str]) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    local = space["local"]
    local.threads = True
    local.place = space["Place"](init_device_mesh("cpu", mesh.axis_sizes, mesh_dim_names=mesh.axis_names), mesh.axis_sizes)
    coordinate = tuple(local.place.coordinate)
    for partial_code in (P, P_MAX):
        for group, source, target in moves(mesh, shape, partial_code):
            pending = all((source[axis], target[axis]) == (R, P) for axis in group.axes)
            full = torch.arange(float(math.prod(shape))).reshape(shape) * 8
            x = expected(full, source, mesh, coordinate)
            if x.dim() > 1:
                x = x.transpose(0, -1).contiguous().transpose(0, -1)  # not contiguous: the helper must not care
            with space["CollectiveCounter"]() as counter:
                got = space["redistribute"](x, _marks(source), _marks(target))
            want = expected(full, target, mesh, coordinate)
            if pending:  # the first device along the axes keeps what it had
                want = x if not any(coordinate[axis] for axis in group.axes) else torch.zeros_like(x)
            label = "" if group.kind is None else f"{group.kind}@{'+'.join(mesh.axis_names[a] for a in group.axes)}"
            counted = " ".join(f"{count} {name}" for name, count in counter.counts.items())
            if got.shape != want.shape or not torch.allclose(got, want) or counted != (f"1 {label}" if label else ""):
                wrong.append(f"rank {dist.get_rank()} {source} -> {target}: issued {counted!r}, planned {label!r}")
            if (group.kind is None and not pending) or group.kind is CollectiveKind.ALL_GATHER:
                assert got.is_contiguous()


def _marks(codes: tuple[int, ...]) -> tuple[str, ...]:
    from planner.placement import from_codes

    return tuple(identifier((one,)) for one in from_codes(codes))


def main(mesh_text: str, shape_text: str) -> int:
    from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup, _install_threaded_pg

    mesh, shape = Mesh.parse(mesh_text), tuple(int(size) for size in shape_text.split(","))
    space = exported_helpers(mesh)
    torch.set_num_threads(1)
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    store, wrong, errors = dist.HashStore(), [], []

    def work(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=mesh.num_devices, store=store)
            check_rank(space, mesh, shape, wrong)
        except BaseException as error:
            errors.append(f"{type(error).__name__}: {error}")
            ProcessLocalGroup.exception_handle(error)

    ranks = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(mesh.num_devices)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    for line in [*errors, *wrong][:20]:
        print(line)
    number = sum(len(moves(mesh, shape, code)) for code in (P, P_MAX))
    print(f"{number} moves on {mesh}, {len(wrong)} wrong, {len(errors)} errors", flush=True)
    return 1 if wrong or errors else 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
