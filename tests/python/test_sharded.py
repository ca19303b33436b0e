"""The optimizers under FSDP, ZeroRedundancyOptimizer and with DTensors, on ranks of this machine,
compared with torch.optim.AdamW on the whole model. Needs torch."""

import copy
import functools
import gc
import os
import pathlib
import re
import sys
import tempfile
import unittest
import warnings

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing
    from torch import nn
    from torch.distributed.checkpoint import state_dict as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardingStrategy, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                                   parallelize_module)
except ImportError as error:
    raise unittest.SkipTest(f"needs PyTorch with ranks: {error}")

from ballast import OffloadAdamW, OffloadLion
from support import OnRanks

CLIP = 0.01
STEPS = 4
WIDTH = 7  # uneven for 2 and 3 ranks
LR = 1e-2


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH), nn.Tanh(),
                         nn.Linear(WIDTH, 1)).to(dtype)


def batch(step, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, WIDTH, generator=generator).to(dtype)


def loss_of(model, step, rank, dtype=torch.float32):
    return model(batch(step, rank, dtype)).float().pow(2).mean()


@functools.cache
def reference(ranks, steps=STEPS, same_batch=False):
    """Weights and norms of torch's optimizer with the mean loss of all ranks, and the optimizer."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        losses = [loss_of(model, step, 0 if same_batch else r) for r in range(ranks)]
        (sum(losses) / ranks).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return [p.detach() for p in model.parameters()], norms, optimizer.state_dict()


def whole(parameters):
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().float() for p in parameters]


def compare(weights, norms, same_batch=False):
    right, right_norms, _ = reference(dist.get_world_size(), len(norms), same_batch)
    for mine, its in zip(weights, right if weights else [], strict=True):
        torch.testing.assert_close(mine.reshape(its.shape), its, rtol=0, atol=2e-6)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(right_norms), rtol=1e-5, atol=0)


def train(model, optimizer, rank, steps=range(STEPS), dtype=torch.float32):
    """Returns the norms of all gradients."""
    inner = getattr(optimizer, "optim", optimizer)
    norms = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank, dtype).backward()
        optimizer.step()
        norms.append(inner.grad_norm)
    inner.synchronize()
    return norms


def fsdp(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD is deprecated
        return FSDP(model, device_id=torch.device("cpu"), **options)


def fsdp_kinds():
    ranks = dist.get_world_size()
    for original in (True, False):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP,
                         ShardingStrategy.NO_SHARD):
            yield {"use_orig_params": original, "sharding_strategy": strategy}
        shape = (2, 2) if ranks == 4 else (1, ranks)
        yield {"use_orig_params": original, "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
               "device_mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))}


def fsdp2(dtype=torch.float32, mesh=None):
    model = net(dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ours(parameters, **options):
    return OffloadAdamW(parameters, **{"lr": LR, "max_grad_norm": CLIP, **options})


# Cases: each runs on all ranks in the same order.

def ddp_trains(rank, folder):
    model = nn.parallel.DistributedDataParallel(net())
    for overlap in (False, "check"):
        model.module.load_state_dict(net().state_dict())
        norms = train(model, ours(model, overlap=overlap), rank)
        compare(whole(model.parameters()), norms)


def fsdp1_trains(rank, folder):
    for kind in fsdp_kinds():
        for overlap in (False, "check"):
            model = fsdp(net(), **kind)
            optimizer = ours(model.parameters(), overlap=overlap)
            norms = train(model, optimizer, rank)
            with FSDP.summon_full_params(model):
                compare(whole(model.parameters()), norms)


def fsdp1_of_layers_trains(rank, folder):
    """Some ranks have no elements of small layers; one module of several has another strategy."""
    model = net()
    model[0] = fsdp(model[0], use_orig_params=True)
    model[4] = fsdp(model[4], use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)
    model = fsdp(model, use_orig_params=True)
    norms = train(model, ours(model.parameters(), model=model), rank)
    with FSDP.summon_full_params(model):
        compare(whole(model.parameters()), norms)


def zero_trains(rank, folder):
    for options in ({}, {"overlap": "check"}, {"parameters_as_bucket_view": True, "overlap": "check"}):
        model = nn.parallel.DistributedDataParallel(net())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=OffloadAdamW, lr=LR,
                                            max_grad_norm=CLIP, **options)
        norms = train(model, optimizer, rank)
        compare(whole(model.parameters()), norms)


def zero_trains_where_a_rank_has_no_parameters(rank, folder):
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=OffloadAdamW, lr=LR)
    assert (len(optimizer.optim.param_groups[0]["params"]) == 0) == (rank > 0)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert optimizer.optim.grad_norm == 2.0
    model.weight.grad[0, 0] = float("inf")
    optimizer.step()
    assert optimizer.optim.skipped_steps == 1
    optimizer.optim.save(folder)
    optimizer.optim.load(folder)


def fsdp2_trains(rank, folder):
    for overlap in (False, "check"):
        model = fsdp2()
        optimizer = ours(model.named_parameters(), overlap=overlap)
        norms = train(model, optimizer, rank)
        compare(whole(model.parameters()), norms)


def fsdp2_and_tensor_parallel_train(rank, folder):
    ranks = dist.get_world_size()
    for shape, both in (((ranks, 1), True), ((1, ranks), True), ((1, ranks), False)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = net()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model = fully_shard(model, mesh=mesh["dp"]) if both else model
        same = shape[0] == 1
        norms = train(model, ours(model), 0 if same else rank)
        compare(whole(model.parameters()), norms, same_batch=same)


def fsdp2_with_replicas_trains(rank, folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replica", "shard"))
    model = fsdp2(mesh=mesh)
    norms = train(model, ours(model), rank)
    compare(whole(model.parameters()), norms)


def bf16_has_a_master(rank, folder):
    """The masters follow torch's fp32 weights from the same rounded start."""
    for wrap in (fsdp2, lambda dtype: fsdp(net(dtype), use_orig_params=True)):
        model = wrap(torch.bfloat16)
        optimizer = ours(model.parameters())
        norms = train(model, optimizer, rank, dtype=torch.bfloat16)
        for p in model.parameters():
            state = optimizer.state[p]
            if not state:
                continue
            assert type(state["master"]) is (DTensor if isinstance(p, DTensor) else torch.Tensor)
            assert state["master"].dtype == torch.float32
            assert torch.equal(*(t.to_local() if isinstance(t, DTensor) else t
                                 for t in (state["master"].to(torch.bfloat16), p.detach())))
        right = reference(dist.get_world_size())[1]
        torch.testing.assert_close(torch.tensor(norms), torch.tensor(right), rtol=0.05, atol=0)


