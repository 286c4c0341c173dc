# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Made megatron.zip: `python tests/data/make_megatron.py FOLDER KIND RANK`, with Megatron core 0.16 and PyTorch 2.13.

Four processes of that, RANK from 0 to 3, on a mesh of data 2 x tensor 2, train a GPT in bfloat16 for a step and save it
with its optimizer, as Megatron-LM's training does (its generate_state_dict and save_checkpoint). KIND is what it calls
distrib_optim_sharding_type, fully_reshardable or dp_reshardable, or `none` for an optimizer that is not distributed.
`sha256.json` holds sums of the tensors as Megatron reads them again; `reference.npz`, for fully_reshardable, the logits
of the model in float32, of its master weights. The model is that of experiments/gpt: RMSNorm, rotary positions, a
squared ReLU, no biases, tied embeddings. Megatron wants a GPU, so what it asks of CUDA is answered by the CPU.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import warnings
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

warnings.simplefilter("ignore")
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda: None

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing import ShardedObject  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

TENSOR, WORLD = 2, 4


class OnCPU(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else found


def squared_relu(x):
    return torch.nn.functional.relu(x) ** 2


def gpt(width, dtype):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=width,
        num_attention_heads=2,
        tensor_model_parallel_size=TENSOR,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        activation_func=squared_relu,
        add_bias_linear=False,
        hidden_dropout=0,
        attention_dropout=0,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=256,
        max_sequence_length=32,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
        parallel_output=False,
    )
    return config, model.to(dtype)


def step(config, model, distributed, inputs):
    layout = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    parallel = DistributedDataParallel(config, layout, model)
    adam = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=distributed
    )
    optimizer = get_megatron_optimizer(adam, [parallel])
    parallel(*inputs, labels=inputs[0] * 3 % 256).float().mean().backward()
    finalize_model_grads([parallel])
    optimizer.step()
    return optimizer


def save(folder, kind, model, optimizer):
    data, tensor = parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if kind != "none":
        content |= {"distrib_optim_sharding_type": kind, "distrib_optim_fully_reshardable_mem_efficient": False}
    metadata = content | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {"args": Namespace(num_layers=2), "checkpoint_version": 3.0, "iteration": 1}
    state["model"] = model.sharded_state_dict(metadata=metadata)
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=metadata)
    random = [{"torch_rng_state": torch.get_rng_state()}]
    state["rng_state"] = ShardedObject("rng_state", random, (1, TENSOR), (0, tensor), replica_id=data)
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(state, str(folder), content_metadata=content)


def logits(whole, inputs):
    """Of the whole master weights, in float32."""
    _, model = gpt(8, torch.float32)
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, param in model.named_parameters():
        key = re.sub(r"decoder\.layers\.\d+\.", "decoder.layers.", name)
        key = key.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        key = key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        value = whole["optimizer.state.param." + key]
        if layer := re.match(r"decoder\.layers\.(\d+)", name):
            value = value[int(layer[1])]
        for dim, (mine, all_) in enumerate(zip(param.shape, value.shape, strict=True)):
            if mine != all_:
                value = value.chunk(TENSOR, dim)[rank]
        param.data.copy_(value)
    return model(*inputs)


def main():
    folder, kind, rank = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611", RANK=rank, WORLD_SIZE=str(WORLD), LOCAL_RANK=rank)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=TENSOR)
    torch.manual_seed(0)
    tokens = torch.tensor([[3, 141, 59, 26, 53, 58]])
    inputs = tokens, torch.arange(6)[None], torch.ones(1, 1, 6, 6).tril() < 0.5
    config, model = gpt(8 if kind == "fully_reshardable" else 4, torch.bfloat16)
    optimizer = step(config, model, kind != "none", inputs)
    save(folder / "iter_0000001", kind, model, optimizer)
    found = dist_checkpointing.load_plain_tensors(str(folder / "iter_0000001"))
    whole = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    raw = {name: tensor.contiguous().view(torch.uint8).numpy() for name, tensor in whole.items()}
    sums = {name: hashlib.sha256(array.data).hexdigest() for name, array in raw.items()}
    out = logits(whole, inputs).detach().numpy() if kind == "fully_reshardable" else None
    if rank == "0":
        (folder / "latest_checkpointed_iteration.txt").write_text("1")
        (folder / "sha256.json").write_text(json.dumps(sums, indent=0))
        if out is not None:
            np.savez(folder / "reference.npz", tokens=tokens.numpy(), logits=out)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with OnCPU():
        main()
