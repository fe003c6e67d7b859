"""Rows of collectives, sizes as in nccl-tests."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import numpy as np

from planner.accuracy.facts import of_collective
from planner.accuracy.labels import profile_for
from planner.accuracy.rows import Fields, Scored, Skip, count, counts, needed
from planner.costing.collective import GroupCurves, GroupShape, group_curves
from planner.hardware import HardwareProfile
from planner.redistribution import CollectiveKind
from planner.units import MIB

COLLECTIVE_COLUMNS = ("gpu", "gpus", "collective", "size_bytes", "time_us")
COLLECTIVE_OPTIONAL = ("source_url", "nodes", "fabric", "variant", "reliability")
GPUS_PER_NODE = 8
"""Of the machines measured, where a row does not say its nodes."""
NOT_NCCL = re.compile(r"MSCCL\+\+ kernel|peak", re.IGNORECASE)
NO_SWITCH = re.compile(r"int8|NVLS_ENABLE=0|\bRing\b|algo=Ring", re.IGNORECASE)

FROM_THE_HOST = re.compile(r"torch", re.IGNORECASE)
"""Timed around a blocking call in PyTorch: the operator and the launch are in the time."""


@dataclass
class CollectiveScorer:
    """Keeps the curves of each group shape on each machine and network. Measured alone: no other group uses the links."""

    curves: dict[tuple[str, str, GroupShape], tuple[HardwareProfile, GroupCurves]] = field(default_factory=dict)

    def score(self, row: Fields) -> Scored:
        (ranks,), (size, us) = counts(row, "gpus"), needed(row, "size_bytes", "time_us")
        nodes = count(row, "nodes", 1) if ranks <= GPUS_PER_NODE else counts(row, "nodes")[0]
        where = "in a node" if nodes == 1 else "across nodes"
        how = ">= 1 MiB" if size >= MIB else "< 1 MiB"
        label = f"{row['gpu']} {row['collective']} {ranks} ranks, {nodes} nodes, {int(size)} B, {row['fabric']}"
        scored = Scored(
            category=f"collectives {where}, {how}", source=row["source_url"] or "unnamed source", label=label, measured=us
        )
        try:
            predicted = self.us(row, nodes, ranks, size)
            shape = GroupShape(ranks, nodes, ranks // nodes)
            profile, _ = self._curves(row["gpu"], row["fabric"] if nodes > 1 else "", shape)
            known = of_collective(row, profile, shape, bool(FROM_THE_HOST.search(row["variant"])))
            return replace(scored, predicted=predicted, facts=known)
        except Skip as skip:
            return replace(scored, skipped=str(skip))

    def us(self, row: Fields, nodes: int, ranks: int, size: float) -> float:
        variant = row["variant"]
        if NOT_NCCL.search(variant):
            raise Skip("not NCCL, or a peak without its size")
        if row["reliability"].lower() == "low":
            raise Skip("source marked as of low reliability")
        if row["collective"] not in set(CollectiveKind):
            raise Skip(f"no collective {row['collective']!r}")
        if ranks < 2:
            raise Skip("one rank has nobody to exchange with")
        if ranks % nodes:
            raise Skip("ranks do not divide over the nodes")
        profile, curves = self._curves(row["gpu"], row["fabric"] if nodes > 1 else "", GroupShape(ranks, nodes, ranks // nodes))
        in_switch = not NO_SWITCH.search(variant) or "NVLS default" in variant
        host_us = profile.launch.eager_us + profile.launch.compiled_us if FROM_THE_HOST.search(variant) else 0.0
        return host_us + float(curves.us(CollectiveKind(row["collective"]), np.array([size]), in_switch=in_switch)[0])

    def _curves(self, gpu: str, fabric: str, shape: GroupShape) -> tuple[HardwareProfile, GroupCurves]:
        key = (gpu, fabric, shape)
        if key not in self.curves:
            profile = profile_for(gpu, fabric)
            self.curves[key] = (profile, group_curves(profile, shape))
        return self.curves[key]
