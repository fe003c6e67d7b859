"""Hardware profiles: what one kind of machine can do, every number with its unit and where it comes from.

A profile is a TOML file in `hardware_profiles/`; the network between its nodes is another, in `hardware_profiles/fabrics/`, and
any two go together. Each constant is a table with `value, unit, kind, source, date`, and for fitted ones `residual_pct, rows,
range`; a number without these does not load. Rates are SI per second, times µs, sizes bytes.

A profile may name a `base`: what it does not state itself is taken from there, marked `derived` with its origin in the source.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import InputError, UnknownHardwareError
from planner.hardware_changes import changed, joined_name, split_name

PROFILE_SCHEMA = 1
PROFILE_FOLDER = Path(__file__).parent / "hardware_profiles"
FABRIC_FOLDER = PROFILE_FOLDER / "fabrics"
CONSTANT_KINDS = ("datasheet", "measured", "fitted", "derived", "guess")
_REQUIRED = ("value", "unit", "kind", "source", "date")
_REQUIRED_IF_FITTED = ("residual_pct", "rows", "range")

Points = tuple[tuple[float, float], ...]
"""A curve as (x, y) pairs with rising x."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One number, curve or table of a profile.

    Attributes:
        value: a number, (x, y) pairs or rows of numbers.
        kind: `datasheet`; `measured` by the source; `fitted` to measurements of this hardware; `derived` from those of other
            hardware; `guess`.
        date: when it was looked up or fitted, ISO.
        residual_pct: fitted only: mean absolute error in % on data left out of the fit.
        rows, range: fitted only: how many measurements, and over which range they reach.
    """

    value: Any
    unit: str
    kind: str
    source: str
    date: str
    residual_pct: float | None = None
    rows: int | None = None
    range: str = ""

    def to_dict(self) -> dict[str, Any]:
        names = _REQUIRED + (_REQUIRED_IF_FITTED if self.kind == "fitted" else ())
        return {name: _thaw(getattr(self, name)) for name in names}


@dataclass(frozen=True, kw_only=True)
class GemmConstants:
    """`t = ([(flops / (peak·e))^p + (bytes / (hbm·h))^p]^(1/p) + launch_us) · exp r(m, n, k)`: a smooth maximum of two bounds.

    Attributes:
        surface_m, surface_n, surface_k: where r, the log of measured over that formula, is known; linear in the logs between.
        surface: r [m][n][k].
    """

    compute_efficiency: float
    memory_efficiency: float
    sharpness: float
    launch_us: float
    surface_m: tuple[float, ...]
    surface_n: tuple[float, ...]
    surface_k: tuple[float, ...]
    surface: tuple[tuple[tuple[float, ...], ...], ...]


@dataclass(frozen=True, kw_only=True)
class AttentionConstants:
    """`t = flops / (peak·efficiency) + launch_us`.

    Attributes:
        head_dims, tiles, seqs: where the efficiency of the causal forward pass is known; a query tile is 128 rows of one head.
        efficiency: fraction of peak [head_dim][tiles][seq], causal FLOPs counted half.
        causal_rate: (seq, rate of causal / rate of full attention), both in their own FLOPs.
        backward_rate: (seq, rate of backward / rate of forward).
        library_rate: per library (`fa2`, `fa3`, `cudnn`) (seq, its rate / rate of the tables); others run at the tables' rate.
        library: the one that plans run with.
    """

    head_dims: tuple[int, ...]
    tiles: tuple[float, ...]
    seqs: tuple[float, ...]
    efficiency: tuple[tuple[tuple[float, ...], ...], ...]
    causal_rate: Points
    backward_rate: Points
    library_rate: Mapping[str, Points]
    library: str
    backward_flop_factor: float
    launch_us: float


@dataclass(frozen=True, kw_only=True)
class PointwiseConstants:
    """`t = bytes / (hbm·efficiency) + launch_us`.

    Attributes:
        cached_rate: (bytes, fraction of the datasheet bandwidth) when a kernel runs again and again on the same tensors, which
            then stay in the cache. Benchmarks do that, training does not: plans are priced without it.
    """

    efficiency: float
    launch_us: float
    cached_rate: Points


@dataclass(frozen=True, kw_only=True)
class ScanConstants:
    """Chunked scan of linear attention, forward:
    `t = launch_us + (round_us + chunk_us · ⌈seq/chunk⌉) · max(1, batch · heads / tasks)`.

    Chunks of one sequence follow each other; as many heads as there are `tasks` run at once. A causal convolution over few
    tokens moves its channels in and out once: `t = bytes / (hbm · convolution_efficiency) + convolution_launch_us`.
    """

    chunk: int
    launch_us: float
    round_us: float
    chunk_us: float
    tasks: float
    convolution_efficiency: float
    convolution_launch_us: float


@dataclass(frozen=True, kw_only=True)
class LaunchConstants:
    """Time of the issuing CPU thread: per operator in eager PyTorch, per kernel of a compiled program, per collective call."""

    eager_us: float
    compiled_us: float
    collective_us: float


@dataclass(frozen=True, kw_only=True)
class NodeConstants:
    """Collectives among GPUs of one node.

    Attributes:
        link_bytes_per_s: datasheet rate of one GPU into the switch, one direction.
        nvls_min_ranks: from this many ranks on an all-reduce of floats is reduced inside the switch; None: never.
        curves: per collective kind and rank count, (full bytes, µs). `all_reduce_ring` is what an all-reduce takes that the
            switch cannot reduce; without it reduce-scatter and all-gather are added.
    """

    link_bytes_per_s: float
    nvls_min_ranks: int | None
    curves: Mapping[str, Mapping[int, Points]]


@dataclass(frozen=True, kw_only=True)
class FabricConstants:
    """The network between nodes.

    Attributes:
        nic_bytes_per_s: datasheet rate of the network card that one GPU owns, one direction.
        efficiency: per collective kind, the reached fraction of it.
        start_up: per collective kind, (full bytes, µs) that two nodes need beyond bytes / bandwidth.
    """

    nic_bytes_per_s: float
    efficiency: Mapping[str, float]
    start_up: Mapping[str, Points]


@dataclass(frozen=True, kw_only=True, eq=False)
class HardwareProfile:
    """One kind of machine. Compare by `content_hash`.

    Attributes:
        peak_flop_per_s: dense datasheet peak per dtype name; float32 is the plain unit, never TF32.
        usable_bytes: device memory a program can have; reserve_bytes: what communication buffers and the driver take of it.
        sustained_clock: clock of hours of training over that of the short bursts measured; slows FLOP-bound time only.
        fabric_name: the network between nodes.
        constants: every constant by dotted name, with its provenance.
    """

    name: str
    fabric_name: str
    title: str
    peak_flop_per_s: Mapping[str, float]
    hbm_bytes_per_s: float
    hbm_bytes: int
    usable_bytes: int
    reserve_bytes: int
    gpus_per_node: int
    sustained_clock: float
    gemm: GemmConstants
    attention: AttentionConstants
    pointwise: PointwiseConstants
    scan: ScanConstants
    launch: LaunchConstants
    node: NodeConstants
    fabric: FabricConstants
    constants: Mapping[str, Constant]
    content_hash: str

    @property
    def default_budget_bytes(self) -> int:
        """Memory budget of a plan when the user names none."""
        return self.usable_bytes - self.reserve_bytes

    def peak(self, dtype: str) -> float:
        """FLOP/s of a dtype. Raises UnknownHardwareError if the profile states none."""
        if dtype not in self.peak_flop_per_s:
            raise UnknownHardwareError(
                f"hardware profile {self.name} states no peak FLOP/s for {dtype}",
                hint=f"It has {', '.join(sorted(self.peak_flop_per_s))}; add [peak.{dtype}] to the profile.",
            )
        return self.peak_flop_per_s[dtype]

    def to_dict(self) -> dict[str, Any]:
        """The content of the TOML file: `from_dict` gives the same profile back."""
        tree: dict[str, Any] = {"schema": PROFILE_SCHEMA, "name": self.name, "title": self.title, "fabric_name": self.fabric_name}
        for key, constant in self.constants.items():
            *parents, last = key.split(".")
            branch = tree
            for parent in parents:
                branch = branch.setdefault(parent, {})
            branch[last] = constant.to_dict()
        return tree

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HardwareProfile:
        """Raises InputError naming the first key that is missing, unknown or without provenance."""
        return _Reader(data).profile()


def profile_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PROFILE_FOLDER.glob("*.toml")))


def fabric_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FABRIC_FOLDER.glob("*.toml")))


def load_profile(name: str) -> HardwareProfile:
    """A profile by name, `h100_sxm`, with the network that it names; `h100_sxm+roce_8x400g` is the same with another network,
    `h100_sxm@link=2` with changed fields (`hardware_changes.py`).

    Raises UnknownHardwareError listing what is known, InputError if a file is damaged or there is no such change.
    """
    machine, fabric, factors = split_name(name)
    if machine not in profile_names():
        raise UnknownHardwareError(f"unknown hardware {machine!r}", hint=f"Known: {', '.join(profile_names())}.")
    data = _with_base(_read(PROFILE_FOLDER / f"{machine}.toml"))
    default = data.get("fabric_name", "")
    fabric = fabric or default
    if fabric not in fabric_names():
        raise UnknownHardwareError(f"unknown fabric {fabric!r}", hint=f"Known: {', '.join(fabric_names())}.")
    whole = {**data, "fabric_name": fabric, "fabric": _read(FABRIC_FOLDER / f"{fabric}.toml")["fabric"]}
    whole["name"] = joined_name(machine, "" if fabric == default else fabric, factors)
    return HardwareProfile.from_dict(changed(whole, factors))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the hardware profile {path.name} is not TOML: {error}", hint="Check the line it names.") from error


def _with_base(data: dict[str, Any]) -> dict[str, Any]:
    """The profile with what its base adds. A kind of collective with curves of its own takes none from the base."""
    if "base" not in data:
        return data
    base = _with_base(_read(PROFILE_FOLDER / f"{data['base']}.toml"))
    return {key: value for key, value in _merged(data, _as_derived(base, data["base"])).items() if key != "base"}


def _merged(own: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        found[key] = _merged(value, base[key]) if both and not set(value) & set(_REQUIRED) else value
    return found


def _as_derived(tree: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The same constants, said to come from another profile; their residuals belong to that one and are dropped."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and set(value) & set(_REQUIRED):
            kept = {name: value[name] for name in _REQUIRED if name in value}
            prefix = "" if value.get("kind") == "derived" else f"as {origin}: "
            found[key] = {**kept, "kind": "derived", "source": f"{prefix}{value.get('source', '')}"}
        else:
            found[key] = _as_derived(value, origin) if isinstance(value, dict) else value
    return found


def parse_profile(toml: str) -> HardwareProfile:
    try:
        return HardwareProfile.from_dict(tomllib.loads(toml))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the hardware profile is not TOML: {error}", hint="Check the line it names.") from error


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list | tuple) else value


def _thaw(value: Any) -> Any:
    return list(map(_thaw, value)) if isinstance(value, tuple) else value


def _constants(data: Mapping[str, Any], prefix: str = "") -> dict[str, Constant]:
    """Dotted name -> constant, for every table that has a field of a constant."""
    found: dict[str, Constant] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if not isinstance(value, dict):
            raise InputError(
                f"hardware profile: {key} is a bare value", hint=f"Write a table [{key}] with {', '.join(_REQUIRED)}."
            )
        if set(value) & set(_REQUIRED):
            found[key] = _constant(key, value)
        else:
            found.update(_constants(value, f"{key}."))
    return found


def _constant(key: str, table: Mapping[str, Any]) -> Constant:
    required = _REQUIRED + (_REQUIRED_IF_FITTED if table.get("kind") == "fitted" else ())
    missing = [name for name in required if table.get(name) in (None, "")]
    unknown = sorted(set(table) - set(_REQUIRED) - set(_REQUIRED_IF_FITTED))
    if missing or unknown:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown fields {', '.join(unknown)}"
        raise InputError(f"hardware profile: {key} {problem}", hint="Say where the number comes from, or drop it.")
    if table["kind"] not in CONSTANT_KINDS:
        raise InputError(f"hardware profile: {key} has kind {table['kind']!r}", hint=f"Kinds are {', '.join(CONSTANT_KINDS)}.")
    return Constant(**{name: _freeze(value) for name, value in table.items()} | {"date": str(table["date"])})


class _Reader:
    """Takes constants out by name with a range check; what is left over at the end is an error."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        if data.get("schema") != PROFILE_SCHEMA:
            raise InputError(
                f"hardware profile: schema is {data.get('schema')!r}, this version reads {PROFILE_SCHEMA}",
                hint="Use a profile written for this version.",
            )
        if not data.get("name") or not data.get("title"):
            raise InputError("hardware profile: name or title is missing", hint="Write name = ... and title = ... at the top.")
        self.name, self.title, self.fabric_name = str(data["name"]), str(data["title"]), str(data.get("fabric_name", ""))
        self.constants = _constants({k: v for k, v in data.items() if k not in ("schema", "name", "title", "fabric_name")})
        self.left = dict(self.constants)

    def value(self, key: str) -> Any:
        if key not in self.left:
            raise InputError(f"hardware profile {self.name}: {key} is missing", hint=f"Add a table [{key}].")
        return self.left.pop(key).value

    def number(self, key: str, low: float, high: float) -> float:
        value = self.value(key)
        if not isinstance(value, int | float) or not low <= value <= high:
            raise InputError(
                f"hardware profile {self.name}: {key} is {value!r}", hint=f"It must be a number from {low:g} to {high:g}."
            )
        return float(value)

    def names(self, prefix: str) -> list[str]:
        return [key.removeprefix(f"{prefix}.") for key in self.left if key.startswith(f"{prefix}.")]

    def points(self, key: str, low: float, high: float) -> Points:
        value = self.value(key)
        ok = isinstance(value, tuple) and value and all(isinstance(p, tuple) and len(p) == 2 for p in value)
        if not ok or list(value) != sorted(value) or not all(x > 0 and low <= y <= high for x, y in value):
            raise InputError(
                f"hardware profile {self.name}: {key} is not a curve",
                hint=f"Write [[x, y], ...] with rising x over 0 and y from {low:g} to {high:g}.",
            )
        return tuple((float(x), float(y)) for x, y in value)

    def profile(self) -> HardwareProfile:
        constants = {key: self.constants[key] for key in sorted(self.constants)}
        content = [self.name, self.fabric_name, [[key, _thaw(constant.value)] for key, constant in constants.items()]]
        profile = HardwareProfile(
            name=self.name,
            title=self.title,
            fabric_name=self.fabric_name,
            peak_flop_per_s={dtype: self.number(f"peak.{dtype}", 1e12, 1e17) for dtype in self.names("peak")},
            hbm_bytes_per_s=self.number("memory.hbm_bytes_per_s", 1e11, 1e14),
            hbm_bytes=int(self.number("memory.hbm_bytes", 1e9, 1e13)),
            usable_bytes=int(self.number("memory.usable_bytes", 1e9, 1e13)),
            reserve_bytes=int(self.number("memory.reserve_bytes", 0, 1e11)),
            gpus_per_node=int(self.number("node.gpus_per_node", 1, 1024)),
            sustained_clock=self.number("clock.sustained", 0.3, 1),
            gemm=self.gemm(),
            attention=self.attention(),
            pointwise=PointwiseConstants(
                efficiency=self.number("pointwise.efficiency", 0.05, 1),
                launch_us=self.number("pointwise.launch_us", 0, 100),
                cached_rate=self.points("pointwise.cached_rate", 0.05, 5),
            ),
            scan=ScanConstants(
                chunk=int(self.number("scan.chunk", 1, 1e6)),
                launch_us=self.number("scan.launch_us", 0, 1000),
                round_us=self.number("scan.round_us", 0, 1000),
                chunk_us=self.number("scan.chunk_us", 0.01, 1000),
                tasks=self.number("scan.tasks", 1, 1e5),
                convolution_efficiency=self.number("scan.convolution_efficiency", 0.05, 1),
                convolution_launch_us=self.number("scan.convolution_launch_us", 0, 100),
            ),
            launch=LaunchConstants(
                eager_us=self.number("launch.eager_us", 0, 1000),
                compiled_us=self.number("launch.compiled_us", 0, 1000),
                collective_us=self.number("launch.collective_us", 0, 1000),
            ),
            node=self.node(),
            fabric=self.fabric(),
            constants=constants,
            content_hash=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16],
        )
        if self.left:
            raise InputError(
                f"hardware profile {self.name}: unknown constants {', '.join(sorted(self.left))}",
                hint="Check the spelling; a number nothing reads is not kept.",
            )
        return profile

    def gemm(self) -> GemmConstants:
        knots = [tuple(map(float, self.value(f"gemm.surface.{dim}"))) for dim in ("m", "n", "k")]
        table = self.value("gemm.surface.log_residual")
        shaped = len(table) == len(knots[0]) and all(len(row) == len(knots[1]) for row in table)
        cells = [cell for row in table for column in row for cell in column] if shaped else []
        if len(cells) != math.prod(map(len, knots)) or not all(abs(cell) <= 2 for cell in cells):
            raise InputError(
                f"hardware profile {self.name}: gemm.surface.log_residual is not a table of log residuals",
                hint=f"It needs {' x '.join(str(len(k)) for k in knots)} numbers (m, n, k), each from -2 to 2.",
            )
        return GemmConstants(
            compute_efficiency=self.number("gemm.compute_efficiency", 0.05, 1),
            memory_efficiency=self.number("gemm.memory_efficiency", 0.05, 1),
            sharpness=self.number("gemm.sharpness", 1, 20),
            launch_us=self.number("gemm.launch_us", 0, 100),
            surface_m=knots[0],
            surface_n=knots[1],
            surface_k=knots[2],
            surface=table,
        )

    def attention(self) -> AttentionConstants:
        dims = sorted(int(name.removeprefix("d")) for name in self.names("attention.efficiency"))
        tiles = tuple(map(float, self.value("attention.tiles")))
        seqs = tuple(map(float, self.value("attention.seqs")))
        tables = [self.value(f"attention.efficiency.d{dim}") for dim in dims]
        for dim, table in zip(dims, tables, strict=True):
            shaped = len(table) == len(tiles) and all(len(row) == len(seqs) for row in table)
            if not shaped or not all(0 < x <= 1 for row in table for x in row):
                raise InputError(
                    f"hardware profile {self.name}: attention.efficiency.d{dim} is not a table of fractions",
                    hint=f"It needs {len(tiles)} rows (tiles) of {len(seqs)} numbers (seqs) over 0, at most 1.",
                )
        return AttentionConstants(
            head_dims=tuple(dims),
            tiles=tiles,
            seqs=seqs,
            efficiency=tuple(tables),
            causal_rate=self.points("attention.causal_rate", 0.05, 1),
            backward_rate=self.points("attention.backward_rate", 0.05, 1),
            library=str(self.value("attention.library")),
            library_rate={
                name: self.points(f"attention.library_rate.{name}", 0.05, 5) for name in self.names("attention.library_rate")
            },
            backward_flop_factor=self.number("attention.backward_flop_factor", 1, 5),
            launch_us=self.number("attention.launch_us", 0, 100),
        )

    def node(self) -> NodeConstants:
        curves: dict[str, dict[int, Points]] = {}
        for name in self.names("node.collective"):
            kind, _, ranks = name.partition(".n")
            curves.setdefault(kind, {})[int(ranks)] = self.points(f"node.collective.{name}", 0.1, 1e9)
        return NodeConstants(
            link_bytes_per_s=self.number("node.link_bytes_per_s", 1e9, 1e13),
            nvls_min_ranks=int(self.number("node.nvls_min_ranks", 0, 1e6)) or None,
            curves={kind: dict(sorted(of_ranks.items())) for kind, of_ranks in curves.items()},
        )

    def fabric(self) -> FabricConstants:
        efficiency = {kind: self.number(f"fabric.efficiency.{kind}", 0.05, 1) for kind in self.names("fabric.efficiency")}
        return FabricConstants(
            nic_bytes_per_s=self.number("fabric.nic_bytes_per_s", 1e8, 1e13),
            efficiency=efficiency,
            start_up={kind: self.points(f"fabric.start_up.{kind}", 0.1, 1e6) for kind in self.names("fabric.start_up")},
        )
