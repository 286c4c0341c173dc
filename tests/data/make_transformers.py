# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Made transformers.zip: `python tests/data/make_transformers.py FOLDER`, with transformers 5.24 and PyTorch 2.13.

Small models with random weights, as `save_pretrained` writes them, and the logits that they give.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

llama = LlamaConfig(
    vocab_size=20,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    tie_word_embeddings=False,
    attn_implementation="eager",
)
gpt2 = GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager")
torch.manual_seed(0)
for name, model in (("llama", LlamaForCausalLM(llama)), ("gpt2", GPT2LMHeadModel(gpt2))):
    model.eval()
    for param in model.parameters():
        param.data += 0.2 * torch.randn_like(param)
    folder = Path(sys.argv[1]) / name
    model.save_pretrained(folder, max_shard_size="8KB")
    tokens = torch.arange(24).reshape(2, 12) * 7 % 20
    np.savez(folder / "logits.npz", tokens=tokens.numpy(), logits=model(tokens).logits.detach().numpy())
