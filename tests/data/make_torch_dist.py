# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Made torch_dist.zip: `python tests/data/make_torch_dist.py FOLDER RANK`, with PyTorch 2.13.

Four processes of that, RANK from 0 to 3, on a mesh of data 2 x model 2, save tensors that are cut along one dim, along
two, unevenly, or not at all, with torch.distributed.checkpoint, which is Megatron-LM's format `torch_dist` as well.
`reference.npz` holds the whole tensors.
"""

import os
import sys

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

folder, rank = sys.argv[1:]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29600", RANK=rank, WORLD_SIZE="4", LOCAL_RANK=rank)
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
torch.manual_seed(0)
whole = {
    "decoder.layers.mlp.linear_fc1.weight": (torch.randn(3, 12, 8), [Replicate(), Shard(1)]),
    "decoder.layers.mlp.linear_fc2.weight": (torch.randn(3, 8, 12), [Shard(0), Shard(2)]),
    "decoder.final_layernorm.weight": (torch.randn(8), [Replicate(), Replicate()]),
    "embedding.word_embeddings.weight": (torch.randn(13, 8).bfloat16(), [Replicate(), Shard(0)]),
    "output_layer.weight": (torch.randn(6, 8), [Shard(1), Shard(0)]),
    "optimizer.state.exp_avg.output_layer.weight": (torch.randn(6, 8), [Shard(1), Shard(0)]),
}
state = {name: distribute_tensor(tensor, mesh, places) for name, (tensor, places) in whole.items()}
dcp.save(state | {"iteration": 7, "plain": torch.arange(5)}, checkpoint_id=folder)
if rank == "0":
    arrays = {name: tensor.float().numpy() for name, (tensor, _) in whole.items()}
    np.savez(folder + "/reference.npz", plain=np.arange(5), **arrays)  # pyright: ignore[reportArgumentType]
torch.distributed.barrier()
torch.distributed.destroy_process_group()