def non_finite_gradients_skip_the_step_of_all(rank, folder):
    models = [fsdp(net(), **kind) for kind in fsdp_kinds()] + [fsdp2()]
    for model in models:
        optimizer = ours(model.parameters(), max_grad_norm=None)
        loss_of(model, 0, rank).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if rank == dist.get_world_size() - 1:
            grad = grads[0].to_local() if isinstance(grads[0], DTensor) else grads[0]
            grad.view(-1)[0] = float("nan")
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        assert optimizer.skipped_steps == 1
        for p, old in zip(model.parameters(), before):
            assert torch.equal(*(t.to_local() if isinstance(t, DTensor) else t
                                 for t in (p.detach(), old)))
        optimizer.zero_grad()
        loss_of(model, 1, rank).backward()
        optimizer.step()
        assert optimizer.skipped_steps == 1


def a_group_sums_the_parts_of_ranks(rank, folder):
    """Each rank has its own parameter, and only the first has a gradient in the second step."""
    parameter = nn.Parameter(torch.zeros(rank + 1))
    optimizer = OffloadAdamW([parameter], lr=LR, max_grad_norm=1.0, process_group=dist.group.WORLD)
    parameter.grad = torch.full((rank + 1,), 2.0)
    optimizer.step()
    ranks = dist.get_world_size()
    assert abs(optimizer.grad_norm - (4.0 * ranks * (ranks + 1) / 2) ** 0.5) < 1e-12
    parameter.grad = torch.full((1,), 3.0) if rank == 0 else None
    optimizer.step()
    assert optimizer.grad_norm == 3.0
    assert float(optimizer.state[parameter]["step"]) == (2.0 if rank == 0 else 1.0)


