"""The Slurm batch file beside an exported script, sized from the mesh."""

from __future__ import annotations

import shlex

from planner.errors import ExportError
from planner.plan import Plan


def slurm_script(plan: Plan, script: str) -> str:
    """A batch file that launches `script` (a file name) on as many nodes as the plan's mesh needs. Not run on a cluster by us.

    Slurm sends SIGTERM five minutes before the time limit, at which the script saves and ends; torchrun, which would kill it
    after 30 s, is told to wait. It numbers the ranks node by node, so that the last mesh axes stay inside a node.

    Raises:
        ExportError: the mesh does not fill whole nodes.
    """
    devices, per_node = plan.mesh.num_devices, min(plan.gpus_per_node, plan.mesh.num_devices)
    if devices % per_node:
        raise ExportError(
            f"the mesh {plan.mesh} has {devices} devices, no whole number of nodes of {per_node}",
            hint="Plan for a mesh whose size is a multiple of --gpus-per-node.",
        )
    return f"""#!/bin/bash
#SBATCH --job-name=plan-{plan.plan_id}
#SBATCH --nodes={devices // per_node}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
#SBATCH --exclusive
#SBATCH --signal=TERM@300
#SBATCH --output=%x-%j.out
# mesh {plan.mesh}; start with: sbatch --time=12:00:00 THIS_FILE --data '/path/*.bin' --steps 1000
# five minutes before the time limit the script saves and ends, and torchrun reports SIGTERM by exit code 1; a later job goes on
# where an earlier one ended: add --resume checkpoints
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
srun --cpu-bind=none torchrun --nnodes="$SLURM_NNODES" --nproc_per_node={per_node} --rdzv_id="$SLURM_JOB_ID" \\
    --rdzv_backend=c10d --rdzv_endpoint="$head:29500" --shutdown-timeout=280 \\
    {shlex.quote(script)} --compile --save checkpoints --log-json steps.jsonl "$@"
"""
