"""What one device issues in a step, in order: kernels, copies and collectives, with the tensors that they read and write.

A plan says what is done; a list of actions says in which order and what waits for what. Both the timeline and the live-range
memory walk it. How it works on a GPU: compute runs on one stream in issue order. A collective runs on the stream of its link
class, after the compute that was issued before it. `awaits` lists the collectives that an action must not overtake.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.redistribution import Collective

COMPUTE, IN_NODE, ACROSS_NODES = "compute", "in-node links", "links across nodes"
LANES = (COMPUTE, IN_NODE, ACROSS_NODES)
SERIAL, OVERLAPPED = "serial", "overlapped"
SCHEDULES = (SERIAL, OVERLAPPED)
"""`serial`: each collective is awaited where it is issued. `overlapped`: parameters of the next block are gathered while one
block runs; gradients are reduced while backward goes on and awaited at the end of the step."""

MATH, MEMORY, COMMUNICATION = "math", "memory", "communication"
"""What holds an action up: arithmetic units, device memory, links. Decides how much it suffers beside other work."""

GRADIENT, GATHERED, ACTIVATION, TEMPORARY = "gradients", "gathered parameters", "saved activations", "temporaries"
KEPT = "kept parameters"


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A piece of device memory that one action allocates; views of it are not listed.

    Attributes:
        num_bytes: on one device.
        shape: local shape of the tensor that owns it.
        category: GRADIENT, GATHERED (made of parameters alone), KEPT (the same, but kept from forward to backward), ACTIVATION
            (made in forward, read in backward) or TEMPORARY.
    """

    key: str
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    placements: str
    module: str
    category: str


@dataclass(frozen=True, kw_only=True)
class Action:
    """One thing that the CPU issues.

    Attributes:
        name: node key, or what is moved and how.
        lane: COMPUTE, IN_NODE or ACROSS_NODES.
        us: time if nothing else runs.
        bound: MATH, MEMORY or COMMUNICATION.
        launches: kernels that the CPU launches for it, 0 if it is part of another's kernel.
        block: `forward 3` and the like.
        awaits: numbers of earlier actions on other lanes that must be done first.
        reads, writes: numbers of storages; `writes` are allocated here.
        axes: mesh axes of its collective by name, "" for none.
        part: the part of its block (`schedule.Part`): `unshard` gathers parameters ahead, `reduce` sums gradients behind.
        has_workspace: a kernel that takes scratch memory (products, attention).
    """

    name: str
    lane: str
    us: float
    bound: str
    launches: int
    block: str
    awaits: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    collective: Collective | None = None
    axes: str = ""
    part: str = ""
    has_workspace: bool = False

    @property
    def label(self) -> str:
        """`all_gather@dp`, or "" for work that sends nothing."""
        return "" if self.collective is None else f"{self.collective.kind}@{self.axes}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Actions:
    """A step.

    Attributes:
        held: storages that must still be there at the end: gradients, values left in buffers, the loss.
        calls: (first, last) action of each block function that computes. Its caller holds what it hands in until it returns.
        static_bytes: what is there all the time, by name: parameters, optimizer state, buffers, inputs.
        group_sizes: ranks of each communicator group in use.
        model_flops: of the whole step on all devices, nothing repeated counted.
        math_dtype: dtype in which most of them are done, "" if there are none.
    """

    schedule: str
    actions: tuple[Action, ...]
    storages: tuple[Storage, ...]
    held: frozenset[int] = frozenset()
    calls: tuple[tuple[int, int], ...] = ()
    static_bytes: dict[str, int] = field(default_factory=dict)
    group_sizes: tuple[int, ...] = ()
    num_devices: int = 1
    model_flops: float = 0.0
    math_dtype: str = ""
