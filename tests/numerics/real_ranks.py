"""Run on each rank: one step of an exported file on real processes, in fp32 with the values of its check.

    torchrun --nproc_per_node=4 tests/numerics/real_ranks.py train.py OUT.pt

Rank 0 writes loss, full gradients, the parameters and inputs, and the collectives that every rank issued.
"""

import importlib.util
import sys

import torch
import torch.distributed as dist


def main(script: str, out: str) -> None:
    spec = importlib.util.spec_from_file_location("exported", script)
    assert spec is not None and spec.loader is not None
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    train.configure(["--check", "--mesh", ",".join(map(str, train.PLANNED_MESH))])
    torch.set_num_threads(1)
    train.start()
    values = {name: train.initial(name, shape, rule) for name, (shape, _, _, rule) in train.PARAMS.items()}
    inputs = train.full_batch(0)
    outputs, grads, buffers = train.run_step(inputs, values)
    assert buffers == {}
    train.count_calls()
    _, calls, collectives = train.counted_step(train.Model(values), train.cut(inputs))
    found = train.differences(calls, collectives)
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, (float(outputs["loss"]), found, {phase: dict(c) for phase, c in collectives.items()}))
    if dist.get_rank() == 0:
        torch.save({"grads": grads, "ranks": every, "values": {"parameters": values, "buffers": buffers, "inputs": inputs}}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
