"""Params to and from the Hugging Face world: safetensors files, with its names, shapes and shards."""