def a_failing_closure_stops_all(rank, folder):
    model = fsdp2()
    optimizer = ours(model)
    start = [p.to_local().clone() for p in model.parameters()]

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0, rank)
        loss.backward()
        if rank == 1 and fails:
            raise ArithmeticError("no data")
        return loss

    fails = True
    try:
        optimizer.step(closure)
        raise AssertionError("the step was taken")
    except (ArithmeticError, RuntimeError) as error:
        assert isinstance(error, ArithmeticError) == (rank == 1), error
        assert rank == 1 or "another rank has failed" in str(error), error
    assert all(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), start))
    fails = False
    optimizer.step(closure)
    compare(whole(model.parameters()), [optimizer.grad_norm])


def checkpoints_resume(rank, folder):
    """Through torch.distributed.checkpoint, as with torch's optimizer."""
    import torch.distributed.checkpoint as checkpoint

    wraps = {"fsdp2": fsdp2, "original": lambda: fsdp(net(), use_orig_params=True),
             "flat": lambda: fsdp(net(), use_orig_params=False)}
    for name, wrap in wraps.items():
        # Without this, torch cannot load what it has saved of FSDP1, also with its own optimizers.
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=name != "fsdp2")
        model = wrap()
        optimizer = ours(model.parameters())
        norms = train(model, optimizer, rank, range(2))
        states = {"model": dcp.get_model_state_dict(model),
                  "optimizer": dcp.get_optimizer_state_dict(model, optimizer, options=options)}
        place = f"{folder}/{name}"
        checkpoint.save(states, checkpoint_id=place)
        model = wrap()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = ours(model.parameters())
        states = {"model": dcp.get_model_state_dict(model),
                  "optimizer": dcp.get_optimizer_state_dict(model, optimizer, options=options)}
        checkpoint.load(states, checkpoint_id=place)
        dcp.set_model_state_dict(model, states["model"])
        dcp.set_optimizer_state_dict(model, optimizer, states["optimizer"], options=options)
        norms += train(model, optimizer, rank, range(2, STEPS))
        whole_states = dcp.get_model_state_dict(
            model, options=dcp.StateDictOptions(full_state_dict=True, cpu_offload=True))
        torch.testing.assert_close(torch.tensor(norms),
                                   torch.tensor(reference(dist.get_world_size())[1]), rtol=1e-5, atol=0)
        full = dcp.get_optimizer_state_dict(
            model, optimizer, options=dcp.StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            compare(list(whole_states.values()), norms)
            right = reference(dist.get_world_size())[2]["state"]
            for (key, _), its in zip(net().named_parameters(), right.values()):
                mine = full["state"][key]
                assert float(mine["step"]) == STEPS
                torch.testing.assert_close(mine["exp_avg_sq"], its["exp_avg_sq"], rtol=1e-4, atol=1e-12)


def a_rank_without_elements_takes_part(rank, folder):
    """torch.distributed.checkpoint makes states with a step on those ranks alone that have none."""
    ranks = dist.get_world_size()
    for overlap in (False, "check"):
        model = fsdp(nn.Linear(ranks - 1, 1, bias=False), use_orig_params=True)
        optimizer = ours(model.parameters(), max_grad_norm=1e-3, overlap=overlap)
        parameter = next(model.parameters())
        assert (parameter.numel() == 0) == (rank == ranks - 1)
        options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
        for step in range(2):
            model(torch.ones(1, ranks - 1)).sum().backward()
            optimizer.step()
            assert abs(optimizer.grad_norm - (ranks - 1) ** 0.5) < 1e-6
            optimizer.zero_grad()
            saved = dcp.get_optimizer_state_dict(model, optimizer, options=options)
        if rank == 0:
            assert saved["state"]["weight"]["exp_avg"].shape == (1, ranks - 1)
        again = ours(model.parameters(), max_grad_norm=1e-3)
        dcp.set_optimizer_state_dict(model, again, saved, options=dcp.StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True))
        if parameter.numel():
            assert float(again.state[parameter]["step"]) == 2


