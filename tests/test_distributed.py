"""Training on two processes (gloo, CPU), by DDP and by FSDP2: the parameters that one process reaches alone."""

import itertools

import pytest
import torch
from language_model import LanguageModel, losses, text
from tolerances import assert_rounding_only
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mha_ext

PROCESSES, STEPS = 2, 3

pytestmark = pytest.mark.skipif(not distributed.is_gloo_available(), reason="this torch has no gloo")


def half(batch, rank):
    """Every second pair of entries: both halves have as many tokens that count, so their mean loss is the whole's."""
    return tuple(x.view(-1, PROCESSES, PROCESSES, *x.shape[1:])[:, rank].flatten(0, 1) for x in batch)


def full(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def ddp(model):
    return DistributedDataParallel(model)


def fsdp(model):
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sharded = model.layers[0].attention.in_proj_weight.to_local()
    assert sharded.shape[0] * PROCESSES == model.layers[0].attention.in_proj_weight.shape[0]
    return model


def swapped_model():
    """torch's attention in a model that is there, exchanged before it is wrapped."""
    model = LanguageModel(attention=nn.MultiheadAttention)
    assert len(mha_ext.swap_attention(model).swapped) == 2
    return model


WRAPS, MODELS = {"ddp": ddp, "fsdp": fsdp}, {"ours": LanguageModel, "swapped": swapped_model}


def train(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    try:
        for wrap, make in itertools.product(WRAPS, MODELS):
            model = MODELS[make]()
            seen = losses(model, [half(text(8), rank)] * STEPS, WRAPS[wrap](model))
            parameters = [full(p).detach() for p in model.parameters()]
            torch.save((seen, parameters), f"{folder}/{wrap}_{make}_{rank}.pt")
    finally:
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of what the processes trained, all of it in one start of them."""
    folder = tmp_path_factory.mktemp("trained")
    multiprocessing.spawn(train, (str(folder),), nprocs=PROCESSES)
    return folder


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_training_on_two_processes(wrap, make, trained):
    alone = MODELS[make]()
    want = losses(alone, [text(8)] * STEPS)
    assert not torch.equal(want[0], want[-1])
    given = [torch.load(trained / f"{wrap}_{make}_{rank}.pt") for rank in range(PROCESSES)]
    every = list(alone.parameters())
    assert_rounding_only(torch.stack([seen for seen, _ in given]).mean(0), want, every, "losses")
    for rank, (_, parameters) in enumerate(given):
        assert_rounding_only(parameters, every, every, f"process {rank}")
