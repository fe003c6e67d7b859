"""Which architectures of transformers trace, plan, export and equal the library's own module, and what is only replicated.

    python -m tests.benchmarks.architectures [NAME ...] [--no-export] [--limit SECONDS]

Each is built from its class's own defaults (published dimensions) at reduced depth, in a process of its own with a time limit.
Recurrent layers are unrolled over the sequence by the library's code, so theirs is short.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """`fields` changes the defaults: no dropout, and where layers differ, so that a shallow model has every kind."""

    model: str
    fields: str = ""
    layers: int = 2
    seq: int = 512

    @property
    def source(self) -> str:
        return f"hf:{self.model}" + (f",{self.fields}" if self.fields else "")


CASES = (
    Case("llama"),
    Case("qwen2"),
    Case("qwen3"),
    Case("mistral"),
    Case("mixtral"),
    Case("qwen3_moe"),
    Case("gpt2", "attn_pdrop=0.0,embd_pdrop=0.0,resid_pdrop=0.0"),
    Case("gpt_neox"),
    Case("falcon"),
    Case("phi"),
    Case("phi3"),
    Case("gemma"),
    Case("gemma2"),
    Case("gemma3_text"),
    Case("opt", "dropout=0.0"),
    Case("bloom", "hidden_size=1024,n_head=16"),
    Case("olmo2"),
    Case("cohere"),
    Case("gpt_oss"),
    Case("deepseek_v3", "first_k_dense_replace=1"),
    Case("mamba2", layers=1),
    Case("jamba", "attn_layer_period=2,attn_layer_offset=1", seq=16),
    Case("qwen3_next", "num_hidden_layers=2,layer_types=['linear_attention','full_attention']", seq=64),
)


def measure(case: Case, *, export: bool) -> dict[str, Any]:
    """Runs in the child. Every stage adds its result; the first failure is the last entry."""
    from planner import Mesh, ModelRequest, PlannerError, Workbench, pipeline

    found: dict[str, Any] = {}
    began = time.process_time()
    try:
        graph = pipeline.trace(ModelRequest(model=case.source, batch=8, seq=case.seq, layers=case.layers))
        found["traces"] = len(graph.nodes)
        bench = Workbench.build(graph, Mesh.parse("dp=2,tp=4"))
        plan = bench.solve(bench.default_constraints(10**15), exact=False)
        found["plans"] = f"{100 * plan.report.gap:.2g} %"
        found["replicated"] = dict(Counter(graph.nodes[graph.node_by_key[k]].op for k in plan.replicated_for_lack_of_a_rule))
        if export:
            made = pipeline.export(plan, graph)
            found["exports"] = made.report["numbers"]["reference"]["largest_error"]
    except PlannerError as error:
        found["failed"] = error.message
        found["output"] = error.details.get("output", "")
    found["cpu_s"] = round(time.process_time() - began, 1)
    return found


def run(case: Case, *, export: bool, limit_s: float) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.architectures",
        "--child",
        case.model,
        *([] if export else ["--no-export"]),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env=os.environ)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {limit_s:.0f} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def row(case: Case, found: dict[str, Any]) -> str:
    replicated = ", ".join(f"{count} {op}" for op, count in found.get("replicated", {}).items()) or "nothing"
    nodes = f"{found['traces']} nodes" if "traces" in found else "no"
    cells = [
        case.model,
        nodes,
        found.get("plans", "no"),
        str(found.get("exports", "no")),
        replicated,
        f"{found.get('cpu_s', '')}",
    ]
    line = "| " + " | ".join(cells) + " |"
    return line + (f"\n    {found['failed']}\n{found.get('output', '')}".rstrip() if "failed" in found else "")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--no-export", action="store_true")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--child", metavar="NAME")
    args = parser.parse_args(argv)
    if args.child:
        case = next(case for case in CASES if case.model == args.child)
        print(json.dumps(measure(case, export=not args.no_export)))
        return 0
    chosen = [case for case in CASES if not args.names or case.model in args.names]
    print("| architecture | traces | plans, gap | exports, largest error of a gradient | replicated for lack of a rule | CPU s |")
    print("|---|---|---|---|---|---|")
    results = []
    for case in chosen:
        results.append(run(case, export=not args.no_export, limit_s=args.limit))
        print(row(case, results[-1]), flush=True)
    counts = {stage: sum(stage in found for found in results) for stage in ("traces", "plans", "exports")}
    print(f"of {len(chosen)}: {counts['traces']} trace, {counts['plans']} plan, {counts['exports']} export and check")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