def masters_of_dtensors_follow_loaded_weights(rank, folder):
    model = fsdp2(torch.bfloat16)
    optimizer = ours(model)
    train(model, optimizer, rank, range(1), dtype=torch.bfloat16)
    for change in (lambda p: p.copy_(p + 1), lambda p: p.to_local().copy_(p.to_local() + 1)):
        for parameter in model.parameters():
            with torch.no_grad():
                change(parameter)
            if parameter.to_local().numel():
                master = optimizer.state[parameter]["master"].to_local()
                assert torch.equal(master, parameter.to_local().float())


def states_are_dtensors(rank, folder):
    model = fsdp2()
    optimizer = ours(model)
    train(model, optimizer, rank, range(2))
    theirs = torch.optim.AdamW(model.parameters(), lr=LR)
    theirs.load_state_dict(optimizer.state_dict())
    parameter = next(iter(model.parameters()))
    for source in (optimizer.state, theirs.state):
        moment = source[parameter]["exp_avg"]
        assert isinstance(moment, DTensor) and moment.placements == parameter.placements
        assert moment.shape == parameter.shape
    again = ours(model)
    again.load_state_dict(theirs.state_dict())
    assert torch.equal(again.state[parameter]["exp_avg"].to_local(),
                       optimizer.state[parameter]["exp_avg"].to_local())
    optimizer.state[parameter]["exp_avg"].mul_(2.0)
    assert torch.equal(optimizer.state[parameter]["exp_avg"].to_local(),
                       2.0 * again.state[parameter]["exp_avg"].to_local())
    optimizer.state[parameter]["exp_avg"] = again.state[parameter]["exp_avg"]
    wrong = optimizer.state_dict()
    wrong["state"][0]["exp_avg"] = wrong["state"][0]["exp_avg"].full_tensor()
    refuses(lambda: optimizer.load_state_dict(wrong), "no placements")


def fsdp1_states_round_trip(rank, folder):
    for original in (True, False):
        model = fsdp(net(), use_orig_params=original)
        optimizer = ours(model.parameters())
        train(model, optimizer, rank, range(2))
        full = FSDP.optim_state_dict(model, optimizer)
        train(model, optimizer, rank, range(2, STEPS))
        last = FSDP.optim_state_dict(model, optimizer)
        for state in last["state"].values():
            assert float(state["step"]) == STEPS
        other = fsdp(net(), use_orig_params=original)
        other_optimizer = ours(other.parameters())
        train(other, other_optimizer, rank, range(2))
        other_optimizer.load_state_dict(FSDP.optim_state_dict_to_load(other, other_optimizer, full))
        train(other, other_optimizer, rank, range(2, STEPS))
        again = FSDP.optim_state_dict(other, other_optimizer)
        for name, state in last["state"].items():
            for entry, value in state.items():
                torch.testing.assert_close(value, again["state"][name][entry])


def zero_states_round_trip(rank, folder):
    def make():
        model = nn.parallel.DistributedDataParallel(net())
        return model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=OffloadAdamW, lr=LR,
                                              max_grad_norm=CLIP)

    model, optimizer = make()
    norms = train(model, optimizer, rank, range(2))
    optimizer.consolidate_state_dict(to=0)
    holder = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(holder)
    for in_group in (False, True):  # the step, as apex has it
        saved = copy.deepcopy(holder[0])
        if in_group:
            for state in saved["state"].values():
                del state["step"]
            for group in saved["param_groups"]:
                group["step"] = 2
        other, other_optimizer = make()
        other.load_state_dict(model.state_dict())
        other_optimizer.load_state_dict(saved)
        compare(whole(other.parameters()), norms + train(other, other_optimizer, rank,
                                                         range(2, STEPS)))
    saved = copy.deepcopy(holder[0])
    for state in saved["state"].values():
        del state["step"]
    other, other_optimizer = make()
    other_optimizer.load_state_dict(saved)
    loss_of(other, 0, rank).backward()
    refuses(other_optimizer.step, "has no 'step'|another rank")


