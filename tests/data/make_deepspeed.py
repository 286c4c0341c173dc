# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Made deepspeed.zip: `DS_ACCELERATOR=cpu python tests/data/make_deepspeed.py STAGE DTYPE FOLDER RANK 3`.

Three processes of that, RANK from 0 to 2, with DeepSpeed 0.19.8 and PyTorch 2.13, train a small model with a tied
embedding, two groups of params, a frozen layer and a buffer. `reference.npz` is what DeepSpeed's own zero_to_fp32 makes
of what they save.
"""

import os
import sys

import deepspeed
import deepspeed.comm.torch
import numpy as np
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

stage, dtype, folder, rank, size = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])
place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + stage), "LOCAL_SIZE": str(size)}
os.environ.update(place, RANK=rank, WORLD_SIZE=str(size), LOCAL_RANK=rank)
torch.set_num_threads(1)
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled first
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(11, 5)
        self.a, self.b, self.frozen = torch.nn.Linear(5, 7), torch.nn.Linear(7, 5), torch.nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.head = torch.nn.Linear(5, 11, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)))

    def forward(self, x):
        return self.head(self.b(torch.tanh(self.a(self.wte(x))))).float().logsumexp(-1).mean()


model = Model()
params = [param for param in model.parameters() if param.requires_grad]
groups = [[param for param in params if param.ndim > 1], [param for param in params if param.ndim == 1]]
config = {
    "train_batch_size": 2 * size,
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": dtype == "bf16"},
}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2), config=config
)
for _ in range(2):
    engine.backward(engine(torch.randint(0, 11, (2, 4))))
    engine.step()
engine.save_checkpoint(folder, tag="global_step2")
torch.distributed.barrier()
if rank == "0":
    state = get_fp32_state_dict_from_zero_checkpoint(folder, tag="global_step2")
    arrays = {name: tensor.contiguous().detach().float().numpy() for name, tensor in state.items()}
    np.savez(folder + "/reference.npz", **arrays)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
