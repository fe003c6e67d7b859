"""Trace and plan the demo afresh and write `llama3-8b.graph.json.gz` and `llama3-8b.plan.json.gz` beside this file."""

import gzip
from pathlib import Path

from planner import Mesh, ModelRequest, PlanRequest, make_plan

REQUEST = PlanRequest(model=ModelRequest(model="llama3-8b", batch=64), mesh=Mesh.parse("dp=8,tp=8"))


def main() -> None:
    folder = Path(__file__).parent
    found = make_plan(REQUEST, progress=print)
    found.graph.save(folder / "llama3-8b.graph.json.gz")
    (folder / "llama3-8b.plan.json.gz").write_bytes(gzip.compress(found.plan.dumps().encode(), mtime=0))
    print(f"{found.plan.report.status}, gap {found.plan.report.gap:.1e}, {found.plan.objective_us / 1e3:.1f} ms")


if __name__ == "__main__":
    main()