def files_are_of_ranks(rank, folder):
    wraps = {"fsdp2": fsdp2, "original": lambda: fsdp(net(), use_orig_params=True)}
    for name, wrap in wraps.items():
        model = wrap()
        optimizer = ours(model.named_parameters())
        norms = train(model, optimizer, rank, range(2))
        file = optimizer.save(f"{folder}/saved-{name}")
        assert file.endswith(f"optimizer-rank-{rank}-of-{dist.get_world_size()}.safetensors")
        again = ours(model.named_parameters())
        again.load(f"{folder}/saved-{name}")
        norms += train(model, again, rank, range(2, STEPS))
        with FSDP.summon_full_params(model) if name == "original" else warnings.catch_warnings():
            compare(whole(model.parameters()), norms)


def unknown_distributions_are_refused(rank, folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]))
    optimizer = ours([parameter])
    parameter.grad = distribute_tensor(torch.ones(8, 4), mesh, [Replicate()])
    refuses(optimizer.step, "redistribute")
    refuses(lambda: ours([parameter], process_group="world"), "^process_group: ", TypeError)
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())]
    refuses(lambda: ours([parameter], process_group=alone[(rank + 1) % len(alone)]), "^process_group: ")
    model = fsdp(net(), use_orig_params=True)
    gc.collect()
    gc.freeze()
    optimizers = ours(model.parameters()), ours(model.parameters(), model=model)
    gc.unfreeze()
    loss_of(model, 0, rank).backward()
    refuses(optimizers[0].step, "pass the wrapped model as the argument model")
    optimizers[1].step()
    compare([], [optimizers[1].grad_norm])
    # Two shards of one rank each, and one of all: the other ranks may have other parameters.
    models = [fsdp(nn.Linear(4, 4), process_group=group, use_orig_params=True)
              for group in (dist.new_group([0, 1]), dist.group.WORLD) if rank in (0, 1)
              or group is dist.group.WORLD]
    if dist.get_world_size() == 3:
        optimizer = ours([p for model in models for p in model.parameters()])
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        refuses(optimizer.step, "make an optimizer for each process group" if rank < 2
                else "another rank has failed")


def other_rules_work(rank, folder):
    model = fsdp2()
    optimizer = OffloadLion(model, lr=1e-3, max_grad_norm=CLIP)
    norms = train(model, optimizer, rank)
    assert abs(norms[0] / reference(dist.get_world_size())[1][0] - 1) < 1e-5


def refuses(call, pattern, kind=(ValueError, TypeError, RuntimeError)):
    try:
        call()
    except kind as error:
        if not re.search(pattern, str(error)):
            raise
        assert "\n" not in str(error)
        return
    raise AssertionError(f"nothing refused, expected {pattern!r}")


CASES = [ddp_trains, fsdp1_trains, fsdp1_of_layers_trains, zero_trains,
         zero_trains_where_a_rank_has_no_parameters, fsdp2_trains, fsdp2_and_tensor_parallel_train,
         fsdp2_with_replicas_trains, bf16_has_a_master, non_finite_gradients_skip_the_step_of_all,
         a_group_sums_the_parts_of_ranks, a_failing_closure_stops_all, checkpoints_resume,
         a_rank_without_elements_takes_part, masters_of_dtensors_follow_loaded_weights,
         states_are_dtensors, fsdp1_states_round_trip, zero_states_round_trip, files_are_of_ranks,
         unknown_distributions_are_refused, other_rules_work]


@unittest.skipUnless(sys.platform == "linux", "gloo on the loopback interface")
class Sharded(OnRanks, unittest.TestCase):
    cases, seconds = CASES, 40


if __name__ == "__main__":
    unittest.main()
